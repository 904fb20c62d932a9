//! Errors as Python's exceptions.

use pyo3::prelude::*;
use pyo3::{PyErr, PyResult, Python};
use qhx::{Error, ErrorKind};

/// Why something failed: an error of the library, or a model that is in use.
#[derive(Debug)]
pub(crate) struct Fault {
    kind: &'static str,
    error: Error,
}

pub(crate) type Result<T> = std::result::Result<T, Fault>;

impl Fault {
    /// The model is in use.
    pub(crate) fn busy(message: &str, hint: &str) -> Self {
        Self { kind: "busy", error: Error::new(ErrorKind::Usage, message).hint(hint) }
    }

    /// An argument or a call makes no sense.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Error::new(ErrorKind::Usage, message).into()
    }

    /// The op or the engine panicked: the model has to be opened again.
    pub(crate) fn is_panic(&self) -> bool {
        matches!(self.error.kind(), ErrorKind::Panicked | ErrorKind::Internal)
    }

    /// The exception: what `qhx._errors` makes of it.
    pub(crate) fn exception(&self, py: Python<'_>) -> PyErr {
        let Self { kind, error } = self;
        let make = || {
            let make = py.import("qhx._errors")?.getattr("make")?;
            make.call1((*kind, error.message(), error.hint_text(), error.code()))
        };
        make().map_or_else(|e| e, PyErr::from_value)
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self { kind: error.kind().name(), error }
    }
}

/// A result with its error as an exception.
pub(crate) fn raised<T>(py: Python<'_>, result: Result<T>) -> PyResult<T> {
    result.map_err(|fault| fault.exception(py))
}
