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

/// Quantizes one block into `out` and returns its scale, without an offset. The scale may be negative. A block of zeros
/// has scale 1. Scales are f16 values, as the NPU library rounds them.
///
/// With 8 bits the value of the largest magnitude becomes −128. With 4 bits it may become −8, as in GGUF's Q4_0, or lie
/// up to an integer beside it: of several scales, each moved to its least-squares fit, the one with the least squared
/// error is taken. Values that another program quantized to Q4_0 come back as they were.
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
    let scale = match bits {
        Bits::Four if scale.is_finite() => fitted(block, scale),
        Bits::Four | Bits::Eight => scale,
    };
    for (q, &w) in out.iter_mut().zip(block) {
        *q = (w / scale).round_ties_even().clamp(f32::from(low), f32::from(high)) as i8;
    }
    Ok(scale)
}

/// The scale with the least squared error for 4-bit integers, of those beside `first` that map the value of the largest
/// magnitude to −7 to −9.
fn fitted(block: &[f32], first: f32) -> f32 {
    let (low, high) = Bits::Four.range();
    let (low, high) = (f32::from(low), f32::from(high));
    let round = |w: f32, scale: f32| (w / scale).round_ties_even().clamp(low, high);
    let error =
        |scale: f32| -> f32 { block.iter().map(|&w| (w - round(w, scale) * scale).powi(2)).sum() };
    let (mut best, mut least) = (first, error(first));
    for quarters in 28..=36u8 {
        let scale = first * 32.0 / f32::from(quarters);
        let (mut products, mut squares) = (0f32, 0f32);
        for &w in block {
            let q = round(w, scale);
            products += w * q;
            squares += q * q;
        }
        let scale = f16::from_f32(products / squares).to_f32();
        if scale.is_normal() {
            let found = error(scale);
            if found < least {
                (best, least) = (scale, found);
            }
        }
    }
    best
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

    /// Squared error of a block whose integers are multiplied by one scale.
    fn error(block: &[f32], q: &[i8], scale: f32) -> f64 {
        let off = |(&w, &q): (&f32, &i8)| f64::from(w - f32::from(q) * scale).powi(2);
        block.iter().zip(q).map(off).sum()
    }

    #[test]
    fn four_bits_have_the_scale_of_the_least_error() {
        let (mut found, mut plain) = (0.0, 0.0);
        let mut state = 1u32;
        for _ in 0..200 {
            // Sums of uniform numbers: nearly normal, as weights are.
            let block: Vec<f32> = (0..32)
                .map(|_| {
                    (0..6).fold(-3.0, |sum, _| {
                        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        sum + (state >> 8) as f32 / (1 << 24) as f32
                    })
                })
                .collect();
            let mut q = vec![0i8; 32];
            let scale = quantize_block(&block, Bits::Four, &mut q).unwrap();
            assert_eq!(scale, f16::from_f32(scale).to_f32());
            found += error(&block, &q, scale);
            let scale = f16::from_f32(largest(&block).unwrap() / -8.0).to_f32();
            let round = |w: &f32| (w / scale).round_ties_even().clamp(-8.0, 7.0) as i8;
            let q: Vec<_> = block.iter().map(round).collect();
            plain += error(&block, &q, scale);
        }
        assert!(found < 0.92 * plain, "{found} of {plain}");
    }

    #[test]
    fn integers_of_other_programs_come_back() {
        for scale in [0.0123f32, -0.75, 3e-4] {
            let scale = f16::from_f32(scale).to_f32();
            let integers: Vec<i8> = (0..32).map(|i| (i * 7 % 16) as i8 - 8).collect();
            let block: Vec<_> = integers.iter().map(|&q| f32::from(q) * scale).collect();
            let mut q = vec![0i8; 32];
            assert_eq!(quantize_block(&block, Bits::Four, &mut q).unwrap(), scale);
            assert_eq!(q, integers);
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
            assert!(bits == Bits::Four || q[31] == low, "{q:?}");
            let mut wide = vec![0f32; block.len()];
            let form = QuantizedForm::symmetric(bits, 32);
            let blocks = QuantizedRef { form, values: &q, scales: &[scale], offsets: &[] };
            blocks.dequantize(&mut wide);
            for (&w, &wide) in block.iter().zip(&wide) {
                // Beyond the integers a value is clamped, by a step and its rounding at most.
                let within = (f32::from(low)..=f32::from(high)).contains(&(w / scale));
                let bound = if within { 0.5001 } else { 1.501 };
                assert!((w - wide).abs() <= scale.abs() * bound, "{w} became {wide}");
            }
        }
        let mut q = [1i8; 4];
        assert_eq!(quantize_block(&[1e-9; 4], Bits::Four, &mut q).unwrap(), 1.0);
        assert_eq!(q, [0; 4]);
    }
}
