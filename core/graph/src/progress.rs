//! Progress reports of a forge.

use qhx_base::{Error, ErrorKind, Result};

/// Receives progress. Called on the thread that called the forge.
pub trait Progress {
    /// A stage begins: `what` says which, for people, such as `compile decode_p0`. `total` is the
    /// number of bytes it handles, 0 when that is not known beforehand.
    fn stage(&mut self, what: &str, total: u64);

    /// `done` bytes of the current stage are handled.
    fn advance(&mut self, done: u64);

    /// Something the user should know, such as a missing optional file. One sentence.
    fn note(&mut self, message: &str);

    /// The whole work writes about `bytes` bytes. Called once, before the first stage of it.
    fn total(&mut self, bytes: u64) {
        let _ = bytes;
    }

    /// An artifact of `bytes` bytes is finished, such as a context binary or a table; `kept` if by an earlier
    /// attempt.
    fn finished(&mut self, bytes: u64, kept: bool) {
        let _ = (bytes, kept);
    }

    /// True when the caller wants the work to stop; the forge then cleans up and returns a
    /// `Cancelled` error.
    fn cancelled(&self) -> bool {
        false
    }

    /// Returns the error of a work that the caller wants to stop.
    ///
    /// # Errors
    /// `Cancelled`, when [`Progress::cancelled`] is true.
    fn stop_if_cancelled(&self) -> Result<()> {
        if self.cancelled() { Err(Error::new(ErrorKind::Cancelled, "cancelled")) } else { Ok(()) }
    }
}

/// Says nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn stage(&mut self, _what: &str, _total: u64) {}
    fn advance(&mut self, _done: u64) {}
    fn note(&mut self, _message: &str) {}
}
