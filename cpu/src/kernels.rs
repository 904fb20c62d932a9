//! Matmuls of f32 rows with rows of weights that stay as they are stored.
//!
//! `y[m][n] = Σ_k x[m][k] · w[n][k] + bias[n]`, summed in f32. A few rows of `x` are multiplied with the weights as
//! they come from memory, which is what bounds it. More rows of `x` share weights that are dequantized to f32 first, a
//! few rows at a time, so that they stay in the nearest cache. The vector instructions are those of `rten_simd`
//! (AVX-512, AVX2 with F16C and FMA, NEON, or plain code), chosen when the program runs.

#![expect(unsafe_code, reason = "sees the bits of f16 as the f16 of another crate")]

#[cfg(test)]
pub(crate) mod tests;

use std::array::from_fn;
use std::borrow::Cow;
use std::ops::Range;

use half::slice::{HalfBitsSliceExt as _, HalfFloatSliceExt as _};
use qhx_graph::super_blocks::{SUPER, places};
use qhx_types::quantized::{BLOCK, NIBBLE_ZERO};
use rten_simd::ops::{BitOps, Extend, IntOps, NumOps, ToFloat};
use rten_simd::{Isa, SimdOp, f16};

use crate::team::Team;

/// Weights of four bits in an i32.
const PACKED: usize = 8;
/// Rows of `x` up to which nothing is dequantized in advance.
pub(crate) const FEW: usize = 8;
/// Vectors of rows of `x` that are multiplied with dequantized weights at a time.
const SIDES: usize = 2;
/// Columns of weights that are dequantized at a time for up to [`SHORT`] rows of `x`: 12 KB of twelve rows, and 32 KB
/// of a panel, so that both lie in the nearest cache.
const SHORT_DEPTH: usize = 256;
/// The same for more rows, whose sums are read and written once for each part of the columns.
const DEPTH: usize = 512;
/// Rows of `x` that are few enough for shorter parts.
const SHORT: usize = 256;
/// From one dequantized row to the next. Powers of two would share the same sets of a cache.
const STRIDE: usize = DEPTH + 16;
/// Elements of a row that become parts of a panel at a time, so that these lie in the nearest cache.
const ARRANGED: usize = 64;

/// Rows of weights in one of the forms that are multiplied as they are.
#[derive(Clone, Copy)]
pub(crate) enum Rows<'a> {
    F32(&'a [f32]),
    /// Bits of f16.
    F16(&'a [u16]),
    /// int8, and a scale for each row.
    I8(&'a [i8], Scales<'a>),
    /// int8, and a scale for each [`BLOCK`].
    I8Blocks(&'a [i8], Scales<'a>),
    /// Four bits around 8, the first of two in the lower half of a byte, and a scale for each [`BLOCK`]. Eight of them
    /// are an i32 whose first byte is the lowest.
    I4(&'a [i32], Scales<'a>),
}

/// Some of the rows of `each` elements.
fn cut<'a, T>(all: &'a [T], rows: &Range<usize>, each: usize) -> &'a [T] {
    all.get(rows.start * each..rows.end * each).unwrap_or_default()
}

/// Scales of quantized weights, or their offsets: numbers that are added to the integers, in steps of a scale. Those of
/// [`Scales::Multiples`] are minima: reals that are added to the products of nibbles, from 0 on, with a scale.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Scales<'a> {
    F32(&'a [f32]),
    /// Bits of f16.
    F16(&'a [u16]),
    /// Multiples of [`SuperBlocks`](qhx_graph::super_blocks::SuperBlocks), which rows are made of.
    Multiples(Multiples<'a>),
}

/// Bits of the f16 of super-blocks, and the multiples of these for each block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Multiples<'a> {
    pub(crate) units: &'a [u16],
    pub(crate) multiples: &'a [u8],
    /// True for minima.
    pub(crate) minima: bool,
}

impl Multiples<'_> {
    /// Multiples of these blocks, which are whole super-blocks.
    #[inline(always)]
    fn of(self, blocks: Range<usize>) -> Self {
        let (first, last) = (blocks.start / SUPER, blocks.end / SUPER);
        let units = self.units.get(2 * first..2 * last).unwrap_or_default();
        let multiples = self.multiples.get(2 * SUPER * first..2 * SUPER * last).unwrap_or_default();
        Self { units, multiples, ..self }
    }

    #[inline]
    fn get(self, block: usize) -> f32 {
        let [unit, multiple] = places(block, self.minima);
        f16::from_bits(self.units[unit]).to_f32() * f32::from(self.multiples[multiple])
    }
}

impl<'a> Scales<'a> {
    #[inline]
    pub(crate) fn get(self, index: usize) -> f32 {
        match self {
            Self::F32(all) => all[index],
            Self::F16(all) => f16::from_bits(all[index]).to_f32(),
            Self::Multiples(all) => all.get(index),
        }
    }

    /// Those of some rows, which have `each`.
    pub(crate) fn part(self, rows: &Range<usize>, each: usize) -> Self {
        match self {
            Self::F32(all) => Self::F32(cut(all, rows, each)),
            Self::F16(all) => Self::F16(cut(all, rows, each)),
            Self::Multiples(all) => Self::Multiples(all.of(rows.start * each..rows.end * each)),
        }
    }

    /// Numbers from `start` on; of multiples whole super-blocks.
    #[inline(always)]
    pub(crate) fn cut(self, start: usize, count: usize) -> Self {
        match self {
            Self::F32(all) => Self::F32(&all[start..][..count]),
            Self::F16(all) => Self::F16(&all[start..][..count]),
            Self::Multiples(all) => Self::Multiples(all.of(start..start + count)),
        }
    }

    /// Writes as many as `to` has, which is all of them.
    pub(crate) fn copy(self, to: &mut [f32]) {
        match self {
            Self::F32(all) => to.copy_from_slice(all),
            Self::F16(all) => all.reinterpret_cast::<half::f16>().convert_to_f32_slice(to),
            Self::Multiples(Multiples { units, multiples, minima }) => {
                let units = units.as_chunks::<2>().0.iter().map(|unit| unit[usize::from(minima)]);
                let halves = multiples.as_chunks::<{ SUPER }>().0.as_chunks::<2>().0;
                let all = to.as_chunks_mut::<{ SUPER / 2 }>().0.as_chunks_mut::<2>().0;
                for ((to, halves), unit) in all.iter_mut().zip(halves).zip(units) {
                    let unit = f16::from_bits(unit).to_f32();
                    for (to, half) in to.iter_mut().zip(halves) {
                        let of_kind = &half.as_chunks::<{ SUPER / 2 }>().0[usize::from(minima)];
                        to.iter_mut().zip(of_kind).for_each(|(to, n)| *to = f32::from(*n) * unit);
                    }
                }
            }
        }
    }

    /// Writes what these offsets add to the reals of blocks with such scales.
    #[inline(always)]
    pub(crate) fn shifts(self, scales: &[f32], to: &mut [f32]) {
        self.copy(to);
        let both = to.iter_mut().zip(scales);
        match self {
            Self::Multiples(..) => {
                both.for_each(|(to, scale)| *to += f32::from(NIBBLE_ZERO) * scale)
            }
            Self::F32(_) | Self::F16(_) => both.for_each(|(to, scale)| *to *= scale),
        }
    }
}

impl<'a> Rows<'a> {
    /// Some of the rows, which have n columns.
    pub(crate) fn part(self, rows: &Range<usize>, columns: usize) -> Self {
        let blocks = columns / BLOCK;
        match self {
            Self::F32(w) => Self::F32(cut(w, rows, columns)),
            Self::F16(w) => Self::F16(cut(w, rows, columns)),
            Self::I8(w, of) => Self::I8(cut(w, rows, columns), of.part(rows, 1)),
            Self::I8Blocks(w, of) => Self::I8Blocks(cut(w, rows, columns), of.part(rows, blocks)),
            Self::I4(w, of) => Self::I4(cut(w, rows, columns / PACKED), of.part(rows, blocks)),
        }
    }

    /// Address of the first element, and the bits of each.
    fn elements(self) -> (*const i8, usize) {
        match self {
            Self::F32(w) => (w.as_ptr().cast(), 32),
            Self::F16(w) => (w.as_ptr().cast(), 16),
            Self::I8(w, _) | Self::I8Blocks(w, _) => (w.as_ptr(), 8),
            Self::I4(w, _) => (w.as_ptr().cast(), 4),
        }
    }

    #[inline(always)]
    pub(crate) fn row(self, index: usize, columns: usize) -> Row<'a> {
        fn cut<T>(all: &[T], index: usize, each: usize) -> &[T] {
            &all[index * each..][..each]
        }
        match self {
            Self::F32(w) => Row::F32(cut(w, index, columns)),
            Self::F16(w) => Row::F16(cut(w, index, columns)),
            Self::I8(w, scales) => Row::I8(cut(w, index, columns), scales.get(index)),
            Self::I8Blocks(w, scales) => {
                let blocks = columns / BLOCK;
                Row::I8Blocks(cut(w, index, columns), scales.cut(index * blocks, blocks))
            }
            Self::I4(w, scales) => {
                let blocks = columns / BLOCK;
                Row::I4(cut(w, index, columns / PACKED), scales.cut(index * blocks, blocks))
            }
        }
    }
}

/// One of [`Rows`].
#[derive(Clone, Copy)]
pub(crate) enum Row<'a> {
    F32(&'a [f32]),
    F16(&'a [u16]),
    I8(&'a [i8], f32),
    I8Blocks(&'a [i8], Scales<'a>),
    I4(&'a [i32], Scales<'a>),
}

/// Matmul that one thread computes at a time.
pub(crate) struct Task<'a, 'o> {
    pub(crate) weights: Rows<'a>,
    /// Elements of a row of weights, and of `x`; with four bits a multiple of [`BLOCK`].
    pub(crate) columns: usize,
    /// Rows as [`Arrange`] leaves them, as many as `out` has.
    pub(crate) x: &'a [f32],
    /// Results: each has as many elements as there are rows of weights.
    pub(crate) out: Vec<&'o mut [f32]>,
    /// Bias: one for each row of weights.
    pub(crate) bias: Option<&'a [f32]>,
}

impl SimdOp for Task<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(mut self, isa: I) {
        let stride = stride(isa, self.weights, self.columns);
        match self.out.len() {
            0 => {}
            1..=FEW => few(isa, &mut self, stride),
            // AVX2 has sixteen registers, which hold the sums of six rows and their factors.
            _ if isa.f32().len() == 8 => several::<I, 6>(isa, &mut self, stride),
            _ => several::<I, 12>(isa, &mut self, stride),
        }
    }
}

/// Brings rows of `columns` elements into the order in which the matmuls with `weights` read them.
///
/// With four bits the lanes of a vector hold eight weights each. In each group of eight times `lanes` elements the
/// elements of the lanes' first weights come first, then those of the second ones, and so on. The last group of a row
/// is filled up with 0. More than [`FEW`] rows become panels: the first element of each of some rows, then their
/// second elements, and so on. The last panel is filled up with rows of 0.
pub(crate) struct Arrange<'a, 't> {
    pub(crate) weights: Rows<'a>,
    pub(crate) columns: usize,
    pub(crate) x: &'a [f32],
    /// Threads that make the panels.
    pub(crate) team: &'t Team,
}

impl<'a> SimdOp for Arrange<'a, '_> {
    type Output = Cow<'a, [f32]>;

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) -> Self::Output {
        let Self { weights, columns, x, team } = self;
        let stride = stride(isa, weights, columns);
        let x = match weights {
            Rows::I4(..) => Cow::Owned(by_lanes(isa.i32().len(), stride, columns, x)),
            _ => Cow::Borrowed(x),
        };
        if x.len() / stride <= FEW {
            return x;
        }
        let width = SIDES * isa.f32().len();
        let mut panels = vec![0f32; (x.len() / stride).next_multiple_of(width) * stride];
        team.parts(&mut panels, stride * width, |at, panel| {
            let rows = &x[at.min(x.len())..];
            ToPanel { rows, columns: stride, width, panel }.dispatch();
        });
        Cow::Owned(panels)
    }
}

/// Panel of up to `width` rows, which [`Arrange`] describes. It was filled with 0.
struct ToPanel<'a, 'o> {
    rows: &'a [f32],
    columns: usize,
    width: usize,
    panel: &'o mut [f32],
}

impl SimdOp for ToPanel<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let Self { rows, columns, width, panel } = self;
        let mut memory = [[0f32; 4]; ARRANGED];
        for (start, part) in panel.chunks_mut(ARRANGED * width).enumerate() {
            let depth = part.len() / width;
            for (at, rows) in rows.chunks(4 * columns).take(width / 4).enumerate() {
                let rows = &rows[start * ARRANGED..];
                if rows.len() > 3 * columns {
                    let beside = &mut memory[..depth];
                    interleave(rows, columns, beside);
                    let to = part.chunks_exact_mut(width).zip(beside);
                    to.for_each(|(to, four)| to[4 * at..][..4].copy_from_slice(four));
                } else {
                    for (place, row) in rows.chunks(columns).enumerate() {
                        let places = part[4 * at + place..].iter_mut().step_by(width);
                        places.zip(row).for_each(|(to, x)| *to = *x);
                    }
                }
            }
        }
    }
}

/// The first elements of four rows, of which one begins every `stride` elements, then their second elements, and so on.
#[inline(always)]
fn interleave(rows: &[f32], stride: usize, to: &mut [[f32; 4]]) {
    let count = to.len();
    let (a, b) = (&rows[..count], &rows[stride..][..count]);
    let (c, d) = (&rows[2 * stride..][..count], &rows[3 * stride..][..count]);
    for at in 0..count {
        to[at] = [a[at], b[at], c[at], d[at]];
    }
}

#[inline(always)]
fn by_lanes(lanes: usize, stride: usize, columns: usize, x: &[f32]) -> Vec<f32> {
    let mut out = vec![0f32; x.len() / columns * stride];
    let rows = out.chunks_exact_mut(stride).zip(x.chunks_exact(columns));
    for (out, x) in rows {
        let groups = out.chunks_exact_mut(PACKED * lanes).zip(x.chunks(PACKED * lanes));
        for (out, x) in groups {
            for (lane, x) in x.chunks(PACKED).enumerate() {
                x.iter().enumerate().for_each(|(place, x)| out[place * lanes + lane] = *x);
            }
        }
    }
    out
}

/// From one row of an arranged `x` to the next.
#[inline(always)]
fn stride<I: Isa>(isa: I, weights: Rows<'_>, columns: usize) -> usize {
    match weights {
        Rows::I4(..) => columns.next_multiple_of(PACKED * isa.i32().len()),
        _ => columns,
    }
}

/// Adds the products of the offsets of weights with the sums of blocks of `x`:
/// `Σ_b offset_b · scale_b · Σ_{k in b} x_k`, or of their minima ([`Scales::shifts`]).
pub(crate) struct AddOffsets<'a, 'o> {
    pub(crate) weights: Rows<'a>,
    pub(crate) offsets: Scales<'a>,
    /// Sums of each block, for each row of `out`.
    pub(crate) sums: &'a [f32],
    pub(crate) out: Vec<&'o mut [f32]>,
}

impl SimdOp for AddOffsets<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let Self { weights, offsets, sums, mut out } = self;
        let (Rows::I8Blocks(_, scales) | Rows::I4(_, scales)) = weights else { return };
        let blocks = sums.len() / out.len().max(1);
        let [mut shifts, mut factors] = [vec![0.0; blocks], vec![0.0; blocks]];
        let count = out.first().map_or(0, |out| out.len());
        for row in 0..count {
            scales.cut(row * blocks, blocks).copy(&mut factors);
            offsets.cut(row * blocks, blocks).shifts(&factors, &mut shifts);
            for (out, sums) in out.iter_mut().zip(sums.chunks_exact(blocks.max(1))) {
                let [[sum]] = tile(isa, [sums], [&shifts]);
                out[row] += sum;
            }
        }
    }
}

/// A row of weights as f32, which are not of four bits.
pub(crate) struct DequantizeRow<'a, 'o> {
    pub(crate) weights: Rows<'a>,
    /// Elements of a row.
    pub(crate) columns: usize,
    pub(crate) row: usize,
    pub(crate) to: &'o mut [f32],
}

impl SimdOp for DequantizeRow<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let Self { weights, columns, row, to } = self;
        dequantize(isa, weights, columns, row, 0, &mut [], to);
    }
}

/// A few rows of `x`, with the weights as they are stored.
#[inline(always)]
fn few<I: Isa>(isa: I, task: &mut Task<'_, '_>, stride: usize) {
    let Task { weights, columns, x, ref mut out, .. } = *task;
    let count = out.first().map_or(0, |out| out.len());
    let mut factors = vec![0f32; columns / BLOCK];
    let mut spread = vec![0f32; stride / PACKED];
    for (row, n) in (0..count).enumerate() {
        let row = weights.row(row, columns);
        if let Row::I8Blocks(_, scales) | Row::I4(_, scales) = row {
            scales.copy(&mut factors);
        }
        let factors = match row {
            Row::I4(..) => {
                fill(&mut spread, factors.iter().copied());
                &spread
            }
            _ => &factors,
        };
        // The row is in the nearest cache when the next four come.
        for (out, x) in out.chunks_mut(4).zip(x.chunks(4 * stride)) {
            match out {
                [a] => dots(isa, row, factors, x, n, [a]),
                [a, b] => dots(isa, row, factors, x, n, [a, b]),
                [a, b, c] => dots(isa, row, factors, x, n, [a, b, c]),
                [a, b, c, d] => dots(isa, row, factors, x, n, [a, b, c, d]),
                _ => {}
            }
        }
    }
    if let Some(bias) = task.bias {
        for out in &mut task.out {
            out.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
    }
}

/// Element `n` of each `out` becomes the product of its row of `x` with a row of weights. `factors` has the scales of
/// blocks, those of four bits as [`fill`] leaves them.
#[inline(always)]
fn dots<I: Isa, const M: usize>(
    isa: I,
    row: Row<'_>,
    factors: &[f32],
    x: &[f32],
    n: usize,
    out: [&mut &mut [f32]; M],
) {
    let stride = x.len() / M;
    let x: [&[f32]; M] = from_fn(|m| &x[m * stride..][..stride]);
    let sums = match row {
        Row::F32(w) => tile(isa, x, [w]).map(|[sum]| sum),
        Row::F16(w) => dots_f16(isa, x, halves(w)),
        Row::I8(w, scale) => dots_i8::<I, M, false>(isa, x, w, &[]).map(|sum| sum * scale),
        Row::I8Blocks(w, _) => dots_i8::<I, M, true>(isa, x, w, factors),
        Row::I4(w, _) => dots_i4(isa, x, w, factors),
    };
    out.into_iter().zip(sums).for_each(|(out, sum)| out[n] = sum);
}

/// Several rows of `x` in panels, with `N` rows of weights at a time that are dequantized first.
#[inline(always)]
fn several<I: Isa, const N: usize>(isa: I, task: &mut Task<'_, '_>, columns: usize) {
    let ops = isa.f32();
    let (lanes, width) = (ops.len(), SIDES * ops.len());
    let count = task.out.first().map_or(0, |out| out.len());
    let most = if task.out.len() <= SHORT { SHORT_DEPTH } else { DEPTH };
    let mut wide = vec![0f32; N * STRIDE];
    let mut spread = vec![0f32; columns / PACKED];
    let mut sums = vec![0f32; task.out.len().next_multiple_of(width) * N];
    let mut beside = vec![[0f32; 4]; N / 4 * width];
    let (elements, bits) = task.weights.elements();
    let bytes = N * bits / 8;
    // Bytes of the next rows that each panel has fetched from memory for each column, which comes from there while it
    // computes.
    let share = bytes.div_ceil(task.out.len().div_ceil(width));
    for first in (0..count).step_by(N) {
        let rows = N.min(count - first);
        let next = elements.wrapping_add((first + N) * task.columns * bits / 8);
        sums.fill(0.0);
        for start in (0..columns).step_by(most) {
            let depth = most.min(columns - start);
            for (row, to) in wide.chunks_exact_mut(STRIDE).take(rows).enumerate() {
                let (row, to) = (first + row, &mut to[..depth]);
                dequantize(isa, task.weights, task.columns, row, start, &mut spread, to);
            }
            let panels = task.x.chunks_exact(columns * width).zip(sums.chunks_exact_mut(N * width));
            for (index, (x, sums)) in panels.enumerate() {
                let x = &x[start * width..][..depth * width];
                let step = if index * share < bytes { share } else { 0 };
                let ahead = next.wrapping_add(start * bytes + index * share * depth);
                // The last rows may be few enough for one side.
                match task.out.len() - index * width <= lanes {
                    true => panel::<I, N, 1>(isa, x, &wide, sums, (ahead, step)),
                    false => panel::<I, N, SIDES>(isa, x, &wide, sums, (ahead, step)),
                }
            }
        }
        for (outs, sums) in task.out.chunks_mut(width).zip(sums.chunks_exact_mut(N * width)) {
            if let Some(bias) = task.bias {
                for (sums, b) in sums.chunks_exact_mut(width).zip(&bias[first..]) {
                    // Plain code became gathers over the rows.
                    let sums = sums.chunks_exact_mut(lanes);
                    sums.for_each(|to| ops.store(ops.add(ops.load(to), ops.splat(*b)), to));
                }
            }
            let whole = rows / 4 * 4;
            for (beside, sums) in beside.chunks_exact_mut(width).zip(sums.chunks_exact(4 * width)) {
                interleave(sums, width, beside);
            }
            // All of a row at once: rows may share a set of the nearest cache.
            for (m, out) in outs.iter_mut().enumerate() {
                let (fours, rest) = out[first..first + rows].as_chunks_mut::<4>();
                fours.iter_mut().zip(beside[m..].iter().step_by(width)).for_each(|(y, x)| *y = *x);
                let rest = rest.iter_mut().enumerate();
                rest.for_each(|(n, y)| *y = sums[(whole + n) * width + m]);
            }
        }
    }
}

/// Adds the products of a panel of `x`, or of its first `S` sides, with `N` dequantized rows to `sums`, which has a row
/// for each of them. What lies `ahead` is fetched from memory meanwhile, `step` bytes for each column.
#[inline(always)]
fn panel<I: Isa, const N: usize, const S: usize>(
    isa: I,
    x: &[f32],
    wide: &[f32],
    sums: &mut [f32],
    (ahead, step): (*const i8, usize),
) {
    let ops = isa.f32();
    let lanes = ops.len();
    let width = SIDES * lanes;
    let depth = x.len() / width;
    let wide: [&[f32]; N] = from_fn(|n| &wide[n * STRIDE..][..depth]);
    let mut all = [[ops.zero(); S]; N];
    for (sum, from) in all.iter_mut().zip(sums.chunks_exact(width)) {
        for (sum, from) in sum.iter_mut().zip(from.chunks_exact(lanes)) {
            *sum = ops.load(from);
        }
    }
    // Checked loads could panic, which would keep the sums in memory.
    for at in 0..depth {
        isa.i8().prefetch(ahead.wrapping_add(at * step));
        let mut parts = [ops.zero(); S];
        for (side, part) in parts.iter_mut().enumerate() {
            // SAFETY: `x` has `depth` times `SIDES` vectors.
            *part = unsafe { ops.load_ptr(x.as_ptr().add(at * width + side * lanes)) };
        }
        for n in 0..N {
            // SAFETY: each row has `depth` elements.
            let factor = ops.splat(unsafe { *wide[n].as_ptr().add(at) });
            for side in 0..S {
                all[n][side] = ops.mul_add(parts[side], factor, all[n][side]);
            }
        }
    }
    for (sum, to) in all.iter().zip(sums.chunks_exact_mut(width)) {
        for (sum, to) in sum.iter().zip(to.chunks_exact_mut(lanes)) {
            ops.store(*sum, to);
        }
    }
}

/// `x[m] · w[n]` for all of them. All rows are equally long.
#[inline(always)]
fn tile<I: Isa, const M: usize, const N: usize>(
    isa: I,
    x: [&[f32]; M],
    w: [&[f32]; N],
) -> [[f32; N]; M] {
    let ops = isa.f32();
    let lanes = ops.len();
    let length = x[0].len();
    let whole = length / lanes * lanes;
    let (x, w) = (x.map(|x| &x[..length]), w.map(|w| &w[..length]));
    let mut sums = [[ops.zero(); N]; M];
    // Checked loads could panic, which would keep the sums in memory.
    for at in (0..whole).step_by(lanes) {
        // SAFETY: `at + lanes <= whole <= length`, which all rows have.
        let x = x.map(|x| unsafe { ops.load_ptr(x.as_ptr().add(at)) });
        for n in 0..N {
            // SAFETY: as above.
            let w = unsafe { ops.load_ptr(w[n].as_ptr().add(at)) };
            for m in 0..M {
                sums[m][n] = ops.mul_add(x[m], w, sums[m][n]);
            }
        }
    }
    // Loops, as closures would have the sums in memory.
    let mut products = [[0f32; N]; M];
    for m in 0..M {
        for n in 0..N {
            let rest = x[m][whole..].iter().zip(&w[n][whole..]);
            products[m][n] = rest.fold(ops.sum(sums[m][n]), |sum, (x, w)| sum + x * w);
        }
    }
    products
}

/// Bytes between the weights that are multiplied and those that are fetched from memory meanwhile. On Zen 5 a step took
/// 0.80 (int8), 0.87 (four bits) and 0.73 (f16) of the time with 6144 bytes that it took with 384, f16 with none.
pub(crate) const AHEAD: usize = 6144;

/// Has the processor fetch what comes [`AHEAD`] after element `at`. The next row lies behind this one, and a fetch of
/// what is not there does nothing.
#[inline(always)]
fn ahead<I: Isa, T>(isa: I, weights: &[T], at: usize) {
    isa.i8().prefetch(weights.as_ptr().wrapping_add(at).wrapping_byte_add(AHEAD).cast());
}

/// Each row of `x` is as long as `w`. Four rows of weights at a time took 1.8 times as long.
#[inline(always)]
fn dots_f16<I: Isa, const M: usize>(isa: I, x: [&[f32]; M], w: &[f16]) -> [f32; M] {
    let (ops, half) = (isa.f32(), isa.f16());
    let (lanes, step) = (ops.len(), half.len());
    let (whole, x) = (w.len() / step * step, x.map(|x| &x[..w.len()]));
    let mut sums = [[ops.zero(); 2]; M];
    // Not checked, as in `tile`.
    for at in (0..whole).step_by(step) {
        ahead(isa, w, at);
        // SAFETY: `at + step <= whole`, which is within `w`.
        let wide = unsafe { half.load_ptr(w.as_ptr().add(at)) };
        let wide = [half.extend_low(wide), half.extend_high(wide)];
        for m in 0..M {
            for part in 0..2 {
                // SAFETY: `at + 2 * lanes <= whole`, which is within each row.
                let x = unsafe { ops.load_ptr(x[m].as_ptr().add(at + part * lanes)) };
                sums[m][part] = ops.mul_add(x, wide[part], sums[m][part]);
            }
        }
    }
    let mut products = [0f32; M];
    for m in 0..M {
        let rest = x[m][whole..].iter().zip(&w[whole..]);
        let sum = ops.sum(ops.add(sums[m][0], sums[m][1]));
        products[m] = rest.fold(sum, |sum, (x, w)| sum + x * w.to_f32());
    }
    products
}

/// With a scale for each block, or without that of the row. Each row of `x` is as long as `w`.
#[inline(always)]
fn dots_i8<I: Isa, const M: usize, const BLOCKS: bool>(
    isa: I,
    x: [&[f32]; M],
    w: &[i8],
    scales: &[f32],
) -> [f32; M] {
    assert!(!BLOCKS || scales.len() == w.len() / BLOCK);
    let (ops, bytes) = (isa.f32(), isa.i8());
    let (lanes, step) = (ops.len(), bytes.len());
    let (whole, x) = (w.len() / step * step, x.map(|x| &x[..w.len()]));
    let mut sums = [[ops.zero(); 4]; M];
    // Not checked, as in `tile`.
    for at in (0..whole).step_by(step) {
        ahead(isa, w, at);
        // SAFETY: `at + step <= whole`, which is within `w`.
        let mut wide = floats_of_i8(isa, unsafe { bytes.load_ptr(w.as_ptr().add(at)) });
        if BLOCKS {
            for (part, wide) in wide.iter_mut().enumerate() {
                // SAFETY: the part begins within `w`, whose length is a multiple of a block's.
                let scale = unsafe { *scales.get_unchecked((at + part * lanes) / BLOCK) };
                *wide = ops.mul(*wide, ops.splat(scale));
            }
        }
        for m in 0..M {
            for part in 0..4 {
                // SAFETY: `at + 4 * lanes <= whole`, which is within each row.
                let x = unsafe { ops.load_ptr(x[m].as_ptr().add(at + part * lanes)) };
                sums[m][part] = ops.mul_add(x, wide[part], sums[m][part]);
            }
        }
    }
    let mut products = [0f32; M];
    for m in 0..M {
        let [a, b, c, d] = sums[m];
        let sum = ops.sum(ops.add(ops.add(a, b), ops.add(c, d)));
        let rest = x[m][whole..].iter().zip(&w[whole..]).enumerate();
        products[m] = rest.fold(sum, |sum, (at, (x, w))| {
            let scale = if BLOCKS { scales[(whole + at) / BLOCK] } else { 1.0 };
            sum + x * (f32::from(*w) * scale)
        });
    }
    products
}

/// A vector of int8 as four of f32.
#[inline(always)]
pub(crate) fn floats_of_i8<I: Isa>(isa: I, w: I::I8) -> [I::F32; 4] {
    let (bytes, words, ints) = (isa.i8(), isa.i16(), isa.i32());
    let (low, high) = (bytes.extend_low(w), bytes.extend_high(w));
    [words.extend_low(low), words.extend_high(low), words.extend_low(high), words.extend_high(high)]
        .map(|w| ints.to_float(w))
}

/// Writes each scale to the four lanes that hold its block. What is after the last keeps its 0.
fn fill(spread: &mut [f32], scales: impl Iterator<Item = f32>) {
    for (places, scale) in spread.as_chunks_mut::<4>().0.iter_mut().zip(scales) {
        *places = [scale; 4];
    }
}

/// The lanes at `at` of a row of weights of four bits: their first weights, their second ones, and so on.
#[inline(always)]
fn floats_of_i4<I: Isa>(isa: I, w: &[i32], at: usize) -> [I::F32; PACKED] {
    let ints = isa.i32();
    let w = match w.get(at..at + ints.len()) {
        Some(w) => ints.load(w),
        None => ints.load_pad(w.get(at..).unwrap_or_default()).0,
    };
    // Four bits around 8 become four bits of two's complement.
    const ZEROS: u8 = 0x11 * NIBBLE_ZERO.cast_unsigned();
    let w = ints.xor(w, ints.splat(i32::from_ne_bytes([ZEROS; 4])));
    // The weight comes to the upper end of its lane, and from there down with its sign.
    macro_rules! signed {
        ($($shift:literal),*) => {
            [$(ints.to_float(ints.shift_right::<28>(ints.shift_left::<$shift>(w)))),*]
        };
    }
    let [a, b, c, d, e, f, g] = signed!(28, 24, 20, 16, 12, 8, 4);
    [a, b, c, d, e, f, g, ints.to_float(ints.shift_right::<28>(w))]
}

/// `x` comes from [`Arrange`]; `scales` has one for each element of `w`, and 0 up to whole vectors.
#[inline(always)]
fn dots_i4<I: Isa, const M: usize>(isa: I, x: [&[f32]; M], w: &[i32], scales: &[f32]) -> [f32; M] {
    let ops = isa.f32();
    let lanes = ops.len();
    let vectors = scales.len() / lanes;
    let x = x.map(|x| &x[..vectors * lanes * PACKED]);
    let mut sums = [ops.zero(); M];
    // Not checked, as in `tile`.
    for at in (0..vectors).map(|index| index * lanes) {
        ahead(isa, w, at);
        let wide = floats_of_i4(isa, w, at);
        // SAFETY: `at + lanes <= vectors * lanes`, which is within the scales.
        let scales = unsafe { ops.load_ptr(scales.as_ptr().add(at)) };
        for m in 0..M {
            let load = |place: usize| {
                // SAFETY: `at + lanes <= vectors * lanes`, and each row is `PACKED` times as long.
                unsafe { ops.load_ptr(x[m].as_ptr().add(at * PACKED + place * lanes)) }
            };
            let mut part = ops.mul(load(0), wide[0]);
            for (place, wide) in wide.into_iter().enumerate().skip(1) {
                part = ops.mul_add(load(place), wide, part);
            }
            sums[m] = ops.mul_add(part, scales, sums[m]);
        }
    }
    let mut products = [0f32; M];
    for m in 0..M {
        products[m] = ops.sum(sums[m]);
    }
    products
}

/// Weights of a row from column `start` on as f32, in the order of [`Arrange`]. `spread` has room for the scales of a
/// row of four bits.
#[inline(always)]
fn dequantize<I: Isa>(
    isa: I,
    weights: Rows<'_>,
    columns: usize,
    row: usize,
    start: usize,
    spread: &mut [f32],
    to: &mut [f32],
) {
    let ops = isa.f32();
    let lanes = ops.len();
    let from = row * columns + start;
    match weights {
        Rows::F32(w) => {
            let w = &w[from..from + to.len()];
            let whole = to.len() / lanes * lanes;
            for at in (0..whole).step_by(lanes) {
                ops.store(ops.load(&w[at..at + lanes]), &mut to[at..at + lanes]);
            }
            to[whole..].copy_from_slice(&w[whole..]);
        }
        Rows::F16(w) => {
            let (half, w) = (isa.f16(), &halves(w)[from..from + to.len()]);
            let step = half.len();
            let whole = to.len() / step * step;
            for at in (0..whole).step_by(step) {
                let w = half.load(&w[at..at + step]);
                ops.store(half.extend_low(w), &mut to[at..at + lanes]);
                ops.store(half.extend_high(w), &mut to[at + lanes..at + step]);
            }
            let rest = to[whole..].iter_mut().zip(&w[whole..]);
            rest.for_each(|(to, w)| *to = w.to_f32());
        }
        Rows::I8(w, scales) | Rows::I8Blocks(w, scales) => {
            let (bytes, w) = (isa.i8(), &w[from..from + to.len()]);
            let blocks = matches!(weights, Rows::I8Blocks(..));
            let scale = |at: usize| scales.get(if blocks { (from + at) / BLOCK } else { row });
            let step = bytes.len();
            let whole = to.len() / step * step;
            for at in (0..whole).step_by(step) {
                let wide = floats_of_i8(isa, bytes.load(&w[at..at + step]));
                for (part, wide) in wide.into_iter().enumerate() {
                    let at = at + part * lanes;
                    ops.store(ops.mul(wide, ops.splat(scale(at))), &mut to[at..][..lanes]);
                }
            }
            let rest = to[whole..].iter_mut().zip(&w[whole..]).enumerate();
            rest.for_each(|(at, (to, w))| *to = f32::from(*w) * scale(whole + at));
        }
        Rows::I4(w, scales) => {
            let w = &w[row * columns / PACKED..][..columns / PACKED];
            let first = row * columns / BLOCK;
            fill(spread, (first..first + columns / BLOCK).map(|block| scales.get(block)));
            for (index, to) in to.chunks_exact_mut(PACKED * lanes).enumerate() {
                let at = start / PACKED + index * lanes;
                let factors = ops.load(&spread[at..at + lanes]);
                let wide = floats_of_i4(isa, w, at);
                for (to, wide) in to.chunks_exact_mut(lanes).zip(wide) {
                    ops.store(ops.mul(wide, factors), to);
                }
            }
        }
    }
}

/// The same bits as the type that `rten_simd` computes with.
pub(crate) fn halves(bits: &[u16]) -> &[f16] {
    const { assert!(size_of::<f16>() == 2 && align_of::<f16>() == 2) };
    // SAFETY: `f16` is a transparent u16, so that length, alignment and lifetime are those of `bits`.
    unsafe { std::slice::from_raw_parts(bits.as_ptr().cast(), bits.len()) }
}
