//! Data types, quantisation encodings and the description of a graph's tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Result};

/// Element type of a tensor. The names are those of the JSON forms (`f16`, `sfixed8`, …).
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
    /// IEEE 754 binary64.
    F64,
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
    /// Unsigned 64-bit integer.
    U64,
    /// Boolean, one byte.
    Bool,
    /// Quantised signed 8-bit: real = (q + offset) · scale.
    SFixed8,
    /// Quantised signed 16-bit.
    SFixed16,
    /// Quantised signed 32-bit (biases).
    SFixed32,
    /// Quantised unsigned 8-bit.
    UFixed8,
    /// Quantised unsigned 16-bit.
    UFixed16,
    /// Quantised unsigned 32-bit.
    UFixed32,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::Bool | Self::SFixed8 | Self::UFixed8 => 1,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 | Self::SFixed16 | Self::UFixed16 => 2,
            Self::F32 | Self::I32 | Self::U32 | Self::SFixed32 | Self::UFixed32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// The lower-case name used in messages and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::U16 => "u16",
            Self::U32 => "u32",
            Self::U64 => "u64",
            Self::Bool => "bool",
            Self::SFixed8 => "sfixed8",
            Self::SFixed16 => "sfixed16",
            Self::SFixed32 => "sfixed32",
            Self::UFixed8 => "ufixed8",
            Self::UFixed16 => "ufixed16",
            Self::UFixed32 => "ufixed32",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How integers of a quantised tensor map to reals: `real = (q + offset) · scale`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(tag = "encoding", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Quantization {
    /// Not quantised, or not said.
    #[default]
    None,
    /// One scale and offset for the whole tensor.
    PerTensor {
        /// Size of one step.
        scale: f32,
        /// Added to the integer before scaling; at most 0 for unsigned types.
        offset: i32,
    },
    /// One scale and offset for each index along `axis`.
    PerAxis {
        /// The quantised axis.
        axis: usize,
        /// One per index along the axis.
        scales: Vec<f32>,
        /// One per index along the axis; empty means all zero.
        offsets: Vec<i32>,
    },
    /// An encoding that qhx does not interpret; the number is the library's.
    Other {
        /// `Qnn_QuantizationEncoding_t`.
        code: u32,
    },
}

impl Quantization {
    /// True when there is no encoding.
    pub fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }
}

/// Name, element type and shape of one input or output of a graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// The name in the graph.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Row-major dimensions.
    pub shape: Vec<usize>,
    /// Encoding, for quantised types.
    #[serde(default, skip_serializing_if = "Quantization::is_none")]
    pub quantization: Quantization,
}

impl TensorInfo {
    /// A tensor without quantisation.
    pub fn new(name: impl Into<String>, dtype: DType, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), dtype, shape: shape.into(), quantization: Quantization::None }
    }

    /// Number of elements. Errors when the product does not fit.
    pub fn elements(&self) -> Result<usize> {
        self.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(|| self.too_large())
    }

    /// Number of bytes. Errors when the product does not fit.
    pub fn byte_len(&self) -> Result<usize> {
        self.elements()?.checked_mul(self.dtype.size()).ok_or_else(|| self.too_large())
    }

    fn too_large(&self) -> Error {
        Error::new(ErrorKind::Graph, format!("tensor {self} is larger than memory can be"))
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
    /// The name in the context.
    pub name: String,
    /// Inputs in the graph's order.
    pub inputs: Vec<TensorInfo>,
    /// Outputs in the graph's order.
    pub outputs: Vec<TensorInfo>,
}

impl GraphInfo {
    /// The tensor behind a port.
    pub fn tensor(&self, port: Port) -> Option<&TensorInfo> {
        match port {
            Port::Input(i) => self.inputs.get(i),
            Port::Output(i) => self.outputs.get(i),
        }
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
