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

/// Defines structures of the C interface, and asserts their sizes and the offsets of their fields at compile time.
macro_rules! structures {
    ($(
        $(#[$attribute:meta])*
        pub struct $name:ident: $size:literal { $($offset:literal => pub $field:ident: $type:ty,)* }
    )*) => {$(
        $(#[$attribute])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct $name {
            $(pub $field: $type,)*
        }

        const _: () = {
            assert!(size_of::<$name>() == $size);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
    )*};
}
pub(crate) use structures;

structures! {
    /// Version of an interface or a format.
    pub struct Version: 12 {
        0 => pub major: u32,
        4 => pub minor: u32,
        8 => pub patch: u32,
    }
}

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

structures! {
    /// Head of a provider of libQnnHtp; the function table follows.
    pub struct Provider: 40 {
        0 => pub backend_id: u32,
        8 => pub name: *const c_char,
        16 => pub core: Version,
        28 => pub backend: Version,
        40 => pub table: [*const c_void; 0],
    }

    /// Head of a provider of libQnnSystem; the function table follows.
    pub struct SystemProvider: 32 {
        0 => pub backend_id: u32,
        8 => pub name: *const c_char,
        16 => pub api: Version,
        32 => pub table: [*const c_void; 0],
    }
}

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
/// `value` holds a pointer to a [`BlockExpansion`].
pub const ENCODING_BLOCK_EXPANSION: u32 = 5;
/// `value` holds a [`BwFloatBlock`].
pub const ENCODING_BW_FLOAT_BLOCK: u32 = 11;

structures! {
    /// Encoding of a whole tensor, or of one index along an axis: real = (q + offset) · scale.
    pub struct ScaleOffset: 8 {
        0 => pub scale: f32,
        4 => pub offset: i32,
    }

    /// Encoding with one [`ScaleOffset`] for each index along `axis`.
    pub struct AxisScaleOffset: 16 {
        0 => pub axis: i32,
        4 => pub count: u32,
        8 => pub values: *const ScaleOffset,
    }

    /// Encoding of a whole tensor whose integers have `bitwidth` bits.
    pub struct BwScaleOffset: 12 {
        0 => pub bitwidth: u32,
        4 => pub scale: f32,
        8 => pub offset: i32,
    }

    /// Encoding by axis of integers of `bitwidth` bits; `offsets` is NULL where all are 0.
    pub struct BwAxisScaleOffset: 32 {
        0 => pub bitwidth: u32,
        4 => pub axis: i32,
        8 => pub count: u32,
        16 => pub scales: *const f32,
        24 => pub offsets: *const i32,
    }

    /// Encoding of one block, whose offset need not be whole: real = (q + offset) · scale.
    pub struct FloatScaleOffset: 8 {
        0 => pub scale: f32,
        4 => pub offset: f32,
    }

    /// Encoding by blocks of integers of `bitwidth` bits: `block` is the shape of a block, one number for each dimension,
    /// and `values` are those of the blocks in row-major order.
    pub struct BwFloatBlock: 24 {
        0 => pub bitwidth: u32,
        8 => pub block: *const u32,
        16 => pub values: *const FloatScaleOffset,
    }

    /// Encoding of integers of `bitwidth` bits, −8 to 7 for 4, by blocks along the axis before `axis`: those of a block
    /// times its multiple, 1 to 16, times the scale of the channel along `axis`. `multiples` has the `blocks` of each
    /// channel, one channel behind the other.
    pub struct BlockExpansion: 40 {
        0 => pub axis: i32,
        8 => pub channels: *const ScaleOffset,
        16 => pub blocks: u32,
        20 => pub bitwidth: u32,
        24 => pub kind: u32,
        32 => pub multiples: *const u8,
    }
}

/// Encodings that qhx does not interpret keep their bytes in `opaque`.
#[repr(C)]
#[derive(Clone, Copy)]
pub union Encoding {
    pub scale_offset: ScaleOffset,
    pub axis: AxisScaleOffset,
    pub bw: BwScaleOffset,
    pub bw_axis: BwAxisScaleOffset,
    pub bw_float_block: BwFloatBlock,
    pub block_expansion: *const BlockExpansion,
    pub opaque: [u64; 4],
}

structures! {
    /// Quantization of a tensor: `encoding` says which member of `value` is set, where `definition` is [`QUANT_DEFINED`].
    pub struct QuantizeParams: 40 {
        0 => pub definition: u32,
        4 => pub encoding: u32,
        8 => pub value: Encoding,
    }
}

impl QuantizeParams {
    /// Not quantised.
    pub const NONE: Self =
        Self { definition: UNDEFINED, encoding: UNDEFINED, value: Encoding { opaque: [0; 4] } };
}

structures! {
    /// A tensor of version 1 or 2. Version 1 ends before `is_dynamic`; arrays step by the whole.
    pub struct Tensor: 144 {
        0 => pub version: u32,
        4 => pub _reserved: u32,
        8 => pub id: u32,
        16 => pub name: *const c_char,
        24 => pub kind: u32,
        28 => pub data_format: u32,
        32 => pub data_type: u32,
        40 => pub quantize: QuantizeParams,
        80 => pub rank: u32,
        88 => pub dimensions: *const u32,
        96 => pub mem_type: u32,
        104 => pub data: *mut c_void,
        112 => pub data_size: u32,
        120 => pub is_dynamic: *const u8,
        128 => pub sparse: [u32; 3],
        140 => pub is_produced: u8,
    }
}

impl Tensor {
    /// A tensor of version 1, without name, shape and data.
    pub const V1: Self = Self {
        version: TENSOR_V1,
        _reserved: 0,
        id: 0,
        name: std::ptr::null(),
        kind: TENSOR_APP_WRITE,
        data_format: 0,
        data_type: UNDEFINED,
        quantize: QuantizeParams::NONE,
        rank: 0,
        dimensions: std::ptr::null(),
        mem_type: MEM_RAW,
        data: std::ptr::null_mut(),
        data_size: 0,
        is_dynamic: std::ptr::null(),
        sparse: [0; 3],
        is_produced: 0,
    };
}

// Registered memory -----------------------------------------------------------------------------

/// Kind of a [`MemDescriptor`]: `value.fd` is a buffer that holds one tensor.
pub const MEM_ION: u32 = 1;
/// Kind of a [`MemDescriptor`]: `value.custom` leads to a backend's own structure, for HTP a
/// [`HtpMemDescriptor`].
pub const MEM_CUSTOM: u32 = 2;
/// Kind of a [`MemDescriptor`]: `value.dma_buf` is a DMA buffer with its mapping.
pub const MEM_DMA_BUF: u32 = 3;

structures! {
    /// Part of a process's memory that the DSP is to see, for one tensor.
    pub struct MemDescriptor: 48 {
        0 => pub rank: u32,
        8 => pub dimensions: *const u32,
        16 => pub shape_config: *const c_void,
        24 => pub data_type: u32,
        28 => pub mem_type: u32,
        32 => pub value: MemValue,
    }
}

/// Value of a [`MemDescriptor`]; its kind says which member is set.
#[repr(C)]
#[derive(Clone, Copy)]
pub union MemValue {
    pub fd: i32,
    pub custom: *const HtpMemDescriptor,
    pub dma_buf: DmaBuf,
}

structures! {
    /// A DMA buffer and where it is mapped.
    pub struct DmaBuf: 16 {
        0 => pub fd: i32,
        8 => pub data: *mut c_void,
    }
}

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

structures! {
    /// A scalar parameter.
    pub struct Scalar: 16 {
        0 => pub data_type: u32,
        8 => pub value: ScalarValue,
    }
}

/// Value of a parameter; the kind says which member is set.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ParamValue {
    pub scalar: Scalar,
    pub tensor: Tensor,
}

structures! {
    /// A named parameter of a node, of kind [`PARAM_SCALAR`] or [`PARAM_TENSOR`].
    pub struct Param: 160 {
        0 => pub kind: u32,
        8 => pub name: *const c_char,
        16 => pub value: ParamValue,
    }

    /// Passed by value to `graphAddNode`.
    pub struct OpConfig: 80 {
        0 => pub version: u32,
        8 => pub name: *const c_char,
        16 => pub package: *const c_char,
        24 => pub op_type: *const c_char,
        32 => pub param_count: u32,
        40 => pub params: *const Param,
        48 => pub input_count: u32,
        56 => pub inputs: *const Tensor,
        64 => pub output_count: u32,
        72 => pub outputs: *const Tensor,
    }
}

// Configurations --------------------------------------------------------------------------------

structures! {
    /// `{option, pointer or number}`: the shape of context, graph and device configurations. Lists of
    /// them are NULL-terminated arrays of pointers.
    pub struct Config: 16 {
        0 => pub option: u32,
        8 => pub value: ConfigValue,
    }
}

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

structures! {
    /// Description of a context binary by the system library; `version` says which member of `body` is set.
    pub struct BinaryInfo: 144 {
        0 => pub version: u32,
        8 => pub body: BinaryInfoBody,
    }
}

/// Body of a [`BinaryInfo`]: `v1` for versions 1 and 2, `v3` for version 3.
#[repr(C)]
#[derive(Clone, Copy)]
pub union BinaryInfoBody {
    pub v1: BinaryInfoV1,
    pub v3: BinaryInfoV3,
}

structures! {
    /// Versions 1 and 2; version 2 adds `platform`.
    pub struct BinaryInfoV1: 136 {
        0 => pub backend_id: u32,
        8 => pub build_id: *const c_char,
        16 => pub core: Version,
        28 => pub backend: Version,
        40 => pub soc: *const c_char,
        48 => pub hw_info_version: Version,
        60 => pub blob_version: Version,
        72 => pub hw_info_size: u64,
        80 => pub hw_info: *const c_void,
        88 => pub blob_size: u64,
        96 => pub tensor_count: u32,
        104 => pub tensors: *const Tensor,
        112 => pub graph_count: u32,
        120 => pub graphs: *const GraphInfo,
        128 => pub platform: *const c_void,
    }

    /// Version 3: with metadata of the backend, for HTP a [`ContextBlob`].
    pub struct BinaryInfoV3: 136 {
        0 => pub backend_id: u32,
        8 => pub build_id: *const c_char,
        16 => pub core: Version,
        28 => pub backend: Version,
        40 => pub soc: *const c_char,
        48 => pub blob_version: Version,
        64 => pub blob_size: u64,
        72 => pub tensor_count: u32,
        80 => pub tensors: *const Tensor,
        88 => pub graph_count: u32,
        96 => pub graphs: *const GraphInfo,
        104 => pub platform: *const c_void,
        112 => pub metadata_size: u32,
        120 => pub metadata: *const c_void,
        128 => pub soc_model: u32,
    }

    /// One graph of a binary, versions 1 to 3. Only version 3 has the blob.
    pub struct GraphInfo: 88 {
        0 => pub version: u32,
        8 => pub name: *const c_char,
        16 => pub input_count: u32,
        24 => pub inputs: *const Tensor,
        32 => pub output_count: u32,
        40 => pub outputs: *const Tensor,
        48 => pub updatable_count: u32,
        56 => pub updatable: *const Tensor,
        64 => pub blob_size: u32,
        72 => pub blob: *const c_void,
        80 => pub start_op: u32,
        84 => pub end_op: u32,
    }
}

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

structures! {
    /// One measurement of a profile.
    pub struct EventData: 24 {
        0 => pub kind: u32,
        4 => pub unit: u32,
        8 => pub value: u64,
        16 => pub identifier: *const c_char,
    }
}

// Platform --------------------------------------------------------------------------------------

structures! {
    /// The machine's devices.
    pub struct PlatformInfo: 24 {
        0 => pub version: u32,
        4 => pub _reserved: u32,
        8 => pub device_count: u32,
        16 => pub devices: *const HardwareDevice,
    }

    /// One device of the machine.
    pub struct HardwareDevice: 40 {
        0 => pub version: u32,
        4 => pub _reserved: u32,
        8 => pub id: u32,
        12 => pub kind: u32,
        16 => pub core_count: u32,
        24 => pub cores: *const c_void,
        32 => pub extension: *const HtpDeviceExtension,
    }
}
