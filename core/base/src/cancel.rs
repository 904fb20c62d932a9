//! Flags that stop work from another thread or a signal handler.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::{Error, ErrorKind, Result};

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

    /// Until what it returns is dropped, `other` cancels this token, too. The one begun last ends first.
    pub fn follow(&self, other: &Self) -> Following {
        let mut others = self.0.others.write().unwrap_or_else(PoisonError::into_inner);
        others.push(other.clone());
        Following(self.clone())
    }

    /// A token that is cancelled by what cancels this one now, also once this one follows others.
    pub fn current(&self) -> Self {
        Self::any(self.0.others.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Asks the work to stop.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Release);
    }

    /// True once the work was asked to stop.
    pub fn is_cancelled(&self) -> bool {
        let others = || self.0.others.read().unwrap_or_else(PoisonError::into_inner);
        self.0.cancelled.load(Ordering::Acquire) || others().iter().any(Self::is_cancelled)
    }

    /// An error once the work was asked to stop.
    ///
    /// # Errors
    /// [`ErrorKind::Cancelled`] once the token is cancelled.
    pub fn check(&self) -> Result<()> {
        match self.is_cancelled() {
            true => Err(Error::new(ErrorKind::Cancelled, "cancelled")),
            false => Ok(()),
        }
    }
}

/// A token that follows another one; see [`CancelToken::follow`].
#[derive(Debug)]
pub struct Following(CancelToken);

impl Drop for Following {
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
