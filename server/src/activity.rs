//! Requests under way, and notice of when there are none.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::sync::{Notify, futures::Notified};

/// Requests under way.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    under_way: AtomicUsize,
    /// Set once a request took much memory.
    took_much: AtomicBool,
    settled: Notify,
}

impl Activity {
    pub(crate) fn begin(&self) {
        self.under_way.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn end(&self) {
        if self.under_way.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.settled.notify_one();
        }
    }

    /// Notes that a session was given back.
    pub(crate) fn session_back(&self) {
        self.settled.notify_one();
    }

    /// Notes that a request takes much memory.
    pub(crate) fn takes_much(&self) {
        self.took_much.store(true, Ordering::Release);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.under_way.load(Ordering::Acquire) == 0
    }

    /// Wait until no request is under way, or a session was given back.
    pub(crate) fn settled(&self) -> Notified<'_> {
        self.settled.notified()
    }

    /// True if a request took much memory since [`Activity::forget_much`].
    pub(crate) fn took_much(&self) -> bool {
        self.took_much.load(Ordering::Acquire)
    }

    /// Same as [`Activity::took_much`], and forgets it.
    pub(crate) fn forget_much(&self) -> bool {
        self.took_much.swap(false, Ordering::AcqRel)
    }
}
