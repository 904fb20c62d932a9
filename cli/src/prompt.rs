//! Prompts: from an argument or standard input, as text or as token ids.

use std::ffi::OsStr;
use std::fmt::Display;
use std::io::{IsTerminal as _, Read as _};
use std::path::Path;

use qhx_base::{Error, ErrorKind, Result, files};

/// Longest prompt that is read from standard input.
const MAX_BYTES: u64 = 64 << 20;
/// Byte order mark that some editors write before a text.
const BYTE_ORDER_MARK: char = '\u{feff}';
/// Bytes of standard input that are taken at once, where a text is used while it comes.
const PIECE: usize = 4096;

/// The text of the argument `prompt`; of standard input for `-` and when there is no argument.
pub(crate) fn text(prompt: Option<&OsStr>) -> Result<String> {
    match prompt {
        Some(prompt) if prompt != "-" => Ok(prompt
            .to_str()
            .ok_or_else(|| Error::new(ErrorKind::Prompt, "the prompt is not valid UTF-8"))?
            .to_owned()),
        None if std::io::stdin().is_terminal() => {
            Err(Error::new(ErrorKind::Prompt, "no prompt is given")
                .hint("give it as an argument, or - to type it here and end with Ctrl-D"))
        }
        _ => from_stdin(),
    }
}

/// The text of a file.
pub(crate) fn of_file(path: &Path) -> Result<String> {
    let mut text = utf8_of(files::read(ErrorKind::Io, path, MAX_BYTES)?, &path.display())?;
    if text.starts_with(BYTE_ORDER_MARK) {
        text.remove(0);
    }
    strip_line_end(&mut text);
    Ok(text)
}

/// Refuses a prompt without a text.
pub(crate) fn check(text: &str) -> Result<()> {
    if text.is_empty() {
        return Err(Error::new(ErrorKind::Prompt, "the prompt is empty")
            .hint("give a text, or - to read it from standard input"));
    }
    Ok(())
}

fn from_stdin() -> Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| Error::caused(ErrorKind::Io, "standard input", e))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Error::new(
            ErrorKind::Prompt,
            format!("the prompt on standard input is larger than {} MiB", MAX_BYTES >> 20),
        ));
    }
    let mut text = utf8(bytes)?;
    strip_line_end(&mut text);
    Ok(text)
}

/// The text of standard input, in pieces as it comes.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// Bytes of a character that is not whole.
    rest: Vec<u8>,
    read: u64,
    over: bool,
}

impl Pieces {
    /// The pieces of the argument `-`; none of other ones.
    pub(crate) fn of(argument: &OsStr) -> Self {
        Self { rest: Vec::new(), read: 0, over: argument != "-" }
    }

    fn piece(&mut self) -> Result<Option<String>> {
        let mut bytes = std::mem::take(&mut self.rest);
        let start = bytes.len();
        bytes.resize(start + PIECE, 0);
        let count = loop {
            match std::io::stdin().lock().read(&mut bytes[start..]) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                read => {
                    break read.map_err(|e| Error::caused(ErrorKind::Io, "standard input", e))?;
                }
            }
        };
        bytes.truncate(start + count);
        self.read += count as u64;
        if self.read > MAX_BYTES {
            let mib = MAX_BYTES >> 20;
            let what = format!("the prompt on standard input is larger than {mib} MiB");
            return Err(Error::new(ErrorKind::Prompt, what));
        }
        if count == 0 {
            return Ok(if bytes.is_empty() { None } else { Some(utf8(bytes)?) });
        }
        let whole = match std::str::from_utf8(&bytes) {
            // A character of which some bytes are missing.
            Err(e) if e.error_len().is_none() => e.valid_up_to(),
            _ => bytes.len(),
        };
        self.rest = bytes.split_off(whole);
        Ok(Some(utf8(bytes)?))
    }
}

impl Iterator for Pieces {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let piece = self.piece().transpose();
        self.over = !matches!(piece, Some(Ok(_)));
        piece
    }
}

/// Bytes of standard input as text.
pub(crate) fn utf8(bytes: Vec<u8>) -> Result<String> {
    utf8_of(bytes, &"standard input")
}

fn utf8_of(bytes: Vec<u8>, name: &dyn Display) -> Result<String> {
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        let byte = e.as_bytes().get(at).copied().unwrap_or_default();
        Error::new(
            ErrorKind::Prompt,
            format!("{name} is not valid UTF-8: byte {at} is {byte:#04x}"),
        )
        .hint("convert the text to UTF-8 first, for example with iconv")
    })
}

/// Drops one line end, which editors and `echo` put at the end of a text.
pub(crate) fn strip_line_end(text: &mut String) {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
}

/// Token ids separated by commas.
pub(crate) fn ids(text: &str) -> Result<Vec<u32>> {
    let list = text.trim().trim_end_matches(',');
    list.split(',')
        .map(|part| {
            part.trim().parse::<u32>().map_err(|_| {
                Error::new(
                    ErrorKind::Prompt,
                    format!("the prompt has {:?} where a token id is expected", part.trim()),
                )
                .hint("expected ids separated by commas, such as 9707,11,1879")
            })
        })
        .collect()
}

/// True for at least two token ids separated by commas.
pub(crate) fn is_id_list(text: &str) -> bool {
    text.contains(',') && ids(text).is_ok_and(|ids| ids.len() > 1)
}

/// Token ids as text.
pub(crate) fn join(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_lists() {
        assert_eq!(ids("1, 2,3 ").unwrap(), [1, 2, 3]);
        assert_eq!(ids("7").unwrap(), [7]);
        assert!(ids("1,,2").is_err());
        assert!(ids("").is_err());
        assert!(ids("-1,2").is_err());
        assert!(is_id_list("9707,11"));
        assert!(!is_id_list("7"));
        assert!(!is_id_list("one, two"));
        assert!(!is_id_list("1, 2 and 3"));
    }

    #[test]
    fn one_line_end_is_dropped() {
        for (given, kept) in [("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("a", "a")] {
            let mut text = given.to_owned();
            strip_line_end(&mut text);
            assert_eq!(text, kept);
        }
    }
}
