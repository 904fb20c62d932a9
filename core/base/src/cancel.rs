//! Flags that stop work from another thread or a signal handler.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::Thread;
use std::time::Instant;

use crate::{Result, error};

/// A ticket to stop work with, such as one generation, within one graph execution. Clones
/// share it, and two are equal when they do.
///
/// It stays cancelled: work that begins later with the same ticket ends at once. Other work needs a ticket of its own.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<State>);

#[derive(Debug, Default)]
struct State {
    cancelled: AtomicBool,
    /// Tokens that cancel this one, too.
    others: RwLock<Vec<CancelToken>>,
    /// From then on it counts as cancelled.
    deadline: Option<Instant>,
    /// Threads that wait for it.
    waiting: RwLock<Vec<Thread>>,
}

impl CancelToken {
    /// A token that is not cancelled.
    pub fn new() -> Self {
        Self::default()
    }

    /// A token that each of `others` cancels.
    pub fn any(others: Vec<Self>) -> Self {
        Self(Arc::new(State { others: RwLock::new(others), ..State::default() }))
    }

    /// A token that this one cancels, and that counts as cancelled from `deadline` on.
    #[must_use]
    pub fn until(self, deadline: Instant) -> Self {
        let others = RwLock::new(vec![self]);
        Self(Arc::new(State { others, deadline: Some(deadline), ..State::default() }))
    }

    /// Unparks `thread` once somebody cancels this token, or one that it has followed from its beginning. A deadline
    /// unparks nobody.
    pub fn unpark(&self, thread: &Thread) {
        self.0.waiting.write().unwrap_or_else(PoisonError::into_inner).push(thread.clone());
        let others = self.0.others.read().unwrap_or_else(PoisonError::into_inner);
        others.iter().for_each(|other| other.unpark(thread));
        drop(others);
        if self.is_cancelled() {
            // It may have been cancelled before the thread was noted.
            thread.unpark();
        }
    }

    /// Until what it returns is dropped, `other` cancels this token, too. The one begun last ends first.
    pub fn follow(&self, other: &Self) -> LinkedToken {
        let mut others = self.0.others.write().unwrap_or_else(PoisonError::into_inner);
        others.push(other.clone());
        LinkedToken(self.clone())
    }

    /// A token that is cancelled by what cancels this one now, also once this one follows others.
    pub fn current(&self) -> Self {
        let others = self.0.others.read().unwrap_or_else(PoisonError::into_inner).clone();
        let deadline = self.0.deadline;
        Self(Arc::new(State { others: RwLock::new(others), deadline, ..State::default() }))
    }

    /// Asks the work to stop.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::SeqCst);
        // A signal handler waits for no lock: who holds it for writing looks at the flag afterwards.
        if let Ok(waiting) = self.0.waiting.try_read() {
            waiting.iter().for_each(Thread::unpark);
        }
    }

    /// True once the token's own deadline has passed.
    pub fn is_expired(&self) -> bool {
        self.0.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// True once the work was asked to stop.
    pub fn is_cancelled(&self) -> bool {
        let others = || self.0.others.read().unwrap_or_else(PoisonError::into_inner);
        self.0.cancelled.load(Ordering::SeqCst)
            || self.is_expired()
            || others().iter().any(Self::is_cancelled)
    }

    /// An error once the work was asked to stop.
    ///
    /// # Errors
    /// [`ErrorKind::Cancelled`](crate::ErrorKind::Cancelled) once the token is cancelled.
    pub fn check(&self) -> Result<()> {
        match self.is_cancelled() {
            true => Err(error!(Cancelled, "cancelled")),
            false => Ok(()),
        }
    }
}

/// A token that follows another one; see [`CancelToken::follow`].
#[derive(Debug)]
pub struct LinkedToken(CancelToken);

impl Drop for LinkedToken {
    fn drop(&mut self) {
        self.0.0.others.write().unwrap_or_else(PoisonError::into_inner).pop();
    }
}

impl PartialEq for CancelToken {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for CancelToken {}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_deadline_cancels_a_token_that_nobody_looks_at() {
        let now = Instant::now();
        let parent = CancelToken::new();
        let late = parent.clone().until(now + Duration::from_secs(3600));
        assert!(!late.is_cancelled() && !late.is_expired());
        let over = parent.clone().until(now);
        assert!(over.is_expired() && over.check().is_err() && over.current().is_cancelled());
        assert!(!parent.is_cancelled(), "the deadline is the token's own");
        parent.cancel();
        assert!(late.is_cancelled() && !late.is_expired());
    }

    #[test]
    fn a_thread_sleeps_until_the_token_is_cancelled() {
        let parent = CancelToken::new();
        let token = CancelToken::any(vec![parent.clone()]);
        let waits = std::thread::spawn(move || {
            token.unpark(&std::thread::current());
            while !token.is_cancelled() {
                std::thread::park();
            }
        });
        parent.cancel();
        waits.join().unwrap();
    }
}
