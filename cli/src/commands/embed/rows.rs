//! The texts: from the command line, a file of JSON lines or a Parquet table, or standard input.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use clap::ValueEnum as _;
use qhx_core::{Error, ErrorKind, Result};
use serde::Deserialize;

use super::args::{EmbedArgs, Role, Shard};
use super::sink::Resumed;

/// Longest line that is read.
const MAX_LINE: usize = 64 << 20;

/// One text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    /// Place in the input, from 0.
    pub index: u64,
    pub text: String,
    pub role: Role,
}

/// A line of the input.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Text(String),
    Object { text: String, role: Option<String> },
}

enum Source {
    Arguments(VecDeque<String>),
    Lines {
        name: String,
        reader: Box<dyn BufRead>,
    },
    #[cfg(feature = "parquet")]
    Table {
        name: String,
        texts: Box<super::parquet::Texts>,
    },
}

/// The texts of a run, in order.
pub(crate) struct Rows {
    source: Source,
    /// Index of the next text of the input.
    next: u64,
    shard: Option<Shard>,
    role: Role,
    total: Option<u64>,
    line: Vec<u8>,
}

impl Rows {
    /// Opens the input.
    pub fn open(args: &EmbedArgs) -> Result<Self> {
        let mut total = None;
        let source = match &args.input {
            None => {
                total = Some(args.texts.len() as u64);
                Source::Arguments(args.texts.iter().cloned().collect())
            }
            Some(path) if path == Path::new("-") => Source::Lines {
                name: "standard input".to_owned(),
                reader: Box::new(BufReader::new(std::io::stdin())),
            },
            #[cfg(feature = "parquet")]
            Some(path) if super::args::is_parquet(path) => {
                let (texts, rows) = super::parquet::Texts::open(path)?;
                total = Some(share(rows, args.shard));
                Source::Table { name: path.display().to_string(), texts: Box::new(texts) }
            }
            Some(path) => {
                total = Some(share(count(path)?, args.shard));
                let file = open(path)?;
                let reader = Box::new(BufReader::with_capacity(1 << 20, file));
                Source::Lines { name: path.display().to_string(), reader }
            }
        };
        let (shard, role) = (args.shard, args.role);
        Ok(Self { source, next: 0, shard, role, total, line: Vec::new() })
    }

    /// Number of texts, where it is known before they are read.
    pub fn total(&self) -> Result<Option<u64>> {
        Ok(self.total)
    }

    /// Passes over the texts that an earlier run has written, and checks that they are the same.
    /// Answers with their number.
    pub fn skip(&mut self, done: &Resumed) -> Result<u64> {
        for number in 0..done.rows {
            let last = number + 1 == done.rows;
            let row = self.next()?;
            let fits = match (&row, &done.last) {
                (Some(row), Some((index, text))) if last => {
                    row.index == *index && row.text == *text
                }
                (row, _) => row.is_some(),
            };
            if !fits {
                return Err(Error::new(
                    ErrorKind::Usage,
                    format!(
                        "the output has {} texts that are not the first of this input",
                        done.rows
                    ),
                )
                .hint("resume with the same --input and --shard, or write to another output"));
            }
        }
        Ok(done.rows)
    }

    /// The next text of the shard.
    pub fn next(&mut self) -> Result<Option<Row>> {
        loop {
            let index = self.next;
            let mine = self.shard.is_none_or(|shard| shard.has(index));
            let row = match &mut self.source {
                Source::Arguments(texts) => {
                    texts.pop_front().map(|text| Row { index, text, role: self.role })
                }
                Source::Lines { name, reader } => {
                    if !read_line(name, reader, &mut self.line)? {
                        None
                    } else if mine {
                        Some(parse(name, index, &self.line, self.role)?)
                    } else {
                        self.next += 1;
                        continue;
                    }
                }
                #[cfg(feature = "parquet")]
                Source::Table { name, texts } => match texts.next(index)? {
                    Some(_) if !mine => {
                        self.next += 1;
                        continue;
                    }
                    Some((text, said)) => {
                        let place = format_args!("{name}: row {index}");
                        let role = said.map_or(Ok(self.role), |said| role(place, &said))?;
                        Some(Row { index, text, role })
                    }
                    None => None,
                },
            };
            if row.is_some() {
                self.next += 1;
            }
            return Ok(row);
        }
    }
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| Error::io(ErrorKind::Prompt, path, &e))
}

/// Rows of an input that belong to the shard.
fn share(rows: u64, shard: Option<Shard>) -> u64 {
    match shard {
        None => rows,
        Some(shard) => rows / shard.count + u64::from(rows % shard.count > shard.index),
    }
}

/// Lines of a file. Fast, since every text costs far more than its line.
fn count(path: &Path) -> Result<u64> {
    let mut reader = BufReader::with_capacity(1 << 20, open(path)?);
    let (mut lines, mut open_line) = (0u64, false);
    loop {
        let part = reader.fill_buf().map_err(|e| Error::io(ErrorKind::Io, path, &e))?;
        let Some(last) = part.last() else { break };
        open_line = *last != b'\n';
        lines += part.iter().filter(|b| **b == b'\n').count() as u64;
        let length = part.len();
        reader.consume(length);
    }
    Ok(lines + u64::from(open_line))
}

/// Reads a line without its end; false at the end of the input.
fn read_line(name: &str, reader: &mut dyn BufRead, line: &mut Vec<u8>) -> Result<bool> {
    line.clear();
    let fail = |e| Error::new(ErrorKind::Io, format!("{name}: {e}"));
    loop {
        let part = reader.fill_buf().map_err(fail)?;
        if part.is_empty() {
            return Ok(!line.is_empty());
        }
        let end = part.iter().position(|b| *b == b'\n');
        line.extend_from_slice(&part[..end.unwrap_or(part.len())]);
        let used = end.map_or(part.len(), |end| end + 1);
        reader.consume(used);
        if line.len() > MAX_LINE {
            return Err(Error::new(
                ErrorKind::Prompt,
                format!("{name}: a line is longer than {} MiB", MAX_LINE >> 20),
            ));
        }
        if end.is_some() {
            return Ok(true);
        }
    }
}

fn parse(name: &str, index: u64, line: &[u8], role: Role) -> Result<Row> {
    let place = || format!("{name}: line {}", index + 1);
    let line: Line = serde_json::from_slice(line).map_err(|e| {
        let e = if line.iter().all(u8::is_ascii_whitespace) {
            "it is empty".to_owned()
        } else {
            e.to_string()
        };
        Error::new(ErrorKind::Prompt, format!("{}: {e}", place()))
            .hint("expected a JSON string, or an object with \"text\"")
    })?;
    let (text, said) = match line {
        Line::Text(text) => (text, None),
        Line::Object { text, role } => (text, role),
    };
    let role = said.map_or(Ok(role), |said| self::role(format_args!("{}", place()), &said))?;
    Ok(Row { index, text, role })
}

/// What a row says that its text is.
fn role(place: std::fmt::Arguments<'_>, said: &str) -> Result<Role> {
    Role::from_str(said, false).map_err(|_| {
        Error::new(
            ErrorKind::Prompt,
            format!("{place}: role is {said:?}, expected \"query\" or \"document\""),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_strings_or_objects() {
        let parse = |line: &str| parse("in", 4, line.as_bytes(), Role::Document);
        assert_eq!(parse("\"a\"").unwrap().text, "a");
        let row = parse("{\"id\": 7, \"text\": \"b\", \"role\": \"query\"}").unwrap();
        assert_eq!((row.text.as_str(), row.role, row.index), ("b", Role::Query, 4));
        for (line, words) in [
            ("", "empty"),
            ("{\"txt\": 1}", "line 5"),
            ("{\"text\":\"a\",\"role\":\"x\"}", "\"x\""),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn lines_end_with_or_without_a_line_end() {
        for (text, lines) in [("a\nb\n", 2), ("a\nb", 2), ("", 0), ("\n", 1)] {
            let mut reader = BufReader::with_capacity(1, text.as_bytes());
            let (mut line, mut found) = (Vec::new(), 0);
            while read_line("in", &mut reader, &mut line).unwrap() {
                found += 1;
            }
            assert_eq!(found, lines, "{text:?}");
        }
    }
}
