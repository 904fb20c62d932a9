//! Matmuls with int8 and four bits in integers.
//!
//! `x` becomes int16 or int8 ([`Activations`]) with a scale for each [`BLOCK`] of columns. A column of int16 errs by at
//! most 1.6e-5 of the largest in its block, of int8 by 3.9e-3, where the f16 of an NPU errs by up to 4.9e-4 of each
//! column itself. So int16 is more exact than f16, except for columns less than a thirtieth of the largest in their
//! block: beside an outlier these are coarser, and no columns of other blocks are.
//!
//! [`Activations::Auto`] has int8 beside four bits, but for the rows of which a few columns are nearly all: int8 would
//! round the others to nothing, and models do read them.
//!
//! Weights are not dequantized: products are summed in 32 bits, which is exact, by AVX-512 VNNI, AVX-VNNI, AVX2 or the
//! dot products and matrix products of Arm. Where the processor has none of them, or `x` is not finite,
//! [`crate::kernels`] multiplies instead.
//!
//! The code here and for each processor has the bytes of an element of `x` as a parameter: 2 or 1.

#![cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    expect(
        dead_code,
        unused_macros,
        reason = "it takes a processor with instructions for integers"
    )
)]

use std::borrow::Cow;
use std::ops::{Range, RangeInclusive};

use qhx_types::quantized::BLOCK;

use crate::kernels::{Row, Rows, Scales};
use crate::options::Activations;
use crate::team::Team;

/// Calls something with the one to four elements of a slice as an array of its name, and with no others.
macro_rules! up_to_four {
    ($slice:ident, $call:expr) => {
        match $slice {
            [a] => {
                let $slice = [a];
                $call
            }
            [a, b] => {
                let $slice = [a, b];
                $call
            }
            [a, b, c] => {
                let $slice = [a, b, c];
                $call
            }
            [a, b, c, d] => {
                let $slice = [a, b, c, d];
                $call
            }
            _ => {}
        }
    };
}

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

/// Largest ratio of the largest columns of a row's blocks to its mean column with which [`Activations::Auto`] has int8.
/// Rows of normal numbers have 2.6, those of trained models 3 to 10, and a chat template's tokens, in which a few
/// columns are a thousand times the others, up to 150. Beyond 8, SmolLM2's first tokens of answers become others.
const STEEP: f32 = 5.0;
/// Share of several rows from which on all of them become int16 where these are steep. With two kinds of rows weights
/// are unpacked twice and panels are not full, which takes longer than int16 for a few more.
const MANY: f32 = 1.0 / 3.0;
/// Sums of columns that are computed beside each other.
const SUMS: usize = 16;

/// Rows of `x` as integers, for the instructions that will multiply them.
pub(crate) struct Integers {
    level: Level,
    /// For each row true if it is one of `bytes`. The others are those of `words`.
    narrow: Vec<bool>,
    words: Arranged<2>,
    bytes: Arranged<1>,
}

/// Elements of some bytes each.
enum Arranged<const BYTES: usize> {
    /// In the order in which weights come, a row after the other.
    Groups(Vec<Group<BYTES>>),
    /// Some rows beside each other, then the next ones.
    Panels(Vec<Panel<BYTES>>),
}

/// Rows of integers, with a scale for each [`BLOCK`].
struct Words {
    values: Vec<i16>,
    scales: Vec<f32>,
    /// Columns, up to whole blocks.
    stride: usize,
    /// Largest absolute value of an integer.
    limit: f32,
}

/// Rounding of rows for matmuls with such weights; none where these are not multiplied in integers.
fn rounding(weights: Rows<'_>, activations: Activations) -> Option<Rounding> {
    let four = match weights {
        Rows::F32(_) | Rows::F16(_) => return None,
        Rows::I8(..) | Rows::I8Blocks(..) => false,
        Rows::I4(..) => true,
    };
    Some(match activations {
        Activations::Auto if four => Rounding::ByRow,
        Activations::Auto | Activations::Int16 => Rounding::Words,
        Activations::Int8 => Rounding::Bytes,
    })
}

/// Type that rows are rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rounding {
    Words,
    Bytes,
    /// int8 except for rows that are [steep](is_steep).
    ByRow,
}

/// True if the largest columns of the blocks of a row, as the root of their mean square, are more than [`STEEP`] times
/// the mean column. Inlined, so that it is compiled for the caller's instructions.
#[inline(always)]
fn is_steep(row: &[f32]) -> bool {
    let mut sums = [0f32; SUMS];
    let mut squares = 0.0;
    for block in row.chunks(BLOCK) {
        for part in block.chunks(SUMS) {
            sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x.abs());
        }
        let largest = largest(block);
        squares += largest * largest;
    }
    let mean = sums.iter().sum::<f32>() / row.len() as f32;
    squares > (STEEP * mean).powi(2) * row.len().div_ceil(BLOCK) as f32
}

/// Writes for each row of `columns` elements true if it is not steep.
#[inline(always)]
fn not_steep(to: &mut [bool], x: &[f32], columns: usize) {
    to.iter_mut().zip(x.chunks_exact(columns)).for_each(|(to, row)| *to = !is_steep(row));
}

/// Rows of `columns` elements for matmuls with such weights, or none where the processor, the weights or a number that
/// is not finite is in the way.
pub(crate) fn integers(
    activations: Activations,
    weights: Rows<'_>,
    columns: usize,
    x: &[f32],
    team: &Team,
) -> Option<Integers> {
    Integers::new(Level::found().next()?, activations, weights, columns, x, team)
}

/// True if all blocks of rows of `columns` become integers, whatever they come with ([`Words::fill`]).
pub(crate) fn are_regular(x: &[f32], columns: usize) -> bool {
    x.chunks(columns.max(1)).flat_map(|row| row.chunks(BLOCK)).all(|block| {
        let largest = largest(block);
        largest == 0.0 || REGULAR.contains(&largest)
    })
}

/// The largest absolute value, or NaN.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    // The bits of numbers without signs are in their order, and NaN comes last.
    f32::from_bits(x.iter().fold(0, |most, x| (x.to_bits() & 0x7fff_ffff).max(most)))
}

/// Largest values of blocks that have a scale.
const REGULAR: RangeInclusive<f32> = 1e-30..=1e30;

impl Integers {
    fn new(
        level: Level,
        activations: Activations,
        weights: Rows<'_>,
        columns: usize,
        x: &[f32],
        team: &Team,
    ) -> Option<Self> {
        let rounding = rounding(weights, activations)?;
        let mut narrow = vec![rounding != Rounding::Words; x.len() / columns];
        if rounding == Rounding::ByRow {
            let parts = narrow.chunks_mut(PANEL).zip(x.chunks(PANEL * columns)).collect();
            team.each(parts, |(narrow, x): (&mut [bool], &[f32])| level.narrow(narrow, x, columns));
            let steep = narrow.iter().filter(|narrow| !**narrow).count();
            if narrow.len() > FEW && steep as f32 > MANY * narrow.len() as f32 {
                narrow.fill(false);
            }
        }
        let bytes = rows_where(&narrow, true, x, columns);
        let few = bytes.len() / columns <= FEW;
        if !level.has_bytes(weights, few) {
            let words = Arranged::new(level, f32::from(i8::MAX), weights, columns, x, team)?;
            narrow.fill(false);
            return Some(Self { level, narrow, words, bytes: Arranged::Groups(Vec::new()) });
        }
        let bytes = Arranged::new(level, f32::from(i8::MAX), weights, columns, &bytes, team)?;
        let words = rows_where(&narrow, false, x, columns);
        let words = Arranged::new(level, LIMIT, weights, columns, &words, team)?;
        Some(Self { level, narrow, words, bytes })
    }
}

/// The rows of `x` that are `wanted`.
fn rows_where<'a>(narrow: &[bool], wanted: bool, x: &'a [f32], columns: usize) -> Cow<'a, [f32]> {
    match narrow.iter().filter(|narrow| **narrow == wanted).count() {
        0 => Cow::Borrowed(&[]),
        count if count == narrow.len() => Cow::Borrowed(x),
        _ => {
            let rows = narrow.iter().zip(x.chunks_exact(columns));
            let found = rows.filter(|(narrow, _)| **narrow == wanted);
            Cow::Owned(found.flat_map(|(_, row)| row).copied().collect())
        }
    }
}

impl<const BYTES: usize> Arranged<BYTES> {
    fn new(
        level: Level,
        limit: f32,
        weights: Rows<'_>,
        columns: usize,
        x: &[f32],
        team: &Team,
    ) -> Option<Self> {
        let words = |x: &[f32]| Words::new(level, x, columns, limit);
        if x.len() / columns <= FEW {
            return Some(Self::Groups(level.groups(&words(x)?, weights)));
        }
        let mut panels = Vec::new();
        panels.resize_with((x.len() / columns).div_ceil(PANEL), || None);
        let rows: Vec<_> = panels.iter_mut().zip(x.chunks(PANEL * columns)).collect();
        team.each(rows, |(panel, x)| {
            *panel = words(x).map(|words| level.panel(&words, weights));
        });
        Some(Self::Panels(panels.into_iter().collect::<Option<_>>()?))
    }

    fn multiply(&self, level: Level, task: &mut IntegerTask<'_, '_>) {
        match self {
            Self::Groups(groups) => level.few(task, groups),
            Self::Panels(panels) => level.several(task, panels),
        }
    }
}

impl Words {
    fn new(level: Level, x: &[f32], columns: usize, limit: f32) -> Option<Self> {
        let (rows, stride) = (x.len() / columns, columns.next_multiple_of(BLOCK));
        let values = vec![0; rows * stride];
        let scales = vec![0.0; rows * stride / BLOCK];
        let mut words = Self { values, scales, stride, limit };
        level.fill(&mut words, x, columns).then_some(words)
    }

    /// True if all elements are finite and none is so small that its scale is not.
    #[inline(always)]
    fn fill(&mut self, x: &[f32], columns: usize) -> bool {
        let Self { values, scales, stride, limit } = self;
        let rows = values.chunks_exact_mut(*stride).zip(scales.chunks_exact_mut(*stride / BLOCK));
        for ((values, scales), x) in rows.zip(x.chunks_exact(columns)) {
            let blocks = values.chunks_exact_mut(BLOCK).zip(x.chunks(BLOCK)).zip(scales);
            for ((values, x), scale) in blocks {
                let largest = largest(x);
                if largest == 0.0 {
                    continue;
                }
                if !REGULAR.contains(&largest) {
                    return false;
                }
                *scale = largest / *limit;
                let inverse = *limit / largest;
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
        let scales = self.scales.chunks_exact(self.stride / BLOCK);
        self.values.chunks_exact(self.stride).zip(scales)
    }

    /// The integers and the scales of each group of each row.
    fn groups(&self) -> impl Iterator<Item = (&[i16], &[f32])> {
        self.rows().flat_map(|(row, scales)| row.chunks(GROUP).zip(scales.chunks(GROUP / BLOCK)))
    }

    /// For each block of columns the sum of each row's integers, of which there are at most [`PANEL`].
    fn panel_sums(&self) -> Vec<[f32; PANEL]> {
        let mut all = vec![[0.0; PANEL]; self.stride / BLOCK];
        for (row, (values, _)) in self.rows().enumerate() {
            let blocks = all.iter_mut().zip(values.as_chunks::<BLOCK>().0);
            blocks.for_each(|(to, block)| to[row] = sum(block) as f32);
        }
        all
    }

    /// For each block of columns the scale of each row, of which there are at most [`PANEL`].
    fn panel_scales(&self) -> Vec<[f32; PANEL]> {
        let mut all = vec![[0.0; PANEL]; self.stride / BLOCK];
        for (row, (_, scales)) in self.rows().enumerate() {
            all.iter_mut().zip(scales).for_each(|(to, scale)| to[row] = *scale);
        }
        all
    }
}

/// Makes sums of integers those of what the integers stand for.
fn in_reals(sums: &mut [[f32; PANEL]], scales: &[[f32; PANEL]]) {
    let both = sums.as_flattened_mut().iter_mut().zip(scales.as_flattened());
    both.for_each(|(sum, scale)| *sum *= scale);
}

#[inline(always)]
fn sum(integers: &[i16]) -> i32 {
    integers.iter().map(|x| i32::from(*x)).sum()
}

/// Each row of `M` rows of `x`.
#[inline(always)]
fn rows<const BYTES: usize, const M: usize>(x: &[Group<BYTES>]) -> [&[Group<BYTES>]; M] {
    let each = x.len() / M;
    let mut rows: [&[Group<BYTES>]; M] = [&[]; M];
    for (m, row) in rows.iter_mut().enumerate() {
        *row = &x[m * each..][..each];
    }
    rows
}

/// Matmul that one thread computes at a time: see [`crate::kernels::Task`].
pub(crate) struct IntegerTask<'a, 'o> {
    pub(crate) weights: Rows<'a>,
    pub(crate) columns: usize,
    /// Offset of each block of weights: see [`Scales`].
    pub(crate) offsets: Option<Scales<'a>>,
    pub(crate) x: &'a Integers,
    pub(crate) out: Vec<&'o mut [f32]>,
    pub(crate) bias: Option<&'a [f32]>,
}

impl IntegerTask<'_, '_> {
    pub(crate) fn run(mut self) {
        let Integers { level, narrow, words, bytes } = self.x;
        let mut of_words = Vec::with_capacity(self.out.len());
        let mut of_bytes = Vec::with_capacity(self.out.len());
        for (out, narrow) in self.out.into_iter().zip(narrow) {
            if *narrow { of_bytes.push(out) } else { of_words.push(out) }
        }
        self.out = of_words;
        words.multiply(*level, &mut self);
        std::mem::swap(&mut self.out, &mut of_bytes);
        bytes.multiply(*level, &mut self);
        self.out.append(&mut of_bytes);
        if let Some(bias) = self.bias {
            for out in &mut self.out {
                out.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }

    /// Fills `wide` with some rows of weights at a time and multiplies them with each panel. Inlined, so that
    /// what it calls is compiled for the caller's instructions.
    #[inline(always)]
    fn each_tile<const TILE: usize, const BYTES: usize, W>(
        &mut self,
        panels: &[Panel<BYTES>],
        wide: &mut W,
        fill: impl Fn(&mut W, usize, Row<'_>, Option<Scales<'_>>),
        multiply: impl Fn(&W, &Panel<BYTES>) -> [[f32; PANEL]; TILE],
    ) {
        let count = self.out.first().map_or(0, |out| out.len());
        for first in (0..count).step_by(TILE) {
            let range: Range<usize> = first..count.min(first + TILE);
            for row in range.clone() {
                let blocks = self.columns / BLOCK;
                let offsets = self.offsets.map(|offsets| offsets.cut(row * blocks, blocks));
                fill(wide, row - first, self.weights.row(row, self.columns), offsets);
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
    use half::f16;

    use super::*;
    use crate::kernels::Scales;
    use crate::kernels::tests::{Stored, numbers};

    const ALL: [Activations; 2] = [Activations::Int16, Activations::Int8];

    /// `x` as integers with scales, one number after the other.
    fn rounded(x: &[f32], columns: usize, limit: f32) -> Vec<f64> {
        let rows = x.chunks_exact(columns).flat_map(|row| row.chunks(BLOCK));
        rows.flat_map(|block| {
            let largest = block.iter().fold(0f32, |most, x| most.max(x.abs()));
            let whole = move |x: &f32| (x * (limit / largest)).round_ties_even();
            block.iter().map(move |x| f64::from(whole(x)) * f64::from(largest / limit))
        })
        .collect()
    }

    #[test]
    fn every_level_multiplies_the_rounded_numbers() {
        for columns in [1, 7, 32, 96, 128, 160, 416, 768, 1056] {
            for rows in [1, 6, 13] {
                for stored in Stored::all(rows, columns) {
                    for count in [1, 2, 3, 4, 5, 9, 37] {
                        for activations in ALL {
                            check(activations, &stored, [count, rows, columns]);
                        }
                    }
                }
            }
        }
    }

    fn check(activations: Activations, stored: &Stored, [count, rows, columns]: [usize; 3]) {
        let (weights, x, bias) = (stored.rows(), numbers(count * columns, 5), numbers(rows, 19));
        let limit = match rounding(weights, activations) {
            Some(Rounding::Words) => LIMIT,
            Some(_) => f32::from(i8::MAX),
            None => {
                let none = integers(activations, weights, columns, &x, &Team::Alone).is_none();
                return assert!(none);
            }
        };
        let integers = rounded(&x, columns, limit);
        // Elements are up to 1, and half a step off.
        let step = f64::from(0.51 / limit);
        assert!(x.iter().zip(&integers).all(|(x, y)| (f64::from(*x) - y).abs() <= step));
        let mut expected = Vec::with_capacity(count * rows);
        for (m, x) in integers.chunks_exact(columns).enumerate() {
            for (n, bias) in bias.iter().enumerate() {
                let terms =
                    x.iter().enumerate().map(|(k, x)| x * stored.value(columns, n * columns + k));
                let sum = |(sum, size): (f64, f64), term: f64| (sum + term, size + term.abs());
                expected.push((m, n, terms.fold((f64::from(*bias), 1.0), sum)));
            }
        }
        for level in Level::found() {
            let made =
                Integers::new(level, activations, weights, columns, &x, &Team::Alone).unwrap();
            let mut out = vec![f32::NAN; count * rows];
            let out_rows = out.chunks_exact_mut(rows).collect();
            let offsets = stored.offsets();
            IntegerTask { weights, columns, offsets, x: &made, out: out_rows, bias: Some(&bias) }
                .run();
            for (y, (m, n, (expected, size))) in out.iter().zip(&expected) {
                let off = (f64::from(*y) - expected).abs();
                let shape = [count, rows, columns];
                assert!(
                    off <= 1e-6 * size,
                    "{level:?}, {activations:?}, {shape:?}, {m}, {n}: {y}, {expected}"
                );
            }
        }
    }

    #[test]
    fn rows_with_outliers_become_words_beside_four_bits() {
        let (rows, columns) = (6, 256);
        for stored in Stored::all(rows, columns) {
            let (weights, offsets) = (stored.rows(), stored.offsets());
            for count in [1, 3, 5, 40] {
                let mut x = numbers(count * columns, 5);
                let steep = |row: usize| row % 3 == 1;
                for row in (0..count).filter(|row| steep(*row)) {
                    x[row * columns + 40 + row] = 900.0;
                }
                for level in Level::found() {
                    let run = |activations| {
                        let team = Team::Alone;
                        let x = Integers::new(level, activations, weights, columns, &x, &team)?;
                        let mut out = vec![f32::NAN; count * rows];
                        let rows = out.chunks_exact_mut(rows).collect();
                        let x = &x;
                        IntegerTask { weights, columns, offsets, x, out: rows, bias: None }.run();
                        Some(out)
                    };
                    let Some(auto) = run(Activations::Auto) else { continue };
                    let [words, bytes] = ALL.map(|to| run(to).unwrap());
                    for (row, auto) in auto.chunks_exact(rows).enumerate() {
                        let wide = steep(row) || !matches!(weights, Rows::I4(..));
                        let [same, other] = if wide { [&words, &bytes] } else { [&bytes, &words] };
                        let of = |all: &[f32]| all[row * rows..][..rows].to_vec();
                        let far = |a: &[f32], b: Vec<f32>| {
                            a.iter().zip(b).any(|(a, b)| (a - b).abs() > 1e-5 * a.abs().max(1.0))
                        };
                        assert!(!far(auto, of(same)), "{level:?}, {count}, {row}");
                        assert!(far(auto, of(other)), "{level:?}, {count}, {row}");
                    }
                }
            }
        }
    }

    #[test]
    fn all_of_several_rows_become_words_where_half_are_steep() {
        let (count, rows, columns) = (40, 6, 256);
        let mut x = numbers(count * columns, 5);
        x.iter_mut().skip(40).step_by(2 * columns).for_each(|x| *x = 900.0);
        for stored in Stored::all(rows, columns) {
            let (weights, offsets) = (stored.rows(), stored.offsets());
            for level in Level::found() {
                let run = |activations| {
                    let team = Team::Alone;
                    let x = Integers::new(level, activations, weights, columns, &x, &team)?;
                    let mut out = vec![f32::NAN; count * rows];
                    let outs = out.chunks_exact_mut(rows).collect();
                    IntegerTask { weights, columns, offsets, x: &x, out: outs, bias: None }.run();
                    Some(out)
                };
                assert_eq!(run(Activations::Auto), run(Activations::Int16), "{level:?}");
            }
        }
    }

    /// Root mean square errors of matmuls whose `x` has one large column of 128, which weighs `seen`: in integers, and
    /// with `x` rounded to f16 and multiplied exactly.
    fn errors(level: Level, large: f32, seen: i8) -> [f64; 2] {
        let (rows, columns) = (64, 128);
        let mut w: Vec<i8> = numbers(rows * columns, 3).iter().map(|w| (w * 127.0) as i8).collect();
        w.iter_mut().skip(40).step_by(columns).for_each(|w| *w = seen);
        let mut x = numbers(columns, 5);
        x[40] = large;
        let scales = vec![1.0; rows];
        let weights = Rows::I8(&w, Scales::F32(&scales));
        let integers = Integers::new(level, Activations::Int16, weights, columns, &x, &Team::Alone);
        let mut out = vec![f32::NAN; rows];
        let x_made = integers.unwrap();
        let out_rows = vec![out.as_mut_slice()];
        IntegerTask { weights, columns, offsets: None, x: &x_made, out: out_rows, bias: None }
            .run();
        let sum = |row: &[i8], value: &dyn Fn(f32) -> f64| -> f64 {
            row.iter().zip(&x).map(|(w, x)| f64::from(*w) * value(*x)).sum()
        };
        let mut squares = [0.0; 2];
        for (row, y) in w.chunks_exact(columns).zip(&out) {
            let exact = sum(row, &|x| f64::from(x));
            squares[0] += (f64::from(*y) - exact).powi(2);
            squares[1] += (sum(row, &|x| f16::from_f32(x).to_f64()) - exact).powi(2);
        }
        squares.map(|sum| (sum / rows as f64).sqrt())
    }

    #[test]
    fn a_large_column_costs_no_more_than_in_f16() {
        for level in Level::found() {
            // Also where no weight sees it, and the rounding of all other columns is the whole error.
            for (large, seen) in [(1.0, 90), (15.0, 0), (15.0, 90), (3000.3, 90)] {
                let [integers, f16] = errors(level, large, seen);
                assert!(integers <= f16, "{level:?}, {large}, {seen}: {integers} > {f16}");
            }
        }
    }

    #[test]
    fn numbers_that_have_no_scale_are_left_to_floats() {
        for stored in Stored::all(3, 64) {
            for (value, fits) in
                [(f32::NAN, false), (f32::INFINITY, false), (1e-38, false), (0.0, true)]
            {
                for (count, activations) in
                    ALL.map(|a| [(2, a), (11, a)]).as_flattened().iter().copied()
                {
                    let mut x = vec![0.0; count * 64];
                    x[70] = value;
                    let weights = stored.rows();
                    let narrow = rounding(weights, activations).is_some();
                    for level in Level::found() {
                        let made = Integers::new(level, activations, weights, 64, &x, &Team::Alone);
                        assert_eq!(made.is_some(), fits && narrow, "{level:?}, {value}");
                    }
                }
            }
        }
    }
}
