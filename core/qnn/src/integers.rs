//! Quantized weights ([`qhx_types::quantized`]) as constants for `FullyConnected`: their encoding in the library's
//! layout.
//!
//! Measured on QAIRT 2.51 for v75, v79 and v81: the library packs the integers itself, rounds scales and offsets to
//! f16, and dequantizes the weights on their way to the matmul, whose activations are f16. Some matrices it takes
//! without a word and computes wrongly. These are refused here.

use qhx_base::{Error, ErrorKind, Result};
use qhx_qnn_sys::{
    self as sys, BlockExpansion, BwAxisScaleOffset, BwFloatBlock, Encoding, FloatScaleOffset,
    QuantizeParams, ScaleOffset,
};
use qhx_types::quantized::{Bits, MULTIPLES, Multiples, QuantizedForm, QuantizedRef};

/// Inputs that blocks of a filter are multiples of.
const FILTER_BLOCK: usize = 8;

/// Integers of 4 bits `[1, 1, inputs, outputs]`, and the multiples that they are scaled with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Filter<'a> {
    pub values: &'a [i8],
    pub multiples: &'a Multiples,
}

/// Data that an encoding points to. Kept until the graph is done.
#[derive(Default)]
pub(super) struct Pointed {
    block: Box<[u32]>,
    pairs: Vec<FloatScaleOffset>,
    scales: Vec<f32>,
    channels: Vec<ScaleOffset>,
    multiples: Box<[u8]>,
    expansion: Option<Box<BlockExpansion>>,
}

/// Errors when `weights` are no matrix of `shape`, or one that the library computes wrongly.
pub(super) fn check(weights: QuantizedRef<'_>, shape: &[usize]) -> Result<()> {
    let wrong = |what: String, hint: &str| Err(Error::new(ErrorKind::Graph, what).hint(hint));
    let QuantizedRef { form: form @ QuantizedForm { bits, block, .. }, values, scales, offsets } =
        weights;
    let &[rows, cols] = shape else {
        return wrong(
            format!("integers of {} bits in {shape:?}, expected a matrix", bits.count()),
            "lay the weight out as [outputs, inputs]",
        );
    };
    let multiple = bits.npu_multiple();
    if !cols.is_multiple_of(multiple) || !block.is_multiple_of(multiple) {
        return wrong(
            format!(
                "{cols} inputs of {} bits in blocks of {block}: the NPU library computes wrong numbers unless both \
                 are multiples of {multiple}",
                bits.count()
            ),
            "store this weight as f16",
        );
    }
    if form.blocks(cols).is_none() {
        return wrong(
            format!("blocks of {block} inputs, expected a divisor of the {cols} inputs"),
            "take another length, or one block for the whole row",
        );
    }
    if Some(values.len()) != rows.checked_mul(cols) {
        return wrong(
            format!("{} integers, expected {rows} times {cols}", values.len()),
            "give one integer a byte; the NPU library packs them",
        );
    }
    let blocks = values.len() / block;
    if scales.len() != blocks || !(offsets.is_empty() || offsets.len() == blocks) {
        return wrong(
            format!(
                "{} scales and {} offsets, expected {blocks} scales, and as many offsets or none",
                scales.len(),
                offsets.len()
            ),
            "there is one for each block of each row",
        );
    }
    let (low, high) = bits.range();
    if let Some(q) = values.iter().find(|q| !(low..=high).contains(*q)) {
        return wrong(
            format!("the integer {q}, expected {low} to {high} for {} bits", bits.count()),
            "give one integer a byte; the NPU library packs them",
        );
    }
    if let Some(number) = scales.iter().chain(offsets).find(|n| !n.is_finite()) {
        return wrong(
            format!("a scale or offset is {number}, expected a finite number"),
            "the weights are damaged",
        );
    }
    Ok(())
}

/// The encoding in the library's layout, of what [`check`] has passed. It points into `pointed`.
pub(super) fn encode(
    weights: QuantizedRef<'_>,
    shape: &[usize],
    pointed: &mut Pointed,
) -> QuantizeParams {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let QuantizedRef { form: QuantizedForm { bits, block, .. }, scales, offsets, .. } = weights;
    let mut value = Encoding { opaque: [0; 4] };
    let encoding = if bits == Bits::Four && shape.last() == Some(&block) && offsets.is_empty() {
        pointed.scales = scales.to_vec();
        value.bw_axis = BwAxisScaleOffset {
            bitwidth: bits.count(),
            axis: 0,
            count: number(pointed.scales.len()),
            scales: pointed.scales.as_ptr(),
            offsets: std::ptr::null(),
        };
        sys::ENCODING_BW_AXIS_SCALE_OFFSET
    } else {
        let offsets = offsets.iter().copied().chain(std::iter::repeat(0.0));
        let pairs = scales.iter().zip(offsets);
        pointed.pairs = pairs.map(|(&scale, offset)| FloatScaleOffset { scale, offset }).collect();
        pointed.block = Box::new([1, number(block)]);
        value.bw_float_block = BwFloatBlock {
            bitwidth: bits.count(),
            block: pointed.block.as_ptr(),
            values: pointed.pairs.as_ptr(),
        };
        sys::ENCODING_BW_FLOAT_BLOCK
    };
    QuantizeParams { definition: sys::QUANT_DEFINED, encoding, value }
}

/// Errors when `filter` is none of `shape`, or one that the library computes wrongly.
pub(super) fn check_filter(filter: Filter<'_>, shape: &[usize]) -> Result<()> {
    let wrong = |what: String, hint: &str| Err(Error::new(ErrorKind::Graph, what).hint(hint));
    let Filter { values, multiples: Multiples { rows, blocks } } = filter;
    let &[1, 1, inputs, outputs] = shape else {
        return wrong(
            format!("a filter of 4 bits of the shape {shape:?}, expected 1 by 1"),
            "lay the weight out as [1, 1, inputs, outputs]",
        );
    };
    if Some(values.len()) != inputs.checked_mul(outputs) || rows.len() != outputs {
        return wrong(
            format!(
                "{} integers, {} scales, expected {inputs} times {outputs}",
                values.len(),
                rows.len()
            ),
            "give one integer a byte; the NPU library packs them",
        );
    }
    let each = blocks.len() / outputs.max(1);
    let block = inputs / each.max(1);
    if each * outputs != blocks.len()
        || each * block != inputs
        || !block.is_multiple_of(FILTER_BLOCK)
    {
        return wrong(
            format!(
                "{} multiples, expected one for each {FILTER_BLOCK} of {inputs} inputs",
                blocks.len()
            ),
            "take blocks of 32 inputs",
        );
    }
    let (low, high) = Bits::Four.range();
    if let Some(q) = values.iter().find(|q| !(low..=high).contains(*q)) {
        return wrong(
            format!("the integer {q}, expected {low} to {high}"),
            "the weights are damaged",
        );
    }
    if let Some(number) = rows.iter().find(|n| !n.is_finite() || **n <= 0.0) {
        return wrong(
            format!("a scale is {number}, expected more than 0"),
            "the weights are damaged",
        );
    }
    if let Some(multiple) = blocks.iter().find(|n| !(1..=MULTIPLES).contains(*n)) {
        return wrong(
            format!("a multiple is {multiple}, expected 1 to {MULTIPLES}"),
            "the weights are damaged",
        );
    }
    Ok(())
}

/// The encoding of what [`check_filter`] has passed. It points into `pointed`.
pub(super) fn encode_filter(multiples: &Multiples, pointed: &mut Pointed) -> QuantizeParams {
    let channel = |&scale: &f32| ScaleOffset { scale, offset: 0 };
    pointed.channels = multiples.rows.iter().map(channel).collect();
    pointed.multiples = multiples.blocks.clone().into_boxed_slice();
    let blocks = pointed.multiples.len() / pointed.channels.len().max(1);
    let expansion = pointed.expansion.insert(Box::new(BlockExpansion {
        axis: 3,
        channels: pointed.channels.as_ptr(),
        blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
        bitwidth: Bits::Four.count(),
        kind: 0,
        multiples: pointed.multiples.as_ptr(),
    }));
    let mut value = Encoding { opaque: [0; 4] };
    value.block_expansion = &raw const **expansion;
    let encoding = sys::ENCODING_BLOCK_EXPANSION;
    QuantizeParams { definition: sys::QUANT_DEFINED, encoding, value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_that_are_none_are_refused() {
        let values = [7i8; 2 * 64];
        let good = Multiples { rows: vec![0.5; 2], blocks: vec![16, 1, 3, 4] };
        check_filter(Filter { values: &values, multiples: &good }, &[1, 1, 64, 2]).unwrap();
        let with = |rows: [f32; 2], blocks: &[u8]| Multiples {
            rows: rows.to_vec(),
            blocks: blocks.to_vec(),
        };
        let cases: [(&[i8], Multiples, &[usize], &str); 7] = [
            (&values, good.clone(), &[64, 2], "of the shape [64, 2]"),
            (&values[1..], good.clone(), &[1, 1, 64, 2], "127 integers"),
            (&[8; 128], good.clone(), &[1, 1, 64, 2], "the integer 8"),
            (&values, with([0.5; 2], &[1, 2, 3]), &[1, 1, 64, 2], "3 multiples"),
            (&values, with([0.5; 2], &[0, 1, 3, 4]), &[1, 1, 64, 2], "a multiple is 0"),
            (&values, with([0.5; 2], &[17, 1, 3, 4]), &[1, 1, 64, 2], "a multiple is 17"),
            (&values, with([0.5, f32::NAN], &[1; 4]), &[1, 1, 64, 2], "a scale is NaN"),
        ];
        for (values, multiples, shape, expected) in cases {
            let error = check_filter(Filter { values, multiples: &multiples }, shape).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
            assert!(error.hint_text().is_some(), "{error}");
        }
    }

    #[test]
    fn matrices_computed_wrongly_by_the_library_are_refused() {
        let four = |block| QuantizedForm::symmetric(Bits::Four, block);
        let good =
            QuantizedRef { form: four(32), values: &[7; 2 * 64], scales: &[0.5; 4], offsets: &[] };
        check(good, &[2, 64]).unwrap();
        check(QuantizedRef { offsets: &[0.5; 4], ..good }, &[2, 64]).unwrap();
        let eight = QuantizedForm::symmetric(Bits::Eight, 32);
        check(QuantizedRef { form: eight, values: &[-128; 128], ..good }, &[2, 64]).unwrap();
        let of = |block| QuantizedRef { form: four(block), ..good };
        let cases: [(QuantizedRef<'_>, &[usize], &str); 10] = [
            (good, &[1, 2, 64], "integers of 4 bits in [1, 2, 64], expected a matrix"),
            (good, &[2, 60], "60 inputs of 4 bits in blocks of 32"),
            (of(4), &[2, 64], "64 inputs of 4 bits in blocks of 4"),
            (of(0), &[2, 64], "blocks of 0 inputs"),
            (of(24), &[2, 64], "blocks of 24 inputs, expected a divisor"),
            // Two integers a byte.
            (
                QuantizedRef { values: &[7; 64], ..good },
                &[2, 64],
                "64 integers, expected 2 times 64",
            ),
            (
                QuantizedRef { values: &[0x21; 128], ..good },
                &[2, 64],
                "the integer 33, expected -8",
            ),
            (QuantizedRef { scales: &[0.5; 3], ..good }, &[2, 64], "3 scales and 0 offsets"),
            (QuantizedRef { offsets: &[0.5], ..good }, &[2, 64], "4 scales and 1 offsets"),
            (QuantizedRef { scales: &[f32::NAN; 4], ..good }, &[2, 64], "a scale or offset is NaN"),
        ];
        for (weights, shape, expected) in cases {
            let error = check(weights, shape).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
            assert!(error.hint_text().is_some(), "{error}");
        }
    }
}
