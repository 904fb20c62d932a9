//! Settings of a [`Runtime`](crate::Runtime).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use qhx_base::trace::Trace;
use qhx_base::{CancelToken, names, setters};
use qhx_core::dump::Dump;
use qhx_core::op::ProgressFn;
use qhx_cpu::{Activations, Caches};
use qhx_exec::backend::Backend;
use qhx_exec::workspace::Tap;
use qhx_plugins::PluginOptions;
use qhx_qnn::{MemoryMode, PerfMode, ProfileLevel};

use crate::libraries::LibraryFiles;

/// Which backend is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackendChoice {
    /// The NPU where the QNN libraries are there and the bundle has context binaries, otherwise the CPU.
    #[default]
    Auto,
    /// The bundle's ONNX graphs on the CPU.
    Cpu,
    /// The bundle's context binaries on the NPU, or on its emulator on x86-64 Linux. Never falls back.
    Qnn,
}

names! { BackendChoice: Auto = "auto", Cpu = "cpu", Qnn = "qnn" }

/// Backend that decodes when the NPU runs prefill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecodeOn {
    /// The CPU, over the bundle's ONNX graphs.
    Cpu,
    /// The NPU as well.
    Npu,
    /// Whichever takes less time for a token on this machine with this bundle. Both are measured when the bundle is
    /// opened for the first time.
    Auto,
}

names! { DecodeOn: Auto = "auto", Cpu = "cpu", Npu = "npu" }

/// Options for the NPU.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeviceOptions {
    /// Hexagon architecture of the device, where that of the library is not to be taken: 81 for v81.
    pub arch: Option<u32>,
    /// The power mode that is voted for while the device is in use.
    pub power: PerfMode,
    /// After how long without an execution the vote is given back; `None` for never.
    pub idle_release: Option<Duration>,
    /// Kind of memory for the graphs' inputs and outputs.
    pub memory: MemoryMode,
    /// libcdsprpc, which shares memory with the NPU; the device's if it is not named.
    pub cdsprpc: Option<PathBuf>,
    /// Level of the library's profiling when there is a trace.
    pub profile: ProfileLevel,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self {
            arch: None,
            power: PerfMode::default(),
            idle_release: None,
            memory: MemoryMode::default(),
            cdsprpc: None,
            profile: ProfileLevel::Basic,
        }
    }
}

impl DeviceOptions {
    setters! {
        /// Hexagon architecture of the device: 81 for v81.
        arch(arch: impl Into<Option<u32>>) => arch = arch.into(),
        /// The power mode that is voted for while the device is in use.
        power: PerfMode,
        /// After how long without an execution the vote is given back.
        idle_release(idle_release: impl Into<Option<Duration>>) => idle_release = idle_release.into(),
        /// Kind of memory for the graphs' inputs and outputs.
        memory: MemoryMode,
        /// libcdsprpc, which shares memory with the NPU.
        cdsprpc(cdsprpc: impl Into<Option<PathBuf>>) => cdsprpc = cdsprpc.into(),
        /// Level of the library's profiling when there is a trace.
        profile: ProfileLevel,
    }
}

/// Settings of a runtime.
#[derive(Clone, Default)]
pub(crate) struct Settings {
    pub backend: BackendChoice,
    /// An open backend of the caller's, which goes before the choice.
    pub given: Option<Arc<dyn Backend>>,
    pub libraries: LibraryFiles,
    pub device: DeviceOptions,
    pub max_contexts: Option<usize>,
    pub unverified: bool,
    /// Backend that decodes; the one that runs prefill if it is `None`.
    pub decode_on: Option<DecodeOn>,
    /// The program that prepares portable bundles while the CPU answers.
    pub while_preparing: Option<PathBuf>,
    pub threads: Option<usize>,
    /// Precision that the CPU backend rounds activations to.
    pub cpu_activations: Activations,
    /// Format of the CPU backend's KV caches.
    pub cpu_caches: Caches,
    pub plugins: PluginOptions,
    pub cancel: CancelToken,
    pub progress: Option<ProgressFn>,
    /// See [`RuntimeBuilder::executed`](crate::RuntimeBuilder::executed).
    pub executed: Option<Tap>,
    pub dump: Option<Arc<Dump>>,
    pub trace: Option<Arc<Trace>>,
    /// Bytes of states of earlier conversations.
    pub keep_states: usize,
    /// Sessions take their steps together.
    pub batching: bool,
}
