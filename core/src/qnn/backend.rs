//! The backend that executes context binaries through libQnnHtp.
//!
//! A graph keeps its context alive, the context its device, backend and log. Inputs and outputs
//! are plain memory ("raw client buffers"); memory registered with the DSP becomes another storage
//! of [`crate::Buffer`] without a change here but in [`QnnGraph::bind`].
//!
//! The library checks neither the size nor the element type of the memory it is handed: all that
//! is checked here, when a graph is opened and when memory is bound to it.

#![expect(unsafe_code, reason = "executes graphs over bound memory")]

use std::ffi::{CString, c_void};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use qhx_qnn_sys::{self as sys, ScaleOffset, Status, Tensor};

use super::codes;
use super::context::{ContextConfig, ContextHandle, Priority};
use super::device::{Device, Platform, Raw, explain};
use super::gate::Shared;
use super::info::{BinaryInfo, BinaryTensor};
use super::library::Library;
use super::log::{self, LogLevel};
use super::power::{PerfMode, Power};
use super::preflight::{Destination, preflight};
use super::profile::{Profile, ProfileLevel, ProfileRecord};
use super::types;
use crate::backend::{Backend, BackendInfo, Context, ContextSource, Graph};
use crate::{Error, ErrorKind, GraphInfo, Memory, Port, Result};

/// How the backend is opened.
#[derive(Debug, Clone, Default)]
pub struct QnnOptions {
    /// libQnnHtp.so.
    pub htp: PathBuf,
    /// libQnnSystem.so; `None` takes the one beside `htp`.
    pub system: Option<PathBuf>,
    /// The device's Hexagon architecture, where the library's own word is not to be taken.
    pub device_arch: Option<u32>,
    /// What the library logs, through `tracing` with target `qnn`.
    pub log: LogLevel,
    /// What is measured; read with [`QnnBackend::take_profile`].
    pub profile: ProfileLevel,
    /// Clocks to ask for while the backend is open.
    pub perf: PerfMode,
    /// Scheduling priority of the contexts.
    pub priority: Priority,
    /// File that remembers which context binaries crashed a child process: see [`super::probe`].
    pub tried: Option<PathBuf>,
}

/// Executes context binaries on the NPU, or on the library's emulator of it.
pub struct QnnBackend {
    power: Option<Power>,
    device: Device,
    platform: Platform,
    options: QnnOptions,
    records: Arc<Mutex<Vec<ProfileRecord>>>,
}

impl QnnBackend {
    /// Opens the libraries and the device.
    ///
    /// The libraries print to standard output when they are loaded: see [`super::stdout`].
    pub fn new(options: QnnOptions) -> Result<Self> {
        let library = Library::open(&options.htp, options.system.as_deref())?;
        Self::with_library(&library, options)
    }

    /// Opens the device of a library that is open already; the paths in `options` are not used.
    pub fn with_library(library: &Library, options: QnnOptions) -> Result<Self> {
        let device = Device::open(library, options.log, None)?;
        let platform = device.platform().unwrap_or_else(|error| {
            tracing::warn!(target: "qnn", error = %error.report(), "the library does not describe the device");
            let emulated = Platform::is_emulated();
            Platform { arch: None, soc: None, vtcm_mb: None, cores: 0, emulated }
        });
        let power = (options.perf != PerfMode::DeviceDefault)
            .then(|| Power::open(&device).and_then(|p| p.vote(options.perf).map(|()| p)));
        let power = power.and_then(|power| {
            power
                .inspect_err(|error| tracing::warn!(target: "qnn", error = %error.report(), "clocks are left alone"))
                .ok()
        });
        Ok(Self { power, device, platform, options, records: Arc::default() })
    }

    /// The opened library.
    pub fn library(&self) -> &Library {
        self.device.library()
    }

    /// What the library says of the machine.
    pub fn platform(&self) -> &Platform {
        &self.platform
    }

    /// Asks for other clocks, such as [`PerfMode::DeviceDefault`] while idle.
    pub fn set_perf(&self, mode: PerfMode) -> Result<()> {
        match &self.power {
            Some(power) => power.vote(mode),
            None => Ok(()),
        }
    }

    /// Everything measured since the last call.
    pub fn take_profile(&self) -> Vec<ProfileRecord> {
        std::mem::take(&mut self.records.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl fmt::Debug for QnnBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QnnBackend")
            .field("device", &self.device)
            .field("platform", &self.platform)
            .finish_non_exhaustive()
    }
}

impl Backend for QnnBackend {
    fn info(&self) -> BackendInfo {
        let library = self.library();
        let mut details = vec![
            format!("library {}", library.path().display()),
            format!(
                "core interface {}, HTP interface {}, system interface {}",
                library.core_version(),
                library.backend_version(),
                library.system().version()
            ),
        ];
        details.push(if self.platform.emulated {
            "emulator: executes binaries of every architecture".to_owned()
        } else {
            let number = |n: Option<u32>| n.map_or("unknown".to_owned(), |n| n.to_string());
            format!(
                "device v{}, soc {}",
                number(self.options.device_arch.or(self.platform.arch)),
                number(self.platform.soc)
            )
        });
        details.push(match &self.power {
            Some(_) => format!("clocks: {}", self.options.perf.name()),
            None => "clocks: left to the device".to_owned(),
        });
        let version = match library.core_version().qairt() {
            Some(qairt) => format!("QAIRT {qairt}, build {}", library.build_id()),
            None => library.build_id().to_owned(),
        };
        BackendInfo { name: "qnn".to_owned(), version, details }
    }

    fn accepts(&self, source: &ContextSource) -> bool {
        source.binary.is_some()
    }

    fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>> {
        let Some(path) = &source.binary else {
            return Err(Error::new(
                ErrorKind::Context,
                format!("context {:?} has no context binary", source.key),
            )
            .hint("this bundle runs on the CPU backend only"));
        };
        let name = path.display().to_string();
        let file = source.open(path)?;
        let info = BinaryInfo::open(self.library().system(), &file, self.options.tried.as_deref())?;
        let arch = self.options.device_arch;
        let core = self.library().core_version();
        preflight(&name, &info, &Destination::new(&self.platform, arch, core))?;
        let graphs =
            info.graphs.iter().map(|g| g.info().map(Arc::new)).collect::<Result<Vec<_>>>()?;
        let mut configs = Vec::new();
        if self.options.priority != Priority::Normal {
            configs.push(ContextConfig::Priority(self.options.priority));
        }
        let profile = Profile::create(&self.device, self.options.profile)?;
        let handle = ContextHandle::from_binary(
            &self.device,
            &configs,
            file.bytes(),
            profile.as_ref(),
            format_args!("{name}: loading context {:?}", source.key),
        )?;
        drop(file);
        let recorder = Recorder { context: source.key.clone(), records: Arc::clone(&self.records) };
        if let Some(profile) = &profile {
            recorder.record(None, profile);
        }
        let tensors = info
            .graphs
            .into_iter()
            .map(|g| GraphTensors { inputs: g.inputs, outputs: g.outputs })
            .collect();
        Ok(Arc::new(QnnContext {
            handle: Arc::new(handle),
            graphs,
            tensors,
            profile: self.options.profile,
            recorder,
            resident: info.file_bytes,
        }))
    }
}

/// Collects measurements.
#[derive(Clone)]
struct Recorder {
    context: String,
    records: Arc<Mutex<Vec<ProfileRecord>>>,
}

impl Recorder {
    fn record(&self, graph: Option<&str>, profile: &Profile) {
        match profile.events() {
            Ok(events) => {
                let record = ProfileRecord {
                    context: self.context.clone(),
                    graph: graph.map(str::to_owned),
                    events,
                };
                self.records.lock().unwrap_or_else(PoisonError::into_inner).push(record);
            }
            Err(error) => {
                tracing::debug!(target: "qnn", error = %error.report(), "a profile was not read")
            }
        }
    }
}

struct GraphTensors {
    inputs: Vec<BinaryTensor>,
    outputs: Vec<BinaryTensor>,
}

struct QnnContext {
    handle: Arc<ContextHandle>,
    graphs: Vec<Arc<GraphInfo>>,
    tensors: Vec<GraphTensors>,
    profile: ProfileLevel,
    recorder: Recorder,
    resident: u64,
}

impl Context for QnnContext {
    fn graphs(&self) -> &[Arc<GraphInfo>] {
        &self.graphs
    }

    fn open_graph(&self, index: usize) -> Result<Box<dyn Graph>> {
        let (Some(info), Some(tensors)) = (self.graphs.get(index), self.tensors.get(index)) else {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("graph {index} of a context with {}", self.graphs.len()),
            ));
        };
        let device = self.handle.device();
        let library = device.library();
        let retrieve = library.need(library.table().graph_retrieve, "graphRetrieve")?;
        let execute = library.need(library.table().graph_execute, "graphExecute")?;
        let name = c_string(&info.name)?;
        let call = Shared::enter();
        let mut raw = std::ptr::null_mut();
        // SAFETY: contract: handles, arguments, answers.
        let status = unsafe { retrieve(self.handle.raw(), name.as_ptr(), &raw mut raw) };
        drop(call);
        if status != 0 {
            return Err(codes::error(
                ErrorKind::Graph,
                format_args!(
                    "opening graph {:?} of context {:?}",
                    info.name, self.recorder.context
                ),
                status,
            ));
        }
        let mut owned = Owned::default();
        let inputs = owned.tensors(&tensors.inputs, sys::TENSOR_APP_WRITE)?;
        let outputs = owned.tensors(&tensors.outputs, sys::TENSOR_APP_READ)?;
        Ok(Box::new(QnnGraph {
            raw: Raw(raw),
            execute,
            input_memory: vec![None; inputs.len()],
            output_memory: vec![None; outputs.len()],
            inputs,
            outputs,
            info: Arc::clone(info),
            profile: Profile::create(device, self.profile)?,
            recorder: self.recorder.clone(),
            _owned: owned,
            _context: Arc::clone(&self.handle),
        }))
    }

    fn resident_bytes(&self) -> u64 {
        self.resident
    }
}

/// What the prebuilt tensors point to. The heap blocks keep their place when this moves.
#[derive(Default)]
struct Owned {
    names: Vec<CString>,
    dimensions: Vec<Vec<u32>>,
    encodings: Vec<Vec<ScaleOffset>>,
}

impl Owned {
    fn tensors(&mut self, tensors: &[BinaryTensor], kind: u32) -> Result<Box<[Tensor]>> {
        tensors.iter().map(|tensor| self.tensor(tensor, kind)).collect()
    }

    fn tensor(&mut self, tensor: &BinaryTensor, kind: u32) -> Result<Tensor> {
        let name = c_string(&tensor.name)?;
        // Both came from 32-bit numbers of the library.
        let dimensions: Vec<u32> = tensor.shape.iter().map(|&d| d as u32).collect();
        let mut encoding = Vec::new();
        let quantize = types::encode(&tensor.quantization, &mut encoding);
        let raw = Tensor {
            version: sys::TENSOR_V1,
            _reserved: 0,
            id: tensor.id,
            name: name.as_ptr(),
            kind,
            data_format: tensor.format,
            data_type: tensor.dtype_code,
            quantize,
            rank: dimensions.len() as u32,
            dimensions: dimensions.as_ptr(),
            mem_type: sys::MEM_RAW,
            data: std::ptr::null_mut(),
            data_size: 0,
            is_dynamic: std::ptr::null(),
            sparse: [0; 3],
            is_produced: 0,
        };
        self.names.push(name);
        self.dimensions.push(dimensions);
        self.encodings.push(encoding);
        Ok(raw)
    }
}

type Execute = unsafe extern "C" fn(
    sys::Handle,
    *const Tensor,
    u32,
    *mut Tensor,
    u32,
    sys::Handle,
    sys::Handle,
) -> Status;

/// A graph of a loaded context, with everything of its call prepared but the addresses.
struct QnnGraph {
    raw: Raw,
    execute: Execute,
    inputs: Box<[Tensor]>,
    outputs: Box<[Tensor]>,
    input_memory: Vec<Option<Memory>>,
    output_memory: Vec<Option<Memory>>,
    info: Arc<GraphInfo>,
    profile: Option<Profile>,
    recorder: Recorder,
    _owned: Owned,
    _context: Arc<ContextHandle>,
}

// SAFETY: contract: threads; the raw pointers lead to what the graph keeps (`_owned`, and *alive*).
unsafe impl Send for QnnGraph {}

impl Graph for QnnGraph {
    fn info(&self) -> &Arc<GraphInfo> {
        &self.info
    }

    fn bind(&mut self, port: Port, memory: &Memory, offset: usize) -> Result<()> {
        let wrong = |message: String| {
            Err(Error::new(ErrorKind::Graph, format!("graph {:?}: {message}", self.info.name)))
        };
        let Some(tensor) = self.info.tensor(port) else {
            return wrong(format!("there is no {port:?}"));
        };
        let need = tensor.try_byte_len().map_err(Error::size)?;
        let have = memory.len().saturating_sub(offset);
        if have < need {
            return wrong(format!("tensor {tensor} needs {need} bytes, the buffer has {have}"));
        }
        let (slots, kept, index) = match port {
            Port::Input(index) => (&mut self.inputs, &mut self.input_memory, index),
            Port::Output(index) => {
                if !memory.is_writable() {
                    return wrong(format!("output {tensor} bound to a read-only buffer"));
                }
                (&mut self.outputs, &mut self.output_memory, index)
            }
        };
        if let (Some(slot), Some(keep)) = (slots.get_mut(index), kept.get_mut(index)) {
            slot.data = memory.as_ptr().wrapping_add(offset).cast::<c_void>();
            // At most `u32::MAX`: checked when the context was opened.
            slot.data_size = need as u32;
            *keep = Some(memory.clone());
        }
        Ok(())
    }

    unsafe fn execute(&mut self) -> Result<()> {
        let call = Shared::enter();
        let mark = log::mark();
        let profile = self.profile.as_ref().map_or(std::ptr::null_mut(), Profile::raw);
        // SAFETY: contract: handles, arguments; of [`crate::backend`]: alive, sized, and from the
        // caller bound and exclusive. Overruns of an output end at its buffer's guard page.
        let status = unsafe {
            (self.execute)(
                self.raw.0,
                self.inputs.as_ptr(),
                self.inputs.len() as u32,
                self.outputs.as_mut_ptr(),
                self.outputs.len() as u32,
                profile,
                std::ptr::null_mut(),
            )
        };
        drop(call);
        if status != 0 {
            let attempt = format_args!("executing on the NPU");
            return Err(explain(codes::error(ErrorKind::Execute, attempt, status), mark));
        }
        if let Some(profile) = &self.profile {
            self.recorder.record(Some(&self.info.name), profile);
        }
        Ok(())
    }
}

pub(crate) fn c_string(name: &str) -> Result<CString> {
    CString::new(name).map_err(|_| {
        Error::new(ErrorKind::Graph, format!("the name {name:?} contains a NUL character"))
    })
}
