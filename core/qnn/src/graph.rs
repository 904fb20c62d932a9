//! A graph of a loaded context: its call, prepared but for the memory that is bound.
//!
//! The library checks neither the size nor the element type of the memory it is handed: all that
//! is checked here, when a graph is opened and when memory is bound to it.

#![expect(unsafe_code, reason = "executes graphs over bound memory")]

use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use qhx_base::trace::Trace;
use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::Memory;
use qhx_exec::backend::Graph;
use qhx_qnn_sys::{self as sys, ScaleOffset, Status, Tensor};
use qhx_types::{GraphInfo, Port, TensorInfo};

use super::causes::explain;
use super::codes;
use super::context::ContextHandle;
use super::device::Raw;
use super::gate::Shared;
use super::info::BinaryTensor;
use super::log;
use super::power::Power;
use super::profile::{Profile, ProfileLevel, ProfileRecord, Records};
use super::registered::{DeviceMemory, Place};
use super::types;

/// Collects measurements.
#[derive(Clone)]
pub(crate) struct Recorder {
    context: String,
    records: Arc<Mutex<Records>>,
    trace: Option<Arc<Trace>>,
}

impl Recorder {
    /// A collector of what the context with this key takes.
    pub(crate) fn new(
        context: &str,
        records: &Arc<Mutex<Records>>,
        trace: Option<&Arc<Trace>>,
    ) -> Self {
        let (records, trace) = (Arc::clone(records), trace.map(Arc::clone));
        Self { context: context.to_owned(), records, trace }
    }

    /// Takes what was measured of a call that began at `start` and has just ended.
    pub(crate) fn record(&self, graph: Option<&str>, profile: &Profile, start: Instant) {
        let time = start.elapsed();
        match profile.events() {
            Ok(events) => {
                let record = ProfileRecord {
                    context: self.context.clone(),
                    graph: graph.map(str::to_owned),
                    events,
                };
                if let Some(trace) = &self.trace {
                    return record.write_to(trace, start, time);
                }
                self.records.lock().unwrap_or_else(PoisonError::into_inner).push(record);
            }
            Err(error) => {
                tracing::debug!(target: "qnn", error = %error.report(), "a profile was not read")
            }
        }
    }
}

/// The tensors of a graph as its binary describes them.
pub(crate) struct GraphTensors {
    pub(crate) inputs: Vec<BinaryTensor>,
    pub(crate) outputs: Vec<BinaryTensor>,
}

/// Data that the prebuilt tensors point to. The heap blocks keep their place when this moves.
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
            id: tensor.id,
            name: name.as_ptr(),
            kind,
            data_format: tensor.format,
            data_type: tensor.dtype_code,
            quantize,
            rank: dimensions.len() as u32,
            dimensions: dimensions.as_ptr(),
            ..Tensor::V1
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

/// Services of the backend that a graph uses.
pub(crate) struct Services {
    pub(crate) memory: Arc<DeviceMemory>,
    /// Notified of each execution, where that matters.
    pub(crate) power: Option<Arc<Power>>,
    pub(crate) recorder: Recorder,
}

/// A graph of a loaded context, with everything of its call prepared but the memory.
pub(crate) struct QnnGraph {
    raw: Raw,
    execute: Execute,
    inputs: Box<[Tensor]>,
    outputs: Box<[Tensor]>,
    /// Slot of each input, then of each output.
    slots: Box<[Slot]>,
    info: Arc<GraphInfo>,
    services: Services,
    profile: Option<Profile>,
    _owned: Owned,
    context: Arc<ContextHandle>,
}

/// Size of a port's tensor, and what is bound to it.
struct Slot {
    /// Bytes of the tensor. QNN passes no more.
    bytes: u32,
    bound: Option<Bound>,
    /// Previous binding. The two buffers of a state take turns for every token: one that comes back was checked and
    /// registered when it was bound first.
    former: Option<Bound>,
}

/// Memory, with the offset in it that the library was given.
struct Bound {
    memory: Memory,
    offset: usize,
    place: Place,
}

impl QnnGraph {
    /// Finds the graph called `info.name` in a context.
    pub(crate) fn open(
        context: &Arc<ContextHandle>,
        info: &Arc<GraphInfo>,
        tensors: &GraphTensors,
        services: Services,
        level: ProfileLevel,
    ) -> Result<Self> {
        let device = context.device();
        let library = device.library();
        let retrieve = library.need(library.table().graph_retrieve, "graphRetrieve")?;
        let execute = library.need(library.table().graph_execute, "graphExecute")?;
        let name = c_string(&info.name)?;
        let call = Shared::enter();
        lost_if_closed(context)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: contract: handles, arguments, answers.
        let status = unsafe { retrieve(context.raw(), name.as_ptr(), &raw mut raw) };
        drop(call);
        let opened = &services.recorder.context;
        let attempt = format_args!("opening graph {:?} of context {opened:?}", info.name);
        codes::check(ErrorKind::Graph, attempt, status)?;
        let mut owned = Owned::default();
        let inputs = owned.tensors(&tensors.inputs, sys::TENSOR_APP_WRITE)?;
        let outputs = owned.tensors(&tensors.outputs, sys::TENSOR_APP_READ)?;
        let slot = |tensor: &TensorInfo| {
            let bytes = tensor.try_byte_len().map_err(Error::size)?;
            let bytes = u32::try_from(bytes).map_err(|_| {
                let message = format!("tensor {tensor} has more bytes than QNN can pass");
                Error::new(ErrorKind::Graph, message)
            })?;
            Ok(Slot { bytes, bound: None, former: None })
        };
        Ok(Self {
            raw: Raw(raw),
            execute,
            inputs,
            outputs,
            slots: info.inputs.iter().chain(&info.outputs).map(slot).collect::<Result<_>>()?,
            info: Arc::clone(info),
            services,
            profile: Profile::create(device, level)?,
            _owned: owned,
            context: Arc::clone(context),
        })
    }
}

// SAFETY: contract: threads; the raw pointers lead to what the graph keeps (`_owned`, and *alive*).
unsafe impl Send for QnnGraph {}

impl Graph for QnnGraph {
    fn info(&self) -> &Arc<GraphInfo> {
        &self.info
    }

    fn bind(&mut self, port: Port, memory: &Memory, offset: usize) -> Result<()> {
        let (tensor, index) = match port {
            Port::Input(i) => (self.inputs.get_mut(i), i),
            Port::Output(i) => (self.outputs.get_mut(i), self.inputs.len().saturating_add(i)),
        };
        let slot = self.slots.get_mut(index);
        let (Some(tensor), Some(slot), Some(info)) = (tensor, slot, self.info.tensor(port)) else {
            return Err(wrong(&self.info, format_args!("there is no {port:?}")));
        };
        let back = |former: &Bound| former.offset == offset && former.memory.is_same(memory);
        if slot.bound.as_ref().is_some_and(back) {
            return Ok(());
        }
        if slot.former.as_ref().is_some_and(back) {
            std::mem::swap(&mut slot.bound, &mut slot.former);
        } else {
            let (need, have) = (slot.bytes as usize, memory.len().saturating_sub(offset));
            if have < need || offset > memory.len() {
                let why = format_args!("tensor {info} needs {need} bytes, the buffer has {have}");
                return Err(wrong(&self.info, why));
            }
            if matches!(port, Port::Output(_)) && !memory.is_writable() {
                let why = format_args!("output {info} bound to a read-only buffer");
                return Err(wrong(&self.info, why));
            }
            let context = self.context.registrations();
            let place = self.services.memory.place(context, memory, offset, tensor, need);
            let place = place.map_err(|e| e.context(format_args!("graph {:?}", self.info.name)))?;
            let memory = memory.clone();
            slot.former = slot.bound.replace(Bound { memory, offset, place });
        }
        if let Some(bound) = &slot.bound {
            bound.place.write(tensor, slot.bytes);
        }
        Ok(())
    }

    unsafe fn execute(&mut self) -> Result<()> {
        let working = self.services.power.as_deref().map(Power::working);
        let call = Shared::enter();
        lost_if_closed(&self.context)?;
        let mark = log::mark();
        let start = self.profile.as_ref().map(|_| Instant::now());
        let profile = self.profile.as_ref().map_or(std::ptr::null_mut(), Profile::raw);
        // SAFETY: contract: handles, arguments; of [`qhx_exec::backend`]: alive, sized, and from the
        // caller bound and exclusive. Overruns of an output end at its buffer's guard page, those of a
        // registered one at its allocation's end.
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
        drop(working);
        if status != 0 {
            self.context.device().note(status);
            let attempt = format_args!("executing on the NPU");
            let error = explain(codes::error(ErrorKind::Execute, attempt, status), mark);
            return Err(if log::emulator_mixes_chips(mark) { error.hint(MIXED) } else { error });
        }
        if let (Some(profile), Some(start)) = (&self.profile, start) {
            self.services.recorder.record(Some(&self.info.name), profile, start);
        }
        Ok(())
    }
}

/// Hint for an error when [`log::emulator_mixes_chips`] is true.
const MIXED: &str = "the emulator does not execute graphs for chips of different tightly coupled memory (VTCM) in \
                     several threads, as for v68 and v81: open their bundles in processes of their own";

/// An error for a context that was freed because its device is lost.
fn lost_if_closed(context: &ContextHandle) -> Result<()> {
    if context.is_closed() {
        return Err(Error::new(
            ErrorKind::DeviceLost,
            "the device was lost; its contexts are closed",
        )
        .hint("open the model again, see Model::reopen"));
    }
    Ok(())
}

fn wrong(graph: &GraphInfo, why: std::fmt::Arguments<'_>) -> Error {
    Error::new(ErrorKind::Graph, format!("graph {:?}: {why}", graph.name))
}

/// `name` as the library takes it.
pub(crate) fn c_string(name: &str) -> Result<CString> {
    CString::new(name).map_err(|_| {
        Error::new(ErrorKind::Graph, format!("the name {name:?} contains a NUL character"))
    })
}
