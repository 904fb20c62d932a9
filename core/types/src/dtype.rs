//! Element types and quantisation encodings.

use std::fmt;

use serde::{Deserialize, Serialize};

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
    /// A type that this version does not know.
    #[serde(other)]
    Other,
}

impl DType {
    /// Bytes of one element, 0 for [`DType::Other`].
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::Bool | Self::SFixed8 | Self::UFixed8 => 1,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 | Self::SFixed16 | Self::UFixed16 => 2,
            Self::F32 | Self::I32 | Self::U32 | Self::SFixed32 | Self::UFixed32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::Other => 0,
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
            Self::Other => "other",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Mapping of the integers of a quantised tensor to reals: `real = (q + offset) · scale`. The zero point, the integer
/// that stands for 0, is `-offset`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(tag = "encoding", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Quantization {
    /// Not quantised, or not declared.
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
    /// An encoding that this version does not know.
    #[serde(other)]
    Unknown,
}

impl Quantization {
    /// True when there is no encoding.
    pub fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_newer_side_declares_is_read_as_unknown() {
        let dtype: DType = serde_json::from_str("\"f8e4m3\"").unwrap();
        assert_eq!((dtype, dtype.size()), (DType::Other, 0));
        let blocks = r#"{"encoding": "per_block", "block": 32, "scales": [1.0]}"#;
        let encoding: Quantization = serde_json::from_str(blocks).unwrap();
        assert_eq!(encoding, Quantization::Unknown);
    }
}
