//! The host's services as a safe interface.
//!
//! An op addresses graphs and buffers by index. Every view of a buffer borrows the [`Host`], and
//! executing a graph borrows it mutably, so no view can be alive while a graph reads or writes.

#![expect(unsafe_code, reason = "calls the host's vtable and views memory that the host owns")]

use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use half::f16;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::abi::{
    HostRef, PORT_INPUT, PORT_OUTPUT, ParallelBody, RawBuffer, RawResult, VIEW_F16, VIEW_F32,
};
use crate::guard::catch;
use crate::{DType, Error, ErrorCode, GraphInfo, OpDescription, Port, Result, TensorInfo, View};

/// Index of a graph of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GraphId(pub(crate) u32);

/// Index of a buffer of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BufferId(pub(crate) u32);

/// A named part of the op's work, for timing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanId(u32);

/// Importance of a line in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum LogLevel {
    /// Something failed.
    Error = 1,
    /// Something is not as it should be.
    Warn = 2,
    /// Information that a user may want.
    Info = 3,
    /// Details that an author needs.
    Debug = 4,
    /// Everything.
    Trace = 5,
}

#[derive(Debug, Clone, Copy)]
struct Memory {
    id: u32,
    data: *mut u8,
    len: usize,
    writable: bool,
}

/// The services of the program that opened the op.
pub struct Host {
    raw: HostRef,
    op: OpDescription,
    manifest: Value,
    graphs: Vec<GraphInfo>,
    buffers: Vec<Memory>,
    dumping: bool,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host")
            .field("graphs", &self.graphs.len())
            .field("buffers", &self.buffers.len())
            .finish_non_exhaustive()
    }
}

// SAFETY: the host promises that an op's calls may come from different threads, one at a time,
// and so does the op: the pointers are not tied to a thread.
unsafe impl Send for Host {}

macro_rules! service {
    ($self:ident.$name:ident($($argument:expr),*)) => {{
        let call = $self.raw.vtable.$name();
        // SAFETY: `data` belongs to this vtable and outlives the op; the arguments are valid for
        // the duration of the call.
        unsafe { call($self.raw.data $(, $argument)*) }
    }};
}

impl Host {
    /// Wraps the host's services.
    ///
    /// # Safety
    /// `raw` stays valid as long as the value lives, and its `data` fits its vtable.
    pub(crate) unsafe fn new(raw: HostRef, op: OpDescription) -> Result<Self> {
        let mut host = Self {
            raw,
            op,
            manifest: Value::Null,
            graphs: Vec::new(),
            buffers: Vec::new(),
            dumping: false,
        };
        host.dumping = service!(host.dumping()) != 0;
        let manifest = service!(host.manifest());
        host.manifest = serde_json::from_str(&manifest)
            .map_err(|e| Error::manifest(format!("the host's manifest is not JSON: {e}")))?;
        let graphs = service!(host.graphs());
        host.graphs = serde_json::from_str(&graphs).map_err(|e| {
            Error::new(ErrorCode::INTERNAL, format!("the host's list of graphs: {e}"))
        })?;
        host.assign_roles()?;
        Ok(host)
    }

    /// Gives every tensor its role from `plan.params.tensors`: `{"role": "name in the graph"}`,
    /// where one `*` on both sides stands for the same text, usually a layer's number.
    fn assign_roles(&mut self) -> Result<()> {
        let names = self.manifest.pointer("/plan/params/tensors").cloned().unwrap_or(Value::Null);
        let map: Vec<(String, String)> = match names {
            Value::Null => Vec::new(),
            Value::Object(map) => map
                .into_iter()
                .map(|(role, name)| match name {
                    Value::String(name) => Ok((role, name)),
                    other => Err(Error::manifest(format!(
                        "manifest /plan/params/tensors/{role}: expected a tensor name, found {other}"
                    ))),
                })
                .collect::<Result<_>>()?,
            other => {
                return Err(Error::manifest(format!(
                    "manifest /plan/params/tensors: expected an object of role: name, found {other}"
                )));
            }
        };
        for graph in &mut self.graphs {
            for tensor in graph.inputs.iter_mut().chain(&mut graph.outputs) {
                tensor.role = role_of(&map, &tensor.name);
            }
        }
        Ok(())
    }

    /// Declaration of the op about itself.
    pub fn op(&self) -> &OpDescription {
        &self.op
    }

    /// The manifest, with every key that stands in the file.
    pub fn manifest(&self) -> &Value {
        &self.manifest
    }

    /// `plan.params` of the manifest as the op's own type.
    ///
    /// # Errors
    /// When the parameters do not have this type.
    pub fn params<P: DeserializeOwned>(&self) -> Result<P> {
        let empty = Value::Object(serde_json::Map::new());
        let params = self.manifest.pointer("/plan/params").unwrap_or(&empty);
        P::deserialize(params).map_err(|e| Error::manifest(format!("manifest /plan/params: {e}")))
    }

    /// A value of the manifest as a type, by JSON pointer; `None` when it is absent or null.
    ///
    /// # Errors
    /// When the value has another type.
    pub fn value<T: DeserializeOwned>(&self, pointer: &str) -> Result<Option<T>> {
        match self.manifest.pointer(pointer) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => T::deserialize(value)
                .map(Some)
                .map_err(|e| Error::manifest(format!("manifest {pointer}: {e}"))),
        }
    }

    /// A value of the manifest that must be there.
    ///
    /// # Errors
    /// When the value is absent or has another type.
    pub fn require<T: DeserializeOwned>(&self, pointer: &str) -> Result<T> {
        self.value(pointer)?.ok_or_else(|| Error::manifest(format!("manifest {pointer}: missing")))
    }

    /// All graphs of the session.
    pub fn graphs(&self) -> &[GraphInfo] {
        &self.graphs
    }

    /// Description of a graph.
    pub fn graph(&self, id: GraphId) -> &GraphInfo {
        &self.graphs[id.0 as usize]
    }

    /// Finds a graph by name, or by `context/graph` where two contexts hold the same name.
    pub fn find_graph(&self, name: &str) -> Option<GraphId> {
        let is = |g: &GraphInfo| {
            g.name == name
                || name
                    .strip_prefix(g.context.as_str())
                    .and_then(|rest| rest.strip_prefix('/'))
                    .is_some_and(|rest| rest == g.name)
        };
        self.graphs.iter().position(is).map(|index| GraphId(index as u32))
    }

    /// Finds a graph that must be there. `pointer` is the place in the manifest that names it.
    ///
    /// # Errors
    /// When there is no such graph.
    pub fn require_graph(&self, pointer: &str, name: &str) -> Result<GraphId> {
        let same: Vec<_> = self.graphs.iter().filter(|g| g.name == name).collect();
        if let [first, second, ..] = same[..] {
            return Err(Error::manifest(format!(
                "manifest {pointer}: graph {name:?} is in contexts {:?} and {:?}; write \"{}/{name}\"",
                first.context, second.context, first.context
            )));
        }
        self.find_graph(name).ok_or_else(|| {
            let names: Vec<_> =
                self.graphs.iter().map(|g| format!("{}/{}", g.context, g.name)).collect();
            Error::graph(format!(
                "manifest {pointer}: graph {name:?} is in no context of the bundle, which has {}",
                if names.is_empty() { "no graphs".to_owned() } else { names.join(", ") }
            ))
        })
    }

    /// Description of a tensor.
    ///
    /// # Panics
    /// When the port is not one of the graph's, which is a fault of the op.
    pub fn tensor(&self, graph: GraphId, port: Port) -> &TensorInfo {
        let info = self.graph(graph);
        match port {
            Port::Input(i) => &info.inputs[i],
            Port::Output(i) => &info.outputs[i],
        }
    }

    fn adopt(&mut self, raw: RawBuffer) -> Result<BufferId> {
        let len = usize::try_from(raw.len).map_err(|_| {
            Error::new(ErrorCode::INTERNAL, format!("a buffer of {} bytes", raw.len))
        })?;
        let index = self.buffers.len() as u32;
        self.buffers.push(Memory { id: raw.id, data: raw.data, len, writable: raw.writable != 0 });
        Ok(BufferId(index))
    }

    /// Allocates zeroed memory that graphs can read and write.
    ///
    /// # Errors
    /// When there is not as much memory.
    pub fn allocate(&mut self, bytes: usize) -> Result<BufferId> {
        let raw = result(service!(self.allocate(bytes as u64)))?;
        self.adopt(raw)
    }

    /// Allocates a buffer of a tensor's size and binds it to the port.
    ///
    /// # Errors
    /// Errors of [`Host::allocate`] and [`Host::bind`].
    pub fn allocate_for(&mut self, graph: GraphId, port: Port) -> Result<BufferId> {
        let bytes = self.tensor(graph, port).byte_len();
        let buffer = self.allocate(bytes)?;
        self.bind(graph, port, buffer, 0)?;
        Ok(buffer)
    }

    /// Maps a file of the bundle, read-only. `pointer` is the JSON pointer of `path`.
    ///
    /// # Errors
    /// When the path breaks the path rule, or the file cannot be mapped.
    pub fn artifact(&mut self, pointer: &str, path: &str) -> Result<BufferId> {
        let raw = result(service!(self.artifact(pointer.into(), path.into())))?;
        self.adopt(raw)
    }

    /// Length of a buffer in bytes.
    pub fn len(&self, buffer: BufferId) -> usize {
        self.memory(buffer).len
    }

    fn memory(&self, buffer: BufferId) -> Memory {
        self.buffers[buffer.0 as usize]
    }

    pub(crate) fn raw_id(&self, buffer: BufferId) -> u32 {
        self.memory(buffer).id
    }

    /// Bytes of a buffer.
    pub fn bytes(&self, buffer: BufferId) -> &[u8] {
        let memory = self.memory(buffer);
        if memory.len == 0 {
            return &[];
        }
        // SAFETY: the host keeps the memory alive and in place while the op is open; writing to it
        // needs `&mut self`, which the borrow excludes.
        unsafe { std::slice::from_raw_parts(memory.data, memory.len) }
    }

    /// Bytes of a buffer, for writing; empty for a mapped file.
    pub fn bytes_mut(&mut self, buffer: BufferId) -> &mut [u8] {
        let memory = self.memory(buffer);
        if memory.len == 0 || !memory.writable {
            return &mut [];
        }
        // SAFETY: as in `bytes`; `&mut self` excludes every other view and every execution.
        unsafe { std::slice::from_raw_parts_mut(memory.data, memory.len) }
    }

    /// Declares that bytes of a buffer are read soon. What of a mapped file is not in memory begins to come from the
    /// disk, all of it, instead of some pages whenever one of them is touched. Where the system takes no such advice
    /// nothing happens. Bytes that are not in the buffer are left out.
    pub fn read_ahead(&self, buffer: BufferId, range: Range<usize>) {
        let bytes = self.bytes(buffer);
        let range = range.start.min(bytes.len())..range.end.min(bytes.len());
        #[cfg(unix)]
        if let Some(bytes) = bytes.get(range).filter(|bytes| !bytes.is_empty()) {
            // SAFETY: a question to the system about its pages.
            let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
            // The system takes whole pages.
            let before = bytes.as_ptr().addr() % usize::try_from(page).unwrap_or(1).max(1);
            let start = bytes.as_ptr().wrapping_sub(before).cast_mut().cast();
            // SAFETY: this advice changes no byte and unmaps nothing, whatever the page holds beside the buffer. An
            // error means that the advice was not taken.
            unsafe { libc::madvise(start, before + bytes.len(), libc::MADV_WILLNEED) };
        }
        #[cfg(not(unix))]
        let _ = range;
    }

    /// One buffer to read and another to write, at once.
    ///
    /// # Panics
    /// When both are the same buffer, which is a fault of the op.
    pub fn pair(&mut self, read: BufferId, write: BufferId) -> (&[u8], &mut [u8]) {
        let (source, target) = (self.memory(read), self.memory(write));
        assert!(source.data != target.data || source.len == 0, "pair of one and the same buffer");
        let target_len = if target.writable { target.len } else { 0 };
        // SAFETY: two different blocks of the host, alive while the op is open; `&mut self`
        // excludes every other view of either. Empty blocks have dangling but aligned pointers.
        unsafe {
            (
                std::slice::from_raw_parts(source.data, source.len),
                std::slice::from_raw_parts_mut(target.data, target_len),
            )
        }
    }

    /// A buffer as f32. Buffers of the host are aligned for it; a mapped file is as long as it
    /// starts at its first byte.
    pub fn f32s(&self, buffer: BufferId) -> &[f32] {
        bytemuck::try_cast_slice(self.bytes(buffer)).unwrap_or(&[])
    }

    /// A buffer as f32, for writing.
    pub fn f32s_mut(&mut self, buffer: BufferId) -> &mut [f32] {
        bytemuck::try_cast_slice_mut(self.bytes_mut(buffer)).unwrap_or(&mut [])
    }

    /// A buffer as f16.
    pub fn f16s(&self, buffer: BufferId) -> &[f16] {
        bytemuck::try_cast_slice(self.bytes(buffer)).unwrap_or(&[])
    }

    /// A buffer as f16, for writing.
    pub fn f16s_mut(&mut self, buffer: BufferId) -> &mut [f16] {
        bytemuck::try_cast_slice_mut(self.bytes_mut(buffer)).unwrap_or(&mut [])
    }

    /// Binds a buffer from byte `offset` on to a port. Binding again replaces the former buffer
    /// and copies nothing: that is how states swap.
    ///
    /// # Errors
    /// When the port does not exist, or the buffer does not hold the tensor from `offset` on.
    pub fn bind(
        &mut self,
        graph: GraphId,
        port: Port,
        buffer: BufferId,
        offset: usize,
    ) -> Result<()> {
        let (kind, index) = match port {
            Port::Input(i) => (PORT_INPUT, i),
            Port::Output(i) => (PORT_OUTPUT, i),
        };
        let id = self.raw_id(buffer);
        result(service!(self.bind(graph.0, kind, index as u32, id, offset as u64)))
    }

    /// Executes a graph with everything bound. Fails with [`ErrorCode::CANCELLED`] when the work
    /// should stop.
    ///
    /// # Errors
    /// When a port is not bound, or the execution fails or is cancelled.
    pub fn execute(&mut self, graph: GraphId) -> Result<()> {
        result(service!(self.execute(graph.0)))
    }

    /// Number of threads behind [`Host::parallel_for`].
    pub fn threads(&self) -> usize {
        service!(self.threads()) as usize
    }

    /// Calls `body(i)` for every `i` below `count` on the host's threads, and returns when all
    /// have returned. A panic in `body` becomes an error.
    ///
    /// # Errors
    /// When `body` panics.
    pub fn parallel_for<F: Fn(usize) + Sync>(&self, count: usize, body: F) -> Result<()> {
        struct Shared<'a, F> {
            body: &'a F,
            panicked: AtomicBool,
        }
        unsafe extern "C" fn call<F: Fn(usize) + Sync>(context: *mut c_void, index: u64) {
            // SAFETY: the host hands back the pointer given to `parallel_for`, which does not
            // return before the last call has.
            let shared = unsafe { &*context.cast::<Shared<'_, F>>() };
            if catch(|| (shared.body)(index as usize)).is_err() {
                shared.panicked.store(true, Ordering::Relaxed);
            }
        }
        let shared = Shared { body: &body, panicked: AtomicBool::new(false) };
        let context = (&raw const shared).cast_mut().cast::<c_void>();
        service!(self.parallel_for(count as u64, context, ParallelBody { call: call::<F> }));
        if shared.panicked.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorCode::PANIC, "a parallel part of the host-op panicked"));
        }
        Ok(())
    }

    /// Fills buffers on the host's threads. Each of `targets` is split into chunks of `piece` bytes,
    /// the last one shorter, and `body(sources, target, first, bytes)` is called for every chunk:
    /// the bytes of `sources`, the index in `targets`, the chunk's first byte and the chunk itself.
    /// Allocates nothing.
    ///
    /// # Errors
    /// When `body` panics.
    ///
    /// # Panics
    /// When `piece` is 0, or a target is also a source or occurs twice: faults of the op.
    pub fn parallel_fill<const N: usize, F>(
        &mut self,
        sources: [BufferId; N],
        targets: &[BufferId],
        piece: usize,
        body: F,
    ) -> Result<()>
    where
        F: Fn([&[u8]; N], usize, usize, &mut [u8]) + Sync,
    {
        struct Shared<'a>(&'a Host);
        impl Shared<'_> {
            fn memory(&self, buffer: BufferId) -> Memory {
                self.0.memory(buffer)
            }
            fn pieces(&self, target: BufferId, piece: usize) -> usize {
                let memory = self.memory(target);
                if memory.writable { memory.len.div_ceil(piece) } else { 0 }
            }
        }
        // SAFETY: the methods above only read the list of buffers, which nothing changes meanwhile.
        unsafe impl Sync for Shared<'_> {}

        assert!(piece > 0, "pieces of 0 bytes");
        for (i, target) in targets.iter().enumerate() {
            let data = self.memory(*target).data;
            let others = targets[..i].iter().chain(&sources).map(|&b| self.memory(b));
            let apart = others.filter(|m| m.len > 0).all(|m| m.data != data);
            assert!(apart, "a buffer is filled and read at once");
        }
        let shared = Shared(self);
        let sources = sources.map(|source| self.bytes(source));
        let count = targets.iter().map(|&target| shared.pieces(target, piece)).sum();
        self.parallel_for(count, |index| {
            let (mut target, mut index) = (0, index);
            while index >= shared.pieces(targets[target], piece) {
                index -= shared.pieces(targets[target], piece);
                target += 1;
            }
            let memory = shared.memory(targets[target]);
            let first = index * piece;
            let len = piece.min(memory.len - first);
            // SAFETY: the range lies in a writable block of the host, which is alive while the op is
            // open. Every index makes another chunk, targets differ from each other and from the
            // sources, and `&mut self` excludes every other view and every execution.
            let bytes = unsafe { std::slice::from_raw_parts_mut(memory.data.add(first), len) };
            body(sources, target, first, bytes);
        })
    }

    /// Writes a line to the host's log.
    pub fn log(&self, level: LogLevel, message: &str) {
        service!(self.log(level as u32, message.into()));
    }

    /// True when the work should stop. [`Host::execute`] checks by itself.
    pub fn is_cancelled(&self) -> bool {
        service!(self.cancelled()) != 0
    }

    /// Reports how many of a prompt's `total` positions are consumed.
    pub fn progress(&self, done: usize, total: usize) {
        service!(self.progress(done as u64, total as u64));
    }

    /// Names a part of the op's work. Call it on opening; see [`Host::end`].
    pub fn span(&self, name: &str) -> SpanId {
        SpanId(service!(self.span(name.into())))
    }

    /// Adds the time since `start` to a named part.
    pub fn end(&self, span: SpanId, start: Instant) {
        let nanoseconds = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        service!(self.span_add(span.0, nanoseconds));
    }

    /// True when [`Host::dump`] writes files: with `qhx generate --dump DIR`. An op that has to
    /// compute what it dumps asks first.
    pub fn dumping(&self) -> bool {
        self.dumping
    }

    /// Writes what lies in a buffer to the file `NAME.npy` as f32, so that it can be compared with a
    /// reference: row-major, `shape` elements of f16 or f32. A second array of that name becomes
    /// `NAME-2.npy`. The name consists of ASCII letters, digits and `_`.
    ///
    /// Does nothing, and allocates nothing, unless [`Host::dumping`].
    ///
    /// # Errors
    /// When the name or the shape is invalid, or the file cannot be written.
    pub fn dump(&self, name: &str, view: View, shape: &[usize]) -> Result<()> {
        if !self.dumping {
            return Ok(());
        }
        let dtype = raw_dtype(view.dtype)?;
        let range = view.len.checked_mul(view.dtype.size());
        let range = range.and_then(|bytes| Some(view.offset..view.offset.checked_add(bytes)?));
        let bytes =
            range.and_then(|range| self.bytes(view.buffer).get(range)).ok_or_else(|| {
                Error::graph(format!(
                    "dump {name:?}: {} {} values at byte {} do not lie in a buffer of {} bytes",
                    view.len,
                    view.dtype,
                    view.offset,
                    self.len(view.buffer)
                ))
            })?;
        self.dump_bytes(name, dtype, shape, bytes)
    }

    /// Same as [`Host::dump`], for values that are in no buffer.
    ///
    /// # Errors
    /// Errors of [`Host::dump`].
    pub fn dump_values(&self, name: &str, values: &[f32], shape: &[usize]) -> Result<()> {
        if !self.dumping {
            return Ok(());
        }
        self.dump_bytes(name, VIEW_F32, shape, bytemuck::cast_slice(values))
    }

    fn dump_bytes(&self, name: &str, dtype: u32, shape: &[usize], bytes: &[u8]) -> Result<()> {
        let shape: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
        result(service!(self.dump(name.into(), dtype, shape[..].into(), bytes.into())))
    }

    /// Checks that a tensor holds floats that an op can fill: f16 or f32.
    ///
    /// # Errors
    /// When it does not.
    pub fn require_float(&self, graph: GraphId, port: Port) -> Result<DType> {
        let tensor = self.tensor(graph, port);
        match tensor.dtype {
            DType::F16 | DType::F32 => Ok(tensor.dtype),
            other => Err(Error::graph(format!(
                "graph {:?}: tensor {tensor} is {other}, expected f16 or f32",
                self.graph(graph).name
            ))),
        }
    }
}

fn result<T>(raw: RawResult<T>) -> Result<T> {
    raw.into_result().map_err(Error::from)
}

/// `VIEW_*` of a type that views can have.
pub(crate) fn raw_dtype(dtype: DType) -> Result<u32> {
    match dtype {
        DType::F16 => Ok(VIEW_F16),
        DType::F32 => Ok(VIEW_F32),
        other => Err(Error::graph(format!("an output of type {other}; expected f16 or f32"))),
    }
}

fn role_of(map: &[(String, String)], name: &str) -> String {
    for (role, pattern) in map {
        if pattern == name {
            return role.clone();
        }
        let (Some((head, tail)), Some((role_head, role_tail))) =
            (pattern.split_once('*'), role.split_once('*'))
        else {
            continue;
        };
        if let Some(middle) = name.strip_prefix(head).and_then(|rest| rest.strip_suffix(tail))
            && !middle.is_empty()
        {
            return format!("{role_head}{middle}{role_tail}");
        }
    }
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::role_of;

    #[test]
    fn roles_follow_the_manifest() {
        let map = vec![
            ("x".to_owned(), "hidden_in".to_owned()),
            ("past_k_*".to_owned(), "layer*_key".to_owned()),
        ];
        assert_eq!(role_of(&map, "hidden_in"), "x");
        assert_eq!(role_of(&map, "layer12_key"), "past_k_12");
        assert_eq!(role_of(&map, "layer_key"), "layer_key");
        assert_eq!(role_of(&map, "cos"), "cos");
    }
}
