//! int8 weights with one scale a row to f16 or f32.
//!
//! On x86-64 a row is converted sixteen values at a time with AVX-512, eight with AVX2 and F16C; elsewhere in blocks,
//! through f32 and the slice conversion of `half`, which uses the machine's own instructions where it has some.
//! All give the same bits: the product is rounded to f32 and then to f16, to nearest even.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "vector loads and stores, and calls of code for a CPU feature")
)]

use half::f16;
use half::slice::HalfFloatSliceExt;

/// Values that are converted at a time without vector instructions of our own.
const BLOCK: usize = 256;

/// `target[i] = values[i] · scale of its row`, rounded to f16.
///
/// `values` are elements of a row-major matrix with `columns` columns, from element `first` on;
/// `scales` has one value for each of its rows.
///
/// # Panics
/// When `columns` is 0, the lengths of `values` and `target` differ, or a row has no scale.
pub fn int8_to_f16(
    values: &[i8],
    scales: &[f32],
    columns: usize,
    first: usize,
    target: &mut [f16],
) {
    rows(values, scales, columns, first, target, row_to_f16());
}

/// Same as [`int8_to_f16`], but to f32.
///
/// # Panics
/// Panics under the conditions of [`int8_to_f16`].
pub fn int8_to_f32(
    values: &[i8],
    scales: &[f32],
    columns: usize,
    first: usize,
    target: &mut [f32],
) {
    rows(values, scales, columns, first, target, |values, scale, target| {
        for (to, from) in target.iter_mut().zip(values) {
            *to = f32::from(*from) * scale;
        }
    });
}

/// Calls `row` for the part of each row that lies in `values`.
fn rows<T>(
    values: &[i8],
    scales: &[f32],
    columns: usize,
    first: usize,
    target: &mut [T],
    row: impl Fn(&[i8], f32, &mut [T]),
) {
    assert_eq!(values.len(), target.len(), "as many values as places for them");
    let mut done = 0;
    while done < values.len() {
        let (index, column) = ((first + done) / columns, (first + done) % columns);
        let end = values.len().min(done + columns - column);
        row(&values[done..end], scales[index], &mut target[done..end]);
        done = end;
    }
}

type RowToF16 = fn(&[i8], f32, &mut [f16]);

/// The fastest way that this CPU has. The standard library remembers what it found.
fn row_to_f16() -> RowToF16 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        return |values, scale, target| {
            // SAFETY: the CPU has the feature.
            unsafe { x86::wide_row(values, scale, target) }
        };
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("f16c") {
        return |values, scale, target| {
            // SAFETY: the CPU has both features.
            unsafe { x86::row(values, scale, target) }
        };
    }
    portable
}

fn portable(values: &[i8], scale: f32, target: &mut [f16]) {
    let mut wide = [0f32; BLOCK];
    for (values, target) in values.chunks(BLOCK).zip(target.chunks_mut(BLOCK)) {
        let wide = &mut wide[..values.len()];
        for (to, from) in wide.iter_mut().zip(values) {
            *to = f32::from(*from) * scale;
        }
        target.convert_from_f32_slice(wide);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128,
        _mm_unpackhi_epi64, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtps_ph,
        _mm256_mul_ps, _mm256_set1_ps, _mm256_storeu_si256, _mm512_cvtepi8_epi32,
        _mm512_cvtepi32_ps, _mm512_cvtps_ph, _mm512_mul_ps, _mm512_set1_ps,
    };

    use half::f16;

    /// Converts one row, sixteen values at a time.
    #[target_feature(enable = "avx512f")]
    pub(super) fn wide_row(values: &[i8], scale: f32, target: &mut [f16]) {
        let factor = _mm512_set1_ps(scale);
        let (blocks, rest) = values.as_chunks::<16>();
        let (places, last) = target.as_chunks_mut::<16>();
        for (from, to) in blocks.iter().zip(places) {
            // SAFETY: sixteen bytes; the load needs no alignment.
            let bytes = unsafe { _mm_loadu_si128(from.as_ptr().cast::<__m128i>()) };
            let wide = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), factor);
            let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide);
            // SAFETY: thirty-two bytes; the store needs no alignment.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast::<__m256i>(), half) };
        }
        super::portable(rest, scale, last);
    }

    /// Converts one row.
    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn row(values: &[i8], scale: f32, target: &mut [f16]) {
        let factor = _mm256_set1_ps(scale);
        let (blocks, rest) = values.as_chunks::<16>();
        let (places, last) = target.as_chunks_mut::<16>();
        for (from, to) in blocks.iter().zip(places) {
            // SAFETY: sixteen bytes; the load needs no alignment.
            let bytes = unsafe { _mm_loadu_si128(from.as_ptr().cast::<__m128i>()) };
            let (low, high) = (bytes, _mm_unpackhi_epi64(bytes, bytes));
            let low = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)), factor);
            let high = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)), factor);
            let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low);
            let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high);
            let to = to.as_mut_ptr().cast::<__m128i>();
            // SAFETY: thirty-two bytes, written in two halves; the stores need no alignment.
            unsafe {
                _mm_storeu_si128(to, low);
                _mm_storeu_si128(to.add(1), high);
            }
        }
        super::portable(rest, scale, last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_rounded_once_to_f32_and_once_to_f16() {
        let columns = 131;
        let all: Vec<i8> = (0..4 * columns).map(|i| ((i * 37 % 255) as i16 - 127) as i8).collect();
        let scales = [0.25, 3.1e-4, 1.7, 9e-6];
        let expected: Vec<f16> = all
            .iter()
            .enumerate()
            .map(|(i, &q)| f16::from_f32(f32::from(q) * scales[i / columns]))
            .collect();
        for (first, end) in [(0, all.len()), (1, 130), (100, 300), (131, 262), (5, 5)] {
            let mut half = vec![f16::ONE; end - first];
            int8_to_f16(&all[first..end], &scales, columns, first, &mut half);
            assert_eq!(half, expected[first..end], "{first}..{end}");
            let mut wide = vec![1f32; end - first];
            int8_to_f32(&all[first..end], &scales, columns, first, &mut wide);
            for (i, value) in wide.into_iter().enumerate() {
                let at = first + i;
                assert_eq!(value, f32::from(all[at]) * scales[at / columns]);
            }
        }
    }

    #[test]
    fn vector_and_portable_code_give_the_same_bits() {
        let values: Vec<i8> = (-128..=127).collect();
        for scale in [1.0, 1.0 / 127.0, 3.3e-7, 600.0, 0.1] {
            let (mut a, mut b) = (vec![f16::ZERO; 256], vec![f16::ZERO; 256]);
            row_to_f16()(&values, scale, &mut a);
            portable(&values, scale, &mut b);
            assert_eq!(a, b, "scale {scale}");
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx2")
                && std::arch::is_x86_feature_detected!("f16c")
            {
                a.fill(f16::ONE);
                // SAFETY: the CPU has both features.
                unsafe { x86::row(&values, scale, &mut a) };
                assert_eq!(a, b, "eight at a time, scale {scale}");
            }
        }
    }
}
