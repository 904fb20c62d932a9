//! Matmuls with int8 and four bits in integers.
//!
//! `x` becomes int16 with a scale for each few columns. A column's error is at most 1.5e-5 of the largest one that it
//! shares its scale with, where the f16 of an NPU errs by up to 4.9e-4 of each. Two products of 16 bits are summed in
//! 32 bits by one instruction (VNNI), twice as many at once as of f32, and weights are not dequantized. Where the
//! processor has no such instruction, or `x` is not finite, [`crate::kernels`] multiplies instead.

#![expect(unsafe_code, reason = "instructions that rten_simd does not have")]

use qhx_core::quantized::{BLOCK, NIBBLE_ZERO};

use crate::kernels::Rows;
use crate::team::Team;

/// Columns in a [`Group`].
const GROUP: usize = 128;
/// Products of 16 bits in a vector.
const WORDS: usize = 32;
/// Lanes of 32 bits in a vector.
const LANES: usize = 16;
/// Rows of `x` up to which weights are multiplied as they come from memory.
const FEW: usize = 8;
/// Rows of `x` in a panel, two vectors of 32 bits.
const PANEL: usize = 2 * LANES;
/// Rows of weights that are multiplied with a panel at a time.
const TILE: usize = 6;

/// Rows of `x` as integers.
pub(crate) enum Integers {
    /// In the order in which weights come, a row after the other.
    Groups(Vec<Group>),
    /// Some rows beside each other, then the next ones.
    Panels(Vec<Panel>),
}

/// Some columns of a row, filled up with 0.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Group {
    /// With int8 one after the other; with four bits every fourth column, as they come out of 16 bits.
    values: [[i16; WORDS]; GROUP / WORDS],
    /// What the sums begin with: four bits are around 8.
    offsets: [i32; LANES],
    /// The scale of what each lane sums.
    scales: [f32; LANES],
}

/// Rows of `x` beside each other, filled up with rows of 0.
pub(crate) struct Panel {
    /// Two columns of each row, then the next two.
    values: Vec<[[i16; 2]; PANEL]>,
    /// For each block of columns the scale of each row.
    scales: Vec<[f32; PANEL]>,
    /// Columns that share a scale.
    block: usize,
}

/// Rows of int16.
struct Words {
    values: Vec<i16>,
    scales: Vec<f32>,
    /// Columns, up to whole blocks.
    stride: usize,
    /// Columns that share a scale.
    block: usize,
}

/// Columns that share a scale in matmuls with such weights, or none where they are not multiplied in integers.
fn block(weights: Rows<'_>) -> Option<usize> {
    match weights {
        Rows::F32(_) | Rows::F16(_) => None,
        Rows::I8(..) => Some(GROUP),
        Rows::I8Blocks(..) | Rows::I4(..) => Some(BLOCK),
    }
}

/// Rows of `columns` elements for matmuls with such weights, or none where the processor, the weights or a number that
/// is not finite is in the way.
pub(crate) fn integers(
    weights: Rows<'_>,
    columns: usize,
    x: &[f32],
    team: &Team,
) -> Option<Integers> {
    let block = block(weights).filter(|_| available())?;
    let words = |x: &[f32]| Words::new(x, columns, block);
    if x.len() / columns <= FEW {
        return Some(Integers::Groups(words(x)?.groups(matches!(weights, Rows::I4(..)))));
    }
    let mut panels = Vec::new();
    panels.resize_with((x.len() / columns).div_ceil(PANEL), || None);
    let rows: Vec<_> = panels.iter_mut().zip(x.chunks(PANEL * columns)).collect();
    team.each(rows, |(panel, x)| *panel = words(x).map(|words| words.panel()));
    panels.into_iter().collect::<Option<_>>().map(Integers::Panels)
}

#[cfg(target_arch = "x86_64")]
fn available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

#[cfg(not(target_arch = "x86_64"))]
fn available() -> bool {
    false
}

impl Words {
    fn new(x: &[f32], columns: usize, block: usize) -> Option<Self> {
        let (rows, stride) = (x.len() / columns, columns.next_multiple_of(block));
        let (values, scales) = (vec![0; rows * stride], vec![0.0; rows * stride / block]);
        let mut words = Self { values, scales, stride, block };
        // SAFETY: `available` found what the function is compiled for.
        unsafe { words.fill(x, columns) }.then_some(words)
    }

    fn panel(&self) -> Panel {
        let mut values = vec![[[0; 2]; PANEL]; self.stride / 2];
        for (row, x) in self.values.chunks_exact(self.stride).enumerate() {
            values.iter_mut().zip(x.as_chunks().0).for_each(|(to, pair)| to[row] = *pair);
        }
        let blocks = self.stride / self.block;
        let mut scales = vec![[0.0; PANEL]; blocks];
        for (row, from) in self.scales.chunks_exact(blocks).enumerate() {
            scales.iter_mut().zip(from).for_each(|(to, scale)| to[row] = *scale);
        }
        Panel { values, scales, block: self.block }
    }

    /// Whether all elements are finite, and none so small that its scale is not.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx512f,avx512bw,avx512vl"))]
    fn fill(&mut self, x: &[f32], columns: usize) -> bool {
        let Self { values, scales, stride, block } = self;
        let rows = values.chunks_exact_mut(*stride).zip(scales.chunks_exact_mut(*stride / *block));
        for ((values, scales), x) in rows.zip(x.chunks_exact(columns)) {
            let blocks = values.chunks_exact_mut(*block).zip(x.chunks(*block)).zip(scales);
            for ((values, x), scale) in blocks {
                // The bits of numbers without signs are in their order, and NaN comes last.
                let largest = x.iter().fold(0, |most, x| (x.to_bits() & 0x7fff_ffff).max(most));
                let largest = f32::from_bits(largest);
                if largest == 0.0 {
                    continue;
                }
                if !(1e-30..=1e30).contains(&largest) {
                    return false;
                }
                *scale = largest / 32767.0;
                let inverse = 32767.0 / largest;
                for (value, x) in values.iter_mut().zip(x) {
                    // So large a number has no bits below 1: the sum is rounded, and its lowest bits are the integer.
                    const LARGE: f32 = 12_582_912.0;
                    *value = (x * inverse + LARGE).to_bits().wrapping_sub(LARGE.to_bits()) as i16;
                }
            }
        }
        true
    }

    fn groups(&self, four: bool) -> Vec<Group> {
        let count = self.stride.div_ceil(GROUP);
        let rows = self.values.chunks_exact(self.stride);
        let scales = self.scales.chunks_exact(self.stride / self.block);
        let mut groups = Vec::with_capacity(count * rows.len());
        for (row, scales) in rows.zip(scales) {
            let scales = scales.chunks(GROUP / self.block);
            for (x, scales) in row.chunks(GROUP).zip(scales) {
                let mut group = Group {
                    values: [[0; WORDS]; GROUP / WORDS],
                    offsets: [0; LANES],
                    scales: [0.0; LANES],
                };
                let share = LANES * self.block / GROUP;
                for (lanes, scale) in group.scales.chunks_exact_mut(share).zip(scales) {
                    lanes.fill(*scale);
                }
                if four {
                    for (word, x) in x.chunks_exact(4).enumerate() {
                        for (place, x) in x.iter().enumerate() {
                            group.values[place][word] = *x;
                            group.offsets[word / 2] -= i32::from(NIBBLE_ZERO) * i32::from(*x);
                        }
                    }
                } else {
                    group.values.as_flattened_mut()[..x.len()].copy_from_slice(x);
                }
                groups.push(group);
            }
        }
        groups
    }
}

/// What one thread computes at a time: see [`crate::kernels::Task`].
pub(crate) struct IntegerTask<'a, 'o> {
    pub(crate) weights: Rows<'a>,
    pub(crate) columns: usize,
    pub(crate) x: &'a Integers,
    pub(crate) out: Vec<&'o mut [f32]>,
    pub(crate) bias: Option<&'a [f32]>,
}

impl IntegerTask<'_, '_> {
    pub(crate) fn run(mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `integers` made `x`, after it found what the functions are compiled for.
        unsafe {
            match self.x {
                Integers::Groups(groups) => avx512::few(&mut self, groups),
                Integers::Panels(panels) => avx512::several(&mut self, panels),
            }
        }
        if let Some(bias) = self.bias {
            for out in &mut self.out {
                out.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use qhx_core::quantized::{BLOCK, from_nibble};

    use super::{GROUP, Group, IntegerTask, LANES, PANEL, Panel, TILE, WORDS};
    use crate::kernels::{AHEAD, Row};

    /// A few rows of `x`, with the weights as they are stored.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    pub(super) fn few(task: &mut IntegerTask<'_, '_>, groups: &[Group]) {
        let IntegerTask { weights, columns, ref mut out, .. } = *task;
        let count = out.first().map_or(0, |out| out.len());
        let each = columns.div_ceil(GROUP);
        for n in 0..count {
            let row = weights.row(n, columns);
            // The row is in the nearest cache when the next four come.
            for (out, x) in out.chunks_mut(4).zip(groups.chunks(4 * each)) {
                match out {
                    [a] => dots(row, x, n, [a]),
                    [a, b] => dots(row, x, n, [a, b]),
                    [a, b, c] => dots(row, x, n, [a, b, c]),
                    [a, b, c, d] => dots(row, x, n, [a, b, c, d]),
                    _ => {}
                }
            }
        }
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
            Row::I8Blocks(w, scales) => (dots_i8_blocks(rows, w, scales), 1.0),
            Row::I4(w, scales) => (dots_i4(rows, bytemuck::cast_slice(w), scales), 1.0),
            Row::F32(_) | Row::F16(_) => return,
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

    /// As [`dots_i8`], with a scale for each block.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    fn dots_i8_blocks<const M: usize>(x: [&[Group]; M], w: &[i8], scales: &[f32]) -> [f32; M] {
        let w: &[u8] = bytemuck::cast_slice(w);
        let mut sums = [_mm512_setzero_ps(); M];
        let groups = (0..w.len()).step_by(GROUP).zip(scales.chunks(GROUP / BLOCK));
        for (index, (at, scales)) in groups.enumerate() {
            _mm_prefetch::<_MM_HINT_T0>(w.as_ptr().wrapping_add(at + AHEAD).cast());
            _mm_prefetch::<_MM_HINT_T0>(w.as_ptr().wrapping_add(at + AHEAD + 64).cast());
            let wide = wide(w, at);
            for m in 0..M {
                let Group { values, scales: factors, .. } = &x[m][index];
                let factors = factors.iter().step_by(LANES * BLOCK / GROUP);
                for (((w, x), scale), factor) in wide.iter().zip(values).zip(scales).zip(factors) {
                    let part = _mm512_dpwssd_epi32(_mm512_setzero_si512(), *w, words(x));
                    let scale = _mm512_set1_ps(scale * factor);
                    sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part), scale, sums[m]);
                }
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

    /// Several rows of `x`, with weights that are extended to int16 first.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    pub(super) fn several(task: &mut IntegerTask<'_, '_>, panels: &[Panel]) {
        let Some(Panel { values, scales, block }) = panels.first() else { return };
        let count = task.out.first().map_or(0, |out| out.len());
        let mut wide = Wide {
            // Powers of two would share the same sets of a cache.
            values: vec![[[0; 2]; WORDS / 2]; TILE * (values.len().div_ceil(WORDS / 2) + 1)],
            scales: vec![0.0; TILE * scales.len()],
            block: *block,
        };
        for first in (0..count).step_by(TILE) {
            let rows = TILE.min(count - first);
            for row in 0..rows {
                wide.fill(row, task.weights.row(first + row, task.columns));
            }
            for (panel, outs) in panels.iter().zip(task.out.chunks_mut(PANEL)) {
                let sums = wide.multiply(panel);
                for (m, out) in outs.iter_mut().enumerate() {
                    let to = out[first..first + rows].iter_mut();
                    to.zip(&sums).for_each(|(y, sums)| *y = sums[m]);
                }
            }
        }
    }

    /// Some rows of weights as int16.
    struct Wide {
        /// Pairs of columns.
        values: Vec<[[i16; 2]; WORDS / 2]>,
        /// For each row those of all blocks.
        scales: Vec<f32>,
        /// Columns that share a scale.
        block: usize,
    }

    impl Wide {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        fn fill(&mut self, row: usize, weights: Row<'_>) {
            let (stride, blocks) = (self.values.len() / TILE, self.scales.len() / TILE);
            let values = self.values[row * stride..][..stride].as_flattened_mut();
            let scales = &mut self.scales[row * blocks..][..blocks];
            match weights {
                Row::I8(w, _) | Row::I8Blocks(w, _) => {
                    let values = values.as_flattened_mut();
                    values.iter_mut().zip(w).for_each(|(to, w)| *to = i16::from(*w));
                    match weights {
                        Row::I8Blocks(_, from) => scales.copy_from_slice(from),
                        Row::I8(_, scale) => scales.fill(scale),
                        _ => {}
                    }
                }
                Row::I4(w, from) => {
                    let w: &[u8] = bytemuck::cast_slice(w);
                    for (to, w) in values.iter_mut().zip(w) {
                        *to = [i16::from(from_nibble(*w)), i16::from(from_nibble(w >> 4))];
                    }
                    scales.copy_from_slice(from);
                }
                Row::F32(_) | Row::F16(_) => {}
            }
        }

        /// The products of each row of weights with all rows of the panel.
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
        fn multiply(&self, panel: &Panel) -> [[f32; PANEL]; TILE] {
            let (stride, blocks) = (self.values.len() / TILE, self.scales.len() / TILE);
            let pairs = self.block / 2;
            let mut rows: [&[[i16; 2]]; TILE] = [&[]; TILE];
            for (n, row) in rows.iter_mut().enumerate() {
                *row = &self.values[n * stride..][..stride].as_flattened()[..panel.values.len()];
            }
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
                    let scale = _mm512_set1_ps(self.scales[n * blocks + block]);
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::tests::{Stored, numbers};

    fn made(weights: Rows<'_>, columns: usize, x: &[f32]) -> Option<Integers> {
        integers(weights, columns, x, &Team::Alone)
    }

    #[test]
    fn matmuls_are_as_exact_as_16_bits_make_them() {
        for columns in [1, 7, 32, 96, 128, 160, 416, 1056] {
            for rows in [1, 3, 6, 13] {
                for stored in Stored::all(rows, columns) {
                    for count in [1, 2, 3, 4, 5, 8, 9, 32, 37] {
                        check(&stored, rows, columns, &numbers(count * columns, 5));
                    }
                }
            }
        }
    }

    fn check(stored: &Stored, rows: usize, columns: usize, x: &[f32]) {
        let (weights, bias) = (stored.rows(), numbers(rows, 19));
        let Some(arranged) = made(weights, columns, x) else {
            assert!(!available() || block(weights).is_none());
            return;
        };
        let mut out = vec![f32::NAN; x.len() / columns * rows];
        let out_rows = out.chunks_exact_mut(rows).collect();
        IntegerTask { weights, columns, x: &arranged, out: out_rows, bias: Some(&bias) }.run();
        for (at, y) in out.iter().enumerate() {
            let (m, n) = (at / rows, at % rows);
            let (mut expected, mut size) = (f64::from(bias[n]), 1e-3);
            for k in 0..columns {
                let w = stored.value(columns, n * columns + k);
                expected += f64::from(x[m * columns + k]) * w;
                size += w.abs();
            }
            // Elements are up to 1, and half a step of 1 / 32767 off.
            let off = (f64::from(*y) - expected).abs();
            assert!(off <= 1.6e-5 * size, "{columns} × {rows}, {at}: {y}, not {expected}");
        }
    }

    #[test]
    fn numbers_that_have_no_scale_are_left_to_floats() {
        for stored in Stored::all(3, 64) {
            for (value, fits) in
                [(f32::NAN, false), (f32::INFINITY, false), (1e-38, false), (0.0, true)]
            {
                for count in [2, 11] {
                    let mut x = vec![0.0; count * 64];
                    x[70] = value;
                    let narrow = available() && block(stored.rows()).is_some();
                    let found = made(stored.rows(), 64, &x).is_some();
                    assert_eq!(found, fits && narrow, "{value}");
                }
            }
        }
    }
}
