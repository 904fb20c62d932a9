//! Pauses that a cancelled token ends, and requests that end with one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use qhx_base::{CancelToken, Result, error};
use ureq::Agent;

/// Interval at which a token is checked.
const STEP: Duration = Duration::from_millis(50);

/// Waits so long, or until the work is cancelled.
pub(crate) fn pause(time: Duration, cancel: &CancelToken) -> Result<()> {
    let end = Instant::now() + time;
    loop {
        cancel.check()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(STEP));
    }
}

/// Does the work, whose requests end when it is cancelled: nobody waits for a host that is silent.
pub(crate) fn interruptible<T>(
    agent: &Agent,
    cancel: &CancelToken,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let done = AtomicBool::new(false);
    let result = thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                if cancel.is_cancelled() {
                    agent.clone().shutdown();
                    break;
                }
                thread::park_timeout(STEP);
            }
        });
        let result = work();
        done.store(true, Ordering::Release);
        watcher.thread().unpark();
        result
    });
    match result {
        // Whatever the connection reported when it was closed.
        Err(_) if cancel.is_cancelled() => Err(error!(Cancelled, "cancelled")),
        result => result,
    }
}
