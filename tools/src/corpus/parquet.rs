//! Parquet in and out. A run writes JSON lines beside the output, which a later run can continue; the
//! table is made of them when the run is complete.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use arrow_array::builder::{Float32Builder, Int64Builder, ListBuilder, StringBuilder};
use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Int64Type};
use arrow_array::{Array, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::arrow_reader::{
    ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::arrow::{ArrowWriter, ProjectionMask};
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use qhx_base::{Error, ErrorKind, Result};
use serde::Deserialize;
use serde_json::value::RawValue;
use tempfile::NamedTempFile;

use super::row::{MAX_LINE, Vector};

/// Rows that are held in memory at a time.
const BATCH: usize = 1024;
/// Bytes of a row group, about.
const ROW_GROUP: usize = 64 << 20;

fn fail(path: &Path, kind: ErrorKind, why: impl std::fmt::Display) -> Error {
    Error::new(kind, format!("{}: {why}", path.display()))
}

fn open(path: &Path) -> Result<ParquetRecordBatchReaderBuilder<File>> {
    let file = File::open(path).map_err(|e| Error::io(ErrorKind::Prompt, path, e))?;
    // Without the writer's Arrow types, a column of strings has one type whoever wrote it.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    ParquetRecordBatchReaderBuilder::try_new_with_options(file, options)
        .map_err(|e| fail(path, ErrorKind::Prompt, format_args!("no readable Parquet file: {e}")))
}

/// A column by its name, of a type.
fn require(builder: &ParquetRecordBatchReaderBuilder<File>, name: &str) -> Option<DataType> {
    builder.schema().field_with_name(name).ok().map(|field| field.data_type().clone())
}

fn read(
    path: &Path,
    builder: ParquetRecordBatchReaderBuilder<File>,
    columns: &[&str],
) -> Result<ParquetRecordBatchReader> {
    let mask = ProjectionMask::columns(builder.parquet_schema(), columns.iter().copied());
    builder
        .with_projection(mask)
        .with_batch_size(BATCH)
        .build()
        .map_err(|e| fail(path, ErrorKind::Prompt, e))
}

/// The texts of a table, and what they are where a column says so.
pub(super) struct TextPipeline {
    name: String,
    reader: ParquetRecordBatchReader,
    batch: Option<(StringArray, Option<StringArray>)>,
    /// Row of the batch that is next.
    next: usize,
}

impl TextPipeline {
    /// Opens a file with a column `text` of strings and, optionally, one `role`. Returns the
    /// number of its rows, too.
    pub fn open(path: &Path) -> Result<(Self, u64)> {
        let builder = open(path)?;
        let strings = |column: &str| match require(&builder, column) {
            None => Ok(false),
            Some(DataType::Utf8) => Ok(true),
            Some(other) => Err(fail(
                path,
                ErrorKind::Prompt,
                format_args!("column {column:?} is of type {other}, expected strings"),
            )),
        };
        if !strings("text")? {
            let found: Vec<_> = builder.schema().fields().iter().map(|f| f.name()).collect();
            return Err(fail(
                path,
                ErrorKind::Prompt,
                format_args!("there is no column \"text\"; there are {found:?}"),
            )
            .hint("rename the column that holds the texts"));
        }
        let columns: &[&str] = if strings("role")? { &["text", "role"] } else { &["text"] };
        let rows = builder.metadata().file_metadata().num_rows();
        let reader = read(path, builder, columns)?;
        let name = path.display().to_string();
        Ok((Self { name, reader, batch: None, next: 0 }, u64::try_from(rows).unwrap_or(0)))
    }

    /// The next text, and its role if the row has one. `index` is its place in the file, for
    /// messages.
    pub fn next(&mut self, index: u64) -> Result<Option<(String, Option<String>)>> {
        loop {
            if let Some((texts, roles)) = &self.batch
                && self.next < texts.len()
            {
                let row = self.next;
                self.next += 1;
                if texts.is_null(row) {
                    return Err(Error::new(
                        ErrorKind::Prompt,
                        format!("{}: row {index} has no text", self.name),
                    ));
                }
                if texts.value(row).len() > MAX_LINE {
                    return Err(Error::new(
                        ErrorKind::Prompt,
                        format!("{}: row {index} is longer than {} MiB", self.name, MAX_LINE >> 20),
                    )
                    .hint("split the text"));
                }
                let role = roles.as_ref().filter(|roles| roles.is_valid(row));
                let role = role.map(|roles| roles.value(row).to_owned());
                return Ok(Some((texts.value(row).to_owned(), role)));
            }
            let Some(batch) = self.reader.next() else { return Ok(None) };
            let batch = batch
                .map_err(|e| Error::caused(ErrorKind::Prompt, format_args!("{}", self.name), e))?;
            let column = |name: &str| {
                batch.column_by_name(name).and_then(|c| c.as_string_opt::<i32>()).cloned()
            };
            self.batch = column("text").map(|texts| (texts, column("role")));
            self.next = 0;
        }
    }
}

/// A line as it was written; the digits of the vector as they stand there, since they give the same
/// f32 only when they are read as f32.
#[derive(Deserialize)]
struct Line<'a> {
    index: i64,
    #[serde(alias = "image")]
    text: String,
    #[serde(borrow)]
    embedding: &'a RawValue,
}

struct Columns {
    index: Int64Builder,
    text: StringBuilder,
    embedding: ListBuilder<Float32Builder>,
    rows: usize,
}

impl Columns {
    fn schema() -> Arc<Schema> {
        let value = Field::new("item", DataType::Float32, false);
        Arc::new(Schema::new(vec![
            Field::new("index", DataType::Int64, false),
            Field::new("text", DataType::Utf8, false),
            Field::new("embedding", DataType::List(Arc::new(value)), false),
        ]))
    }

    fn new() -> Self {
        let value = Field::new("item", DataType::Float32, false);
        Self {
            index: Int64Builder::new(),
            text: StringBuilder::new(),
            embedding: ListBuilder::new(Float32Builder::new()).with_field(value),
            rows: 0,
        }
    }

    /// Appends a line; `None` when it is no line of `qhx embed`.
    fn push(&mut self, line: &[u8]) -> Option<()> {
        let line: Line<'_> = serde_json::from_slice(line).ok()?;
        let digits = line.embedding.get().trim().strip_prefix('[')?.strip_suffix(']')?;
        for value in digits.split(',').filter(|v| !v.trim().is_empty()) {
            self.embedding.values().append_value(value.trim().parse().ok()?);
        }
        self.embedding.append(true);
        self.index.append_value(line.index);
        self.text.append_value(line.text);
        self.rows += 1;
        Some(())
    }

    fn finish(&mut self) -> Result<RecordBatch, arrow_schema::ArrowError> {
        self.rows = 0;
        let columns: Vec<Arc<dyn Array>> = vec![
            Arc::new(self.index.finish()),
            Arc::new(self.text.finish()),
            Arc::new(self.embedding.finish()),
        ];
        RecordBatch::try_new(Self::schema(), columns)
    }
}

/// Makes the table `out` of JSON lines. It appears whole, or not at all.
pub(super) fn publish(lines: &Path, out: &Path) -> Result<()> {
    let io = |e: std::io::Error| Error::io(ErrorKind::Io, out, e);
    let file = unfinished(out).map_err(io)?;
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .build();
    let wrong = |e: parquet::errors::ParquetError| fail(out, ErrorKind::Io, e);
    let mut writer =
        ArrowWriter::try_new(file.as_file(), Columns::schema(), Some(properties)).map_err(wrong)?;
    let mut columns = Columns::new();
    let source = File::open(lines).map_err(|e| Error::io(ErrorKind::Io, lines, e))?;
    let mut reader = BufReader::with_capacity(1 << 20, source);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let length = reader.read_until(b'\n', &mut line);
        let end = length.map_err(|e| Error::io(ErrorKind::Io, lines, e))? == 0;
        if !end {
            columns.push(&line).ok_or_else(|| {
                let why = format_args!("line {number} is no line of qhx embed");
                fail(lines, ErrorKind::Io, why).hint("--overwrite begins again")
            })?;
        }
        if columns.rows == BATCH || end {
            let batch = columns.finish().map_err(|e| fail(out, ErrorKind::Io, e))?;
            writer.write(&batch).map_err(wrong)?;
            if writer.in_progress_size() > ROW_GROUP {
                writer.flush().map_err(wrong)?;
            }
        }
        if end {
            break;
        }
    }
    writer.close().map_err(wrong)?;
    file.as_file().sync_data().map_err(io)?;
    file.persist(out).map_err(|e| io(e.error))?;
    Ok(())
}

/// A file with the rights of any new file, which gets its name when it is complete.
fn unfinished(target: &Path) -> std::io::Result<NamedTempFile> {
    let folder = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    builder.prefix(".qhx-embed-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder)
}

/// Writes the rows of a table as JSON lines, so that a run can go on behind them.
pub(super) fn unpack(table: &Path, lines: &Path) -> Result<()> {
    let io = |e: std::io::Error| Error::io(ErrorKind::Io, lines, e);
    let strange =
        || fail(table, ErrorKind::Usage, "no output of qhx embed").hint("--overwrite replaces it");
    let builder = open(table)?;
    let columns = ["index", "text", "embedding"];
    if columns.iter().any(|column| require(&builder, column).is_none()) {
        return Err(strange());
    }
    let mut file = BufWriter::new(unfinished(lines).map_err(io)?);
    for batch in read(table, builder, &columns)? {
        let batch = batch.map_err(|e| fail(table, ErrorKind::Prompt, e))?;
        let index = batch.column_by_name("index").and_then(|c| c.as_primitive_opt::<Int64Type>());
        let text = batch.column_by_name("text").and_then(|c| c.as_string_opt::<i32>());
        let vectors = batch.column_by_name("embedding").and_then(|c| c.as_list_opt::<i32>());
        let (Some(index), Some(text), Some(vectors)) = (index, text, vectors) else {
            return Err(strange());
        };
        for row in 0..batch.num_rows() {
            let vector = vectors.value(row);
            let values = vector.as_primitive_opt::<Float32Type>().ok_or_else(strange)?;
            let line = Vector {
                index: u64::try_from(index.value(row)).map_err(|_| strange())?,
                text: Some(text.value(row)),
                image: None,
                embedding: values.values(),
                sparse: None,
                multi: None,
            };
            serde_json::to_writer(&mut file, &line).map_err(|e| io(e.into()))?;
            file.write_all(b"\n").map_err(io)?;
        }
    }
    let file = file.into_inner().map_err(|e| io(e.into_error()))?;
    file.persist(lines).map_err(|e| io(e.error))?;
    Ok(())
}
