//! Integers of 16 bits, whose products are summed in pairs, and of 8 bits, whose products are summed by four.
//!
//! The instructions for bytes multiply unsigned ones with signed ones. Four bits around 8 are unsigned as they are
//! stored, and int8 with another sign bit is unsigned around 128: either way the sums of a block start with that zero
//! point times the sum of `x`, less than 0.

#![expect(unsafe_code, reason = "instructions that rten_simd does not have")]

mod avx2;
mod avx512;

use qhx_types::quantized::{BLOCK, NIBBLE_ZERO, from_nibble};

use super::{GROUP, IntegerTask, Words, in_reals, sum};
use crate::kernels::{Row, Rows, Scales};

/// Largest absolute value of integers of 16 bits.
pub(super) const LIMIT: f32 = 32767.0;
/// Bytes in a vector of 512 bits.
const VECTOR: usize = 64;
/// Sums of 32 bits in a vector of 512 bits.
const LANES: usize = 16;
/// Rows of `x` in a panel.
pub(super) const PANEL: usize = 2 * LANES;
/// Rows of weights that are multiplied with a panel at a time.
const TILE: usize = 6;
/// Bytes of a vector whose lanes sum the same block.
const RUN: usize = VECTOR * BLOCK / GROUP;
/// Zero point of int8 with the sign bit flipped.
const BYTE_ZERO: u8 = 128;

/// Instructions that the processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    Avx512,
    AvxVnni,
    Avx2,
}

/// Some columns of a row, filled up with 0, in the order in which weights come: four bits out of vectors of 16 bits or
/// of 8. int8 comes as it is stored; in vectors of 512 bits each four lanes have columns of the same block.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Group<const BYTES: usize> {
    values: [[[u8; VECTOR]; BYTES]; GROUP / VECTOR],
    /// First values of the sums of products: each eight columns times the zero point of the weights, negated.
    starts: [i32; LANES],
    /// The sums of each eight columns.
    sums: [f32; LANES],
    /// The scales of each eight columns.
    scales: [f32; LANES],
}

/// Rows of `x` beside each other, filled up with rows of 0.
pub(super) struct Panel<const BYTES: usize> {
    /// Four bytes of each row, then the next four.
    values: Vec<[i32; PANEL]>,
    /// First value of the sum of products of each row, for each block of columns.
    starts: Vec<[i32; PANEL]>,
    /// For each block of columns the sum of each row, in reals.
    sums: Vec<[f32; PANEL]>,
    /// For each block of columns the scale of each row.
    scales: Vec<[f32; PANEL]>,
    /// Elements of `values` in a block.
    block: usize,
}

impl Level {
    /// All that the processor has, the fastest first.
    pub(super) fn found() -> impl Iterator<Item = Self> {
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let vnni = avx2 && is_x86_feature_detected!("avxvnni");
        [(avx512 && avx2, Self::Avx512), (vnni, Self::AvxVnni), (avx2, Self::Avx2)]
            .into_iter()
            .filter_map(|(found, level)| found.then_some(level))
    }

    /// True if `x` that is rounded to 8 bits is multiplied as bytes. AVX2 alone multiplies int8 with int8 in bytes by a
    /// detour, which takes panels as long as 16 bits.
    pub(super) fn has_bytes(self, weights: Rows<'_>, few: bool) -> bool {
        few || self != Self::Avx2 || matches!(weights, Rows::I4(..))
    }

    /// [`Words::fill`] with these instructions.
    pub(super) fn fill(self, words: &mut Words, x: &[f32], columns: usize) -> bool {
        // SAFETY: a level is made of what the processor has.
        unsafe {
            match self {
                Self::Avx512 => avx512::fill(words, x, columns),
                Self::AvxVnni | Self::Avx2 => avx2::fill(words, x, columns),
            }
        }
    }

    /// Writes which rows are not steep ([`super::is_steep`]).
    pub(super) fn narrow(self, to: &mut [bool], x: &[f32], columns: usize) {
        // SAFETY: as above.
        unsafe {
            match self {
                Self::Avx512 => avx512::narrow(to, x, columns),
                Self::AvxVnni | Self::Avx2 => avx2::narrow(to, x, columns),
            }
        }
    }

    /// A few rows of `x`, with the weights as they are stored.
    pub(super) fn few<const BYTES: usize>(
        self,
        task: &mut IntegerTask<'_, '_>,
        groups: &[Group<BYTES>],
    ) {
        // SAFETY: as above.
        unsafe {
            match self {
                Self::Avx512 => avx512::few(task, groups),
                Self::AvxVnni => avx2::few::<true, BYTES>(task, groups),
                Self::Avx2 => avx2::few::<false, BYTES>(task, groups),
            }
        }
    }

    /// Several rows of `x`, with weights that become as wide as its elements first.
    pub(super) fn several<const BYTES: usize>(
        self,
        task: &mut IntegerTask<'_, '_>,
        panels: &[Panel<BYTES>],
    ) {
        let Some(panel) = panels.first() else { return };
        let mut wide = Wide::new(panel, task.offsets.is_some());
        // SAFETY: as above.
        unsafe {
            match self {
                Self::Avx512 => avx512::several(task, panels, &mut wide),
                Self::AvxVnni => avx2::several::<true, BYTES>(task, panels, &mut wide),
                Self::Avx2 => avx2::several::<false, BYTES>(task, panels, &mut wide),
            }
        }
    }

    /// Zero point of weights as they are multiplied with a few rows of `x`.
    fn zero<const BYTES: usize>(self, weights: Rows<'_>) -> i32 {
        match weights {
            Rows::I4(..) => i32::from(NIBBLE_ZERO),
            // AVX2 alone has the weights' signs with `x`.
            _ if BYTES == 1 && self != Self::Avx2 => i32::from(BYTE_ZERO),
            _ => 0,
        }
    }

    pub(super) fn groups<const BYTES: usize>(
        self,
        words: &Words,
        weights: Rows<'_>,
    ) -> Vec<Group<BYTES>> {
        // SAFETY: as above.
        unsafe {
            match self {
                Self::Avx512 => avx512::groups(words, weights, self.zero::<BYTES>(weights)),
                Self::AvxVnni | Self::Avx2 => {
                    avx2::groups(words, weights, self.zero::<BYTES>(weights))
                }
            }
        }
    }

    pub(super) fn panel<const BYTES: usize>(
        self,
        words: &Words,
        weights: Rows<'_>,
    ) -> Panel<BYTES> {
        let each = size_of::<i32>() / BYTES;
        let block = BLOCK / each;
        let mut values = vec![[0; PANEL]; words.stride / each];
        for (row, (x, _)) in words.rows().enumerate() {
            for (to, x) in values.iter_mut().zip(x.chunks_exact(each)) {
                to[row] = match *x {
                    [a, b] => bytemuck::cast([a, b]),
                    [a, b, c, d] => bytemuck::cast([a as i8, b as i8, c as i8, d as i8]),
                    _ => 0,
                };
            }
        }
        let (mut sums, scales) = (words.panel_sums(), words.panel_scales());
        // Of 16 bits weights become words around 0 first.
        let zero = if BYTES == 1 { self.zero::<BYTES>(weights) } else { 0 };
        let starts = sums.iter().map(|sums| sums.map(|sum| -zero * sum as i32)).collect();
        in_reals(&mut sums, &scales);
        Panel { values, starts, sums, scales, block }
    }
}

impl<const BYTES: usize> Group<BYTES> {
    /// The groups of all rows, for vectors of `WIDTH` bytes. Inlined, so that they are compiled for the caller's
    /// instructions.
    #[inline(always)]
    fn all<const WIDTH: usize>(words: &Words, weights: Rows<'_>, zero: i32) -> Vec<Self> {
        let mut groups = Vec::with_capacity(words.stride.div_ceil(GROUP) * words.rows().len());
        for (x, scales) in words.groups() {
            let mut group = Self {
                values: [[[0; VECTOR]; BYTES]; GROUP / VECTOR],
                starts: [0; LANES],
                sums: [0.0; LANES],
                scales: [0.0; LANES],
            };
            let share = LANES * BLOCK / GROUP;
            for (lanes, scale) in group.scales.chunks_exact_mut(share).zip(scales) {
                lanes.fill(*scale);
            }
            let mut filled = [0; GROUP];
            filled[..x.len()].copy_from_slice(x);
            group.fill::<WIDTH>(weights, &filled);
            let eights = filled.as_chunks::<{ GROUP / LANES }>().0;
            let places = group.sums.iter_mut().zip(&mut group.starts).zip(eights);
            places.for_each(|((of_x, start), x)| {
                let sum = sum(x);
                (*of_x, *start) = (sum as f32, -zero * sum);
            });
            groups.push(group);
        }
        groups
    }

    /// Fills it with columns in the order in which weights come.
    #[inline(always)]
    fn fill<const WIDTH: usize>(&mut self, weights: Rows<'_>, x: &[i16; GROUP]) {
        let to = self.values.as_flattened_mut().as_flattened_mut();
        let to: &mut [[u8; BYTES]] = to.as_chunks_mut().0;
        let bytes = |x: i16| {
            let mut bytes = [0; BYTES];
            bytes.copy_from_slice(&x.to_le_bytes()[..BYTES]);
            bytes
        };
        match weights {
            // As weights come out of the bits of an element.
            Rows::I4(..) => {
                let (each, vectors) = (WIDTH / BYTES, 2 * BYTES);
                let parts = to.chunks_exact_mut(each * vectors).zip(x.chunks_exact(each * vectors));
                for (to, x) in parts {
                    for (vector, to) in to.chunks_exact_mut(each).enumerate() {
                        let from = x.chunks_exact(vectors);
                        to.iter_mut().zip(from).for_each(|(to, x)| *to = bytes(x[vector]));
                    }
                }
            }
            _ if WIDTH == VECTOR => {
                let (each, run) = (VECTOR / BYTES, RUN / BYTES);
                for (vector, to) in to.chunks_exact_mut(each).enumerate() {
                    let blocks = to.chunks_exact_mut(run).zip(x.chunks_exact(BLOCK));
                    for (to, x) in blocks {
                        let x = &x[vector * run..][..run];
                        to.iter_mut().zip(x).for_each(|(to, x)| *to = bytes(*x));
                    }
                }
            }
            _ => to.iter_mut().zip(x).for_each(|(to, x)| *to = bytes(*x)),
        }
    }
}

/// Some rows of weights, as wide as the elements of `x`.
struct Wide {
    /// Four bytes at a time.
    values: Vec<[i32; LANES]>,
    /// For each row those of all blocks.
    scales: Vec<f32>,
    /// Number added to each real of a block; none without offsets.
    shifts: Vec<f32>,
}

impl Wide {
    fn new<const BYTES: usize>(panel: &Panel<BYTES>, offsets: bool) -> Self {
        // Powers of two would share the same sets of a cache.
        let stride = panel.values.len().div_ceil(LANES) + 1;
        Self {
            values: vec![[0; LANES]; TILE * stride],
            scales: vec![0.0; TILE * panel.scales.len()],
            shifts: vec![0.0; if offsets { TILE * panel.scales.len() } else { 0 }],
        }
    }

    #[inline(always)]
    fn fill<const BYTES: usize>(
        &mut self,
        row: usize,
        weights: Row<'_>,
        offsets: Option<Scales<'_>>,
    ) {
        let (stride, blocks) = (self.values.len() / TILE, self.scales.len() / TILE);
        let values = self.values[row * stride..][..stride].as_flattened_mut();
        let scales = &mut self.scales[row * blocks..][..blocks];
        match weights {
            Row::I8(_, scale) => scales.fill(scale),
            Row::I8Blocks(_, from) | Row::I4(_, from) => from.copy(scales),
            Row::F32(_) | Row::F16(_) => {}
        }
        if let Some(offsets) = offsets {
            offsets.shifts(scales, &mut self.shifts[row * blocks..][..blocks]);
        }
        match (weights, BYTES) {
            (Row::I8(w, _) | Row::I8Blocks(w, _), 1) => {
                let values: &mut [u8] = bytemuck::cast_slice_mut(values);
                let places = values.iter_mut().zip(w);
                places.for_each(|(to, w)| *to = w.cast_unsigned() ^ BYTE_ZERO);
            }
            (Row::I8(w, _) | Row::I8Blocks(w, _), _) => {
                let values: &mut [i16] = bytemuck::cast_slice_mut(values);
                values.iter_mut().zip(w).for_each(|(to, w)| *to = i16::from(*w));
            }
            (Row::I4(w, _), 1) => {
                let values: &mut [[u8; 2]] = bytemuck::cast_slice_mut(values);
                let w: &[u8] = bytemuck::cast_slice(w);
                values.iter_mut().zip(w).for_each(|(to, w)| *to = [w & 15, w >> 4]);
            }
            (Row::I4(w, _), _) => {
                let values: &mut [[i16; 2]] = bytemuck::cast_slice_mut(values);
                let w: &[u8] = bytemuck::cast_slice(w);
                for (to, w) in values.iter_mut().zip(w) {
                    *to = [i16::from(from_nibble(*w)), i16::from(from_nibble(w >> 4))];
                }
            }
            (Row::F32(_) | Row::F16(_), _) => {}
        }
    }

    /// The elements of each row.
    #[inline(always)]
    fn rows(&self, count: usize) -> [&[i32]; TILE] {
        let stride = self.values.len() / TILE;
        let mut rows: [&[i32]; TILE] = [&[]; TILE];
        for (n, row) in rows.iter_mut().enumerate() {
            *row = &self.values[n * stride..][..stride].as_flattened()[..count];
        }
        rows
    }
}
