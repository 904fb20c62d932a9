//! Vectors of 512 bits, with the sums of two or four products in one instruction (AVX-512 VNNI).

use std::arch::x86_64::*;

use qhx_types::quantized::BLOCK;

use super::{Group, LANES, PANEL, Panel, TILE, VECTOR, Wide};
use crate::integers::{GROUP, IntegerTask, Words, rows};
use crate::kernels::{AHEAD, Row, Scales};

/// A group of weights as they are multiplied with one of `x`.
type Weights<const BYTES: usize> = [[__m512i; BYTES]; GROUP / VECTOR];

/// Blocks in a group.
const BLOCKS: usize = GROUP / BLOCK;

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn fill(words: &mut Words, x: &[f32], columns: usize) -> bool {
    words.fill(x, columns)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn few<const BYTES: usize>(task: &mut IntegerTask<'_, '_>, groups: &[Group<BYTES>]) {
    task.each_rows(groups, |[row], x, n, out| up_to_four!(out, dots(row, x, n, out)));
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn several<const BYTES: usize>(
    task: &mut IntegerTask<'_, '_>,
    panels: &[Panel<BYTES>],
    wide: &mut Wide,
) {
    task.each_tile(
        panels,
        wide,
        |wide, row, weights| wide.fill::<BYTES>(row, weights),
        |wide, panel| multiply(wide, panel),
    );
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn dots<const BYTES: usize, const M: usize>(
    row: Row<'_>,
    x: &[Group<BYTES>],
    n: usize,
    out: [&mut &mut [f32]; M],
) {
    let x = rows(x);
    let sums = match row {
        Row::I8(w, scale) => {
            let (w, scale) = (bytemuck::cast_slice(w), _mm512_set1_ps(scale));
            sums::<BYTES, M, GROUP>(x, w, |_| scale, |w, at| blocks(w, at))
        }
        Row::I8Blocks(w, scales) => {
            let w = bytemuck::cast_slice(w);
            let group = |w: &_, at| blocks(w, at);
            match scales {
                Scales::F32(all) => {
                    sums::<BYTES, M, GROUP>(x, w, |at| spread(four(all, at)), group)
                }
                Scales::F16(all) => {
                    sums::<BYTES, M, GROUP>(x, w, |at| spread(four_halves(all, at)), group)
                }
            }
        }
        Row::I4(w, scales) => {
            let w = bytemuck::cast_slice(w);
            let group = |w: &_, at| nibbles(w, at);
            match scales {
                Scales::F32(all) => {
                    sums::<BYTES, M, { GROUP / 2 }>(x, w, |at| spread(four(all, at)), group)
                }
                Scales::F16(all) => {
                    sums::<BYTES, M, { GROUP / 2 }>(x, w, |at| spread(four_halves(all, at)), group)
                }
            }
        }
        Row::F32(_) | Row::F16(_) => return,
    };
    for (out, sum) in out.into_iter().zip(sums) {
        out[n] = sum;
    }
}

/// The products of a row of weights, of which a group has `STEP` bytes, with rows of `x`. `factors` has the scales of a
/// group's weights for each lane, `group` makes vectors of its bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn sums<const BYTES: usize, const M: usize, const STEP: usize>(
    x: [&[Group<BYTES>]; M],
    w: &[u8],
    factors: impl Fn(usize) -> __m512,
    group: impl Fn(&[u8], usize) -> Weights<BYTES>,
) -> [f32; M] {
    let mut sums = [_mm512_setzero_ps(); M];
    for (index, at) in (0..w.len()).step_by(STEP).enumerate() {
        for line in (0..STEP).step_by(VECTOR) {
            _mm_prefetch::<_MM_HINT_T0>(w.as_ptr().wrapping_add(at + AHEAD + line).cast());
        }
        let (w, factors) = (group(w, at), factors(index));
        for m in 0..M {
            let Group { values, offsets, scales } = &x[m][index];
            let mut sum = integers(offsets);
            for (w, x) in w.as_flattened().iter().zip(values.as_flattened()) {
                sum = add_products::<BYTES>(sum, *w, load(x));
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

/// Adds the products of two words or of four bytes to each sum. The bytes of `w` are unsigned.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn add_products<const BYTES: usize>(sums: __m512i, w: __m512i, x: __m512i) -> __m512i {
    if BYTES == 1 { _mm512_dpbusd_epi32(sums, w, x) } else { _mm512_dpwssd_epi32(sums, w, x) }
}

/// The scales of a group's blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn four(scales: &[f32], index: usize) -> __m128 {
    let scales = &scales[index * BLOCKS..];
    match scales.first_chunk::<BLOCKS>() {
        // SAFETY: reads the four numbers.
        Some(four) => unsafe { _mm_loadu_ps(four.as_ptr()) },
        // SAFETY: what the mask leaves out is not read.
        None => unsafe { _mm_maskz_loadu_ps((1 << scales.len()) - 1, scales.as_ptr()) },
    }
}

/// Same as [`four`], from the bits of f16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn four_halves(scales: &[u16], index: usize) -> __m128 {
    let scales = &scales[index * BLOCKS..];
    _mm_cvtph_ps(match scales.first_chunk::<BLOCKS>() {
        // SAFETY: reads the four numbers.
        Some(four) => unsafe { _mm_loadl_epi64(four.as_ptr().cast()) },
        // SAFETY: what the mask leaves out is not read.
        None => unsafe { _mm_maskz_loadu_epi16((1 << scales.len()) - 1, scales.as_ptr().cast()) },
    })
}

/// Each of four scales in four lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn spread(four: __m128) -> __m512 {
    let spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(four))
}

/// Bytes from `at` on, with 0 after the last.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn bytes(w: &[u8], at: usize) -> __m512i {
    let left = w.len() - at;
    if left >= VECTOR {
        // SAFETY: 64 bytes from `at` on lie within `w`.
        return unsafe { _mm512_loadu_si512(w.as_ptr().add(at).cast()) };
    }
    // SAFETY: what the mask leaves out is not read, and the rest lies within `w`.
    unsafe { _mm512_maskz_loadu_epi8((1 << left) - 1, w.as_ptr().add(at).cast()) }
}

/// A group of bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn two(w: &[u8], at: usize) -> [__m512i; 2] {
    let second = at + VECTOR;
    let second = if second < w.len() { bytes(w, second) } else { _mm512_setzero_si512() };
    [bytes(w, at), second]
}

/// Weights of four bits as they come out of words or bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn nibbles<const BYTES: usize>(w: &[u8], at: usize) -> Weights<BYTES> {
    let w = bytes(w, at);
    let low = if BYTES == 1 { _mm512_set1_epi8(15) } else { _mm512_set1_epi16(15) };
    let mut all = [[w; BYTES]; GROUP / VECTOR];
    for (place, to) in all.as_flattened_mut().iter_mut().enumerate() {
        let shift = _mm_cvtsi32_si128(4 * place as i32);
        *to = _mm512_and_si512(_mm512_srl_epi16(w, shift), low);
    }
    all
}

/// The int8 of a group, each four lanes with those of a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn blocks<const BYTES: usize>(w: &[u8], at: usize) -> Weights<BYTES> {
    let [a, b] = two(w, at);
    if BYTES == 1 {
        let sign = _mm512_set1_epi8(i8::MIN);
        let first = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
        let second = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
        return [[_mm512_xor_si512(first, sign); BYTES], [_mm512_xor_si512(second, sign); BYTES]];
    }
    let first = _mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13);
    let second = _mm512_setr_epi64(2, 6, 10, 14, 3, 7, 11, 15);
    extended([_mm512_permutex2var_epi64(a, first, b), _mm512_permutex2var_epi64(a, second, b)])
}

/// Both halves of each vector as words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn extended<const BYTES: usize>(w: [__m512i; 2]) -> Weights<BYTES> {
    let mut all = [[w[0]; BYTES]; GROUP / VECTOR];
    for (to, w) in all.iter_mut().zip(w) {
        let halves = [_mm512_castsi512_si256(w), _mm512_extracti64x4_epi64::<1>(w)];
        for (to, half) in to.iter_mut().zip(halves) {
            *to = _mm512_cvtepi8_epi16(half);
        }
    }
    all
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; VECTOR]) -> __m512i {
    // SAFETY: the array has the bytes of a vector.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn integers(lanes: &[i32; LANES]) -> __m512i {
    // SAFETY: as above.
    unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
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
fn multiply<const BYTES: usize>(wide: &Wide, panel: &Panel<BYTES>) -> [[f32; PANEL]; TILE] {
    let blocks = wide.scales.len() / TILE;
    let rows = wide.rows(panel.values.len());
    let mut sums = [[_mm512_setzero_ps(); 2]; TILE];
    for (block, x) in panel.values.chunks_exact(panel.block).enumerate() {
        let offsets = panel.offsets[block].as_chunks().0;
        let mut parts = [[integers(&offsets[0]), integers(&offsets[1])]; TILE];
        for (at, x) in x.iter().enumerate() {
            let x = x.as_chunks().0;
            let x = [integers(&x[0]), integers(&x[1])];
            for n in 0..TILE {
                // SAFETY: each row has as many elements as the panel. A checked access could panic, which would
                // keep the sums in memory.
                let w = unsafe { *rows[n].get_unchecked(block * panel.block + at) };
                let w = _mm512_set1_epi32(w);
                parts[n][0] = add_products::<BYTES>(parts[n][0], w, x[0]);
                parts[n][1] = add_products::<BYTES>(parts[n][1], w, x[1]);
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
