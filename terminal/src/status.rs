//! Status of a command that did not fail.

use qhx_base::ErrorKind;

/// Status of a command that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Did what was asked.
    Done,
    /// A check that was asked for found something.
    Found,
    /// Interrupted; what there was is written.
    Cancelled,
    /// A part of the work failed, which is said already; the rest is done.
    Reported(ErrorKind),
}

impl Status {
    /// The exit code of the process.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Found => 1,
            Self::Cancelled => ErrorKind::Cancelled.exit_code(),
            Self::Reported(kind) => kind.exit_code(),
        }
    }
}
