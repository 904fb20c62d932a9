//! The graphs and buffers of one session, addressed by index.
//!
//! Names become indices when a session is opened; the per-token calls ([`Workspace::bind`],
//! [`Workspace::execute`], the byte views) look up nothing and allocate nothing.
//!
//! # Contract
//! A workspace is the caller that [`crate::backend`] speaks of, on behalf of safe code. It keeps
//! *bound* and *exclusive* by these clauses, which the SAFETY comments cite by name:
//!
//! | clause | what holds |
//! |---|---|
//! | *owned* | A workspace owns its graphs, and the only safe way to the bytes of what they write. A buffer that it was given is gone for the giver: [`Workspace::adopt`] takes it by value, and it cannot be cloned. What it shares is read-only: [`Workspace::map`]. |
//! | *borrowed* | Views of bytes borrow the workspace. Executing a graph and writing bytes borrow it mutably. The borrow checker thus excludes each during the others. |
//! | *counted* | A graph with a port that nothing is bound to is not executed. |
//! | *lent* | [`Workspace::memory`] lends a handle, which leads to bytes through `unsafe` only. Who goes that way, as the host of plugins does, sees to it that nothing is read or written by it while a graph executes. |

#![expect(unsafe_code, reason = "keeps the caller's part of the contract of graphs")]

mod loss;
mod turns;
mod watchdog;

use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use qhx_base::artifacts::Mapped;
use qhx_base::trace::{Category, Event, Trace};
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_types::{GraphInfo, Port, TensorInfo};

pub use self::loss::{DeviceLoss, LoadedContexts};
use self::turns::{Company, Ports, Seat, Taken, Together, Turn};
use self::watchdog::ExecutionTimes;
use crate::backend::{Backend, BoundPorts, Context, ContextSource, Graph};
use crate::{Buffer, Memory};

/// Index of a graph in a [`Workspace`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GraphId(pub u32);

/// Index of a buffer in a [`Workspace`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BufferId(pub u32);

/// Time spent in one graph.
#[derive(Debug, Clone, PartialEq)]
pub struct GraphStats {
    /// Manifest key of the context.
    pub context: String,
    /// Name of the graph.
    pub graph: String,
    /// Number of executions.
    pub executions: u64,
    /// Time inside the backend's `execute`.
    pub busy: Duration,
    /// Executions that took more than 5 times the median of the graph's last ones, and 200 ms at least.
    pub slow: u64,
    /// Sequences of other sessions that the executions were for, too: see [`Context::open_batch`].
    pub shared: u64,
}

/// Bytes of the buffers that workspaces allocated. Clones share the count.
#[derive(Debug, Clone, Default)]
pub struct Allocated(Arc<AtomicU64>);

impl Allocated {
    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Beginning of the names of outputs that only a [`Tap`] reads. A workspace binds them to buffers of its own.
pub const TAPPED: &str = "tapped_";

/// Called after each execution that succeeded.
pub type Tap = Arc<dyn Fn(&Executed<'_>) + Send + Sync>;

/// A graph that has just been executed, with what it read and wrote.
#[derive(Debug)]
pub struct Executed<'a> {
    workspace: &'a Workspace,
    slot: &'a Slot,
}

impl Executed<'_> {
    /// Manifest key of the context.
    pub fn context(&self) -> &str {
        &self.slot.context
    }

    /// Description of the graph.
    pub fn info(&self) -> &GraphInfo {
        &self.slot.info
    }

    /// Bytes of a port's tensor. An input has those that the graph read, unless it wrote to the same buffer.
    pub fn bytes(&self, port: Port) -> Option<&[u8]> {
        let index = match port {
            Port::Input(index) => index,
            Port::Output(index) => self.slot.info.inputs.len().checked_add(index)?,
        };
        let place = self.slot.places.get(index)?;
        let (buffer, offset) = place.bound?;
        self.workspace.bytes(buffer).ok()?.get(offset..offset.checked_add(place.bytes)?)
    }
}

struct Slot {
    context: String,
    graph: Box<dyn Graph>,
    info: Arc<GraphInfo>,
    /// Place of each input, then of each output.
    places: Vec<Place>,
    unbound: usize,
    /// For executions together with other workspaces.
    together: Option<Together>,
    /// Microseconds of one execution, as the bundle declares.
    us: Option<f64>,
    executions: u64,
    busy: Duration,
    times: ExecutionTimes,
    slow: u64,
    /// Sequences of other workspaces in its executions.
    shared: u64,
}

/// Size of a port's tensor, and what is bound to it.
struct Place {
    /// Bytes of the tensor. Computed once: states are bound again for every token.
    bytes: usize,
    /// The buffer, and the byte that the tensor begins at.
    bound: Option<(BufferId, usize)>,
    /// Previous binding. It fits: it was checked then, and buffers stay as they are.
    former: Option<(BufferId, usize)>,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot")
            .field("context", &self.context)
            .field("graph", &self.info.name)
            .finish_non_exhaustive()
    }
}

impl Slot {
    /// Executes the graph when its turn has come, along with those that wait with the same graph, or has another
    /// workspace do so.
    fn execute(
        &mut self,
        contexts: &LoadedContexts,
        seat: &Arc<Seat>,
        cancel: &CancelToken,
    ) -> Result<Taken> {
        let mut together = self.together.as_ref();
        let turn = loop {
            match contexts.turns().enter(seat, together) {
                Turn::Leads(turn) => break turn,
                Turn::Done(taken) => return Ok(taken),
                Turn::Alone => together = None,
            }
        };
        // Others may have taken long.
        if cancel.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
        }
        if let Some(together) = together {
            let company = turn.gather(&together.graph);
            if let Some(taken) = execute_together(together, company) {
                return Ok(taken);
            }
        }
        let start = Instant::now();
        // SAFETY: contract: counted is *bound*; owned and borrowed are *exclusive*.
        let result = unsafe { self.graph.execute() };
        let elapsed = start.elapsed();
        if let Some(together) = together {
            together.graph.executed(1, elapsed);
        }
        Ok(Taken { elapsed, sequences: 1, result })
    }
}

/// Executes a graph for a workspace and its company. `None` if there is none, or if it failed otherwise than by a loss
/// of the device: each executes alone then, so that only the sequence fails that has to.
fn execute_together(own: &Together, company: Company) -> Option<Taken> {
    if company.len() == 0 {
        return None;
    }
    let sequences = company.len() + 1;
    let start = Instant::now();
    let result = {
        let ports: Vec<_> =
            iter::once(&*own.ports).chain(company.ports()).map(Ports::lock).collect();
        let bound: Vec<&BoundPorts> = ports.iter().map(|ports| ports.as_slice()).collect();
        // SAFETY: contract: counted is *bound*; owned and borrowed are *exclusive*, for each member as well, whose
        // workspace is borrowed mutably until it is told. Workspaces share what is read-only.
        unsafe { own.graph.batch().execute(&bound) }
    };
    let elapsed = start.elapsed();
    match &result {
        Err(e) if e.kind() != ErrorKind::DeviceLost => {
            tracing::debug!("{sequences} sequences together: {}", e.message());
            return None;
        }
        _ => {}
    }
    own.graph.executed(sequences, elapsed);
    let taken = Taken { elapsed, sequences, result };
    company.done(&taken);
    Some(taken)
}

impl Place {
    fn new(tensor: &TensorInfo) -> Result<Self> {
        let bytes = tensor.try_byte_len().map_err(Error::size)?;
        Ok(Self { bytes, bound: None, former: None })
    }
}

/// The graphs and buffers of one session.
pub struct Workspace {
    backend: Arc<dyn Backend>,
    /// Buffers of the session. Writable ones came from a [`Buffer`] that was taken by value.
    buffers: Vec<Memory>,
    graphs: Vec<Slot>,
    contexts: LoadedContexts,
    seat: Arc<Seat>,
    /// See [`LoadedContexts::times`].
    opened: u64,
    loss: DeviceLoss,
    cancel: CancelToken,
    busy: Duration,
    /// A slow execution was reported.
    warned: bool,
    trace: Option<Arc<Trace>>,
    tap: Option<Tap>,
    allocated: Allocated,
}

impl std::fmt::Debug for Workspace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workspace")
            .field("graphs", &self.graphs.len())
            .field("buffers", &self.buffers.len())
            .finish_non_exhaustive()
    }
}

impl Workspace {
    /// An empty workspace over `backend`. `execute` fails with `Cancelled` once `cancel` is set.
    pub fn new(backend: Arc<dyn Backend>, cancel: CancelToken) -> Self {
        Self::over(backend, cancel, LoadedContexts::default())
    }

    /// Same as [`Workspace::new`], for contexts that other workspaces also execute: each waits for its turn.
    pub fn over(backend: Arc<dyn Backend>, cancel: CancelToken, contexts: LoadedContexts) -> Self {
        Self {
            backend,
            buffers: Vec::new(),
            graphs: Vec::new(),
            opened: contexts.times(),
            contexts,
            seat: Arc::default(),
            loss: DeviceLoss::default(),
            cancel,
            busy: Duration::ZERO,
            warned: false,
            trace: None,
            tap: None,
            allocated: Allocated::default(),
        }
    }

    /// Counts what is allocated from now on in `allocated`.
    pub fn set_allocated(&mut self, allocated: Allocated) {
        self.allocated = allocated;
    }

    /// Has `tap` called after each execution from now on.
    pub fn set_tap(&mut self, tap: Option<Tap>) {
        self.tap = tap;
    }

    /// Has every execution written to a trace from now on.
    pub fn set_trace(&mut self, trace: Option<Arc<Trace>>) {
        self.trace = trace;
    }

    /// The trace that executions are written to.
    pub fn trace(&self) -> Option<&Arc<Trace>> {
        self.trace.as_ref()
    }

    /// Same as [`Workspace::add_context`], with the bundle's declarations about the graphs.
    ///
    /// # Errors
    /// When the context or one of its graphs does not open.
    pub fn add_source(&mut self, source: &ContextSource, context: &Arc<dyn Context>) -> Result<()> {
        let first = self.graphs.len();
        self.add_context(&source.key, context)?;
        // They are those of the binary. ONNX reference graphs take another time.
        let binary = ContextSource { onnx: Vec::new(), ..source.clone() };
        if binary.binary.is_some() && self.backend.accepts(&binary) {
            for slot in &mut self.graphs[first..] {
                let declared = source.us.iter().find(|(graph, _)| *graph == slot.info.name);
                slot.us = declared.map(|(_, us)| *us);
            }
        }
        Ok(())
    }

    /// Opens every graph of `context` and adds it under the context's manifest key.
    ///
    /// # Errors
    /// When a graph does not open, or a tensor's size does not fit in memory.
    pub fn add_context(&mut self, key: &str, context: &Arc<dyn Context>) -> Result<()> {
        for index in 0..context.graphs().len() {
            let graph = context.open_graph(index)?;
            let info = Arc::clone(graph.info());
            let tensors = info.inputs.iter().chain(&info.outputs);
            let places = tensors.map(Place::new).collect::<Result<Vec<_>>>()?;
            let batched = self.contexts.batched(context, index)?;
            let together = batched.map(|graph| {
                let ports = Arc::new(Ports::new(places.len()));
                Together { graph, ports }
            });
            self.graphs.push(Slot {
                context: key.to_owned(),
                graph,
                info,
                unbound: places.len(),
                places,
                together,
                us: None,
                executions: 0,
                busy: Duration::ZERO,
                times: ExecutionTimes::default(),
                slow: 0,
                shared: 0,
            });
            self.bind_tapped()?;
        }
        Ok(())
    }

    /// Binds the [`TAPPED`] outputs of the last graph.
    fn bind_tapped(&mut self) -> Result<()> {
        let (Some(slot), Some(last)) = (self.graphs.last(), self.graphs.len().checked_sub(1))
        else {
            return Ok(());
        };
        let info = Arc::clone(&slot.info);
        for (index, tensor) in info.outputs.iter().enumerate() {
            if tensor.name.starts_with(TAPPED) {
                let buffer = self.allocate(tensor.try_byte_len().map_err(Error::size)?)?;
                self.bind(GraphId(last as u32), Port::Output(index), buffer, 0)?;
            }
        }
        Ok(())
    }

    /// Number of graphs.
    pub fn graph_count(&self) -> usize {
        self.graphs.len()
    }

    /// Manifest key of the context and description of a graph.
    ///
    /// # Errors
    /// When there is no such graph.
    pub fn graph(&self, id: GraphId) -> Result<(&str, &Arc<GraphInfo>)> {
        let slot = self.graphs.get(id.0 as usize).ok_or_else(|| no_graph(id))?;
        Ok((&slot.context, &slot.info))
    }

    /// Microseconds of one execution of a graph, where the bundle declares it for the form that is executed.
    pub fn graph_us(&self, id: GraphId) -> Option<f64> {
        self.graphs.get(id.0 as usize).and_then(|slot| slot.us)
    }

    /// Finds a graph by name, or by `context/graph` where two contexts hold the same name.
    ///
    /// # Errors
    /// When contexts hold several graphs of this name.
    pub fn find_graph(&self, name: &str) -> Result<Option<GraphId>> {
        let mut found = None;
        for (index, slot) in self.graphs.iter().enumerate() {
            let qualified = name
                .strip_prefix(slot.context.as_str())
                .and_then(|rest| rest.strip_prefix('/'))
                .is_some_and(|rest| rest == slot.info.name);
            if qualified {
                return Ok(Some(GraphId(index as u32)));
            }
            if slot.info.name == name {
                if let Some((_, first)) = found {
                    return Err(Error::new(
                        ErrorKind::Graph,
                        format!(
                            "graph name {name:?} is ambiguous: contexts {first:?} and {:?} both have it",
                            slot.context
                        ),
                    )
                    .hint(format!("write it as \"{first}/{name}\" in plan.params")));
                }
                found = Some((GraphId(index as u32), slot.context.as_str()));
            }
        }
        Ok(found.map(|(id, _)| id))
    }

    /// Allocates a zeroed buffer.
    ///
    /// # Errors
    /// When there is not as much memory.
    pub fn allocate(&mut self, bytes: usize) -> Result<BufferId> {
        let buffer = self.backend.allocate(bytes)?;
        self.allocated.add(bytes);
        self.adopt(buffer)
    }

    /// Takes a buffer made elsewhere.
    ///
    /// # Errors
    /// When there are too many buffers.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use qhx_base::CancelToken;
    /// # use qhx_exec::{Buffer, Workspace, null::NullBackend};
    /// # let mut workspace = Workspace::new(Arc::new(NullBackend::new(vec![])), CancelToken::new());
    /// let mut buffer = Buffer::zeroed(4)?;
    /// buffer.bytes_mut()[0] = 7;
    /// let id = workspace.adopt(buffer)?;
    /// assert_eq!(workspace.bytes(id)?, [7, 0, 0, 0]);
    /// # Ok::<(), qhx_base::Error>(())
    /// ```
    ///
    /// A buffer has one owner: two workspaces cannot have the same one, nor one workspace twice.
    ///
    /// ```compile_fail
    /// # use std::sync::Arc;
    /// # use qhx_base::CancelToken;
    /// # use qhx_exec::{Buffer, Workspace, null::NullBackend};
    /// # let mut workspace = Workspace::new(Arc::new(NullBackend::new(vec![])), CancelToken::new());
    /// let mut buffer = Buffer::zeroed(4)?;
    /// buffer.bytes_mut()[0] = 7;
    /// let id = workspace.adopt(buffer.clone())?;
    /// let same = workspace.adopt(buffer)?;
    /// # Ok::<(), qhx_base::Error>(())
    /// ```
    ///
    /// ```compile_fail
    /// # use std::sync::Arc;
    /// # use qhx_base::CancelToken;
    /// # use qhx_exec::{Buffer, Workspace, null::NullBackend};
    /// # let mut workspace = Workspace::new(Arc::new(NullBackend::new(vec![])), CancelToken::new());
    /// let mut buffer = Buffer::zeroed(4)?;
    /// let id = workspace.adopt(buffer)?;
    /// buffer.bytes_mut()[0] = 7;
    /// # Ok::<(), qhx_base::Error>(())
    /// ```
    pub fn adopt(&mut self, buffer: Buffer) -> Result<BufferId> {
        self.add(buffer.into_memory())
    }

    /// Adds a mapped file, which graphs may read and nobody may write.
    ///
    /// # Errors
    /// When there are too many buffers.
    pub fn map(&mut self, file: Mapped) -> Result<BufferId> {
        self.add(file.into())
    }

    fn add(&mut self, memory: Memory) -> Result<BufferId> {
        let id = u32::try_from(self.buffers.len())
            .map_err(|_| Error::new(ErrorKind::Internal, "more than 2^32 buffers"))?;
        self.buffers.push(memory);
        Ok(BufferId(id))
    }

    /// A handle to a buffer: its length and address.
    ///
    /// # Errors
    /// When there is no such buffer.
    pub fn memory(&self, id: BufferId) -> Result<&Memory> {
        self.buffers.get(id.0 as usize).ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                format!("buffer {} does not exist; there are {}", id.0, self.buffers.len()),
            )
        })
    }

    /// Bytes of a buffer.
    ///
    /// # Errors
    /// When there is no such buffer.
    pub fn bytes(&self, id: BufferId) -> Result<&[u8]> {
        // SAFETY: contract: owned, borrowed.
        Ok(unsafe { self.memory(id)?.bytes() })
    }

    /// Bytes of a buffer, for writing.
    ///
    /// # Errors
    /// For a read-only buffer.
    pub fn bytes_mut(&mut self, id: BufferId) -> Result<&mut [u8]> {
        let memory = self.memory(id)?;
        if !memory.is_writable() {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("buffer {} is a mapped file and cannot be written", id.0),
            ));
        }
        // SAFETY: contract: owned, borrowed.
        Ok(unsafe { memory.bytes_mut() })
    }

    /// Binds `buffer` from byte `offset` on to a port of a graph.
    ///
    /// Checks that the port exists, that the buffer holds the tensor's bytes from the offset on,
    /// that the offset is aligned to the element, and that an output is writable.
    ///
    /// # Errors
    /// When one of these checks fails.
    pub fn bind(
        &mut self,
        graph: GraphId,
        port: Port,
        buffer: BufferId,
        offset: usize,
    ) -> Result<()> {
        let slot = self.graphs.get_mut(graph.0 as usize).ok_or_else(|| no_graph(graph))?;
        let memory = self.buffers.get(buffer.0 as usize).ok_or_else(|| {
            Error::new(ErrorKind::Internal, format!("buffer {} does not exist", buffer.0))
        })?;
        let inputs = slot.info.inputs.len();
        let index = match port {
            Port::Input(i) => Some(i).filter(|i| *i < inputs),
            Port::Output(i) => inputs.checked_add(i),
        };
        let place = index.and_then(|index| Some((index, slot.places.get_mut(index)?)));
        let (Some((index, place)), Some(tensor)) = (place, slot.info.tensor(port)) else {
            return Err(Error::new(
                ErrorKind::Graph,
                format!("graph {:?} has no {port:?}", slot.info.name),
            ));
        };
        if place.former == Some((buffer, offset)) {
            slot.graph.bind(port, memory, offset)?;
            std::mem::swap(&mut place.bound, &mut place.former);
            if let Some(Together { ports, .. }) = &slot.together {
                ports.bind(index, memory, offset);
            }
            return Ok(());
        }
        let need = place.bytes;
        let have = memory.len().saturating_sub(offset);
        if have < need {
            return Err(Error::new(
                ErrorKind::Graph,
                format!(
                    "graph {:?}: tensor {tensor} needs {need} bytes, the buffer bound to it has {have}",
                    slot.info.name
                ),
            ));
        }
        if !offset.is_multiple_of(tensor.dtype.size()) {
            return Err(Error::new(
                ErrorKind::Graph,
                format!(
                    "graph {:?}: tensor {tensor} bound at byte {offset}, not a multiple of {}",
                    slot.info.name,
                    tensor.dtype.size()
                ),
            ));
        }
        if matches!(port, Port::Output(_)) && !memory.is_writable() {
            return Err(Error::new(
                ErrorKind::Graph,
                format!("graph {:?}: output {tensor} bound to a read-only buffer", slot.info.name),
            ));
        }
        slot.graph.bind(port, memory, offset)?;
        if let Some(Together { ports, .. }) = &slot.together {
            ports.bind(index, memory, offset);
        }
        place.former = place.bound.replace((buffer, offset));
        if place.former.is_none() {
            slot.unbound -= 1;
        }
        Ok(())
    }

    /// The outputs of graphs that are bound to a buffer: graph, tensor, and the byte of the buffer
    /// that the tensor begins at.
    pub fn outputs_in(
        &self,
        buffer: BufferId,
    ) -> impl Iterator<Item = (&GraphInfo, &TensorInfo, usize)> {
        self.graphs.iter().flat_map(move |slot| {
            let places = slot.places.iter().skip(slot.info.inputs.len());
            let outputs = slot.info.outputs.iter().zip(places);
            outputs.filter_map(move |(tensor, place)| {
                let offset = place.bound.filter(|(id, _)| *id == buffer)?.1;
                Some((&*slot.info, tensor, offset))
            })
        })
    }

    /// Executes a graph whose ports are all bound, unless the session is cancelled. Where an execution lost the device,
    /// its error is that of all later ones: see [`DeviceLoss`].
    ///
    /// # Errors
    /// When a port is not bound, the session is cancelled, or the execution fails.
    pub fn execute(&mut self, graph: GraphId) -> Result<()> {
        if let Some(error) = self.loss.error() {
            return Err(error.clone());
        }
        let slot = self.graphs.get_mut(graph.0 as usize).ok_or_else(|| no_graph(graph))?;
        if slot.unbound > 0 {
            return Err(unbound(slot));
        }
        let start = Instant::now();
        let Taken { elapsed, sequences, result } =
            slot.execute(&self.contexts, &self.seat, &self.cancel)?;
        // Until its turn came, it waited.
        let start = start.max(Instant::now().checked_sub(elapsed).unwrap_or(start));
        slot.busy += elapsed;
        slot.executions += 1;
        slot.shared += sequences.saturating_sub(1) as u64;
        self.busy += elapsed;
        if let Some(median) = slot.times.add(elapsed).filter(|_| result.is_ok()) {
            slot.slow += 1;
            if !std::mem::replace(&mut self.warned, true) {
                warn_slow(&slot.info.name, elapsed, median, &*self.backend);
            }
        }
        if let Some(trace) = &self.trace {
            let name = format!("graph {}", slot.info.name);
            let event = Event::new(&name, Category::Graph, start, elapsed);
            let event = event.with("context", &*slot.context);
            trace.add(&match sequences {
                1 => event,
                _ => event.with("sequences", sequences),
            });
        }
        match result {
            Ok(()) => {
                if let (Some(tap), Some(slot)) = (&self.tap, self.graphs.get(graph.0 as usize)) {
                    tap(&Executed { workspace: self, slot });
                }
                Ok(())
            }
            Err(e) => {
                let e = e.context(format_args!("graph {:?}", slot.info.name));
                self.note(&e);
                Err(e)
            }
        }
    }

    /// Time spent inside `execute` since the workspace was made.
    pub fn graph_time(&self) -> Duration {
        self.busy
    }

    /// Time and executions of every graph.
    pub fn stats(&self) -> Vec<GraphStats> {
        self.graphs
            .iter()
            .map(|slot| GraphStats {
                context: slot.context.clone(),
                graph: slot.info.name.clone(),
                executions: slot.executions,
                busy: slot.busy,
                slow: slot.slow,
                shared: slot.shared,
            })
            .collect()
    }

    /// The token that cancels executions.
    pub fn cancel_token(&self) -> &CancelToken {
        &self.cancel
    }
}

/// Reports an execution that took far longer than the graph's others, with what may explain it.
fn warn_slow(graph: &str, time: Duration, median: Duration, backend: &dyn Backend) {
    let mut known = backend.conditions();
    known.extend(watchdog::host_load());
    tracing::warn!(
        "graph {graph:?}: an execution took {:.0} ms, where the median of the last ones is {:.1} ms ({}); further ones \
         are counted, not reported",
        time.as_secs_f64() * 1e3,
        median.as_secs_f64() * 1e3,
        if known.is_empty() {
            "nothing is known of the device".to_owned()
        } else {
            known.join("; ")
        }
    );
}

fn no_graph(id: GraphId) -> Error {
    Error::new(ErrorKind::Internal, format!("graph {} does not exist", id.0))
}

fn unbound(slot: &Slot) -> Error {
    let names: Vec<_> = slot
        .info
        .inputs
        .iter()
        .chain(&slot.info.outputs)
        .zip(&slot.places)
        .filter(|(_, place)| place.bound.is_none())
        .map(|(tensor, _)| tensor.name.as_str())
        .collect();
    Error::new(
        ErrorKind::Graph,
        format!("graph {:?}: nothing is bound to {}", slot.info.name, names.join(", ")),
    )
    .hint(
        "the host-op does not know these tensors: map their roles in plan.params.tensors; or the op \
         forgot to bind them, which is a fault of the op",
    )
}
