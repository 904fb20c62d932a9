//! Options that a bundle is opened with.

use std::sync::Arc;

use crate::dump::Dump;
use crate::manifest::Manifest;
use crate::op::{OpProvider, ProgressFn};
use qhx_base::trace::Trace;
use qhx_base::{CancelToken, setters};
use qhx_exec::backend::{Backend, BackendInfo};
use qhx_exec::workspace::Tap;

/// Bundle, backend and options for [`Model::open`](super::Model::open).
#[non_exhaustive]
pub struct ModelOptions<'a> {
    /// The bundle.
    pub manifest: Arc<Manifest>,
    /// Backend that executes its graphs.
    pub backend: Arc<dyn Backend>,
    /// Provider of its host-op.
    pub ops: &'a dyn OpProvider,
    /// Threads for the op's parallel parts; `None` for one a core.
    pub threads: Option<usize>,
    /// Ends all that the model does, now and later, within one graph execution: for the end of the program. One
    /// generation has a ticket of its own, [`Request::cancel`](super::Request::cancel).
    pub cancel: CancelToken,
    /// Called with (positions consumed, total) during prefill.
    pub progress: Option<ProgressFn>,
    /// Dump of the arrays that the host-op makes, and of the logits of each prompt's last position.
    pub dump: Option<Arc<Dump>>,
    /// Trace of what was done when.
    pub trace: Option<Arc<Trace>>,
    /// See [`ModelOptions::executed`].
    pub tap: Option<Tap>,
    /// See [`ModelOptions::keep_states`].
    pub keep_states: usize,
    /// See [`ModelOptions::batching`].
    pub batching: bool,
}

impl<'a> ModelOptions<'a> {
    /// A bundle, what executes its graphs, and where its host-op comes from.
    pub fn new(
        manifest: impl Into<Arc<Manifest>>,
        backend: Arc<dyn Backend>,
        ops: &'a dyn OpProvider,
    ) -> Self {
        Self {
            manifest: manifest.into(),
            backend,
            ops,
            threads: None,
            cancel: CancelToken::new(),
            progress: None,
            dump: None,
            trace: None,
            tap: None,
            keep_states: 0,
            batching: false,
        }
    }

    setters! {
        /// Threads for the op's parallel parts; one a core by default.
        threads(threads: impl Into<Option<usize>>) => threads = threads.into(),
        /// Sets the token that ends all that the model does, now and later.
        cancelled_by(cancel: CancelToken) => cancel = cancel,
        /// Called with (positions consumed, total) during prefill.
        progress(progress: impl Into<Option<ProgressFn>>) => progress = progress.into(),
        /// Sets the dump of the arrays that the host-op makes.
        dump(dump: impl Into<Option<Arc<Dump>>>) => dump = dump.into(),
        /// Sets the trace of what was done when.
        trace(trace: impl Into<Option<Arc<Trace>>>) => trace = trace.into(),
        /// Called after each execution of a graph that succeeded.
        executed(tap: impl Into<Option<Tap>>) => tap = tap.into(),
        /// Keeps states of earlier conversations, up to this number of bytes, in the host's memory; none by default. A
        /// prompt goes on from the one that it begins with, in any session of the model, so that conversations that
        /// take turns do not consume theirs again. A state takes what [`Model::export_state`](super::Model::export_state) gives; one that saves
        /// fewer than 32 positions is not kept. Bundles whose host-op cannot export it keep none.
        keep_states(bytes: usize) => keep_states = bytes,
        /// Has sessions that generate at the same time, each on a thread of its own, take their steps together where the
        /// backend can: weights are read once for the tokens of all of them (continuous batching). Sessions join and
        /// leave between steps, and each gets the same answer as alone. Off by default.
        batching(on: bool) => batching = on,
    }
}

impl std::fmt::Debug for ModelOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelOptions")
            .field("manifest", &self.manifest.path)
            .field("backend", &self.backend)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

/// Backend that executes the tokens of answers: see [`Model::decode_on`](super::Model::decode_on).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DecodeBackend {
    /// Description of the backend.
    pub backend: BackendInfo,
    /// Why, for people.
    pub reason: String,
}
