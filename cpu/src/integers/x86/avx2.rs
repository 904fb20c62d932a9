//! Vectors of 256 bits: products in one instruction, and their sums in another, or both in one (AVX-VNNI).

use std::arch::asm;
use std::arch::x86_64::*;

use qhx_types::quantized::BLOCK;

use super::{Group, LANES, PANEL, Panel, TILE, VECTOR, Wide};
use crate::integers::{GROUP, IntegerTask, Words, rows};
use crate::kernels::{Row, Scales};

/// Sums of 32 bits in a vector.
const HALF: usize = LANES / 2;
/// Bytes in a vector.
const WIDTH: usize = VECTOR / 2;
/// Blocks in a group.
const BLOCKS: usize = GROUP / BLOCK;

/// `OF` blocks of weights as they are multiplied with as many of `x`.
type Weights<const BYTES: usize, const OF: usize> = [[__m256i; BYTES]; OF];

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fill(words: &mut Words, x: &[f32], columns: usize) -> bool {
    words.fill(x, columns)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn few<const VNNI: bool, const BYTES: usize>(
    task: &mut IntegerTask<'_, '_>,
    groups: &[Group<BYTES>],
) {
    task.each_rows(groups, |[row], x, n, out| {
        up_to_four!(out, dots::<VNNI, BYTES, _>(row, x, n, out));
    });
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn several<const VNNI: bool, const BYTES: usize>(
    task: &mut IntegerTask<'_, '_>,
    panels: &[Panel<BYTES>],
    wide: &mut Wide,
) {
    task.each_tile(
        panels,
        wide,
        |wide, row, weights| wide.fill::<BYTES>(row, weights),
        |wide, panel| multiply::<VNNI, BYTES>(wide, panel),
    );
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dots<const VNNI: bool, const BYTES: usize, const M: usize>(
    row: Row<'_>,
    x: &[Group<BYTES>],
    n: usize,
    out: [&mut &mut [f32]; M],
) {
    let x = rows(x);
    let sums = match row {
        Row::I8(w, scale) => {
            let (w, scales) = (bytemuck::cast_slice(w), [scale; BLOCKS]);
            let part = |w: &_, at| [block::<VNNI, BYTES>(w, at)];
            sums::<VNNI, true, BYTES, M, GROUP, 1>(x, w, |_| scales, part)
        }
        Row::I8Blocks(w, scales) => {
            let w = bytemuck::cast_slice(w);
            let part = |w: &_, at| [block::<VNNI, BYTES>(w, at)];
            match scales {
                Scales::F32(all) => {
                    sums::<VNNI, true, BYTES, M, GROUP, 1>(x, w, |index| four(all, index), part)
                }
                Scales::F16(all) => {
                    let scales = |index| floats_of_halves(four(all, index));
                    sums::<VNNI, true, BYTES, M, GROUP, 1>(x, w, scales, part)
                }
            }
        }
        Row::I4(w, scales) => {
            let w = bytemuck::cast_slice(w);
            let part = |w: &_, at| nibbles(w, at);
            match scales {
                Scales::F32(all) => {
                    let scales = |index| four(all, index);
                    sums::<VNNI, false, BYTES, M, { GROUP / 2 }, 2>(x, w, scales, part)
                }
                Scales::F16(all) => {
                    let scales = |index| floats_of_halves(four(all, index));
                    sums::<VNNI, false, BYTES, M, { GROUP / 2 }, 2>(x, w, scales, part)
                }
            }
        }
        Row::F32(_) | Row::F16(_) => return,
    };
    for (out, sum) in out.into_iter().zip(sums) {
        out[n] = sum;
    }
}

/// The products of a row of weights, of which a group has `STEP` bytes, with rows of `x`. `scales` has those of a
/// group's blocks, and `part` makes vectors of `OF` blocks at a time. `SIGNED` is whether the weights are int8.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sums<
    const VNNI: bool,
    const SIGNED: bool,
    const BYTES: usize,
    const M: usize,
    const STEP: usize,
    const OF: usize,
>(
    x: [&[Group<BYTES>]; M],
    w: &[u8],
    scales: impl Fn(usize) -> [f32; BLOCKS],
    part: impl Fn(&[u8; STEP], usize) -> Weights<BYTES, OF>,
) -> [f32; M] {
    let mut sums = [_mm256_setzero_ps(); M];
    for (index, w) in w.chunks(STEP).enumerate() {
        let mut filled = [0; STEP];
        let w = w.first_chunk().unwrap_or_else(|| {
            filled[..w.len()].copy_from_slice(w);
            &filled
        });
        let factors = scales(index);
        for at in 0..BLOCKS / OF {
            let w = part(w, at);
            let factors = match OF {
                2 => {
                    _mm256_set_m128(_mm_set1_ps(factors[2 * at + 1]), _mm_set1_ps(factors[2 * at]))
                }
                _ => _mm256_set1_ps(factors[OF * at]),
            };
            for m in 0..M {
                let Group { values, offsets, scales } = &x[m][index];
                let x = &values.as_flattened().as_flattened().as_chunks().0[OF * BYTES * at..];
                let mut sum = match (SIGNED, VNNI, BYTES) {
                    (false, ..) => integers(&offsets.as_chunks().0[at]),
                    (true, true, 1) => first_integers(&offsets.as_chunks().0[at]),
                    _ => _mm256_setzero_si256(),
                };
                for (w, x) in w.as_flattened().iter().zip(x) {
                    sum = add_products::<VNNI, SIGNED, BYTES>(sum, *w, vector(x));
                }
                let scales = match OF {
                    2 => floats(&scales.as_chunks().0[at]),
                    _ => _mm256_set1_ps(scales[OF * at * LANES / BLOCKS]),
                };
                let factors = _mm256_mul_ps(factors, scales);
                sums[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), factors, sums[m]);
            }
        }
    }
    let mut all = [0f32; M];
    for (total, sums) in all.iter_mut().zip(sums) {
        *total = lanes(sums).iter().sum();
    }
    all
}

/// The scales of a group's blocks, with 0 after the last.
#[inline]
#[target_feature(enable = "avx2")]
fn four<T: Copy + Default>(scales: &[T], index: usize) -> [T; BLOCKS] {
    let scales = &scales[index * BLOCKS..];
    scales.first_chunk().copied().unwrap_or_else(|| {
        let mut filled = [T::default(); BLOCKS];
        filled[..scales.len()].copy_from_slice(scales);
        filled
    })
}

/// Bits of f16 as f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn floats_of_halves(four: [u16; BLOCKS]) -> [f32; BLOCKS] {
    let mut floats = [0.0; BLOCKS];
    // SAFETY: reads the four numbers, and writes as many.
    unsafe {
        _mm_storeu_ps(floats.as_mut_ptr(), _mm_cvtph_ps(_mm_loadl_epi64(four.as_ptr().cast())));
    }
    floats
}

/// Two blocks of four bits as they come out of words or bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles<const BYTES: usize>(w: &[u8; GROUP / 2], at: usize) -> Weights<BYTES, 2> {
    let w = vector(&w.as_chunks().0[at]);
    let low = if BYTES == 1 { _mm256_set1_epi8(15) } else { _mm256_set1_epi16(15) };
    let mut all = [[w; BYTES]; 2];
    for (place, to) in all.as_flattened_mut().iter_mut().enumerate() {
        let shift = _mm_cvtsi32_si128(4 * place as i32);
        *to = _mm256_and_si256(_mm256_srl_epi16(w, shift), low);
    }
    all
}

/// A block of int8 as words, or as bytes whose sign AVX-VNNI has as another bit.
#[inline]
#[target_feature(enable = "avx2")]
fn block<const VNNI: bool, const BYTES: usize>(w: &[u8; GROUP], at: usize) -> [__m256i; BYTES] {
    let w: &[u8; BLOCK] = &w.as_chunks().0[at];
    if BYTES == 1 {
        let sign = if VNNI { _mm256_set1_epi8(i8::MIN) } else { _mm256_setzero_si256() };
        return [_mm256_xor_si256(vector(w), sign); BYTES];
    }
    let mut all = [_mm256_setzero_si256(); BYTES];
    for (to, half) in all.iter_mut().zip(w.as_chunks::<{ BLOCK / 2 }>().0) {
        // SAFETY: the array has the bytes of half a vector.
        *to = _mm256_cvtepi8_epi16(unsafe { _mm_loadu_si128(half.as_ptr().cast()) });
    }
    all
}

/// The products of each row of weights with all rows of the panel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply<const VNNI: bool, const BYTES: usize>(
    wide: &Wide,
    panel: &Panel<BYTES>,
) -> [[f32; PANEL]; TILE] {
    let blocks = wide.scales.len() / TILE;
    let rows = wide.rows(panel.values.len());
    let mut all = [[0f32; PANEL]; TILE];
    // There are sixteen registers: the sums of all rows of weights with eight rows of `x`.
    for part in 0..PANEL / HALF {
        let mut sums = [_mm256_setzero_ps(); TILE];
        for (block, x) in panel.values.chunks_exact(panel.block).enumerate() {
            let mut parts = [_mm256_setzero_si256(); TILE];
            for (at, x) in x.iter().enumerate() {
                let x = integers(&x.as_chunks().0[part]);
                for n in 0..TILE {
                    // SAFETY: each row has as many elements as the panel. A checked access could panic, which would
                    // keep the sums in memory.
                    let w = unsafe { *rows[n].get_unchecked(block * panel.block + at) };
                    let w = _mm256_set1_epi32(w);
                    parts[n] = match (VNNI, BYTES) {
                        // A block's sums fit 16 bits: only four bits come here ([`super::Level::has_bytes`]).
                        (false, 1) => _mm256_add_epi16(parts[n], _mm256_maddubs_epi16(w, x)),
                        _ => add_products::<VNNI, false, BYTES>(parts[n], w, x),
                    };
                }
            }
            let offsets = integers(&panel.offsets[block].as_chunks().0[part]);
            let factors = floats(&panel.scales[block].as_chunks().0[part]);
            for n in 0..TILE {
                let sum = match (VNNI, BYTES) {
                    (false, 1) => _mm256_madd_epi16(parts[n], _mm256_set1_epi16(1)),
                    _ => parts[n],
                };
                let sum = _mm256_cvtepi32_ps(_mm256_add_epi32(sum, offsets));
                let scale = _mm256_set1_ps(wide.scales[n * blocks + block]);
                sums[n] = _mm256_fmadd_ps(sum, _mm256_mul_ps(scale, factors), sums[n]);
            }
        }
        for n in 0..TILE {
            all[n].as_chunks_mut().0[part] = lanes(sums[n]);
        }
    }
    all
}

/// Adds the products of two words or of four bytes to each sum. Words are at most 32767 from 0, so that no pair
/// overflows. The bytes of `w` are unsigned with AVX-VNNI; with AVX2 they may be signed, and their signs then go to
/// `x`, as else two products could be more than 16 bits.
#[inline]
#[target_feature(enable = "avx2")]
fn add_products<const VNNI: bool, const SIGNED: bool, const BYTES: usize>(
    mut sums: __m256i,
    w: __m256i,
    x: __m256i,
) -> __m256i {
    macro_rules! vnni {
        ($instruction:literal) => {
            // SAFETY: the instruction, which the processor has, only computes with these registers.
            unsafe {
                asm!(
                    concat!("{{vex}} ", $instruction, " {sums}, {w}, {x}"),
                    sums = inout(ymm_reg) sums,
                    w = in(ymm_reg) w,
                    x = in(ymm_reg) x,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
        };
    }
    match (VNNI, BYTES) {
        (true, 1) => vnni!("vpdpbusd"),
        (true, _) => vnni!("vpdpwssd"),
        (false, 1) => {
            let pairs = match SIGNED {
                true => _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)),
                false => _mm256_maddubs_epi16(w, x),
            };
            let products = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            sums = _mm256_add_epi32(sums, products);
        }
        (false, _) => sums = _mm256_add_epi32(sums, _mm256_madd_epi16(w, x)),
    }
    sums
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
fn vector(bytes: &[u8; WIDTH]) -> __m256i {
    // SAFETY: as above.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn integers(lanes: &[i32; HALF]) -> __m256i {
    // SAFETY: as above.
    unsafe { _mm256_loadu_si256(lanes.as_ptr().cast()) }
}

/// Four of them, and 0.
#[inline]
#[target_feature(enable = "avx2")]
fn first_integers(lanes: &[i32; HALF / 2]) -> __m256i {
    // SAFETY: as above.
    _mm256_zextsi128_si256(unsafe { _mm_loadu_si128(lanes.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx2")]
fn floats(lanes: &[f32; HALF]) -> __m256 {
    // SAFETY: as above.
    unsafe { _mm256_loadu_ps(lanes.as_ptr()) }
}
