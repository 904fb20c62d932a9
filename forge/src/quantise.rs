//! Symmetric int8 quantisation of weights, one scale per output channel.
//!
//! `scale = max|w| / 127`, `q = round(w / scale)`: the range of a row is used whole, zero stays zero,
//! and −128 is never used, so that the encoding is symmetric as QNN's `AXIS_SCALE_OFFSET` with offset 0.

use qhx_core::{Error, ErrorKind, Result};

/// A quantised matrix: `w[r, c] ≈ values[r, c] · scales[r]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Int8Rows {
    /// Row-major integers.
    pub values: Vec<i8>,
    /// One per row, positive.
    pub scales: Vec<f32>,
}

/// Quantises one row into `out` and returns its scale. A row of zeros has scale 1.
pub fn quantise_row(row: &[f32], out: &mut [i8]) -> Result<f32> {
    let mut peak = 0f32;
    let mut finite = true;
    for &w in row {
        finite &= w.is_finite();
        peak = peak.max(w.abs());
    }
    if !finite {
        return Err(Error::new(ErrorKind::Artifact, "a weight is infinite or not a number")
            .hint("the checkpoint is damaged, or was saved after training diverged"));
    }
    // Below this the division overflows or the scale is subnormal, which the NPU flushes to zero.
    let scale = if peak < 127.0 * f32::MIN_POSITIVE { 1.0 } else { peak / 127.0 };
    for (q, &w) in out.iter_mut().zip(row) {
        *q = (w / scale).round_ties_even().clamp(-127.0, 127.0) as i8;
    }
    Ok(scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_maps_to_127_and_errors_stay_below_half_a_step() {
        let row: Vec<f32> = (0..100).map(|i| (i as f32 - 60.0) * 0.37).collect();
        let mut q = vec![0i8; row.len()];
        let scale = quantise_row(&row, &mut q).unwrap();
        assert_eq!(q[0], -127);
        for (&w, &q) in row.iter().zip(&q) {
            assert!((w - f32::from(q) * scale).abs() <= scale * 0.5001);
        }
    }

    #[test]
    fn zeros_and_tiny_rows_are_zero_with_scale_one() {
        for value in [0.0, f32::MIN_POSITIVE / 8.0] {
            let mut q = [1i8; 3];
            assert_eq!(quantise_row(&[value; 3], &mut q).unwrap(), 1.0);
            assert_eq!(q, [0; 3]);
        }
    }

    #[test]
    fn not_a_number_is_refused() {
        for value in [f32::NAN, f32::INFINITY] {
            let error = quantise_row(&[1.0, value], &mut [0; 2]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Artifact);
        }
    }
}
