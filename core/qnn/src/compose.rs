//! Makes context binaries: declare tensors, add nodes, finalise, serialise.
//!
//! ```no_run
//! # use qhx_qnn::{Library, Target, compose::*};
//! # use qhx_types::DType;
//! # fn make(library: &Library, weight: &[u8]) -> qhx_base::Result<Vec<u8>> {
//! let mut context = Composer::new(library, Target::V81, &[])?;
//! let mut graph = context.graph("linear", &[])?;
//! let x = graph.tensor(TensorSpec::input("x", DType::F16, &[1, 1024]))?;
//! let w = graph.tensor(TensorSpec::constant("w", DType::F16, &[2048, 1024], weight))?;
//! let y = graph.tensor(TensorSpec::output("y", DType::F16, &[1, 2048]))?;
//! graph.node("y", "FullyConnected", &[], &[x, w], &[y])?;
//! graph.finalize()?;
//! context.binary()
//! # }
//! ```
//!
//! # Memory
//! The library copies the bytes of a constant while it is declared (measured on QAIRT 2.51: the
//! bytes may be overwritten right after): [`GraphComposer::tensor`] borrows them for the call
//! only, so that weights can be converted one at a time. The library's copies, about as much again
//! during [`GraphComposer::finalize`], and the binary remain: a context takes some four times the
//! size of its weights at the peak.
//!
//! # Not beside executing
//! In one process the library fails or crashes when one thread compiles graphs while another
//! executes some. While a [`Composer`] exists, other threads therefore wait with composing and
//! with opening, executing and closing, and [`Composer::new`] waits for what they have under way.
//! A composer stays on its thread. `qhx forge` compiles in processes of its own.
//!
//! A failed [`GraphComposer::finalize`] leaves the context without a usable binary: drop the
//! [`Composer`].

#![expect(unsafe_code, reason = "hands tensors and nodes to the library")]

use std::ffi::{CString, c_void};
use std::fs::File;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use qhx_base::{Error, ErrorKind, Result};
use qhx_qnn_sys::{
    self as sys, Config, ConfigValue, HtpGraphConfig, HtpGraphValue, OpConfig, ParamValue, Scalar,
    ScalarValue, ScaleOffset, Tensor,
};
use qhx_types::quantized::{Multiples, QuantizedRef};
use qhx_types::{DType, Quantization, TensorInfo};

use super::causes;
use super::codes::Code;
use super::context::{ContextConfig, ContextHandle, with_list};
use super::device::{Device, Raw};
use super::gate::Exclusive;
use super::graph::c_string;
use super::integers::{self, Filter, Pointed};
use super::library::Library;
use super::log::{self, LogLevel};
use super::target::Target;
use super::types;

/// The op package of the HTP backend.
const PACKAGE: &std::ffi::CStr = c"qti.aisw";

/// One option of a graph.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum GraphConfig {
    /// Effort of the compiler, 1 to 3.
    OptimizationLevel(u8),
    /// Tightly coupled memory the graph may use.
    VtcmMb(u32),
    /// Number of vector threads.
    HvxThreads(u64),
    /// A key of the graph compiler. Unknown keys cost a line in the log.
    Compiler {
        /// The key.
        key: String,
        /// Its value.
        value: CompilerValue,
    },
}

/// Value of a key of the graph compiler.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum CompilerValue {
    /// An unsigned number.
    U32(u32),
    /// A number.
    F32(f32),
    /// A yes or no.
    Bool(bool),
    /// A text, such as a path.
    Text(String),
}

/// Role of a tensor.
#[derive(Debug, Clone, Copy)]
enum Kind<'a> {
    Input,
    Output,
    Native,
    Static(&'a [u8]),
}

/// A tensor to be declared.
#[derive(Debug, Clone)]
pub struct TensorSpec<'a> {
    name: &'a str,
    kind: Kind<'a>,
    dtype: DType,
    shape: &'a [usize],
    quantization: Quantization,
    weights: Weights<'a>,
}

/// Weights of low bits.
#[derive(Debug, Clone, Copy)]
enum Weights<'a> {
    None,
    Matrix(QuantizedRef<'a>),
    Filter(Filter<'a>),
}

impl Weights<'_> {
    /// The op that reads them; none where any does.
    fn reader(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Matrix(_) => Some("FullyConnected"),
            Self::Filter(_) => Some("Conv2d"),
        }
    }
}

impl<'a> TensorSpec<'a> {
    /// A tensor that the host fills before execution.
    pub fn input(name: &'a str, dtype: DType, shape: &'a [usize]) -> Self {
        Self::of(name, Kind::Input, dtype, shape)
    }

    /// A tensor that the host reads after execution. Nodes may read it, too.
    pub fn output(name: &'a str, dtype: DType, shape: &'a [usize]) -> Self {
        Self::of(name, Kind::Output, dtype, shape)
    }

    /// A tensor between two nodes.
    pub fn native(name: &'a str, dtype: DType, shape: &'a [usize]) -> Self {
        Self::of(name, Kind::Native, dtype, shape)
    }

    /// A tensor whose bytes are part of the binary. They are copied when it is declared.
    pub fn constant(name: &'a str, dtype: DType, shape: &'a [usize], bytes: &'a [u8]) -> Self {
        Self::of(name, Kind::Static(bytes), dtype, shape)
    }

    /// The quantized weights of a `FullyConnected`, of the shape `[outputs, inputs]`. They are copied when it is
    /// declared. Inputs and outputs of a graph cannot be such tensors.
    pub fn quantized_weights(name: &'a str, shape: &'a [usize], weights: QuantizedRef<'a>) -> Self {
        let bytes = bytemuck::cast_slice(weights.values);
        let spec = Self::constant(name, DType::SFixed8, shape, bytes);
        Self { weights: Weights::Matrix(weights), ..spec }
    }

    /// The 4-bit filter of a `Conv2d` of 1 by 1 over 16-bit integers: one integer a byte, of the shape
    /// `[1, 1, inputs, outputs]`, times the multiples of their blocks of inputs and outputs. They are copied when it is
    /// declared.
    pub fn filter(
        name: &'a str,
        shape: &'a [usize],
        values: &'a [i8],
        multiples: &'a Multiples,
    ) -> Self {
        let spec = Self::constant(name, DType::SFixed8, shape, bytemuck::cast_slice(values));
        Self { weights: Weights::Filter(Filter { values, multiples }), ..spec }
    }

    /// With an encoding, for quantised element types.
    #[must_use]
    pub fn quantized(mut self, quantization: Quantization) -> Self {
        self.quantization = quantization;
        self
    }

    fn of(name: &'a str, kind: Kind<'a>, dtype: DType, shape: &'a [usize]) -> Self {
        Self { name, kind, dtype, shape, quantization: Quantization::None, weights: Weights::None }
    }
}

/// A declared tensor of one graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorHandle {
    graph: u64,
    index: u32,
}

/// A parameter of a node.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Param<'a> {
    /// An unsigned number.
    U32(u32),
    /// A signed number.
    I32(i32),
    /// A number.
    F32(f32),
    /// A yes or no.
    Bool(bool),
    /// Unsigned numbers with their shape.
    U32s(&'a [usize], &'a [u32]),
    /// Signed numbers with their shape.
    I32s(&'a [usize], &'a [i32]),
}

/// A context under construction.
#[derive(Debug)]
pub struct Composer {
    context: Owner,
    target: Target,
    graphs: Vec<String>,
    unfinished: Option<String>,
}

// Fields drop in order: the context first.
struct Owner(ContextHandle, Exclusive);

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Owner").field(self.0.device()).field(&self.1).finish()
    }
}

impl Composer {
    /// An empty context for `target`. Waits until no other thread composes or executes.
    ///
    /// # Errors
    /// When the device or the context cannot be created.
    pub fn new(library: &Library, target: Target, configs: &[ContextConfig]) -> Result<Self> {
        let _exclusive = Exclusive::begin();
        let device = Device::open(library, LogLevel::Error, Some(target))?;
        Self::on(&device, target, configs)
    }

    /// Same as [`Composer::new`], on a device that was opened for `target`.
    ///
    /// # Errors
    /// When the context cannot be created.
    pub fn on(device: &Device, target: Target, configs: &[ContextConfig]) -> Result<Self> {
        let exclusive = Exclusive::begin();
        let context = Owner(ContextHandle::create(device, configs)?, exclusive);
        Ok(Self { context, target, graphs: Vec::new(), unfinished: None })
    }

    /// The chip that the context is for.
    pub fn target(&self) -> Target {
        self.target
    }

    /// Names of the finalised graphs.
    pub fn graphs(&self) -> &[String] {
        &self.graphs
    }

    /// Begins a graph. It has to be finalised before the next one or the binary.
    ///
    /// # Errors
    /// When the library refuses the graph.
    pub fn graph(&mut self, name: &str, configs: &[GraphConfig]) -> Result<GraphComposer<'_>> {
        self.check_finished()?;
        let device = self.context.0.device();
        let library = device.library();
        let create = library.need(library.table().graph_create, "graphCreate")?;
        let c_name = c_string(name)?;
        let mut raw = std::ptr::null_mut();
        let mark = log::mark();
        let status = with_configs(configs, |list| {
            // SAFETY: contract: handles, arguments, answers.
            unsafe { create(self.context.0.raw(), c_name.as_ptr(), list, &raw mut raw) }
        })?;
        let attempt = format_args!("creating graph {name:?} for {}", self.target);
        causes::check(ErrorKind::Graph, attempt, status, mark)?;
        static NEXT: AtomicU64 = AtomicU64::new(1);
        self.unfinished = Some(name.to_owned());
        Ok(GraphComposer {
            raw: Raw(raw),
            serial: NEXT.fetch_add(1, Ordering::Relaxed),
            name: name.to_owned(),
            tensors: Vec::new(),
            owned: Vec::new(),
            nodes: Vec::new(),
            composer: self,
            _not_sync: PhantomData,
        })
    }

    /// The context binary.
    ///
    /// # Errors
    /// When a graph is not finalised, or the library fails.
    pub fn binary(&self) -> Result<Vec<u8>> {
        let size = self.binary_size()?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(size).map_err(|_| {
            Error::new(
                ErrorKind::Context,
                format!("{}: {size} bytes do not fit memory", self.serialising()),
            )
        })?;
        bytes.resize(size, 0);
        let written = self.serialise(&mut bytes)?;
        bytes.truncate(written);
        Ok(bytes)
    }

    /// Writes the context binary to a new file at `path`, without a copy of it on the heap. Returns
    /// its length. After an error the file is gone.
    ///
    /// # Errors
    /// Errors of [`Composer::binary`], and when the file exists or cannot be written.
    pub fn write(&self, path: &Path) -> Result<u64> {
        let size = self.binary_size()?;
        let fail = |e: std::io::Error| {
            Error::io(ErrorKind::Io, path, e).hint("is there room on the disk for the binary?")
        };
        let file = File::create_new(path).map_err(fail)?;
        let write = || -> Result<u64> {
            reserve(&file, size as u64).map_err(fail)?;
            // SAFETY: the file was just made by this process, which alone knows of it; it is not
            // shortened while it is mapped.
            let mut map =
                unsafe { memmap2::MmapOptions::new().len(size).map_mut(&file).map_err(fail)? };
            let written = self.serialise(&mut map)? as u64;
            map.flush().map_err(fail)?;
            drop(map);
            file.set_len(written).map_err(fail)?;
            Ok(written)
        };
        let result = write();
        if result.is_err() {
            let _ = std::fs::remove_file(path);
        }
        result
    }

    fn serialising(&self) -> String {
        format!("serialising graphs {} for {}", self.graphs.join(", "), self.target)
    }

    fn binary_size(&self) -> Result<usize> {
        self.check_finished()?;
        if self.graphs.is_empty() {
            return Err(Error::new(ErrorKind::Graph, "the context has no graph to serialise"));
        }
        let library = self.context.0.device().library();
        let get = library.need(library.table().context_get_binary_size, "contextGetBinarySize")?;
        let mark = log::mark();
        let mut size = 0u64;
        // SAFETY: contract: handles, answers.
        let status = unsafe { get(self.context.0.raw(), &raw mut size) };
        causes::check(ErrorKind::Context, self.serialising(), status, mark)?;
        Ok(usize::try_from(size).unwrap_or(usize::MAX))
    }

    /// Fills `bytes`, which has the length of [`Self::binary_size`], and returns how many are used.
    fn serialise(&self, bytes: &mut [u8]) -> Result<usize> {
        let library = self.context.0.device().library();
        let get = library.need(library.table().context_get_binary, "contextGetBinary")?;
        let mark = log::mark();
        let mut written = 0u64;
        // SAFETY: contract: handles, answers; the buffer has the size that is given.
        let status = unsafe {
            get(
                self.context.0.raw(),
                bytes.as_mut_ptr().cast(),
                bytes.len() as u64,
                &raw mut written,
            )
        };
        causes::check(ErrorKind::Context, self.serialising(), status, mark)?;
        Ok(usize::try_from(written).unwrap_or(usize::MAX).min(bytes.len()))
    }

    fn check_finished(&self) -> Result<()> {
        match &self.unfinished {
            None => Ok(()),
            Some(name) => Err(Error::new(
                ErrorKind::Graph,
                format!("graph {name:?} was not finalised, or failed to; the context is unusable"),
            )),
        }
    }
}

/// A graph under construction.
#[derive(Debug)]
pub struct GraphComposer<'c> {
    raw: Raw,
    serial: u64,
    name: String,
    tensors: Vec<Slot>,
    owned: Vec<Strings>,
    nodes: Vec<(String, String)>,
    composer: &'c mut Composer,
    // Tensors hold raw pointers; the graph is built by one thread at a time.
    _not_sync: PhantomData<*const ()>,
}

struct Slot {
    raw: Tensor,
    info: TensorInfo,
    /// The op that reads it, of weights of low bits.
    reader: Option<&'static str>,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.info.fmt(f)
    }
}

/// Data that a declared tensor points to, kept until the graph is done.
struct Strings {
    _name: CString,
    _dimensions: Vec<u32>,
    _encoding: Vec<ScaleOffset>,
    _weights: Pointed,
}

impl std::fmt::Debug for Strings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self._name.fmt(f)
    }
}

impl GraphComposer<'_> {
    /// Name of the graph.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of nodes added so far.
    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// Description of the tensor that a handle stands for.
    pub fn info(&self, tensor: TensorHandle) -> Option<&TensorInfo> {
        if tensor.graph != self.serial {
            return None;
        }
        self.tensors.get(tensor.index as usize).map(|slot| &slot.info)
    }

    /// Declares a tensor. The bytes of a constant may be freed afterwards.
    ///
    /// # Errors
    /// When the description is invalid, or the library refuses the tensor.
    pub fn tensor(&mut self, spec: TensorSpec<'_>) -> Result<TensorHandle> {
        let info = TensorInfo {
            quantization: spec.quantization,
            ..TensorInfo::new(spec.name, spec.dtype, spec.shape)
        };
        let raw = self.declare(&info, spec.kind, spec.weights)?;
        let index = u32::try_from(self.tensors.len())
            .map_err(|_| Error::new(ErrorKind::Graph, "more than 2^32 tensors"))?;
        self.tensors.push(Slot { raw, info, reader: spec.weights.reader() });
        Ok(TensorHandle { graph: self.serial, index })
    }

    /// Adds a node of the HTP backend's op package.
    ///
    /// # Errors
    /// When the library refuses the node.
    pub fn node(
        &mut self,
        name: &str,
        op_type: &str,
        params: &[(&str, Param<'_>)],
        inputs: &[TensorHandle],
        outputs: &[TensorHandle],
    ) -> Result<()> {
        self.check_integers(name, op_type, inputs)?;
        let library = self.composer.context.0.device().library().clone();
        let add = library.need(library.table().graph_add_node, "graphAddNode")?;
        let c_name = c_string(name)?;
        let c_type = c_string(op_type)?;
        let mut c_params = Vec::with_capacity(params.len());
        let mut c_names = Vec::with_capacity(params.len());
        for (param, value) in params {
            let c_param = c_string(param)?;
            let (kind, value) = self.param(name, param, *value)?;
            c_params.push(sys::Param { kind, name: c_param.as_ptr(), value });
            c_names.push(c_param);
        }
        let inputs = self.resolve(name, op_type, inputs)?;
        let outputs = self.resolve(name, op_type, outputs)?;
        let config = OpConfig {
            version: sys::OP_CONFIG_V1,
            name: c_name.as_ptr(),
            package: PACKAGE.as_ptr(),
            op_type: c_type.as_ptr(),
            param_count: c_params.len() as u32,
            params: c_params.as_ptr(),
            input_count: inputs.len() as u32,
            inputs: inputs.as_ptr(),
            output_count: outputs.len() as u32,
            outputs: outputs.as_ptr(),
        };
        let mark = log::mark();
        // SAFETY: contract: handles, arguments; tensors point to what `owned` keeps.
        let status = unsafe { add(self.raw.0, config) };
        let attempt = format_args!("graph {:?}: adding node {name:?} ({op_type})", self.name);
        causes::check(ErrorKind::Graph, attempt, status, mark)?;
        self.nodes.push((name.to_owned(), op_type.to_owned()));
        Ok(())
    }

    /// Compiles the graph. Takes from milliseconds to minutes.
    ///
    /// # Errors
    /// When the graph does not compile.
    pub fn finalize(self) -> Result<()> {
        let library = self.composer.context.0.device().library();
        let finalize = library.need(library.table().graph_finalize, "graphFinalize")?;
        let mark = log::mark();
        // SAFETY: contract: handles; no profile, no signal.
        let status = unsafe { finalize(self.raw.0, std::ptr::null_mut(), std::ptr::null_mut()) };
        if status != 0 {
            return Err(self.compile_error(status, &log::failures_since(mark)));
        }
        self.composer.unfinished = None;
        self.composer.graphs.push(self.name);
        Ok(())
    }

    /// The compiler returns the same code whatever is wrong; its log names the node.
    fn compile_error(&self, status: sys::Status, lines: &[String]) -> Error {
        let code = Code::of(status);
        let blamed = lines.iter().find_map(|line| {
            let name = line.split('"').nth(1)?;
            self.nodes.iter().find(|(node, _)| node == name)
        });
        let what = match blamed {
            Some((node, op_type)) => format!("node {node:?} ({op_type}) does not compile"),
            None => format!("it does not compile ({code})"),
        };
        let reported = lines.iter().rev().take(4).rev().map(String::as_str).collect::<Vec<_>>();
        Error::new(
            ErrorKind::Graph,
            format!(
                "graph {:?} ({} nodes) for {}: {what}; the library says: {}",
                self.name,
                self.nodes.len(),
                self.composer.target,
                if reported.is_empty() { "nothing".to_owned() } else { reported.join(" | ") }
            ),
        )
        .with_code(u64::from(code.0))
        .hint(not_compiled(self.composer.target))
    }

    /// Errors when another op than theirs reads quantized weights: the library ends the process over a `MatMul` of
    /// them.
    fn check_integers(&self, node: &str, op_type: &str, inputs: &[TensorHandle]) -> Result<()> {
        let slots = inputs.iter().filter_map(|handle| self.tensors.get(handle.index as usize));
        let mut read = slots.filter_map(|slot| Some((slot, slot.reader?)));
        let Some((slot, reader)) = read.find(|(_, reader)| *reader != op_type) else {
            return Ok(());
        };
        Err(Error::new(
            ErrorKind::Graph,
            format!(
                "graph {:?}: node {node:?} ({op_type}) reads {}, a weight of integers, which only {reader} does",
                self.name, slot.info
            ),
        )
        .hint("store this weight as f16"))
    }

    fn declare(
        &mut self,
        info: &TensorInfo,
        kind: Kind<'_>,
        weights: Weights<'_>,
    ) -> Result<Tensor> {
        let wrong = |message: String| {
            Error::new(ErrorKind::Graph, format!("graph {:?}: tensor {info}: {message}", self.name))
        };
        let checked = match weights {
            Weights::None => Ok(()),
            Weights::Matrix(weights) => integers::check(weights, &info.shape),
            Weights::Filter(filter) => integers::check_filter(filter, &info.shape),
        };
        checked.map_err(|e| {
            e.context(format_args!("graph {:?}: tensor {:?}", self.name, info.name))
        })?;
        let bytes = info.try_byte_len().map_err(Error::size)?;
        let (kind, data, size) = match kind {
            Kind::Input => (sys::TENSOR_APP_WRITE, std::ptr::null(), 0),
            Kind::Output => (sys::TENSOR_APP_READ, std::ptr::null(), 0),
            Kind::Native => (sys::TENSOR_NATIVE, std::ptr::null(), 0),
            Kind::Static(data) => {
                if data.len() != bytes {
                    return Err(wrong(format!("{} bytes given, {bytes} expected", data.len())));
                }
                (sys::TENSOR_STATIC, data.as_ptr(), data.len())
            }
        };
        let size = u32::try_from(size)
            .map_err(|_| wrong(format!("{size} bytes, more than QNN can pass (4 GiB)")))?;
        if let Quantization::PerAxis { axis, scales, offsets } = &info.quantization {
            let along = info.shape.get(*axis).copied();
            if along != Some(scales.len()) || !(offsets.is_empty() || offsets.len() == scales.len())
            {
                return Err(wrong(format!(
                    "{} scales and {} offsets along axis {axis}",
                    scales.len(),
                    offsets.len()
                )));
            }
        }
        let dimensions = info
            .shape
            .iter()
            .map(|&d| u32::try_from(d).map_err(|_| wrong("a dimension above 2^32".to_owned())))
            .collect::<Result<Vec<u32>>>()?;
        let library = self.composer.context.0.device().library().clone();
        let create =
            library.need(library.table().tensor_create_graph_tensor, "tensorCreateGraphTensor")?;
        let name = c_string(&info.name)?;
        let (mut encoding, mut pointed) = (Vec::new(), Pointed::default());
        let quantize = match weights {
            Weights::Matrix(weights) => integers::encode(weights, &info.shape, &mut pointed),
            Weights::Filter(filter) => integers::encode_filter(filter.multiples, &mut pointed),
            Weights::None => types::encode(&info.quantization, &mut encoding),
        };
        let mut raw = Tensor {
            name: name.as_ptr(),
            kind,
            data_type: types::dtype_code(info.dtype),
            quantize,
            rank: dimensions.len() as u32,
            dimensions: dimensions.as_ptr(),
            data: data.cast_mut().cast::<c_void>(),
            data_size: size,
            ..Tensor::V1
        };
        let mark = log::mark();
        // SAFETY: contract: handles, arguments, answers (the id). The data is read, not written.
        let status = unsafe { create(self.raw.0, &raw mut raw) };
        let attempt = format_args!("graph {:?}: declaring tensor {info}", self.name);
        causes::check(ErrorKind::Graph, attempt, status, mark)?;
        // The library holds its copy; nothing must follow this pointer from here on.
        raw.data = std::ptr::null_mut();
        raw.data_size = 0;
        self.owned.push(Strings {
            _name: name,
            _dimensions: dimensions,
            _encoding: encoding,
            _weights: pointed,
        });
        Ok(raw)
    }

    fn param(&mut self, node: &str, name: &str, value: Param<'_>) -> Result<(u32, ParamValue)> {
        let scalar = |dtype, value| {
            let data_type = types::dtype_code(dtype);
            Ok((sys::PARAM_SCALAR, ParamValue { scalar: Scalar { data_type, value } }))
        };
        let (dtype, shape, bytes): (_, _, &[u8]) = match value {
            Param::U32(v) => return scalar(DType::U32, word(v)),
            Param::I32(v) => return scalar(DType::I32, word(v.cast_unsigned())),
            Param::F32(v) => return scalar(DType::F32, word(v.to_bits())),
            Param::Bool(v) => return scalar(DType::Bool, word(v.into())),
            Param::U32s(shape, values) => (DType::U32, shape, bytemuck::cast_slice(values)),
            Param::I32s(shape, values) => (DType::I32, shape, bytemuck::cast_slice(values)),
        };
        let info = TensorInfo::new(format!("{node}.{name}"), dtype, shape);
        let tensor = self.declare(&info, Kind::Static(bytes), Weights::None)?;
        Ok((sys::PARAM_TENSOR, ParamValue { tensor }))
    }

    fn resolve(&self, node: &str, op_type: &str, handles: &[TensorHandle]) -> Result<Vec<Tensor>> {
        handles
            .iter()
            .map(|handle| {
                let slot = self.tensors.get(handle.index as usize);
                match slot.filter(|_| handle.graph == self.serial) {
                    Some(slot) => Ok(slot.raw),
                    None => Err(Error::new(
                        ErrorKind::Internal,
                        format!(
                            "graph {:?}: node {node:?} ({op_type}) uses a tensor of another graph",
                            self.name
                        ),
                    )),
                }
            })
            .collect()
    }
}

/// Gives a new file its length and its place on the disk, so that writing to its mapping cannot
/// run out of room, which would end the process.
fn reserve(file: &File, size: u64) -> std::io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        use std::os::fd::AsRawFd as _;
        let size = libc::off_t::try_from(size).map_err(std::io::Error::other)?;
        // SAFETY: takes plain numbers; the descriptor is open.
        let error = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, size) };
        if error != 0 {
            return Err(std::io::Error::from_raw_os_error(error));
        }
        Ok(())
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    file.set_len(size)
}

/// Likely reason why a graph does not compile for a chip.
fn not_compiled(target: Target) -> String {
    let plain = "an op, shape or element type is not supported on this target";
    match target.vtcm_mb {
        Some(mb) if mb < USUAL_VTCM_MB => format!(
            "{plain}, or needs more than the {mb} MB of tightly coupled memory (VTCM) that this chip has: prompt graphs \
             for fewer tokens need less, and so does a model of a smaller hidden size"
        ),
        Some(_) => plain.to_owned(),
        None => format!(
            "{plain}, or needs more tightly coupled memory (VTCM) than the library takes for this chip, for which no \
             size is known here: if the device is another chip of this architecture, name that one as the target"
        ),
    }
}

/// MB of VTCM that most chips have.
const USUAL_VTCM_MB: u32 = 8;

/// A scalar of up to 32 bits, the rest of the union zero.
fn word(bits: u32) -> ScalarValue {
    ScalarValue { bits: bits.into() }
}

/// Lays `configs` out as the library reads them, for the time of `call`.
fn with_configs<T>(configs: &[GraphConfig], call: impl FnOnce(sys::ConfigList) -> T) -> Result<T> {
    let mut texts = Vec::new();
    let mut custom = Vec::with_capacity(configs.len());
    for config in configs {
        let mut value = HtpGraphValue { opaque: [0; 6] };
        let option = match config {
            GraphConfig::OptimizationLevel(level) => {
                value.optimization =
                    sys::Optimization { kind: sys::OPTIMIZATION_LEVEL, value: f32::from(*level) };
                sys::HTP_GRAPH_OPTIMIZATION
            }
            GraphConfig::VtcmMb(mb) => {
                value.word = *mb;
                sys::HTP_GRAPH_VTCM_MB
            }
            GraphConfig::HvxThreads(threads) => {
                value.number = *threads;
                sys::HTP_GRAPH_HVX_THREADS
            }
            GraphConfig::Compiler { key, value: setting } => {
                let key = c_string(key)?;
                let scalar = match setting {
                    CompilerValue::U32(v) => {
                        Scalar { data_type: types::dtype_code(DType::U32), value: word(*v) }
                    }
                    CompilerValue::F32(v) => Scalar {
                        data_type: types::dtype_code(DType::F32),
                        value: word(v.to_bits()),
                    },
                    CompilerValue::Bool(v) => Scalar {
                        data_type: types::dtype_code(DType::Bool),
                        value: word((*v).into()),
                    },
                    CompilerValue::Text(v) => {
                        let v = c_string(v)?;
                        let value = ScalarValue { string: v.as_ptr() };
                        texts.push(v);
                        Scalar { data_type: sys::TYPE_STRING, value }
                    }
                };
                value.finalize = sys::FinalizeEntry { key: key.as_ptr(), value: scalar };
                texts.push(key);
                sys::HTP_GRAPH_FINALIZE
            }
        };
        custom.push(HtpGraphConfig { option, value });
    }
    let entries: Vec<Config> = custom
        .iter()
        .map(|custom| Config {
            option: sys::CONFIG_CUSTOM,
            value: ConfigValue { pointer: std::ptr::from_ref(custom).cast::<c_void>() },
        })
        .collect();
    let result = with_list(&entries, call);
    drop(texts);
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chip_of_little_memory_may_be_too_small() {
        assert!(!not_compiled(Target::V73).contains("VTCM"));
        let hint = |name: &str| Target::named(name).map(not_compiled).unwrap();
        assert!(hint("SSG2115P").contains("than the 2 MB of tightly coupled memory"));
        assert!(hint("rb3-gen-2").contains("for which no size is known here"));
    }
}
