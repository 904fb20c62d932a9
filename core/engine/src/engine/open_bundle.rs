//! An open bundle: what all of its sessions share, and what opens them.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::contexts;
use super::model_options::{DecodeBackend, ModelOptions};
use super::prefix_cache::PrefixCache;
use super::split_op::SplitOp;
use super::state;
use super::texts::TextPipeline;
use crate::dump::Dump;
use crate::manifest::Manifest;
use crate::op::{HostOp, OpEntry, OpOpener, OpServices, ProgressFn};
use qhx_base::artifacts::Artifacts;
use qhx_base::trace::{self, Trace};
use qhx_base::{CancelToken, Error, ErrorKind, Result, error};
use qhx_exec::Workspace;
use qhx_exec::backend::{Backend, BackendInfo, ContextSource, Opened};
use qhx_exec::workspace::{Allocated, DeviceLoss, LoadedContexts, Tap};

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

/// Contexts of a bundle with what executes them.
#[derive(Clone)]
pub(super) struct Executor {
    pub backend: Arc<dyn Backend>,
    pub info: BackendInfo,
    pub sources: Vec<ContextSource>,
    pub contexts: LoadedContexts,
}

impl Executor {
    /// The contexts of a bundle for a backend, none of them open.
    fn new(
        manifest: &Manifest,
        artifacts: &Artifacts,
        backend: Arc<dyn Backend>,
        batching: bool,
    ) -> Result<Self> {
        let sources = contexts::sources(manifest, artifacts, &*backend)?;
        let contexts = LoadedContexts::new(batching);
        Ok(Self { info: backend.info(), backend, sources, contexts })
    }

    /// A workspace over the contexts, which are opened where they are not loaded any more, and what that took.
    fn workspace(&self, cancel: &CancelToken) -> Result<(Workspace, Vec<ContextLoad>)> {
        let Self { backend, sources, contexts, .. } = self;
        let opened = contexts.open(&**backend, sources, cancel)?;
        let mut workspace = Workspace::over(Arc::clone(backend), cancel.clone(), contexts.clone());
        let load = |(source, Opened { context, time }): (&ContextSource, Opened)| -> Result<_> {
            let start = Instant::now();
            workspace.add_source(source, &context)?;
            let (key, time) = (source.key.clone(), time + start.elapsed());
            Ok(ContextLoad { key, time, resident_bytes: context.resident_bytes() })
        };
        let loads = sources.iter().zip(opened).map(load).collect::<Result<_>>()?;
        Ok((workspace, loads))
    }
}

/// A session's part in the workspaces that its host-op is opened over.
#[derive(Clone)]
pub(super) struct OpSpace {
    /// Token that executions check: the bundle's, and the ticket of the current call.
    pub cancel: CancelToken,
    /// Called after each execution, once the op is opened again.
    pub tap: Option<Tap>,
    pub allocated: Allocated,
    /// Loss of the device that consumes prompts.
    pub loss: DeviceLoss,
}

impl OpSpace {
    pub(super) fn new(cancel: &CancelToken, tap: Option<Tap>) -> Self {
        let cancel = CancelToken::any(vec![cancel.clone()]);
        Self { cancel, tap, allocated: Allocated::default(), loss: DeviceLoss::default() }
    }
}

/// What host-ops are opened with, one for each session of a bundle.
#[derive(Clone)]
struct OpFactory {
    manifest: Arc<Manifest>,
    artifacts: Artifacts,
    threads: Arc<rayon::ThreadPool>,
    progress: Option<ProgressFn>,
    dump: Option<Arc<Dump>>,
    trace: Option<Arc<Trace>>,
    opener: OpOpener,
}

impl OpFactory {
    /// Opens the op over a workspace of a session.
    fn open(&self, mut workspace: Workspace, space: &OpSpace) -> Result<Box<dyn HostOp>> {
        workspace.set_trace(self.trace.clone());
        workspace.set_tap(space.tap.clone());
        workspace.set_allocated(space.allocated.clone());
        let services = OpServices {
            manifest: Arc::clone(&self.manifest),
            artifacts: self.artifacts.clone(),
            workspace,
            threads: Arc::clone(&self.threads),
            progress: self.progress.clone(),
            dump: self.dump.clone(),
        };
        (self.opener)(services).map_err(|e| e.context(self.manifest.path.display()))
    }
}

/// An open bundle: contexts loaded, tokenizer read.
#[derive(Clone)]
pub(super) struct OpenBundle {
    ops: OpFactory,
    pub texts: Arc<TextPipeline>,
    pub cancel: CancelToken,
    pub entry: OpEntry,
    pub executor: Executor,
    /// Executor of the tokens of answers, if it is another one.
    pub token_executor: Option<Executor>,
    /// See [`Model::decoder`](super::Model::decoder).
    pub decoder: Option<DecodeBackend>,
    pub context_loads: Vec<ContextLoad>,
    /// See [`Model::export_state`](super::Model::export_state).
    fingerprint: OnceLock<String>,
    pub kept: Arc<PrefixCache>,
    batching: bool,
}

impl OpenBundle {
    /// Opens a bundle and, for its first session, the host-op.
    pub(super) fn open(options: ModelOptions<'_>) -> Result<(Arc<Self>, OpSpace, Box<dyn HostOp>)> {
        let ModelOptions { manifest, backend, ops, threads, cancel, progress, dump, .. } = options;
        let batching = options.batching;
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
        let mut space = OpSpace::new(&cancel, options.tap);
        let trace = options.trace;
        // A tokenizer takes as long as the contexts of a small model.
        let mut texts = None;
        let mut opening = trace::span(trace.as_ref(), "open contexts");
        let opened: Result<_> = pool.in_place_scope(|scope| {
            scope
                .spawn(|_| texts = Some(TextPipeline::open(&manifest, &artifacts, trace.as_ref())));
            let executor = Executor::new(&manifest, &artifacts, backend, batching)?;
            let opened = executor.workspace(&space.cancel)?;
            Ok((executor, opened))
        });
        let missing = || error!(Internal, "the tokenizer was not read");
        let mut texts = texts.ok_or_else(missing)??;
        let (executor, (workspace, context_loads)) = opened?;
        if let Some(span) = &mut opening {
            for ContextLoad { key, time, .. } in &context_loads {
                span.argument(&format!("{key} [ms]"), time.as_secs_f64() * 1e3);
            }
        }
        drop(opening);
        let opener = ops.opener(&entry.description.name)?;
        let threads = Arc::new(pool);
        let ops = OpFactory { manifest, artifacts, threads, progress, dump, trace, opener };
        let opening = trace::span(ops.trace.as_ref(), "open host-op");
        space.loss = workspace.loss().clone();
        let op = ops.open(workspace, &space)?;
        drop(opening);
        texts.limit(op.info(), &ops.manifest);
        let bundle = Self {
            ops,
            texts: Arc::new(texts),
            cancel,
            entry,
            executor,
            token_executor: None,
            decoder: None,
            context_loads,
            fingerprint: OnceLock::new(),
            kept: Arc::new(PrefixCache::new(options.keep_states)),
            batching,
        };
        Ok((Arc::new(bundle), space, op))
    }

    /// Opens the op for a session, over both backends where there are two.
    pub(super) fn open_op(&self, space: &mut OpSpace) -> Result<Box<dyn HostOp>> {
        let (workspace, _) = self.executor.workspace(&space.cancel)?;
        let (allocated, loss) = (Allocated::default(), workspace.loss().clone());
        let opened = OpSpace { allocated, loss, ..space.clone() };
        let mut op = self.ops.open(workspace, &opened)?;
        if let Some(executor) = &self.token_executor {
            let (workspace, _) = executor.workspace(&space.cancel)?;
            let tokens = (self.ops.open(workspace, &opened)?, executor.info.name.as_str());
            let prompt = (op, self.executor.info.name.as_str());
            op = Box::new(SplitOp::new(prompt, tokens, self.trace().cloned())?);
        }
        *space = opened;
        Ok(op)
    }

    /// The bundle's contexts for a backend that consumes tokens: those that are loaded, where it does so now.
    pub(super) fn executor_of_tokens(&self, backend: Arc<dyn Backend>) -> Result<Executor> {
        let same = |executor: &&Executor| Arc::ptr_eq(&executor.backend, &backend);
        if let Some(executor) = self.token_executor.as_ref().filter(same) {
            return Ok(executor.clone());
        }
        let executor = Executor::new(self.manifest(), &self.ops.artifacts, backend, self.batching)?;
        let Executor { backend, info, sources, .. } = &executor;
        if let Some(source) = sources.iter().find(|source| !backend.accepts(source)) {
            let (path, name) = (self.manifest().path.display(), &info.name);
            return Err(error!(
                Artifact,
                "{path}: tokens on {name}: context {:?} has no graphs that {name} executes",
                source.key
            )
            .hint("for tokens on the CPU the bundle needs ONNX reference graphs: forge it with --onnx"));
        }
        Ok(executor)
    }

    pub(super) fn manifest(&self) -> &Manifest {
        &self.ops.manifest
    }

    pub(super) fn trace(&self) -> Option<&Arc<Trace>> {
        self.ops.trace.as_ref()
    }

    pub(super) fn dump(&self) -> Option<&Dump> {
        self.ops.dump.as_deref()
    }

    /// Bytes of the files that were opened.
    pub(super) fn file_bytes(&self) -> u64 {
        self.ops.artifacts.seen().bytes()
    }

    /// Fingerprint that tells bundles apart whose states are not each other's.
    pub(super) fn fingerprint(&self) -> Result<String> {
        if let Some(known) = self.fingerprint.get() {
            return Ok(known.clone());
        }
        let found = state::fingerprint(self.manifest(), &self.ops.artifacts)?;
        Ok(self.fingerprint.get_or_init(|| found).clone())
    }
}
