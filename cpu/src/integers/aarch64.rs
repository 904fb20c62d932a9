//! Integers of 16 bits as two of 8, whose products are summed by four (`sdot`).
//!
//! `x = 256 · high + low`, both of 8 bits: two instructions for sixteen weights as they are stored, and no rounding
//! beside that of `x`.

#![expect(unsafe_code, reason = "instructions that rten_simd does not have")]

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

use qhx_core::quantized::{BLOCK, NIBBLE_ZERO, from_nibble};

use super::{GROUP, IntegerTask, Words};
use crate::kernels::Row;

/// How far from 0 integers are at most: 256 · 127 + 127, as -128 has no opposite.
pub(super) const LIMIT: f32 = 32639.0;
/// Bytes in a vector.
const BYTES: usize = 16;
/// Sums of 32 bits in a vector.
const LANES: usize = 4;
/// Rows of `x` in a panel.
pub(super) const PANEL: usize = 2 * LANES;
/// Rows of weights that are multiplied with a panel at a time.
const TILE: usize = 4;

/// Instructions that the processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    Dots,
}

/// Some columns of a row, filled up with 0.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Group {
    /// The upper bits. With int8 one after the other; with four bits the even columns of a block, then the odd ones.
    high: [[i8; BYTES]; GROUP / BYTES],
    /// The lower bits.
    low: [[i8; BYTES]; GROUP / BYTES],
    /// What the sum of each block begins with: four bits are around 8.
    offsets: [i32; GROUP / BLOCK],
    /// The scale of each block.
    scales: [f32; GROUP / BLOCK],
}

/// Rows of `x` beside each other, filled up with rows of 0.
pub(super) struct Panel {
    /// Four columns of each row, then the next four.
    values: Vec<Quads>,
    /// For each block of columns the scale of each row.
    scales: Vec<[f32; PANEL]>,
    /// Columns that share a scale.
    block: usize,
}

/// Four columns of each row.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
struct Quads {
    high: [[i8; BYTES]; PANEL / LANES],
    low: [[i8; BYTES]; PANEL / LANES],
}

/// The upper and the lower bits of an integer.
fn halves(x: i16) -> (i8, i8) {
    let low = x as i8;
    (((i32::from(x) - i32::from(low)) >> 8) as i8, low)
}

impl Level {
    /// All that the processor has, the fastest first.
    pub(super) fn found() -> impl Iterator<Item = Self> {
        is_aarch64_feature_detected!("dotprod").then_some(Self::Dots).into_iter()
    }

    /// [`Words::fill`] with these instructions.
    pub(super) fn fill(self, words: &mut Words, x: &[f32], columns: usize) -> bool {
        words.fill(x, columns)
    }

    /// A few rows of `x`, with the weights as they are stored.
    pub(super) fn few(self, task: &mut IntegerTask<'_, '_>, groups: &[Group]) {
        // SAFETY: a level is made of what the processor has.
        unsafe { few(task, groups) };
    }

    /// Several rows of `x`, with weights of four bits that become int8 first.
    pub(super) fn several(self, task: &mut IntegerTask<'_, '_>, panels: &[Panel]) {
        let Some(panel) = panels.first() else { return };
        let stride = panel.values.len() * 4 / BYTES;
        let mut wide = Wide {
            values: vec![[0; BYTES]; TILE * stride],
            scales: vec![0.0; TILE * panel.scales.len()],
            block: panel.block,
        };
        // SAFETY: as above.
        unsafe { several(task, panels, &mut wide) };
    }

    pub(super) fn groups(self, words: &Words, four: bool) -> Vec<Group> {
        let mut groups = Vec::with_capacity(words.stride.div_ceil(GROUP) * words.rows().len());
        for (row, scales) in words.rows() {
            let scales = scales.chunks(GROUP / words.block);
            for (x, scales) in row.chunks(GROUP).zip(scales) {
                let mut group = Group {
                    high: [[0; BYTES]; GROUP / BYTES],
                    low: [[0; BYTES]; GROUP / BYTES],
                    offsets: [0; GROUP / BLOCK],
                    scales: [0.0; GROUP / BLOCK],
                };
                let share = words.block / BLOCK;
                for (blocks, scale) in group.scales.chunks_exact_mut(share).zip(scales) {
                    blocks.fill(*scale);
                }
                let (high, low) = (group.high.as_flattened_mut(), group.low.as_flattened_mut());
                for (column, x) in x.iter().enumerate() {
                    let mut place = column;
                    if four {
                        let (block, within) = (column / BLOCK, column % BLOCK);
                        place = block * BLOCK + within % 2 * BYTES + within / 2;
                        group.offsets[block] -= i32::from(NIBBLE_ZERO) * i32::from(*x);
                    }
                    (high[place], low[place]) = halves(*x);
                }
                groups.push(group);
            }
        }
        groups
    }

    pub(super) fn panel(self, words: &Words) -> Panel {
        let mut values = vec![Quads::default(); words.stride / 4];
        for (row, (x, _)) in words.rows().enumerate() {
            for (quads, x) in values.iter_mut().zip(x.as_chunks::<4>().0) {
                for (column, x) in x.iter().enumerate() {
                    let place = row % LANES * 4 + column;
                    let (high, low) = halves(*x);
                    quads.high[row / LANES][place] = high;
                    quads.low[row / LANES][place] = low;
                }
            }
        }
        Panel { values, scales: words.panel_scales(), block: words.block }
    }
}

#[target_feature(enable = "neon,dotprod")]
fn few(task: &mut IntegerTask<'_, '_>, groups: &[Group]) {
    task.each_row(groups, |row, x, n, out| match out {
        [a] => dots(row, x, n, [a]),
        [a, b] => dots(row, x, n, [a, b]),
        [a, b, c] => dots(row, x, n, [a, b, c]),
        [a, b, c, d] => dots(row, x, n, [a, b, c, d]),
        _ => {}
    });
}

#[target_feature(enable = "neon,dotprod")]
fn several(task: &mut IntegerTask<'_, '_>, panels: &[Panel], wide: &mut Wide) {
    task.each_tile(
        panels,
        wide,
        |wide, row, weights| wide.fill(row, weights),
        |wide, panel| multiply(wide, panel),
    );
}

#[inline]
#[target_feature(enable = "neon,dotprod")]
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

#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dots_i8<const M: usize>(x: [&[Group]; M], w: &[i8]) -> [f32; M] {
    let mut sums = [vdupq_n_f32(0.0); M];
    for (index, w) in w.chunks(GROUP).enumerate() {
        let mut high = [vdupq_n_s32(0); M];
        let mut low = [vdupq_n_s32(0); M];
        for (at, w) in w.chunks(BYTES).enumerate() {
            let w = bytes(w);
            for m in 0..M {
                high[m] = sdot(high[m], w, load(&x[m][index].high[at]));
                low[m] = sdot(low[m], w, load(&x[m][index].low[at]));
            }
        }
        for m in 0..M {
            let sum = vcvtq_f32_s32(joined(high[m], low[m]));
            sums[m] = vfmaq_n_f32(sums[m], sum, x[m][index].scales[0]);
        }
    }
    totals(sums)
}

/// As [`dots_i8`], with a scale for each block.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dots_i8_blocks<const M: usize>(x: [&[Group]; M], w: &[i8], scales: &[f32]) -> [f32; M] {
    let mut sums = [vdupq_n_f32(0.0); M];
    let groups = w.chunks(GROUP).zip(scales.chunks(GROUP / BLOCK));
    for (index, (w, scales)) in groups.enumerate() {
        let pairs = w.as_chunks::<BLOCK>().0.iter();
        let pair = |w: &[i8; BLOCK]| [bytes(&w[..BYTES]), bytes(&w[BYTES..])];
        add_blocks(&mut sums, pairs.map(pair), &x, index, scales);
    }
    totals(sums)
}

#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dots_i4<const M: usize>(x: [&[Group]; M], w: &[i8], scales: &[f32]) -> [f32; M] {
    let mut sums = [vdupq_n_f32(0.0); M];
    let groups = w.chunks(GROUP / 2).zip(scales.chunks(GROUP / BLOCK));
    for (index, (w, scales)) in groups.enumerate() {
        let both = |w: &[i8; BYTES]| {
            let both = vreinterpretq_u8_s8(load(w));
            let (even, odd) = (vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both));
            [vreinterpretq_s8_u8(even), vreinterpretq_s8_u8(odd)]
        };
        add_blocks(&mut sums, w.as_chunks().0.iter().map(both), &x, index, scales);
    }
    totals(sums)
}

/// Adds the products of a group's blocks, each of which has two vectors and a scale.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_blocks<const M: usize>(
    sums: &mut [float32x4_t; M],
    w: impl Iterator<Item = [int8x16_t; 2]>,
    x: &[&[Group]; M],
    index: usize,
    scales: &[f32],
) {
    const BLOCKS: usize = GROUP / BLOCK;
    let mut parts = [[vdupq_n_s32(0); BLOCKS]; M];
    for (block, w) in w.take(BLOCKS).enumerate() {
        for m in 0..M {
            let Group { high, low, .. } = &x[m][index];
            let mut upper = sdot(vdupq_n_s32(0), w[0], load(&high[2 * block]));
            let mut lower = sdot(vdupq_n_s32(0), w[0], load(&low[2 * block]));
            upper = sdot(upper, w[1], load(&high[2 * block + 1]));
            lower = sdot(lower, w[1], load(&low[2 * block + 1]));
            parts[m][block] = joined(upper, lower);
        }
    }
    let factors = match scales.first_chunk::<BLOCKS>() {
        Some(scales) => floats(scales),
        None => {
            let mut filled = [0.0; BLOCKS];
            filled[..scales.len()].copy_from_slice(scales);
            floats(&filled)
        }
    };
    for m in 0..M {
        let Group { offsets, scales, .. } = &x[m][index];
        // A lane is a block's sum.
        let [a, b, c, d] = parts[m];
        let all = vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
        let all = vcvtq_f32_s32(vaddq_s32(all, integers(offsets)));
        sums[m] = vfmaq_f32(sums[m], all, vmulq_f32(factors, floats(scales)));
    }
}

/// Some rows of weights as int8.
struct Wide {
    values: Vec<[i8; BYTES]>,
    /// For each row those of all blocks.
    scales: Vec<f32>,
    /// Columns that share a scale.
    block: usize,
}

impl Wide {
    #[inline(always)]
    fn fill(&mut self, row: usize, weights: Row<'_>) {
        let (stride, blocks) = (self.values.len() / TILE, self.scales.len() / TILE);
        let values = self.values[row * stride..][..stride].as_flattened_mut();
        let scales = &mut self.scales[row * blocks..][..blocks];
        match weights {
            Row::I8(w, scale) => {
                values[..w.len()].copy_from_slice(w);
                scales.fill(scale);
            }
            Row::I8Blocks(w, from) => {
                values[..w.len()].copy_from_slice(w);
                scales.copy_from_slice(from);
            }
            Row::I4(w, from) => {
                let w: &[u8] = bytemuck::cast_slice(w);
                for (to, w) in values.as_chunks_mut().0.iter_mut().zip(w) {
                    *to = [from_nibble(*w), from_nibble(w >> 4)];
                }
                scales.copy_from_slice(from);
            }
            Row::F32(_) | Row::F16(_) => {}
        }
    }
}

/// The products of each row of weights with all rows of the panel.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn multiply(wide: &Wide, panel: &Panel) -> [[f32; PANEL]; TILE] {
    const PARTS: usize = PANEL / LANES;
    let (stride, blocks) = (wide.values.len() / TILE, wide.scales.len() / TILE);
    let vectors = wide.block / BYTES;
    let mut sums = [[vdupq_n_f32(0.0); PARTS]; TILE];
    for (block, x) in panel.values.chunks_exact(wide.block / 4).enumerate() {
        let mut high = [[vdupq_n_s32(0); PARTS]; TILE];
        let mut low = [[vdupq_n_s32(0); PARTS]; TILE];
        for (at, x) in x.as_chunks::<4>().0.iter().enumerate() {
            let mut w = [vdupq_n_s8(0); TILE];
            for (n, w) in w.iter_mut().enumerate() {
                *w = load(&wide.values[n * stride + block * vectors + at]);
            }
            add_quads::<0>(&mut high, &mut low, &x[0], &w);
            add_quads::<1>(&mut high, &mut low, &x[1], &w);
            add_quads::<2>(&mut high, &mut low, &x[2], &w);
            add_quads::<3>(&mut high, &mut low, &x[3], &w);
        }
        let factors = panel.scales[block].as_chunks::<LANES>().0;
        for part in 0..PARTS {
            let factors = floats(&factors[part]);
            for n in 0..TILE {
                let sum = vcvtq_f32_s32(joined(high[n][part], low[n][part]));
                let scale = vmulq_n_f32(factors, wide.scales[n * blocks + block]);
                sums[n][part] = vfmaq_f32(sums[n][part], sum, scale);
            }
        }
    }
    let mut all = [[0f32; PANEL]; TILE];
    for (to, sums) in all.iter_mut().zip(sums) {
        for (to, sums) in to.as_chunks_mut().0.iter_mut().zip(sums) {
            *to = lanes(sums);
        }
    }
    all
}

/// Adds the products of four columns of all rows with the four of each row of weights.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_quads<const QUAD: i32>(
    high: &mut [[int32x4_t; PANEL / LANES]; TILE],
    low: &mut [[int32x4_t; PANEL / LANES]; TILE],
    x: &Quads,
    w: &[int8x16_t; TILE],
) {
    for part in 0..PANEL / LANES {
        let (upper, lower) = (load(&x.high[part]), load(&x.low[part]));
        for n in 0..TILE {
            high[n][part] = sdot_lane::<QUAD>(high[n][part], upper, w[n]);
            low[n][part] = sdot_lane::<QUAD>(low[n][part], lower, w[n]);
        }
    }
}

/// Adds the products of four bytes to each of four sums.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction, which the processor has, only computes with these registers.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// As [`sdot`], with the same four bytes of `b` for all sums.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot_lane<const QUAD: i32>(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: as above.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.4b[{quad}]",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            quad = const QUAD,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// What the sums of upper and lower bits are together.
#[inline]
#[target_feature(enable = "neon")]
fn joined(high: int32x4_t, low: int32x4_t) -> int32x4_t {
    vaddq_s32(vshlq_n_s32::<8>(high), low)
}

/// The first sixteen bytes, with 0 after the last.
#[inline]
#[target_feature(enable = "neon")]
fn bytes(w: &[i8]) -> int8x16_t {
    if let Some(w) = w.first_chunk() {
        return load(w);
    }
    let mut filled = [0; BYTES];
    filled[..w.len()].copy_from_slice(w);
    load(&filled)
}

#[inline]
#[target_feature(enable = "neon")]
fn load(bytes: &[i8; BYTES]) -> int8x16_t {
    // SAFETY: the array has the bytes of a vector.
    unsafe { vld1q_s8(bytes.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn integers(lanes: &[i32; LANES]) -> int32x4_t {
    // SAFETY: as above.
    unsafe { vld1q_s32(lanes.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn floats(lanes: &[f32; LANES]) -> float32x4_t {
    // SAFETY: as above.
    unsafe { vld1q_f32(lanes.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn lanes(vector: float32x4_t) -> [f32; LANES] {
    let mut lanes = [0f32; LANES];
    // SAFETY: as above.
    unsafe { vst1q_f32(lanes.as_mut_ptr(), vector) };
    lanes
}

/// The sum of the lanes of each.
#[inline]
#[target_feature(enable = "neon")]
fn totals<const M: usize>(sums: [float32x4_t; M]) -> [f32; M] {
    let mut all = [0f32; M];
    for (total, sums) in all.iter_mut().zip(sums) {
        *total = vaddvq_f32(sums);
    }
    all
}
