//! Memory for requests: a budget of all, taken before a body is read and held until its work is over.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Requests of fewer bytes take none: there are only as many of them as connections.
const FREE: usize = 64 << 10;

/// Bodies of more bytes are parsed where that keeps no other request waiting.
const LARGE: usize = 256 << 10;

/// Bytes that the server takes for a body of one byte: the body, and what is made of it.
const COPIES: usize = 2;

/// Bytes of a value of parsed JSON, and of a member of an object.
const VALUE: usize = 32;
const MEMBER: usize = 96;

/// Bytes of a permit.
const UNIT: usize = 1 << 10;

/// Memory of all requests.
#[derive(Debug)]
pub(crate) struct Budget {
    units: usize,
    free: Arc<Semaphore>,
}

impl Budget {
    pub(crate) fn new(bytes: usize) -> Self {
        let units = bytes.div_ceil(UNIT).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        Self { units, free: Arc::new(Semaphore::new(units)) }
    }
}

/// Memory of a request. Clones share it, and the last one gives it back.
#[derive(Debug, Clone, Default)]
pub(crate) struct Memory(Arc<Held>);

#[derive(Debug, Default)]
struct Held {
    /// Bytes of the body.
    body: AtomicUsize,
    permit: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Memory {
    /// Waits until there is memory for a body of some bytes; for one that is larger than the budget, until it is alone.
    pub(crate) async fn take(&self, budget: &Budget, body: usize) {
        self.0.body.store(body, Ordering::Relaxed);
        self.grow(budget, body.saturating_mul(COPIES)).await;
    }

    /// Waits until there is memory for the values of a body of JSON, too.
    pub(crate) async fn take_values(&self, budget: &Budget, body: &[u8]) {
        self.0.body.store(body.len(), Ordering::Relaxed);
        self.grow(budget, weight(body)).await;
    }

    async fn grow(&self, budget: &Budget, bytes: usize) {
        let held = {
            let permit = self.0.permit.lock().unwrap_or_else(PoisonError::into_inner);
            permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits)
        };
        let units = if bytes <= FREE { 0 } else { bytes.div_ceil(UNIT).min(budget.units) };
        let more = u32::try_from(units.saturating_sub(held)).unwrap_or(u32::MAX);
        if more == 0 {
            return;
        }
        // It is never closed.
        let Ok(more) = Arc::clone(&budget.free).acquire_many_owned(more).await else { return };
        let mut permit = self.0.permit.lock().unwrap_or_else(PoisonError::into_inner);
        match permit.as_mut() {
            Some(permit) => permit.merge(more),
            None => *permit = Some(more),
        }
    }

    /// Does work with the body where it keeps no other request waiting.
    pub(crate) fn work<T>(&self, work: impl FnOnce() -> T) -> T {
        if self.0.body.load(Ordering::Relaxed) < LARGE {
            return work();
        }
        tokio::task::block_in_place(work)
    }
}

/// Bytes that a body of JSON takes with its values, at most about.
fn weight(body: &[u8]) -> usize {
    let values = body.iter().map(|byte| match byte {
        b',' | b'[' | b'{' => VALUE,
        b':' => MEMBER,
        _ => 0,
    });
    body.len().saturating_mul(COPIES).saturating_add(values.sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_values_weigh_more_than_their_text() {
        assert_eq!(weight(br#""a text""#), 16);
        let many = [b"[".to_vec(), b"[],".repeat(1000), b"1]".to_vec()].concat();
        assert!(weight(&many) > 1000 * 2 * VALUE, "{}", weight(&many));
    }
}
