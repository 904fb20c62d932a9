//! The smallest host: loads the plugin it is given, through the runtime's own check of headers,
//! runs its op `test_frozen` over one graph without arithmetic, and prints what came of it. A
//! second argument is a token to decode at last; 13 makes the op panic.
//!
//! It depends on the interface crate and nothing else of the runtime, so that it can be built
//! against an older and a newer one in seconds. The test puts `plugins/host/src/header.rs` beside
//! this file.

mod header;

use std::cell::RefCell;
use std::ffi::c_void;
use std::path::PathBuf;
use std::process::ExitCode;

use abi_stable::prefix_type::WithMetadata;
use abi_stable::std_types::{RResult, RSlice, RStr, RString};
use qhx_op::abi::{
    HostRef, HostVTable, HostVTableRef, OpObject, ParallelBody, RawBuffer, RawCall, RawError,
    RawResult, RawSegment, SEGMENT_TOKENS,
};
use serde_json::json;

const VOCAB: usize = 16;

/// State that the services work on.
#[derive(Default)]
struct Session {
    /// Buffers; they do not move while the op is open.
    buffers: RefCell<Vec<Box<[u64]>>>,
    log: RefCell<Vec<String>>,
    executions: RefCell<u32>,
    progress: RefCell<(u64, u64)>,
}

/// The session behind `data`.
unsafe fn session<'a>(data: *mut c_void) -> &'a Session {
    // SAFETY: the address of a session that outlives the op, see `run`.
    unsafe { &*data.cast::<Session>() }
}

unsafe extern "C" fn manifest(_data: *mut c_void) -> RString {
    json!({"schema_version": 1, "plan": {"steps": [{"host": "test_frozen"}]}}).to_string().into()
}

unsafe extern "C" fn graphs(_data: *mut c_void) -> RString {
    let logits = json!({"name": "logits", "dtype": "f32", "shape": [1, VOCAB]});
    json!([{"context": "step", "name": "step", "inputs": [], "outputs": [logits]}])
        .to_string()
        .into()
}

unsafe extern "C" fn allocate(data: *mut c_void, bytes: u64) -> RawResult<RawBuffer> {
    // SAFETY: the op's `data`.
    let mut buffers = unsafe { session(data) }.buffers.borrow_mut();
    let mut words = vec![0u64; bytes.div_ceil(8) as usize].into_boxed_slice();
    let buffer = RawBuffer {
        id: buffers.len() as u32,
        writable: 1,
        data: words.as_mut_ptr().cast(),
        len: bytes,
    };
    buffers.push(words);
    RResult::ROk(buffer)
}

unsafe extern "C" fn artifact(
    _data: *mut c_void,
    pointer: RStr<'_>,
    path: RStr<'_>,
) -> RawResult<RawBuffer> {
    let message = format!("manifest {pointer}: {path} is not there").into();
    RResult::RErr(RawError { code: 4, message, token: 1 })
}

unsafe extern "C" fn bind(
    _data: *mut c_void,
    _graph: u32,
    _port: u32,
    _index: u32,
    _buffer: u32,
    _offset: u64,
) -> RawResult<()> {
    RResult::ROk(())
}

unsafe extern "C" fn execute(data: *mut c_void, _graph: u32) -> RawResult<()> {
    // SAFETY: the op's `data`.
    *unsafe { session(data) }.executions.borrow_mut() += 1;
    RResult::ROk(())
}

unsafe extern "C" fn parallel_for(
    _data: *mut c_void,
    count: u64,
    context: *mut c_void,
    body: ParallelBody,
) {
    for index in 0..count {
        // SAFETY: the op's own context, for the time of the call.
        unsafe { (body.call)(context, index) }
    }
}

unsafe extern "C" fn threads(_data: *mut c_void) -> u32 {
    1
}

unsafe extern "C" fn log(data: *mut c_void, _level: u32, message: RStr<'_>) {
    // SAFETY: the op's `data`.
    unsafe { session(data) }.log.borrow_mut().push(message.to_string());
}

unsafe extern "C" fn cancelled(_data: *mut c_void) -> u32 {
    0
}

unsafe extern "C" fn progress(data: *mut c_void, done: u64, total: u64) {
    // SAFETY: the op's `data`.
    *unsafe { session(data) }.progress.borrow_mut() = (done, total);
}

unsafe extern "C" fn span(_data: *mut c_void, _name: RStr<'_>) -> u32 {
    0
}

unsafe extern "C" fn span_add(_data: *mut c_void, _span: u32, _nanoseconds: u64) {}

unsafe extern "C" fn dumping(_data: *mut c_void) -> u32 {
    0
}

unsafe extern "C" fn dump(
    _data: *mut c_void,
    _name: RStr<'_>,
    _dtype: u32,
    _shape: RSlice<'_, u64>,
    _bytes: RSlice<'_, u8>,
) -> RawResult<()> {
    RResult::ROk(())
}

#[cfg(feature = "newer")]
unsafe extern "C" fn clock(_data: *mut c_void) -> u64 {
    7
}

const SERVICES: HostVTableRef = {
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
        #[cfg(feature = "newer")]
        clock,
    });
    HostVTableRef(STATIC.static_as_prefix())
};

impl Session {
    /// The index of the greatest of the floats that a call gives.
    fn call(
        &self,
        op: &OpObject,
        name: &str,
        number: u64,
        segments: &[RawSegment<'_>],
    ) -> Result<u32, String> {
        let call = RawCall {
            name: name.into(),
            number,
            tokens: RSlice::EMPTY,
            bytes: RSlice::EMPTY,
            texts: RSlice::EMPTY,
            segments: segments.into(),
        };
        // SAFETY: an open op, one call at a time.
        let view = match unsafe { op.vtable.call()(op.data, call) } {
            RResult::ROk(reply) => reply.view,
            RResult::RErr(error) => return Err(error.message.to_string()),
        };
        let buffers = self.buffers.borrow();
        let words = &buffers[view.buffer as usize];
        assert!((view.offset as usize / 4 + view.len as usize).div_ceil(2) <= words.len());
        let first = words.as_ptr().cast::<f32>();
        // SAFETY: in bounds, aligned for u64, and the op is not at work.
        let values = unsafe {
            std::slice::from_raw_parts(first.add(view.offset as usize / 4), view.len as usize)
        };
        let greatest = values.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        Ok(greatest.map_or(0, |(index, _)| index as u32))
    }
}

fn run() -> Result<String, String> {
    let file = std::env::args_os().nth(1).map(PathBuf::from).ok_or("expected a plugin file")?;
    let refused = |refusal: header::Refusal| format!("{:?}: {}", refusal.fault, refusal.message);
    let (interface, module) = header::module(header::open(&file).map_err(refused)?).map_err(refused)?;
    let described = module.describe()();
    assert!(described.contains("test_frozen"), "{described}");

    let session = Session::default();
    let data = std::ptr::from_ref(&session).cast_mut().cast();
    let host = HostRef { data, vtable: SERVICES };
    // SAFETY: the session outlives the op, which is closed below.
    let op = match unsafe { module.open()("test_frozen".into(), host) } {
        RResult::ROk(op) => op,
        RResult::RErr(error) => return Err(error.message.to_string()),
    };
    let segment = |tokens| RawSegment {
        kind: SEGMENT_TOKENS,
        width: 0,
        height: 0,
        rate: 0,
        tokens: RSlice::from_slice(tokens),
        bytes: RSlice::EMPTY,
        samples: RSlice::EMPTY,
    };
    let decode = |token| session.call(&op, "decode", u64::from(token), &[]);
    let mut next = session.call(&op, "prefill", 0, &[segment(&[1, 2])])?;
    let mut tokens = vec![next];
    for _ in 0..3 {
        next = decode(next)?;
        tokens.push(next);
    }
    // SAFETY: an open op.
    let position = unsafe { op.vtable.position()(op.data) };
    let embedded = session.call(&op, "embed", 0, &[segment(&[4, 5])])?;
    assert_eq!(*session.progress.borrow(), (2, 2));
    assert_eq!(*session.executions.borrow(), 7);
    #[cfg(feature = "newer")]
    // SAFETY: as above.
    let added = format!("{:?} {:?}", module.era(), op.vtable.clock().map(|f| unsafe { f(op.data) }));
    #[cfg(not(feature = "newer"))]
    let added = "not known";
    let last = std::env::args().nth(2).and_then(|token| token.parse::<u32>().ok());
    let last = last.map(decode);
    // SAFETY: as above; not used afterwards.
    unsafe { op.vtable.close()(op.data) };
    last.transpose()?;
    Ok(format!(
        "host {} plugin {interface} tokens {tokens:?} position {position} embedded {embedded} \
         added {added} log {:?}",
        header::interface_version(),
        session.log.borrow()
    ))
}

fn main() -> ExitCode {
    match run() {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            println!("{message}");
            ExitCode::FAILURE
        }
    }
}
