//! Panics end here: a function that the other side of the interface calls must not unwind into it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `body`; a panic in it comes back as its message.
///
/// The panic's payload is freed here as well, because its own destructor may panic.
///
/// # Errors
/// The message of the panic.
pub fn catch<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|payload| {
        let text = payload
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("(no message)")
            .to_owned();
        discard(payload);
        text
    })
}

/// Frees what was thrown. What its destructor throws may be of the same kind and is leaked.
fn discard(payload: Box<dyn Any + Send>) {
    if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(second);
    }
}
