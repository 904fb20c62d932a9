//! The C interface of the QNN libraries: layouts, numbers and function tables, no policy.
//!
//! Nothing is linked. A program opens libQnnHtp and libQnnSystem at run time, looks up
//! [`CORE_ENTRY`] and [`SYSTEM_ENTRY`] and copies the tables behind a provider with
//! [`CoreTable::of`] and [`SystemTable::of`]. Which library is good enough, which function is
//! called when and what an answer means is the caller's matter: `qhx-core` has all of that.
//!
//! Every structure that crosses the boundary has its size and offsets asserted at compile time.
//! The definitions hold for 64-bit targets, the only ones the libraries exist for. They were
//! written from measurements and the public documentation; fields that qhx never reads are there
//! for the layout alone.

#![expect(
    missing_docs,
    reason = "fields and numbers mean what the vendor's documentation says of those of like names"
)]
#![expect(missing_debug_implementations, reason = "most structures hold a union or raw pointers")]

mod data_type;
mod htp;
mod table;

use std::ffi::{c_char, c_void};

pub use data_type::*;
pub use htp::*;
pub use table::*;

/// The status that every function returns; the code is in the low 16 bits, 0 is success.
pub type Status = u64;
/// A handle. The library hands out small integers; NULL is none.
pub type Handle = *mut c_void;

/// Asserts size and offsets of an FFI structure at compile time.
macro_rules! layout {
    ($type:ty, $size:literal $(, $field:ident @ $offset:literal)* $(,)?) => {
        const _: () = {
            assert!(size_of::<$type>() == $size);
            $(assert!(std::mem::offset_of!($type, $field) == $offset);)*
        };
    };
}
pub(crate) use layout;

/// Version of an interface or a format.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}
layout!(Version, 12, major @ 0, minor @ 4, patch @ 8);

/// Number of the HTP backend, in a provider and in a context binary.
pub const BACKEND_HTP: u32 = 6;

/// The code in the low 16 bits of a status: the library cannot do this here.
pub const STATUS_NOT_SUPPORTED: u16 = 1000;
/// The code in the low 16 bits of a status: memory could not be had.
pub const STATUS_MEM_ALLOC: u16 = 1002;

/// Name of the entry point of libQnnHtp, a [`GetProviders`] of [`Provider`].
pub const CORE_ENTRY: &str = "QnnInterface_getProviders";
/// Name of the entry point of libQnnSystem, a [`GetProviders`] of [`SystemProvider`].
pub const SYSTEM_ENTRY: &str = "QnnSystemInterface_getProviders";
/// Returns a list of pointers to providers and its length. Both belong to the library.
pub type GetProviders<P> = unsafe extern "C" fn(*mut *const *const P, *mut u32) -> Status;

/// Head of a provider of libQnnHtp; the function table follows.
#[repr(C)]
pub struct Provider {
    pub backend_id: u32,
    pub name: *const c_char,
    pub core: Version,
    pub backend: Version,
    pub table: [*const c_void; 0],
}
layout!(Provider, 40, backend_id @ 0, name @ 8, core @ 16, backend @ 28, table @ 40);

/// Head of a provider of libQnnSystem; the function table follows.
#[repr(C)]
pub struct SystemProvider {
    pub backend_id: u32,
    pub name: *const c_char,
    pub api: Version,
    pub table: [*const c_void; 0],
}
layout!(SystemProvider, 32, backend_id @ 0, name @ 8, api @ 16, table @ 32);

// Tensors ---------------------------------------------------------------------------------------

pub const TENSOR_V1: u32 = 1;

/// An input: the host writes it before execution.
pub const TENSOR_APP_WRITE: u32 = 0;
/// An output: the host reads it after execution.
pub const TENSOR_APP_READ: u32 = 1;
/// A tensor between two nodes.
pub const TENSOR_NATIVE: u32 = 3;
/// A tensor whose bytes are part of the binary.
pub const TENSOR_STATIC: u32 = 4;

/// The tensor's data is plain memory of the caller.
pub const MEM_RAW: u32 = 0;
/// The tensor's `data` is a handle of registered memory, see [`MemDescriptor`].
pub const MEM_HANDLE: u32 = 1;

pub const QUANT_DEFINED: u32 = 1;
/// No encoding, no definition, no data type.
pub const UNDEFINED: u32 = 0x7fff_ffff;

/// `value` holds a [`ScaleOffset`].
pub const ENCODING_SCALE_OFFSET: u32 = 0;
/// `value` holds an [`AxisScaleOffset`].
pub const ENCODING_AXIS_SCALE_OFFSET: u32 = 1;
/// `value` holds a [`BwScaleOffset`].
pub const ENCODING_BW_SCALE_OFFSET: u32 = 2;
/// `value` holds a [`BwAxisScaleOffset`].
pub const ENCODING_BW_AXIS_SCALE_OFFSET: u32 = 3;
/// `value` holds a [`BwFloatBlock`].
pub const ENCODING_BW_FLOAT_BLOCK: u32 = 11;

/// Encoding of a whole tensor, or of one index along an axis: real = (q + offset) · scale.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ScaleOffset {
    pub scale: f32,
    pub offset: i32,
}
layout!(ScaleOffset, 8, scale @ 0, offset @ 4);

/// Encoding with one [`ScaleOffset`] for each index along `axis`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AxisScaleOffset {
    pub axis: i32,
    pub count: u32,
    pub values: *const ScaleOffset,
}
layout!(AxisScaleOffset, 16, axis @ 0, count @ 4, values @ 8);

/// Encoding of a whole tensor whose integers have `bitwidth` bits.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BwScaleOffset {
    pub bitwidth: u32,
    pub scale: f32,
    pub offset: i32,
}
layout!(BwScaleOffset, 12, bitwidth @ 0, scale @ 4, offset @ 8);

/// Encoding by axis of integers of `bitwidth` bits; `offsets` is NULL where all are 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BwAxisScaleOffset {
    pub bitwidth: u32,
    pub axis: i32,
    pub count: u32,
    pub scales: *const f32,
    pub offsets: *const i32,
}
layout!(BwAxisScaleOffset, 32, bitwidth @ 0, axis @ 4, count @ 8, scales @ 16, offsets @ 24);

/// Encoding of one block, whose offset need not be whole: real = (q + offset) · scale.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FloatScaleOffset {
    pub scale: f32,
    pub offset: f32,
}
layout!(FloatScaleOffset, 8, scale @ 0, offset @ 4);

/// Encoding by blocks of integers of `bitwidth` bits: `block` is the shape of a block, one number for each dimension,
/// and `values` are those of the blocks in row-major order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BwFloatBlock {
    pub bitwidth: u32,
    pub block: *const u32,
    pub values: *const FloatScaleOffset,
}
layout!(BwFloatBlock, 24, bitwidth @ 0, block @ 8, values @ 16);

/// Encodings that qhx does not interpret keep their bytes in `opaque`.
#[repr(C)]
#[derive(Clone, Copy)]
pub union Encoding {
    pub scale_offset: ScaleOffset,
    pub axis: AxisScaleOffset,
    pub bw: BwScaleOffset,
    pub bw_axis: BwAxisScaleOffset,
    pub bw_float_block: BwFloatBlock,
    pub opaque: [u64; 4],
}

/// Quantization of a tensor: `encoding` says which member of `value` is set, where `definition` is [`QUANT_DEFINED`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct QuantizeParams {
    pub definition: u32,
    pub encoding: u32,
    pub value: Encoding,
}
layout!(QuantizeParams, 40, definition @ 0, encoding @ 4, value @ 8);

impl QuantizeParams {
    /// Not quantised.
    pub const NONE: Self =
        Self { definition: UNDEFINED, encoding: UNDEFINED, value: Encoding { opaque: [0; 4] } };
}

/// A tensor of version 1 or 2. Version 1 ends before `is_dynamic`; arrays step by the whole.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    pub version: u32,
    pub _reserved: u32,
    pub id: u32,
    pub name: *const c_char,
    pub kind: u32,
    pub data_format: u32,
    pub data_type: u32,
    pub quantize: QuantizeParams,
    pub rank: u32,
    pub dimensions: *const u32,
    pub mem_type: u32,
    pub data: *mut c_void,
    pub data_size: u32,
    pub is_dynamic: *const u8,
    pub sparse: [u32; 3],
    pub is_produced: u8,
}
layout!(
    Tensor, 144, version @ 0, id @ 8, name @ 16, kind @ 24, data_format @ 28, data_type @ 32,
    quantize @ 40, rank @ 80, dimensions @ 88, mem_type @ 96, data @ 104, data_size @ 112,
    is_dynamic @ 120, sparse @ 128, is_produced @ 140,
);

// Registered memory -----------------------------------------------------------------------------

/// Kind of a [`MemDescriptor`]: `value.fd` is a buffer that holds one tensor.
pub const MEM_ION: u32 = 1;
/// Kind of a [`MemDescriptor`]: `value.custom` leads to a backend's own structure, for HTP a
/// [`HtpMemDescriptor`].
pub const MEM_CUSTOM: u32 = 2;
/// Kind of a [`MemDescriptor`]: `value.dma_buf` is a DMA buffer with its mapping.
pub const MEM_DMA_BUF: u32 = 3;

/// Part of a process's memory that the DSP is to see, for one tensor.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemDescriptor {
    pub rank: u32,
    pub dimensions: *const u32,
    pub shape_config: *const c_void,
    pub data_type: u32,
    pub mem_type: u32,
    pub value: MemValue,
}
layout!(
    MemDescriptor, 48, rank @ 0, dimensions @ 8, shape_config @ 16, data_type @ 24, mem_type @ 28,
    value @ 32,
);

/// Value of a [`MemDescriptor`]; its kind says which member is set.
#[repr(C)]
#[derive(Clone, Copy)]
pub union MemValue {
    pub fd: i32,
    pub custom: *const HtpMemDescriptor,
    pub dma_buf: DmaBuf,
}

/// A DMA buffer and where it is mapped.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DmaBuf {
    pub fd: i32,
    pub data: *mut c_void,
}
layout!(DmaBuf, 16, fd @ 0, data @ 8);

// Ops -------------------------------------------------------------------------------------------

pub const OP_CONFIG_V1: u32 = 1;
pub const PARAM_SCALAR: u32 = 0;
pub const PARAM_TENSOR: u32 = 1;

/// Value of a scalar parameter; the data type says which member is set.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ScalarValue {
    pub f32: f32,
    pub u32: u32,
    pub i32: i32,
    pub bool: u8,
    pub string: *const c_char,
    pub bits: u64,
}

/// A scalar parameter.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Scalar {
    pub data_type: u32,
    pub value: ScalarValue,
}
layout!(Scalar, 16, data_type @ 0, value @ 8);

/// Value of a parameter; the kind says which member is set.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ParamValue {
    pub scalar: Scalar,
    pub tensor: Tensor,
}

/// A named parameter of a node, of kind [`PARAM_SCALAR`] or [`PARAM_TENSOR`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Param {
    pub kind: u32,
    pub name: *const c_char,
    pub value: ParamValue,
}
layout!(Param, 160, kind @ 0, name @ 8, value @ 16);

/// Passed by value to `graphAddNode`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct OpConfig {
    pub version: u32,
    pub name: *const c_char,
    pub package: *const c_char,
    pub op_type: *const c_char,
    pub param_count: u32,
    pub params: *const Param,
    pub input_count: u32,
    pub inputs: *const Tensor,
    pub output_count: u32,
    pub outputs: *const Tensor,
}
layout!(
    OpConfig, 80, version @ 0, name @ 8, package @ 16, op_type @ 24, param_count @ 32,
    params @ 40, input_count @ 48, inputs @ 56, output_count @ 64, outputs @ 72,
);

// Configurations --------------------------------------------------------------------------------

/// `{option, pointer or number}`: the shape of context, graph and device configurations. Lists of
/// them are NULL-terminated arrays of pointers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Config {
    pub option: u32,
    pub value: ConfigValue,
}
layout!(Config, 16, option @ 0, value @ 8);

/// Value of a [`Config`]; the option says which member is set.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ConfigValue {
    pub pointer: *const c_void,
    pub number: u64,
    pub word: u32,
}

/// Option of every configuration list that carries a backend's own structure.
pub const CONFIG_CUSTOM: u32 = 0;
/// Option of a context: `number` is one of the `PRIORITY_*`.
pub const CONTEXT_PRIORITY: u32 = 1;

pub const PRIORITY_LOW: u32 = 0;
pub const PRIORITY_NORMAL: u32 = 100;
pub const PRIORITY_NORMAL_HIGH: u32 = 150;
pub const PRIORITY_HIGH: u32 = 200;

// Context binaries ------------------------------------------------------------------------------

/// Description of a context binary by the system library; `version` says which member of `body` is set.
#[repr(C)]
pub struct BinaryInfo {
    pub version: u32,
    pub body: BinaryInfoBody,
}
layout!(BinaryInfo, 144, version @ 0, body @ 8);

/// Body of a [`BinaryInfo`]: `v1` for versions 1 and 2, `v3` for version 3.
#[repr(C)]
pub union BinaryInfoBody {
    pub v1: BinaryInfoV1,
    pub v3: BinaryInfoV3,
}

/// Versions 1 and 2; version 2 adds `platform`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BinaryInfoV1 {
    pub backend_id: u32,
    pub build_id: *const c_char,
    pub core: Version,
    pub backend: Version,
    pub soc: *const c_char,
    pub hw_info_version: Version,
    pub blob_version: Version,
    pub hw_info_size: u64,
    pub hw_info: *const c_void,
    pub blob_size: u64,
    pub tensor_count: u32,
    pub tensors: *const Tensor,
    pub graph_count: u32,
    pub graphs: *const GraphInfo,
    pub platform: *const c_void,
}
layout!(
    BinaryInfoV1, 136, backend_id @ 0, build_id @ 8, core @ 16, backend @ 28, soc @ 40,
    hw_info_version @ 48, blob_version @ 60, hw_info_size @ 72, hw_info @ 80, blob_size @ 88,
    tensor_count @ 96, tensors @ 104, graph_count @ 112, graphs @ 120, platform @ 128,
);

/// Version 3: with metadata of the backend, for HTP a [`ContextBlob`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BinaryInfoV3 {
    pub backend_id: u32,
    pub build_id: *const c_char,
    pub core: Version,
    pub backend: Version,
    pub soc: *const c_char,
    pub blob_version: Version,
    pub blob_size: u64,
    pub tensor_count: u32,
    pub tensors: *const Tensor,
    pub graph_count: u32,
    pub graphs: *const GraphInfo,
    pub platform: *const c_void,
    pub metadata_size: u32,
    pub metadata: *const c_void,
    pub soc_model: u32,
}
layout!(
    BinaryInfoV3, 136, backend_id @ 0, build_id @ 8, core @ 16, backend @ 28, soc @ 40,
    blob_version @ 48, blob_size @ 64, tensor_count @ 72, tensors @ 80, graph_count @ 88,
    graphs @ 96, platform @ 104, metadata_size @ 112, metadata @ 120, soc_model @ 128,
);

/// One graph of a binary, versions 1 to 3. Only version 3 has the blob.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GraphInfo {
    pub version: u32,
    pub name: *const c_char,
    pub input_count: u32,
    pub inputs: *const Tensor,
    pub output_count: u32,
    pub outputs: *const Tensor,
    pub updatable_count: u32,
    pub updatable: *const Tensor,
    pub blob_size: u32,
    pub blob: *const c_void,
    pub start_op: u32,
    pub end_op: u32,
}
layout!(
    GraphInfo, 88, version @ 0, name @ 8, input_count @ 16, inputs @ 24, output_count @ 32,
    outputs @ 40, updatable_count @ 48, updatable @ 56, blob_size @ 64, blob @ 72, start_op @ 80,
    end_op @ 84,
);

// Log -------------------------------------------------------------------------------------------

/// Levels of the log: this one logs failures, each higher number more.
pub const LOG_ERROR: u32 = 1;

// Profile ---------------------------------------------------------------------------------------

/// Level of a profile: times of whole calls.
pub const PROFILE_BASIC: u32 = 1;
/// Level of a profile: also the cycles of every node.
pub const PROFILE_DETAILED: u32 = 2;

pub const UNIT_MICROSECONDS: u32 = 1;
pub const UNIT_BYTES: u32 = 2;
pub const UNIT_CYCLES: u32 = 3;
pub const UNIT_COUNT: u32 = 4;

/// One measurement of a profile.
#[repr(C)]
pub struct EventData {
    pub kind: u32,
    pub unit: u32,
    pub value: u64,
    pub identifier: *const c_char,
}
layout!(EventData, 24, kind @ 0, unit @ 4, value @ 8, identifier @ 16);

// Platform --------------------------------------------------------------------------------------

/// The machine's devices.
#[repr(C)]
pub struct PlatformInfo {
    pub version: u32,
    pub _reserved: u32,
    pub device_count: u32,
    pub devices: *const HardwareDevice,
}
layout!(PlatformInfo, 24, version @ 0, device_count @ 8, devices @ 16);

/// One device of the machine.
#[repr(C)]
pub struct HardwareDevice {
    pub version: u32,
    pub _reserved: u32,
    pub id: u32,
    pub kind: u32,
    pub core_count: u32,
    pub cores: *const c_void,
    pub extension: *const HtpDeviceExtension,
}
layout!(
    HardwareDevice, 40, version @ 0, id @ 8, kind @ 12, core_count @ 16, cores @ 24, extension @ 32,
);
