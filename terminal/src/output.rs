//! Standard output: results, and nothing else.
//!
//! The QNN libraries print to descriptor 1. Before anything can load them, the descriptor is made
//! to lead to the log (target `qnn`, level debug), and results go to the file it led to before.

use std::fmt::Arguments;
use std::fs::File;
use std::io::{self, Write};

use qhx_base::escape::escaped;
use qhx_base::{Error, ErrorKind, Result};
use qhx_qnn::stdout::redirect_to_log;
use serde::Serialize;
use serde_json::json;

/// The real standard output.
#[derive(Debug)]
pub struct Output {
    file: File,
    /// The reader is gone: whatever comes now has no use.
    closed: bool,
}

impl Output {
    /// Takes standard output over.
    ///
    /// # Errors
    /// When the descriptor cannot be redirected.
    pub fn take() -> Result<Self> {
        let fail = |e: io::Error| Error::caused(ErrorKind::Io, "standard output", e);
        // For good: the libraries print while the process exits, too.
        let file = redirect_to_log().and_then(|guard| guard.into_file()).map_err(fail)?;
        Ok(Self { file, closed: false })
    }

    /// True once the reader has closed its end.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Writes the text as it is, at once, so that a stream is seen while it comes.
    ///
    /// # Errors
    /// When nobody takes it: see [`Output::is_closed`].
    pub fn write(&mut self, text: &str) -> Result<()> {
        self.put(text).map_err(|e| {
            self.closed = is_closed(&e);
            Error::caused(ErrorKind::Io, "standard output", e)
        })
    }

    fn put(&mut self, text: &str) -> io::Result<()> {
        #[cfg(windows)]
        if super::console::is_console(&self.file) {
            return super::console::write(&self.file, text);
        }
        self.file.write_all(text.as_bytes())
    }

    /// Writes bytes that are no text, such as audio, at once.
    ///
    /// # Errors
    /// Errors of [`Output::write`].
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| {
            self.closed = is_closed(&e);
            Error::caused(ErrorKind::Io, "standard output", e)
        })
    }

    /// Writes a line of a report. What stands in it of files is written with escapes.
    ///
    /// # Errors
    /// Errors of [`Output::write`].
    pub fn line(&mut self, text: &str) -> Result<()> {
        self.write(&format!("{}\n", escaped(text)))
    }

    /// Writes a report.
    ///
    /// # Errors
    /// Errors of [`Output::write`].
    pub fn report(&mut self, report: &Report) -> Result<()> {
        self.write(&report.0)
    }

    /// Writes a value as one line of JSON.
    ///
    /// # Errors
    /// Errors of [`Output::write`], and when the value has no form in JSON.
    pub fn json(&mut self, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(value)
            .map_err(|e| Error::caused(ErrorKind::Internal, "the result as JSON", e))?;
        self.write(&format!("{text}\n"))
    }

    /// Writes a failure for programs.
    ///
    /// # Errors
    /// Errors of [`Output::write`].
    pub fn error(&mut self, error: &Error) -> Result<()> {
        self.json(&json!({"error": {
            "kind": error.kind().name(),
            "message": error.message(),
            "hint": error.hint_text(),
            "code": error.code(),
            "exit_code": error.kind().exit_code(),
        }}))
    }

    /// Writes a value as JSON over several lines, for reports that people read, too.
    ///
    /// # Errors
    /// Errors of [`Output::json`].
    pub fn json_pretty(&mut self, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string_pretty(value)
            .map_err(|e| Error::caused(ErrorKind::Internal, "the result as JSON", e))?;
        self.write(&format!("{text}\n"))
    }
}

/// True for what the system says where a pipe's reader has left.
fn is_closed(error: &io::Error) -> bool {
    // Windows has several words for it, of which Rust does not know this one.
    const ERROR_PIPE_NOT_CONNECTED: i32 = 233;
    error.kind() == io::ErrorKind::BrokenPipe
        || (cfg!(windows) && error.raw_os_error() == Some(ERROR_PIPE_NOT_CONNECTED))
}

/// Lines for people. What stands in them of files is written with escapes.
#[derive(Debug, Default)]
pub struct Report(String);

impl Report {
    /// Adds a line.
    pub fn line(&mut self, text: Arguments<'_>) {
        self.0.push_str(&escaped(&text.to_string()));
        self.0.push('\n');
    }
}
