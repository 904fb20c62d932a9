//! An open bundle, ready to run.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::checked::Checked;
use super::contexts;
use super::pack::Packer;
use super::prefix_cache::{KeptStates, PrefixCache};
use super::prefix_reuse::Consumed;
use super::speculate::Speculation;
use super::split_op::SplitOp;
use super::state;
use super::texts::TextPipeline;
use crate::dump::Dump;
use crate::manifest::Manifest;
use crate::op::{
    HostOp, MediaRules, OpEntry, OpOpener, OpProvider, OpServices, OpenInfo, ProgressFn, SpanStats,
    Task,
};
use crate::sampling::{AllowedTokens, SamplingParams};
use qhx_base::artifacts::Artifacts;
use qhx_base::trace::{self, Trace};
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_exec::Workspace;
use qhx_exec::backend::{Backend, BackendInfo, ContextSource, Opened};
use qhx_exec::workspace::{Allocated, DeviceLoss, GraphStats, LoadedContexts, Tap};
use qhx_text::Tokenizer;
use qhx_types::GraphInfo;

/// Bundle, backend and options for [`Model::open`].
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
        }
    }

    /// Threads for the op's parallel parts; one a core by default.
    #[must_use]
    pub fn threads(mut self, threads: impl Into<Option<usize>>) -> Self {
        self.threads = threads.into();
        self
    }

    /// Sets the token that ends all that the model does, now and later.
    #[must_use]
    pub fn cancelled_by(mut self, cancel: CancelToken) -> Self {
        self.cancel = cancel;
        self
    }

    /// Called with (positions consumed, total) during prefill.
    #[must_use]
    pub fn progress(mut self, progress: impl Into<Option<ProgressFn>>) -> Self {
        self.progress = progress.into();
        self
    }

    /// Sets the dump of the arrays that the host-op makes.
    #[must_use]
    pub fn dump(mut self, dump: impl Into<Option<Arc<Dump>>>) -> Self {
        self.dump = dump.into();
        self
    }

    /// Sets the trace of what was done when.
    #[must_use]
    pub fn trace(mut self, trace: impl Into<Option<Arc<Trace>>>) -> Self {
        self.trace = trace.into();
        self
    }

    /// Called after each execution of a graph that succeeded.
    #[must_use]
    pub fn executed(mut self, tap: impl Into<Option<Tap>>) -> Self {
        self.tap = tap.into();
        self
    }

    /// Keeps states of earlier conversations, up to this number of bytes, in the host's memory; none by default. A
    /// prompt goes on from the one that it begins with, in any session of the model, so that conversations that take
    /// turns do not consume theirs again. A state takes what [`Model::export_state`] gives; one that saves fewer than
    /// 32 positions is not kept. Bundles whose host-op cannot export it keep none.
    #[must_use]
    pub fn keep_states(mut self, bytes: usize) -> Self {
        self.keep_states = bytes;
        self
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

/// Time that loading one context took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextLoad {
    /// Key in the manifest.
    pub key: String,
    /// From opening its file until its graphs could be bound.
    pub time: Duration,
    /// Bytes that it holds in memory, as far as the backend knows; 0 if it does not.
    pub resident_bytes: u64,
}

/// An open bundle: contexts loaded, host-op bound, tokenizer read.
pub struct Model {
    pub(super) manifest: Arc<Manifest>,
    pub(super) texts: Arc<TextPipeline>,
    pub(super) op: Checked,
    /// Tokens that may be chosen: those that the op can consume and the tokenizer knows.
    pub(super) allowed: Arc<AllowedTokens>,
    pub(super) consumed: Consumed,
    pub(super) speculation: Speculation,
    pub(super) packer: Packer,
    /// Device loss of the workspace that the op was opened over.
    pub(super) loss: DeviceLoss,
    /// By the op, in its workspaces.
    allocated: Allocated,
    /// The last embedding.
    pub(super) vector: Vec<f32>,
    pub(super) cancel: CancelToken,
    /// Token that the op's executions check: `cancel`, and the ticket of the current call.
    pub(super) session: CancelToken,
    pub(super) dump: Option<Arc<Dump>>,
    pub(super) trace: Option<Arc<Trace>>,
    pub(super) load: Duration,
    entry: OpEntry,
    backend: BackendInfo,
    /// See [`Model::decoder`].
    decoder: Option<DecodeBackend>,
    parts: Arc<Parts>,
    /// Called after each execution, once the op is opened again.
    tap: Option<Tap>,
    /// Counts at the last call to [`Model::forget_counts`].
    uncounted: (Vec<GraphStats>, Vec<SpanStats>),
}

/// Backend that executes the tokens of answers: see [`Model::decode_on`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DecodeBackend {
    /// Description of the backend.
    pub backend: BackendInfo,
    /// Why, for people.
    pub reason: String,
}

/// Contexts of a bundle with what executes them.
#[derive(Clone)]
struct Executor {
    backend: Arc<dyn Backend>,
    sources: Vec<ContextSource>,
    contexts: LoadedContexts,
}

impl Executor {
    /// A workspace over the contexts, which are opened where they are not loaded any more.
    fn workspace(&self, session: &CancelToken) -> Result<Workspace> {
        let Self { backend, sources, contexts } = self;
        let opened = contexts.open(&**backend, sources, session)?;
        let mut workspace = Workspace::over(Arc::clone(backend), session.clone(), contexts.clone());
        for (source, opened) in sources.iter().zip(&opened) {
            workspace.add_source(source, &opened.context)?;
        }
        Ok(workspace)
    }
}

/// Resources that host-ops are opened over, one host-op for each session of a bundle.
#[derive(Clone)]
struct Parts {
    executor: Executor,
    /// Executor of the tokens of answers, if it is another one.
    decoder: Option<Executor>,
    context_loads: Vec<ContextLoad>,
    artifacts: Artifacts,
    threads: Arc<rayon::ThreadPool>,
    progress: Option<ProgressFn>,
    dump: Option<Arc<Dump>>,
    opener: OpOpener,
    /// See [`Model::export_state`].
    fingerprint: OnceLock<String>,
    kept: Arc<PrefixCache>,
}

impl Parts {
    /// Opens the op for a session, over both backends where there are two. Returns it with the device's loss.
    fn open_session(
        &self,
        manifest: &Arc<Manifest>,
        session: &CancelToken,
        trace: Option<&Arc<Trace>>,
        tap: Option<&Tap>,
        allocated: &Allocated,
    ) -> Result<(Box<dyn HostOp>, DeviceLoss)> {
        let open = |executor: &Executor| {
            let mut workspace = executor.workspace(session)?;
            workspace.set_trace(trace.cloned());
            workspace.set_tap(tap.cloned());
            workspace.set_allocated(allocated.clone());
            let loss = workspace.loss().clone();
            Ok((self.open_op(manifest, workspace)?, loss))
        };
        let (op, loss) = open(&self.executor)?;
        let Some(decoder) = &self.decoder else { return Ok((op, loss)) };
        let (tokens, _) = open(decoder)?;
        let names = [&self.executor, decoder].map(|executor| executor.backend.info().name);
        let both = SplitOp::new((op, &names[0]), (tokens, &names[1]), trace.cloned())?;
        Ok((Box::new(both), loss))
    }

    /// Opens the op over a workspace.
    fn open_op(&self, manifest: &Arc<Manifest>, workspace: Workspace) -> Result<Box<dyn HostOp>> {
        let services = OpServices {
            manifest: Arc::clone(manifest),
            artifacts: self.artifacts.clone(),
            workspace,
            threads: Arc::clone(&self.threads),
            progress: self.progress.clone(),
            dump: self.dump.clone(),
        };
        (self.opener)(services).map_err(|e| e.context(manifest.path.display()))
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("manifest", &self.manifest.path)
            .field("op", &self.entry.description.name)
            .field("backend", &self.backend.name)
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
        let ModelOptions {
            manifest,
            backend,
            ops,
            threads,
            cancel,
            progress,
            dump,
            trace,
            tap,
            keep_states,
        } = options;
        let _span = trace::span_with(trace.as_ref(), "open", |s| {
            s.argument("bundle", manifest.path.display().to_string());
        });
        let entry = ops.find(manifest.host_op()?)?;
        ops.check_params(&entry, &manifest).map_err(|e| e.context(manifest.path.display()))?;
        let artifacts = manifest.open_artifacts();

        let mut pool = rayon::ThreadPoolBuilder::new().thread_name(|i| format!("qhx-{i}"));
        if let Some(threads) = threads {
            pool = pool.num_threads(threads.max(1));
        }
        let pool = pool.build().map_err(|e| {
            Error::caused(ErrorKind::Internal, "the threads of host-ops cannot start", e)
        })?;
        let sources = contexts::sources(&manifest, &artifacts, &*backend);
        let contexts = LoadedContexts::default();
        // A tokenizer takes as long as the contexts of a small model.
        let mut texts = None;
        let mut opening = trace::span(trace.as_ref(), "open contexts");
        let opened = pool.in_place_scope(|scope| {
            scope
                .spawn(|_| texts = Some(TextPipeline::open(&manifest, &artifacts, trace.as_ref())));
            let sources = sources?;
            let opened = contexts.open(&*backend, &sources, &cancel)?;
            Ok((sources, opened))
        });
        let missing = || Error::new(ErrorKind::Internal, "the tokenizer was not read");
        let mut texts = texts.ok_or_else(missing)??;
        let (sources, opened): (Vec<_>, Vec<_>) = opened?;

        let session = CancelToken::any(vec![cancel.clone()]);
        let mut workspace =
            Workspace::over(Arc::clone(&backend), session.clone(), contexts.clone());
        workspace.set_trace(trace.clone());
        let allocated = Allocated::default();
        workspace.set_allocated(allocated.clone());
        workspace.set_tap(tap.clone());
        let mut context_loads = Vec::with_capacity(sources.len());
        for (source, opened) in sources.iter().zip(opened) {
            let start = Instant::now();
            let Opened { context, time } = opened;
            workspace.add_source(source, &context)?;
            let time = time + start.elapsed();
            if let Some(span) = &mut opening {
                span.argument(&format!("{} [ms]", source.key), time.as_secs_f64() * 1e3);
            }
            context_loads.push(ContextLoad {
                key: source.key.clone(),
                time,
                resident_bytes: context.resident_bytes(),
            });
        }
        drop(opening);
        let loss = workspace.loss().clone();
        let parts = Parts {
            executor: Executor { backend, sources, contexts },
            decoder: None,
            context_loads,
            artifacts,
            threads: Arc::new(pool),
            progress,
            dump: dump.clone(),
            opener: ops.opener(&entry.description.name)?,
            fingerprint: OnceLock::new(),
            kept: Arc::new(PrefixCache::new(keep_states)),
        };
        let opening = trace::span(trace.as_ref(), "open host-op");
        let op = parts.open_op(&manifest, workspace)?;
        drop(opening);
        let op = Checked::new(op, &entry.description.name);
        texts.max_ctx = op.info().max_ctx;
        let allowed = Arc::new(allowed_tokens(&op, &manifest, texts.tokenizer()));
        texts.allowed = Arc::clone(&allowed);
        texts.media = op.info().placeholders.clone();
        Ok(Self {
            backend: parts.executor.backend.info(),
            decoder: None,
            parts: Arc::new(parts),
            allowed,
            manifest,
            texts: Arc::new(texts),
            consumed: Consumed::default(),
            packer: Packer::new(&op.info().packing.buckets),
            op,
            speculation: Speculation::default(),
            loss,
            allocated,
            vector: Vec::new(),
            cancel,
            session,
            dump,
            load: start.elapsed(),
            trace: trace.clone(),
            entry,
            tap,
            uncounted: Default::default(),
        })
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
        Sessions {
            manifest: Arc::clone(&self.manifest),
            texts: Arc::clone(&self.texts),
            allowed: Arc::clone(&self.allowed),
            cancel: self.cancel.clone(),
            dump: self.dump.clone(),
            trace: self.trace.clone(),
            entry: self.entry.clone(),
            backend: self.backend.clone(),
            decoder: self.decoder.clone(),
            parts: Arc::clone(&self.parts),
        }
    }

    /// The bundle's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Sampling of conversations that the bundle declares; none where it leaves that open.
    pub fn sampling(&self) -> Option<&SamplingParams> {
        self.manifest.params.sampling.as_ref()
    }

    /// The host-op and where it comes from.
    pub fn op(&self) -> &OpEntry {
        &self.entry
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
        &self.backend
    }

    /// Tokenizer, chat template and limits, which any thread may use while a generation runs.
    pub fn texts(&self) -> Arc<TextPipeline> {
        Arc::clone(&self.texts)
    }

    /// Backend that executes the tokens of answers; `None` if none but [`Model::backend`] was asked for.
    pub fn decoder(&self) -> Option<&DecodeBackend> {
        self.decoder.as_ref()
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
        let decoder = backend.map(|backend| self.decoder_over(backend)).transpose()?;
        let executor = decoder.as_ref().unwrap_or(&self.parts.executor);
        let info = executor.backend.info();
        if decoder.is_some() || self.parts.decoder.is_some() {
            let before = Arc::clone(&self.parts);
            self.parts = Arc::new(Parts { decoder, ..Parts::clone(&before) });
            if let Err(e) = self.reopen() {
                self.parts = before;
                // Where that fails, too, the next generation tries it again.
                let _ = self.reopen();
                return Err(e);
            }
        }
        self.load += start.elapsed();
        self.decoder = Some(DecodeBackend { backend: info, reason: reason.into() });
        Ok(())
    }

    /// The bundle's contexts for a backend: those that are loaded, where it is the one that decodes now.
    fn decoder_over(&self, backend: Arc<dyn Backend>) -> Result<Executor> {
        let same = |decoder: &&Executor| Arc::ptr_eq(&decoder.backend, &backend);
        if let Some(decoder) = self.parts.decoder.as_ref().filter(same) {
            return Ok(decoder.clone());
        }
        let sources = contexts::sources(&self.manifest, &self.parts.artifacts, &*backend)?;
        if let Some(source) = sources.iter().find(|source| !backend.accepts(source)) {
            let (path, name) = (self.manifest.path.display(), backend.info().name);
            let message = format!(
                "{path}: tokens on {name}: context {:?} has no graphs that {name} executes",
                source.key
            );
            return Err(Error::new(ErrorKind::Artifact, message).hint(
                "for tokens on the CPU the bundle needs ONNX reference graphs: forge it without --no-onnx",
            ));
        }
        Ok(Executor { backend, sources, contexts: LoadedContexts::default() })
    }

    /// The tokenizer, when the bundle has one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.texts.tokenizer()
    }

    /// True when conversations can be rendered.
    pub fn can_chat(&self) -> bool {
        self.texts.can_chat()
    }

    /// Time that opening took.
    pub fn load_time(&self) -> Duration {
        self.load
    }

    /// Time that loading each context took, in the order of the manifest.
    pub fn context_loads(&self) -> &[ContextLoad] {
        &self.parts.context_loads
    }

    /// The trace that the model writes to.
    pub fn trace(&self) -> Option<&Arc<Trace>> {
        self.trace.as_ref()
    }

    /// Ends all that the model does, see [`ModelOptions::cancel`].
    pub fn cancel_token(&self) -> &CancelToken {
        &self.cancel
    }

    /// Does work with the model that `cancel` stops within one graph execution, such as embedding texts.
    /// [`Model::generate`] does so itself with the request's ticket.
    ///
    /// Work that is stopped fails with [`ErrorKind::Cancelled`].
    pub fn cancellable<T>(&mut self, cancel: &CancelToken, work: impl FnOnce(&mut Self) -> T) -> T {
        let _until = self.session.follow(cancel);
        work(self)
    }

    /// Opens the host-op again, over the contexts that are loaded: after it [panicked](ErrorKind::Panicked), or after
    /// the [device was lost](ErrorKind::DeviceLost). Contexts that are not loaded any more are opened first, for which
    /// a device that comes back is waited for. The model is then as it was when it was opened, with nothing consumed:
    /// buffers are fresh, and what the op keeps in them is written again.
    ///
    /// A lost device needs no call of it: the next generation or embedding does so.
    ///
    /// # Errors
    /// A context or the op cannot be opened, or it was cancelled. The op is closed then until it can be opened.
    pub fn reopen(&mut self) -> Result<()> {
        // First out: buffers and contexts of both may not fit the memory.
        self.op.close();
        self.consumed.forget();
        let (trace, tap) = (self.trace.as_ref(), self.tap.as_ref());
        let allocated = Allocated::default();
        let (parts, session) = (&self.parts, &self.session);
        let (op, loss) = parts.open_session(&self.manifest, session, trace, tap, &allocated)?;
        self.allocated = allocated;
        self.op.replace(op);
        self.loss = loss;
        Ok(())
    }

    /// Keeps the state as it is, for whichever session is asked to go on from it: where several of them take turns,
    /// after each answer. Nothing happens where none are kept; see [`ModelOptions::keep_states`].
    ///
    /// # Errors
    /// When the host-op fails so that its state is unknown.
    pub fn keep_state(&mut self) -> Result<()> {
        if self.loss.happened() || self.op.is_closed() || !self.parts.kept.is_on() {
            return Ok(());
        }
        self.consumed.settle(self.op.position());
        self.consumed.keep(&mut self.op, &self.parts.kept)
    }

    /// States of earlier conversations that are kept for all sessions.
    pub fn kept_states(&self) -> KeptStates {
        self.parts.kept.counts()
    }

    /// Forgets the states of earlier conversations.
    pub fn forget_kept_states(&self) {
        self.parts.kept.clear();
    }

    pub(super) fn kept(&self) -> &Arc<PrefixCache> {
        &self.parts.kept
    }

    /// Forgets everything consumed so far, but for [kept states](ModelOptions::keep_states).
    ///
    /// # Errors
    /// When the host-op cannot be reset.
    pub fn reset(&mut self) -> Result<()> {
        self.consumed.clear(&mut self.op)
    }

    /// Fingerprint that tells bundles apart whose states are not each other's.
    pub(super) fn fingerprint(&self) -> Result<String> {
        if let Some(known) = self.parts.fingerprint.get() {
            return Ok(known.clone());
        }
        let found = state::fingerprint(&self.manifest, &self.parts.artifacts)?;
        Ok(self.parts.fingerprint.get_or_init(|| found).clone())
    }

    /// Opens the host-op again as [`Model::reopen`] does, and has `tap` called after each execution of a graph until it
    /// is called without one.
    ///
    /// # Errors
    /// Errors of [`Model::reopen`].
    pub fn reopen_with_tap(&mut self, tap: Option<Tap>) -> Result<()> {
        self.tap = tap;
        self.reopen()
    }

    /// Bytes that this session allocated, such as its caches.
    pub fn session_bytes(&self) -> u64 {
        self.allocated.bytes()
    }

    /// Bytes of the files that were opened for all sessions: contexts in the form that is executed, tables, and what
    /// lies beside them.
    pub fn file_bytes(&self) -> u64 {
        self.parts.artifacts.seen().bytes()
    }

    /// Time and executions of every graph since the model was opened.
    pub fn graph_stats(&self) -> Vec<GraphStats> {
        let mut stats = self.op.graph_stats();
        for (stats, earlier) in stats.iter_mut().zip(&self.uncounted.0) {
            stats.executions = stats.executions.saturating_sub(earlier.executions);
            stats.busy = stats.busy.saturating_sub(earlier.busy);
            stats.slow = stats.slow.saturating_sub(earlier.slow);
        }
        stats
    }

    /// Time in the host-op's own parts since the model was opened.
    pub fn span_stats(&self) -> Vec<SpanStats> {
        let mut stats = self.op.span_stats();
        for earlier in &self.uncounted.1 {
            if let Some(stats) = stats.iter_mut().find(|stats| stats.name == earlier.name) {
                stats.count = stats.count.saturating_sub(earlier.count);
                stats.busy = stats.busy.saturating_sub(earlier.busy);
            }
        }
        stats
    }

    /// Counts executions and times from now on, as if the model had just been opened.
    pub fn forget_counts(&mut self) {
        self.uncounted = (self.op.graph_stats(), self.op.span_stats());
    }

    /// Device that executes the graphs, see [`Backend::device`].
    pub fn device(&self) -> Option<String> {
        self.parts.executor.backend.device()
    }

    /// True where another processor computes what the device would, see [`Backend::emulates`].
    pub fn is_emulated(&self) -> bool {
        self.parts.executor.backend.emulates()
    }

    /// Descriptions of all graphs, in the manifest's order of contexts. Contexts that are not loaded any more are
    /// opened.
    ///
    /// # Errors
    /// When one of these does not open.
    pub fn graphs(&self) -> Result<Vec<Arc<GraphInfo>>> {
        let Executor { backend, sources, contexts } = &self.parts.executor;
        let opened = contexts.open(&**backend, sources, &self.session)?;
        Ok(opened.iter().flat_map(|opened| opened.context.graphs().to_vec()).collect())
    }

    /// The contexts that are open, with their files.
    pub fn context_sources(&self) -> &[ContextSource] {
        &self.parts.executor.sources
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
    /// An error of kind [`ErrorKind::Usage`].
    pub fn require(&self, task: Task, verb: &str) -> Result<()> {
        let tasks = &self.entry.description.tasks;
        if tasks.contains(&task) {
            return Ok(());
        }
        let names = tasks.iter().map(|task| task.name()).collect::<Vec<_>>().join(", ");
        let (path, name) = (self.manifest.path.display(), &self.entry.description.name);
        let message = format!("{path}: host-op {name:?} does not {verb}; it does {names}");
        let error = Error::new(ErrorKind::Usage, message);
        Err(match tasks.first() {
            Some(Task::Other) | None => error,
            Some(task) => error.hint(format!("use it with `qhx {}`", task.name())),
        })
    }
}

/// Opener of a bundle's sessions: its contexts, files, threads and tokenizer, which all of them share. They stay loaded
/// as long as it or a session is there. Any thread may open one.
#[derive(Clone)]
pub struct Sessions {
    manifest: Arc<Manifest>,
    texts: Arc<TextPipeline>,
    allowed: Arc<AllowedTokens>,
    cancel: CancelToken,
    dump: Option<Arc<Dump>>,
    trace: Option<Arc<Trace>>,
    entry: OpEntry,
    backend: BackendInfo,
    decoder: Option<DecodeBackend>,
    parts: Arc<Parts>,
}

impl std::fmt::Debug for Sessions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sessions").field("manifest", &self.manifest.path).finish_non_exhaustive()
    }
}

impl Sessions {
    /// States of earlier conversations that are kept for all sessions.
    pub fn kept_states(&self) -> KeptStates {
        self.parts.kept.counts()
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
        let session = CancelToken::any(vec![self.cancel.clone()]);
        let trace = self.trace.as_ref();
        let allocated = Allocated::default();
        let parts = &self.parts;
        let (op, loss) = parts.open_session(&self.manifest, &session, trace, None, &allocated)?;
        let op = Checked::new(op, &self.entry.description.name);
        Ok(Model {
            manifest: Arc::clone(&self.manifest),
            texts: Arc::clone(&self.texts),
            allowed: Arc::clone(&self.allowed),
            consumed: Consumed::default(),
            speculation: Speculation::default(),
            packer: Packer::new(&op.info().packing.buckets),
            op,
            loss,
            allocated,
            vector: Vec::new(),
            cancel: self.cancel.clone(),
            session,
            dump: self.dump.clone(),
            trace: self.trace.clone(),
            load: start.elapsed(),
            entry: self.entry.clone(),
            backend: self.backend.clone(),
            decoder: self.decoder.clone(),
            parts: Arc::clone(&self.parts),
            tap: None,
            uncounted: Default::default(),
        })
    }
}

/// Token ids that the op can consume are below this.
pub(super) fn input_vocab(op: &dyn HostOp, manifest: &Manifest) -> usize {
    // An op of an earlier interface does not say it. The manifest's number is that of the table's
    // rows, which the kit checks.
    let declared = Some(op.info().input_vocab).filter(|&rows| rows > 0).or(manifest.params.vocab);
    let vocab = op.info().vocab;
    declared.unwrap_or(vocab).min(vocab)
}

/// Tokens that may be chosen: those that the tokenizer knows, and those whose meaning is declared without a text: ends
/// of an answer by the manifest, times by the op's rules. Other rows of the embedding table only pad it to a round
/// number, and nobody trained their logits.
fn allowed_tokens(
    op: &dyn HostOp,
    manifest: &Manifest,
    tokenizer: Option<&Tokenizer>,
) -> AllowedTokens {
    let count = input_vocab(op, manifest);
    let Some(tokenizer) = tokenizer else { return AllowedTokens::below(count) };
    let ends = &manifest.params.eos_token_id;
    let times = op.info().logit_rules.times;
    let declared = |id| ends.contains(&id) || times.is_some_and(|times| id >= times.first);
    AllowedTokens::select(count, |id| declared(id) || tokenizer.id_to_token(id).is_some())
}
