//! Structures of the HTP backend: custom configurations, metadata blobs, power.

use std::ffi::{c_char, c_void};

use crate::{Scalar, Status, structures};

// Device ----------------------------------------------------------------------------------------

pub const DEVICE_SOC: u32 = 0;
pub const DEVICE_ARCH: u32 = 1;
/// From this minor version of the backend interface on, the union lies at byte 8.
pub const DEVICE_WIDE_SINCE: u32 = 47;

structures! {
    /// Device configuration up to backend interface 5.46: the union lies at byte 4.
    pub struct DeviceConfigNarrow: 12 {
        0 => pub option: u32,
        4 => pub value: [u32; 2],
    }

    /// Device configuration from backend interface 5.47 on: the union lies at byte 8.
    #[repr(align(8))]
    pub struct DeviceConfigWide: 16 {
        0 => pub option: u32,
        4 => pub _reserved: u32,
        8 => pub value: [u32; 2],
    }

    /// HTP's description of a device.
    pub struct HtpDeviceExtension: 32 {
        0 => pub kind: u32,
        8 => pub vtcm_mb: u64,
        16 => pub soc: u32,
        20 => pub signed_pd: u8,
        21 => pub dlbc: u8,
        24 => pub arch: u32,
    }
}

// Context ---------------------------------------------------------------------------------------

pub const HTP_CONTEXT_WEIGHT_SHARING: u32 = 1;
/// The values are the context that has the group's spill-fill buffer, 0 for itself, and its bytes.
pub const HTP_CONTEXT_GROUP: u32 = 2;
pub const HTP_CONTEXT_FILE_READ_BUDGET: u32 = 3;
pub const HTP_CONTEXT_EXTENDED_UDMA: u32 = 11;

structures! {
    /// An option of a context: one of the `HTP_CONTEXT_*`.
    pub struct HtpContextConfig: 24 {
        0 => pub option: u32,
        8 => pub value: [u64; 2],
    }
}

// Graph -----------------------------------------------------------------------------------------

pub const HTP_GRAPH_OPTIMIZATION: u32 = 1;
pub const HTP_GRAPH_VTCM_MB: u32 = 3;
pub const HTP_GRAPH_HVX_THREADS: u32 = 6;
pub const HTP_GRAPH_FINALIZE: u32 = 7;

/// Kind of [`HTP_GRAPH_OPTIMIZATION`]: the effort of finalisation, 1 to 3.
pub const OPTIMIZATION_LEVEL: u32 = 3;

structures! {
    /// An option of a graph: one of the `HTP_GRAPH_*`.
    pub struct HtpGraphConfig: 56 {
        0 => pub option: u32,
        8 => pub value: HtpGraphValue,
    }
}

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

structures! {
    /// An optimisation of the graph compiler and how much of it.
    pub struct Optimization: 8 {
        0 => pub kind: u32,
        4 => pub value: f32,
    }

    /// A key of the graph compiler with its value.
    pub struct FinalizeEntry: 24 {
        0 => pub key: *const c_char,
        8 => pub value: Scalar,
    }
}

// Metadata of binaries --------------------------------------------------------------------------

structures! {
    /// Metadata of one graph. Older libraries write less: compare the blob's size with the end of a
    /// field before reading it.
    pub struct GraphBlob: 112 {
        0 => pub version: u32,
        8 => pub spill_fill: u64,
        16 => pub vtcm: u32,
        20 => pub optimization: u32,
        24 => pub dlbc: u8,
        32 => pub hvx_threads: u64,
        40 => pub version2: u32,
        48 => pub native_k: u64,
        56 => pub native_v: u64,
        64 => pub safe_share_io: u32,
        72 => pub io_tensors: u64,
        80 => pub op_data: u64,
        88 => pub constants: u64,
        96 => pub ddr_tensors: u64,
        104 => pub shared_weights: u64,
    }

    /// Metadata of a context.
    pub struct ContextBlob: 8 {
        0 => pub version: u32,
        4 => pub dsp_arch: u32,
    }
}

// Registered memory -----------------------------------------------------------------------------

/// Kind of a [`HtpMemDescriptor`]: a place in a buffer that holds many tensors.
pub const HTP_MEM_SHARED_BUFFER: u32 = 1;

structures! {
    /// Position of a tensor in a shared buffer. `size` is that of the whole buffer.
    pub struct HtpMemDescriptor: 32 {
        0 => pub kind: u32,
        8 => pub size: u64,
        16 => pub fd: i32,
        24 => pub offset: u64,
    }
}

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

structures! {
    /// Infrastructure that `deviceGetInfrastructure` returns for HTP.
    pub struct Infrastructure: 40 {
        0 => pub kind: u32,
        8 => pub create_power_config: Option<unsafe extern "C" fn(u32, u32, *mut u32) -> Status>,
        16 => pub destroy_power_config: Option<unsafe extern "C" fn(u32) -> Status>,
        24 => pub set_power_config: Option<unsafe extern "C" fn(u32, *const *const PowerConfig) -> Status>,
        32 => pub set_memory_config: Option<unsafe extern "C" fn(u32, u32, *const *const c_void) -> Status>,
    }

    /// An option of a clock vote: one of the `POWER_*`.
    pub struct PowerConfig: 68 {
        0 => pub option: u32,
        4 => pub value: PowerValue,
    }
}

/// Value of a [`PowerConfig`]; the option says which member is set.
#[repr(C)]
#[derive(Clone, Copy)]
pub union PowerValue {
    pub word: u32,
    pub dcvs: DcvsV3,
    pub opaque: [u32; 16],
}

structures! {
    /// Dynamic clock and voltage scaling, version 3.
    pub struct DcvsV3: 64 {
        0 => pub context: u32,
        4 => pub set_enable: u32,
        8 => pub enable: u32,
        12 => pub mode: u32,
        16 => pub set_sleep_latency: u32,
        20 => pub sleep_latency: u32,
        24 => pub set_sleep_disable: u32,
        28 => pub sleep_disable: u32,
        32 => pub set_bus: u32,
        36 => pub bus_min: u32,
        40 => pub bus_target: u32,
        44 => pub bus_max: u32,
        48 => pub set_core: u32,
        52 => pub core_min: u32,
        56 => pub core_target: u32,
        60 => pub core_max: u32,
    }
}
