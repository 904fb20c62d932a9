//! Quantized weights: constant matrices of 4-bit and 8-bit integers with a scale for each block of a row, for
//! `FullyConnected`.
//!
//! Measured on QAIRT 2.51 for v75, v79 and v81: the library packs the integers itself, rounds scales and offsets to
//! f16, and dequantizes the weights on their way to the matmul, whose activations are f16. Some matrices it takes
//! without a word and computes wrongly. These are refused here.

use qhx_base::{Error, ErrorKind, Result};
use qhx_qnn_sys::{
    self as sys, BwAxisScaleOffset, BwFloatBlock, Encoding, FloatScaleOffset, QuantizeParams,
};

/// A matrix `[rows, cols]` of integers that stand for reals: `real = (q + offset) · scale`.
#[derive(Debug, Clone, Copy)]
pub struct Integers<'a> {
    /// Width of an integer: 4 or 8 bits.
    pub bits: u32,
    /// Row-major, one a byte whatever the width; of 4 bits from −8 to 7.
    pub values: &'a [i8],
    /// Consecutive elements of a row that share a scale: a divisor of the columns. All of them make one scale a row.
    pub block: usize,
    /// Row-major, one per block.
    pub scales: &'a [f32],
    /// As many as scales, or none where all are 0.
    pub offsets: &'a [f32],
}

/// What an encoding points to. Kept until the graph is done.
#[derive(Default)]
pub(super) struct Pointed {
    block: Box<[u32]>,
    pairs: Vec<FloatScaleOffset>,
    scales: Vec<f32>,
}

impl Integers<'_> {
    /// Errors when this is no matrix of `shape`, or one that the library computes wrongly.
    pub(super) fn check(&self, shape: &[usize]) -> Result<()> {
        let wrong = |what: String, hint: &str| Err(Error::new(ErrorKind::Graph, what).hint(hint));
        let unit = match self.bits {
            4 => 8,
            8 => 4,
            bits => {
                return wrong(
                    format!("integers of {bits} bits, expected 4 or 8"),
                    "the NPU library has no other widths",
                );
            }
        };
        let &[rows, cols] = shape else {
            return wrong(
                format!("integers of {} bits in {shape:?}, expected a matrix", self.bits),
                "lay the weight out as [outputs, inputs]",
            );
        };
        if !cols.is_multiple_of(unit) || !self.block.is_multiple_of(unit) {
            return wrong(
                format!(
                    "{cols} inputs of {} bits in blocks of {}: the NPU library computes wrong numbers unless both \
                     are multiples of {unit}",
                    self.bits, self.block
                ),
                "store this weight as f16",
            );
        }
        if self.block == 0 || !cols.is_multiple_of(self.block) {
            return wrong(
                format!("blocks of {} inputs, expected a divisor of the {cols} inputs", self.block),
                "take another length, or one block for the whole row",
            );
        }
        if Some(self.values.len()) != rows.checked_mul(cols) {
            return wrong(
                format!("{} integers, expected {rows} times {cols}", self.values.len()),
                "give one integer a byte; the NPU library packs them",
            );
        }
        let blocks = self.values.len() / self.block;
        if self.scales.len() != blocks || !(self.offsets.is_empty() || self.offsets.len() == blocks)
        {
            return wrong(
                format!(
                    "{} scales and {} offsets, expected {blocks} scales, and as many offsets or none",
                    self.scales.len(),
                    self.offsets.len()
                ),
                "there is one for each block of each row",
            );
        }
        if self.bits == 4
            && let Some(q) = self.values.iter().find(|q| !(-8..=7).contains(*q))
        {
            return wrong(
                format!("the integer {q}, expected -8 to 7 for 4 bits"),
                "give one integer a byte; the NPU library packs them",
            );
        }
        if let Some(number) = self.scales.iter().chain(self.offsets).find(|n| !n.is_finite()) {
            return wrong(
                format!("a scale or offset is {number}, expected a finite number"),
                "the weights are damaged",
            );
        }
        Ok(())
    }

    /// The encoding in the library's layout, of what [`Integers::check`] has passed. It points into `pointed`.
    pub(super) fn encode(&self, shape: &[usize], pointed: &mut Pointed) -> QuantizeParams {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let mut value = Encoding { opaque: [0; 4] };
        let whole_rows = shape.last() == Some(&self.block);
        let encoding = if self.bits == 4 && whole_rows && self.offsets.is_empty() {
            pointed.scales = self.scales.to_vec();
            value.bw_axis = BwAxisScaleOffset {
                bitwidth: self.bits,
                axis: 0,
                count: number(pointed.scales.len()),
                scales: pointed.scales.as_ptr(),
                offsets: std::ptr::null(),
            };
            sys::ENCODING_BW_AXIS_SCALE_OFFSET
        } else {
            let offsets = self.offsets.iter().copied().chain(std::iter::repeat(0.0));
            let pairs = self.scales.iter().zip(offsets);
            pointed.pairs =
                pairs.map(|(&scale, offset)| FloatScaleOffset { scale, offset }).collect();
            pointed.block = Box::new([1, number(self.block)]);
            value.bw_float_block = BwFloatBlock {
                bitwidth: self.bits,
                block: pointed.block.as_ptr(),
                values: pointed.pairs.as_ptr(),
            };
            sys::ENCODING_BW_FLOAT_BLOCK
        };
        QuantizeParams { definition: sys::QUANT_DEFINED, encoding, value }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_computed_wrongly_by_the_library_are_refused() {
        let good =
            Integers { bits: 4, values: &[7; 2 * 64], block: 32, scales: &[0.5; 4], offsets: &[] };
        good.check(&[2, 64]).unwrap();
        Integers { offsets: &[0.5; 4], ..good }.check(&[2, 64]).unwrap();
        Integers { bits: 8, values: &[-128; 128], ..good }.check(&[2, 64]).unwrap();
        let cases: [(Integers<'_>, &[usize], &str); 11] = [
            (Integers { bits: 3, ..good }, &[2, 64], "integers of 3 bits, expected 4 or 8"),
            (good, &[1, 2, 64], "integers of 4 bits in [1, 2, 64], expected a matrix"),
            (good, &[2, 60], "60 inputs of 4 bits in blocks of 32"),
            (Integers { block: 4, ..good }, &[2, 64], "64 inputs of 4 bits in blocks of 4"),
            (Integers { block: 0, ..good }, &[2, 64], "blocks of 0 inputs"),
            (Integers { block: 24, ..good }, &[2, 64], "blocks of 24 inputs, expected a divisor"),
            // Two integers a byte.
            (Integers { values: &[7; 64], ..good }, &[2, 64], "64 integers, expected 2 times 64"),
            (Integers { values: &[0x21; 128], ..good }, &[2, 64], "the integer 33, expected -8"),
            (Integers { scales: &[0.5; 3], ..good }, &[2, 64], "3 scales and 0 offsets"),
            (Integers { offsets: &[0.5], ..good }, &[2, 64], "4 scales and 1 offsets"),
            (Integers { scales: &[f32::NAN; 4], ..good }, &[2, 64], "a scale or offset is NaN"),
        ];
        for (integers, shape, expected) in cases {
            let error = integers.check(shape).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
            assert!(error.hint_text().is_some(), "{error}");
        }
    }
}
