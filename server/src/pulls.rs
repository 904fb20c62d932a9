//! Models that are being obtained: a few at a time, each once however many clients wait for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::StatusCode;
use qhx::CancelToken;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};

use crate::catalog::CatalogProgress;
use crate::error::{ApiError, Result};

/// Models that are obtained at a time. Making one takes most of the machine.
const AT_A_TIME: usize = 1;

/// Models that are obtained or wait for it.
const MAX_PULLS: usize = 16;

/// Failures that are remembered.
const MAX_FAILURES: usize = 32;

/// Characters of a step's name.
const STEP: usize = 200;

/// State of a pull.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PullState {
    /// Others are obtained first.
    Waiting,
    Running {
        step: String,
        done: u64,
        total: Option<u64>,
    },
    Done,
    Failed(Failure),
}

/// Error of a pull, and true if a client ended it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub message: String,
    pub cancelled: bool,
}

impl PullState {
    /// Status, as Ollama's lines have it.
    pub(crate) fn line(&self) -> Value {
        match self {
            Self::Waiting => json!({"status": "waiting for other models"}),
            Self::Running { step, done: 0, total: None } => json!({"status": step}),
            Self::Running { step, done, total } => {
                let mut line = json!({"status": step, "completed": done});
                if let Some(total) = total {
                    line["total"] = (*total).into();
                }
                line
            }
            Self::Done => json!({"status": "success"}),
            Self::Failed(failure) => json!({"error": failure.message}),
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        matches!(self, Self::Done | Self::Failed(_))
    }
}

/// A model that is being obtained.
#[derive(Debug)]
pub(crate) struct Pull {
    pub name: String,
    pub cancel: CancelToken,
    state: watch::Sender<PullState>,
}

impl Pull {
    pub(crate) fn watch(&self) -> watch::Receiver<PullState> {
        self.state.subscribe()
    }

    pub(crate) fn note(&self, progress: CatalogProgress<'_>) {
        let CatalogProgress { step, done, total } = progress;
        let step = step.chars().take(STEP).collect();
        self.state.send_replace(PullState::Running { step, done, total });
    }
}

/// Work with a model's files that is under way.
#[derive(Debug, Default)]
struct UnderWay {
    pulls: Vec<Arc<Pull>>,
    removals: Vec<String>,
    /// Names of models whose last pull failed, and the reasons.
    failures: Vec<(String, String)>,
}

/// All work with models' files.
#[derive(Debug)]
pub(crate) struct Pulls {
    under_way: Mutex<UnderWay>,
    /// Places of [`AT_A_TIME`].
    places: Semaphore,
}

impl Default for Pulls {
    fn default() -> Self {
        Self { under_way: Mutex::default(), places: Semaphore::new(AT_A_TIME) }
    }
}

impl Pulls {
    fn lock(&self) -> MutexGuard<'_, UnderWay> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pull of a model that is under way.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<Pull>> {
        self.lock().pulls.iter().find(|pull| pull.name == name).cloned()
    }

    /// States of all pulls, by name.
    pub(crate) fn states(&self) -> BTreeMap<String, PullState> {
        let state = |pull: &Arc<Pull>| (pull.name.clone(), pull.state.borrow().clone());
        self.lock().pulls.iter().map(state).collect()
    }

    /// Reasons of the last pulls that failed, by name.
    pub(crate) fn failures(&self) -> BTreeMap<String, String> {
        self.lock().failures.iter().cloned().collect()
    }

    /// The pull of a model, and true if it is new: the caller has to do it then.
    ///
    /// # Errors
    /// When the model is being removed, or too many are obtained.
    pub(crate) fn begin(&self, name: &str, stop: &CancelToken) -> Result<(Arc<Pull>, bool)> {
        let mut under_way = self.lock();
        if let Some(pull) = under_way.pulls.iter().find(|pull| pull.name == name) {
            return Ok((Arc::clone(pull), false));
        }
        if under_way.removals.iter().any(|removed| removed == name) {
            return Err(busy(name, "it is being removed; try again later"));
        }
        if under_way.pulls.len() >= MAX_PULLS {
            let message = format!("{MAX_PULLS} models are being pulled; try again later");
            return Err(
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).code("too_many_pulls")
            );
        }
        under_way.failures.retain(|(failed, _)| failed != name);
        let pull = Arc::new(Pull {
            name: name.to_owned(),
            cancel: CancelToken::any(vec![stop.clone()]),
            state: watch::Sender::new(PullState::Waiting),
        });
        under_way.pulls.push(Arc::clone(&pull));
        Ok((pull, true))
    }

    /// Waits for a place among the models that are obtained.
    pub(crate) async fn place(&self) -> Option<tokio::sync::SemaphorePermit<'_>> {
        self.places.acquire().await.ok()
    }

    /// Ends a pull.
    pub(crate) fn end(&self, pull: &Pull, failure: Option<Failure>) {
        let mut under_way = self.lock();
        under_way.pulls.retain(|other| other.name != pull.name);
        if let Some(failure) = failure.as_ref().filter(|failure| !failure.cancelled) {
            if under_way.failures.len() >= MAX_FAILURES {
                under_way.failures.remove(0);
            }
            under_way.failures.push((pull.name.clone(), failure.message.clone()));
        }
        drop(under_way);
        pull.state.send_replace(failure.map_or(PullState::Done, PullState::Failed));
    }

    /// Ends all pulls.
    pub(crate) fn cancel(&self) {
        self.lock().pulls.iter().for_each(|pull| pull.cancel.cancel());
    }

    /// Notes that a model is being removed, until what is returned is dropped.
    ///
    /// # Errors
    /// When it is being pulled or removed.
    pub(crate) fn removing(&self, name: &str) -> Result<Removing<'_>> {
        let mut under_way = self.lock();
        if under_way.pulls.iter().any(|pull| pull.name == name) {
            return Err(busy(name, "it is being pulled: cancel that first"));
        }
        if under_way.removals.iter().any(|removed| removed == name) {
            return Err(busy(name, "it is being removed"));
        }
        under_way.removals.push(name.to_owned());
        under_way.failures.retain(|(failed, _)| failed != name);
        Ok(Removing { pulls: self, name: name.to_owned() })
    }
}

/// A model that is being removed.
pub(crate) struct Removing<'a> {
    pulls: &'a Pulls,
    name: String,
}

impl Drop for Removing<'_> {
    fn drop(&mut self) {
        self.pulls.lock().removals.retain(|removed| *removed != self.name);
    }
}

/// The error of a model that something else is done with.
pub(crate) fn busy(name: &str, message: &str) -> ApiError {
    ApiError::new(StatusCode::CONFLICT, format!("{name}: {message}")).param("model").code("busy")
}
