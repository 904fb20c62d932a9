//! Texts and images: given ones, a file of JSON lines or a Parquet table, or standard input.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek as _};
use std::path::Path;

use qhx::Role;
use qhx_base::{Error, ErrorKind, Result};
use same_file::Handle;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::check_parquet;
#[cfg(feature = "parquet")]
use super::is_parquet;
use super::row::{MAX_LINE, Row, RowOptions};

/// A line of the input that is an object.
#[derive(Deserialize)]
struct Line {
    text: Option<String>,
    image: Option<String>,
    role: Option<String>,
}

enum Source {
    /// And whether each is the file of an image.
    TextPipeline(VecDeque<(String, bool)>),
    Lines {
        name: String,
        reader: BufReader<Box<dyn Read + Send>>,
    },
    #[cfg(feature = "parquet")]
    Table {
        name: String,
        texts: Box<super::parquet::TextPipeline>,
    },
}

/// Texts to embed, in order.
///
/// ```
/// use qhx_tools::corpus::{RowOptions, Rows};
///
/// let mut rows = Rows::of_texts(["def fib(n): …", "SELECT 1"], RowOptions::default());
/// assert_eq!(rows.next()?.map(|row| row.text).as_deref(), Some("def fib(n): …"));
/// # Ok::<(), qhx::Error>(())
/// ```
pub struct Rows {
    source: Source,
    /// Index of the next text of the input.
    next: u64,
    options: RowOptions,
    total: Option<u64>,
    line: Vec<u8>,
    input: Option<Handle>,
}

impl Rows {
    /// These texts.
    pub fn of_texts<T: Into<String>>(
        texts: impl IntoIterator<Item = T>,
        options: RowOptions,
    ) -> Self {
        let texts: VecDeque<_> = texts.into_iter().map(|text| (text.into(), false)).collect();
        let total = texts.len() as u64;
        Self::new(Source::TextPipeline(texts), options, Some(total), None)
    }

    /// And behind these texts, images, by their files or `data:` URLs; in the place of an input that is read, nothing
    /// is added.
    #[must_use]
    pub fn and_images<T: Into<String>>(mut self, images: impl IntoIterator<Item = T>) -> Self {
        if let Source::TextPipeline(texts) = &mut self.source {
            texts.extend(images.into_iter().map(|image| (image.into(), true)));
            self.total = Some(texts.len() as u64);
        }
        self
    }

    /// The lines of standard input.
    pub fn stdin(options: RowOptions) -> Self {
        let (name, reader) = ("standard input".to_owned(), reader(std::io::stdin()));
        Self::new(Source::Lines { name, reader }, options, None, Handle::stdin().ok())
    }

    /// A file: a Parquet table where it is called so, otherwise JSON lines.
    ///
    /// # Errors
    /// When the file cannot be read, a table has no texts, or this crate was built without Parquet.
    pub fn open(path: &Path, options: RowOptions) -> Result<Self> {
        check_parquet(path)?;
        #[cfg(feature = "parquet")]
        if is_parquet(path) {
            let (texts, rows) = super::parquet::TextPipeline::open(path)?;
            let name = path.display().to_string();
            let source = Source::Table { name, texts: Box::new(texts) };
            let total = options.shard.map_or(rows, |shard| shard.share(rows));
            return Ok(Self::new(source, options, Some(total), Handle::from_path(path).ok()));
        }
        let mut file = File::open(path).map_err(|e| Error::io(ErrorKind::Prompt, path, e))?;
        let fail = |e: std::io::Error| Error::io(ErrorKind::Io, path, e);
        let mut total = None;
        // A pipe can be read once.
        if file.metadata().map_err(fail)?.is_file() {
            let rows = count(&file).map_err(fail)?;
            total = Some(options.shard.map_or(rows, |shard| shard.share(rows)));
            file.rewind().map_err(fail)?;
        }
        let input = file.try_clone().and_then(Handle::from_file).ok();
        let source = Source::Lines { name: path.display().to_string(), reader: reader(file) };
        Ok(Self::new(source, options, total, input))
    }

    fn new(source: Source, options: RowOptions, total: Option<u64>, input: Option<Handle>) -> Self {
        Self { source, next: 0, options, total, line: Vec::new(), input }
    }

    /// The file that is read.
    pub(super) fn input(&self) -> Option<&Handle> {
        self.input.as_ref()
    }

    /// Number of texts, where it is known before they are read.
    pub fn total(&self) -> Option<u64> {
        self.total
    }

    /// True when the next text is there: nobody has to wait for what writes the input.
    pub(super) fn ready(&self) -> bool {
        let Source::Lines { reader, .. } = &self.source else { return true };
        let others = self.options.shard.map_or(0, |shard| shard.others_before(self.next));
        let others = usize::try_from(others).unwrap_or(usize::MAX);
        reader.buffer().iter().filter(|byte| **byte == b'\n').nth(others).is_some()
    }

    /// The next text of the shard; `None` at the end.
    ///
    /// # Errors
    /// When the input cannot be read, or a row is not a text. The error names the row.
    #[expect(clippy::should_implement_trait, reason = "it may fail")]
    pub fn next(&mut self) -> Result<Option<Row>> {
        loop {
            let index = self.next;
            let mine = self.options.shard.is_none_or(|shard| shard.has(index));
            let row = match &mut self.source {
                Source::TextPipeline(texts) => texts.pop_front().map(|(text, image)| Row {
                    index,
                    text,
                    image,
                    role: self.options.role,
                }),
                Source::Lines { name, reader } => {
                    if !read_line(name, index, reader, &mut self.line)? {
                        None
                    } else if mine {
                        Some(parse(name, index, &self.line, self.options.role)?)
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
                        let role = said.map_or(Ok(self.options.role), |said| role(place, &said))?;
                        Some(Row { index, text, image: false, role })
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

impl std::fmt::Debug for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut fields = f.debug_struct("Rows");
        fields.field("next", &self.next).field("options", &self.options);
        fields.field("total", &self.total).finish_non_exhaustive()
    }
}

fn reader(source: impl Read + Send + 'static) -> BufReader<Box<dyn Read + Send>> {
    BufReader::with_capacity(1 << 20, Box::new(source))
}

/// Lines of a file. Fast, since every text costs far more than its line.
fn count(file: &File) -> std::io::Result<u64> {
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let (mut lines, mut open_line) = (0u64, false);
    // The last bytes; before the first one a line has ended.
    let mut tail = [b'\n'; 3];
    loop {
        let part = reader.fill_buf()?;
        let Some(last) = part.last() else { break };
        open_line = *last != b'\n';
        lines += part.iter().filter(|b| **b == b'\n').count() as u64;
        for byte in part.iter().skip(part.len().saturating_sub(tail.len())) {
            tail = [tail[1], tail[2], *byte];
        }
        let length = part.len();
        reader.consume(length);
    }
    // As one that is read, an empty line at the end is none.
    let empty = lines > 0 && (tail.ends_with(b"\n\n") || tail == *b"\n\r\n");
    Ok(lines + u64::from(open_line) - u64::from(empty))
}

/// Reads line `index` without its end; false at the end of the input. No more is held than the
/// longest line.
fn read_line(name: &str, index: u64, reader: &mut dyn BufRead, line: &mut Vec<u8>) -> Result<bool> {
    line.clear();
    let fail = |e| Error::caused(ErrorKind::Io, format_args!("{name}"), e);
    loop {
        let part = reader.fill_buf().map_err(fail)?;
        if part.is_empty() {
            strip_mark(index, line);
            return Ok(!line.is_empty());
        }
        let end = part.iter().position(|b| *b == b'\n');
        let piece = &part[..end.unwrap_or(part.len())];
        if line.len() + piece.len() > MAX_LINE {
            return Err(Error::new(
                ErrorKind::Prompt,
                format!("{name}: line {} is longer than {} MiB", index + 1, MAX_LINE >> 20),
            )
            .hint("expected one text a line, each a JSON string or an object; split the text"));
        }
        line.extend_from_slice(piece);
        let used = end.map_or(part.len(), |end| end + 1);
        reader.consume(used);
        if end.is_some() {
            strip_mark(index, line);
            // An empty line at the end is none.
            return Ok(
                !line.trim_ascii().is_empty() || !reader.fill_buf().map_err(fail)?.is_empty()
            );
        }
    }
}

/// Drops what some editors write before a text.
fn strip_mark(index: u64, line: &mut Vec<u8>) {
    if index == 0 && line.starts_with(b"\xef\xbb\xbf") {
        line.drain(..3);
    }
}

fn parse(name: &str, index: u64, line: &[u8], role: Role) -> Result<Row> {
    let place = || format!("{name}: line {}", index + 1);
    let wrong = |why: String| {
        Error::new(ErrorKind::Prompt, format!("{}: {why}", place()))
            .hint("expected a JSON string, or an object with \"text\" or \"image\"")
    };
    let parsed = match line.trim_ascii_start().first() {
        None => return Err(wrong("it is empty".to_owned())),
        Some(b'"') => serde_json::from_slice(line).map(|text| Line {
            text: Some(text),
            image: None,
            role: None,
        }),
        Some(b'{') => serde_json::from_slice(line),
        // The place in the line, where it is no JSON at all.
        Some(_) => match serde_json::from_slice::<IgnoredAny>(line) {
            Ok(_) => return Err(wrong("it is neither a string nor an object".to_owned())),
            Err(e) => Err(e),
        },
    };
    let Line { text, image, role: said } = parsed.map_err(|e| wrong(e.to_string()))?;
    let role = said.map_or(Ok(role), |said| self::role(format_args!("{}", place()), &said))?;
    let (text, image) = match (text, image) {
        (Some(text), None) => (text, false),
        (None, Some(image)) => (image, true),
        (Some(_), Some(_)) => {
            return Err(wrong("it has both \"text\" and \"image\"".to_owned()));
        }
        (None, None) => return Err(wrong("missing field `text` or `image`".to_owned())),
    };
    Ok(Row { index, text, image, role })
}

/// Role that a row declares for its text.
fn role(place: std::fmt::Arguments<'_>, said: &str) -> Result<Role> {
    said.parse().map_err(|_| {
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
        let row = parse("{\"image\": \"a.png\"}").unwrap();
        assert!(row.image && row.text == "a.png", "{row:?}");
        for (line, words) in [
            ("", "empty"),
            ("{\"txt\": 1}", "line 5"),
            ("{\"text\":\"a\",\"role\":\"x\"}", "\"x\""),
            ("{\"txt\": 1}", "missing field `text`"),
            ("{\"text\":\"a\",\"image\":\"a.png\"}", "it has both"),
            ("[\"a\"]", "line 5: it is neither a string nor an object"),
            ("7", "neither"),
            ("nonsense", "line 5: expected ident"),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn lines_end_with_or_without_a_line_end() {
        for (text, lines) in [
            ("a\nb\n", 2),
            ("a\nb", 2),
            ("", 0),
            ("\n", 0),
            ("a\n\n", 1),
            ("a\r\n\r\n", 1),
            ("a\n\nb\n", 3),
        ] {
            let mut reader = BufReader::with_capacity(1, text.as_bytes());
            let (mut line, mut found) = (Vec::new(), 0);
            while read_line("in", 0, &mut reader, &mut line).unwrap() {
                found += 1;
            }
            assert_eq!(found, lines, "{text:?}");
        }
    }

    #[test]
    fn a_byte_order_mark_before_the_first_line_is_skipped() {
        let mut text = "\u{feff}\"a\"\n".as_bytes();
        let mut line = Vec::new();
        assert!(read_line("in", 0, &mut text, &mut line).unwrap());
        assert_eq!(line, b"\"a\"");
    }

    #[test]
    fn no_line_is_read_beyond_the_longest() {
        // Without an end: it would be read for ever.
        let mut endless = BufReader::new(std::io::repeat(b'x'));
        let mut line = Vec::new();
        let error = read_line("in.jsonl", 6, &mut endless, &mut line).unwrap_err().to_string();
        assert!(error.contains("in.jsonl: line 7 is longer than 4 MiB"), "{error}");
        assert!(line.capacity() <= 2 * MAX_LINE, "{}", line.capacity());
        let whole = "x".repeat(MAX_LINE) + "\nrest";
        assert!(read_line("in", 0, &mut whole.as_bytes(), &mut line).unwrap());
        assert_eq!(line.len(), MAX_LINE);
    }
}
