//! Ctrl-C: the first one asks the work to stop, the second one ends the process. A time limit does
//! the same: first it asks, then it ends.
//!
//! The work looks at the token between two executions. One that the NPU does not come back from cannot be called off:
//! after a while the user is told, and then there is the second Ctrl-C.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use qhx_base::{CancelToken, Error, ErrorKind, Result};

use super::exit;
use crate::say;

/// The exit code of an interrupted command.
pub const INTERRUPTED: i32 = ErrorKind::Cancelled.exit_code() as i32;

/// Maximum time that work may take to stop after it was asked to.
const GRACE: Duration = Duration::from_secs(5);

/// Time that the user waits for work to stop before hearing why it does not.
const PATIENCE: Duration = Duration::from_secs(2);

/// Turns Ctrl-C, SIGTERM and SIGHUP into a cancelled token.
#[derive(Debug, Clone)]
pub struct Interrupts {
    token: CancelToken,
    /// Something is under way that looks at the token. Otherwise Ctrl-C ends the process at once.
    working: Arc<AtomicBool>,
    /// Token that Ctrl-C cancels instead of `token`.
    ticket: Arc<Mutex<Option<CancelToken>>>,
}

/// Until it is dropped, the first Ctrl-C only cancels.
#[derive(Debug)]
pub struct Working(Interrupts);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.working.store(false, Ordering::Release);
        *self.0.lock() = None;
    }
}

/// Until it is dropped, the work has a limited time.
#[derive(Debug)]
pub struct TimeLimit {
    _until_dropped: Sender<()>,
}

impl Interrupts {
    /// Installs the handler. Once per process.
    ///
    /// # Errors
    /// When there is a handler already, or the system has none.
    pub fn install() -> Result<Self> {
        let interrupts =
            Self { token: CancelToken::new(), working: Arc::default(), ticket: Arc::default() };
        let handler = interrupts.clone();
        ctrlc::set_handler(move || {
            let ticket = handler.lock().clone().unwrap_or_else(|| handler.token.clone());
            let cancelled = handler.token.is_cancelled() || ticket.is_cancelled();
            if cancelled || !handler.working.load(Ordering::Acquire) {
                exit::now(INTERRUPTED);
            }
            ticket.cancel();
            let working = Arc::clone(&handler.working);
            std::thread::spawn(move || {
                std::thread::sleep(PATIENCE);
                if working.load(Ordering::Acquire) {
                    say!(
                        "the work has not stopped yet: it waits for the NPU or a host-op; press Ctrl-C again to end \
                         the program at once"
                    );
                }
            });
        })
        .map_err(|e| Error::caused(ErrorKind::Internal, "Ctrl-C cannot be handled", e))?;
        Ok(interrupts)
    }

    fn lock(&self) -> MutexGuard<'_, Option<CancelToken>> {
        self.ticket.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The token that the first Ctrl-C cancels, and a time limit: it ends all that the program does.
    pub fn token(&self) -> &CancelToken {
        &self.token
    }

    /// Says that work has begun that looks at the token.
    pub fn working(&self) -> Working {
        self.working.store(true, Ordering::Release);
        Working(self.clone())
    }

    /// Says that work has begun that looks at a ticket of its own, too: Ctrl-C cancels this one, and what comes later
    /// goes on.
    pub fn working_on(&self, ticket: &CancelToken) -> Working {
        *self.lock() = Some(ticket.clone());
        self.working()
    }

    /// Cancels the work when its time is up, and ends the process when that does not stop it: a
    /// host-op that calls no service is not asked.
    pub fn limit(&self, time: Duration) -> TimeLimit {
        let (sender, dropped) = mpsc::channel::<()>();
        let token = self.token.clone();
        std::thread::spawn(move || {
            let passes = |time| dropped.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
            if !passes(time) {
                return;
            }
            token.cancel();
            if passes(GRACE) {
                say!(
                    "error: the time of {} s is up, and the host-op did not stop within {} s more",
                    time.as_secs_f64(),
                    GRACE.as_secs()
                );
                exit::now(INTERRUPTED);
            }
        });
        TimeLimit { _until_dropped: sender }
    }
}
