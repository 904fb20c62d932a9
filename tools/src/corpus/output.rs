//! A file of vectors that a later run can continue.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use qhx_base::hash::hex;
use qhx_base::{Error, ErrorKind, Result};
use same_file::Handle;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::fingerprint::Fingerprint;
use super::record::{Progress, Record, Slot};
use super::row::{Row, Vector};
use super::rows::Rows;
use super::{check_parquet, is_parquet, refused};

/// Max time between flushes: a machine that stops loses no more.
const FLUSH: Duration = Duration::from_secs(1);

/// A line of an earlier run.
#[derive(Debug, Deserialize)]
struct Written {
    index: u64,
    #[serde(alias = "image")]
    text: String,
    embedding: Vec<f32>,
}

/// A file that no other run writes, and that is not touched yet.
#[derive(Debug)]
pub struct Claimed {
    /// The output.
    output: PathBuf,
    /// File that rows are written to: the output itself, or a file beside it that becomes the output when it is
    /// complete.
    lines: PathBuf,
    slot: Slot,
    record: Record,
    resume: bool,
}

/// Handling of an output that is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Existing {
    /// It is an error.
    #[default]
    Refuse,
    /// A run goes on where it ends.
    Resume,
    /// It is replaced when the run is complete.
    Replace,
}

impl Claimed {
    /// Finds out whether a file may be written, and keeps other runs from it.
    ///
    /// # Errors
    /// When it is there already and is to be refused, when another run writes it, when it is the input, and when this
    /// crate was built without Parquet, which it is called.
    pub fn new(output: &Path, existing: Existing, rows: &Rows) -> Result<Self> {
        check_parquet(output)?;
        // Behind a link: what the link leads to is written, beside it the rest.
        let output = &output.canonicalize().unwrap_or_else(|_| output.to_owned());
        let unfinished = &unfinished(output);
        for file in [output, unfinished] {
            if file.exists() && !file.is_file() {
                return Err(refused(file, "not a regular file").hint(
                    "without --output, rows go to standard output; --json prints whole vectors",
                ));
            }
            if there(file) && existing == Existing::Refuse {
                return Err(refused(file, "the output is there already")
                    .hint("--resume goes on where it ends, --overwrite replaces it"));
            }
        }
        let record = Record::lock(output)?;
        for file in [output, unfinished, record.path()] {
            if rows.input().is_some_and(|input| Handle::from_path(file).is_ok_and(|f| f == *input))
            {
                return Err(
                    refused(file, "input and output are one file").hint("write to another output")
                );
            }
        }
        let mut claimed = Self {
            output: output.clone(),
            lines: output.clone(),
            slot: Slot::Output,
            record,
            resume: existing == Existing::Resume,
        };
        claimed.recover(unfinished)?;
        // A table cannot be continued, and what is replaced stays until there is something in its place.
        if is_parquet(output) || existing == Existing::Replace || there(unfinished) {
            claimed.lines.clone_from(unfinished);
            claimed.slot = Slot::Unfinished;
        }
        Ok(claimed)
    }

    /// Writes down what a run did that ended between making its rows the output and saying so.
    fn recover(&mut self, unfinished: &Path) -> Result<()> {
        if self.record.was_publishing() && !unfinished.exists() {
            self.record.published()?;
        }
        Ok(())
    }

    /// Opens the file. A run that resumes checks what is there against its own settings and its input, passes over the
    /// texts that are done, and cuts off a row that was not finished. `dim`: values of a vector.
    ///
    /// # Errors
    /// When the file cannot be written, and when what is there was made otherwise or of other texts.
    pub fn open(
        mut self,
        settings: Fingerprint,
        dim: usize,
        rows: &mut Rows,
    ) -> Result<VectorFile> {
        #[cfg(feature = "parquet")]
        if self.resume && is_parquet(&self.output) && !there(&self.lines) && there(&self.output) {
            // Before the rows are there for a later run to find.
            let made = self.record.made(Slot::Output).cloned().ok_or_else(|| self.unknown())?;
            compare(&self.output, &made, &settings)?;
            super::parquet::unpack(&self.output, &self.lines)?;
            self.record.set(Slot::Unfinished, made)?;
        }
        let path = &self.lines;
        let fail = |e: std::io::Error| Error::io(ErrorKind::Io, path, e);
        let mut made = Progress { with: settings, ..Progress::default() };
        let mut digest = Sha256::new();
        let mut end = 0;
        if self.resume && there(path) {
            let then = self.record.made(self.slot).ok_or_else(|| self.unknown())?;
            compare(path, then, &made.with)?;
            let done = Done::check(path, then, dim, rows)?;
            (made.rows, digest, end) = (done.rows, done.digest, done.end);
        }
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(false).open(path).map_err(fail)?;
        file.set_len(end).map_err(fail)?;
        file.seek(SeekFrom::Start(end)).map_err(fail)?;
        if let (Slot::Unfinished, Ok(replaced)) = (self.slot, self.output.metadata()) {
            file.set_permissions(replaced.permissions()).map_err(fail)?;
        }
        // After the file is cut: a record of rows that are not there does no harm, the reverse would.
        made.of = hex(digest.clone().finalize());
        self.record.set(self.slot, made.clone())?;
        Ok(VectorFile {
            writer: BufWriter::with_capacity(1 << 20, file),
            flushed: Instant::now(),
            resumed: made.rows,
            made,
            digest,
            line: Vec::new(),
            output: self.output,
            path: self.lines,
            slot: self.slot,
            record: self.record,
        })
    }

    fn unknown(&self) -> Error {
        let record = self.record.path().display();
        refused(
            &self.lines,
            format_args!("there is no record of how its rows were made in {record}"),
        )
        .hint("move the record along with its output; --overwrite begins again")
    }
}

/// Refuses rows that were made otherwise.
fn compare(path: &Path, then: &Progress, now: &Fingerprint) -> Result<()> {
    match then.with.differences(now) {
        None => Ok(()),
        Some(words) => Err(refused(path, format_args!("its rows were made otherwise: {words}"))
            .hint("resume with the same bundle and options, or write to another output")),
    }
}

/// Rows of an earlier run that are those of this input.
struct Done {
    rows: u64,
    /// Bytes that they take.
    end: u64,
    /// Over the same rows of the input.
    digest: Sha256,
}

impl Done {
    /// Compares the rows that were written for sure with the input, which is then behind them.
    fn check(path: &Path, made: &Progress, dim: usize, rows: &mut Rows) -> Result<Self> {
        let fail = |e: std::io::Error| Error::io(ErrorKind::Io, path, e);
        let differ = |why: String| {
            refused(path, why)
                .hint("resume with the same --input and --shard, or write to another output")
        };
        let mut reader = BufReader::with_capacity(1 << 20, File::open(path).map_err(fail)?);
        let mut line = Vec::new();
        let mut done = Self { rows: 0, end: 0, digest: Sha256::new() };
        while done.rows < made.rows {
            line.clear();
            let length = reader.read_until(b'\n', &mut line).map_err(fail)?;
            if line.last() != Some(&b'\n') {
                break;
            }
            let number = done.rows + 1;
            let written: Written = serde_json::from_slice(&line)
                .map_err(|e| differ(format!("line {number} is no line of qhx embed: {e}")))?;
            let width = written.embedding.len();
            if width != dim {
                return Err(differ(format!(
                    "line {number} has a vector of {width} values, the model makes {dim}"
                )));
            }
            let Some(row) = rows.next()? else {
                return Err(differ(format!(
                    "line {number} has no text in the input, which is shorter"
                )));
            };
            if (row.index, &row.text) != (written.index, &written.text) {
                return Err(differ(format!(
                    "line {number} is text {} {:?}, the input has text {} {:?} there",
                    written.index,
                    start(&written.text),
                    row.index,
                    start(&row.text)
                )));
            }
            add(&mut done.digest, &row);
            done.rows = number;
            done.end += length as u64;
        }
        // Lines have no roles. Of a file that somebody has cut, only the texts are compared.
        if done.rows == made.rows && hex(done.digest.clone().finalize()) != made.of {
            return Err(differ("a role in the input is another one than it was".to_owned()));
        }
        Ok(done)
    }
}

/// The beginning of a text, for messages.
fn start(text: &str) -> &str {
    const SHOWN: usize = 60;
    text.char_indices().nth(SHOWN).and_then(|(end, _)| text.get(..end)).unwrap_or(text)
}

/// Adds a row of the input: its index, its role and its text, each of a length that is known before it.
fn add(digest: &mut Sha256, row: &Row) {
    digest.update(row.index.to_le_bytes());
    digest.update([row.role as u8 + 2 * u8::from(row.image)]);
    digest.update((row.text.len() as u64).to_le_bytes());
    digest.update(row.text.as_bytes());
}

/// A file that vectors are written to: JSON lines, or what becomes a Parquet table when it is complete.
#[derive(Debug)]
pub struct VectorFile {
    output: PathBuf,
    path: PathBuf,
    slot: Slot,
    record: Record,
    writer: BufWriter<File>,
    flushed: Instant,
    resumed: u64,
    made: Progress,
    digest: Sha256,
    line: Vec<u8>,
}

impl VectorFile {
    /// Number of texts that an earlier run has done.
    pub fn resumed(&self) -> u64 {
        self.resumed
    }

    /// Writes the vector of a text.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&mut self, row: &Row, vector: &[f32]) -> Result<()> {
        self.line.clear();
        let line = Vector::of(row, vector);
        serde_json::to_writer(&mut self.line, &line)
            .map_err(|e| Error::caused(ErrorKind::Internal, "a vector as JSON", e))?;
        self.line.push(b'\n');
        let written = self.writer.write_all(&self.line);
        written.map_err(|e| Error::io(ErrorKind::Io, &self.path, e))?;
        add(&mut self.digest, row);
        self.made.rows += 1;
        if self.flushed.elapsed() > FLUSH {
            self.flush()?;
        }
        Ok(())
    }

    /// Hands the rows to the system, then says in the record that they are there.
    fn flush(&mut self) -> Result<()> {
        self.writer.flush().map_err(|e| Error::io(ErrorKind::Io, &self.path, e))?;
        self.made.of = hex(self.digest.clone().finalize());
        self.record.set(self.slot, self.made.clone())?;
        self.flushed = Instant::now();
        Ok(())
    }

    /// Writes what is left to the disk. When it is `complete`, rows that lie beside the output become the output.
    /// Otherwise returns where they lie, for a run that resumes.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn finish(mut self, complete: bool) -> Result<Option<PathBuf>> {
        self.flush()?;
        let fail = |e: std::io::Error| Error::io(ErrorKind::Io, &self.path, e);
        self.writer.get_ref().sync_data().map_err(fail)?;
        if self.slot == Slot::Output {
            return Ok(None);
        }
        if !complete {
            return Ok(Some(self.path));
        }
        self.record.publishing()?;
        #[cfg(feature = "parquet")]
        if is_parquet(&self.output) {
            super::parquet::publish(&self.path, &self.output)?;
            std::fs::remove_file(&self.path).map_err(fail)?;
            return self.record.published().map(|()| None);
        }
        // Windows renames no file that is open.
        drop(self.writer);
        std::fs::rename(&self.path, &self.output)
            .map_err(|e| Error::io(ErrorKind::Io, &self.output, e))?;
        self.record.published().map(|()| None)
    }
}

/// True for a file that is not empty.
fn there(file: &Path) -> bool {
    file.metadata().is_ok_and(|m| m.len() > 0)
}

/// File that holds the rows until they become the output, if the output is a table or is to stay until then.
fn unfinished(output: &Path) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(".unfinished.jsonl");
    name.into()
}
