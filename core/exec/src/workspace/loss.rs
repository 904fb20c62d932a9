//! What a workspace knows of a device that was lost, and how contexts are opened on one that comes back.
//!
//! A device restarts when code on it crashes, this program's or another's. What was loaded there is gone then: every
//! context returns the same error until it is freed. What the device wrote last is not known either, and all memory
//! that it reads it can write. So a workspace that lost its device executes nothing more, and its buffers are of no
//! use.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use qhx_base::{CancelToken, Error, ErrorKind, Result};

use super::Workspace;
use crate::backend::{Backend, Context, ContextSource, Opened};

/// Whether a workspace lost the device. Clones share it.
///
/// A workspace belongs to its host-op. Who drives the op keeps a clone, learns by it why a call failed, and opens the
/// op again over another workspace.
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

/// The contexts that a workspace's sources were opened as, in their order; none once the device was lost. Clones share
/// the list.
#[derive(Clone, Default)]
pub struct LoadedContexts(Arc<Mutex<Vec<Arc<dyn Context>>>>);

impl LoadedContexts {
    /// The contexts that are loaded now.
    pub fn get(&self) -> Vec<Arc<dyn Context>> {
        self.lock().clone()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<Arc<dyn Context>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for LoadedContexts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LoadedContexts").field(&self.lock().len()).finish()
    }
}

/// How long a device that was lost is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// Opens contexts, on a device that may be about to come back: while it is [lost](ErrorKind::DeviceLost) they are tried
/// again, for at most 10 s.
///
/// # Errors
/// A context cannot be opened, the device stays lost, or `cancel` is set meanwhile.
pub fn open_contexts(
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
    /// Whether the device was lost.
    pub fn loss(&self) -> &DeviceLoss {
        &self.loss
    }

    /// The contexts of [`Workspace::add_source`], for who wants to keep them longer than the workspace.
    pub fn contexts(&self) -> &LoadedContexts {
        &self.contexts
    }

    /// Takes note of an execution that failed.
    #[cold]
    pub(super) fn note(&mut self, error: &Error) {
        if error.kind() == ErrorKind::DeviceLost {
            self.contexts.lock().clear();
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

    /// A workspace over a graph whose executions all fail, and how often it was executed.
    fn workspace(kind: ErrorKind) -> (Workspace, Arc<AtomicUsize>) {
        let graphs = vec![GraphInfo::new("double", [], [TensorInfo::new("y", DType::U8, [1])])];
        let executions = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&executions);
        let backend = NullBackend::new(vec![("part".to_owned(), graphs)]);
        let backend: Arc<dyn Backend> = Arc::new(backend.with_script(move |_, _, _| {
            counter.fetch_add(1, Ordering::Relaxed);
            Err(Error::new(kind, "it broke").with_code(7))
        }));
        let source = ContextSource { key: "part".to_owned(), ..ContextSource::default() };
        let context = backend.open_context(&source).unwrap();
        let mut workspace = Workspace::new(backend, CancelToken::new());
        workspace.add_source(&source, &context).unwrap();
        let buffer = workspace.allocate(1).unwrap();
        workspace.bind(GraphId(0), Port::Output(0), buffer, 0).unwrap();
        (workspace, executions)
    }

    #[test]
    fn a_workspace_that_lost_its_device_executes_nothing_more() {
        for (kind, lost) in [(ErrorKind::DeviceLost, true), (ErrorKind::Execute, false)] {
            let (mut workspace, executions) = workspace(kind);
            let (loss, contexts) = (workspace.loss().clone(), workspace.contexts().clone());
            for _ in 0..2 {
                let error = workspace.execute(GraphId(0)).unwrap_err();
                assert_eq!((error.kind(), error.code()), (kind, Some(7)));
                assert!(error.message().contains("double"), "{error}");
            }
            assert_eq!((loss.happened(), contexts.get().is_empty()), (lost, lost));
            assert_eq!(executions.load(Ordering::Relaxed), if lost { 1 } else { 2 });
        }
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
