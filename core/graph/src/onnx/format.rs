//! Names and shapes in the ONNX files of bundles.
//!
//! A quantized weight is [`NBits`] or [`DequantizedBlocks`]; f16 is a `Cast` ([`STORED_FLOATS`]), int8 with one scale per
//! row a `DequantizeLinear` along axis [`ROW_AXIS`].

use crate::super_blocks::SUPER;
use qhx_types::quantized::{BLOCK, Bits, QuantizedForm};

/// Reductions over `axes` as an input of every reduction begin with this version.
pub(super) const OPSET: i64 = 18;
/// The IR version that goes with [`OPSET`].
pub(super) const IR_VERSION: i64 = 8;
/// The domain of ONNX Runtime's own operators
/// (<https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md>).
pub(super) const MICROSOFT: &str = "com.microsoft";
/// The version of the operators of [`MICROSOFT`].
pub(super) const MICROSOFT_OPSET: i64 = 1;

macro_rules! operators {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// An operator that the forge writes.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(super) enum Operator { $($(#[$doc])* $name,)* }

        impl Operator {
            /// The name in a file.
            pub(super) const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }
        }
    };
}

operators! {
    Abs, Add, Cast, Clip, Concat, Conv, DequantizeLinear, Div, Erf, Exp, Gather, Gemm, Identity,
    LayerNormalization, Log, MatMul,
    /// A matmul with weights of 4 bits, which it reads without dequantizing them first: [`NBits`].
    MatMulNBits,
    Max, Min, Mul, Neg, Reciprocal, ReduceMax, ReduceMean, ReduceSum, Relu, Reshape, Sigmoid, Sin,
    Slice, Softmax, Sqrt, Sub, Tanh, Transpose,
}

impl Operator {
    /// The domain in a file: empty for that of ONNX.
    pub(super) const fn domain(self) -> &'static str {
        match self {
            Self::MatMulNBits => MICROSOFT,
            _ => "",
        }
    }
}

/// Names of attributes.
pub(super) mod attribute {
    /// Axis of `DequantizeLinear`, `Softmax`, `LayerNormalization`, `Gather` and `Concat`.
    pub(in crate::onnx) const AXIS: &str = "axis";
    /// 0 if a reduction removes the axis.
    pub(in crate::onnx) const KEEP_DIMS: &str = "keepdims";
    /// Target type of `Cast`.
    pub(in crate::onnx) const TO: &str = "to";
    /// Axes of `Transpose` in their new order.
    pub(in crate::onnx) const PERM: &str = "perm";
    /// `Gemm` transposes the second matrix.
    pub(in crate::onnx) const TRANS_B: &str = "transB";
    /// Epsilon of `LayerNormalization`.
    pub(in crate::onnx) const EPSILON: &str = "epsilon";
    /// Filter sizes of `Conv`.
    pub(in crate::onnx) const KERNEL_SHAPE: &str = "kernel_shape";
    /// Strides of `Conv`.
    pub(in crate::onnx) const STRIDES: &str = "strides";
    /// Padding of `Conv`: zeros before each dimension, then those behind each.
    pub(in crate::onnx) const PADS: &str = "pads";
    /// Dilations of `Conv`.
    pub(in crate::onnx) const DILATIONS: &str = "dilations";
    /// Number of groups of `Conv`.
    pub(in crate::onnx) const GROUP: &str = "group";
    /// Number of inputs of `MatMulNBits`.
    pub(in crate::onnx) const K: &str = "K";
    /// Number of outputs of `MatMulNBits`.
    pub(in crate::onnx) const N: &str = "N";
    /// Width of an integer of `MatMulNBits`.
    pub(in crate::onnx) const BITS: &str = "bits";
    /// Number of inputs of `MatMulNBits` that share a scale.
    pub(in crate::onnx) const BLOCK_SIZE: &str = "block_size";
}

/// Names of the initializers of a weight: its own name, then one of these.
pub(super) mod suffix {
    /// Its values as f16.
    pub(in crate::onnx) const FLOAT16: &str = ".f16";
    /// Its integers of 8 bits, or of 4 bits a byte each.
    pub(in crate::onnx) const INT8: &str = ".int8";
    /// Its integers of 4 bits, for `MatMulNBits`.
    pub(in crate::onnx) const NBITS: &str = ".nbits";
    /// Its scales.
    pub(in crate::onnx) const SCALE: &str = ".scale";
    /// Its offsets, in steps of the scales.
    pub(in crate::onnx) const OFFSET: &str = ".offset";
    /// Its minima, instead of offsets, which nodes compute.
    pub(in crate::onnx) const MINIMUM: &str = ".min";
    /// Numbers of its super-blocks.
    pub(in crate::onnx) const UNITS: &str = ".units";
    /// Their multiples.
    pub(in crate::onnx) const MULTIPLES: &str = ".multiples";
    /// Addends of its offsets or minima to the reals of `MatMulNBits`, `[blocks, rows]`, which nodes compute.
    pub(in crate::onnx) const SHIFT: &str = ".shift";
}

/// Location of an initializer's bytes outside the model: the keys and values of `external_data`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ExternalData {
    /// The name of a file beside the model.
    pub(super) location: String,
    /// The first byte.
    pub(super) offset: u64,
    /// Number of bytes; if none, all that the shape asks for.
    pub(super) length: Option<u64>,
}

impl ExternalData {
    /// The key of the file's name.
    pub(super) const LOCATION: &str = "location";
    const OFFSET: &str = "offset";
    const LENGTH: &str = "length";

    /// The keys and their values, in the order in which they are written.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&'static str, String)> {
        let length = self.length.map(|length| (Self::LENGTH, length.to_string()));
        let first =
            [(Self::LOCATION, self.location.clone()), (Self::OFFSET, self.offset.to_string())];
        first.into_iter().chain(length)
    }

    /// Location declared by the values of keys; `None` if there is no file, or a number is malformed.
    pub(super) fn of<'a>(value: impl Fn(&str) -> Option<&'a str>) -> Option<Self> {
        let number = |key| match value(key) {
            None => Some(None),
            Some(text) => text.parse().ok().map(Some),
        };
        Some(Self {
            location: value(Self::LOCATION)?.to_owned(),
            offset: number(Self::OFFSET)?.unwrap_or(0),
            length: number(Self::LENGTH)?,
        })
    }
}

/// The axis of rows, along which `DequantizeLinear` has a scale for each.
pub(super) const ROW_AXIS: i64 = 0;

/// Operator that converts a weight's f16 to f32. Loaders that convert f16 to f32 themselves take it for a no-op.
pub(super) const STORED_FLOATS: Operator = Operator::Cast;

/// The axes of matrices of this rank in the order in which `Transpose` has rows and columns change places.
pub(super) fn swapped(rank: usize) -> Vec<i64> {
    let mut perm: Vec<i64> = (0..rank as i64).collect();
    if let [.., rows, columns] = perm.as_mut_slice() {
        std::mem::swap(rows, columns);
    }
    perm
}

/// A weight `[rows, columns]` of 4 bits in blocks of [`BLOCK`], for `MatMulNBits`: initializers `[rows, blocks, BLOCK /
/// 2]` of uint8 with two integers a byte ([`pack_nibbles`](qhx_types::quantized::pack_nibbles)) and `[rows, blocks]` of
/// scales: f32, or f16 that a `Cast` ([`STORED_FLOATS`]) makes f32.
///
/// Scales and minima that are [super-blocks](crate::super_blocks) are the halves of `Mul` of `[rows, blocks / 8, 1, 2, 1]`
/// units of f16 and `[rows, blocks / 8, 2, 2, 4]` multiples of uint8, both through `Cast`, by `Slice` and `Reshape`.
///
/// Offsets are stored as scales are. They are a term of their own, which `Add` adds: `Σ_b (Σ_{k in b} x_k) · shift_b`,
/// where a shift is what an offset adds to the reals of its block: `Mul` of offsets and scales, then `Transpose`. The
/// inner sum is `Reshape` to [`NBits::parts`] and `ReduceSum` along [`NBits::SUM_AXIS`], the outer one `MatMul`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NBits {
    /// Outputs.
    pub(super) rows: usize,
    /// Inputs.
    pub(super) columns: usize,
}

impl NBits {
    /// The form of the weight once its blocks are [`BLOCK`] long.
    pub(super) const FORM: QuantizedForm = QuantizedForm::symmetric(Bits::Four, BLOCK);
    /// The axis of a block's elements in [`NBits::parts`].
    pub(super) const SUM_AXIS: i64 = 2;
    /// The sums of blocks have one dimension less than the parts.
    pub(super) const SUM_KEEP_DIMS: i64 = 0;

    /// The weight of such a shape and form, if it can be one of `MatMulNBits`, and into how many blocks each of its own
    /// is split.
    pub(super) fn packed(
        form: QuantizedForm,
        [rows, columns]: [usize; 2],
    ) -> Option<(Self, usize)> {
        let pieces = form.pieces().filter(|_| form.bits == Bits::Four);
        form.blocks(columns)?;
        Some((Self { rows, columns }, pieces?))
    }

    /// Blocks of a row.
    pub(super) const fn blocks(self) -> usize {
        self.columns / BLOCK
    }

    /// Attributes of the operator, all of them integers.
    pub(super) fn attributes(self) -> [(&'static str, i64); 4] {
        [
            (attribute::K, self.columns as i64),
            (attribute::N, self.rows as i64),
            (attribute::BITS, i64::from(Self::FORM.bits.count())),
            (attribute::BLOCK_SIZE, BLOCK as i64),
        ]
    }

    /// Sizes of the integers.
    pub(super) const fn integer_dims(self) -> [usize; 3] {
        [self.rows, self.blocks(), BLOCK / 2]
    }

    /// Sizes of the scales, and of the offsets.
    pub(super) const fn scale_dims(self) -> [usize; 2] {
        [self.rows, self.blocks()]
    }

    /// Sizes of the units of super-blocks, and of their multiples.
    pub(super) const fn super_dims(self) -> [[usize; 5]; 2] {
        let all = self.blocks() / SUPER;
        [[self.rows, all, 1, 2, 1], [self.rows, all, 2, 2, SUPER / 2]]
    }

    /// Sizes of `count` rows of `x` that are cut into blocks.
    pub(super) const fn parts(self, count: usize) -> [usize; 3] {
        [count, self.blocks(), BLOCK]
    }
}

/// A weight `[rows, columns]` of 8 bits, or of 4 bits a byte each, in blocks of any length: `DequantizeLinear` of int8
/// `[rows · blocks, block]` along [`ROW_AXIS`] with as many scales, stored as those of [`NBits`], then `Reshape` to the
/// matrix. Where it has offsets, `Cast` to f32, `Add` of `[rows · blocks, 1]` offsets and `Mul` by such scales instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DequantizedBlocks {
    /// Outputs.
    pub(super) rows: usize,
    /// Inputs.
    pub(super) columns: usize,
    /// Inputs that share a scale.
    pub(super) block: usize,
}

impl DequantizedBlocks {
    /// Sizes of the matrix.
    pub(super) const fn dims(self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Sizes of the integers of `count` blocks.
    pub(super) const fn integer_dims(self, count: usize) -> [usize; 2] {
        [count, self.block]
    }

    /// Sizes of the scales of `count` blocks.
    pub(super) const fn scale_dims(count: usize) -> [usize; 1] {
        [count]
    }

    /// Sizes of the offsets of `count` blocks, and of scales beside them.
    pub(super) const fn offset_dims(count: usize) -> [usize; 2] {
        [count, 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_bits_in_blocks_of_32_are_packed() {
        let form = |bits, block| QuantizedForm::symmetric(bits, block);
        let (weight, pieces) = NBits::packed(form(Bits::Four, 64), [6, 192]).unwrap();
        assert_eq!((weight, pieces), (NBits { rows: 6, columns: 192 }, 2));
        for other in [form(Bits::Eight, 32), form(Bits::Four, 40), form(Bits::Four, 128)] {
            assert_eq!(NBits::packed(other, [6, 192]), None, "{other:?}");
        }
    }

    #[test]
    fn external_data_is_read_as_it_is_written() {
        let data = ExternalData { location: "a.data".to_owned(), offset: 64, length: Some(12) };
        let entries: Vec<_> = data.entries().collect();
        let value = |key: &str| {
            entries.iter().find(|(known, _)| *known == key).map(|(_, value)| value.as_str())
        };
        assert_eq!(ExternalData::of(value), Some(data));
        let only = |key: &str| (key == "location").then_some("a");
        let whole = ExternalData { location: "a".to_owned(), offset: 0, length: None };
        assert_eq!(ExternalData::of(only), Some(whole));
        assert_eq!(ExternalData::of(|key| Some(if key == "offset" { "-1" } else { "a" })), None);
        assert_eq!(ExternalData::of(|_| None), None);
    }

    #[test]
    fn rows_and_columns_change_places() {
        assert_eq!((swapped(2), swapped(3), swapped(1)), (vec![1, 0], vec![0, 2, 1], vec![0]));
    }
}
