//! Metadata that a context binary declares about itself.

use qhx_base::{Error, ErrorKind, Result};
use qhx_types::{DType, GraphInfo, Quantization, TensorInfo};
use serde::{Deserialize, Serialize};

use super::library::ApiVersion;

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
    /// Length of the context's blob, 0 when not declared.
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
    /// Weights shared with other graphs; more than 0 means a binary with shared weights.
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
    ///
    /// # Errors
    /// For an element type or layout that qhx cannot feed.
    pub fn info(&self) -> Result<GraphInfo> {
        let convert = |tensors: &[BinaryTensor]| -> Result<Vec<TensorInfo>> {
            tensors.iter().map(|t| t.info(&self.name)).collect()
        };
        Ok(GraphInfo::new(&self.name, convert(&self.inputs)?, convert(&self.outputs)?))
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
            quantization: self.quantization.clone(),
            ..TensorInfo::new(&self.name, dtype, self.shape.as_slice())
        };
        let bytes = info.try_byte_len().map_err(Error::size)?;
        if u32::try_from(bytes).is_err() {
            return Err(Error::new(
                ErrorKind::Graph,
                format!("graph {graph:?}: tensor {info} has {bytes} bytes, more than QNN can pass"),
            ));
        }
        Ok(info)
    }
}
