//! The C interface of the QNN libraries: layouts and numbers, no logic.
//!
//! Every structure that crosses the boundary has its size and offsets asserted at compile time.
//! The definitions hold for 64-bit targets, the only ones the libraries exist for.

mod htp;
mod table;

use std::ffi::{c_char, c_void};

pub(crate) use htp::*;
pub(crate) use table::*;

/// What every function answers with; the code is in the low 16 bits, 0 is success.
pub(crate) type Status = u64;
/// A handle. The library hands out small integers; NULL is none.
pub(crate) type Handle = *mut c_void;

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

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}
layout!(Version, 12, major @ 0, minor @ 4, patch @ 8);

/// Head of a provider of libQnnHtp; the function table follows.
#[repr(C)]
pub(crate) struct Provider {
    pub backend_id: u32,
    pub name: *const c_char,
    pub core: Version,
    pub backend: Version,
    pub table: [*const c_void; 0],
}
layout!(Provider, 40, backend_id @ 0, name @ 8, core @ 16, backend @ 28, table @ 40);

/// Head of a provider of libQnnSystem; the function table follows.
#[repr(C)]
pub(crate) struct SystemProvider {
    pub backend_id: u32,
    pub name: *const c_char,
    pub api: Version,
    pub table: [*const c_void; 0],
}
layout!(SystemProvider, 32, backend_id @ 0, name @ 8, api @ 16, table @ 32);

// Tensors ---------------------------------------------------------------------------------------

pub(crate) const TENSOR_V1: u32 = 1;

pub(crate) const TENSOR_APP_WRITE: u32 = 0;
pub(crate) const TENSOR_APP_READ: u32 = 1;
pub(crate) const TENSOR_NATIVE: u32 = 3;
pub(crate) const TENSOR_STATIC: u32 = 4;

pub(crate) const MEM_RAW: u32 = 0;

pub(crate) const QUANT_DEFINED: u32 = 1;
pub(crate) const UNDEFINED: u32 = 0x7fff_ffff;

pub(crate) const ENCODING_SCALE_OFFSET: u32 = 0;
pub(crate) const ENCODING_AXIS_SCALE_OFFSET: u32 = 1;
pub(crate) const ENCODING_BW_SCALE_OFFSET: u32 = 2;
pub(crate) const ENCODING_BW_AXIS_SCALE_OFFSET: u32 = 3;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ScaleOffset {
    pub scale: f32,
    pub offset: i32,
}
layout!(ScaleOffset, 8, scale @ 0, offset @ 4);

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AxisScaleOffset {
    pub axis: i32,
    pub count: u32,
    pub values: *const ScaleOffset,
}
layout!(AxisScaleOffset, 16, axis @ 0, count @ 4, values @ 8);

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BwScaleOffset {
    pub bitwidth: u32,
    pub scale: f32,
    pub offset: i32,
}
layout!(BwScaleOffset, 12, bitwidth @ 0, scale @ 4, offset @ 8);

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BwAxisScaleOffset {
    pub bitwidth: u32,
    pub axis: i32,
    pub count: u32,
    pub scales: *const f32,
    pub offsets: *const i32,
}
layout!(BwAxisScaleOffset, 32, bitwidth @ 0, axis @ 4, count @ 8, scales @ 16, offsets @ 24);

/// Encodings that qhx does not interpret keep their bytes in `opaque`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union Encoding {
    pub scale_offset: ScaleOffset,
    pub axis: AxisScaleOffset,
    pub bw: BwScaleOffset,
    pub bw_axis: BwAxisScaleOffset,
    pub opaque: [u64; 4],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct QuantizeParams {
    pub definition: u32,
    pub encoding: u32,
    pub value: Encoding,
}
layout!(QuantizeParams, 40, definition @ 0, encoding @ 4, value @ 8);

impl QuantizeParams {
    pub(crate) const NONE: Self =
        Self { definition: UNDEFINED, encoding: UNDEFINED, value: Encoding { opaque: [0; 4] } };
}

/// A tensor of version 1 or 2. Version 1 ends before `is_dynamic`; arrays step by the whole.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Tensor {
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

// Ops -------------------------------------------------------------------------------------------

pub(crate) const OP_CONFIG_V1: u32 = 1;
pub(crate) const PARAM_SCALAR: u32 = 0;
pub(crate) const PARAM_TENSOR: u32 = 1;

pub(crate) const TYPE_STRING: u32 = 0x608;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union ScalarValue {
    pub f32: f32,
    pub u32: u32,
    pub i32: i32,
    pub bool: u8,
    pub string: *const c_char,
    pub bits: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Scalar {
    pub data_type: u32,
    pub value: ScalarValue,
}
layout!(Scalar, 16, data_type @ 0, value @ 8);

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union ParamValue {
    pub scalar: Scalar,
    pub tensor: Tensor,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Param {
    pub kind: u32,
    pub name: *const c_char,
    pub value: ParamValue,
}
layout!(Param, 160, kind @ 0, name @ 8, value @ 16);

/// Passed by value to `graphAddNode`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct OpConfig {
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
pub(crate) struct Config {
    pub option: u32,
    pub value: ConfigValue,
}
layout!(Config, 16, option @ 0, value @ 8);

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union ConfigValue {
    pub pointer: *const c_void,
    pub number: u64,
    pub word: u32,
}

/// Option of every configuration list that carries a backend's own structure.
pub(crate) const CONFIG_CUSTOM: u32 = 0;
pub(crate) const CONTEXT_PRIORITY: u32 = 1;

// Context binaries ------------------------------------------------------------------------------

#[repr(C)]
pub(crate) struct BinaryInfo {
    pub version: u32,
    pub body: BinaryInfoBody,
}
layout!(BinaryInfo, 144, version @ 0, body @ 8);

#[repr(C)]
pub(crate) union BinaryInfoBody {
    pub v1: BinaryInfoV1,
    pub v3: BinaryInfoV3,
}

/// Versions 1 and 2; version 2 adds `platform`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BinaryInfoV1 {
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

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BinaryInfoV3 {
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
pub(crate) struct GraphInfo {
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

// Profile ---------------------------------------------------------------------------------------

#[repr(C)]
pub(crate) struct EventData {
    pub kind: u32,
    pub unit: u32,
    pub value: u64,
    pub identifier: *const c_char,
}
layout!(EventData, 24, kind @ 0, unit @ 4, value @ 8, identifier @ 16);

// Platform --------------------------------------------------------------------------------------

#[repr(C)]
pub(crate) struct PlatformInfo {
    pub version: u32,
    pub _reserved: u32,
    pub device_count: u32,
    pub devices: *const HardwareDevice,
}
layout!(PlatformInfo, 24, version @ 0, device_count @ 8, devices @ 16);

#[repr(C)]
pub(crate) struct HardwareDevice {
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
