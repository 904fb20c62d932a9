//! Matmuls with int8 and four bits in integers.
//!
//! `x` becomes int16 with a scale for each few columns. A column's error is at most 1.6e-5 of the largest one that it
//! shares its scale with, where the f16 of an NPU errs by up to 4.9e-4 of each. Weights are not dequantized: products
//! are summed in 32 bits, which is exact, by AVX-512 VNNI, AVX-VNNI, AVX2 or the dot products and matrix products of
//! Arm. Where the processor has none of them, or `x` is not finite, [`crate::kernels`] multiplies instead.

#![cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    expect(dead_code, reason = "it takes a processor with instructions for integers")
)]

use std::array::from_fn;
use std::ops::Range;

use qhx_core::quantized::BLOCK;

use crate::kernels::{Row, Rows};
use crate::team::Team;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod none;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
use aarch64 as vectors;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use none as vectors;
#[cfg(target_arch = "x86_64")]
use x86 as vectors;

use vectors::{Group, LIMIT, Level, PANEL, Panel};

/// Columns in a [`Group`].
const GROUP: usize = 128;
/// Rows of `x` up to which weights are multiplied as they come from memory.
const FEW: usize = 8;

/// Rows of `x` as integers, for the instructions that will multiply them.
pub(crate) struct Integers {
    level: Level,
    rows: Arranged,
}

enum Arranged {
    /// In the order in which weights come, a row after the other.
    Groups(Vec<Group>),
    /// Some rows beside each other, then the next ones.
    Panels(Vec<Panel>),
}

/// Rows of int16, none of which is further from 0 than [`LIMIT`].
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
    Integers::new(Level::found().next()?, weights, columns, x, team)
}

impl Integers {
    fn new(
        level: Level,
        weights: Rows<'_>,
        columns: usize,
        x: &[f32],
        team: &Team,
    ) -> Option<Self> {
        let block = block(weights)?;
        let words = |x: &[f32]| Words::new(level, x, columns, block);
        if x.len() / columns <= FEW {
            let groups = level.groups(&words(x)?, matches!(weights, Rows::I4(..)));
            return Some(Self { level, rows: Arranged::Groups(groups) });
        }
        let mut panels = Vec::new();
        panels.resize_with((x.len() / columns).div_ceil(PANEL), || None);
        let rows: Vec<_> = panels.iter_mut().zip(x.chunks(PANEL * columns)).collect();
        team.each(rows, |(panel, x)| *panel = words(x).map(|words| level.panel(&words)));
        let panels = panels.into_iter().collect::<Option<_>>()?;
        Some(Self { level, rows: Arranged::Panels(panels) })
    }
}

impl Words {
    fn new(level: Level, x: &[f32], columns: usize, block: usize) -> Option<Self> {
        let (rows, stride) = (x.len() / columns, columns.next_multiple_of(block));
        let (values, scales) = (vec![0; rows * stride], vec![0.0; rows * stride / block]);
        let mut words = Self { values, scales, stride, block };
        level.fill(&mut words, x, columns).then_some(words)
    }

    /// Whether all elements are finite, and none so small that its scale is not.
    #[inline(always)]
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
                *scale = largest / LIMIT;
                let inverse = LIMIT / largest;
                for (value, x) in values.iter_mut().zip(x) {
                    // So large a number has no bits below 1: the sum is rounded, and its lowest bits are the integer.
                    const LARGE: f32 = 12_582_912.0;
                    *value = (x * inverse + LARGE).to_bits().wrapping_sub(LARGE.to_bits()) as i16;
                }
            }
        }
        true
    }

    /// The integers of each row, and the scales of its blocks.
    fn rows(&self) -> impl ExactSizeIterator<Item = (&[i16], &[f32])> {
        let scales = self.scales.chunks_exact(self.stride / self.block);
        self.values.chunks_exact(self.stride).zip(scales)
    }

    /// For each block of columns the scale of each row, of which there are at most [`PANEL`].
    fn panel_scales(&self) -> Vec<[f32; PANEL]> {
        let mut all = vec![[0.0; PANEL]; self.stride / self.block];
        for (row, (_, scales)) in self.rows().enumerate() {
            all.iter_mut().zip(scales).for_each(|(to, scale)| to[row] = *scale);
        }
        all
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
        let Integers { level, rows } = self.x;
        match rows {
            Arranged::Groups(groups) => level.few(&mut self, groups),
            Arranged::Panels(panels) => level.several(&mut self, panels),
        }
        if let Some(bias) = self.bias {
            for out in &mut self.out {
                out.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }

    /// Calls `dots` with some rows of weights at a time, up to four rows of `x`, and where the first results belong. The
    /// last row comes again in the place of rows that are not there. Inlined, so that what it calls is compiled for the
    /// caller's instructions.
    #[inline(always)]
    fn each_rows<const N: usize>(
        &mut self,
        groups: &[Group],
        dots: impl Fn([Row<'_>; N], &[Group], usize, &mut [&mut [f32]]),
    ) {
        let count = self.out.first().map_or(0, |out| out.len());
        let each = self.columns.div_ceil(GROUP);
        for first in (0..count).step_by(N) {
            let row = |n: usize| self.weights.row((first + n).min(count - 1), self.columns);
            let rows: [Row<'_>; N] = from_fn(row);
            // The rows are in the nearest cache when the next four come.
            for (out, x) in self.out.chunks_mut(4).zip(groups.chunks(4 * each)) {
                dots(rows, x, first, out);
            }
        }
    }

    /// Fills `wide` with some rows of weights at a time and multiplies them with each panel. Inlined as above.
    #[inline(always)]
    fn each_tile<const TILE: usize, W>(
        &mut self,
        panels: &[Panel],
        wide: &mut W,
        fill: impl Fn(&mut W, usize, Row<'_>),
        multiply: impl Fn(&W, &Panel) -> [[f32; PANEL]; TILE],
    ) {
        let count = self.out.first().map_or(0, |out| out.len());
        for first in (0..count).step_by(TILE) {
            let range: Range<usize> = first..count.min(first + TILE);
            for row in range.clone() {
                fill(wide, row - first, self.weights.row(row, self.columns));
            }
            for (panel, outs) in panels.iter().zip(self.out.chunks_mut(PANEL)) {
                let sums = multiply(wide, panel);
                for (m, out) in outs.iter_mut().enumerate() {
                    let to = out[range.clone()].iter_mut();
                    to.zip(&sums).for_each(|(y, sums)| *y = sums[m]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::tests::{Stored, numbers};

    fn made(level: Level, weights: Rows<'_>, columns: usize, x: &[f32]) -> Option<Integers> {
        Integers::new(level, weights, columns, x, &Team::Alone)
    }

    #[test]
    fn matmuls_are_as_exact_as_16_bits_make_them() {
        for columns in [1, 7, 32, 96, 128, 160, 416, 1056] {
            for rows in [1, 3, 6, 13] {
                for stored in Stored::all(rows, columns) {
                    for count in [1, 2, 3, 4, 5, 8, 9, 32, 37] {
                        let x = numbers(count * columns, 5);
                        for level in Level::found() {
                            check(level, &stored, rows, columns, &x);
                        }
                    }
                }
            }
        }
    }

    fn check(level: Level, stored: &Stored, rows: usize, columns: usize, x: &[f32]) {
        let (weights, bias) = (stored.rows(), numbers(rows, 19));
        let Some(arranged) = made(level, weights, columns, x) else {
            assert!(block(weights).is_none());
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
            assert!(off <= 1.6e-5 * size, "{level:?}, {columns} × {rows}, {at}: {y}, {expected}");
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
                    let narrow = block(stored.rows()).is_some();
                    for level in Level::found() {
                        let found = made(level, stored.rows(), 64, &x).is_some();
                        assert_eq!(found, fits && narrow, "{level:?}, {value}");
                    }
                }
            }
        }
    }
}
