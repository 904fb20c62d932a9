//! The ONNX that bundles hold: what the forge writes and the CPU backend recognises.
//!
//! Both sides take the names of operators, attributes and domains from here, and the shapes of what they make of
//! several tensors and nodes together. An operator that the forge is to write is a variant of [`Operator`], which the
//! CPU backend matches without a rest. A quantized weight is [`NBits`] or [`DequantizedBlocks`]; f16 is a `Cast`
//! ([`STORED_FLOATS`]), int8 with one scale per row a `DequantizeLinear` along axis [`ROW_AXIS`].
//!
//! Numbers of data types are those of `onnx.proto`, as `rten_onnx` has them.

use crate::quantized::{BLOCK, Bits, QuantizedForm};

/// Reductions over `axes` as an input of every reduction begin with this version.
pub const OPSET: i64 = 18;
/// The IR version that goes with [`OPSET`].
pub const IR_VERSION: i64 = 8;
/// The domain of ONNX Runtime's own operators
/// (<https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md>).
pub const MICROSOFT: &str = "com.microsoft";
/// The version of the operators of [`MICROSOFT`].
pub const MICROSOFT_OPSET: i64 = 1;
/// Another name of ONNX's own domain, which is empty.
pub const ONNX: &str = "ai.onnx";

macro_rules! operators {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// An operator that bundles may have: each that the forge writes, and some more.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "their names are ONNX's, which describes them")]
        pub enum Operator { $($(#[$doc])* $name,)* }

        impl Operator {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The name in a file.
            pub const fn name(self) -> &'static str {
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
    Max, Min, Mul, Neg, Reciprocal, ReduceMax, ReduceMean, ReduceMin, ReduceSum, Relu, Reshape, Sigmoid, Sin,
    Slice, Softmax, Sqrt, Sub, Tanh, Transpose,
}

impl Operator {
    /// The domain in a file: empty for that of ONNX.
    pub const fn domain(self) -> &'static str {
        match self {
            Self::MatMulNBits => MICROSOFT,
            _ => "",
        }
    }

    /// The operator of that domain and name.
    pub fn of(domain: &str, name: &str) -> Option<Self> {
        let domain = if domain == ONNX { "" } else { domain };
        Self::ALL.iter().copied().find(|known| known.name() == name && known.domain() == domain)
    }
}

/// Names of attributes.
pub mod attribute {
    /// Axis of `DequantizeLinear`, `Softmax`, `LayerNormalization`, `Gather` and `Concat`.
    pub const AXIS: &str = "axis";
    /// Axes of reductions that do not take them as an input.
    pub const AXES: &str = "axes";
    /// 0 if a reduction removes the axis.
    pub const KEEP_DIMS: &str = "keepdims";
    /// Target type of `Cast`.
    pub const TO: &str = "to";
    /// Axes of `Transpose` in their new order.
    pub const PERM: &str = "perm";
    /// `Gemm` transposes the first matrix.
    pub const TRANS_A: &str = "transA";
    /// `Gemm` transposes the second matrix.
    pub const TRANS_B: &str = "transB";
    /// Factor of the matmul in `Gemm`.
    pub const ALPHA: &str = "alpha";
    /// Factor of the addend in `Gemm`.
    pub const BETA: &str = "beta";
    /// Epsilon of `LayerNormalization`.
    pub const EPSILON: &str = "epsilon";
    /// Not 0 if `Reshape` takes 0 as a size.
    pub const ALLOW_ZERO: &str = "allowzero";
    /// Filter sizes of `Conv`.
    pub const KERNEL_SHAPE: &str = "kernel_shape";
    /// Strides of `Conv`.
    pub const STRIDES: &str = "strides";
    /// Padding of `Conv`: zeros before each dimension, then those behind each.
    pub const PADS: &str = "pads";
    /// Dilations of `Conv`.
    pub const DILATIONS: &str = "dilations";
    /// Number of groups of `Conv`.
    pub const GROUP: &str = "group";
    /// Padding of `Conv` by a rule.
    pub const AUTO_PAD: &str = "auto_pad";
    /// Number of inputs of `MatMulNBits`.
    pub const K: &str = "K";
    /// Number of outputs of `MatMulNBits`.
    pub const N: &str = "N";
    /// Width of an integer of `MatMulNBits`.
    pub const BITS: &str = "bits";
    /// Number of inputs of `MatMulNBits` that share a scale.
    pub const BLOCK_SIZE: &str = "block_size";
}

/// Names of the initializers of a weight: its own name, then one of these.
pub mod suffix {
    /// Its values as f16.
    pub const FLOAT16: &str = ".f16";
    /// Its integers of 8 bits, or of 4 bits a byte each.
    pub const INT8: &str = ".int8";
    /// Its integers of 4 bits, for `MatMulNBits`.
    pub const NBITS: &str = ".nbits";
    /// Its scales.
    pub const SCALE: &str = ".scale";
    /// Its shifts: the offset of each block times its scale, added to the values.
    pub const OFFSET: &str = ".offset";
}

/// Location of an initializer's bytes outside the model: the keys and values of `external_data`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalData {
    /// The name of a file beside the model.
    pub location: String,
    /// The first byte.
    pub offset: u64,
    /// Number of bytes; if none, all that the shape asks for.
    pub length: Option<u64>,
}

impl ExternalData {
    /// The key of the file's name.
    pub const LOCATION: &str = "location";
    const OFFSET: &str = "offset";
    const LENGTH: &str = "length";

    /// The keys and their values, in the order in which they are written.
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, String)> {
        let length = self.length.map(|length| (Self::LENGTH, length.to_string()));
        let first =
            [(Self::LOCATION, self.location.clone()), (Self::OFFSET, self.offset.to_string())];
        first.into_iter().chain(length)
    }

    /// Location declared by the values of keys; `None` if there is no file, or a number is malformed.
    pub fn of<'a>(value: impl Fn(&str) -> Option<&'a str>) -> Option<Self> {
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
pub const ROW_AXIS: i64 = 0;

/// Operator that converts a weight's f16 to f32. Loaders that convert f16 to f32 themselves take it for a no-op.
pub const STORED_FLOATS: Operator = Operator::Cast;

/// The axes of matrices of this rank in the order in which `Transpose` has rows and columns change places.
pub fn swapped(rank: usize) -> Vec<i64> {
    let mut perm: Vec<i64> = (0..rank as i64).collect();
    if let [.., rows, columns] = perm.as_mut_slice() {
        std::mem::swap(rows, columns);
    }
    perm
}

/// A weight `[rows, columns]` of 4 bits in blocks of [`BLOCK`], for `MatMulNBits`: initializers `[rows, blocks, BLOCK /
/// 2]` of uint8 with two integers a byte ([`pack_nibbles`](crate::quantized::pack_nibbles)) and `[rows, blocks]` of
/// scales: f32, or f16 that a `Cast` ([`STORED_FLOATS`]) makes f32.
///
/// Offsets are a term of their own, which `Add` adds: `Σ_b (Σ_{k in b} x_k) · shift_b`, where a shift is what an offset
/// adds to the reals of its block. The inner sum is `Reshape` to [`NBits::parts`] and `ReduceSum` along
/// [`NBits::SUM_AXIS`], the outer one `MatMul` with `[blocks, rows]` of f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NBits {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub columns: usize,
}

impl NBits {
    /// The form of the weight once its blocks are [`BLOCK`] long.
    pub const FORM: QuantizedForm = QuantizedForm::symmetric(Bits::Four, BLOCK);
    /// The axis of a block's elements in [`NBits::parts`].
    pub const SUM_AXIS: i64 = 2;
    /// The sums of blocks have one dimension less than the parts.
    pub const SUM_KEEP_DIMS: i64 = 0;

    /// The weight of such a shape and form, if it can be one of `MatMulNBits`, and into how many blocks each of its own
    /// is split.
    pub fn packed(form: QuantizedForm, [rows, columns]: [usize; 2]) -> Option<(Self, usize)> {
        let pieces = form.pieces().filter(|_| form.bits == Bits::Four);
        form.blocks(columns)?;
        Some((Self { rows, columns }, pieces?))
    }

    /// Blocks of a row.
    pub const fn blocks(self) -> usize {
        self.columns / BLOCK
    }

    /// Attributes of the operator, all of them integers.
    pub fn attributes(self) -> [(&'static str, i64); 4] {
        [
            (attribute::K, self.columns as i64),
            (attribute::N, self.rows as i64),
            (attribute::BITS, i64::from(Self::FORM.bits.count())),
            (attribute::BLOCK_SIZE, BLOCK as i64),
        ]
    }

    /// The weight of an operator with such attributes, if it is in the form that [`NBits::attributes`] declares.
    pub fn of(attribute: impl Fn(&str) -> Option<i64>) -> Option<Self> {
        let size = |name| usize::try_from(attribute(name)?).ok().filter(|size| *size > 0);
        let found = Self { rows: size(attribute::N)?, columns: size(attribute::K)? };
        Self::FORM.blocks(found.columns)?;
        let same = |(name, value)| attribute(name) == Some(value);
        found.attributes().into_iter().all(same).then_some(found)
    }

    /// Sizes of the integers.
    pub const fn integer_dims(self) -> [usize; 3] {
        [self.rows, self.blocks(), BLOCK / 2]
    }

    /// Sizes of the scales.
    pub const fn scale_dims(self) -> [usize; 2] {
        [self.rows, self.blocks()]
    }

    /// Sizes of the shifts ([`by_block`](crate::quantized::by_block)).
    pub const fn shift_dims(self) -> [usize; 2] {
        [self.blocks(), self.rows]
    }

    /// Sizes of `count` rows of `x` that are cut into blocks.
    pub const fn parts(self, count: usize) -> [usize; 3] {
        [count, self.blocks(), BLOCK]
    }
}

/// A weight `[rows, columns]` of 8 bits, or of 4 bits a byte each, in blocks of any length: `DequantizeLinear` of int8
/// `[rows · blocks, block]` along [`ROW_AXIS`] with as many scales, stored as those of [`NBits`], `Add` of `[rows ·
/// blocks, 1]` shifts where it has offsets, then `Reshape` to the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DequantizedBlocks {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub columns: usize,
    /// Inputs that share a scale.
    pub block: usize,
}

impl DequantizedBlocks {
    /// All blocks; none where they do not divide the rows, or there are too many.
    pub fn count(self) -> Option<usize> {
        self.rows
            .checked_mul(QuantizedForm::symmetric(Bits::Eight, self.block).blocks(self.columns)?)
    }

    /// Sizes of the matrix.
    pub const fn dims(self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Sizes of the integers of `count` blocks.
    pub const fn integer_dims(self, count: usize) -> [usize; 2] {
        [count, self.block]
    }

    /// Sizes of the scales of `count` blocks.
    pub const fn scale_dims(count: usize) -> [usize; 1] {
        [count]
    }

    /// Sizes of the shifts of `count` blocks.
    pub const fn shift_dims(count: usize) -> [usize; 2] {
        [count, 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_are_found_by_what_they_are_written_as() {
        for operator in Operator::ALL {
            assert_eq!(Operator::of(operator.domain(), operator.name()), Some(*operator));
        }
        assert_eq!(Operator::of(ONNX, "Gemm"), Some(Operator::Gemm));
        assert_eq!(
            (Operator::of(MICROSOFT, "Gemm"), Operator::of("", "MatMulNBits")),
            (None, None)
        );
    }

    #[test]
    fn weights_of_four_bits_are_read_as_they_are_written() {
        let form = |bits, block| QuantizedForm::symmetric(bits, block);
        let (weight, pieces) = NBits::packed(form(Bits::Four, 64), [6, 192]).unwrap();
        assert_eq!((weight, pieces), (NBits { rows: 6, columns: 192 }, 2));
        let found = |changed: Option<(&str, i64)>| {
            NBits::of(|name| {
                let written = weight.attributes().into_iter().chain(changed);
                written.filter(|(known, _)| *known == name).map(|(_, value)| value).next_back()
            })
        };
        assert_eq!(found(None), Some(weight));
        for other in [("bits", 8), ("block_size", 64), ("K", 40), ("N", 0)] {
            assert_eq!(found(Some(other)), None, "{other:?}");
        }
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
