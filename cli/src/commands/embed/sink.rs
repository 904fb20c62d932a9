//! Where vectors go: standard output, or a file that a later run can continue.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use qhx_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::args::{EmbedArgs, is_parquet};
use crate::output::Output;

/// What is lost at most when the machine stops.
const FLUSH: Duration = Duration::from_secs(1);
/// Values of a vector that people are shown.
const SHOWN: usize = 4;

/// One line of the output.
#[derive(Debug, Serialize)]
pub(crate) struct Vector<'a> {
    pub index: u64,
    pub text: &'a str,
    pub embedding: &'a [f32],
}

/// As much of a line as a later run has to know.
#[derive(Deserialize)]
struct Written {
    index: u64,
    text: String,
}

/// What an earlier run has written.
#[derive(Debug, Default)]
pub(crate) struct Resumed {
    /// Whole lines.
    pub rows: u64,
    /// Index and text of the last of them.
    pub last: Option<(u64, String)>,
}

enum Target {
    File { path: PathBuf, writer: BufWriter<File>, flushed: Instant },
    Json,
    People,
}

/// Takes vectors.
pub(crate) struct Sink {
    target: Target,
    resumed: Resumed,
    line: Vec<u8>,
    /// The table that the lines become when they are complete.
    #[cfg(feature = "parquet")]
    table: Option<PathBuf>,
}

impl Sink {
    /// Opens the output. A line that an earlier run did not finish is cut off.
    pub fn open(args: &EmbedArgs) -> Result<Self> {
        let mut resumed = Resumed::default();
        let target = match &args.output {
            None if args.json => Target::Json,
            None => Target::People,
            Some(out) => {
                let path = &lines(out);
                for file in [out, path] {
                    let there = file.metadata().is_ok_and(|m| m.len() > 0);
                    if there && !args.resume && !args.overwrite {
                        return Err(Error::new(
                            ErrorKind::Usage,
                            format!("{}: the output is there already", file.display()),
                        )
                        .hint("--resume goes on where it ends, --overwrite replaces it"));
                    }
                }
                #[cfg(feature = "parquet")]
                if args.resume && path != out && out.exists() && !path.exists() {
                    super::parquet::unpack(out, path)?;
                }
                let fail = |e: std::io::Error| Error::io(ErrorKind::Io, path, &e);
                let mut options = OpenOptions::new();
                options.write(true).create(true).read(true).truncate(!args.resume);
                let mut file = options.open(path).map_err(fail)?;
                if args.resume {
                    let (end, found) = whole_lines(path, &file)?;
                    resumed = found;
                    file.set_len(end).map_err(fail)?;
                    file.seek(SeekFrom::Start(end)).map_err(fail)?;
                }
                let writer = BufWriter::with_capacity(1 << 20, file);
                Target::File { path: path.clone(), writer, flushed: Instant::now() }
            }
        };
        Ok(Self {
            target,
            resumed,
            line: Vec::new(),
            #[cfg(feature = "parquet")]
            table: args.output.clone().filter(|path| is_parquet(path)),
        })
    }

    /// What an earlier run has written.
    pub fn resumed(&self) -> &Resumed {
        &self.resumed
    }

    /// Writes a vector.
    pub fn write(&mut self, output: &mut Output, vector: &Vector<'_>) -> Result<()> {
        match &mut self.target {
            Target::Json => output.json(vector),
            Target::People => output.line(&line(vector)),
            Target::File { path, writer, flushed } => {
                let fail = |e: std::io::Error| Error::io(ErrorKind::Io, path, &e);
                self.line.clear();
                serde_json::to_writer(&mut self.line, vector).map_err(|e| {
                    Error::new(ErrorKind::Internal, format!("a vector as JSON: {e}"))
                })?;
                self.line.push(b'\n');
                writer.write_all(&self.line).map_err(fail)?;
                if flushed.elapsed() > FLUSH {
                    writer.flush().map_err(fail)?;
                    *flushed = Instant::now();
                }
                Ok(())
            }
        }
    }

    /// Writes what is left to the disk. When it is `complete`, lines that are to be a table become
    /// one.
    #[cfg_attr(not(feature = "parquet"), expect(unused_variables, reason = "for tables only"))]
    pub fn finish(&mut self, complete: bool) -> Result<()> {
        if let Target::File { path, writer, .. } = &mut self.target {
            let fail = |e: std::io::Error| Error::io(ErrorKind::Io, path, &e);
            writer.flush().map_err(fail)?;
            writer.get_ref().sync_data().map_err(fail)?;
            #[cfg(feature = "parquet")]
            if let Some(table) = self.table.as_ref().filter(|_| complete) {
                super::parquet::publish(path, table)?;
                std::fs::remove_file(&*path).map_err(fail)?;
            }
        }
        Ok(())
    }
}

/// Where lines are written on their way into the output: the output itself, unless that is a table,
/// which cannot be continued.
fn lines(output: &Path) -> PathBuf {
    if !is_parquet(output) {
        return output.to_owned();
    }
    let mut name = output.as_os_str().to_owned();
    name.push(".unfinished.jsonl");
    name.into()
}

/// Bytes of the whole lines of a file, and what they are.
fn whole_lines(path: &Path, file: &File) -> Result<(u64, Resumed)> {
    let fail = |e: std::io::Error| Error::io(ErrorKind::Io, path, &e);
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let (mut end, mut rows) = (0u64, 0u64);
    let (mut line, mut last) = (Vec::new(), Vec::new());
    loop {
        line.clear();
        let length = reader.read_until(b'\n', &mut line).map_err(fail)?;
        if length == 0 || line.last() != Some(&b'\n') {
            break;
        }
        end += length as u64;
        rows += 1;
        std::mem::swap(&mut line, &mut last);
    }
    if rows == 0 {
        return Ok((0, Resumed::default()));
    }
    let written: Written = serde_json::from_slice(&last).map_err(|e| {
        Error::new(
            ErrorKind::Usage,
            format!("{}: line {rows} is no line of qhx embed: {e}", path.display()),
        )
        .hint("--overwrite replaces the file")
    })?;
    Ok((end, Resumed { rows, last: Some((written.index, written.text)) }))
}

fn line(vector: &Vector<'_>) -> String {
    let first: Vec<_> = vector.embedding.iter().take(SHOWN).map(|v| format!("{v:.5}")).collect();
    let more = if vector.embedding.len() > SHOWN { ", …" } else { "" };
    format!(
        "{}  dimension {}  norm {:.6}  [{}{more}]",
        vector.index,
        vector.embedding.len(),
        norm(vector.embedding),
        first.join(", ")
    )
}

/// Euclidean norm.
pub(crate) fn norm(vector: &[f32]) -> f64 {
    vector.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>().sqrt()
}

/// Cosine of the angle between two vectors of one length.
pub(crate) fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    dot / (norm(a) * norm(b)).max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_not_finished_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        let whole = "{\"index\":0,\"text\":\"a\",\"embedding\":[1.0]}\n\
                     {\"index\":2,\"text\":\"b\",\"embedding\":[0.5]}\n";
        std::fs::write(&path, format!("{whole}{{\"index\":4,\"te")).unwrap();
        let (end, resumed) = whole_lines(&path, &File::open(&path).unwrap()).unwrap();
        assert_eq!(end, whole.len() as u64);
        assert_eq!(resumed.rows, 2);
        assert_eq!(resumed.last, Some((2, "b".to_owned())));
        std::fs::write(&path, "{\"ind").unwrap();
        assert_eq!(whole_lines(&path, &File::open(&path).unwrap()).unwrap().0, 0);
        std::fs::write(&path, "notes\n").unwrap();
        assert!(whole_lines(&path, &File::open(&path).unwrap()).is_err());
    }

    #[test]
    fn people_see_the_first_values() {
        let vector = Vector { index: 3, text: "", embedding: &[0.6, 0.8, 0.0, 0.0, 0.0] };
        let expected = "3  dimension 5  norm 1.000000  [0.60000, 0.80000, 0.00000, 0.00000, …]";
        assert_eq!(line(&vector), expected);
        assert!((cosine(&[1.0, 0.0], &[1.0, 1.0]) - 0.5f64.sqrt()).abs() < 1e-9);
    }
}
