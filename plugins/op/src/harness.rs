//! Runs an op in a test: scripted graphs, buffers and files in memory; no device, no bundle, no
//! host program.
//!
//! The op is called through the same table of functions that a host calls, so what it returns to a
//! host it returns here: errors with their codes, panics as errors, refused views.
//!
//! ```
//! use qhx_op::harness::{OpHarness, graph, tensor};
//! use qhx_op::{DType, Segment};
//! # use qhx_op::*;
//! # struct Echo { graph: GraphId, logits: View, position: usize }
//! # impl Op for Echo {
//! #     fn describe() -> OpDescription {
//! #         OpDescription { name: "echo".into(), summary: String::new(), version: String::new(),
//! #             tasks: vec![Task::Generate], modalities: vec![Modality::Text],
//! #             params_schema: serde_json::Value::Null }
//! #     }
//! #     fn open(host: &mut Host) -> Result<Self> {
//! #         let graph = host.require_graph("/plan/params/step", "step")?;
//! #         let port = Port::Output(host.graph(graph).require_output("logits")?);
//! #         let buffer = host.allocate_for(graph, port)?;
//! #         Ok(Self { graph, logits: View { buffer, dtype: DType::F32, offset: 0, len: 4 }, position: 0 })
//! #     }
//! #     fn info(&self) -> OpenInfo {
//! #         OpenInfo { vocab: 4, max_ctx: 8, ..OpenInfo::default() }
//! #     }
//! #     fn generator(&mut self) -> Option<&mut dyn Generator> { Some(self) }
//! # }
//! # impl Generator for Echo {
//! #     fn reset(&mut self, _: &mut Host) -> Result<()> { self.position = 0; Ok(()) }
//! #     fn position(&self) -> usize { self.position }
//! #     fn prefill(&mut self, host: &mut Host, _: &[Segment<'_>]) -> Result<View> {
//! #         self.position += 2; host.execute(self.graph)?; Ok(self.logits)
//! #     }
//! # }
//! let mut op = OpHarness::new()
//!     .graph(graph("step", [], [tensor("logits", DType::F32, [1, 4])]))
//!     .script(|step| step.set("logits", &[0.0, 1.0, 0.0, 0.0]))
//!     .open::<Echo>()?;
//! assert_eq!(op.prefill(&[Segment::Tokens(&[2, 3])])?, [0.0, 1.0, 0.0, 0.0]);
//! assert_eq!(op.position(), 2);
//! # Ok::<(), qhx_op::Error>(())
//! ```

#![expect(unsafe_code, reason = "implements a host's vtable and calls an op's")]

use std::cell::{Cell, RefCell, UnsafeCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use half::f16;
use half::slice::HalfFloatSliceExt;
use qhx_types::calls::{Call, Reply};
use serde_json::Value;

use crate::abi::{
    HostRef, HostVTable, HostVTableRef, OpObject, PORT_INPUT, PORT_OUTPUT, ParallelBody, RResult,
    RSlice, RStr, RString, RawBuffer, RawResult, RawView, StableAbi, VIEW_F16, WithMetadata,
};
use crate::calls::CallError;
use crate::export::Registration;
use crate::guard::catch;
use crate::{
    Answer, DType, Error, ErrorCode, GraphInfo, Host, Op, OpDescription, OpenInfo, Placement,
    Result, Segment, SnapshotId, TensorInfo,
};

/// A tensor for [`graph`].
pub fn tensor<const RANK: usize>(name: &str, dtype: DType, shape: [usize; RANK]) -> TensorInfo {
    TensorInfo { role: name.to_owned(), ..TensorInfo::new(name, dtype, shape) }
}

/// Tensors of `rows` rows of f32 for [`graph`], by their names and the widths of a row.
pub fn tensors<const N: usize>(rows: usize, widths: [(&str, usize); N]) -> Vec<TensorInfo> {
    widths.map(|(name, width)| tensor(name, DType::F32, [rows, width])).to_vec()
}

/// A graph of a context of its own name.
pub fn graph(
    name: &str,
    inputs: impl Into<Vec<TensorInfo>>,
    outputs: impl Into<Vec<TensorInfo>>,
) -> GraphInfo {
    GraphInfo { context: name.to_owned(), ..GraphInfo::new(name, inputs, outputs) }
}

/// One execution of a graph, for the script that stands in for its arithmetic.
#[derive(Debug)]
pub struct Step<'a> {
    info: &'a GraphInfo,
    inputs: &'a [Vec<u8>],
    outputs: &'a mut [Vec<u8>],
}

impl Step<'_> {
    /// The graph's name.
    pub fn graph(&self) -> &str {
        &self.info.name
    }

    /// The values of an f16 or f32 input.
    ///
    /// # Errors
    /// When the graph has no such input, or it does not hold floats.
    pub fn input(&self, name: &str) -> Result<Vec<f32>> {
        let (index, tensor) = find(&self.info.inputs, name, self.graph())?;
        floats(&self.inputs[index], tensor.dtype)
    }

    /// The bytes of an input.
    ///
    /// # Errors
    /// When the graph has no such input.
    pub fn input_bytes(&self, name: &str) -> Result<&[u8]> {
        let (index, _) = find(&self.info.inputs, name, self.graph())?;
        Ok(&self.inputs[index])
    }

    /// Writes an f16 or f32 output.
    ///
    /// # Errors
    /// When the graph has no such output, it does not hold floats, or has another length.
    pub fn set(&mut self, name: &str, values: &[f32]) -> Result<()> {
        let (index, tensor) = find(&self.info.outputs, name, &self.info.name)?;
        if values.len() != tensor.elements() {
            return Err(Error::graph(format!(
                "script of graph {:?}: {} values for {tensor}",
                self.info.name,
                values.len()
            )));
        }
        self.outputs[index] = match tensor.dtype {
            DType::F16 => {
                let mut half = vec![f16::ZERO; values.len()];
                half.convert_from_f32_slice(values);
                bytemuck::cast_slice(&half).to_vec()
            }
            DType::F32 => bytemuck::cast_slice(values).to_vec(),
            other => {
                return Err(Error::graph(format!("{tensor} is {other}, expected f16 or f32")));
            }
        };
        Ok(())
    }
}

fn find<'a>(list: &'a [TensorInfo], name: &str, graph: &str) -> Result<(usize, &'a TensorInfo)> {
    list.iter().enumerate().find(|(_, t)| t.name == name).ok_or_else(|| {
        let names: Vec<_> = list.iter().map(|t| t.name.as_str()).collect();
        Error::graph(format!("graph {graph:?} has no tensor {name:?} there; it has {names:?}"))
    })
}

/// Bytes of any alignment as elements.
fn elements<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

fn floats(bytes: &[u8], dtype: DType) -> Result<Vec<f32>> {
    match dtype {
        DType::F16 => {
            let half: Vec<f16> = elements(bytes);
            Ok(half.to_f32_vec())
        }
        DType::F32 => Ok(elements(bytes)),
        other => Err(Error::graph(format!("a tensor of {other}, expected f16 or f32"))),
    }
}

/// An array that an op dumped.
#[derive(Debug, Clone, PartialEq)]
pub struct Dumped {
    /// Name given by the op.
    pub name: String,
    /// Row-major dimensions.
    pub shape: Vec<u64>,
    /// Its elements.
    pub values: Vec<f32>,
}

type Script = dyn FnMut(&mut Step<'_>) -> Result<()>;

/// Test host that an op is opened over: its manifest, graphs, files and script.
pub struct OpHarness {
    manifest: Value,
    graphs: Vec<GraphInfo>,
    files: HashMap<String, Vec<u8>>,
    script: Box<Script>,
    dumping: bool,
}

impl std::fmt::Debug for OpHarness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpHarness").field("graphs", &self.graphs).finish_non_exhaustive()
    }
}

impl Default for OpHarness {
    fn default() -> Self {
        Self::new()
    }
}

impl OpHarness {
    /// An empty manifest, no graphs, no files, and a script that leaves outputs as they are.
    pub fn new() -> Self {
        Self {
            manifest: Value::Object(serde_json::Map::new()),
            graphs: Vec::new(),
            files: HashMap::new(),
            script: Box::new(|_| Ok(())),
            dumping: false,
        }
    }

    /// The bundle's manifest.
    #[must_use]
    pub fn manifest(mut self, manifest: Value) -> Self {
        self.manifest = manifest;
        self
    }

    /// Adds a graph.
    #[must_use]
    pub fn graph(self, graph: GraphInfo) -> Self {
        self.graphs([graph])
    }

    /// Adds graphs.
    #[must_use]
    pub fn graphs(mut self, graphs: impl IntoIterator<Item = GraphInfo>) -> Self {
        self.graphs.extend(graphs);
        self
    }

    /// Adds a file of the bundle.
    #[must_use]
    pub fn file(mut self, path: &str, bytes: impl Into<Vec<u8>>) -> Self {
        self.files.insert(path.to_owned(), bytes.into());
        self
    }

    /// Adds a file of f32 values.
    #[must_use]
    pub fn floats(self, path: &str, values: &[f32]) -> Self {
        self.file(path, bytemuck::cast_slice(values))
    }

    /// Sets the script that runs at every execution of a graph.
    #[must_use]
    pub fn script(mut self, script: impl FnMut(&mut Step<'_>) -> Result<()> + 'static) -> Self {
        self.script = Box::new(script);
        self
    }

    /// Keeps what the op dumps, for [`OpenOp::dumped`].
    #[must_use]
    pub fn dumping(mut self) -> Self {
        self.dumping = true;
        self
    }

    fn session(self) -> Box<Session> {
        Box::new(Session {
            manifest: self.manifest.to_string(),
            files: self.files,
            script: RefCell::new(self.script),
            cancelled: AtomicBool::new(false),
            refused_bind: Cell::new(None),
            log: Mutex::new(Vec::new()),
            progress: RefCell::new(None),
            spans: AtomicU32::new(0),
            dumps: self.dumping.then(|| RefCell::new(Vec::new())),
            state: RefCell::new(State {
                buffers: Vec::new(),
                bound: self
                    .graphs
                    .iter()
                    .map(|graph| vec![None; graph.inputs.len() + graph.outputs.len()])
                    .collect(),
                executions: vec![0; self.graphs.len()],
            }),
            graphs: self.graphs,
        })
    }

    /// Runs `body` over the host as an op would that has these lines alone.
    ///
    /// # Errors
    /// The error of `body`.
    pub fn run<T>(self, body: impl FnOnce(&mut Host) -> Result<T>) -> Result<T> {
        let session = self.session();
        let op = OpDescription { name: "test".to_owned(), ..OpDescription::default() };
        // SAFETY: the session outlives the host; its address fits the vtable.
        let mut host = unsafe { Host::new(session.host(), op) }?;
        body(&mut host)
    }

    /// Opens an op.
    ///
    /// # Errors
    /// The error of the op.
    pub fn open<O: Op>(self) -> Result<OpenOp> {
        let registration = Registration::of::<O>();
        let session = self.session();
        let host = session.host();
        // SAFETY: the session is boxed and outlives the op; its address fits the vtable.
        let object = match unsafe { registration.open_guarded(host) } {
            RResult::ROk(object) => object,
            RResult::RErr(error) => return Err(error.into()),
        };
        let mut op = OpenOp {
            object,
            session,
            description: registration.describe(),
            info: OpenInfo::default(),
        };
        // SAFETY: an open op.
        let info = unsafe { op.object.vtable.info()(op.object.data) };
        op.info = serde_json::from_str(&info).map_err(|e| {
            Error::new(ErrorCode::INTERNAL, format!("the op's info is not valid: {e}"))
        })?;
        Ok(op)
    }
}

/// An open op under test. Each [`Call`] has a method that makes it and fails with the error of the op.
pub struct OpenOp {
    object: OpObject,
    session: Box<Session>,
    description: OpDescription,
    info: OpenInfo,
}

impl std::fmt::Debug for OpenOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenOp").field("info", &self.info).finish_non_exhaustive()
    }
}

impl OpenOp {
    /// Declaration of the op about itself.
    pub fn description(&self) -> &OpDescription {
        &self.description
    }

    /// Declaration of the op about the open bundle.
    pub fn info(&self) -> &OpenInfo {
        &self.info
    }

    /// Makes a call. Its floats are those of a buffer, as many as the op declares.
    ///
    /// # Errors
    /// The error of the op, and when there are not as many floats.
    pub fn call(&mut self, call: Call<'_>) -> Result<Reply<Vec<f32>>> {
        // SAFETY: an open op, and the only call under way.
        let reply = unsafe { self.object.call(call) }.map_err(|e| failed(call.name(), e))?;
        let expected = match call {
            Call::Embed(_) | Call::EmbedMany(_) => {
                self.info.values().saturating_mul(call.effect().texts())
            }
            Call::EmbedTokens(segments) => {
                let tokens = qhx_types::calls::positions(segments).unwrap_or(0);
                self.info.embedding_dim.saturating_add(self.info.of_tokens.values(tokens))
            }
            Call::Speak(_) => 0,
            _ => self.info.vocab,
        };
        reply.try_map(|view| self.values(view, expected))
    }

    /// Positions consumed so far.
    pub fn position(&self) -> usize {
        // SAFETY: an open op, and the only call under way.
        unsafe { self.object.vtable.position()(self.object.data) as usize }
    }

    /// Place of an image, audio clip or video in a prompt.
    ///
    /// # Errors
    /// The error of the op.
    pub fn place(&mut self, segment: Segment<'_>) -> Result<Placement> {
        // SAFETY: an open op, and the only call under way.
        unsafe { self.object.place(segment) }.map_err(|e| failed("place", e))
    }

    /// Makes [`Call::DropSnapshot`], which does not fail.
    pub fn drop_snapshot(&mut self, snapshot: SnapshotId) {
        drop(self.call(Call::DropSnapshot(snapshot)));
    }

    /// Makes the next execution of a graph fail as a cancelled one, or no longer.
    pub fn cancel(&self, cancelled: bool) {
        self.session.cancelled.store(cancelled, Ordering::Relaxed);
    }

    /// Makes one of the next bindings of a buffer fail: the one after `count` others.
    pub fn refuse_bind(&self, count: usize) {
        self.session.refused_bind.set(Some(count));
    }

    /// Number of times a graph was executed.
    pub fn executions(&self, graph: &str) -> usize {
        let index = self.session.graphs.iter().position(|g| g.name == graph);
        index.map_or(0, |index| self.session.state.borrow().executions[index])
    }

    /// Lines that the op wrote to the log.
    pub fn log(&self) -> Vec<String> {
        self.session.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The arrays that the op dumped so far, when the harness is [dumping](OpHarness::dumping).
    pub fn dumped(&self) -> Vec<Dumped> {
        self.session.dumps.as_ref().map_or_else(Vec::new, |dumps| dumps.borrow().clone())
    }

    /// The last progress that the op reported: done and total.
    pub fn progress(&self) -> Option<(u64, u64)> {
        *self.session.progress.borrow()
    }

    /// The values bound to an f16 or f32 input or output of a graph, as the next execution would
    /// find them.
    ///
    /// # Errors
    /// When the graph has no such tensor, nothing is bound to it, or it does not hold floats.
    pub fn bound(&self, graph: &str, tensor: &str) -> Result<Vec<f32>> {
        let index = self
            .session
            .graphs
            .iter()
            .position(|g| g.name == graph)
            .ok_or_else(|| Error::graph(format!("there is no graph {graph:?}")))?;
        let info = &self.session.graphs[index];
        let state = self.session.state.borrow();
        let (port, info) = find(&info.inputs, tensor, graph).or_else(|_| {
            let (port, output) = find(&info.outputs, tensor, graph)?;
            Ok::<_, Error>((info.inputs.len() + port, output))
        })?;
        let bytes = state.read(state.bound[index][port], info, graph)?;
        floats(&bytes, info.dtype)
    }

    fn values(&self, view: RawView, expected: usize) -> Result<Vec<f32>> {
        if expected != 0 && view.len != expected as u64 {
            return Err(Error::new(
                ErrorCode::INTERNAL,
                format!("the op answered with {} values, its info says {expected}", view.len),
            ));
        }
        let dtype = if view.dtype == VIEW_F16 { DType::F16 } else { DType::F32 };
        let state = self.session.state.borrow();
        let bytes = state.bytes(view.buffer)?;
        let start = view.offset as usize;
        let range = start..start.saturating_add(view.len as usize * dtype.size());
        let bytes = bytes.get(range).ok_or_else(|| {
            Error::new(ErrorCode::INTERNAL, "the op's answer lies outside its buffer")
        })?;
        floats(bytes, dtype)
    }
}

/// Methods of [`OpenOp`] that make one call each and return what its reply holds.
macro_rules! calls {
    ($given:ty, $reply:pat => $value:expr;
     $($name:ident($($argument:ident: $type:ty),*) = $call:expr),* $(,)?) => {
        impl OpenOp {
            $(
                #[doc = concat!("Makes `", stringify!($call), "`.\n\n# Errors\nThe error of the op.")]
                pub fn $name(&mut self, $($argument: $type),*) -> Result<$given> {
                    let call = $call;
                    match self.call(call)? {
                        $reply => Ok($value),
                        other => Err(unexpected(&call, &other)),
                    }
                }
            )*
        }
    };
}

calls! {
    (), Reply::Done => ();
    reset() = Call::Reset,
    truncate(position: usize) = Call::Truncate(position),
    restore(snapshot: SnapshotId) = Call::Restore(snapshot),
    verify(tokens: &[u32]) = Call::Verify(tokens),
    accept(count: usize) = Call::Accept(count),
    drafting(on: bool) = Call::Drafting(on),
    import_state(position: usize, state: &[u8]) = Call::ImportState { position, state },
}
calls! {
    Vec<f32>, Reply::Floats(values) => values;
    prefill(segments: &[Segment<'_>]) = Call::Prefill(segments),
    decode(token: u32) = Call::Decode(token),
    row_logits(row: usize) = Call::RowLogits(row),
    draft(token: u32) = Call::Draft(token),
    embed(segments: &[Segment<'_>]) = Call::Embed(segments),
    embed_many(texts: &[&[u32]]) = Call::EmbedMany(texts),
    embed_tokens(segments: &[Segment<'_>]) = Call::EmbedTokens(segments),
    speak(segments: &[Segment<'_>]) = Call::Speak(segments),
}
calls! { SnapshotId, Reply::Saved(id) => id; snapshot() = Call::Snapshot }
calls! { Vec<u8>, Reply::State(bytes) => bytes; export_state() = Call::ExportState }
calls! { Value, Reply::Note(note) => note; note() = Call::Note }
calls! { Answer, Reply::Answer(answer) => answer; answer(segments: &[Segment<'_>]) = Call::Answer(segments) }

impl Drop for OpenOp {
    fn drop(&mut self) {
        // SAFETY: opened once, closed only here, before the session is freed.
        unsafe { self.object.vtable.close()(self.object.data) }
    }
}

/// An error of the call named `call`.
fn failed(call: &str, error: CallError) -> Error {
    match error {
        CallError::Failed(error) => error.into(),
        CallError::Invalid(e) => {
            Error::new(ErrorCode::INTERNAL, format!("what {call} returned is not valid: {e}"))
        }
    }
}

/// An error of a reply that is another call's.
fn unexpected(call: &Call<'_>, reply: &Reply<Vec<f32>>) -> Error {
    Error::new(ErrorCode::INTERNAL, format!("{} gave {reply:?}", call.name()))
}

/// Memory that the op writes through pointers, aligned for every element type.
struct Memory {
    words: Box<[UnsafeCell<u64>]>,
    len: usize,
    writable: bool,
}

impl Memory {
    fn new(len: usize, writable: bool) -> Self {
        let words = (0..len.div_ceil(8)).map(|_| UnsafeCell::new(0)).collect();
        Self { words, len, writable }
    }

    fn pointer(&self) -> *mut u8 {
        self.words.as_ptr().cast_mut().cast()
    }

    fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // SAFETY: `len` bytes lie in the words; no call of the op is writing at this time.
        unsafe { std::ptr::copy_nonoverlapping(self.pointer(), bytes.as_mut_ptr(), self.len) };
        bytes
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        debug_assert!(offset + bytes.len() <= self.len);
        // SAFETY: in bounds, as every caller has checked; the cells allow writing, and no view of
        // the op lives while a service runs.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.pointer().add(offset), bytes.len());
        }
    }
}

#[derive(Clone, Copy)]
struct Place {
    buffer: u32,
    offset: usize,
}

struct State {
    buffers: Vec<Memory>,
    /// Memory bound to the inputs and, behind them, the outputs of each graph.
    bound: Vec<Vec<Option<Place>>>,
    executions: Vec<usize>,
}

impl State {
    fn memory(&self, buffer: u32) -> Result<&Memory> {
        self.buffers.get(buffer as usize).ok_or_else(|| {
            Error::new(ErrorCode::INTERNAL, format!("buffer {buffer} does not exist"))
        })
    }

    fn bytes(&self, buffer: u32) -> Result<Vec<u8>> {
        Ok(self.memory(buffer)?.read())
    }

    fn read(&self, place: Option<Place>, tensor: &TensorInfo, graph: &str) -> Result<Vec<u8>> {
        let place = bound(place, tensor, graph)?;
        let bytes = self.bytes(place.buffer)?;
        Ok(bytes[place.offset..place.offset + tensor.byte_len()].to_vec())
    }
}

fn bound(place: Option<Place>, tensor: &TensorInfo, graph: &str) -> Result<Place> {
    place.ok_or_else(|| {
        Error::new(ErrorCode::EXECUTE, format!("graph {graph:?}: nothing is bound to {tensor}"))
    })
}

/// Everything behind the `data` pointer. Services are called on the thread of the test, except
/// `log` and `cancelled`, which any thread may call: they touch only what is shared safely.
struct Session {
    manifest: String,
    graphs: Vec<GraphInfo>,
    files: HashMap<String, Vec<u8>>,
    script: RefCell<Box<Script>>,
    cancelled: AtomicBool,
    /// Bindings until the one that fails.
    refused_bind: Cell<Option<usize>>,
    log: Mutex<Vec<String>>,
    progress: RefCell<Option<(u64, u64)>>,
    spans: AtomicU32,
    dumps: Option<RefCell<Vec<Dumped>>>,
    state: RefCell<State>,
}

const VTABLE: HostVTableRef = {
    const STATIC: &WithMetadata<HostVTable> = &WithMetadata::new(HostVTable {
        manifest,
        graphs,
        allocate,
        artifact,
        bind,
        execute,
        parallel_for,
        threads,
        log,
        cancelled,
        progress,
        span,
        span_add,
        dumping,
        dump,
    });
    HostVTableRef(STATIC.static_as_prefix())
};

/// The session behind `data`.
unsafe fn session<'a>(data: *mut c_void) -> &'a Session {
    // SAFETY: `data` is the address of the boxed session, which outlives the op.
    unsafe { &*data.cast::<Session>() }
}

/// Runs a service. A script that panics, as an assertion in it does, becomes an error.
fn serve<T: StableAbi>(body: impl FnOnce() -> Result<T>) -> RawResult<T> {
    let result = catch(body).unwrap_or_else(|message| {
        Err(Error::new(ErrorCode::EXECUTE, format!("the script of the test panicked: {message}")))
    });
    match result {
        Ok(value) => RResult::ROk(value),
        Err(error) => RResult::RErr(error.into()),
    }
}

unsafe extern "C" fn manifest(data: *mut c_void) -> RString {
    // SAFETY: the op's `data`.
    unsafe { session(data) }.manifest.as_str().into()
}

unsafe extern "C" fn graphs(data: *mut c_void) -> RString {
    // SAFETY: the op's `data`.
    let graphs = unsafe { &session(data).graphs };
    serde_json::to_string(graphs).unwrap_or_default().into()
}

impl Session {
    fn host(&self) -> HostRef {
        HostRef { data: std::ptr::from_ref(self).cast_mut().cast(), vtable: VTABLE }
    }

    fn graph(&self, graph: u32) -> Result<&GraphInfo> {
        let found = self.graphs.get(graph as usize);
        found.ok_or_else(|| Error::graph(format!("graph {graph} does not exist")))
    }

    fn adopt(&self, memory: Memory) -> RawBuffer {
        let buffers = &mut self.state.borrow_mut().buffers;
        let buffer = RawBuffer {
            id: buffers.len() as u32,
            writable: u32::from(memory.writable),
            data: memory.pointer(),
            len: memory.len as u64,
        };
        buffers.push(memory);
        buffer
    }

    fn bind(&self, graph: u32, port: u32, index: u32, buffer: u32, offset: u64) -> Result<()> {
        let info = self.graph(graph)?;
        let (tensors, output, first) = match port {
            PORT_INPUT => (&info.inputs, false, 0),
            PORT_OUTPUT => (&info.outputs, true, info.inputs.len()),
            other => return Err(Error::graph(format!("port kind {other} is unknown"))),
        };
        let tensor = tensors
            .get(index as usize)
            .ok_or_else(|| Error::graph(format!("graph {:?} has no port {index}", info.name)))?;
        if let Some(count) = self.refused_bind.take() {
            self.refused_bind.set(count.checked_sub(1));
            if count == 0 {
                let message =
                    format!("graph {:?}: tensor {tensor}: this binding is refused", info.name);
                return Err(Error::graph(message));
            }
        }
        let mut state = self.state.borrow_mut();
        let memory = state.memory(buffer)?;
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let (have, need) = (memory.len.saturating_sub(offset), tensor.byte_len());
        if have < need || (output && !memory.writable) {
            return Err(Error::graph(format!(
                "graph {:?}: tensor {tensor} needs {need} bytes{}, the buffer bound to it has {have}",
                info.name,
                if output { " to write" } else { "" }
            )));
        }
        state.bound[graph as usize][first + index as usize] = Some(Place { buffer, offset });
        Ok(())
    }

    fn execute(&self, graph: u32) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorCode::CANCELLED, "cancelled"));
        }
        let (index, info) = (graph as usize, self.graph(graph)?);
        let mut state = self.state.borrow_mut();
        let (given, written) = state.bound[index].split_at(info.inputs.len());
        let read = |tensors: &[TensorInfo], places: &[Option<Place>]| -> Result<Vec<Vec<u8>>> {
            let pairs = tensors.iter().zip(places);
            pairs.map(|(tensor, &place)| state.read(place, tensor, &info.name)).collect()
        };
        let inputs = read(&info.inputs, given)?;
        let mut outputs = read(&info.outputs, written)?;
        let mut step = Step { info, inputs: &inputs, outputs: &mut outputs };
        (self.script.borrow_mut())(&mut step)?;
        for ((bytes, tensor), &place) in outputs.iter().zip(&info.outputs).zip(written) {
            let place = bound(place, tensor, &info.name)?;
            state.memory(place.buffer)?.write(place.offset, bytes);
        }
        state.executions[index] += 1;
        Ok(())
    }
}

unsafe extern "C" fn allocate(data: *mut c_void, bytes: u64) -> RawResult<RawBuffer> {
    // SAFETY: the op's `data`.
    let session = unsafe { session(data) };
    serve(|| {
        usize::try_from(bytes)
            .ok()
            .filter(|bytes| *bytes <= isize::MAX as usize)
            .map(|bytes| session.adopt(Memory::new(bytes, true)))
            .ok_or_else(|| Error::graph(format!("a buffer of {bytes} bytes cannot be allocated")))
    })
}

unsafe extern "C" fn artifact(
    data: *mut c_void,
    pointer: RStr<'_>,
    path: RStr<'_>,
) -> RawResult<RawBuffer> {
    // SAFETY: the op's `data`.
    let session = unsafe { session(data) };
    serve(|| {
        let bytes = session.files.get(path.as_str()).ok_or_else(|| {
            Error::artifact(format!("manifest {pointer}: {path} is not in the harness"))
        })?;
        let memory = Memory::new(bytes.len(), false);
        memory.write(0, bytes);
        Ok(session.adopt(memory))
    })
}

unsafe extern "C" fn bind(
    data: *mut c_void,
    graph: u32,
    port: u32,
    index: u32,
    buffer: u32,
    offset: u64,
) -> RawResult<()> {
    // SAFETY: the op's `data`.
    let session = unsafe { session(data) };
    serve(|| session.bind(graph, port, index, buffer, offset))
}

unsafe extern "C" fn execute(data: *mut c_void, graph: u32) -> RawResult<()> {
    // SAFETY: the op's `data`.
    let session = unsafe { session(data) };
    serve(|| session.execute(graph))
}

unsafe extern "C" fn parallel_for(
    _data: *mut c_void,
    count: u64,
    context: *mut c_void,
    body: ParallelBody,
) {
    struct Context(*mut c_void);
    // SAFETY: the op promises that its body may run on several threads.
    unsafe impl Sync for Context {}
    impl Context {
        fn get(&self) -> *mut c_void {
            self.0
        }
    }
    let context = Context(context);
    let context = &context;
    // Two threads, so that what must not be shared shows.
    std::thread::scope(|scope| {
        for first in 0..2 {
            scope.spawn(move || {
                for index in (first..count).step_by(2) {
                    // SAFETY: `context` belongs to `body` and lives until this function returns.
                    unsafe { (body.call)(context.get(), index) }
                }
            });
        }
    });
}

unsafe extern "C" fn threads(_data: *mut c_void) -> u32 {
    2
}

unsafe extern "C" fn log(data: *mut c_void, _level: u32, message: RStr<'_>) {
    // SAFETY: the op's `data`.
    let log = unsafe { &session(data).log };
    log.lock().unwrap_or_else(PoisonError::into_inner).push(message.to_string());
}

unsafe extern "C" fn cancelled(data: *mut c_void) -> u32 {
    // SAFETY: the op's `data`.
    u32::from(unsafe { session(data) }.cancelled.load(Ordering::Relaxed))
}

unsafe extern "C" fn progress(data: *mut c_void, done: u64, total: u64) {
    // SAFETY: the op's `data`.
    *unsafe { session(data) }.progress.borrow_mut() = Some((done, total));
}

unsafe extern "C" fn span(data: *mut c_void, _name: RStr<'_>) -> u32 {
    // SAFETY: the op's `data`.
    unsafe { session(data) }.spans.fetch_add(1, Ordering::Relaxed)
}

unsafe extern "C" fn span_add(_data: *mut c_void, _span: u32, _nanoseconds: u64) {}

unsafe extern "C" fn dumping(data: *mut c_void) -> u32 {
    // SAFETY: the op's `data`.
    u32::from(unsafe { session(data) }.dumps.is_some())
}

unsafe extern "C" fn dump(
    data: *mut c_void,
    name: RStr<'_>,
    dtype: u32,
    shape: RSlice<'_, u64>,
    bytes: RSlice<'_, u8>,
) -> RawResult<()> {
    // SAFETY: the op's `data`.
    let Some(dumps) = &unsafe { session(data) }.dumps else { return RResult::ROk(()) };
    serve(|| {
        let dtype = if dtype == VIEW_F16 { DType::F16 } else { DType::F32 };
        let (values, shape) = (floats(&bytes, dtype)?, shape.to_vec());
        if shape.iter().product::<u64>() != values.len() as u64 {
            return Err(Error::graph(format!(
                "dump {name:?}: {} values, expected the shape {shape:?}",
                values.len()
            )));
        }
        dumps.borrow_mut().push(Dumped { name: name.to_string(), shape, values });
        Ok(())
    })
}
