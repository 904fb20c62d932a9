//! The host's side of an open op: the vtable of services over a session's workspace.

#![expect(unsafe_code, reason = "implements functions that a plugin calls through raw pointers")]

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qhx_base::trace::{Category, Event};
use qhx_base::{CancelToken, Error, ErrorKind};
use qhx_core::dump::Dump;
use qhx_core::op::{OpServices, ProgressFn, SpanStats};
use qhx_exec::{BufferId, GraphId, Workspace};
use qhx_op::ErrorCode;
use qhx_op::abi::{
    HostRef, HostVTable, HostVTableRef, PORT_INPUT, PORT_OUTPUT, ParallelBody, RResult, RSlice,
    RStr, RString, RawBuffer, RawError, RawResult, StableAbi, VIEW_F16, VIEW_F32, WithMetadata,
};
use qhx_op::guard::catch;
use qhx_types::{GraphInfo, Port};
use rayon::prelude::*;

use crate::errors::Errors;

/// Everything behind the `data` pointer that an op gets.
///
/// Fields that any thread may use lie outside the cell. The cell is touched only on the thread that called the op, or
/// while no call is under way.
pub(crate) struct Session {
    threads: Arc<rayon::ThreadPool>,
    cancel: CancelToken,
    progress: Option<ProgressFn>,
    dump: Option<Arc<Dump>>,
    op: String,
    manifest: String,
    exclusive: UnsafeCell<Exclusive>,
}

pub(crate) struct Exclusive {
    pub(crate) workspace: Workspace,
    artifacts: qhx_base::artifacts::Artifacts,
    mapped: HashMap<String, u32>,
    spans: Vec<SpanStats>,
    pub(crate) errors: Errors,
}

// SAFETY: the cell is accessed by one thread at a time: the caller of the op (`PluginOp` needs
// `&mut self` for every call), or a holder of `&PluginOp` between calls.
unsafe impl Send for Session {}

impl Session {
    pub(crate) fn new(op: &str, services: OpServices) -> Box<Self> {
        Box::new(Self {
            threads: services.threads,
            cancel: services.workspace.cancel_token().clone(),
            progress: services.progress,
            dump: services.dump,
            op: op.to_owned(),
            manifest: services.manifest.raw.to_string(),
            exclusive: UnsafeCell::new(Exclusive {
                workspace: services.workspace,
                artifacts: services.artifacts,
                mapped: HashMap::new(),
                spans: Vec::new(),
                errors: Errors::default(),
            }),
        })
    }

    /// The `HostRef` of this session, valid as long as the box lives.
    pub(crate) fn host(&self) -> HostRef {
        HostRef { data: std::ptr::from_ref(self).cast_mut().cast(), vtable: VTABLE }
    }

    /// Data that the op's calls work on.
    ///
    /// # Safety
    /// No call of the op is under way, and no other reference from this function lives.
    #[expect(clippy::mut_from_ref, reason = "exclusive access is the caller's contract")]
    pub(crate) unsafe fn exclusive(&self) -> &mut Exclusive {
        // SAFETY: the caller's contract.
        unsafe { &mut *self.exclusive.get() }
    }

    /// Same as [`Session::exclusive`], for reading.
    ///
    /// # Safety
    /// No call of the op is under way, and no reference from [`Session::exclusive`] lives.
    pub(crate) unsafe fn shared(&self) -> &Exclusive {
        // SAFETY: the caller's contract.
        unsafe { &*self.exclusive.get() }
    }
}

impl Exclusive {
    pub(crate) fn spans(&self) -> &[SpanStats] {
        &self.spans
    }
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
    // SAFETY: `data` is the pointer made in `Session::host`, and the box outlives the op.
    unsafe { &*data.cast::<Session>() }
}

/// Kinds of errors that services return, with their codes in the interface. A code stands for the first of its kinds.
const CODES: [(ErrorKind, ErrorCode); 8] = [
    (ErrorKind::Manifest, ErrorCode::MANIFEST),
    (ErrorKind::Artifact, ErrorCode::ARTIFACT),
    (ErrorKind::Graph, ErrorCode::GRAPH),
    (ErrorKind::Prompt, ErrorCode::PROMPT),
    (ErrorKind::Execute, ErrorCode::EXECUTE),
    (ErrorKind::DeviceLost, ErrorCode::EXECUTE),
    (ErrorKind::Cancelled, ErrorCode::CANCELLED),
    (ErrorKind::Context, ErrorCode::CONTEXT),
];

fn code(kind: ErrorKind) -> ErrorCode {
    CODES.iter().find(|known| known.0 == kind).map_or(ErrorCode::INTERNAL, |known| known.1)
}

/// The kind behind a code of the interface.
pub(crate) fn kind(code: u32) -> ErrorKind {
    match CODES.iter().find(|known| known.1 == ErrorCode(code)) {
        Some((kind, _)) => *kind,
        None if ErrorCode(code) == ErrorCode::PANIC => ErrorKind::Panicked,
        None => ErrorKind::Plugin,
    }
}

/// Runs a service on the session's exclusive part; a panic becomes an error.
unsafe fn serve<T: StableAbi>(
    data: *mut c_void,
    body: impl FnOnce(&mut Exclusive) -> qhx_base::Result<T>,
) -> RawResult<T> {
    // SAFETY: a service runs within a call of the op, on its thread, and services do not nest.
    let exclusive = unsafe { session(data).exclusive() };
    let result = catch(|| body(exclusive)).unwrap_or_else(|message| {
        Err(Error::new(ErrorKind::Internal, format!("the backend panicked: {message}")))
    });
    match result {
        Ok(value) => RResult::ROk(value),
        Err(error) => {
            let (code, message) = (code(error.kind()).0, error.message().into());
            RResult::RErr(RawError { code, message, token: exclusive.errors.keep(error) })
        }
    }
}

/// Runs a service that has no way to fail. A panic in it, such as one of the program's own log or
/// progress function, is dropped, and the op gets `otherwise`.
fn shielded<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    catch(body).unwrap_or(otherwise)
}

unsafe extern "C" fn manifest(data: *mut c_void) -> RString {
    // SAFETY: the op's `data`.
    let session = unsafe { session(data) };
    shielded(RString::new(), || session.manifest.as_str().into())
}

unsafe extern "C" fn graphs(data: *mut c_void) -> RString {
    // SAFETY: the op's `data`; within a call.
    let exclusive = unsafe { session(data).exclusive() };
    shielded(RString::new(), || {
        let list: Vec<_> = (0..exclusive.workspace.graph_count())
            .filter_map(|index| {
                let id = GraphId(index as u32);
                let (context, info) = exclusive.workspace.graph(id).ok()?;
                let (context, us) = (context.to_owned(), exclusive.workspace.graph_us(id));
                Some(GraphInfo { context, us, ..(**info).clone() })
            })
            .collect();
        serde_json::to_string(&list).unwrap_or_default().into()
    })
}

fn raw_buffer(workspace: &Workspace, id: BufferId) -> qhx_base::Result<RawBuffer> {
    let memory = workspace.memory(id)?;
    Ok(RawBuffer {
        id: id.0,
        writable: u32::from(memory.is_writable()),
        data: memory.as_ptr(),
        len: memory.len() as u64,
    })
}

unsafe extern "C" fn allocate(data: *mut c_void, bytes: u64) -> RawResult<RawBuffer> {
    let body = |e: &mut Exclusive| {
        let bytes = usize::try_from(bytes).map_err(|_| {
            Error::new(ErrorKind::Graph, format!("a buffer of {bytes} bytes cannot be allocated"))
        })?;
        let id = e.workspace.allocate(bytes)?;
        raw_buffer(&e.workspace, id)
    };
    // SAFETY: the op's `data`.
    unsafe { serve(data, body) }
}

unsafe extern "C" fn artifact(
    data: *mut c_void,
    pointer: RStr<'_>,
    path: RStr<'_>,
) -> RawResult<RawBuffer> {
    let body = |e: &mut Exclusive| {
        if let Some(&id) = e.mapped.get(path.as_str()) {
            return raw_buffer(&e.workspace, BufferId(id));
        }
        let mapped = e.artifacts.open(pointer.as_str(), path.as_str())?;
        let id = e.workspace.map(mapped)?;
        e.mapped.insert(path.to_string(), id.0);
        raw_buffer(&e.workspace, id)
    };
    // SAFETY: the op's `data`.
    unsafe { serve(data, body) }
}

unsafe extern "C" fn bind(
    data: *mut c_void,
    graph: u32,
    port: u32,
    index: u32,
    buffer: u32,
    offset: u64,
) -> RawResult<()> {
    let body = |e: &mut Exclusive| {
        let port = match port {
            PORT_INPUT => Port::Input(index as usize),
            PORT_OUTPUT => Port::Output(index as usize),
            other => {
                return Err(Error::new(ErrorKind::Plugin, format!("port kind {other} is unknown")));
            }
        };
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        e.workspace.bind(GraphId(graph), port, BufferId(buffer), offset)
    };
    // SAFETY: the op's `data`.
    unsafe { serve(data, body) }
}

unsafe extern "C" fn execute(data: *mut c_void, graph: u32) -> RawResult<()> {
    // SAFETY: the op's `data`.
    unsafe { serve(data, |e| e.workspace.execute(GraphId(graph))) }
}

unsafe extern "C" fn parallel_for(
    data: *mut c_void,
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
    // SAFETY: the op's `data`; the threads lie outside the exclusive part.
    let threads = unsafe { &session(data).threads };
    shielded((), || {
        threads.install(|| {
            (0..count).into_par_iter().for_each(|index| {
                // SAFETY: `context` belongs to `body` and lives until this function returns.
                unsafe { (body.call)(context.get(), index) }
            });
        });
    });
}

unsafe extern "C" fn threads(data: *mut c_void) -> u32 {
    // SAFETY: the op's `data`.
    let session = unsafe { session(data) };
    shielded(1, || session.threads.current_num_threads() as u32)
}

unsafe extern "C" fn log(data: *mut c_void, level: u32, message: RStr<'_>) {
    // SAFETY: the op's `data`; only the part that any thread may use.
    let op = unsafe { session(data) }.op.as_str();
    let message = message.as_str();
    shielded((), || match level {
        0 | 1 => tracing::error!(target: "qhx::op", op, "{message}"),
        2 => tracing::warn!(target: "qhx::op", op, "{message}"),
        3 => tracing::info!(target: "qhx::op", op, "{message}"),
        4 => tracing::debug!(target: "qhx::op", op, "{message}"),
        _ => tracing::trace!(target: "qhx::op", op, "{message}"),
    });
}

unsafe extern "C" fn cancelled(data: *mut c_void) -> u32 {
    // SAFETY: the op's `data`; only the part that any thread may use.
    let session = unsafe { session(data) };
    shielded(0, || u32::from(session.cancel.is_cancelled()))
}

unsafe extern "C" fn progress(data: *mut c_void, done: u64, total: u64) {
    // SAFETY: the op's `data`; only the part that any thread may use.
    if let Some(progress) = &unsafe { session(data) }.progress {
        shielded((), || progress(done, total));
    }
}

unsafe extern "C" fn span(data: *mut c_void, name: RStr<'_>) -> u32 {
    // SAFETY: the op's `data`; within a call.
    let spans = unsafe { &mut session(data).exclusive().spans };
    shielded(u32::MAX, || {
        if let Some(index) = spans.iter().position(|s| s.name == name.as_str()) {
            return index as u32;
        }
        spans.push(SpanStats { name: name.to_string(), count: 0, busy: Duration::ZERO });
        spans.len() as u32 - 1
    })
}

unsafe extern "C" fn span_add(data: *mut c_void, span: u32, nanoseconds: u64) {
    // SAFETY: the op's `data`; within a call.
    let Exclusive { spans, workspace, .. } = unsafe { session(data).exclusive() };
    shielded((), || {
        let Some(span) = spans.get_mut(span as usize) else { return };
        let time = Duration::from_nanos(nanoseconds);
        span.count += 1;
        span.busy = span.busy.saturating_add(time);
        if let Some(trace) = workspace.trace() {
            // The op reports so as soon as the span has ended.
            let end = Instant::now();
            let start = end.checked_sub(time).unwrap_or(end);
            trace.add(&Event::new(&span.name, Category::Host, start, time));
        }
    });
}

unsafe extern "C" fn dumping(data: *mut c_void) -> u32 {
    // SAFETY: the op's `data`; only the part that any thread may use.
    u32::from(unsafe { session(data) }.dump.is_some())
}

unsafe extern "C" fn dump(
    data: *mut c_void,
    name: RStr<'_>,
    dtype: u32,
    shape: RSlice<'_, u64>,
    bytes: RSlice<'_, u8>,
) -> RawResult<()> {
    // SAFETY: the op's `data`; only the part that any thread may use.
    let Some(files) = &unsafe { session(data) }.dump else { return RResult::ROk(()) };
    let body = |_: &mut Exclusive| {
        let values: Vec<f32> = match dtype {
            VIEW_F16 => bytes
                .chunks_exact(2)
                .map(|b| half::f16::from_ne_bytes([b[0], b[1]]).to_f32())
                .collect(),
            VIEW_F32 => bytes
                .chunks_exact(4)
                .map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            other => {
                let message = format!("dump {name:?}: the dtype {other} is unknown");
                return Err(Error::new(ErrorKind::Plugin, message));
            }
        };
        let shape: Vec<_> =
            shape.iter().map(|&n| usize::try_from(n).unwrap_or(usize::MAX)).collect();
        files.write(&name, &shape, &values)
    };
    // SAFETY: the op's `data`.
    unsafe { serve(data, body) }
}
