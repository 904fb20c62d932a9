//! Standard error: what people are told while a command works, and why it failed.
//!
//! Printing macros panic when nobody takes what they print: a full disk, a pipe whose reader has left. Nothing here
//! fails or panics, and a command goes on without a listener. Names of files and of what stands in them are shown with
//! escapes ([`qhx_base::escape`]), so that they cannot steer a terminal.

use std::fmt::Arguments;
use std::io::{self, IsTerminal as _, Write};

use qhx::vars;
use qhx_base::Error;
use qhx_base::escape::shown;

/// Writes a line to standard error, with the arguments of `format!`.
#[macro_export]
macro_rules! say {
    ($($part:tt)*) => { $crate::stderr::line(format_args!($($part)*)) };
}

/// Writes a line.
pub fn line(text: Arguments<'_>) {
    write(&format!("{}\n", shown(&text.to_string())));
}

/// Writes lines of our own, such as examples, as they are.
pub fn lines(text: &str) {
    write(&format!("{text}\n"));
}

/// Asks for input, where a person is there to give it.
pub fn ask(question: &str) {
    write(question);
}

/// Writes why a command failed, with the hint on a line of its own.
pub fn error(error: &Error) {
    let hint = error.hint_text().map(|hint| format!("\n  hint: {hint}")).unwrap_or_default();
    write(&format!("error: {}{hint}\n", error.message()));
}

/// Writes what clap says, in its colours where they are seen.
pub fn usage(error: &clap::Error) {
    let text = error.render();
    let text = if colours() { text.ansi().to_string() } else { text.to_string() };
    for line in text.lines() {
        write(&format!("{}\n", shown_in_colour(line)));
    }
}

/// True when colours are seen and wanted.
pub fn colours() -> bool {
    io::stderr().is_terminal() && vars::get(vars::NO_COLOR).is_none()
}

/// Destination of the log.
#[derive(Debug)]
pub struct Log;

impl Write for Log {
    /// Takes a record, which ends with a line end.
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(record);
        write(&format!("{}\n", shown_in_colour(text.trim_end_matches(['\r', '\n']))));
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write(text: &str) {
    // Nobody is left to tell when this cannot be written.
    let _ = io::stderr().write_all(text.as_bytes());
}

/// A line whose colours stay, and nothing else that steers a terminal.
fn shown_in_colour(line: &str) -> String {
    let mut safe = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((start, length)) = colour(rest) {
        let (text, from) = rest.split_at(start);
        let (code, after) = from.split_at(length);
        safe.push_str(&shown(text));
        safe.push_str(code);
        rest = after;
    }
    safe.push_str(&shown(rest));
    safe
}

/// Start and length of the first sequence that does nothing but choose a colour: `ESC [ … m`.
fn colour(text: &str) -> Option<(usize, usize)> {
    text.match_indices("\u{1b}[").find_map(|(start, open)| {
        let parameters = &text[start + open.len()..];
        let end = parameters.find(|c: char| !c.is_ascii_digit() && c != ';')?;
        parameters[end..].starts_with('m').then_some((start, open.len() + end + 1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_stay_and_nothing_else_steers_the_terminal() {
        for (text, safe) in [
            ("\u{1b}[33m WARN\u{1b}[0m name", "\u{1b}[33m WARN\u{1b}[0m name"),
            ("\u{1b}[1;31mx\u{1b}[2Jy\n\u{1b}[", "\u{1b}[1;31mx\\u{1b}[2Jy\\n\\u{1b}["),
            ("\u{1b}]0;title\u{7}", "\\u{1b}]0;title\\u{7}"),
        ] {
            assert_eq!(shown_in_colour(text), safe);
        }
    }
}
