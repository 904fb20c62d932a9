//! Keeps only some contexts loaded: for models whose contexts together are larger than the memory.
//!
//! [`LruContexts`] wraps another backend. A context is opened once, so that what is wrong with it
//! is found at the beginning and its graphs are known; which contexts are in memory afterwards follows
//! from which graphs are executed: the one that was used longest ago goes when another is needed, and more
//! of them when the other does not fit the memory beside the rest. Loading
//! takes as long as it takes, so this pays where contexts run one after another and each for long, as
//! the parts of an encoder do. Buffers stay where they are.
//!
//! Each opened context is one of its own, whatever its key: models on one backend share the limit and
//! nothing else. A context leaves the memory when nothing uses it any more, as when its model is closed.

#![expect(unsafe_code, reason = "implements Graph, whose execute is unsafe to call")]

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use qhx_base::{Error, ErrorKind, Result};
use qhx_types::{GraphInfo, Port};

use crate::backend::{Backend, BackendInfo, Context, ContextSource, Graph};
use crate::{Buffer, Memory};

/// A backend that keeps at most some number of another's contexts loaded.
#[derive(Debug)]
pub struct LruContexts {
    inner: Arc<dyn Backend>,
    limit: usize,
    pool: Arc<Pool>,
}

impl LruContexts {
    /// Keeps at most `limit` contexts of `inner` loaded, and at least one.
    pub fn new(inner: Arc<dyn Backend>, limit: usize) -> Self {
        Self { inner, limit: limit.max(1), pool: Arc::default() }
    }
}

/// The contexts in memory.
///
/// Nothing is executed and nothing loaded under the lock of the list. One context is loaded at a time: who loads
/// waits for executions to end where their contexts have to go, and who executes waits for nobody.
#[derive(Debug, Default)]
struct Pool {
    /// In order of use, the one used longest ago first.
    loaded: Mutex<Vec<Loaded>>,
    /// A context is no longer executed.
    idle: Condvar,
    loading: Mutex<()>,
}

/// A context in memory, with those of its opened graphs that were used.
struct Loaded {
    /// [`Origin::id`].
    id: u64,
    key: String,
    context: Arc<dyn Context>,
    /// Executions under way.
    busy: usize,
    /// By [`LazyGraph::slot`]; a graph that executes is not here meanwhile.
    graphs: Vec<Option<Box<dyn Graph>>>,
}

impl std::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loaded").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Backend for LruContexts {
    fn info(&self) -> BackendInfo {
        let mut info = self.inner.info();
        info.details.push(format!("at most {} contexts loaded at a time", self.limit));
        info
    }

    fn accepts(&self, source: &ContextSource) -> bool {
        self.inner.accepts(source)
    }

    fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let origin = Arc::new(Origin {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            slots: AtomicUsize::new(0),
            inner: Arc::clone(&self.inner),
            source: source.clone(),
            limit: self.limit,
            pool: Arc::clone(&self.pool),
        });
        let context = Arc::clone(&origin.load(None)?.context);
        let (graphs, bytes) = (context.graphs().to_vec(), context.resident_bytes());
        Ok(Arc::new(LazyContext { origin, graphs, bytes }))
    }

    fn is_out_of_memory(&self, error: &Error) -> bool {
        self.inner.is_out_of_memory(error)
    }

    fn device(&self) -> Option<String> {
        self.inner.device()
    }

    fn emulates(&self) -> bool {
        self.inner.emulates()
    }

    fn conditions(&self) -> Vec<String> {
        self.inner.conditions()
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.inner.allocate(bytes)
    }
}

/// Source of an opened context, and the pool that keeps it while it is loaded.
struct Origin {
    /// Distinct from every other opened context of the process.
    id: u64,
    /// Graphs opened so far.
    slots: AtomicUsize,
    inner: Arc<dyn Backend>,
    source: ContextSource,
    limit: usize,
    pool: Arc<Pool>,
}

impl Origin {
    fn lock(&self) -> MutexGuard<'_, Vec<Loaded>> {
        self.pool.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The context where it is loaded, with the graph of a slot, if that was used since.
    fn find(&self, slot: Option<usize>) -> Option<Use<'_>> {
        let mut loaded = self.lock();
        let index = loaded.iter().position(|entry| entry.id == self.id)?;
        if index + 1 < loaded.len() {
            loaded[index..].rotate_left(1);
        }
        let entry = loaded.last_mut()?;
        entry.busy += 1;
        let graph = slot.and_then(|slot| entry.graphs.get_mut(slot)?.take());
        Some(Use { origin: self, context: Arc::clone(&entry.context), slot, graph })
    }

    /// Same as [`Origin::find`], but loads the context if need be, in the place of the least recently used one.
    fn load(&self, slot: Option<usize>) -> Result<Use<'_>> {
        if let Some(found) = self.find(slot) {
            return Ok(found);
        }
        let _loading = self.pool.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = self.find(slot) {
            return Ok(found);
        }
        // First out, then in: both may not fit.
        while self.lock().len() >= self.limit {
            self.evict();
        }
        let context = loop {
            match self.inner.open_context(&self.source) {
                // Contexts differ in size: fewer than the limit may be all that fit.
                Err(error) if self.inner.is_out_of_memory(&error) && !self.lock().is_empty() => {
                    self.evict();
                }
                opened => break opened?,
            }
        };
        let key = self.source.key.clone();
        self.lock().push(Loaded {
            id: self.id,
            key,
            context: Arc::clone(&context),
            busy: 1,
            graphs: Vec::new(),
        });
        Ok(Use { origin: self, context, slot, graph: None })
    }

    /// Frees the context that was used longest ago, once one of them is not executed.
    fn evict(&self) {
        let mut loaded = self.lock();
        while !loaded.is_empty() {
            if let Some(index) = loaded.iter().position(|entry| entry.busy == 0) {
                let entry = loaded.remove(index);
                drop(loaded);
                drop(entry);
                return;
            }
            loaded = self.pool.idle.wait(loaded).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        let mut loaded = self.lock();
        let index = loaded.iter().position(|entry| entry.id == self.id);
        let entry = index.map(|index| loaded.remove(index));
        drop(loaded);
        drop(entry);
        self.pool.idle.notify_all();
    }
}

/// A loaded context in use. It stays loaded meanwhile.
struct Use<'a> {
    origin: &'a Origin,
    context: Arc<dyn Context>,
    slot: Option<usize>,
    /// The graph of the slot. One that is left here is there again at the next use.
    graph: Option<Box<dyn Graph>>,
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        let mut loaded = self.origin.lock();
        if let Some(entry) = loaded.iter_mut().find(|entry| entry.id == self.origin.id) {
            entry.busy -= 1;
            if let Some((slot, graph)) = self.slot.zip(self.graph.take()) {
                if entry.graphs.len() <= slot {
                    entry.graphs.resize_with(slot + 1, || None);
                }
                entry.graphs[slot] = Some(graph);
            }
        }
        drop(loaded);
        self.origin.pool.idle.notify_all();
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
            slot: self.origin.slots.fetch_add(1, Ordering::Relaxed),
            origin: Arc::clone(&self.origin),
            index,
            info,
            bindings,
            changed: vec![false; ports],
        }))
    }

    fn resident_bytes(&self) -> u64 {
        let loaded = self.origin.lock();
        if loaded.iter().any(|l| l.id == self.origin.id) { self.bytes } else { 0 }
    }
}

struct LazyGraph {
    origin: Arc<Origin>,
    /// Place of the graph behind this one in [`Loaded::graphs`]. Nobody else has it, so that two
    /// openings of one graph have bindings of their own.
    slot: usize,
    /// Index in the context.
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
        let mut used = self.origin.load(Some(self.slot))?;
        let known = used.graph.take();
        let fresh = known.is_none();
        let mut graph = match known {
            Some(graph) => graph,
            None => {
                let found = used.context.graphs().get(self.index);
                if found.is_none_or(|found| **found != *self.info) {
                    let key = &self.origin.source.key;
                    return Err(Error::new(
                        ErrorKind::Context,
                        format!("context {key:?} has changed since it was opened"),
                    )
                    .hint("files of a bundle must not be changed while it is open"));
                }
                used.context.open_graph(self.index)?
            }
        };
        let inputs = self.info.inputs.len();
        for (index, (binding, changed)) in self.bindings.iter().zip(&mut self.changed).enumerate() {
            if let (true, Some((memory, offset))) = (fresh || *changed, binding) {
                let port =
                    if index < inputs { Port::Input(index) } else { Port::Output(index - inputs) };
                // A graph that lacks a binding is closed: the next one is bound from the first port on.
                graph.bind(port, memory, *offset)?;
            }
            *changed = false;
        }
        // SAFETY: contract of `crate::backend`: the caller guarantees bound and exclusive, and every binding
        // was made alike to the graph behind this one.
        let result = unsafe { graph.execute() };
        used.graph = Some(graph);
        result
    }
}

impl Drop for LazyGraph {
    fn drop(&mut self) {
        let mut loaded = self.origin.lock();
        let entry = loaded.iter_mut().find(|l| l.id == self.origin.id);
        let graph = entry.and_then(|entry| entry.graphs.get_mut(self.slot)?.take());
        drop(loaded);
        drop(graph);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::null::NullBackend;
    use crate::{BufferId, GraphId, Workspace};
    use qhx_base::CancelToken;
    use qhx_types::{DType, TensorInfo};

    /// Counts contexts that are alive, and how often one was opened.
    #[derive(Debug)]
    struct Counting {
        inner: NullBackend,
        /// Contexts that fit the memory.
        room: usize,
        alive: Arc<AtomicUsize>,
        max_alive: AtomicUsize,
        opened: AtomicUsize,
    }

    impl Counting {
        fn over(inner: NullBackend, room: usize) -> Arc<Self> {
            let (alive, max_alive, opened) = Default::default();
            Arc::new(Self { inner, room, alive, max_alive, opened })
        }
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

    /// The device's number for memory that ran out.
    const FULL: u64 = 12;

    impl Backend for Counting {
        fn info(&self) -> BackendInfo {
            self.inner.info()
        }

        fn is_out_of_memory(&self, error: &Error) -> bool {
            error.code() == Some(FULL)
        }

        fn accepts(&self, source: &ContextSource) -> bool {
            self.inner.accepts(source)
        }

        fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>> {
            if self.alive.load(Ordering::Relaxed) >= self.room {
                return Err(Error::new(ErrorKind::Context, "no memory").with_code(FULL));
            }
            let factor = source.binary.as_ref().and_then(|p| p.to_str()?.parse::<u8>().ok());
            let inner = match factor {
                Some(factor) => self.inner.clone().with_script(move |_, inputs, outputs| {
                    outputs[0][0] = inputs[0][0].wrapping_mul(factor);
                    Ok(())
                }),
                None => self.inner.clone(),
            };
            let context = inner.open_context(source)?;
            let alive = self.alive.fetch_add(1, Ordering::Relaxed) + 1;
            self.max_alive.fetch_max(alive, Ordering::Relaxed);
            self.opened.fetch_add(1, Ordering::Relaxed);
            Ok(Arc::new(Counted(context, Arc::clone(&self.alive))))
        }
    }

    #[test]
    fn contexts_take_turns_and_bindings_survive_it() {
        take_turns(2, usize::MAX);
        // Fewer stay where the limit does not fit the memory.
        take_turns(3, 2);
    }

    /// Three contexts, of which two stay in memory.
    fn take_turns(limit: usize, room: usize) {
        let tensor = |name: &str| TensorInfo::new(name, DType::U8, vec![1]);
        let graph =
            |part: usize| GraphInfo::new(format!("part_{part}"), [tensor("x")], [tensor("y")]);
        let contexts = (0..3).map(|part| (format!("c{part}"), vec![graph(part)])).collect();
        let inner = NullBackend::new(contexts).with_script(|info, inputs, outputs| {
            // Each part multiplies by its number, so that an order or a buffer mixed up shows.
            let factor = info.name.as_bytes()[5] - b'0' + 2;
            outputs[0][0] = inputs[0][0].wrapping_mul(factor);
            Ok(())
        });
        let counting = Counting::over(inner, room);
        let backend: Arc<dyn Backend> = Arc::new(LruContexts::new(counting.clone(), limit));
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
        // A buffer bound again counts from the next execution on.
        workspace.bind(GraphId(2), Port::Input(0), buffers[0], 0).unwrap();
        workspace.execute(GraphId(2)).unwrap();
        assert_eq!(workspace.bytes(buffers[3]).unwrap(), [20]);
        assert_eq!(counting.max_alive.load(Ordering::Relaxed), 2);
        assert_eq!(counting.opened.load(Ordering::Relaxed), 9);
        drop(workspace);
        assert_eq!(counting.alive.load(Ordering::Relaxed), 0);
    }

    /// One context `part` with one graph, which multiplies by the number that its file is called.
    fn multiplying(room: usize) -> Arc<Counting> {
        let tensor = |name: &str| TensorInfo::new(name, DType::U8, vec![1]);
        let graph = GraphInfo::new("part", [tensor("x")], [tensor("y")]);
        let contexts = vec![("part".to_owned(), vec![graph])];
        Counting::over(NullBackend::new(contexts), room)
    }

    fn open(backend: &Arc<dyn Backend>, file: &str) -> Workspace {
        let binary = Some(file.into());
        let source = ContextSource { key: "part".to_owned(), binary, ..ContextSource::default() };
        let context = backend.open_context(&source).unwrap();
        let mut workspace = Workspace::new(Arc::clone(backend), CancelToken::new());
        workspace.add_context("part", &context).unwrap();
        for port in [Port::Input(0), Port::Output(0)] {
            let buffer = workspace.allocate(1).unwrap();
            workspace.bind(GraphId(0), port, buffer, 0).unwrap();
        }
        workspace
    }

    fn run(workspace: &mut Workspace, x: u8) -> u8 {
        workspace.bytes_mut(BufferId(0)).unwrap()[0] = x;
        workspace.execute(GraphId(0)).unwrap();
        workspace.bytes(BufferId(1)).unwrap()[0]
    }

    #[test]
    fn two_models_with_one_key_have_contexts_of_their_own() {
        let counting = multiplying(usize::MAX);
        let backend: Arc<dyn Backend> = Arc::new(LruContexts::new(counting.clone(), 2));
        let mut first = open(&backend, "3");
        let mut second = open(&backend, "5");
        assert_eq!((run(&mut first, 2), run(&mut second, 2)), (6, 10));
        assert_eq!((run(&mut first, 4), run(&mut second, 7)), (12, 35));
        assert_eq!(counting.alive.load(Ordering::Relaxed), 2);
        drop(first);
        assert_eq!(counting.alive.load(Ordering::Relaxed), 1);
        assert_eq!(run(&mut second, 9), 45);
        assert_eq!(counting.opened.load(Ordering::Relaxed), 2);
        drop(second);
        assert_eq!(counting.alive.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn two_openings_of_one_graph_keep_their_bindings() {
        let backend: Arc<dyn Backend> = Arc::new(LruContexts::new(multiplying(1), 1));
        let source = ContextSource {
            key: "part".to_owned(),
            binary: Some("3".into()),
            ..ContextSource::default()
        };
        let context = backend.open_context(&source).unwrap();
        let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
        workspace.add_context("first", &context).unwrap();
        workspace.add_context("second", &context).unwrap();
        let buffers: Vec<_> = (0..4).map(|_| workspace.allocate(1).unwrap()).collect();
        for graph in 0..2 {
            let id = GraphId(graph as u32);
            workspace.bind(id, Port::Input(0), buffers[2 * graph], 0).unwrap();
            workspace.bind(id, Port::Output(0), buffers[2 * graph + 1], 0).unwrap();
            workspace.bytes_mut(buffers[2 * graph]).unwrap()[0] = graph as u8 + 1;
        }
        for graph in [0, 1, 0] {
            workspace.execute(GraphId(graph)).unwrap();
        }
        workspace.bytes_mut(buffers[0]).unwrap()[0] = 9;
        workspace.execute(GraphId(0)).unwrap();
        let results = [1, 3].map(|index| workspace.bytes(buffers[index]).unwrap()[0]);
        assert_eq!(results, [27, 6]);
    }

    /// Opens graphs of which the one numbered `fails` cannot be bound at its output. Executions wait for each other.
    #[derive(Debug)]
    struct Scripted {
        inner: Arc<Counting>,
        fails: usize,
        graphs: Arc<AtomicUsize>,
        both: Option<Arc<std::sync::Barrier>>,
    }

    struct Checked<T> {
        inner: T,
        fails: usize,
        graphs: Arc<AtomicUsize>,
        both: Option<Arc<std::sync::Barrier>>,
        bound: usize,
    }

    impl Backend for Scripted {
        fn info(&self) -> BackendInfo {
            self.inner.info()
        }

        fn accepts(&self, source: &ContextSource) -> bool {
            self.inner.accepts(source)
        }

        fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>> {
            let (inner, graphs) = (self.inner.open_context(source)?, Arc::clone(&self.graphs));
            let both = self.both.clone();
            Ok(Arc::new(Checked { inner, fails: self.fails, graphs, both, bound: 0 }))
        }
    }

    impl Context for Checked<Arc<dyn Context>> {
        fn graphs(&self) -> &[Arc<GraphInfo>] {
            self.inner.graphs()
        }

        fn open_graph(&self, index: usize) -> Result<Box<dyn Graph>> {
            let fails = self.graphs.fetch_add(1, Ordering::Relaxed) == self.fails;
            let (inner, graphs) = (self.inner.open_graph(index)?, Arc::clone(&self.graphs));
            let both = self.both.clone();
            Ok(Box::new(Checked { inner, fails: fails.into(), graphs, both, bound: 0 }))
        }
    }

    impl Graph for Checked<Box<dyn Graph>> {
        fn info(&self) -> &Arc<GraphInfo> {
            self.inner.info()
        }

        fn bind(&mut self, port: Port, memory: &Memory, offset: usize) -> Result<()> {
            if self.fails > 0 && port == Port::Output(0) {
                self.fails = 0;
                return Err(Error::new(ErrorKind::Graph, "registering memory failed"));
            }
            self.bound += 1;
            self.inner.bind(port, memory, offset)
        }

        unsafe fn execute(&mut self) -> Result<()> {
            assert!(self.bound >= 2, "executed with {} of 2 ports bound", self.bound);
            self.both.as_ref().map(|both| both.wait());
            // SAFETY: the caller's contract is that of the graph behind this one.
            unsafe { self.inner.execute() }
        }
    }

    #[test]
    fn two_models_on_one_lru_backend_execute_side_by_side() {
        let (inner, graphs) = (multiplying(usize::MAX), Arc::default());
        // Nobody passes alone.
        let both = Some(Arc::new(std::sync::Barrier::new(2)));
        let inner = Scripted { inner, fails: usize::MAX, graphs, both };
        let backend: Arc<dyn Backend> = Arc::new(LruContexts::new(Arc::new(inner), 2));
        let (done, finished) = std::sync::mpsc::channel();
        for file in ["3", "5"] {
            let (mut workspace, done) = (open(&backend, file), done.clone());
            std::thread::spawn(move || done.send(workspace.execute(GraphId(0))));
        }
        for _ in 0..2 {
            finished.recv_timeout(std::time::Duration::from_secs(60)).unwrap().unwrap();
        }
    }

    #[test]
    fn a_graph_that_could_not_be_bound_is_never_executed() {
        let (inner, graphs) = (multiplying(usize::MAX), Arc::<AtomicUsize>::default());
        // The second graph that is opened: the first model's after it was loaded again.
        let inner = Scripted { inner, fails: 2, graphs: Arc::clone(&graphs), both: None };
        let backend: Arc<dyn Backend> = Arc::new(LruContexts::new(Arc::new(inner), 1));
        let (mut first, mut second) = (open(&backend, "3"), open(&backend, "5"));
        assert_eq!((run(&mut first, 2), run(&mut second, 2)), (6, 10));
        let error = first.execute(GraphId(0)).unwrap_err();
        assert!(error.message().contains("registering memory failed"), "{error}");
        assert_eq!(run(&mut first, 4), 12);
        assert_eq!(graphs.load(Ordering::Relaxed), 4, "a graph again after the failure");
    }
}
