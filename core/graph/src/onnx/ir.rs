//! The graph beside the ONNX graph: what the compiler for the NPU needs of it, as JSON in the model's metadata.
//!
//! Numbers of constants and weights stay where the ONNX graph has them, in initializers that are called after their
//! tensors (`format::suffix`).

use qhx_base::{Error, ErrorKind, Result};
use qhx_types::quantized::{Bits, QuantizedForm};
use serde::{Deserialize, Serialize};

use crate::graph::{Elem, Graph, Op, Origin, TensorId};
use crate::weight::{Storage, Weight};

/// The key in `ModelProto.metadata_props`.
pub(super) const KEY: &str = "qhx.graph";
/// The version that is written, and the only one that is read.
pub const VERSION: u32 = 2;

/// The version alone, which is read first.
#[derive(Debug, Deserialize)]
pub(super) struct Versioned {
    pub version: u32,
}

/// A graph without its numbers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredGraph {
    pub version: u32,
    pub name: String,
    pub tensors: Vec<StoredTensor>,
    pub nodes: Vec<StoredNode>,
    /// Indices of tensors.
    pub outputs: Vec<u32>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredTensor {
    pub name: String,
    pub elem: Elem,
    pub shape: Vec<usize>,
    pub origin: StoredOrigin,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum StoredOrigin {
    Input,
    Constant,
    Weight(StoredWeight),
    Node,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredWeight {
    pub storage: StoredStorage,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum StoredStorage {
    Float,
    Int8,
    Blocks {
        bits: u32,
        block: usize,
        #[serde(default)]
        offsets: bool,
    },
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredNode {
    pub name: String,
    pub op: Op,
    /// Indices of tensors.
    pub inputs: Vec<u32>,
    pub output: u32,
}

impl StoredStorage {
    /// The form of the weight in memory; none where the integers have another width than there is.
    pub(super) fn storage(&self) -> Option<Storage> {
        Some(match self {
            Self::Float => Storage::Float,
            Self::Int8 => Storage::Int8,
            Self::Blocks { bits, block, offsets } => {
                let bits = [Bits::Four, Bits::Eight].into_iter().find(|b| b.count() == *bits)?;
                Storage::Blocks(QuantizedForm { bits, block: *block, offsets: *offsets })
            }
        })
    }
}

/// The JSON of a graph.
pub(super) fn json(graph: &Graph) -> Result<String> {
    let tensor = |tensor: &crate::graph::Tensor| StoredTensor {
        name: tensor.name.clone(),
        elem: tensor.elem,
        shape: tensor.shape.clone(),
        origin: match &tensor.origin {
            Origin::Input => StoredOrigin::Input,
            Origin::Constant(_) => StoredOrigin::Constant,
            Origin::Weight(weight) => StoredOrigin::Weight(stored_weight(weight)),
            Origin::Node(_) => StoredOrigin::Node,
        },
    };
    let list = |ids: &[TensorId]| ids.iter().map(|id| id.index).collect();
    let nodes = graph.nodes().iter().map(|node| StoredNode {
        name: node.name.clone(),
        op: node.op.clone(),
        inputs: list(&node.inputs),
        output: node.output.index,
    });
    let stored = StoredGraph {
        version: VERSION,
        name: graph.name().to_owned(),
        tensors: graph.tensors().iter().map(tensor).collect(),
        nodes: nodes.collect(),
        outputs: list(graph.outputs()),
    };
    serde_json::to_string(&stored).map_err(|e| {
        Error::caused(ErrorKind::Internal, format_args!("graph {:?}", graph.name()), e)
    })
}

fn stored_weight(weight: &Weight) -> StoredWeight {
    let storage = match weight.storage() {
        Storage::Float => StoredStorage::Float,
        Storage::Int8 => StoredStorage::Int8,
        Storage::Blocks(form) => StoredStorage::Blocks {
            bits: form.bits.count(),
            block: form.block,
            offsets: form.offsets,
        },
    };
    StoredWeight { storage }
}
