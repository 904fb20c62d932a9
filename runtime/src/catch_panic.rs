//! Panics as errors, for borders that none may cross.

use std::panic::{AssertUnwindSafe, catch_unwind};

use qhx_base::{Error, error};

/// Does work whose panics become errors of [`ErrorKind::Internal`](qhx_base::ErrorKind::Internal).
///
/// State that was left half done has to be behind a lock that says so, or has to be opened again.
///
/// # Errors
/// Errors of the work, or its panic message.
pub fn catch_panic<T, E: From<Error>>(work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no reason");
        Err(error!(Internal, "the library panicked: {text}").into())
    })
}
