//! Quantization of weights: int8 with one scale per output channel, and blocks of 4-bit or 8-bit values.
//!
//! The forms are those of [`qhx_types::quantized`].
//!
//! int8: `scale = max|w| / 127`, `q = round(w / scale)`. The range of a row is used whole, zero stays zero, and −128 is
//! never used, so that the encoding is symmetric as QNN's `AXIS_SCALE_OFFSET` with offset 0.
//!
//! Blocks that the forge makes itself are symmetric ([`quantize_block`]). Checkpoints may hold others
//! ([`RowSource::block_form`](crate::weight::RowSource::block_form)).

use half::f16;
use qhx_base::{Error, ErrorKind, Result};
pub use qhx_types::quantized::{BLOCK, Bits, Quantized, QuantizedForm, QuantizedMut, QuantizedRef};

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
            let form = QuantizedForm::symmetric(bits, 32);
            let blocks = QuantizedRef { form, values: &q, scales: &[scale], offsets: &[] };
            blocks.dequantize(&mut wide);
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
}
