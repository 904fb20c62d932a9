//! Keeps only some contexts loaded: for models whose contexts together are larger than the memory.
//!
//! [`ResidentBackend`] wraps another backend. A context is opened once, so that what is wrong with it
//! is found at the beginning and its graphs are known; which contexts are in memory afterwards follows
//! from which graphs are executed: the one that was used longest ago goes when another is needed, and more
//! of them when the other does not fit the memory beside the rest. Loading
//! takes as long as it takes, so this pays where contexts run one after another and each for long, as
//! the parts of an encoder do. Buffers stay where they are.

#![expect(unsafe_code, reason = "implements Graph, whose execute is unsafe to call")]

use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::{Backend, BackendInfo, Context, ContextSource, Graph};
use crate::qnn::codes::MEM_ALLOC;
use crate::{Buffer, Error, ErrorKind, GraphInfo, Memory, Port, Result};

/// A backend that keeps at most some number of another's contexts loaded.
#[derive(Debug)]
pub struct ResidentBackend {
    inner: Arc<dyn Backend>,
    limit: usize,
    loaded: Arc<Mutex<Vec<Loaded>>>,
}

impl ResidentBackend {
    /// Keeps at most `limit` contexts of `inner` loaded, and at least one.
    pub fn new(inner: Arc<dyn Backend>, limit: usize) -> Self {
        Self { inner, limit: limit.max(1), loaded: Arc::default() }
    }
}

/// A context in memory, with those of its graphs that were used.
struct Loaded {
    key: String,
    context: Arc<dyn Context>,
    graphs: Vec<Option<Box<dyn Graph>>>,
}

impl std::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loaded").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Backend for ResidentBackend {
    fn info(&self) -> BackendInfo {
        let mut info = self.inner.info();
        info.details.push(format!("at most {} contexts loaded at a time", self.limit));
        info
    }

    fn accepts(&self, source: &ContextSource) -> bool {
        self.inner.accepts(source)
    }

    fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>> {
        let origin = Arc::new(Origin {
            inner: Arc::clone(&self.inner),
            source: source.clone(),
            limit: self.limit,
            loaded: Arc::clone(&self.loaded),
        });
        let mut loaded = origin.lock();
        let entry = origin.load(&mut loaded)?;
        let graphs = entry.context.graphs().to_vec();
        let bytes = entry.context.resident_bytes();
        drop(loaded);
        Ok(Arc::new(LazyContext { origin, graphs, bytes }))
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.inner.allocate(bytes)
    }
}

/// Where a context comes from, and where it is kept while it is loaded.
struct Origin {
    inner: Arc<dyn Backend>,
    source: ContextSource,
    limit: usize,
    loaded: Arc<Mutex<Vec<Loaded>>>,
}

impl Origin {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Loaded>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The context, loaded if need be in the place of the one that was used longest ago. It becomes the
    /// last of the list, which is in order of use.
    fn load<'l>(&self, loaded: &'l mut Vec<Loaded>) -> Result<&'l mut Loaded> {
        match loaded.iter().position(|l| l.key == self.source.key) {
            Some(last) if last + 1 == loaded.len() => {}
            Some(index) => loaded[index..].rotate_left(1),
            None => {
                // First out, then in: both may not fit.
                loaded.drain(..(loaded.len() + 1).saturating_sub(self.limit));
                let context = loop {
                    match self.inner.open_context(&self.source) {
                        // Contexts differ in size: fewer than the limit may be all that fit.
                        Err(error) if error.code() == Some(MEM_ALLOC) && !loaded.is_empty() => {
                            loaded.remove(0);
                        }
                        opened => break opened?,
                    }
                };
                let graphs = context.graphs().iter().map(|_| None).collect();
                loaded.push(Loaded { key: self.source.key.clone(), context, graphs });
            }
        }
        loaded.last_mut().ok_or_else(|| Error::new(ErrorKind::Internal, "no context is loaded"))
    }
}

struct LazyContext {
    origin: Arc<Origin>,
    graphs: Vec<Arc<GraphInfo>>,
    bytes: u64,
}

impl Context for LazyContext {
    fn graphs(&self) -> &[Arc<GraphInfo>] {
        &self.graphs
    }

    fn open_graph(&self, index: usize) -> Result<Box<dyn Graph>> {
        let info = self.graphs.get(index).cloned().ok_or_else(|| {
            let key = &self.origin.source.key;
            Error::new(ErrorKind::Internal, format!("context {key:?} has no graph {index}"))
        })?;
        let ports = info.inputs.len() + info.outputs.len();
        let bindings = vec![None; ports];
        Ok(Box::new(LazyGraph {
            origin: Arc::clone(&self.origin),
            index,
            info,
            bindings,
            changed: vec![false; ports],
        }))
    }

    fn resident_bytes(&self) -> u64 {
        let loaded = self.origin.lock();
        if loaded.iter().any(|l| l.key == self.origin.source.key) { self.bytes } else { 0 }
    }
}

struct LazyGraph {
    origin: Arc<Origin>,
    index: usize,
    info: Arc<GraphInfo>,
    /// Inputs, then outputs.
    bindings: Vec<Option<(Memory, usize)>>,
    /// Bindings that the loaded graph does not know yet.
    changed: Vec<bool>,
}

impl Graph for LazyGraph {
    fn info(&self) -> &Arc<GraphInfo> {
        &self.info
    }

    fn bind(&mut self, port: Port, memory: &Memory, offset: usize) -> Result<()> {
        let index = match port {
            Port::Input(i) => i,
            Port::Output(i) => self.info.inputs.len().saturating_add(i),
        };
        let slots = self.bindings.get_mut(index).zip(self.changed.get_mut(index));
        let Some((binding, changed)) = slots else {
            let name = &self.info.name;
            return Err(Error::new(ErrorKind::Internal, format!("graph {name:?} has no {port:?}")));
        };
        *binding = Some((memory.clone(), offset));
        *changed = true;
        Ok(())
    }

    unsafe fn execute(&mut self) -> Result<()> {
        let mut loaded = self.origin.lock();
        let entry = self.origin.load(&mut loaded)?;
        let (context, slot) = (&entry.context, entry.graphs.get_mut(self.index));
        let Some(slot) = slot else {
            return Err(Error::new(
                ErrorKind::Context,
                format!("context {:?} has changed since it was opened", entry.key),
            ));
        };
        let fresh = slot.is_none();
        let graph = match slot {
            Some(graph) => graph,
            none => none.insert(context.open_graph(self.index)?),
        };
        let inputs = self.info.inputs.len();
        for (index, (binding, changed)) in self.bindings.iter().zip(&mut self.changed).enumerate() {
            if let (true, Some((memory, offset))) = (fresh || *changed, binding) {
                let port =
                    if index < inputs { Port::Input(index) } else { Port::Output(index - inputs) };
                graph.bind(port, memory, *offset)?;
            }
            *changed = false;
        }
        // SAFETY: the caller vouches that all ports are bound, which are bound alike to the graph
        // behind this one, and that no reference into a buffer is alive.
        unsafe { graph.execute() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::null::NullBackend;
    use crate::{CancelToken, DType, GraphId, TensorInfo, Workspace};

    /// Counts contexts that are alive, and how often one was opened.
    #[derive(Debug)]
    struct Counting {
        inner: NullBackend,
        /// Contexts that fit the memory.
        room: usize,
        alive: Arc<AtomicUsize>,
        most: AtomicUsize,
        opened: AtomicUsize,
    }

    struct Counted(Arc<dyn Context>, Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.1.fetch_sub(1, Ordering::Relaxed);
        }
    }

    impl Context for Counted {
        fn graphs(&self) -> &[Arc<GraphInfo>] {
            self.0.graphs()
        }

        fn open_graph(&self, index: usize) -> Result<Box<dyn Graph>> {
            self.0.open_graph(index)
        }
    }

    impl Backend for Counting {
        fn info(&self) -> BackendInfo {
            self.inner.info()
        }

        fn accepts(&self, source: &ContextSource) -> bool {
            self.inner.accepts(source)
        }

        fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>> {
            if self.alive.load(Ordering::Relaxed) >= self.room {
                return Err(Error::new(ErrorKind::Context, "no memory").with_code(MEM_ALLOC));
            }
            let context = self.inner.open_context(source)?;
            let alive = self.alive.fetch_add(1, Ordering::Relaxed) + 1;
            self.most.fetch_max(alive, Ordering::Relaxed);
            self.opened.fetch_add(1, Ordering::Relaxed);
            Ok(Arc::new(Counted(context, Arc::clone(&self.alive))))
        }
    }

    #[test]
    fn contexts_take_turns_and_bindings_survive_it() {
        take_turns(2, usize::MAX);
    }

    #[test]
    fn fewer_contexts_stay_where_the_limit_does_not_fit_the_memory() {
        take_turns(3, 2);
    }

    /// Three contexts, of which two stay in memory.
    fn take_turns(limit: usize, room: usize) {
        let tensor = |name: &str| TensorInfo::new(name, DType::U8, vec![1]);
        let graph = |part: usize| GraphInfo {
            name: format!("part_{part}"),
            inputs: vec![tensor("x")],
            outputs: vec![tensor("y")],
        };
        let contexts = (0..3).map(|part| (format!("c{part}"), vec![graph(part)])).collect();
        let inner = NullBackend::new(contexts).with_script(|info, inputs, outputs| {
            // Each part multiplies by its number, so that an order or a buffer mixed up shows.
            let factor = info.name.as_bytes()[5] - b'0' + 2;
            outputs[0][0] = inputs[0][0].wrapping_mul(factor);
            Ok(())
        });
        let counting = Arc::new(Counting {
            inner,
            room,
            alive: Arc::default(),
            most: AtomicUsize::new(0),
            opened: AtomicUsize::new(0),
        });
        let backend: Arc<dyn Backend> = Arc::new(ResidentBackend::new(counting.clone(), limit));
        let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
        for part in 0..3 {
            let source = ContextSource { key: format!("c{part}"), ..ContextSource::default() };
            let context = backend.open_context(&source).unwrap();
            workspace.add_context(&source.key, &context).unwrap();
        }
        let buffers: Vec<_> = (0..4).map(|_| workspace.allocate(1).unwrap()).collect();
        for part in 0..3 {
            let id = GraphId(part as u32);
            workspace.bind(id, Port::Input(0), buffers[part], 0).unwrap();
            workspace.bind(id, Port::Output(0), buffers[part + 1], 0).unwrap();
        }
        for x in [1, 5] {
            workspace.bytes_mut(buffers[0]).unwrap()[0] = x;
            for part in 0..3 {
                workspace.execute(GraphId(part)).unwrap();
            }
            assert_eq!(workspace.bytes(buffers[3]).unwrap(), [x * 2 * 3 * 4]);
        }
        // A buffer bound anew counts from the next execution on.
        workspace.bind(GraphId(2), Port::Input(0), buffers[0], 0).unwrap();
        workspace.execute(GraphId(2)).unwrap();
        assert_eq!(workspace.bytes(buffers[3]).unwrap(), [20]);
        assert_eq!(counting.most.load(Ordering::Relaxed), 2);
        assert_eq!(counting.opened.load(Ordering::Relaxed), 9);
        drop(workspace);
        drop(backend);
        assert_eq!(counting.alive.load(Ordering::Relaxed), 0);
    }
}
