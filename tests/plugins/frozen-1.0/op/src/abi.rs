//! Everything that crosses the boundary between host and plugin.
//!
//! Rules that keep old and new sides compatible within a major version of this crate:
//!
//! - Vtables are prefix types: fields are only ever appended, after the one marked as the last of
//!   the first version; the other side sees an absent field as `None`.
//! - Structs passed by value are frozen. What may grow crosses as JSON.
//! - Error codes, dtypes and kinds are plain `u32`, and calls of an op are told apart by name, so that a new one is not
//!   a new layout.

#![expect(
    missing_debug_implementations,
    reason = "the derive of the prefix types does not forward attributes"
)]

use std::ffi::c_void;

use abi_stable::package_version_strings;
use abi_stable::sabi_types::VersionStrings;
/// Items that the boundary is made of. This module and the host's loader are the only ones that name the crate they
/// come from.
pub use abi_stable::{
    StableAbi,
    library::{
        __call_root_module_loader, CheckTypeLayout, LibHeader, ROOT_MODULE_LOADER_NAME, RootModule,
        RootModuleResult,
    },
    prefix_type::WithMetadata,
    std_types::{RResult, RSlice, RStr, RString, RVec},
};

/// An error: code of [`crate::ErrorCode`] and message.
#[repr(C)]
#[derive(StableAbi, Debug, Clone)]
pub struct RawError {
    /// [`crate::ErrorCode`].
    pub code: u32,
    /// Found and expected values, in words.
    pub message: RString,
    /// The host's number of an error of its services, by which it finds what does not cross, such as the error's hint,
    /// when an op fails because of it; 0 for an error of the op's own.
    pub token: u64,
}

/// Result of every fallible call.
pub type RawResult<T> = RResult<T, RawError>;

/// `kind` of [`RawSegment`]: `tokens` is set.
pub const SEGMENT_TOKENS: u32 = 0;
/// `kind` of [`RawSegment`]: `bytes` are RGB8 pixels, with `width` and `height`.
pub const SEGMENT_IMAGE: u32 = 1;
/// `kind` of [`RawSegment`]: `samples` are mono f32, with `rate`.
pub const SEGMENT_AUDIO: u32 = 2;
/// `kind` of [`RawSegment`]: `bytes` are RGB8 frames one behind the other, with `width` and
/// `height` of one; `samples` are the seconds at which each is shown; `rate` is the number of frames of
/// the whole video.
pub const SEGMENT_VIDEO: u32 = 3;
/// `kind` of [`RawSegment`]: a part of an image; as `SEGMENT_IMAGE`, and `rate` has the index of the part
/// in its low 16 bits and the number of parts in its high ones. Only an op that places images in such parts gets it.
pub const SEGMENT_TILE: u32 = 4;

/// A segment of a prompt.
#[repr(C)]
#[derive(StableAbi, Debug, Clone, Copy)]
pub struct RawSegment<'a> {
    /// `SEGMENT_*`.
    pub kind: u32,
    /// Pixels in a row, for an image.
    pub width: u32,
    /// Rows, for an image.
    pub height: u32,
    /// Samples per second, for audio; frames of the whole video, for a video.
    pub rate: u32,
    /// Token ids.
    pub tokens: RSlice<'a, u32>,
    /// Pixels.
    pub bytes: RSlice<'a, u8>,
    /// Samples.
    pub samples: RSlice<'a, f32>,
}

/// `dtype` of [`RawView`]: half precision.
pub const VIEW_F16: u32 = 0;
/// `dtype` of [`RawView`]: single precision.
pub const VIEW_F32: u32 = 1;

/// A run of floats in one of the session's buffers. The host checks it against the buffer.
#[repr(C)]
#[derive(StableAbi, Debug, Clone, Copy, Default)]
pub struct RawView {
    /// Buffer id.
    pub buffer: u32,
    /// `VIEW_*`.
    pub dtype: u32,
    /// First byte.
    pub offset: u64,
    /// Number of elements.
    pub len: u64,
}

/// A buffer of the session. Address and length do not change while the op is open.
#[repr(C)]
#[derive(StableAbi, Debug, Clone, Copy)]
pub struct RawBuffer {
    /// Buffer id.
    pub id: u32,
    /// 1 when the op may write it.
    pub writable: u32,
    /// First byte.
    pub data: *mut u8,
    /// Length in bytes.
    pub len: u64,
}

/// `port` of [`HostVTable::bind`]: an input.
pub const PORT_INPUT: u32 = 0;
/// `port` of [`HostVTable::bind`]: an output.
pub const PORT_OUTPUT: u32 = 1;

/// The host's side of an open op.
#[repr(C)]
#[derive(StableAbi, Clone, Copy)]
pub struct HostRef {
    /// First argument of every function of the vtable.
    pub data: *mut c_void,
    /// The services.
    pub vtable: HostVTableRef,
}

/// Body that [`HostVTable::parallel_for`] calls with its context and an index. Must not unwind.
#[repr(transparent)]
#[derive(StableAbi, Debug, Clone, Copy)]
pub struct ParallelBody {
    /// The function.
    pub call: unsafe extern "C" fn(context: *mut c_void, index: u64),
}

/// Services that a host gives to an op. All functions are called on the thread that called the
/// op, except `log` and `cancelled`, which any thread may call.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = HostVTableRef, prefix_fields = HostVTablePrefix)))]
#[sabi(missing_field(option))]
pub struct HostVTable {
    /// The manifest, as JSON, with every key that stands in the file.
    pub manifest: unsafe extern "C" fn(data: *mut c_void) -> RString,
    /// All graphs as a JSON array of [`crate::GraphInfo`]; the index is the graph id.
    pub graphs: unsafe extern "C" fn(data: *mut c_void) -> RString,
    /// Allocates zeroed memory that graphs can read and write.
    pub allocate: unsafe extern "C" fn(data: *mut c_void, bytes: u64) -> RawResult<RawBuffer>,
    /// Maps a file of the bundle read-only. `pointer` is the JSON pointer of `path`.
    pub artifact: unsafe extern "C" fn(
        data: *mut c_void,
        pointer: RStr<'_>,
        path: RStr<'_>,
    ) -> RawResult<RawBuffer>,
    /// Binds a buffer from byte `offset` on to `PORT_*` number `index` of a graph.
    pub bind: unsafe extern "C" fn(
        data: *mut c_void,
        graph: u32,
        port: u32,
        index: u32,
        buffer: u32,
        offset: u64,
    ) -> RawResult<()>,
    /// Executes a graph with everything bound.
    pub execute: unsafe extern "C" fn(data: *mut c_void, graph: u32) -> RawResult<()>,
    /// Calls `body(context, i)` for every `i` below `count`, on several threads. Returns when all
    /// have returned.
    pub parallel_for: unsafe extern "C" fn(
        data: *mut c_void,
        count: u64,
        context: *mut c_void,
        body: ParallelBody,
    ),
    /// Number of threads behind `parallel_for`.
    pub threads: unsafe extern "C" fn(data: *mut c_void) -> u32,
    /// Writes a line to the host's log. Levels: 1 error, 2 warning, 3 information, 4 debug, 5 trace.
    pub log: unsafe extern "C" fn(data: *mut c_void, level: u32, message: RStr<'_>),
    /// 1 when the work should stop.
    pub cancelled: unsafe extern "C" fn(data: *mut c_void) -> u32,
    /// Reports how much of a prompt is consumed.
    pub progress: unsafe extern "C" fn(data: *mut c_void, done: u64, total: u64),
    /// Names a part of the op's work for timing.
    pub span: unsafe extern "C" fn(data: *mut c_void, name: RStr<'_>) -> u32,
    /// Adds time to a named part.
    pub span_add: unsafe extern "C" fn(data: *mut c_void, span: u32, nanoseconds: u64),
    /// 1 when `dump` writes files. The answer stays the same while the op is open.
    pub dumping: unsafe extern "C" fn(data: *mut c_void) -> u32,
    /// Writes an array to a file named after it. `dtype` is `VIEW_*`, `bytes` are the
    /// elements in row-major order and the machine's byte order. `name` consists of ASCII letters,
    /// digits and `_`. Does nothing when `dumping` answers 0.
    #[sabi(last_prefix_field)]
    pub dump: unsafe extern "C" fn(
        data: *mut c_void,
        name: RStr<'_>,
        dtype: u32,
        shape: RSlice<'_, u64>,
        bytes: RSlice<'_, u8>,
    ) -> RawResult<()>,
}

/// The op's side of an open op.
#[repr(C)]
#[derive(StableAbi, Clone, Copy)]
pub struct OpObject {
    /// First argument of every function of the vtable.
    pub data: *mut c_void,
    /// The calls that an op answers.
    pub vtable: OpVTableRef,
}

/// A call of an open op: a [`qhx_types::calls::Call`]. What is not an argument of the call is empty; a later version
/// may give it more of these arguments, which an op that does not know them ignores.
#[repr(C)]
#[derive(StableAbi, Debug, Clone, Copy)]
pub struct RawCall<'a> {
    /// Name of the call. An op that does not know it fails with [`crate::ErrorCode::UNSUPPORTED`].
    pub name: RStr<'a>,
    /// A token, position, row, number of tokens, saved state or switch.
    pub number: u64,
    /// Token ids.
    pub tokens: RSlice<'a, u32>,
    /// An exported state.
    pub bytes: RSlice<'a, u8>,
    /// Texts, each as its tokens.
    pub texts: RSlice<'a, RSlice<'a, u32>>,
    /// A prompt.
    pub segments: RSlice<'a, RawSegment<'a>>,
}

/// Result of a call: a [`qhx_types::calls::Reply`]. What the call does not give is empty.
#[repr(C)]
#[derive(StableAbi, Debug, Default)]
pub struct RawReply {
    /// Logits, vectors or samples.
    pub view: RawView,
    /// A saved state.
    pub number: u64,
    /// An exported state, or JSON.
    pub bytes: RVec<u8>,
}

/// Functions of an open op. One call at a time; calls may come from different threads.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = OpVTableRef, prefix_fields = OpVTablePrefix)))]
#[sabi(missing_field(option))]
pub struct OpVTable {
    /// Ends the op and frees it.
    pub close: unsafe extern "C" fn(data: *mut c_void),
    /// [`crate::OpenInfo`] as JSON.
    pub info: unsafe extern "C" fn(data: *mut c_void) -> RString,
    /// Positions consumed so far.
    pub position: unsafe extern "C" fn(data: *mut c_void) -> u64,
    /// [`crate::Placement`] of an image, audio clip or video in a prompt, as JSON. Called before the segment is
    /// consumed, possibly more than once.
    pub place:
        unsafe extern "C" fn(data: *mut c_void, segment: RawSegment<'_>) -> RawResult<RString>,
    /// Makes a call that may change the op.
    #[sabi(last_prefix_field)]
    pub call: unsafe extern "C" fn(data: *mut c_void, call: RawCall<'_>) -> RawResult<RawReply>,
}

/// The root of a plugin.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = OpModuleRef, prefix_fields = OpModulePrefix)))]
#[sabi(missing_field(option))]
pub struct OpModule {
    /// A JSON array of [`crate::OpDescription`], sorted by name. Empty when describing panicked.
    pub describe: extern "C" fn() -> RString,
    /// Opens an op over the host's bundle. The host outlives the op.
    #[sabi(last_prefix_field)]
    pub open: unsafe extern "C" fn(name: RStr<'_>, host: HostRef) -> RawResult<OpObject>,
}

impl RootModule for OpModuleRef {
    abi_stable::declare_root_module_statics! {OpModuleRef}
    const BASE_NAME: &'static str = "qhx_op";
    const NAME: &'static str = "qhx_op";
    const VERSION_STRINGS: VersionStrings = package_version_strings!();
}
