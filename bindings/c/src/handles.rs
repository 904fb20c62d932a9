//! Tables of live handles.
//!
//! A handle is a number that is never given out twice, of a range that no pointer is in on 64-bit machines. So one that
//! is freed, or that is a pointer to something else, is not found.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::fault::{Fault, Result};

static NEXT: AtomicUsize = AtomicUsize::new(1);

#[cfg(target_pointer_width = "64")]
const RANGE: usize = 0x5148_0000_0000_0000;
#[cfg(not(target_pointer_width = "64"))]
const RANGE: usize = 0;

/// The live handles of one kind.
pub(crate) struct Table<T> {
    what: &'static str,
    live: Mutex<BTreeMap<usize, Arc<T>>>,
    /// [`Table::add_only`] makes one.
    making: AtomicBool,
}

impl<T> Table<T> {
    pub(crate) const fn new(what: &'static str) -> Self {
        Self { what, live: Mutex::new(BTreeMap::new()), making: AtomicBool::new(false) }
    }

    fn live(&self) -> std::sync::MutexGuard<'_, BTreeMap<usize, Arc<T>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A handle of `value`.
    pub(crate) fn add<H>(&self, value: T) -> *mut H {
        let handle = RANGE | (NEXT.fetch_add(1, Ordering::Relaxed) << 4);
        self.live().insert(handle, Arc::new(value));
        std::ptr::without_provenance_mut(handle)
    }

    /// Adds the value of `make`, where there is no live handle and none is being made. `make` may call
    /// whatever uses the table: libraries that it opens run code of their own, and what they log goes to the caller.
    pub(crate) fn add_only<H>(&self, make: impl FnOnce() -> Result<T>) -> Result<*mut H> {
        if self.making.swap(true, Ordering::Acquire) {
            let message = format!("a {} is being made: wait for that call", self.what);
            return Err(Fault::busy(message));
        }
        let _making = Making(&self.making);
        if !self.live().is_empty() {
            return Err(Fault::busy(format!("there is a {} already: free it first", self.what)));
        }
        Ok(self.add(make()?))
    }

    /// Value behind a handle.
    pub(crate) fn get<H>(&self, handle: *mut H) -> Result<Arc<T>> {
        self.live().get(&handle.addr()).cloned().ok_or_else(|| self.unknown(handle.addr()))
    }

    /// Takes a handle out.
    pub(crate) fn remove<H>(&self, handle: *mut H) -> Result<Arc<T>> {
        let removed = self.live().remove(&handle.addr());
        removed.ok_or_else(|| self.unknown(handle.addr()))
    }

    fn unknown(&self, handle: usize) -> Fault {
        let what = self.what;
        Fault::handle(match handle {
            0 => format!("the {what} is NULL"),
            _ => format!("{handle:#x} is no live {what}: it was freed, or is no {what} of ours"),
        })
    }
}

/// Ends the making of a handle, also by a panic.
struct Making<'t>(&'t AtomicBool);

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
