//! Requests under way, and what is done once there are none: memory that they took goes back to the system.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};

use crate::app::Shared;

/// Time without a request after which memory goes back.
const QUIET: Duration = Duration::from_millis(500);

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

    fn is_idle(&self) -> bool {
        self.under_way.load(Ordering::Acquire) == 0
    }
}

/// Tidies up whenever no request is under way, and wakes for nothing else: sessions that nobody has used for a while
/// are closed, and memory that was freed goes back to the system.
pub(crate) async fn tidy(shared: Shared) {
    let activity = &shared.activity;
    loop {
        let settled = activity.settled.notified();
        match shared.registry.next_release(shared.options.session_idle) {
            Some(at) => {
                let _ = timeout_at(Instant::from_std(at), settled).await;
            }
            None => settled.await,
        }
        let of = Arc::clone(&shared);
        let released =
            tokio::task::spawn_blocking(move || of.registry.release(of.options.session_idle));
        if released.await.unwrap_or_default() > 0 {
            activity.takes_much();
        }
        if activity.is_idle() && activity.took_much.load(Ordering::Acquire) {
            sleep(QUIET).await;
            if activity.is_idle() && activity.took_much.swap(false, Ordering::AcqRel) {
                let trimmed = tokio::task::spawn_blocking(qhx_base::memory::give_back);
                let _ = trimmed.await;
            }
        }
    }
}
