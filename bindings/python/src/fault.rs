//! Faults as Python's exceptions, and how a thread of Python waits.

use pyo3::prelude::*;
use pyo3::{PyErr, PyResult, Python};
use qhx_bindings::{Caller, Ended, Fault, Result, Waited};

/// The exception of a fault: what `qhx._errors` makes of it.
pub(crate) fn exception(py: Python<'_>, fault: &Fault) -> PyErr {
    let make = || {
        let (make, error) = (py.import("qhx._errors")?.getattr("make")?, fault.error());
        make.call1((fault.kind(), error.message(), error.hint_text(), error.code()))
    };
    make().map_or_else(|e| e, PyErr::from_value)
}

/// A result with its fault as an exception.
pub(crate) fn raised<T>(py: Python<'_>, result: Result<T>) -> PyResult<T> {
    result.map_err(|fault| exception(py, &fault))
}

/// Result of a call that waited, with its fault as an exception.
pub(crate) fn waited<T>(py: Python<'_>, result: Waited<T, PyErr>) -> PyResult<T> {
    result.map_err(|ended| match ended {
        Ended::Fault(fault) => exception(py, &fault),
        Ended::Stopped(interrupt) => interrupt,
    })
}

/// A thread that holds the interpreter's lock, which it waits without; signals, as of Ctrl-C, stop it.
pub(crate) struct Thread<'py>(pub Python<'py>);

impl Caller for Thread<'_> {
    type Stop = PyErr;

    fn blocking<T: Send>(&self, wait: impl FnOnce() -> T + Send) -> T {
        self.0.detach(wait)
    }

    fn look(&self) -> PyResult<()> {
        self.0.check_signals()
    }
}
