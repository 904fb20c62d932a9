//! Plain descriptions that cross the boundary as JSON, and prompt segments.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE 754 binary32.
    F32,
    /// Signed 8-bit integer.
    I8,
    /// Signed 16-bit integer.
    I16,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 8-bit integer.
    U8,
    /// Unsigned 16-bit integer.
    U16,
    /// Unsigned 32-bit integer.
    U32,
    /// Boolean, one byte.
    Bool,
    /// Quantised signed 8-bit.
    SFixed8,
    /// Quantised signed 16-bit.
    SFixed16,
    /// Quantised unsigned 8-bit.
    UFixed8,
    /// Quantised unsigned 16-bit.
    UFixed16,
    /// A type that this version of the kit does not know.
    #[serde(other)]
    Other,
}

impl DType {
    /// Bytes of one element, 0 for [`DType::Other`].
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::Bool | Self::SFixed8 | Self::UFixed8 => 1,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 | Self::SFixed16 | Self::UFixed16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::I64 => 8,
            Self::Other => 0,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", format!("{self:?}").to_lowercase())
    }
}

/// One input or output of a graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// The name in the graph.
    pub name: String,
    /// The role that the op knows it by: the key of `plan.params.tensors` that maps to `name`, or
    /// the name itself.
    #[serde(default)]
    pub role: String,
    /// Element type.
    pub dtype: DType,
    /// Row-major dimensions.
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Number of bytes.
    pub fn byte_len(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// The last dimension, or 1 for a scalar.
    pub fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

impl fmt::Display for TensorInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{:?}", self.name, self.dtype, self.shape)
    }
}

/// Inputs and outputs of one graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GraphInfo {
    /// Manifest key of the context that holds it.
    #[serde(default)]
    pub context: String,
    /// The name in the context.
    pub name: String,
    /// Inputs in the graph's order.
    pub inputs: Vec<TensorInfo>,
    /// Outputs in the graph's order.
    pub outputs: Vec<TensorInfo>,
}

impl GraphInfo {
    /// Index of the input with a role.
    pub fn input(&self, role: &str) -> Option<usize> {
        self.inputs.iter().position(|t| t.role == role)
    }

    /// Index of the output with a role.
    pub fn output(&self, role: &str) -> Option<usize> {
        self.outputs.iter().position(|t| t.role == role)
    }

    /// Index of the input with a role; the error lists what the graph has.
    pub fn require_input(&self, role: &str) -> Result<usize> {
        self.input(role).ok_or_else(|| self.missing("input", role, &self.inputs))
    }

    /// Index of the output with a role; the error lists what the graph has.
    pub fn require_output(&self, role: &str) -> Result<usize> {
        self.output(role).ok_or_else(|| self.missing("output", role, &self.outputs))
    }

    fn missing(&self, what: &str, role: &str, have: &[TensorInfo]) -> Error {
        const SHOWN: usize = 12;
        let mut names: Vec<_> = have.iter().take(SHOWN).map(|t| t.name.as_str()).collect();
        if have.len() > SHOWN {
            names.push("…");
        }
        Error::graph(format!(
            "graph {:?} has no {what} {role:?}; it has {}. If the graph calls it otherwise, say so \
             in the manifest: plan.params.tensors {{\"{role}\": \"name in the graph\"}}",
            self.name,
            names.join(", ")
        ))
    }
}

/// One input or output of a graph, by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Port {
    /// Index into [`GraphInfo::inputs`].
    Input(usize),
    /// Index into [`GraphInfo::outputs`].
    Output(usize),
}

/// What an op can be asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Task {
    /// Produce tokens.
    Generate,
    /// Produce one vector per text.
    Embed,
}

/// What a prompt segment can carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Modality {
    /// Token ids.
    Text,
    /// RGB8 pixels.
    Image,
    /// Mono f32 samples.
    Audio,
}

/// What an op says of itself before any bundle is opened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OpDescription {
    /// The name that manifests select it by: lower-case letters, digits and `_`.
    pub name: String,
    /// One sentence.
    pub summary: String,
    /// Version of the op.
    pub version: String,
    /// Tasks it can do.
    pub tasks: Vec<Task>,
    /// Segments it understands.
    pub modalities: Vec<Modality>,
    /// JSON Schema of the manifest's `plan.params`.
    pub params_schema: serde_json::Value,
}

/// What an op says of itself once a bundle is open.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpInfo {
    /// Number of logits, 0 for an op that does not generate.
    pub vocab: usize,
    /// Positions that the state can hold.
    pub max_ctx: usize,
    /// Elements of an embedding, 0 for an op that does not embed.
    pub embedding_dim: usize,
    /// [`crate::Op::truncate`] works.
    pub can_truncate: bool,
    /// [`crate::Op::snapshot`] and [`crate::Op::restore`] work.
    pub can_snapshot: bool,
}

/// A piece of a prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Segment<'a> {
    /// Token ids.
    Tokens(&'a [u32]),
    /// Interleaved RGB, 8 bits a channel, rows from the top.
    Image {
        /// `width · height · 3` bytes.
        rgb: &'a [u8],
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
    },
    /// Mono samples in −1…1.
    Audio {
        /// The samples.
        samples: &'a [f32],
        /// Samples per second.
        rate: u32,
    },
    /// A kind of segment that this version of the kit does not know.
    Unknown(u32),
}
