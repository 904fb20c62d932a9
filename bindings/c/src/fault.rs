//! Errors at the C boundary, and the last error of each thread.

use std::cell::RefCell;
use std::ffi::CString;

use qhx::{Error, ErrorKind, catch_panic};

use crate::abi::{self, Status};

/// Why a function failed.
#[derive(Debug)]
pub(crate) struct Fault {
    pub status: Status,
    kind: &'static str,
    pub error: Error,
}

pub(crate) type Result<T> = std::result::Result<T, Fault>;

impl Fault {
    /// A handle that is not live.
    pub(crate) fn handle(message: String) -> Self {
        let error = Error::new(ErrorKind::Usage, message);
        Self { status: abi::HANDLE, kind: "handle", error }
    }

    /// Something is in use.
    pub(crate) fn busy(message: String) -> Self {
        let error = Error::new(ErrorKind::Usage, message);
        Self { status: abi::BUSY, kind: "busy", error }
    }

    /// An argument makes no sense.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Error::new(ErrorKind::Usage, message).into()
    }

    /// The op or the engine panicked: the model has to be opened again.
    pub(crate) fn is_panic(&self) -> bool {
        matches!(self.status, abi::PANICKED | abi::INTERNAL)
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        let kind = error.kind();
        let status = match kind {
            // A plugin's status otherwise, which cannot be distinguished.
            ErrorKind::Panicked => abi::PANICKED,
            kind => Status::from(kind.exit_code()),
        };
        Self { status, kind: kind.name(), error }
    }
}

/// The error of a thread, in texts of C.
pub(crate) struct Last {
    pub status: Status,
    pub kind: CString,
    pub message: CString,
    pub hint: Option<CString>,
    pub code: u64,
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// A text of C; messages have no NUL, and what has one ends there.
pub(crate) fn c_text(text: &str) -> CString {
    let text = text.split('\0').next().unwrap_or_default();
    CString::new(text).unwrap_or_default()
}

/// Remembers an error of this thread, and logs it.
pub(crate) fn remember(fault: &Fault) -> Status {
    let Fault { status, kind, error } = fault;
    if *status != abi::CANCELLED {
        tracing::error!(target: "qhexrt", "{}", error.message());
    }
    let last = Last {
        status: *status,
        kind: c_text(kind),
        message: c_text(error.message()),
        hint: error.hint_text().map(c_text),
        code: error.code().unwrap_or(0),
    };
    // A thread that ends has no last error any more.
    let _ = LAST.try_with(|slot| slot.replace(Some(last)));
    *status
}

/// Calls `read` with the last error of this thread.
pub(crate) fn with_last<T>(read: impl FnOnce(Option<&Last>) -> T) -> T {
    LAST.with_borrow(|last| read(last.as_ref()))
}

/// Does work whose panics become faults, with the fault remembered for [`with_last`]; `failed` is returned then.
pub(crate) fn guard<T>(failed: T, work: impl FnOnce() -> Result<T>) -> T {
    catch_panic(work).unwrap_or_else(|fault| {
        remember(&fault);
        failed
    })
}
