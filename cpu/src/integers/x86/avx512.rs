//! Vectors of 512 bits, with the sums of two or four products in one instruction (AVX-512 VNNI).

use std::arch::x86_64::*;

use qhx_graph::super_blocks::SUPER;
use qhx_types::quantized::{BLOCK, NIBBLE_ZERO};

use super::{Group, LANES, PANEL, Panel, TILE, VECTOR, Wide};
use crate::integers::{GROUP, IntegerTask, Words, not_steep, rows};
use crate::kernels::{AHEAD, Multiples, Rows, Scales};

/// A group of weights as they are multiplied with one of `x`.
type Weights<const BYTES: usize> = [[__m512i; BYTES]; GROUP / VECTOR];

/// Rows of weights that are multiplied with a few rows of `x` at a time.
const BESIDE: usize = 4;
/// Blocks of which scales and offsets are fetched from memory in advance.
const AHEAD_BLOCKS: usize = 2 * AHEAD / BLOCK;
/// Blocks in a group.
const BLOCKS: usize = GROUP / BLOCK;

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn narrow(to: &mut [bool], x: &[f32], columns: usize) {
    not_steep(to, x, columns);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn fill(words: &mut Words, x: &[f32], columns: usize) -> bool {
    words.fill(x, columns)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn few<const BYTES: usize>(task: &mut IntegerTask<'_, '_>, groups: &[Group<BYTES>]) {
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
                    true => _mm512_setzero_ps(),
                    // SAFETY: as above.
                    false => spread(_mm_mul_ps(scale, unsafe { halves(halved, at, left) })),
                };
                [spread(scale), shift]
            }
        }};
    }
    let shifted = |scale, row, at| {
        let shift = match offsets {
            Some(all) => spread(_mm_mul_ps(scale, four(all, row * each + at, each - at))),
            None => _mm512_setzero_ps(),
        };
        [spread(scale), shift]
    };
    match (weights, offsets) {
        (Rows::I8(w, scales), _) => {
            let factors = |row, _| [_mm512_set1_ps(scales.get(row)), _mm512_setzero_ps()];
            few_rows::<BYTES, GROUP>(task, groups, bytemuck::cast_slice(w), factors, |w| blocks(w));
        }
        (Rows::I8Blocks(w, Scales::F16(scales)), None | Some(Scales::F16(_))) => {
            let factors = of_halves!(scales, w.len() / columns);
            few_rows::<BYTES, GROUP>(task, groups, bytemuck::cast_slice(w), factors, |w| blocks(w));
        }
        (Rows::I8Blocks(w, scales), _) => {
            let w = bytemuck::cast_slice(w);
            let factors = |row, at| shifted(four(scales, row * each + at, each - at), row, at);
            few_rows::<BYTES, GROUP>(task, groups, w, factors, |w| blocks(w));
        }
        (Rows::I4(w, Scales::Multiples(all)), _) => {
            let w = bytemuck::cast_slice(w);
            let (Multiples { units, multiples, .. }, count) = (all, w.len() / (GROUP / 2));
            assert!(each.is_multiple_of(SUPER) && units.len() >= count, "whole super-blocks");
            assert!(multiples.len() >= 2 * BLOCKS * count, "whole super-blocks");
            let eight = _mm512_set1_ps(f32::from(NIBBLE_ZERO));
            let factors = |row, at| {
                let at = (row * each + at) / BLOCKS;
                // SAFETY: there are as many of each as groups of weights, and an even number.
                let [scales, minima] = unsafe { numbers(units, multiples, at) };
                [scales, _mm512_fmadd_ps(eight, scales, minima)]
            };
            few_rows::<BYTES, { GROUP / 2 }>(task, groups, w, factors, |w| nibbles(w));
        }
        (Rows::I4(w, Scales::F16(scales)), None | Some(Scales::F16(_))) => {
            let w: &[u8] = bytemuck::cast_slice(w);
            let factors = of_halves!(scales, 2 * w.len() / columns);
            few_rows::<BYTES, { GROUP / 2 }>(task, groups, w, factors, |w| nibbles(w));
        }
        (Rows::I4(w, scales), _) => {
            let w = bytemuck::cast_slice(w);
            let factors = |row, at| shifted(four(scales, row * each + at, each - at), row, at);
            few_rows::<BYTES, { GROUP / 2 }>(task, groups, w, factors, |w| nibbles(w));
        }
        (Rows::F32(_) | Rows::F16(_), _) => {}
    }
}

/// Some rows of weights at a time, with up to four rows of `x`. `w` has all of them, `factors` the scale and the number
/// added to each real for the lanes of a group, of which it gets the row and the first block, and `group` makes
/// vectors of the `STEP` bytes of a group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn few_rows<const BYTES: usize, const STEP: usize>(
    task: &mut IntegerTask<'_, '_>,
    groups: &[Group<BYTES>],
    w: &[u8],
    factors: impl Fn(usize, usize) -> [__m512; 2] + Copy,
    group: impl Fn(&[u8; STEP]) -> Weights<BYTES> + Copy,
) {
    let count = task.out.first().map_or(0, |out| out.len());
    let (each, row) = (task.columns.div_ceil(GROUP), task.columns * STEP / GROUP);
    let w = &w[..count * row];
    for first in (0..count).step_by(BESIDE) {
        // The rows are in the nearest cache when the next four come.
        for (out, x) in task.out.chunks_mut(4).zip(groups.chunks(4 * each)) {
            up_to_four!(out, few_dots(first, w, row, x, out, factors, group));
        }
    }
}

/// [`Group`]s of `x` in the order of the weights.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn groups<const BYTES: usize>(
    words: &Words,
    weights: Rows<'_>,
    zero: i32,
) -> Vec<Group<BYTES>> {
    Group::all::<VECTOR>(words, weights, zero)
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
        |wide, row, weights, offsets| wide.fill::<BYTES>(row, weights, offsets),
        |wide, panel| multiply(wide, panel),
    );
}

/// Elements from `first` on of each `out` become the products of its row of `x` with rows of weights, of which each has
/// `row` bytes. The last one comes again in the place of those that are not there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn few_dots<const BYTES: usize, const M: usize, const STEP: usize>(
    first: usize,
    w: &[u8],
    row: usize,
    x: &[Group<BYTES>],
    out: [&mut &mut [f32]; M],
    factors: impl Fn(usize, usize) -> [__m512; 2],
    group: impl Fn(&[u8; STEP]) -> Weights<BYTES>,
) {
    let x: [&[Group<BYTES>]; M] = rows(x);
    let (whole, count, last) = (row / STEP, row.div_ceil(STEP), w.len() / row - 1);
    assert!(x[0].len() >= count && first <= last, "as many groups of x as of weights");
    let mut sums = [[_mm512_setzero_ps(); BESIDE]; M];
    for (n, at) in (first..first + BESIDE).enumerate() {
        let at = at.min(last);
        let mut row_sums = [_mm512_setzero_ps(); M];
        let mut rest = [0; STEP];
        if whole < count {
            rest = filled(&w[at * row..][whole * STEP..row]);
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
            let (w, factors) = (group(w), factors(at, index * BLOCKS));
            for m in 0..M {
                // SAFETY: each row of `x` has as many groups.
                let x = unsafe { x[m].get_unchecked(index) };
                row_sums[m] = add_group(row_sums[m], w, factors, x);
            }
        }
        for m in 0..M {
            sums[m][n] = row_sums[m];
        }
    }
    for (out, sums) in out.into_iter().zip(sums) {
        out[first..].iter_mut().zip(totals(sums)).for_each(|(y, sum)| *y = sum);
    }
}

/// The last bytes of a row, and 0 up to whole groups.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn filled<const STEP: usize>(rest: &[u8]) -> [u8; STEP] {
    let mut filled = [0; STEP];
    for (to, from) in filled.as_chunks_mut::<VECTOR>().0.iter_mut().zip(rest.chunks(VECTOR)) {
        let mask = u64::MAX >> (VECTOR - from.len());
        // SAFETY: what the mask leaves out is not read, and the array has the bytes of a vector.
        unsafe {
            let from = _mm512_maskz_loadu_epi8(mask, from.as_ptr().cast());
            _mm512_storeu_si512(to.as_mut_ptr().cast(), from);
        }
    }
    filled
}

/// Adds the products of a group to the sums of a row.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn add_group<const BYTES: usize>(
    sums: __m512,
    w: Weights<BYTES>,
    [scale, shift]: [__m512; 2],
    x: &Group<BYTES>,
) -> __m512 {
    let mut sum = integers(&x.starts);
    for (w, x) in w.as_flattened().iter().zip(x.values.as_flattened()) {
        sum = add_products::<BYTES>(sum, *w, load(x));
    }
    let sum = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(sum));
    let sum = _mm512_fmadd_ps(shift, floats(&x.sums), sum);
    _mm512_fmadd_ps(sum, floats(&x.scales), sums)
}

/// The sum of the lanes of each vector.
#[inline]
#[target_feature(enable = "avx512f")]
fn totals(sums: [__m512; BESIDE]) -> [f32; BESIDE] {
    let mut halves = [_mm256_setzero_ps(); BESIDE];
    for (half, sum) in halves.iter_mut().zip(sums) {
        let upper = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(sum));
        *half = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm256_castpd_ps(upper));
    }
    let [a, b, c, d] = halves;
    let pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    let all = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
    let mut totals = [0f32; BESIDE];
    // SAFETY: the array has the bytes of a vector.
    unsafe { _mm_storeu_ps(totals.as_mut_ptr(), all) };
    totals
}

/// Adds the products of two words or of four bytes to each sum. The bytes of `w` are unsigned.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn add_products<const BYTES: usize>(sums: __m512i, w: __m512i, x: __m512i) -> __m512i {
    if BYTES == 1 { _mm512_dpbusd_epi32(sums, w, x) } else { _mm512_dpwssd_epi32(sums, w, x) }
}

/// The scales and the minima of a group, each in four lanes.
///
/// # Safety
/// There are units and multiples of this group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn numbers(units: &[u16], multiples: &[u8], group: usize) -> [__m512; 2] {
    let units = units.as_ptr().wrapping_add(group / 2 * 2);
    let multiples = multiples.as_ptr().wrapping_add(group * 2 * BLOCKS);
    prefetch(units.wrapping_add(2 * AHEAD_BLOCKS / SUPER));
    prefetch(multiples.wrapping_add(2 * AHEAD_BLOCKS));
    // SAFETY: both are there.
    let (units, multiples) =
        unsafe { (units.cast::<i32>().read_unaligned(), _mm_loadl_epi64(multiples.cast())) };
    // The first unit four times, then the second.
    let places = _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3);
    let units = _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_cvtsi32_si128(units), places));
    let all = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(multiples)), units);
    let all = _mm512_castps256_ps512(all);
    let second = _mm512_setr_epi32(4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
    [spread(_mm512_castps512_ps128(all)), _mm512_permutexvar_ps(second, all)]
}

/// The four numbers of f16 at `at`, or as many as are left of a row and 0.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn halves(all: &[u16], at: usize, left: usize) -> __m128 {
    if left < BLOCKS {
        return last(Scales::F16(all), at, left);
    }
    let place = all.as_ptr().wrapping_add(at);
    prefetch(place.wrapping_add(AHEAD_BLOCKS));
    // SAFETY: reads the four numbers.
    _mm_cvtph_ps(unsafe { _mm_loadl_epi64(place.cast()) })
}

/// The four numbers at `at`, or as many as are left of a row and 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn four(all: Scales<'_>, at: usize, left: usize) -> __m128 {
    if left < BLOCKS {
        return last(all, at, left);
    }
    match all {
        Scales::F32(all) => {
            let all = &all[at..at + BLOCKS];
            prefetch(all.as_ptr().wrapping_add(AHEAD_BLOCKS));
            // SAFETY: reads the four numbers.
            unsafe { _mm_loadu_ps(all.as_ptr()) }
        }
        Scales::F16(all) => {
            let all = &all[at..at + BLOCKS];
            prefetch(all.as_ptr().wrapping_add(AHEAD_BLOCKS));
            // SAFETY: as above.
            _mm_cvtph_ps(unsafe { _mm_loadl_epi64(all.as_ptr().cast()) })
        }
        // Those have instructions of their own.
        Scales::Multiples(_) => _mm_setzero_ps(),
    }
}

/// The last numbers of a row, and 0. A function of its own, so that what calls it is inlined.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn last(all: Scales<'_>, at: usize, left: usize) -> __m128 {
    let mask = (1 << left) - 1;
    match all.cut(at, left) {
        // SAFETY: what the mask leaves out is not read.
        Scales::F32(all) => unsafe { _mm_maskz_loadu_ps(mask, all.as_ptr()) },
        Scales::F16(all) => {
            // SAFETY: as above.
            _mm_cvtph_ps(unsafe { _mm_maskz_loadu_epi16(mask, all.as_ptr().cast()) })
        }
        Scales::Multiples(_) => _mm_setzero_ps(),
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch<T>(place: *const T) {
    _mm_prefetch::<_MM_HINT_T0>(place.cast());
}

/// Each of four scales in four lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn spread(four: __m128) -> __m512 {
    let spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(four))
}

/// Weights of four bits as they come out of words or bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn nibbles<const BYTES: usize>(w: &[u8; GROUP / 2]) -> Weights<BYTES> {
    let w = load(w);
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
fn blocks<const BYTES: usize>(w: &[u8; GROUP]) -> Weights<BYTES> {
    let w = w.as_chunks().0;
    let [a, b] = [load(&w[0]), load(&w[1])];
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
    match wide.shifts.is_empty() {
        true => multiply_blocks::<BYTES, false>(wide, panel),
        false => multiply_blocks::<BYTES, true>(wide, panel),
    }
}

/// The same, where blocks may have addends.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn multiply_blocks<const BYTES: usize, const SHIFTS: bool>(
    wide: &Wide,
    panel: &Panel<BYTES>,
) -> [[f32; PANEL]; TILE] {
    let blocks = wide.scales.len() / TILE;
    let rows = wide.rows(panel.values.len());
    let mut sums = [[_mm512_setzero_ps(); 2]; TILE];
    for (block, x) in panel.values.chunks_exact(panel.block).enumerate() {
        let starts = panel.starts[block].as_chunks().0;
        let mut parts = [[integers(&starts[0]), integers(&starts[1])]; TILE];
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
        let of_x = panel.sums[block].as_chunks().0;
        let of_x = [floats(&of_x[0]), floats(&of_x[1])];
        for n in 0..TILE {
            let scale = _mm512_set1_ps(wide.scales[n * blocks + block]);
            for half in 0..2 {
                let (part, scale) =
                    (_mm512_cvtepi32_ps(parts[n][half]), _mm512_mul_ps(factors[half], scale));
                sums[n][half] = _mm512_fmadd_ps(part, scale, sums[n][half]);
            }
            if SHIFTS {
                let shift = _mm512_set1_ps(wide.shifts[n * blocks + block]);
                for half in 0..2 {
                    sums[n][half] = _mm512_fmadd_ps(of_x[half], shift, sums[n][half]);
                }
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
