//! Loss of a workspace's device, and the opening of contexts on a device that comes back.
//!
//! A device restarts when code on it crashes, this program's or another's. Everything loaded there is gone then: every
//! context returns the same error until it is freed. The device's last writes are not known either, and it can write
//! all memory that it reads. So a workspace that lost its device executes nothing more, and its buffers are of no use.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use qhx_base::{CancelToken, Error, ErrorKind, Result};

use super::Workspace;
use super::turns::{BatchedGraph, Turns};
use crate::backend::{Backend, Context, ContextSource, Opened};

/// Record of a workspace's loss of the device. Clones share it.
///
/// A workspace belongs to its host-op. The op's caller keeps a clone, learns by it why a call failed, and opens the op
/// again over another workspace.
#[derive(Debug, Clone, Default)]
pub struct DeviceLoss(Arc<OnceLock<Error>>);

impl DeviceLoss {
    /// True from the execution on that lost it.
    pub fn happened(&self) -> bool {
        self.0.get().is_some()
    }

    /// The error of that execution.
    pub(super) fn error(&self) -> Option<&Error> {
        self.0.get()
    }
}

/// The contexts of a bundle while they are loaded, for all workspaces over them, which execute one at a time: contexts
/// share memory that only an execution needs. Clones share them.
#[derive(Clone, Default)]
pub struct LoadedContexts(Arc<Shared>);

#[derive(Default)]
struct Shared {
    loaded: Mutex<Loaded>,
    turns: Turns,
    /// Graphs are executed for several workspaces at once where a context can.
    batching: bool,
}

#[derive(Default)]
struct Loaded {
    /// Empty before they are opened, and once the device was lost.
    contexts: Vec<Arc<dyn Context>>,
    batched: Vec<BatchedContext>,
    /// Number of times the contexts were opened.
    times: u64,
}

/// A context, and its graphs that are executed for several workspaces at once, each by its index.
type BatchedContext = (Arc<dyn Context>, Vec<Option<Arc<BatchedGraph>>>);

impl LoadedContexts {
    /// None loaded yet. With `batching`, workspaces that wait with the same graph take one step for all of their
    /// sequences, where a context can ([`Context::open_batch`]).
    pub fn new(batching: bool) -> Self {
        Self(Arc::new(Shared { batching, ..Shared::default() }))
    }

    /// The contexts of `sources` in their order, opened by `backend` unless they are loaded. While a device is
    /// [lost](ErrorKind::DeviceLost) it is tried again, for at most 10 s.
    ///
    /// # Errors
    /// A context cannot be opened, the device stays lost, or `cancel` is set meanwhile.
    pub fn open(
        &self,
        backend: &dyn Backend,
        sources: &[ContextSource],
        cancel: &CancelToken,
    ) -> Result<Vec<Opened>> {
        let mut loaded = self.lock();
        if loaded.contexts.len() == sources.len() {
            let contexts = loaded.contexts.iter();
            return contexts.map(|context| Opened::by(|| Ok(Arc::clone(context)))).collect();
        }
        let opened = open_contexts(backend, sources, cancel)?;
        loaded.contexts = opened.iter().map(|opened| Arc::clone(&opened.context)).collect();
        loaded.times += 1;
        Ok(opened)
    }

    /// Number of times the contexts were opened. A workspace keeps it to know if they are still its own.
    pub(super) fn times(&self) -> u64 {
        self.lock().times
    }

    /// Forgets them if they are still those that were opened as the `times`-th.
    fn forget(&self, times: u64) {
        let mut loaded = self.lock();
        if loaded.times == times {
            loaded.contexts.clear();
            loaded.batched.clear();
        }
    }

    /// The turns of the workspaces over them.
    pub(super) fn turns(&self) -> &Turns {
        &self.0.turns
    }

    /// What executes graph `index` of a context for several workspaces at once, if there is something. It is opened once
    /// for all of them.
    ///
    /// # Errors
    /// When it does not open.
    pub(super) fn batched(
        &self,
        context: &Arc<dyn Context>,
        index: usize,
    ) -> Result<Option<Arc<BatchedGraph>>> {
        if !self.0.batching {
            return Ok(None);
        }
        let batched = &mut self.lock().batched;
        let number = match batched.iter().position(|(known, _)| Arc::ptr_eq(known, context)) {
            Some(number) => number,
            None => {
                batched.push((Arc::clone(context), Vec::new()));
                batched.len() - 1
            }
        };
        let Some((_, graphs)) = batched.get_mut(number) else { return Ok(None) };
        for next in graphs.len()..=index {
            let batch = context.open_batch(next)?.filter(|batch| batch.max() > 1);
            graphs.push(batch.map(|batch| Arc::new(BatchedGraph::new((number, next), batch))));
        }
        Ok(graphs.get(index).cloned().flatten())
    }

    fn lock(&self) -> MutexGuard<'_, Loaded> {
        self.0.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for LoadedContexts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LoadedContexts").field(&self.lock().contexts.len()).finish()
    }
}

/// Maximum time to wait for a device that was lost.
const PATIENCE: Duration = Duration::from_secs(10);

/// Opens contexts, on a device that may be about to come back.
fn open_contexts(
    backend: &dyn Backend,
    sources: &[ContextSource],
    cancel: &CancelToken,
) -> Result<Vec<Opened>> {
    let start = Instant::now();
    let mut wait = Duration::from_millis(50);
    loop {
        let error = match backend.open_contexts(sources) {
            Err(error) if error.kind() == ErrorKind::DeviceLost => error,
            opened => return opened,
        };
        let left = PATIENCE.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Err(error);
        }
        tracing::debug!("not back yet: {}", error.message());
        let until = Instant::now() + wait.min(left);
        while Instant::now() < until {
            if cancel.is_cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        wait *= 2;
    }
}

impl Workspace {
    /// Record of the device's loss.
    pub fn loss(&self) -> &DeviceLoss {
        &self.loss
    }

    /// Takes note of an execution that failed.
    #[cold]
    pub(super) fn note(&mut self, error: &Error) {
        if error.kind() == ErrorKind::DeviceLost {
            self.contexts.forget(self.opened);
            self.loss.0.get_or_init(|| error.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::GraphId;
    use crate::null::NullBackend;
    use qhx_types::{DType, GraphInfo, Port, TensorInfo};

    /// A backend whose graph fails at every execution, its source, and how often it was executed.
    fn failing(kind: ErrorKind) -> (Arc<dyn Backend>, ContextSource, Arc<AtomicUsize>) {
        let graphs = vec![GraphInfo::new("double", [], [TensorInfo::new("y", DType::U8, [1])])];
        let executions = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&executions);
        let backend = NullBackend::new(vec![("part".to_owned(), graphs)]);
        let backend = backend.with_script(move |_, _, _| {
            counter.fetch_add(1, Ordering::Relaxed);
            Err(Error::new(kind, "it broke").with_code(7))
        });
        let source = ContextSource { key: "part".to_owned(), ..ContextSource::default() };
        (Arc::new(backend), source, executions)
    }

    /// A workspace over the contexts, ready to execute.
    fn workspace(
        backend: &Arc<dyn Backend>,
        source: &ContextSource,
        contexts: &LoadedContexts,
    ) -> Workspace {
        let never = CancelToken::new();
        let opened = contexts.open(&**backend, std::slice::from_ref(source), &never).unwrap();
        let mut workspace = Workspace::over(Arc::clone(backend), never, contexts.clone());
        workspace.add_source(source, &opened[0].context).unwrap();
        let buffer = workspace.allocate(1).unwrap();
        workspace.bind(GraphId(0), Port::Output(0), buffer, 0).unwrap();
        workspace
    }

    #[test]
    fn a_workspace_that_lost_its_device_executes_nothing_more() {
        for (kind, lost) in [(ErrorKind::DeviceLost, true), (ErrorKind::Execute, false)] {
            let (backend, source, executions) = failing(kind);
            let contexts = LoadedContexts::default();
            let mut workspace = workspace(&backend, &source, &contexts);
            for _ in 0..2 {
                let error = workspace.execute(GraphId(0)).unwrap_err();
                assert_eq!((error.kind(), error.code()), (kind, Some(7)));
                assert!(error.message().contains("double"), "{error}");
            }
            let gone = contexts.lock().contexts.is_empty();
            assert_eq!((workspace.loss().happened(), gone), (lost, lost));
            assert_eq!(executions.load(Ordering::Relaxed), if lost { 1 } else { 2 });
        }
    }

    #[test]
    fn who_learns_late_of_a_loss_keeps_what_others_opened() {
        let (backend, source, _) = failing(ErrorKind::DeviceLost);
        let contexts = LoadedContexts::default();
        let [mut first, mut second] = [(); 2].map(|()| workspace(&backend, &source, &contexts));
        assert_eq!(contexts.times(), 1, "they share what is loaded");
        first.execute(GraphId(0)).unwrap_err();
        let again = workspace(&backend, &source, &contexts);
        assert_eq!(contexts.times(), 2);
        second.execute(GraphId(0)).unwrap_err();
        assert!(!contexts.lock().contexts.is_empty(), "they are those of {again:?}");
    }

    /// A backend whose device comes back at the attempt numbered `left`.
    #[derive(Debug)]
    struct Away(AtomicUsize);

    impl Backend for Away {
        fn info(&self) -> crate::backend::BackendInfo {
            NullBackend::new(Vec::new()).info()
        }

        fn accepts(&self, _: &ContextSource) -> bool {
            true
        }

        fn open_context(&self, _: &ContextSource) -> Result<Arc<dyn Context>> {
            match self.0.fetch_sub(1, Ordering::Relaxed) {
                1 => Err(Error::new(ErrorKind::Context, "it is back")),
                _ => Err(Error::new(ErrorKind::DeviceLost, "not back yet")),
            }
        }
    }

    #[test]
    fn waiting_for_a_lost_device_can_be_cancelled() {
        let sources = [ContextSource::default()];
        let open = |left, cancel: &CancelToken| {
            open_contexts(&Away(AtomicUsize::new(left)), &sources, cancel).err().unwrap()
        };
        let cancel = CancelToken::new();
        assert_eq!(open(4, &cancel).message(), "it is back", "other errors end the waiting");
        cancel.cancel();
        assert_eq!(open(usize::MAX, &cancel).kind(), ErrorKind::Cancelled);
    }
}
