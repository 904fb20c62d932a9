//! What a context binary says about itself, read without loading it.

#![expect(unsafe_code, reason = "asks the system library for metadata")]

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::codes;
use super::library::{ApiVersion, SystemLibrary};
use super::metadata::{self, Fault};
use super::{probe, sys};
use crate::artifacts::Mapped;
use crate::{DType, Error, ErrorKind, GraphInfo, Quantization, Result, TensorInfo};

/// The metadata of a context binary.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    #[serde(default, skip_serializing_if = "Quantization::is_none")]
    pub quantization: Quantization,
}

impl BinaryInfo {
    /// Reads the metadata of a file, in a process of its own where the program has helpers
    /// ([`crate::child`]): some damaged files crash the library. `tried` is the file that remembers
    /// which ones did.
    pub fn open(system: &SystemLibrary, file: &Mapped, tried: Option<&Path>) -> Result<Self> {
        probe::read(system, file, tried)
    }

    /// Reads the metadata of `bytes` in this very process, which some damaged files crash. `name` is
    /// the file's name, for messages.
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
        // checked and copied here, and `handle` is freed afterwards.
        unsafe { metadata::copy(info, bytes.len() as u64) }.map_err(|e| damaged(name, e))
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

/// The library read the file, but what it says of it makes no sense.
fn damaged(name: &str, fault: Fault) -> Error {
    match fault {
        Fault::Version(version) => Error::new(
            ErrorKind::Context,
            format!("{name}: metadata of version {version}, qhx knows versions 1 to 3"),
        )
        .hint("update qhx, or use libQnnSystem.so of the QAIRT version that made the binary"),
        Fault::Content(what) => {
            Error::new(ErrorKind::Artifact, format!("{name}: the metadata is damaged: {what}"))
                .hint("download the file again and compare its size and hash with the bundle's")
        }
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
