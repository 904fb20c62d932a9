//! Tables of live handles.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use qhx_bindings::{Fault, Result};

/// The next number; none is given out twice, in any table.
static NEXT: AtomicI64 = AtomicI64::new(1);

/// The live handles of one kind.
pub(crate) struct Table<T> {
    /// Message about a handle that is not live.
    ended: &'static str,
    live: Mutex<BTreeMap<i64, Arc<T>>>,
}

impl<T> Table<T> {
    pub(crate) const fn new(ended: &'static str) -> Self {
        Self { ended, live: Mutex::new(BTreeMap::new()) }
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<i64, Arc<T>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A handle of `value`.
    pub(crate) fn add(&self, value: T) -> i64 {
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        self.live().insert(handle, Arc::new(value));
        handle
    }

    /// Value behind a handle.
    pub(crate) fn get(&self, handle: i64) -> Result<Arc<T>> {
        self.live().get(&handle).cloned().ok_or_else(|| Fault::usage(self.ended))
    }

    /// Takes a handle out; `None` where it is not live.
    pub(crate) fn remove(&self, handle: i64) -> Option<Arc<T>> {
        self.live().remove(&handle)
    }
}
