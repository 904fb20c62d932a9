//! Slices that the host's threads fill together.

use std::sync::{Mutex, PoisonError};

use qhx_op::{Host, Result};

/// Calls `body(i, chunk)` for the chunks of `len` elements of `target`, the last one shorter, on the
/// host's threads. Allocates nothing. A panic in `body` becomes an error.
///
/// [`Host::parallel_fill`] does the same for buffers.
///
/// # Errors
/// When `body` panics.
///
/// # Panics
/// When `len` is 0.
pub fn parallel_chunks<T: Send>(
    host: &Host,
    target: &mut [T],
    len: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) -> Result<()> {
    let count = target.len().div_ceil(len);
    let chunks = Mutex::new(target.chunks_mut(len).enumerate());
    host.parallel_for(count, |_| {
        let next = chunks.lock().unwrap_or_else(PoisonError::into_inner).next();
        if let Some((index, chunk)) = next {
            body(index, chunk);
        }
    })
}
