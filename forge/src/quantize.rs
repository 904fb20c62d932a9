//! Quantization of weights: int8 with one scale per output channel, and blocks of 4-bit or 8-bit values.
//!
//! int8: `scale = max|w| / 127`, `q = round(w / scale)`. The range of a row is used whole, zero stays zero, and −128 is
//! never used, so that the encoding is symmetric as QNN's `AXIS_SCALE_OFFSET` with offset 0.
//!
//! Blocks: `real = (q + offset) · scale`, with a scale, and where a form has them an offset, for each run of inputs of
//! an output channel. Those that the forge makes itself are symmetric ([`quantize_block`]). Checkpoints may hold
//! others ([`RowSource::block_form`](crate::weight::RowSource::block_form)).

use half::f16;
use qhx_core::{Error, ErrorKind, Result};

/// Inputs of an output channel that share a scale where the forge chooses, as in GGUF's Q4_0.
pub const BLOCK: usize = 32;

/// Width of the values of a [`BlockForm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bits {
    /// −8 to 7.
    Four,
    /// −128 to 127.
    Eight,
}

impl Bits {
    /// The number.
    pub const fn count(self) -> u32 {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// Smallest and largest integer.
    pub const fn range(self) -> (i8, i8) {
        match self {
            Self::Four => (-8, 7),
            Self::Eight => (i8::MIN, i8::MAX),
        }
    }
}

/// The form of a matrix of quantized values with scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockForm {
    /// Width of the values.
    pub bits: Bits,
    /// Consecutive inputs of one output channel that share a scale. All inputs: one scale per output channel.
    pub block: usize,
    /// Each scale has an offset. Without, all offsets are 0.
    pub offsets: bool,
}

impl BlockForm {
    /// A form without offsets.
    pub const fn symmetric(bits: Bits, block: usize) -> Self {
        Self { bits, block, offsets: false }
    }

    /// True where a matrix of `inputs` inputs can have this form and the NPU library computes it. It gives wrong
    /// numbers, and no error, for 4-bit weights whose inputs or blocks are not a multiple of 8, and for 8-bit ones
    /// whose are not a multiple of 4.
    pub const fn fits(self, inputs: usize) -> bool {
        let unit = match self.bits {
            Bits::Four => 8,
            Bits::Eight => 4,
        };
        self.block > 0
            && inputs > 0
            && inputs.is_multiple_of(self.block)
            && self.block.is_multiple_of(unit)
    }

    /// Bytes of a matrix `[outputs, inputs]` in a QNN graph: the library packs values, and rounds scales and offsets
    /// to f16.
    pub const fn qnn_bytes(self, outputs: u64, inputs: u64) -> u64 {
        let weights = outputs.saturating_mul(inputs);
        let block = if self.block == 0 { 1 } else { self.block as u64 };
        let pair = if self.offsets { 4 } else { 2 };
        let values = match self.bits {
            Bits::Four => weights.div_ceil(2),
            Bits::Eight => weights,
        };
        values.saturating_add((weights / block).saturating_mul(pair))
    }
}

/// A matrix `[rows, cols]` of quantized values with scales: `w[r, c] = (values[r, c] + offsets[r, b]) · scales[r, b]`
/// with `b = c / block`.
#[derive(Debug, Clone, PartialEq)]
pub struct Blocks {
    /// Row-major values, one a byte.
    pub values: Vec<i8>,
    /// Row-major, one per block of a row. Any finite numbers: GGUF's Q4_0 has negative ones.
    pub scales: Vec<f32>,
    /// As many as there are scales, or none where all are 0. GPTQ's and AWQ's are whole numbers, Q4_1's are not.
    pub offsets: Vec<f32>,
}

impl Blocks {
    /// The same as parts that can be filled.
    pub fn as_mut(&mut self) -> BlocksMut<'_> {
        BlocksMut { values: &mut self.values, scales: &mut self.scales, offsets: &mut self.offsets }
    }

    /// The largest magnitude of a real value, of a scale and of an offset; `block` is that of the form.
    pub fn peak(&self, block: usize) -> f32 {
        let mut peak = 0f32;
        for (index, (values, &scale)) in
            self.values.chunks(block.max(1)).zip(&self.scales).enumerate()
        {
            let offset = self.offsets.get(index).copied().unwrap_or(0.0);
            peak = peak.max(scale.abs()).max(offset.abs());
            for &q in values {
                peak = peak.max(((f32::from(q) + offset) * scale).abs());
            }
        }
        peak
    }
}

/// Whole rows of [`Blocks`] that are to be filled.
#[derive(Debug)]
pub struct BlocksMut<'a> {
    /// See [`Blocks::values`].
    pub values: &'a mut [i8],
    /// See [`Blocks::scales`].
    pub scales: &'a mut [f32],
    /// See [`Blocks::offsets`]: empty where the form has none.
    pub offsets: &'a mut [f32],
}

impl BlocksMut<'_> {
    /// The real values of the rows, into `out`, which is as long as `values`; `block` is that of the form.
    pub fn dequantize(&self, block: usize, out: &mut [f32]) {
        let blocks = self.values.chunks(block.max(1)).zip(out.chunks_mut(block.max(1)));
        for (index, ((values, out), &scale)) in blocks.zip(&*self.scales).enumerate() {
            let offset = self.offsets.get(index).copied().unwrap_or(0.0);
            for (out, &q) in out.iter_mut().zip(values) {
                *out = (f32::from(q) + offset) * scale;
            }
        }
    }
}

/// A quantized matrix: `w[r, c] ≈ values[r, c] · scales[r]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Int8Rows {
    /// Row-major values.
    pub values: Vec<i8>,
    /// One per row, positive.
    pub scales: Vec<f32>,
}

/// Quantizes one row into `out` and returns its scale. A row of zeros has scale 1.
///
/// # Errors
/// When a value is not finite.
pub fn quantize_row(row: &[f32], out: &mut [i8]) -> Result<f32> {
    let peak = largest(row)?.abs();
    // Below this the division overflows or the scale is subnormal, which the NPU flushes to zero.
    let scale = if peak < 127.0 * f32::MIN_POSITIVE { 1.0 } else { peak / 127.0 };
    for (q, &w) in out.iter_mut().zip(row) {
        *q = (w / scale).round_ties_even().clamp(-127.0, 127.0) as i8;
    }
    Ok(scale)
}

/// Quantizes one block into `out` and returns its scale, without an offset: the value of the largest magnitude becomes
/// −8 (or −128), as GGUF's Q4_0 does it, so that the range is used whole. The scale may be negative. A block of zeros
/// has scale 1.
///
/// Scales are f16 values, as the NPU library rounds them.
///
/// # Errors
/// When a value is not finite.
pub fn quantize_block(block: &[f32], bits: Bits, out: &mut [i8]) -> Result<f32> {
    let (low, high) = bits.range();
    let scale = f16::from_f32(largest(block)? / f32::from(low)).to_f32();
    if scale == 0.0 {
        out.fill(0);
        return Ok(1.0);
    }
    for (q, &w) in out.iter_mut().zip(block) {
        *q = (w / scale).round_ties_even().clamp(f32::from(low), f32::from(high)) as i8;
    }
    Ok(scale)
}

/// The value of the largest magnitude, the first of several. Errors when one is not finite.
fn largest(values: &[f32]) -> Result<f32> {
    let mut largest = 0f32;
    let mut finite = true;
    for &w in values {
        finite &= w.is_finite();
        if w.abs() > largest.abs() {
            largest = w;
        }
    }
    if finite {
        return Ok(largest);
    }
    Err(Error::new(ErrorKind::Artifact, "a weight is infinite or not a number")
        .hint("the checkpoint is damaged, or was saved after training diverged"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_maps_to_127_and_errors_stay_below_half_a_step() {
        let row: Vec<f32> = (0..100).map(|i| (i as f32 - 60.0) * 0.37).collect();
        let mut q = vec![0i8; row.len()];
        let scale = quantize_row(&row, &mut q).unwrap();
        assert_eq!(q[0], -127);
        for (&w, &q) in row.iter().zip(&q) {
            assert!((w - f32::from(q) * scale).abs() <= scale * 0.5001);
        }
    }

    #[test]
    fn zeros_and_tiny_rows_are_zero_with_scale_one() {
        for value in [0.0, f32::MIN_POSITIVE / 8.0] {
            let mut q = [1i8; 3];
            assert_eq!(quantize_row(&[value; 3], &mut q).unwrap(), 1.0);
            assert_eq!(q, [0; 3]);
        }
    }

    #[test]
    fn not_a_number_is_refused() {
        for value in [f32::NAN, f32::INFINITY] {
            let error = quantize_row(&[1.0, value], &mut [0; 2]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Artifact);
            let error = quantize_block(&[1.0, value], Bits::Four, &mut [0; 2]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Artifact);
        }
    }

    #[test]
    fn blocks_use_their_range_and_stay_within_a_step() {
        for (bits, peak) in [(Bits::Four, 2.0f32), (Bits::Four, -2.0), (Bits::Eight, 2.0)] {
            let mut block: Vec<f32> = (0..31).map(|i| (i as f32 - 15.0) * 0.1).collect();
            block.push(peak);
            let mut q = vec![0i8; block.len()];
            let scale = quantize_block(&block, bits, &mut q).unwrap();
            assert_eq!(scale, f16::from_f32(scale).to_f32());
            let (low, high) = bits.range();
            assert_eq!(q[31], low);
            let mut wide = vec![0f32; block.len()];
            let mut blocks = Blocks { values: q, scales: vec![scale], offsets: Vec::new() };
            blocks.as_mut().dequantize(32, &mut wide);
            for (&w, &wide) in block.iter().zip(&wide) {
                // Beyond the largest integer a value is clamped, by one step at most.
                let bound = if w / scale > f32::from(high) { 1.001 } else { 0.5001 };
                assert!((w - wide).abs() <= scale.abs() * bound, "{w} became {wide}");
            }
        }
        let mut q = [1i8; 4];
        assert_eq!(quantize_block(&[1e-9; 4], Bits::Four, &mut q).unwrap(), 1.0);
        assert_eq!(q, [0; 4]);
    }

    #[test]
    fn offsets_are_added_before_scaling() {
        let mut wide = [0f32; 4];
        let mut blocks =
            Blocks { values: vec![-8, 7, 0, 1], scales: vec![0.5, -2.0], offsets: vec![8.0, 0.25] };
        blocks.as_mut().dequantize(2, &mut wide);
        assert_eq!(wide, [0.0, 7.5, -0.5, -2.5]);
    }

    #[test]
    fn forms_that_the_library_computes_wrongly_do_not_fit() {
        let four = |block| BlockForm::symmetric(Bits::Four, block);
        assert!(four(32).fits(64) && four(40).fits(40));
        assert!(!four(32).fits(40) && !four(20).fits(40) && !four(0).fits(40) && !four(8).fits(0));
        assert!(BlockForm::symmetric(Bits::Eight, 12).fits(24));
        // 4 bits, and two bytes for each 32 of them; offsets take as much again.
        assert_eq!(four(32).qnn_bytes(10, 64), 320 + 40);
        assert_eq!(BlockForm { offsets: true, ..four(32) }.qnn_bytes(10, 64), 320 + 80);
        assert!(four(32).qnn_bytes(u64::MAX, 64) > u64::MAX / 2);
    }
}
