//! Integers of 16 bits, whose products are summed in pairs.

#![expect(unsafe_code, reason = "instructions that rten_simd does not have")]

mod avx2;
mod avx512;

use qhx_core::quantized::{NIBBLE_ZERO, from_nibble};

use super::{GROUP, IntegerTask, Words};
use crate::kernels::{Row, Rows};

/// How far from 0 integers are at most.
pub(super) const LIMIT: f32 = 32767.0;
/// Products of 16 bits in a vector of 512 bits.
const WORDS: usize = 32;
/// Sums of 32 bits in a vector of 512 bits.
const LANES: usize = 16;
/// Rows of `x` in a panel.
pub(super) const PANEL: usize = 2 * LANES;
/// Rows of weights that are multiplied with a panel at a time.
const TILE: usize = 6;

/// Instructions that the processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    Avx512,
    AvxVnni,
    Avx2,
}

/// Some columns of a row, filled up with 0.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Group {
    /// With int8 one after the other; with four bits every fourth column, as they come out of 16 bits.
    values: [[i16; WORDS]; GROUP / WORDS],
    /// What the sums begin with: four bits are around 8.
    offsets: [i32; LANES],
    /// The scale of what each lane sums.
    scales: [f32; LANES],
}

/// Rows of `x` beside each other, filled up with rows of 0.
pub(super) struct Panel {
    /// Two columns of each row, then the next two.
    values: Vec<[[i16; 2]; PANEL]>,
    /// For each block of columns the scale of each row.
    scales: Vec<[f32; PANEL]>,
    /// Columns that share a scale.
    block: usize,
}

impl Level {
    /// All that the processor has, the fastest first.
    pub(super) fn found() -> impl Iterator<Item = Self> {
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let vnni = avx2 && is_x86_feature_detected!("avxvnni");
        [(avx512 && avx2, Self::Avx512), (vnni, Self::AvxVnni), (avx2, Self::Avx2)]
            .into_iter()
            .filter_map(|(found, level)| found.then_some(level))
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

    /// A few rows of `x`, with the weights as they are stored.
    pub(super) fn few(self, task: &mut IntegerTask<'_, '_>, groups: &[Group]) {
        // SAFETY: as above.
        unsafe {
            match self {
                // There is a factor for each 32 products, which shorter vectors need less for.
                Self::Avx512 if matches!(task.weights, Rows::I8Blocks(..)) => {
                    avx2::few::<false>(task, groups);
                }
                Self::Avx512 => avx512::few(task, groups),
                Self::AvxVnni => avx2::few::<true>(task, groups),
                Self::Avx2 => avx2::few::<false>(task, groups),
            }
        }
    }

    /// Several rows of `x`, with weights that are extended to int16 first.
    pub(super) fn several(self, task: &mut IntegerTask<'_, '_>, panels: &[Panel]) {
        let Some(panel) = panels.first() else { return };
        let mut wide = Wide::new(panel);
        // SAFETY: as above.
        unsafe {
            match self {
                Self::Avx512 => avx512::several(task, panels, &mut wide),
                Self::AvxVnni => avx2::several::<true>(task, panels, &mut wide),
                Self::Avx2 => avx2::several::<false>(task, panels, &mut wide),
            }
        }
    }

    pub(super) fn groups(self, words: &Words, four: bool) -> Vec<Group> {
        let mut groups = Vec::with_capacity(words.stride.div_ceil(GROUP) * words.rows().len());
        for (row, scales) in words.rows() {
            let scales = scales.chunks(GROUP / words.block);
            for (x, scales) in row.chunks(GROUP).zip(scales) {
                let mut group = Group {
                    values: [[0; WORDS]; GROUP / WORDS],
                    offsets: [0; LANES],
                    scales: [0.0; LANES],
                };
                let share = LANES * words.block / GROUP;
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

    pub(super) fn panel(self, words: &Words) -> Panel {
        let mut values = vec![[[0; 2]; PANEL]; words.stride / 2];
        for (row, (x, _)) in words.rows().enumerate() {
            values.iter_mut().zip(x.as_chunks().0).for_each(|(to, pair)| to[row] = *pair);
        }
        Panel { values, scales: words.panel_scales(), block: words.block }
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
    fn new(panel: &Panel) -> Self {
        // Powers of two would share the same sets of a cache.
        let stride = panel.values.len().div_ceil(WORDS / 2) + 1;
        Self {
            values: vec![[[0; 2]; WORDS / 2]; TILE * stride],
            scales: vec![0.0; TILE * panel.scales.len()],
            block: panel.block,
        }
    }

    #[inline(always)]
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

    /// The pairs of columns of each row.
    #[inline(always)]
    fn rows(&self, pairs: usize) -> [&[[i16; 2]]; TILE] {
        let stride = self.values.len() / TILE;
        let mut rows: [&[[i16; 2]]; TILE] = [&[]; TILE];
        for (n, row) in rows.iter_mut().enumerate() {
            *row = &self.values[n * stride..][..stride].as_flattened()[..pairs];
        }
        rows
    }
}
