//! An open bundle, ready to run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::checked::Checked;
use super::model_options::{DecodeBackend, ModelOptions};
use super::open_bundle::{ContextLoad, Executor, OpSpace, OpenBundle};
use super::pack::Embeddings;
use super::prefix_cache::KeptStates;
use super::prefix_reuse::Prefix;
use super::speculate::Speculation;
use super::texts::TextPipeline;
use crate::manifest::Manifest;
use crate::op::{HostOp, MediaRules, OpDescription, OpEntry, OpenInfo, SpanStats, Task};
use crate::sampling::SamplingParams;
use qhx_base::trace::{self, Trace};
use qhx_base::{CancelToken, Result, error};
use qhx_exec::backend::{Backend, BackendInfo, ContextSource};
use qhx_exec::workspace::GraphStats;
use qhx_text::Tokenizer;
use qhx_types::GraphInfo;

/// A session of an open bundle: contexts loaded, host-op bound, tokenizer read.
pub struct Model {
    /// Closed before the contexts of the bundle.
    pub(super) op: Checked,
    pub(super) space: OpSpace,
    pub(super) prefix: Prefix,
    pub(super) speculation: Speculation,
    pub(super) embeddings: Embeddings,
    pub(super) load: Duration,
    pub(super) bundle: Arc<OpenBundle>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("manifest", &self.manifest().path)
            .field("op", &self.op().description.name)
            .field("backend", &self.backend().name)
            .finish_non_exhaustive()
    }
}

impl Model {
    /// Opens a bundle: finds its host-op, loads its contexts, binds and reads everything. Nothing
    /// is left half-open on failure.
    ///
    /// # Errors
    /// When anything in the bundle is missing, invalid or not supported, or a context does not load.
    pub fn open(options: ModelOptions<'_>) -> Result<Self> {
        let start = Instant::now();
        let trace = options.trace.clone();
        let _span = trace::span_with(trace.as_ref(), "open", |s| {
            s.argument("bundle", options.manifest.path.display().to_string());
        });
        let (bundle, space, op) = OpenBundle::open(options)?;
        Ok(Self::over(bundle, space, op, start))
    }

    /// A session over an op, which was begun to be opened at `start`.
    pub(super) fn over(
        bundle: Arc<OpenBundle>,
        space: OpSpace,
        op: Box<dyn HostOp>,
        start: Instant,
    ) -> Self {
        let op = Checked::new(op, &bundle.entry.description.name);
        Self {
            prefix: Prefix::new(Arc::clone(&bundle.kept)),
            speculation: Speculation::default(),
            embeddings: Embeddings::new(&op.info().packing),
            bundle,
            op,
            space,
            load: start.elapsed(),
        }
    }

    /// Opens another session of the bundle: see [`Sessions::open`].
    ///
    /// # Errors
    /// Errors of [`Sessions::open`].
    pub fn new_session(&self) -> Result<Self> {
        self.sessions().open()
    }

    /// Handle that opens further sessions of the bundle, also while this one generates.
    pub fn sessions(&self) -> Sessions {
        Sessions(Arc::clone(&self.bundle))
    }

    /// The bundle's manifest.
    pub fn manifest(&self) -> &Manifest {
        self.bundle.manifest()
    }

    /// Sampling of conversations that the bundle declares; none where it leaves that open.
    pub fn sampling(&self) -> Option<&SamplingParams> {
        self.manifest().params.sampling.as_ref()
    }

    /// The host-op and where it comes from.
    pub fn op(&self) -> &OpEntry {
        &self.bundle.entry
    }

    /// Properties that the host-op found in the bundle.
    pub fn info(&self) -> &OpenInfo {
        self.op.info()
    }

    /// Rules by which files become the images, audio and videos that the host-op takes.
    pub fn media_rules(&self) -> MediaRules {
        self.op.info().media
    }

    /// Backend that executes the graphs.
    pub fn backend(&self) -> &BackendInfo {
        &self.bundle.executor.info
    }

    /// Tokenizer, chat template and limits, which any thread may use while a generation runs.
    pub fn texts(&self) -> Arc<TextPipeline> {
        Arc::clone(&self.bundle.texts)
    }

    /// Backend that executes the tokens of answers; `None` if none but [`Model::backend`] was asked for.
    pub fn decoder(&self) -> Option<&DecodeBackend> {
        self.bundle.decoder.as_ref()
    }

    /// Has another backend consume the tokens of answers, from the state that this one consumed the prompt to: caches
    /// and replaced states go over once after a prompt, and back before one of 32 positions or more. Shorter ones are
    /// consumed where the state is. Weights are in memory for both. `None` has the model's own backend consume them
    /// again. `reason` is for people.
    ///
    /// The consumed positions are forgotten. Sessions that are opened from now on do the same.
    ///
    /// # Errors
    /// When the host-op does not generate, or the bundle has no graphs that `backend` executes. The model is as before
    /// then.
    pub fn decode_on(
        &mut self,
        backend: Option<Arc<dyn Backend>>,
        reason: impl Into<String>,
    ) -> Result<()> {
        self.require(Task::Generate, "generate")?;
        let start = Instant::now();
        let before = Arc::clone(&self.bundle);
        let tokens = backend.map(|backend| before.executor_of_tokens(backend)).transpose()?;
        let reopens = tokens.is_some() || before.token_executor.is_some();
        let backend = tokens.as_ref().unwrap_or(&before.executor).info.clone();
        let bundle = Arc::make_mut(&mut self.bundle);
        bundle.decoder = Some(DecodeBackend { backend, reason: reason.into() });
        bundle.token_executor = tokens;
        if reopens && let Err(e) = self.reopen() {
            self.bundle = before;
            // Where that fails, too, the next generation tries it again.
            let _ = self.reopen();
            return Err(e);
        }
        self.load += start.elapsed();
        Ok(())
    }

    /// The tokenizer, when the bundle has one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.bundle.texts.tokenizer()
    }

    /// True when conversations can be rendered.
    pub fn can_chat(&self) -> bool {
        self.bundle.texts.can_chat()
    }

    /// Time that opening took.
    pub fn load_time(&self) -> Duration {
        self.load
    }

    /// Time that loading each context took, in the order of the manifest.
    pub fn context_loads(&self) -> &[ContextLoad] {
        &self.bundle.context_loads
    }

    /// The trace that the model writes to.
    pub fn trace(&self) -> Option<&Arc<Trace>> {
        self.bundle.trace()
    }

    /// Ends all that the model does, see [`ModelOptions::cancel`].
    pub fn cancel_token(&self) -> &CancelToken {
        &self.bundle.cancel
    }

    /// Does work with the model that `cancel` stops within one graph execution, such as embedding texts.
    /// [`Model::generate`] does so itself with the request's ticket.
    ///
    /// Work that is stopped fails with [`ErrorKind::Cancelled`](qhx_base::ErrorKind::Cancelled).
    pub fn cancellable<T>(&mut self, cancel: &CancelToken, work: impl FnOnce(&mut Self) -> T) -> T {
        let _until = self.space.cancel.follow(cancel);
        work(self)
    }

    /// Bytes that this session allocated, such as its caches.
    pub fn session_bytes(&self) -> u64 {
        self.space.allocated.bytes()
    }

    /// Bytes of the files that were opened for all sessions: contexts in the form that is executed, tables, and what
    /// lies beside them.
    pub fn file_bytes(&self) -> u64 {
        self.bundle.file_bytes()
    }

    /// Time and executions of every graph since the model was opened.
    pub fn graph_stats(&self) -> Vec<GraphStats> {
        self.op.graph_stats()
    }

    /// Time in the host-op's own parts since the model was opened.
    pub fn span_stats(&self) -> Vec<SpanStats> {
        self.op.span_stats()
    }

    /// Counts executions and times from now on, as if the model had just been opened.
    pub fn forget_counts(&mut self) {
        self.op.forget_counts();
    }

    /// Device that executes the graphs, see [`Backend::device`].
    pub fn device(&self) -> Option<String> {
        self.bundle.executor.backend.device()
    }

    /// True where another processor computes what the device would, see [`Backend::emulates`].
    pub fn is_emulated(&self) -> bool {
        self.bundle.executor.backend.emulates()
    }

    /// Descriptions of all graphs, in the manifest's order of contexts. Contexts that are not loaded any more are
    /// opened.
    ///
    /// # Errors
    /// When one of these does not open.
    pub fn graphs(&self) -> Result<Vec<Arc<GraphInfo>>> {
        let Executor { backend, sources, contexts, .. } = &self.bundle.executor;
        let opened = contexts.open(&**backend, sources, &self.space.cancel)?;
        Ok(opened.iter().flat_map(|opened| opened.context.graphs().to_vec()).collect())
    }

    /// The contexts that are open, with their files.
    pub fn context_sources(&self) -> &[ContextSource] {
        &self.bundle.executor.sources
    }

    /// The host-op itself, for tools that step it by hand. What it consumes that way is not
    /// known to [`Model::generate`]: call [`Model::reset`] afterwards. An op that does not keep its
    /// promises is named in the error.
    pub fn op_mut(&mut self) -> &mut dyn HostOp {
        &mut self.op
    }

    /// Errors unless the host-op does `task`, which messages call `verb`. The error names what the op does, and the
    /// command that asks for it.
    ///
    /// # Errors
    /// An error of kind [`ErrorKind::Usage`](qhx_base::ErrorKind::Usage).
    pub fn require(&self, task: Task, verb: &str) -> Result<()> {
        let OpDescription { name, tasks, .. } = &self.op().description;
        if tasks.contains(&task) {
            return Ok(());
        }
        let names = tasks.iter().map(|task| task.name()).collect::<Vec<_>>().join(", ");
        let path = self.manifest().path.display();
        let error = error!(Usage, "{path}: host-op {name:?} does not {verb}; it does {names}");
        Err(match tasks.first() {
            Some(Task::Other) | None => error,
            Some(task) => error.hint(format!("use it with `qhx {}`", task.name())),
        })
    }
}

impl Model {
    /// Keeps the state as it is, for whichever session is asked to go on from it: where several of them take turns,
    /// after each answer. Nothing happens where none are kept; see [`ModelOptions::keep_states`](super::ModelOptions::keep_states).
    ///
    /// # Errors
    /// When the host-op fails so that its state is unknown.
    pub fn keep_state(&mut self) -> Result<()> {
        if self.space.loss.happened() || self.op.is_closed() || !self.prefix.kept.is_on() {
            return Ok(());
        }
        self.settle();
        self.prefix.keep(&mut self.op)
    }

    /// States of earlier conversations that are kept for all sessions.
    pub fn kept_states(&self) -> KeptStates {
        self.prefix.kept.counts()
    }

    /// Forgets the states of earlier conversations.
    pub fn forget_kept_states(&self) {
        self.prefix.kept.clear();
    }

    /// Forgets everything consumed so far, but for [kept states](super::ModelOptions::keep_states).
    ///
    /// # Errors
    /// When the host-op cannot be reset.
    pub fn reset(&mut self) -> Result<()> {
        self.prefix.clear(&mut self.op)
    }

    /// Keeps what the op says that it consumed.
    pub(super) fn settle(&mut self) {
        self.prefix.settle(self.op.position());
    }

    /// Forgets the state that made logits unusable, and what is saved of it.
    pub(super) fn forget_state(&mut self) {
        self.prefix.kept.drop_shared(&self.prefix.sequence);
        if let Err(e) = self.reset() {
            tracing::warn!("the state could not be reset: {e}");
        }
    }
}

/// Opener of a bundle's sessions: its contexts, files, threads and tokenizer, which all of them share. They stay loaded
/// as long as it or a session is there. Any thread may open one.
#[derive(Clone)]
pub struct Sessions(Arc<OpenBundle>);

impl std::fmt::Debug for Sessions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let path = &self.0.manifest().path;
        f.debug_struct("Sessions").field("manifest", path).finish_non_exhaustive()
    }
}

impl Sessions {
    /// States of earlier conversations that are kept for all sessions.
    pub fn kept_states(&self) -> KeptStates {
        self.0.kept.counts()
    }

    /// Opens a session: a model with a state of its own. Sessions may be used from different threads; their executions
    /// wait for each other, and who waited longest is next.
    ///
    /// The token in [`ModelOptions::cancel`] ends all sessions. Each session has its own copy of the host tables that
    /// the op keeps in memory.
    ///
    /// # Errors
    /// The host-op cannot be opened once more, or contexts that were lost cannot be.
    pub fn open(&self) -> Result<Model> {
        let start = Instant::now();
        let mut space = OpSpace::new(&self.0.cancel, None);
        let op = self.0.open_op(&mut space)?;
        Ok(Model::over(Arc::clone(&self.0), space, op, start))
    }
}
