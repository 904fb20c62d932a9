//! Opens the contexts of a workspace anew, in place, after the DSP restarted.
//!
//! The DSP restarts when code on it crashes, this program's or another's. What was loaded there is gone then:
//! every context answers with the same error until it is freed. Buffers are the host's and stay, and so do
//! indices and bindings, so that a host-op notices nothing but one step that failed.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Slot, Workspace};
use crate::backend::{Backend, Context, ContextSource, Graph, Opened};
use crate::{CancelToken, Error, ErrorKind, GraphInfo, Memory, Port, Result};

/// How often a workspace lost the device. Clones share the count.
///
/// A workspace belongs to its host-op. Who drives the op keeps a clone, learns by it why a call failed, and has
/// the op's state made anew: the graphs are there again with the next call.
#[derive(Debug, Clone, Default)]
pub struct Losses(Arc<AtomicU64>);

impl Losses {
    /// The number so far.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// The contexts that a workspace's sources were opened as, in their order; none after a restart until all are there
/// again. Clones share the list.
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

/// Where graphs of a workspace are from.
pub(super) struct Origin {
    pub source: ContextSource,
    pub graphs: Range<usize>,
}

impl Workspace {
    /// Counts how often the device was lost, where the graphs can be opened anew.
    pub fn losses(&self) -> &Losses {
        &self.losses
    }

    /// The contexts of [`Workspace::add_source`], for who wants to keep them longer than the workspace.
    pub fn contexts(&self) -> &LoadedContexts {
        &self.contexts
    }

    /// Takes note of an execution that failed.
    #[cold]
    pub(super) fn note(&mut self, error: &Error) {
        let known = self.origins.iter().map(|origin| origin.graphs.len()).sum::<usize>();
        if error.kind() == ErrorKind::DeviceLost && known == self.graphs.len() {
            self.lost = true;
            self.losses.0.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Opens every context and graph anew and binds what was bound.
    #[cold]
    pub(super) fn reopen(&mut self) -> Result<()> {
        self.try_reopen().map_err(|e| e.context("after the DSP restarted"))?;
        self.lost = false;
        Ok(())
    }

    fn try_reopen(&mut self) -> Result<()> {
        // First out: the DSP takes nothing new while it keeps what is dead, or has no room for both.
        for slot in &mut self.graphs {
            slot.graph = Box::new(Gone(Arc::clone(&slot.info)));
        }
        self.contexts.lock().clear();
        let sources: Vec<_> = self.origins.iter().map(|origin| origin.source.clone()).collect();
        let opened = open_contexts(&*self.backend, &sources, &self.cancel)?;
        let contexts = opened.iter().map(|opened| Arc::clone(&opened.context)).collect();
        for (origin, Opened { context, .. }) in self.origins.iter().zip(opened) {
            let found = context.graphs().iter();
            let slots = self.graphs.get_mut(origin.graphs.clone()).unwrap_or_default();
            if !slots.iter().map(|slot| &slot.info).eq(found) {
                let key = &origin.source.key;
                let message = format!("context {key:?} has changed since it was opened");
                return Err(Error::new(ErrorKind::Context, message)
                    .hint("files of a bundle must not be changed while it is open"));
            }
            for (index, slot) in slots.iter_mut().enumerate() {
                slot.graph = context.open_graph(index)?;
                bind(slot, &self.buffers)?;
            }
        }
        *self.contexts.lock() = contexts;
        Ok(())
    }
}

/// Binds what was bound to a graph before it was opened anew.
fn bind(slot: &mut Slot, buffers: &[Memory]) -> Result<()> {
    let inputs = slot.info.inputs.len();
    for (index, place) in slot.places.iter().enumerate() {
        let bound = place.bound.and_then(|(id, at)| Some((buffers.get(id.0 as usize)?, at)));
        let Some((memory, offset)) = bound else { continue };
        let port = match index.checked_sub(inputs) {
            Some(output) => Port::Output(output),
            None => Port::Input(index),
        };
        slot.graph.bind(port, memory, offset)?;
    }
    Ok(())
}

/// In the place of a graph that could not be opened anew.
struct Gone(Arc<GraphInfo>);

impl Graph for Gone {
    fn info(&self) -> &Arc<GraphInfo> {
        &self.0
    }

    fn bind(&mut self, _: Port, _: &Memory, _: usize) -> Result<()> {
        // The workspace keeps the binding.
        Ok(())
    }

    unsafe fn execute(&mut self) -> Result<()> {
        Err(Error::new(ErrorKind::Internal, "the graph was not opened anew"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::null::NullBackend;
    use crate::{DType, GraphId, TensorInfo};

    /// A workspace over a graph that doubles a byte and counts; its execution number `fails` answers with a code.
    fn workspace(fails: usize, kind: ErrorKind, known: bool) -> Workspace {
        let tensor = |name: &str| TensorInfo::new(name, DType::U8, [1]);
        let graphs = vec![GraphInfo::new("double", [tensor("x")], [tensor("y")])];
        let counter = AtomicUsize::new(0);
        let backend = NullBackend::new(vec![("part".to_owned(), graphs)]);
        let backend = backend.with_script(move |_, inputs, outputs| {
            if counter.fetch_add(1, Ordering::Relaxed) + 1 == fails {
                return Err(Error::new(kind, "it broke"));
            }
            outputs[0][0] = inputs[0][0].wrapping_mul(2);
            Ok(())
        });
        let backend: Arc<dyn crate::backend::Backend> = Arc::new(backend);
        let source = ContextSource { key: "part".to_owned(), ..ContextSource::default() };
        let context = backend.open_context(&source).unwrap();
        let mut workspace = Workspace::new(backend, CancelToken::new());
        match known {
            true => workspace.add_source(&source, &context).unwrap(),
            false => workspace.add_context("part", &context).unwrap(),
        }
        for port in [Port::Input(0), Port::Output(0)] {
            let buffer = workspace.allocate(2).unwrap();
            workspace.bind(GraphId(0), port, buffer, 1).unwrap();
        }
        workspace.bytes_mut(crate::BufferId(0)).unwrap()[1] = 21;
        workspace
    }

    #[test]
    fn after_a_restart_graphs_are_there_again_with_what_was_bound() {
        {
            let mut workspace = workspace(2, ErrorKind::DeviceLost, true);
            let losses = workspace.losses().clone();
            workspace.execute(GraphId(0)).unwrap();
            let error = workspace.execute(GraphId(0)).unwrap_err();
            assert!(error.message().contains("double"), "{error}");
            assert_eq!(error.kind(), ErrorKind::DeviceLost);
            assert_eq!(losses.count(), 1);
            workspace.bytes_mut(crate::BufferId(1)).unwrap().fill(0);
            workspace.execute(GraphId(0)).unwrap();
            assert_eq!(workspace.bytes(crate::BufferId(1)).unwrap(), [0, 42]);
            assert_eq!((losses.count(), workspace.stats()[0].executions), (1, 3));
        }
    }

    #[test]
    fn other_failures_and_contexts_of_unknown_files_count_as_no_restart() {
        for (kind, known) in [(ErrorKind::Execute, true), (ErrorKind::DeviceLost, false)] {
            let mut workspace = workspace(1, kind, known);
            workspace.execute(GraphId(0)).unwrap_err();
            assert_eq!(workspace.losses().count(), 0);
            workspace.execute(GraphId(0)).unwrap();
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
