//! Vectors of 256 bits: products in one instruction, and their sums in another, or both in one (AVX-VNNI).

use std::arch::asm;
use std::arch::x86_64::*;

use qhx_graph::super_blocks::SUPER;
use qhx_types::quantized::{BLOCK, NIBBLE_ZERO};

use super::{Group, LANES, PANEL, Panel, TILE, VECTOR, Wide};
use crate::integers::{GROUP, IntegerTask, Words, not_steep, rows};
use crate::kernels::{AHEAD, Multiples, Rows, Scales};

/// Sums of 32 bits in a vector.
const HALF: usize = LANES / 2;
/// Bytes in a vector.
const WIDTH: usize = VECTOR / 2;
/// Rows of weights that are multiplied with a few rows of `x` at a time.
const BESIDE: usize = 4;
/// Blocks in a group.
const BLOCKS: usize = GROUP / BLOCK;

/// `OF` blocks of weights as they are multiplied with as many of `x`.
type Weights<const BYTES: usize, const OF: usize> = [[__m256i; BYTES]; OF];

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn narrow(to: &mut [bool], x: &[f32], columns: usize) {
    not_steep(to, x, columns);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fill(words: &mut Words, x: &[f32], columns: usize) -> bool {
    words.fill(x, columns)
}

/// [`Group`]s of `x` in the order of the weights.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn groups<const BYTES: usize>(
    words: &Words,
    weights: Rows<'_>,
    zero: i32,
) -> Vec<Group<BYTES>> {
    Group::all::<WIDTH>(words, weights, zero)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn few<const VNNI: bool, const BYTES: usize>(
    task: &mut IntegerTask<'_, '_>,
    groups: &[Group<BYTES>],
) {
    let IntegerTask { weights, columns, offsets, .. } = *task;
    let each = columns / BLOCK;
    let halved = match offsets {
        Some(Scales::F16(all)) => all,
        _ => &[],
    };
    // A closure for each place that calls it, so that it is inlined there.
    macro_rules! of_halves {
        ($scales:ident, $rows:expr) => {{
            let count = $rows * each;
            assert!($scales.len() >= count, "a scale for each block");
            assert!(halved.is_empty() || halved.len() >= count, "an offset for each block");
            move |row: usize, at: usize| {
                let (at, left) = (row * each + at, each - at);
                // SAFETY: there are as many of each as blocks.
                let scale = unsafe { halves($scales, at, left) };
                let shift = match halved.is_empty() {
                    true => _mm_setzero_ps(),
                    // SAFETY: as above.
                    false => _mm_mul_ps(scale, unsafe { halves(halved, at, left) }),
                };
                [scale, shift]
            }
        }};
    }
    let shifted = |scale, row, at| {
        let shift = match offsets {
            Some(all) => _mm_mul_ps(scale, four(all, row * each + at, each - at)),
            None => _mm_setzero_ps(),
        };
        [scale, shift]
    };
    match (weights, offsets) {
        (Rows::I8(w, scales), _) => {
            let factors = |row, _| [_mm_set1_ps(scales.get(row)), _mm_setzero_ps()];
            let part = |w: &_, at| [block::<VNNI, BYTES>(w, at)];
            let w = bytemuck::cast_slice(w);
            few_rows::<VNNI, true, BYTES, GROUP, 1>(task, groups, w, factors, part);
        }
        (Rows::I8Blocks(w, Scales::F16(scales)), None | Some(Scales::F16(_))) => {
            let factors = of_halves!(scales, w.len() / columns);
            let part = |w: &_, at| [block::<VNNI, BYTES>(w, at)];
            let w = bytemuck::cast_slice(w);
            few_rows::<VNNI, true, BYTES, GROUP, 1>(task, groups, w, factors, part);
        }
        (Rows::I8Blocks(w, scales), _) => {
            let factors = |row, at| shifted(four(scales, row * each + at, each - at), row, at);
            let part = |w: &_, at| [block::<VNNI, BYTES>(w, at)];
            let w = bytemuck::cast_slice(w);
            few_rows::<VNNI, true, BYTES, GROUP, 1>(task, groups, w, factors, part);
        }
        (Rows::I4(w, Scales::Multiples(all)), _) => {
            let w = bytemuck::cast_slice(w);
            let (Multiples { units, multiples, .. }, count) = (all, w.len() / (GROUP / 2));
            assert!(each.is_multiple_of(SUPER) && units.len() >= count, "whole super-blocks");
            assert!(multiples.len() >= 2 * BLOCKS * count, "whole super-blocks");
            let eight = _mm_set1_ps(f32::from(NIBBLE_ZERO));
            let factors = |row, at| {
                let at = (row * each + at) / BLOCKS;
                // SAFETY: there are as many of each as groups of weights, and an even number.
                let [scales, minima] = unsafe { numbers(units, multiples, at) };
                [scales, _mm_fmadd_ps(eight, scales, minima)]
            };
            let part = |w: &_, at| nibbles(w, at);
            few_rows::<VNNI, false, BYTES, { GROUP / 2 }, 2>(task, groups, w, factors, part);
        }
        (Rows::I4(w, Scales::F16(scales)), None | Some(Scales::F16(_))) => {
            let w: &[u8] = bytemuck::cast_slice(w);
            let factors = of_halves!(scales, 2 * w.len() / columns);
            let part = |w: &_, at| nibbles(w, at);
            few_rows::<VNNI, false, BYTES, { GROUP / 2 }, 2>(task, groups, w, factors, part);
        }
        (Rows::I4(w, scales), _) => {
            let factors = |row, at| shifted(four(scales, row * each + at, each - at), row, at);
            let part = |w: &_, at| nibbles(w, at);
            let w = bytemuck::cast_slice(w);
            few_rows::<VNNI, false, BYTES, { GROUP / 2 }, 2>(task, groups, w, factors, part);
        }
        (Rows::F32(_) | Rows::F16(_), _) => {}
    }
}

/// Some rows of weights at a time, with up to four rows of `x`. `w` has all of them, `factors` the scales of the four
/// blocks of a group and the numbers added to their reals, of which it gets the row and the first block, and `part`
/// makes vectors of `OF` blocks at a time. A group has `STEP` bytes. `SIGNED` is whether the weights are int8.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn few_rows<
    const VNNI: bool,
    const SIGNED: bool,
    const BYTES: usize,
    const STEP: usize,
    const OF: usize,
>(
    task: &mut IntegerTask<'_, '_>,
    groups: &[Group<BYTES>],
    w: &[u8],
    factors: impl Fn(usize, usize) -> [__m128; 2] + Copy,
    part: impl Fn(&[u8; STEP], usize) -> Weights<BYTES, OF> + Copy,
) {
    let count = task.out.first().map_or(0, |out| out.len());
    let (each, row) = (task.columns.div_ceil(GROUP), task.columns * STEP / GROUP);
    let w = &w[..count * row];
    for first in (0..count).step_by(BESIDE) {
        // The rows are in the nearest cache when the next four come.
        for (out, x) in task.out.chunks_mut(4).zip(groups.chunks(4 * each)) {
            up_to_four!(
                out,
                few_dots::<VNNI, SIGNED, BYTES, _, STEP, OF>(first, w, row, x, out, factors, part)
            );
        }
    }
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
        |wide, row, weights, offsets| wide.fill::<BYTES>(row, weights, offsets),
        |wide, panel| multiply::<VNNI, BYTES>(wide, panel),
    );
}

/// Elements from `first` on of each `out` become the products of its row of `x` with rows of weights, of which each has
/// `row` bytes. The last one comes again in the place of those that are not there.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn few_dots<
    const VNNI: bool,
    const SIGNED: bool,
    const BYTES: usize,
    const M: usize,
    const STEP: usize,
    const OF: usize,
>(
    first: usize,
    w: &[u8],
    row: usize,
    x: &[Group<BYTES>],
    out: [&mut &mut [f32]; M],
    factors: impl Fn(usize, usize) -> [__m128; 2],
    part: impl Fn(&[u8; STEP], usize) -> Weights<BYTES, OF>,
) {
    let x: [&[Group<BYTES>]; M] = rows(x);
    let (whole, count, last) = (row / STEP, row.div_ceil(STEP), w.len() / row - 1);
    assert!(x[0].len() >= count && first <= last, "as many groups of x as of weights");
    let mut totals = [[0f32; BESIDE]; M];
    // Loops, as what closures of the standard library's functions return would be in memory.
    for (n, at) in (first..first + BESIDE).enumerate() {
        let at = at.min(last);
        let mut sums = [_mm256_setzero_ps(); M];
        let mut rest = [0; STEP];
        if whole < count {
            let bytes = &w[at * row..][whole * STEP..row];
            rest[..bytes.len()].copy_from_slice(bytes);
        }
        // What is called in one place is inlined.
        for index in 0..count {
            let w: &[u8; STEP] = match index < whole {
                // SAFETY: `w` has `last + 1` rows, each of `whole` groups.
                true => unsafe { &*w.as_ptr().add(at * row + index * STEP).cast() },
                false => &rest,
            };
            for line in (0..STEP).step_by(VECTOR) {
                _mm_prefetch::<_MM_HINT_T0>(w.as_ptr().wrapping_add(AHEAD + line).cast());
            }
            let factors = factors(at, index * BLOCKS);
            for place in 0..BLOCKS / OF {
                let w = part(w, place);
                for m in 0..M {
                    // SAFETY: each row of `x` has as many groups.
                    let x = unsafe { x[m].get_unchecked(index) };
                    sums[m] = add_part::<VNNI, SIGNED, BYTES, OF>(sums[m], w, factors, x, place);
                }
            }
        }
        for m in 0..M {
            totals[m][n] = total(sums[m]);
        }
    }
    for (out, totals) in out.into_iter().zip(totals) {
        out[first..].iter_mut().zip(totals).for_each(|(y, sum)| *y = sum);
    }
}

/// Adds the products of part `at` of a group, of `OF` blocks, to the sums of a row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_part<const VNNI: bool, const SIGNED: bool, const BYTES: usize, const OF: usize>(
    sums: __m256,
    w: Weights<BYTES, OF>,
    [scales, shifts]: [__m128; 2],
    x: &Group<BYTES>,
    at: usize,
) -> __m256 {
    let values = &x.values.as_flattened().as_flattened().as_chunks().0[OF * BYTES * at..];
    let mut sum = match OF {
        2 => integers(&x.starts.as_chunks().0[at]),
        _ => first_integers(&x.starts.as_chunks().0[at]),
    };
    if !VNNI && !SIGNED && BYTES == 1 {
        // Four products of four bits with bytes fit 16 bits.
        let mut pairs = _mm256_setzero_si256();
        for (w, x) in w.as_flattened().iter().zip(values) {
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(*w, vector(x)));
        }
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    } else {
        for (w, x) in w.as_flattened().iter().zip(values) {
            sum = add_products::<VNNI, SIGNED, BYTES>(sum, *w, vector(x));
        }
    }
    let (scale, shift, of_x, scale_x) = match OF {
        2 => (
            spread::<OF>(scales, at),
            spread::<OF>(shifts, at),
            floats(&x.sums.as_chunks().0[at]),
            floats(&x.scales.as_chunks().0[at]),
        ),
        _ => (
            spread::<OF>(scales, at),
            spread::<OF>(shifts, at),
            first_floats(&x.sums.as_chunks().0[at]),
            _mm256_set1_ps(x.scales[at * LANES / BLOCKS]),
        ),
    };
    let sum = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sum));
    _mm256_fmadd_ps(_mm256_fmadd_ps(shift, of_x, sum), scale_x, sums)
}

/// The numbers of `OF` blocks of four in as many lanes each.
#[inline]
#[target_feature(enable = "avx2")]
fn spread<const OF: usize>(four: __m128, at: usize) -> __m256 {
    let four = _mm256_castps128_ps256(four);
    let at = (OF * at) as i32;
    let second = at + OF as i32 - 1;
    let places = _mm256_setr_epi32(at, at, at, at, second, second, second, second);
    _mm256_permutevar8x32_ps(four, places)
}

/// The scales and the minima of a group.
///
/// # Safety
/// There are units and multiples of this group.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn numbers(units: &[u16], multiples: &[u8], group: usize) -> [__m128; 2] {
    let units = units.as_ptr().wrapping_add(group / 2 * 2);
    let multiples = multiples.as_ptr().wrapping_add(group * 2 * BLOCKS);
    _mm_prefetch::<_MM_HINT_T0>(multiples.wrapping_add(AHEAD / BLOCK * 4).cast());
    // SAFETY: both are there.
    let (units, multiples) =
        unsafe { (units.cast::<i32>().read_unaligned(), _mm_loadl_epi64(multiples.cast())) };
    // The first unit four times, then the second.
    let places = _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3);
    let units = _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_cvtsi32_si128(units), places));
    let all = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(multiples)), units);
    [_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all)]
}

/// The four numbers of f16 at `at`, or as many as are left of a row and 0.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn halves(all: &[u16], at: usize, left: usize) -> __m128 {
    if left < BLOCKS {
        return last(Scales::F16(all), at, left);
    }
    // SAFETY: reads the four numbers.
    _mm_cvtph_ps(unsafe { _mm_loadl_epi64(all.as_ptr().wrapping_add(at).cast()) })
}

/// The four numbers at `at`, or as many as are left of a row and 0.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn four(all: Scales<'_>, at: usize, left: usize) -> __m128 {
    if left < BLOCKS {
        return last(all, at, left);
    }
    match all {
        Scales::F32(all) => {
            let all = &all[at..at + BLOCKS];
            // SAFETY: reads the four numbers.
            unsafe { _mm_loadu_ps(all.as_ptr()) }
        }
        Scales::F16(all) => {
            let all = &all[at..at + BLOCKS];
            // SAFETY: as above.
            _mm_cvtph_ps(unsafe { _mm_loadl_epi64(all.as_ptr().cast()) })
        }
        // Those have instructions of their own.
        Scales::Multiples(_) => _mm_setzero_ps(),
    }
}

/// The last numbers of a row, and 0. A function of its own, so that what calls it is inlined.
#[inline(never)]
#[target_feature(enable = "avx2,f16c")]
fn last(all: Scales<'_>, at: usize, left: usize) -> __m128 {
    let mut filled = [0f32; BLOCKS];
    all.cut(at, left).copy(&mut filled[..left]);
    // SAFETY: reads the four numbers.
    unsafe { _mm_loadu_ps(filled.as_ptr()) }
}

/// The sum of the lanes of a vector.
#[inline]
#[target_feature(enable = "avx2")]
fn total(sums: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
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
    match wide.shifts.is_empty() {
        true => multiply_blocks::<VNNI, BYTES, false>(wide, panel),
        false => multiply_blocks::<VNNI, BYTES, true>(wide, panel),
    }
}

/// The same, where blocks may have addends.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply_blocks<const VNNI: bool, const BYTES: usize, const SHIFTS: bool>(
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
            let starts = integers(&panel.starts[block].as_chunks().0[part]);
            // Those of 16 bits come to the sums afterwards.
            let first = if !VNNI && BYTES == 1 { _mm256_setzero_si256() } else { starts };
            let mut parts = [first; TILE];
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
            let of_x = floats(&panel.sums[block].as_chunks().0[part]);
            let factors = floats(&panel.scales[block].as_chunks().0[part]);
            for n in 0..TILE {
                let sum = match (VNNI, BYTES) {
                    (false, 1) => {
                        let sum = _mm256_madd_epi16(parts[n], _mm256_set1_epi16(1));
                        _mm256_add_epi32(sum, starts)
                    }
                    _ => parts[n],
                };
                let scale = _mm256_set1_ps(wide.scales[n * blocks + block]);
                let (sum, scale) = (_mm256_cvtepi32_ps(sum), _mm256_mul_ps(factors, scale));
                sums[n] = _mm256_fmadd_ps(sum, scale, sums[n]);
                if SHIFTS {
                    let shift = _mm256_set1_ps(wide.shifts[n * blocks + block]);
                    sums[n] = _mm256_fmadd_ps(of_x, shift, sums[n]);
                }
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

/// Same as [`first_integers`].
#[inline]
#[target_feature(enable = "avx2")]
fn first_floats(lanes: &[f32; HALF / 2]) -> __m256 {
    // SAFETY: as above.
    _mm256_zextps128_ps256(unsafe { _mm_loadu_ps(lanes.as_ptr()) })
}

#[inline]
#[target_feature(enable = "avx2")]
fn floats(lanes: &[f32; HALF]) -> __m256 {
    // SAFETY: as above.
    unsafe { _mm256_loadu_ps(lanes.as_ptr()) }
}
