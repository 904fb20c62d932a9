//! What a context binary says about itself, read without loading it.

#![expect(unsafe_code, reason = "copies the metadata that the system library answers with")]

use std::ffi::c_void;

use serde::Serialize;

use super::codes;
use super::library::{ApiVersion, SystemLibrary, text};
use super::sys::{self, ContextBlob, GraphBlob, QuantizeParams, ScaleOffset, Tensor};
use super::types;
use crate::{DType, Error, ErrorKind, GraphInfo, Quantization, Result, TensorInfo};

/// The metadata of a context binary.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BinaryInfo {
    /// Length of the file.
    pub file_bytes: u64,
    /// The backend it is for; 6 is HTP.
    pub backend_id: u32,
    /// Build of the compiler that made it, such as `v2.51.0.…`.
    pub build_id: String,
    /// Version of the core interface of that compiler.
    pub core_version: ApiVersion,
    /// Version of the HTP interface of that compiler.
    pub backend_version: ApiVersion,
    /// Format of the context's blob.
    pub blob_version: ApiVersion,
    /// Length of the context's blob, 0 when not said.
    pub blob_bytes: u64,
    /// Hexagon architecture it is compiled for: 75 for v75.
    pub dsp_arch: Option<u32>,
    /// The library's number of the chip it is compiled for.
    pub soc_model: Option<u32>,
    /// The graphs.
    pub graphs: Vec<BinaryGraph>,
}

/// One graph of a binary.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BinaryGraph {
    /// Name of the graph.
    pub name: String,
    /// Inputs in the binary's order.
    pub inputs: Vec<BinaryTensor>,
    /// Outputs in the binary's order.
    pub outputs: Vec<BinaryTensor>,
    /// Memory and compilation figures; `None` for binaries that carry none.
    pub figures: Option<GraphFigures>,
}

/// Figures of one graph. A figure that the binary does not carry is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct GraphFigures {
    /// Memory for intermediate values that do not fit the tightly coupled memory.
    pub spill_fill_bytes: Option<u64>,
    /// Tightly coupled memory it uses. Libraries disagree: a small number is MB, a large one bytes.
    pub vtcm: Option<u32>,
    /// Effort of the compiler, 1 to 3.
    pub optimization_level: Option<u32>,
    /// Number of vector threads.
    pub hvx_threads: Option<u64>,
    /// Memory for inputs and outputs.
    pub io_tensor_bytes: Option<u64>,
    /// Memory for the ops.
    pub op_data_bytes: Option<u64>,
    /// Memory for constants, which are mostly weights.
    pub const_bytes: Option<u64>,
    /// Memory for tensors in DDR.
    pub ddr_tensor_bytes: Option<u64>,
    /// Weights shared with other graphs; more than 0 marks a binary with shared weights.
    pub shared_weight_bytes: Option<u64>,
}

/// An input or output as the binary describes it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BinaryTensor {
    /// The number by which the library knows it.
    pub id: u32,
    /// Name in the graph.
    pub name: String,
    /// Element type, when qhx knows it.
    pub dtype: Option<DType>,
    /// The library's number of the element type.
    pub dtype_code: u32,
    /// The library's number of the memory layout; 0 is dense.
    pub format: u32,
    /// Row-major dimensions.
    pub shape: Vec<usize>,
    /// Encoding of a quantised type.
    #[serde(skip_serializing_if = "Quantization::is_none")]
    pub quantization: Quantization,
}

impl BinaryInfo {
    /// Reads the metadata of `bytes`. `name` is the file's name, for messages.
    pub fn read(system: &SystemLibrary, name: &str, bytes: &[u8]) -> Result<Self> {
        if bytes.is_empty() {
            return Err(Error::new(
                ErrorKind::Artifact,
                format!("{name}: the file is empty, expected a QNN context binary"),
            )
            .hint("the download may be incomplete"));
        }
        let handle = SystemContext::create(system)?;
        let get = need(system, system.table().get_metadata, "systemContextGetMetaData")?;
        let mut info = std::ptr::null();
        // SAFETY: the handle is alive; the library reads the bytes, whose length is given, and
        // answers with a description that lives until the handle is freed.
        let status =
            unsafe { get(handle.raw, bytes.as_ptr().cast(), bytes.len() as u64, &raw mut info) };
        if status != 0 || info.is_null() {
            return Err(not_a_binary(name, bytes, status));
        }
        // SAFETY: on success `info` leads to a description of the version it states. All of it is
        // copied here, and `handle` is freed afterwards.
        unsafe { copy_info(info, name, bytes.len() as u64) }
    }

    /// True when graphs of the binary share weights.
    pub fn shares_weights(&self) -> bool {
        self.graphs.iter().filter_map(|g| g.figures?.shared_weight_bytes).any(|bytes| bytes > 0)
    }

    /// The QAIRT release of the compiler, such as `2.51`.
    pub fn qairt(&self) -> Option<String> {
        let build = self.build_id.strip_prefix('v').unwrap_or(&self.build_id);
        let mut parts = build.split('.');
        match (parts.next()?.parse::<u32>(), parts.next()?.parse::<u32>()) {
            (Ok(major), Ok(minor)) => Some(format!("{major}.{minor}")),
            _ => self.core_version.qairt().map(str::to_owned),
        }
    }
}

impl BinaryGraph {
    /// The description that qhx executes by. Fails for an element type or layout it cannot feed.
    pub fn info(&self) -> Result<GraphInfo> {
        let convert = |tensors: &[BinaryTensor]| -> Result<Vec<TensorInfo>> {
            tensors.iter().map(|t| t.info(&self.name)).collect()
        };
        Ok(GraphInfo {
            name: self.name.clone(),
            inputs: convert(&self.inputs)?,
            outputs: convert(&self.outputs)?,
        })
    }
}

impl BinaryTensor {
    fn info(&self, graph: &str) -> Result<TensorInfo> {
        let Some(dtype) = self.dtype else {
            return Err(Error::new(
                ErrorKind::Graph,
                format!(
                    "graph {graph:?}: tensor {:?} has element type {:#x}, which qhx does not know",
                    self.name, self.dtype_code
                ),
            )
            .hint("compile the graph with 8-, 16- or 32-bit inputs and outputs"));
        };
        if self.format != 0 {
            return Err(Error::new(
                ErrorKind::Graph,
                format!(
                    "graph {graph:?}: tensor {:?} has memory layout {}, qhx feeds dense tensors (0)",
                    self.name, self.format
                ),
            )
            .hint("compile the graph without native layouts of its inputs and outputs"));
        }
        let info = TensorInfo {
            name: self.name.clone(),
            dtype,
            shape: self.shape.clone(),
            quantization: self.quantization.clone(),
        };
        let bytes = info.byte_len()?;
        if u32::try_from(bytes).is_err() {
            return Err(Error::new(
                ErrorKind::Graph,
                format!("graph {graph:?}: tensor {info} has {bytes} bytes, more than QNN can pass"),
            ));
        }
        Ok(info)
    }
}

fn not_a_binary(name: &str, bytes: &[u8], status: u64) -> Error {
    let what = if bytes.starts_with(b"version https://git-lfs") {
        "a Git LFS pointer"
    } else if bytes.starts_with(b"\x7fELF") {
        "a shared library"
    } else {
        "not a QNN context binary, or cut off or damaged"
    };
    codes::error(
        ErrorKind::Artifact,
        format_args!("{name} ({} bytes): {what}", bytes.len()),
        status,
    )
    .hint("download the file again and compare its size and hash with the bundle's")
}

fn need<T>(system: &SystemLibrary, function: Option<T>, name: &str) -> Result<T> {
    function.ok_or_else(|| {
        Error::new(
            ErrorKind::Runtime,
            format!(
                "{}: the library (system interface {}) lacks {name}",
                system.path().display(),
                system.version()
            ),
        )
        .hint("use libQnnSystem.so of QAIRT 2.36 or newer")
    })
}

/// Owns what the description points into.
struct SystemContext<'a> {
    raw: sys::Handle,
    system: &'a SystemLibrary,
}

impl<'a> SystemContext<'a> {
    fn create(system: &'a SystemLibrary) -> Result<Self> {
        let create = need(system, system.table().context_create, "systemContextCreate")?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is valid for writing.
        let status = unsafe { create(&raw mut raw) };
        if status != 0 {
            return Err(codes::error(ErrorKind::Runtime, "opening a system context", status));
        }
        Ok(Self { raw, system })
    }
}

impl Drop for SystemContext<'_> {
    fn drop(&mut self) {
        if let Some(free) = self.system.table().context_free {
            // SAFETY: the handle is alive and what it owns was copied.
            super::device::freed("system context", unsafe { free(self.raw) });
        }
    }
}

/// # Safety
/// `info` leads to a description that the system library made and still owns.
unsafe fn copy_info(
    info: *const sys::BinaryInfo,
    name: &str,
    file_bytes: u64,
) -> Result<BinaryInfo> {
    // SAFETY: the caller vouches for the description; the version says which member of the union
    // is set, and every pointer in it leads to as many elements as the count beside it says.
    unsafe {
        let version = (*info).version;
        match version {
            1 | 2 => {
                // Version 1 ends before `platform`, which is not read.
                let body = &(*info).body.v1;
                Ok(BinaryInfo {
                    file_bytes,
                    backend_id: body.backend_id,
                    build_id: text(body.build_id),
                    core_version: body.core.into(),
                    backend_version: body.backend.into(),
                    blob_version: body.blob_version.into(),
                    blob_bytes: body.blob_size,
                    dsp_arch: None,
                    soc_model: None,
                    graphs: copy_graphs(body.graphs, body.graph_count),
                })
            }
            3 => {
                let body = &(*info).body.v3;
                let metadata = body.metadata.cast::<ContextBlob>();
                let fits = body.metadata_size as usize >= size_of::<ContextBlob>();
                let dsp_arch =
                    (fits && !metadata.is_null()).then(|| metadata.read_unaligned().dsp_arch);
                Ok(BinaryInfo {
                    file_bytes,
                    backend_id: body.backend_id,
                    build_id: text(body.build_id),
                    core_version: body.core.into(),
                    backend_version: body.backend.into(),
                    blob_version: body.blob_version.into(),
                    blob_bytes: body.blob_size,
                    dsp_arch,
                    soc_model: Some(body.soc_model),
                    graphs: copy_graphs(body.graphs, body.graph_count),
                })
            }
            _ => Err(Error::new(
                ErrorKind::Context,
                format!("{name}: metadata of version {version}, qhx knows versions 1 to 3"),
            )
            .hint("update qhx, or use libQnnSystem.so of the QAIRT version that made the binary")),
        }
    }
}

/// # Safety
/// `graphs` leads to `count` descriptions.
unsafe fn copy_graphs(graphs: *const sys::GraphInfo, count: u32) -> Vec<BinaryGraph> {
    if graphs.is_null() {
        return Vec::new();
    }
    (0..count as usize)
        .map(|i| {
            // SAFETY: the index is below the count; versions before 3 end before `blob_size`,
            // which is read for version 3 only.
            unsafe {
                let graph = graphs.add(i);
                BinaryGraph {
                    name: text((*graph).name),
                    inputs: copy_tensors((*graph).inputs, (*graph).input_count),
                    outputs: copy_tensors((*graph).outputs, (*graph).output_count),
                    figures: if (*graph).version >= 3 {
                        copy_figures((*graph).blob, (*graph).blob_size)
                    } else {
                        None
                    },
                }
            }
        })
        .collect()
}

/// # Safety
/// `blob` is NULL or leads to `size` bytes.
unsafe fn copy_figures(blob: *const c_void, size: u32) -> Option<GraphFigures> {
    if blob.is_null() || size < 16 {
        return None;
    }
    let size = size as usize;
    let mut copy = [0u8; size_of::<GraphBlob>()];
    // SAFETY: copies no more than the blob and the array hold.
    unsafe {
        std::ptr::copy_nonoverlapping(blob.cast::<u8>(), copy.as_mut_ptr(), size.min(copy.len()));
    }
    // SAFETY: the array has the structure's size, and any bytes are valid for its plain numbers.
    let values: GraphBlob = unsafe { copy.as_ptr().cast::<GraphBlob>().read_unaligned() };
    macro_rules! field {
        ($name:ident) => {{
            let end = std::mem::offset_of!(GraphBlob, $name) + size_of_val(&values.$name);
            (end <= size).then_some(values.$name)
        }};
    }
    let first = values.version == 1;
    let second = first && values.version2 == 2;
    Some(GraphFigures {
        spill_fill_bytes: field!(spill_fill).filter(|_| first),
        vtcm: field!(vtcm).filter(|_| first),
        optimization_level: field!(optimization).filter(|_| first),
        hvx_threads: field!(hvx_threads).filter(|_| first),
        io_tensor_bytes: field!(io_tensors).filter(|_| second),
        op_data_bytes: field!(op_data).filter(|_| second),
        const_bytes: field!(constants).filter(|_| second),
        ddr_tensor_bytes: field!(ddr_tensors).filter(|_| second),
        shared_weight_bytes: field!(shared_weights).filter(|_| second),
    })
}

/// # Safety
/// `tensors` leads to `count` tensors.
unsafe fn copy_tensors(tensors: *const Tensor, count: u32) -> Vec<BinaryTensor> {
    if tensors.is_null() {
        return Vec::new();
    }
    (0..count as usize)
        .map(|i| {
            // SAFETY: the index is below the count. Both versions have these fields at these
            // places; those of version 2 alone are not read.
            unsafe {
                let tensor = tensors.add(i);
                let rank = if (*tensor).dimensions.is_null() { 0 } else { (*tensor).rank as usize };
                let code = (*tensor).data_type;
                BinaryTensor {
                    id: (*tensor).id,
                    name: text((*tensor).name),
                    dtype: types::dtype(code),
                    dtype_code: code,
                    format: (*tensor).data_format,
                    shape: (0..rank).map(|d| (*tensor).dimensions.add(d).read() as usize).collect(),
                    quantization: copy_quantization(&(*tensor).quantize),
                }
            }
        })
        .collect()
}

/// # Safety
/// The parameters are the library's, so that their encoding says which member of the union is set.
unsafe fn copy_quantization(params: &QuantizeParams) -> Quantization {
    if params.definition != sys::QUANT_DEFINED {
        return Quantization::None;
    }
    // SAFETY: the caller vouches for the encoding; lists have as many elements as it says.
    unsafe {
        match params.encoding {
            sys::ENCODING_SCALE_OFFSET => {
                let ScaleOffset { scale, offset } = params.value.scale_offset;
                Quantization::PerTensor { scale, offset }
            }
            sys::ENCODING_BW_SCALE_OFFSET => {
                let value = params.value.bw;
                if value.bitwidth == 8 || value.bitwidth == 16 || value.bitwidth == 32 {
                    Quantization::PerTensor { scale: value.scale, offset: value.offset }
                } else {
                    Quantization::Other { code: params.encoding }
                }
            }
            sys::ENCODING_AXIS_SCALE_OFFSET => {
                let value = params.value.axis;
                let values = slice(value.values, value.count);
                Quantization::PerAxis {
                    axis: usize::try_from(value.axis).unwrap_or(0),
                    scales: values.iter().map(|v| v.scale).collect(),
                    offsets: values.iter().map(|v| v.offset).collect(),
                }
            }
            sys::ENCODING_BW_AXIS_SCALE_OFFSET if params.value.bw_axis.bitwidth == 8 => {
                let value = params.value.bw_axis;
                Quantization::PerAxis {
                    axis: usize::try_from(value.axis).unwrap_or(0),
                    scales: slice(value.scales, value.count).to_vec(),
                    offsets: slice(value.offsets, value.count).to_vec(),
                }
            }
            sys::UNDEFINED => Quantization::None,
            code => Quantization::Other { code },
        }
    }
}

/// # Safety
/// `pointer` is NULL or leads to `count` elements that outlive the use of the slice.
unsafe fn slice<'a, T>(pointer: *const T, count: u32) -> &'a [T] {
    if pointer.is_null() {
        return &[];
    }
    // SAFETY: the caller vouches for the list.
    unsafe { std::slice::from_raw_parts(pointer, count as usize) }
}
