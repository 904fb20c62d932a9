//! Vectors of 512 bits, with the sums of two products in one instruction (AVX-512 VNNI).

use std::arch::x86_64::*;

use qhx_core::quantized::BLOCK;

use super::{Group, LANES, PANEL, Panel, TILE, WORDS, Wide};
use crate::integers::{GROUP, IntegerTask, Words};
use crate::kernels::{AHEAD, Row};

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn fill(words: &mut Words, x: &[f32], columns: usize) -> bool {
    words.fill(x, columns)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn few(task: &mut IntegerTask<'_, '_>, groups: &[Group]) {
    task.each_rows(groups, |[row], x, n, out| match out {
        [a] => dots(row, x, n, [a]),
        [a, b] => dots(row, x, n, [a, b]),
        [a, b, c] => dots(row, x, n, [a, b, c]),
        [a, b, c, d] => dots(row, x, n, [a, b, c, d]),
        _ => {}
    });
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn several(task: &mut IntegerTask<'_, '_>, panels: &[Panel], wide: &mut Wide) {
    task.each_tile(
        panels,
        wide,
        |wide, row, weights| wide.fill(row, weights),
        |wide, panel| multiply(wide, panel),
    );
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn dots<const M: usize>(row: Row<'_>, x: &[Group], n: usize, out: [&mut &mut [f32]; M]) {
    let each = x.len() / M;
    let mut rows: [&[Group]; M] = [&[]; M];
    for (m, row) in rows.iter_mut().enumerate() {
        *row = &x[m * each..][..each];
    }
    let (sums, scale) = match row {
        Row::I8(w, scale) => (dots_i8(rows, w), scale),
        Row::I4(w, scales) => (dots_i4(rows, bytemuck::cast_slice(w), scales), 1.0),
        Row::I8Blocks(..) | Row::F32(_) | Row::F16(_) => return,
    };
    for (out, sum) in out.into_iter().zip(sums) {
        out[n] = sum * scale;
    }
}

/// Bytes from `at` on, with 0 after the last.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn bytes(w: &[u8], at: usize) -> __m512i {
    let left = w.len() - at;
    if left >= 64 {
        // SAFETY: 64 bytes from `at` on lie within `w`.
        return unsafe { _mm512_loadu_si512(w.as_ptr().add(at).cast()) };
    }
    // SAFETY: what the mask leaves out is not read, and the rest lies within `w`.
    unsafe { _mm512_maskz_loadu_epi8((1 << left) - 1, w.as_ptr().add(at).cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn dots_i4<const M: usize>(x: [&[Group]; M], w: &[u8], scales: &[f32]) -> [f32; M] {
    let spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    let low = _mm512_set1_epi16(15);
    let mut sums = [_mm512_setzero_ps(); M];
    for (index, at) in (0..w.len()).step_by(GROUP / 2).enumerate() {
        _mm_prefetch::<_MM_HINT_T0>(w.as_ptr().wrapping_add(at + AHEAD).cast());
        let w = bytes(w, at);
        let w = [
            _mm512_and_si512(w, low),
            _mm512_and_si512(_mm512_srli_epi16::<4>(w), low),
            _mm512_and_si512(_mm512_srli_epi16::<8>(w), low),
            _mm512_srli_epi16::<12>(w),
        ];
        let scales = &scales[index * (GROUP / BLOCK)..];
        let factors = match scales.as_chunks::<4>().0 {
            // SAFETY: reads the four numbers.
            [four, ..] => unsafe { _mm_loadu_ps(four.as_ptr()) },
            // SAFETY: what the mask leaves out is not read.
            [] => unsafe { _mm_maskz_loadu_ps((1 << scales.len()) - 1, scales.as_ptr()) },
        };
        let factors = _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(factors));
        for m in 0..M {
            let Group { values, offsets, scales } = &x[m][index];
            let mut sum = load(offsets);
            for (w, x) in w.iter().zip(values) {
                sum = _mm512_dpwssd_epi32(sum, *w, words(x));
            }
            let factors = _mm512_mul_ps(factors, floats(scales));
            sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factors, sums[m]);
        }
    }
    let mut products = [0f32; M];
    for m in 0..M {
        products[m] = _mm512_reduce_add_ps(sums[m]);
    }
    products
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn dots_i8<const M: usize>(x: [&[Group]; M], w: &[i8]) -> [f32; M] {
    let w: &[u8] = bytemuck::cast_slice(w);
    let mut sums = [_mm512_setzero_ps(); M];
    for (index, at) in (0..w.len()).step_by(GROUP).enumerate() {
        _mm_prefetch::<_MM_HINT_T0>(w.as_ptr().wrapping_add(at + AHEAD).cast());
        _mm_prefetch::<_MM_HINT_T0>(w.as_ptr().wrapping_add(at + AHEAD + 64).cast());
        let wide = wide(w, at);
        for m in 0..M {
            let Group { values, scales, .. } = &x[m][index];
            let mut sum = _mm512_setzero_si512();
            for (w, x) in wide.iter().zip(values) {
                sum = _mm512_dpwssd_epi32(sum, *w, words(x));
            }
            sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), floats(scales), sums[m]);
        }
    }
    let mut products = [0f32; M];
    for m in 0..M {
        products[m] = _mm512_reduce_add_ps(sums[m]);
    }
    products
}

/// The int8 of a group as int16, with 0 after the last.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn wide(w: &[u8], at: usize) -> [__m512i; GROUP / WORDS] {
    let first = bytes(w, at);
    let second = if at + 64 < w.len() { bytes(w, at + 64) } else { _mm512_setzero_si512() };
    [
        _mm512_cvtepi8_epi16(_mm512_castsi512_si256(first)),
        _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64::<1>(first)),
        _mm512_cvtepi8_epi16(_mm512_castsi512_si256(second)),
        _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64::<1>(second)),
    ]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(lanes: &[i32; LANES]) -> __m512i {
    // SAFETY: the array has the bytes of a vector.
    unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn words(words: &[i16; WORDS]) -> __m512i {
    // SAFETY: as above.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn floats(lanes: &[f32; LANES]) -> __m512 {
    // SAFETY: as above.
    unsafe { _mm512_loadu_ps(lanes.as_ptr()) }
}

/// The products of each row of weights with all rows of the panel.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn multiply(wide: &Wide, panel: &Panel) -> [[f32; PANEL]; TILE] {
    let blocks = wide.scales.len() / TILE;
    let pairs = wide.block / 2;
    let rows = wide.rows(panel.values.len());
    let mut sums = [[_mm512_setzero_ps(); 2]; TILE];
    for (block, x) in panel.values.chunks_exact(pairs).enumerate() {
        let mut parts = [[_mm512_setzero_si512(); 2]; TILE];
        for (pair, x) in x.iter().enumerate() {
            let x = x.as_flattened().as_chunks().0;
            let x = [words(&x[0]), words(&x[1])];
            for n in 0..TILE {
                // SAFETY: each row has as many pairs as the panel. A checked access could panic, which would
                // keep the sums in memory.
                let w = unsafe { *rows[n].get_unchecked(block * pairs + pair) };
                let w = _mm512_set1_epi32(bytemuck::cast(w));
                parts[n][0] = _mm512_dpwssd_epi32(parts[n][0], x[0], w);
                parts[n][1] = _mm512_dpwssd_epi32(parts[n][1], x[1], w);
            }
        }
        let factors = panel.scales[block].as_chunks().0;
        let factors = [floats(&factors[0]), floats(&factors[1])];
        for n in 0..TILE {
            let scale = _mm512_set1_ps(wide.scales[n * blocks + block]);
            for half in 0..2 {
                let part = _mm512_cvtepi32_ps(parts[n][half]);
                let part = _mm512_mul_ps(part, factors[half]);
                sums[n][half] = _mm512_fmadd_ps(part, scale, sums[n][half]);
            }
        }
    }
    let mut both = [[0f32; PANEL]; TILE];
    for (to, sums) in both.iter_mut().zip(sums) {
        for (to, sum) in to.chunks_exact_mut(LANES).zip(sums) {
            // SAFETY: a chunk has the lanes of a vector.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), sum) };
        }
    }
    both
}
