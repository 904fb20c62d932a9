//! Structures of the HTP backend: custom configurations, metadata blobs, power.

use std::ffi::{c_char, c_void};

use crate::{Scalar, Status, layout};

// Device ----------------------------------------------------------------------------------------

pub const DEVICE_SOC: u32 = 0;
pub const DEVICE_ARCH: u32 = 1;
/// From this minor version of the backend interface on, the union lies at byte 8.
pub const DEVICE_WIDE_SINCE: u32 = 47;

/// Device configuration up to backend interface 5.46: the union lies at byte 4.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceConfigNarrow {
    pub option: u32,
    pub value: [u32; 2],
}
layout!(DeviceConfigNarrow, 12, option @ 0, value @ 4);

/// Device configuration from backend interface 5.47 on: the union lies at byte 8.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct DeviceConfigWide {
    pub option: u32,
    pub _reserved: u32,
    pub value: [u32; 2],
}
layout!(DeviceConfigWide, 16, option @ 0, value @ 8);

/// HTP's description of a device.
#[repr(C)]
pub struct HtpDeviceExtension {
    pub kind: u32,
    pub vtcm_mb: u64,
    pub soc: u32,
    pub signed_pd: u8,
    pub dlbc: u8,
    pub arch: u32,
}
layout!(
    HtpDeviceExtension, 32, kind @ 0, vtcm_mb @ 8, soc @ 16, signed_pd @ 20, dlbc @ 21, arch @ 24,
);

// Context ---------------------------------------------------------------------------------------

pub const HTP_CONTEXT_WEIGHT_SHARING: u32 = 1;
/// The values are the context that has the group's spill-fill buffer, 0 for itself, and its bytes.
pub const HTP_CONTEXT_GROUP: u32 = 2;
pub const HTP_CONTEXT_FILE_READ_BUDGET: u32 = 3;
pub const HTP_CONTEXT_EXTENDED_UDMA: u32 = 11;

/// An option of a context: one of the `HTP_CONTEXT_*`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HtpContextConfig {
    pub option: u32,
    pub value: [u64; 2],
}
layout!(HtpContextConfig, 24, option @ 0, value @ 8);

// Graph -----------------------------------------------------------------------------------------

pub const HTP_GRAPH_OPTIMIZATION: u32 = 1;
pub const HTP_GRAPH_VTCM_MB: u32 = 3;
pub const HTP_GRAPH_HVX_THREADS: u32 = 6;
pub const HTP_GRAPH_FINALIZE: u32 = 7;

/// Kind of [`HTP_GRAPH_OPTIMIZATION`]: the effort of finalisation, 1 to 3.
pub const OPTIMIZATION_LEVEL: u32 = 3;

/// An option of a graph: one of the `HTP_GRAPH_*`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HtpGraphConfig {
    pub option: u32,
    pub value: HtpGraphValue,
}
layout!(HtpGraphConfig, 56, option @ 0, value @ 8);

/// Value of a [`HtpGraphConfig`]; the option says which member is set.
#[repr(C)]
#[derive(Clone, Copy)]
pub union HtpGraphValue {
    pub word: u32,
    pub number: u64,
    pub optimization: Optimization,
    pub finalize: FinalizeEntry,
    pub opaque: [u64; 6],
}

/// An optimisation of the graph compiler and how much of it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Optimization {
    pub kind: u32,
    pub value: f32,
}
layout!(Optimization, 8, kind @ 0, value @ 4);

/// A key of the graph compiler with its value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FinalizeEntry {
    pub key: *const c_char,
    pub value: Scalar,
}
layout!(FinalizeEntry, 24, key @ 0, value @ 8);

// Metadata of binaries --------------------------------------------------------------------------

/// Metadata of one graph. Older libraries write less: compare the blob's size with the end of a
/// field before reading it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GraphBlob {
    pub version: u32,
    pub spill_fill: u64,
    pub vtcm: u32,
    pub optimization: u32,
    pub dlbc: u8,
    pub hvx_threads: u64,
    pub version2: u32,
    pub native_k: u64,
    pub native_v: u64,
    pub safe_share_io: u32,
    pub io_tensors: u64,
    pub op_data: u64,
    pub constants: u64,
    pub ddr_tensors: u64,
    pub shared_weights: u64,
}
layout!(
    GraphBlob, 112, version @ 0, spill_fill @ 8, vtcm @ 16, optimization @ 20, dlbc @ 24,
    hvx_threads @ 32, version2 @ 40, native_k @ 48, native_v @ 56, safe_share_io @ 64,
    io_tensors @ 72, op_data @ 80, constants @ 88, ddr_tensors @ 96, shared_weights @ 104,
);

/// Metadata of a context.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ContextBlob {
    pub version: u32,
    pub dsp_arch: u32,
}
layout!(ContextBlob, 8, version @ 0, dsp_arch @ 4);

// Registered memory -----------------------------------------------------------------------------

/// Kind of a [`HtpMemDescriptor`]: a place in a buffer that holds many tensors.
pub const HTP_MEM_SHARED_BUFFER: u32 = 1;

/// Position of a tensor in a shared buffer. `size` is that of the whole buffer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HtpMemDescriptor {
    pub kind: u32,
    pub size: u64,
    pub fd: i32,
    pub offset: u64,
}
layout!(HtpMemDescriptor, 32, kind @ 0, size @ 8, fd @ 16, offset @ 24);

// Power -----------------------------------------------------------------------------------------

pub const POWER_DCVS_V3: u32 = 1;
pub const POWER_RPC_LATENCY: u32 = 2;
pub const POWER_RPC_POLLING: u32 = 3;

pub const POWER_MODE_SAVER: u32 = 4;
pub const POWER_MODE_PERFORMANCE: u32 = 0x10;

// Voltage corners, from the lowest.
pub const CORNER_SVS2: u32 = 0x30;
pub const CORNER_SVS: u32 = 0x40;
pub const CORNER_SVS_PLUS: u32 = 0x50;
pub const CORNER_NOM: u32 = 0x60;
pub const CORNER_NOM_PLUS: u32 = 0x70;
pub const CORNER_TURBO: u32 = 0x80;
pub const CORNER_MAX: u32 = 0xa0;

/// Infrastructure that `deviceGetInfrastructure` returns for HTP.
#[repr(C)]
pub struct Infrastructure {
    pub kind: u32,
    pub create_power_config: Option<unsafe extern "C" fn(u32, u32, *mut u32) -> Status>,
    pub destroy_power_config: Option<unsafe extern "C" fn(u32) -> Status>,
    pub set_power_config: Option<unsafe extern "C" fn(u32, *const *const PowerConfig) -> Status>,
    pub set_memory_config: Option<unsafe extern "C" fn(u32, u32, *const *const c_void) -> Status>,
}
layout!(
    Infrastructure, 40, kind @ 0, create_power_config @ 8, destroy_power_config @ 16,
    set_power_config @ 24, set_memory_config @ 32,
);

/// An option of a clock vote: one of the `POWER_*`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PowerConfig {
    pub option: u32,
    pub value: PowerValue,
}
layout!(PowerConfig, 68, option @ 0, value @ 4);

/// Value of a [`PowerConfig`]; the option says which member is set.
#[repr(C)]
#[derive(Clone, Copy)]
pub union PowerValue {
    pub word: u32,
    pub dcvs: DcvsV3,
    pub opaque: [u32; 16],
}

/// Dynamic clock and voltage scaling, version 3.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DcvsV3 {
    pub context: u32,
    pub set_enable: u32,
    pub enable: u32,
    pub mode: u32,
    pub set_sleep_latency: u32,
    pub sleep_latency: u32,
    pub set_sleep_disable: u32,
    pub sleep_disable: u32,
    pub set_bus: u32,
    pub bus_min: u32,
    pub bus_target: u32,
    pub bus_max: u32,
    pub set_core: u32,
    pub core_min: u32,
    pub core_target: u32,
    pub core_max: u32,
}
layout!(DcvsV3, 64, context @ 0, mode @ 12, set_bus @ 32, set_core @ 48, core_max @ 60);
