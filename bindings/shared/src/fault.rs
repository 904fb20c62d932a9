//! Why something failed, before a language makes an exception of it.

use qhx::{Error, ErrorKind};

/// Why something failed: an error of the library, or a model that is in use.
#[derive(Debug)]
pub struct Fault {
    kind: &'static str,
    error: Error,
}

/// Result of a call that may fail.
pub type Result<T> = std::result::Result<T, Fault>;

impl Fault {
    /// The model is in use.
    pub fn busy(message: &str, hint: &str) -> Self {
        Self { kind: "busy", error: Error::new(ErrorKind::Usage, message).hint(hint) }
    }

    /// An argument or a call makes no sense.
    pub fn usage(message: impl Into<String>) -> Self {
        Error::new(ErrorKind::Usage, message).into()
    }

    /// A stable word: `busy`, or that of [`ErrorKind::name`].
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// Error with a likely fix.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// The op or the engine panicked: the model has to be opened again.
    pub(crate) fn is_panic(&self) -> bool {
        matches!(self.error.kind(), ErrorKind::Panicked | ErrorKind::Internal)
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self { kind: error.kind().name(), error }
    }
}

/// Why a call that waits came back without a result.
#[derive(Debug)]
pub enum Ended<S> {
    /// The awaited work failed.
    Fault(Fault),
    /// The caller wants to wait no longer.
    Stopped(S),
}

/// Result of a call that waits.
pub type Waited<T, S> = std::result::Result<T, Ended<S>>;

impl<S, F: Into<Fault>> From<F> for Ended<S> {
    fn from(fault: F) -> Self {
        Self::Fault(fault.into())
    }
}
