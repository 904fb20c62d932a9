//! Vectors of 256 bits: products in one instruction, and their sums in another, or both in one (AVX-VNNI).

use std::arch::asm;
use std::arch::x86_64::*;

use qhx_core::quantized::BLOCK;

use super::{Group, LANES, PANEL, Panel, TILE, WORDS, Wide};
use crate::integers::{GROUP, IntegerTask, Words};
use crate::kernels::Row;

/// Sums of 32 bits in a vector.
const HALF: usize = LANES / 2;

#[target_feature(enable = "avx2,fma")]
pub(super) fn fill(words: &mut Words, x: &[f32], columns: usize) -> bool {
    words.fill(x, columns)
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn few<const VNNI: bool>(task: &mut IntegerTask<'_, '_>, groups: &[Group]) {
    task.each_rows(groups, |[row], x, n, out| match out {
        [a] => dots::<VNNI, _>(row, x, n, [a]),
        [a, b] => dots::<VNNI, _>(row, x, n, [a, b]),
        [a, b, c] => dots::<VNNI, _>(row, x, n, [a, b, c]),
        [a, b, c, d] => dots::<VNNI, _>(row, x, n, [a, b, c, d]),
        _ => {}
    });
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn several<const VNNI: bool>(
    task: &mut IntegerTask<'_, '_>,
    panels: &[Panel],
    wide: &mut Wide,
) {
    task.each_tile(
        panels,
        wide,
        |wide, row, weights| wide.fill(row, weights),
        |wide, panel| multiply::<VNNI>(wide, panel),
    );
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn dots<const VNNI: bool, const M: usize>(
    row: Row<'_>,
    x: &[Group],
    n: usize,
    out: [&mut &mut [f32]; M],
) {
    let each = x.len() / M;
    let mut rows: [&[Group]; M] = [&[]; M];
    for (m, row) in rows.iter_mut().enumerate() {
        *row = &x[m * each..][..each];
    }
    let (sums, scale) = match row {
        Row::I8(w, scale) => (dots_i8::<VNNI, M>(rows, w), scale),
        Row::I8Blocks(w, scales) => (dots_i8_blocks::<VNNI, M>(rows, w, scales), 1.0),
        Row::I4(w, scales) => (dots_i4::<VNNI, M>(rows, bytemuck::cast_slice(w), scales), 1.0),
        Row::F32(_) | Row::F16(_) => return,
    };
    for (out, sum) in out.into_iter().zip(sums) {
        out[n] = sum * scale;
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn dots_i4<const VNNI: bool, const M: usize>(
    x: [&[Group]; M],
    w: &[u8],
    scales: &[f32],
) -> [f32; M] {
    let low = _mm256_set1_epi16(15);
    let mut sums = [_mm256_setzero_ps(); M];
    let groups = w.chunks(GROUP / 2).zip(scales.chunks(GROUP / BLOCK));
    for (index, (w, scales)) in groups.enumerate() {
        for (half, (w, scales)) in w.chunks(2 * BLOCK / 2).zip(scales.chunks(2)).enumerate() {
            let w = bytes(w);
            let w = [
                _mm256_and_si256(w, low),
                _mm256_and_si256(_mm256_srli_epi16::<4>(w), low),
                _mm256_and_si256(_mm256_srli_epi16::<8>(w), low),
                _mm256_srli_epi16::<12>(w),
            ];
            let first = _mm_set1_ps(scales[0]);
            let second = _mm_set1_ps(scales.get(1).copied().unwrap_or_default());
            let factors = _mm256_set_m128(second, first);
            for m in 0..M {
                let Group { values, offsets, scales } = &x[m][index];
                let mut sum = integers(&offsets.as_chunks().0[half]);
                for (w, x) in w.iter().zip(values) {
                    sum = add_products::<VNNI>(sum, *w, words(&x.as_chunks().0[half]));
                }
                let factors = _mm256_mul_ps(factors, floats(&scales.as_chunks().0[half]));
                sums[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), factors, sums[m]);
            }
        }
    }
    totals(sums)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn dots_i8<const VNNI: bool, const M: usize>(x: [&[Group]; M], w: &[i8]) -> [f32; M] {
    let mut sums = [_mm256_setzero_ps(); M];
    for (index, w) in w.chunks(GROUP).enumerate() {
        let mut parts = [_mm256_setzero_si256(); M];
        for (at, w) in w.chunks(2 * LANES).enumerate() {
            let w = extended(w);
            for m in 0..M {
                let x = &x[m][index].values[at].as_chunks().0;
                parts[m] = add_products::<VNNI>(parts[m], w[0], words(&x[0]));
                parts[m] = add_products::<VNNI>(parts[m], w[1], words(&x[1]));
            }
        }
        for m in 0..M {
            let scale = _mm256_set1_ps(x[m][index].scales[0]);
            sums[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(parts[m]), scale, sums[m]);
        }
    }
    totals(sums)
}

/// As [`dots_i8`], with a scale for each block.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn dots_i8_blocks<const VNNI: bool, const M: usize>(
    x: [&[Group]; M],
    w: &[i8],
    scales: &[f32],
) -> [f32; M] {
    const BLOCKS: usize = GROUP / BLOCK;
    let mut sums = [_mm256_setzero_ps(); M];
    for (index, (w, scales)) in w.chunks(GROUP).zip(scales.chunks(BLOCKS)).enumerate() {
        let mut parts = [[_mm256_setzero_si256(); BLOCKS]; M];
        for (at, w) in w.as_chunks::<BLOCK>().0.iter().enumerate().take(BLOCKS) {
            let w = extended(w);
            for m in 0..M {
                let x = x[m][index].values[at].as_chunks().0;
                let first = _mm256_madd_epi16(w[0], words(&x[0]));
                parts[m][at] = add_products::<VNNI>(first, w[1], words(&x[1]));
            }
        }
        let mut filled = [0.0; BLOCKS];
        let scales = scales.first_chunk().unwrap_or_else(|| {
            filled[..scales.len()].copy_from_slice(scales);
            &filled
        });
        for m in 0..M {
            // Both halves have a lane for each block.
            let [a, b, c, d] = parts[m];
            let all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
            let factors = x[m][index].scales.as_chunks::<{ LANES / BLOCKS }>().0;
            let mut product = [0f32; BLOCKS];
            for (at, product) in product.iter_mut().enumerate() {
                *product = scales[at] * factors[at][0];
            }
            let product = _mm256_set_m128(four(&product), four(&product));
            sums[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(all), product, sums[m]);
        }
    }
    totals(sums)
}

/// The products of each row of weights with all rows of the panel.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn multiply<const VNNI: bool>(wide: &Wide, panel: &Panel) -> [[f32; PANEL]; TILE] {
    let blocks = wide.scales.len() / TILE;
    let pairs = wide.block / 2;
    let rows = wide.rows(panel.values.len());
    let mut all = [[0f32; PANEL]; TILE];
    // There are sixteen registers: the sums of all rows of weights with eight rows of `x`.
    for part in 0..PANEL / HALF {
        let mut sums = [_mm256_setzero_ps(); TILE];
        for (block, x) in panel.values.chunks_exact(pairs).enumerate() {
            let mut parts = [_mm256_setzero_si256(); TILE];
            for (pair, x) in x.iter().enumerate() {
                let x = words(&x.as_flattened().as_chunks().0[part]);
                for n in 0..TILE {
                    // SAFETY: each row has as many pairs as the panel. A checked access could panic, which would keep
                    // the sums in memory.
                    let w = unsafe { *rows[n].get_unchecked(block * pairs + pair) };
                    let w = _mm256_set1_epi32(bytemuck::cast(w));
                    parts[n] = add_products::<VNNI>(parts[n], x, w);
                }
            }
            let factors = floats(&panel.scales[block].as_chunks().0[part]);
            for n in 0..TILE {
                let scale = _mm256_set1_ps(wide.scales[n * blocks + block]);
                let scale = _mm256_mul_ps(scale, factors);
                sums[n] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(parts[n]), scale, sums[n]);
            }
        }
        for n in 0..TILE {
            all[n].as_chunks_mut().0[part] = lanes(sums[n]);
        }
    }
    all
}

/// Pairs of products, each of which is added to a sum. Integers are at most 32767 from 0, so that no pair overflows.
#[inline]
#[target_feature(enable = "avx2")]
fn add_products<const VNNI: bool>(mut sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
    if !VNNI {
        return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
    }
    // SAFETY: the instruction, which the processor has, only computes with these registers.
    unsafe {
        asm!(
            "{{vex}} vpdpwssd {sums}, {a}, {b}",
            sums = inout(ymm_reg) sums,
            a = in(ymm_reg) a,
            b = in(ymm_reg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// The first 32 bytes, with 0 after the last.
#[inline]
#[target_feature(enable = "avx2")]
fn bytes(w: &[u8]) -> __m256i {
    let mut filled = [0; 32];
    let w = w.first_chunk().unwrap_or_else(|| {
        filled[..w.len()].copy_from_slice(w);
        &filled
    });
    // SAFETY: the array has the bytes of a vector.
    unsafe { _mm256_loadu_si256(w.as_ptr().cast()) }
}

/// The first 32 int8 as int16, with 0 after the last.
#[inline]
#[target_feature(enable = "avx2")]
fn extended(w: &[i8]) -> [__m256i; 2] {
    let bytes = bytes(bytemuck::cast_slice(w));
    [
        _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)),
        _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(bytes)),
    ]
}

/// The sum of the lanes of each.
#[inline]
#[target_feature(enable = "avx2")]
fn totals<const M: usize>(sums: [__m256; M]) -> [f32; M] {
    let mut all = [0f32; M];
    for (total, sums) in all.iter_mut().zip(sums) {
        *total = lanes(sums).iter().sum();
    }
    all
}

#[inline]
#[target_feature(enable = "avx2")]
fn lanes(vector: __m256) -> [f32; HALF] {
    let mut lanes = [0f32; HALF];
    // SAFETY: the array has the bytes of a vector.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), vector) };
    lanes
}

#[inline]
#[target_feature(enable = "avx2")]
fn four(lanes: &[f32; 4]) -> __m128 {
    // SAFETY: as above.
    unsafe { _mm_loadu_ps(lanes.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn integers(lanes: &[i32; HALF]) -> __m256i {
    // SAFETY: as above.
    unsafe { _mm256_loadu_si256(lanes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn words(words: &[i16; WORDS / 2]) -> __m256i {
    // SAFETY: as above.
    unsafe { _mm256_loadu_si256(words.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn floats(lanes: &[f32; HALF]) -> __m256 {
    // SAFETY: as above.
    unsafe { _mm256_loadu_ps(lanes.as_ptr()) }
}
