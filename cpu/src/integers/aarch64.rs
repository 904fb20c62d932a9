//! Integers of 8 bits, and of 16 bits as two of 8, whose products are summed by four (`sdot`) or by eight (`smmla`).
//!
//! Integers of 16 bits are `x = 256 · high + low`, both of 8 bits: two products for each weight as it is stored, and
//! no rounding beside that of `x`. Some rows of weights are multiplied at a time, so that `x` is loaded once for them.

#![expect(unsafe_code, reason = "instructions that rten_simd does not have")]

use qhx_graph::super_blocks::places;
use qhx_types::quantized::{BLOCK, NIBBLE_ZERO};

/// Functions that [`Level`] calls, compiled for some instructions. `dots`, of `ROWS` rows of weights, and `multiply` are
/// those of the module, and `$beside` rows of weights lie beside each other ([`Wide::fill`]).
macro_rules! entries {
    ($features:literal, $beside:literal) => {
        #[target_feature(enable = $features)]
        pub(super) fn few<const PARTS: usize>(
            task: &mut IntegerTask<'_, '_>,
            groups: &[Group<PARTS>],
        ) {
            let count = task.out.first().map_or(0, |out| out.len());
            let each = task.columns.div_ceil(GROUP);
            let mut beside = Beside::<ROWS>::new(task);
            for first in (0..count).step_by(ROWS) {
                beside.fill(task, first, count);
                // The rows are in the nearest cache when the next four come.
                for (out, x) in task.out.chunks_mut(4).zip(groups.chunks(4 * each)) {
                    up_to_four!(out, dots(&beside, x, first, out));
                }
            }
        }

        #[target_feature(enable = $features)]
        pub(super) fn several<const PARTS: usize>(
            task: &mut IntegerTask<'_, '_>,
            panels: &[Panel<PARTS>],
            wide: &mut Wide,
        ) {
            task.each_tile(
                panels,
                wide,
                |wide, row, weights, offsets| wide.fill::<$beside>(row, weights, offsets),
                |wide, panel| match wide.shifts.is_empty() {
                    true => multiply::<PARTS, false>(wide, panel),
                    false => multiply::<PARTS, true>(wide, panel),
                },
            );
        }
    };
}

mod dots;
mod matrices;

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

use super::{GROUP, IntegerTask, Words, in_reals, sum};
use crate::kernels::{Multiples, Row, Rows, Scales};

/// Largest absolute value of integers of 16 bits: 256 · 127 + 127, as -128 has no opposite.
pub(super) const LIMIT: f32 = 32639.0;
/// Bytes in a vector.
const BYTES: usize = 16;
/// Half of them.
const HALF: usize = BYTES / 2;
/// Sums of 32 bits in a vector.
const LANES: usize = 4;
/// Blocks in a [`Group`].
const BLOCKS: usize = GROUP / BLOCK;
/// Rows of `x` in a panel.
pub(super) const PANEL: usize = 2 * LANES;
/// Rows of weights that are multiplied with a panel at a time.
const TILE: usize = 4;
/// Vectors of a block of these.
const TILE_VECTORS: usize = TILE * BLOCK / BYTES;

/// Instructions that the processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// `smmla`: two rows of eight bytes times two others; `sdot` beside it.
    Matrices,
    /// `sdot`: four bytes times four others, four times.
    Dots,
}

/// Some columns of a row, filled up with 0. With int8 the columns follow each other; with four bits the even columns of
/// a block come first, then the odd ones.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Group<const PARTS: usize> {
    /// The upper bits of some columns, then the lower bits of the same ones: 16 of them for `sdot`, 8 for `smmla`.
    values: [[[i8; BYTES]; PARTS]; GROUP / BYTES],
    /// Corrections for 4-bit weights, whose zero is 8: sums of each block begin with its array, for `sdot` those of the
    /// lower bits.
    offsets: [[i32; LANES]; BLOCKS],
    /// The sum of each block.
    sums: [f32; BLOCKS],
    /// The scale of each block.
    scales: [f32; BLOCKS],
}

/// Rows of `x` beside each other, filled up with rows of 0.
pub(super) struct Panel<const PARTS: usize> {
    /// Eight columns of each row, then the next eight, for each block of columns.
    values: Vec<[Octets<PARTS>; BLOCK / HALF]>,
    /// For each block of columns the sum of each row, in reals.
    sums: Vec<[f32; PANEL]>,
    /// For each block of columns the scale of each row.
    scales: Vec<[f32; PANEL]>,
}

/// Eight columns of each row, the upper bits and then the lower ones: for `sdot` four columns of all rows and the next
/// four, for `smmla` row by row.
type Octets<const PARTS: usize> = [[[i8; BYTES]; PANEL / 2]; PARTS];

/// The upper and the lower bits of an integer, or its only ones.
fn parts<const PARTS: usize>(x: i16) -> [i8; PARTS] {
    let low = x as i8;
    let mut parts = [low; PARTS];
    if PARTS > 1 {
        parts[0] = ((i32::from(x) - i32::from(low)) >> 8) as i8;
    }
    parts
}

impl Level {
    /// All that the processor has, the fastest first.
    pub(super) fn found() -> impl Iterator<Item = Self> {
        let dots = is_aarch64_feature_detected!("dotprod");
        let matrices = dots && is_aarch64_feature_detected!("i8mm");
        [(matrices, Self::Matrices), (dots, Self::Dots)]
            .into_iter()
            .filter_map(|(found, level)| found.then_some(level))
    }

    /// True if `x` that is rounded to 8 bits is multiplied as bytes.
    pub(super) fn has_bytes(self, _: Rows<'_>, _: bool) -> bool {
        true
    }

    /// [`Words::fill`], for which every processor has the instructions.
    pub(super) fn fill(self, words: &mut Words, x: &[f32], columns: usize) -> bool {
        words.fill(x, columns)
    }

    /// Writes which rows are not steep ([`super::is_steep`]), for which every processor has the instructions.
    pub(super) fn narrow(self, to: &mut [bool], x: &[f32], columns: usize) {
        super::not_steep(to, x, columns);
    }

    /// A few rows of `x`, with the weights as they are stored.
    pub(super) fn few<const PARTS: usize>(
        self,
        task: &mut IntegerTask<'_, '_>,
        groups: &[Group<PARTS>],
    ) {
        // SAFETY: a level is made of what the processor has.
        unsafe {
            match self.of_few::<PARTS>() {
                Self::Matrices => matrices::few(task, groups),
                Self::Dots => dots::few(task, groups),
            }
        }
    }

    /// Instructions for a few rows of `x`. `smmla` takes two rows, such as two parts of `x`; one part goes to `sdot`.
    fn of_few<const PARTS: usize>(self) -> Self {
        if PARTS == 2 { self } else { Self::Dots }
    }

    /// Several rows of `x`, with weights of four bits that become int8 first.
    pub(super) fn several<const PARTS: usize>(
        self,
        task: &mut IntegerTask<'_, '_>,
        panels: &[Panel<PARTS>],
    ) {
        let Some(panel) = panels.first() else { return };
        let blocks = panel.scales.len();
        let mut wide = Wide {
            values: vec![[[0; BYTES]; TILE_VECTORS]; blocks],
            scales: vec![[0.0; TILE]; blocks],
            shifts: vec![[0.0; TILE]; if task.offsets.is_some() { blocks } else { 0 }],
            reals: [vec![0.0; blocks], vec![0.0; blocks]],
        };
        // SAFETY: as above.
        unsafe {
            match self {
                Self::Matrices => matrices::several(task, panels, &mut wide),
                Self::Dots => dots::several(task, panels, &mut wide),
            }
        }
    }

    pub(super) fn groups<const PARTS: usize>(
        self,
        words: &Words,
        weights: Rows<'_>,
    ) -> Vec<Group<PARTS>> {
        let level = self.of_few::<PARTS>();
        let run = match level {
            Self::Matrices => HALF,
            Self::Dots => BYTES,
        };
        let mut groups = Vec::with_capacity(words.stride.div_ceil(GROUP) * words.rows().len());
        for (x, scales) in words.groups() {
            let mut group = Group {
                values: [[[0; BYTES]; PARTS]; GROUP / BYTES],
                offsets: [[0; LANES]; BLOCKS],
                sums: [0.0; BLOCKS],
                scales: [0.0; BLOCKS],
            };
            let blocks = group.sums.iter_mut().zip(x.chunks_exact(BLOCK));
            blocks.for_each(|(to, x)| *to = sum(x) as f32);
            group.scales[..scales.len()].copy_from_slice(scales);
            let values = group.values.as_flattened_mut().as_flattened_mut();
            for (column, x) in x.iter().enumerate() {
                let parts = parts::<PARTS>(*x);
                let mut place = column;
                if let Rows::I4(..) = weights {
                    let (block, within) = (column / BLOCK, column % BLOCK);
                    place = block * BLOCK + within % 2 * BYTES + within / 2;
                    let zero = -i32::from(NIBBLE_ZERO);
                    match level {
                        Self::Matrices => {
                            let sums = group.offsets[block].iter_mut();
                            sums.zip(parts.iter().cycle())
                                .for_each(|(sum, x)| *sum += zero * i32::from(*x));
                        }
                        Self::Dots => group.offsets[block][0] += zero * i32::from(*x),
                    }
                }
                let place = place / run * PARTS * run + place % run;
                let places = values[place..].iter_mut().step_by(run);
                places.zip(parts).for_each(|(to, x)| *to = x);
            }
            groups.push(group);
        }
        groups
    }

    pub(super) fn panel<const PARTS: usize>(self, words: &Words, _: Rows<'_>) -> Panel<PARTS> {
        let octets = [[[[0; BYTES]; PANEL / 2]; PARTS]; BLOCK / HALF];
        let mut values = vec![octets; words.stride / BLOCK];
        for (row, (x, _)) in words.rows().enumerate() {
            let values = values.as_flattened_mut().iter_mut();
            for (octets, x) in values.zip(x.as_chunks::<HALF>().0) {
                for (column, x) in x.iter().enumerate() {
                    let (vector, byte) = match self {
                        Self::Matrices => (row / 2, row % 2 * HALF + column),
                        Self::Dots => (column / 4 * 2 + row / LANES, row % LANES * 4 + column % 4),
                    };
                    let places = octets.iter_mut().zip(parts::<PARTS>(*x));
                    places.for_each(|(part, x)| part[vector][byte] = x);
                }
            }
        }
        let (mut sums, scales) = (words.panel_sums(), words.panel_scales());
        in_reals(&mut sums, &scales);
        Panel { values, sums, scales }
    }
}

/// A slice in arrays, the last of which is filled up.
struct Filled<'a, T, const N: usize> {
    whole: &'a [[T; N]],
    last: Option<[T; N]>,
}

impl<'a, T: Copy + Default, const N: usize> Filled<'a, T, N> {
    #[inline(always)]
    fn new(all: &'a [T]) -> Self {
        let (whole, rest) = all.as_chunks();
        let mut last = None;
        if !rest.is_empty() {
            let last = last.insert([T::default(); N]);
            last[..rest.len()].copy_from_slice(rest);
        }
        Self { whole, last }
    }

    #[inline(always)]
    fn last(&self) -> &[[T; N]] {
        self.last.as_slice()
    }
}

/// The numbers of a group of blocks, of which each two groups share one.
#[inline]
#[target_feature(enable = "neon")]
fn products(all: Multiples<'_>, group: usize) -> float32x4_t {
    let [unit, multiple] = places(group * BLOCKS, all.minima);
    let unit = floats_of_halves(&[all.units[unit]; LANES]);
    let four = all.multiples[multiple..].first_chunk();
    let four = vcreate_u8(u64::from(four.map_or(0, |four| u32::from_le_bytes(*four))));
    let four = vmovl_u16(vget_low_u16(vmovl_u8(four)));
    vmulq_f32(vcvtq_f32_u32(four), unit)
}

/// Some rows of weights of one form.
struct Beside<'a, const N: usize> {
    bytes: [&'a [i8]; N],
    form: Form,
    /// Scales of whole rows.
    rows: [f32; N],
    /// Scales of each group.
    scales: Vec<[float32x4_t; N]>,
    /// Addends of offsets to the reals of each group; none without offsets.
    shifts: Vec<[float32x4_t; N]>,
}

/// Form of rows of weights.
#[derive(Clone, Copy)]
enum Form {
    /// int8 with a scale for each row.
    Rows,
    /// int8 with a scale for each block.
    Blocks,
    /// Four bits.
    Nibbles,
}

impl<'a, const N: usize> Beside<'a, N> {
    /// Memory for rows of the weights of a matmul.
    #[target_feature(enable = "neon")]
    fn new(task: &IntegerTask<'a, '_>) -> Self {
        let form = match task.weights {
            Rows::I4(..) => Form::Nibbles,
            Rows::I8Blocks(..) => Form::Blocks,
            Rows::I8(..) | Rows::F16(_) | Rows::F32(_) => Form::Rows,
        };
        let groups = match form {
            Form::Rows => 0,
            Form::Blocks | Form::Nibbles => task.columns.div_ceil(GROUP),
        };
        let zeros = || vec![[vdupq_n_f32(0.0); N]; groups];
        Self {
            bytes: [&[]; N],
            form,
            rows: [1.0; N],
            scales: zeros(),
            shifts: if task.offsets.is_some() { zeros() } else { Vec::new() },
        }
    }

    /// Rows from `first` on of `count`, the last of them in the place of those that do not exist.
    #[target_feature(enable = "neon")]
    fn fill(&mut self, task: &IntegerTask<'a, '_>, first: usize, count: usize) {
        let blocks = task.columns / BLOCK;
        for n in 0..N {
            let row = (first + n).min(count - 1);
            match task.weights.row(row, task.columns) {
                Row::I8(w, scale) => {
                    self.bytes[n] = w;
                    self.rows[n] = scale;
                }
                Row::I8Blocks(w, scales) => {
                    self.bytes[n] = w;
                    put(&mut self.scales, n, scales);
                }
                Row::I4(w, scales) => {
                    self.bytes[n] = bytemuck::cast_slice(w);
                    put(&mut self.scales, n, scales);
                }
                // These are not multiplied in integers.
                Row::F32(_) | Row::F16(_) => {}
            }
            let Some(offsets) = task.offsets else { continue };
            put(&mut self.shifts, n, offsets.cut(row * blocks, blocks));
            let both = self.shifts.iter_mut().zip(&self.scales);
            match offsets {
                // Those of nibbles from 0 on.
                Scales::Multiples(_) => {
                    let zero = f32::from(NIBBLE_ZERO);
                    both.for_each(|(to, scale)| to[n] = vfmaq_n_f32(to[n], scale[n], zero));
                }
                _ => both.for_each(|(to, scale)| to[n] = vmulq_f32(to[n], scale[n])),
            }
        }
    }
}

/// Writes the numbers of all blocks of row `n`, a group at a time.
#[inline]
#[target_feature(enable = "neon")]
fn put<const N: usize>(to: &mut [[float32x4_t; N]], n: usize, from: Scales<'_>) {
    match from {
        Scales::F32(all) => put_each(to, n, all, |four| floats(four)),
        Scales::F16(all) => put_each(to, n, all, |four| floats_of_halves(four)),
        Scales::Multiples(all) => {
            to.iter_mut().enumerate().for_each(|(index, to)| to[n] = products(all, index));
        }
    }
}

#[inline(always)]
fn put_each<T: Copy + Default, const N: usize>(
    to: &mut [[float32x4_t; N]],
    n: usize,
    from: &[T],
    read: impl Fn(&[T; BLOCKS]) -> float32x4_t,
) {
    let from = Filled::new(from);
    to.iter_mut().zip(from.whole).for_each(|(to, four)| to[n] = read(four));
    if let (Some(to), Some(last)) = (to.get_mut(from.whole.len()), &from.last) {
        to[n] = read(last);
    }
}

/// Writes what is computed of some rows of weights, from element `n` of each `out` on.
#[inline(always)]
fn write<const M: usize, const N: usize>(sums: [[f32; N]; M], n: usize, out: [&mut &mut [f32]; M]) {
    for (out, sums) in out.into_iter().zip(sums) {
        out[n..].iter_mut().zip(sums).for_each(|(y, sum)| *y = sum);
    }
}

/// Some rows of weights as int8.
struct Wide {
    /// Blocks of all rows, eight columns at a time.
    values: Vec<[[i8; BYTES]; TILE_VECTORS]>,
    /// Scales of each block of the rows.
    scales: Vec<[f32; TILE]>,
    /// Numbers added to the reals of each block of the rows; none without offsets.
    shifts: Vec<[f32; TILE]>,
    /// Scales and addends of one row.
    reals: [Vec<f32>; 2],
}

impl Wide {
    /// Fills one of `BESIDE` rows that lie beside each other, eight columns of each in turns.
    #[target_feature(enable = "neon")]
    fn fill<const BESIDE: usize>(
        &mut self,
        row: usize,
        weights: Row<'_>,
        offsets: Option<Scales<'_>>,
    ) {
        let Self { values, scales, shifts, reals: [own_scales, own_shifts] } = self;
        let first = row / BESIDE * BESIDE * (BLOCK / HALF) + row % BESIDE;
        let put = |to: &mut [[i8; BYTES]; TILE_VECTORS], from: &[[i8; HALF]; BLOCK / HALF]| {
            let to = to.as_flattened_mut().as_chunks_mut::<HALF>().0;
            let last = first + BESIDE * (from.len() - 1);
            if let Some(to) = to.get_mut(first..=last) {
                from.iter().enumerate().for_each(|(octet, from)| to[octet * BESIDE] = *from);
            }
        };
        match weights {
            Row::I8(w, _) | Row::I8Blocks(w, _) => {
                let w = Filled::<_, BLOCK>::new(w);
                for (to, from) in values.iter_mut().zip(w.whole.iter().chain(w.last())) {
                    put(to, bytemuck::cast_ref(from));
                }
            }
            Row::I4(w, _) => {
                let blocks = bytemuck::cast_slice(w).as_chunks().0;
                values.iter_mut().zip(blocks).for_each(|(to, w)| put(to, &unpacked(w)));
            }
            Row::F32(_) | Row::F16(_) => {}
        }
        match weights {
            Row::I8(_, scale) => own_scales.fill(scale),
            Row::I8Blocks(_, scales) | Row::I4(_, scales) => scales.copy(own_scales),
            Row::F32(_) | Row::F16(_) => {}
        }
        scales.iter_mut().zip(&*own_scales).for_each(|(to, scale)| to[row] = *scale);
        if let Some(offsets) = offsets {
            offsets.shifts(own_scales, own_shifts);
            shifts.iter_mut().zip(own_shifts).for_each(|(to, shift)| to[row] = *shift);
        }
    }
}

/// The even columns of two vectors of four bits, or the odd ones.
#[inline]
#[target_feature(enable = "neon")]
fn nibbles(both: int8x16_t) -> [int8x16_t; 2] {
    let both = vreinterpretq_u8_s8(both);
    let (even, odd) = (vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both));
    [vreinterpretq_s8_u8(even), vreinterpretq_s8_u8(odd)]
}

/// 32 weights of four bits in their order.
#[inline]
#[target_feature(enable = "neon")]
fn unpacked(w: &[i8; BYTES]) -> [[i8; HALF]; 4] {
    let [even, odd] = nibbles(load(w));
    let zero = vdupq_n_s8(NIBBLE_ZERO);
    let (even, odd) = (vsubq_s8(even, zero), vsubq_s8(odd, zero));
    let mut all = [[0; HALF]; 4];
    let places = all.as_flattened_mut().as_mut_ptr();
    // SAFETY: two vectors have as many bytes as the arrays.
    unsafe {
        vst1q_s8(places, vzip1q_s8(even, odd));
        vst1q_s8(places.add(BYTES), vzip2q_s8(even, odd));
    }
    all
}

/// Sums of upper and lower bits, joined.
#[inline]
#[target_feature(enable = "neon")]
fn joined<const PARTS: usize>(sums: [int32x4_t; PARTS]) -> int32x4_t {
    let mut joined = sums[0];
    for low in &sums[1..] {
        joined = vaddq_s32(vshlq_n_s32::<8>(joined), *low);
    }
    joined
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

/// Bits of f16 as f32.
#[inline]
#[target_feature(enable = "neon")]
fn floats_of_halves(bits: &[u16; LANES]) -> float32x4_t {
    // SAFETY: as above.
    let halves = unsafe { vld1_u16(bits.as_ptr()) };
    let floats;
    // SAFETY: the instruction, which every processor has, only computes with these registers.
    unsafe {
        asm!(
            "fcvtl {floats:v}.4s, {halves:v}.4h",
            floats = lateout(vreg) floats,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    floats
}

#[inline]
#[target_feature(enable = "neon")]
fn lanes(vector: float32x4_t) -> [f32; LANES] {
    let mut lanes = [0f32; LANES];
    // SAFETY: as above.
    unsafe { vst1q_f32(lanes.as_mut_ptr(), vector) };
    lanes
}
