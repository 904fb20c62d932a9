//! Texts in files.

use std::path::Path;

use qhx_base::{Error, ErrorKind, Result, files};
use serde_json::Value;

/// Longest file that is read.
const MAX_BYTES: u64 = 64 << 20;

/// Reads texts: one a line, or, in a file `*.jsonl`, one JSON value a line, a string or an object with a string
/// `text`. Empty lines are left out.
///
/// # Errors
/// When the file cannot be read, a line is malformed, or there is no text.
pub fn read_texts(path: &Path) -> Result<Vec<String>> {
    let file = files::read_text(ErrorKind::Prompt, path, MAX_BYTES)?;
    let lines = file.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    if !path.extension().is_some_and(|e| e.eq_ignore_ascii_case("jsonl")) {
        return Ok(lines.map(|(_, line)| line.to_owned()).collect());
    }
    lines
        .map(|(index, line)| {
            let value: Option<Value> = serde_json::from_str(line).ok();
            let text = value.as_ref().and_then(|value| value.get("text").unwrap_or(value).as_str());
            text.map(str::to_owned).ok_or_else(|| {
                Error::new(
                    ErrorKind::Prompt,
                    format!(
                        "{}: line {}: neither a JSON string nor an object with \"text\"",
                        path.display(),
                        index + 1
                    ),
                )
                .hint("give one JSON value a line, or name the file *.txt")
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_lines_or_json() {
        let dir = tempfile::tempdir().unwrap();
        let read = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            read_texts(&path)
        };
        assert_eq!(read("a.txt", "one\n\n\"two\"\r\n").unwrap(), ["one", "\"two\""]);
        let json = "\"one\"\n{\"text\": \"t\\nwo\", \"n\": 1}\n";
        assert_eq!(read("a.jsonl", json).unwrap(), ["one", "t\nwo"]);
        let error = read("b.jsonl", "\"one\"\n{\"t\": 1}").unwrap_err();
        assert!(error.message().contains("line 2: neither"), "{error}");
    }
}
