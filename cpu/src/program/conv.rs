//! Convolutions over rows whose channels are last.
//!
//! Nothing is collected into columns first: the elements that a filter sees lie in runs, and each of them is multiplied
//! with the weights of several outputs, for some positions at a time. Zeros around the input are in memory, so that a
//! filter sees them like anything else. Filters are small beside other weights, and f32.

#![expect(
    unsafe_code,
    reason = "loads without checks, which could panic and so would keep sums in memory"
)]

use std::array::from_fn;

use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, Simd, SimdOp};

/// Outputs whose weights lie beside each other, a multiple of a vector's lanes.
const BLOCK: usize = 16;
/// Positions that are computed at a time: with two or four vectors each, they fill the registers.
const TILE: usize = 6;
/// Positions that share the weights of some outputs while these are in the nearest cache.
const SHARED: usize = 4 * TILE;

/// The sizes of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ConvShape {
    pub(super) batch: usize,
    /// Rows and columns of the input, with the zeros around them.
    pub(super) input: [usize; 2],
    /// Channels of the input.
    pub(super) channels: usize,
    pub(super) output: [usize; 2],
    /// Channels of the output.
    pub(super) filters: usize,
    pub(super) groups: usize,
    pub(super) kernel: [usize; 2],
    pub(super) stride: [usize; 2],
    pub(super) dilation: [usize; 2],
}

impl ConvShape {
    /// Channels that a filter sees.
    fn inner(&self) -> usize {
        self.channels / self.groups
    }

    /// Elements that a filter sees.
    fn depth(&self) -> usize {
        self.kernel[0] * self.kernel[1] * self.inner()
    }

    /// Filters of a group.
    fn outer(&self) -> usize {
        self.filters / self.groups
    }

    /// A filter for each channel, which sees no other.
    fn is_depthwise(&self) -> bool {
        self.inner() == 1 && self.outer() == 1
    }

    /// Index of the first element that the filters see at position `at`.
    #[inline(always)]
    fn start(&self, at: usize) -> usize {
        let Self { input: [rows, columns], channels, output, stride, .. } = *self;
        let (place, column) = (at / output[1], at % output[1]);
        let (image, row) = (place / output[0], place % output[0]);
        ((image * rows + row * stride[0]) * columns + column * stride[1]) * channels
    }

    /// Elements of the output.
    pub(super) fn len(&self) -> usize {
        self.batch * self.output[0] * self.output[1] * self.filters
    }

    /// Multiplications.
    pub(super) fn work(&self) -> u64 {
        (self.len() as u64).saturating_mul(self.depth() as u64)
    }

    /// Filters `[filters, inner, rows, columns]` in the order in which [`Conv`] reads them: with depthwise ones
    /// `[rows, columns, channels]`, else for each group [`BLOCK`]s of filters, `[rows, columns, inner]` of each beside
    /// each other. The last block of a group is filled up with 0.
    pub(super) fn pack(&self, filters: &[f32]) -> Vec<f32> {
        let (inner, taps, outer) = (self.inner(), self.kernel[0] * self.kernel[1], self.outer());
        let depth = self.depth();
        if self.is_depthwise() {
            let mut packed = vec![0.0; filters.len()];
            for (channel, filter) in filters.chunks_exact(taps).enumerate() {
                let places = packed[channel..].iter_mut().step_by(self.filters);
                places.zip(filter).for_each(|(to, w)| *to = *w);
            }
            return packed;
        }
        let blocks = outer.div_ceil(BLOCK);
        let mut packed = vec![0.0; self.groups * blocks * depth * BLOCK];
        for (index, filter) in filters.chunks_exact(depth).enumerate() {
            let (group, place) = (index / outer, index % outer);
            let block = group * blocks + place / BLOCK;
            let to = &mut packed[block * depth * BLOCK..][..depth * BLOCK];
            for (channel, filter) in filter.chunks_exact(taps).enumerate() {
                for (tap, w) in filter.iter().enumerate() {
                    to[(tap * inner + channel) * BLOCK + place % BLOCK] = *w;
                }
            }
        }
        packed
    }
}

/// Some positions of the output, all filters of each.
pub(super) struct Conv<'a> {
    pub(super) shape: ConvShape,
    /// `[batch, rows, columns, channels]`
    pub(super) x: &'a [f32],
    /// Filters as [`ConvShape::pack`] leaves them.
    pub(super) filters: &'a [f32],
    pub(super) bias: Option<&'a [f32]>,
    /// The first position.
    pub(super) first: usize,
    /// Whole positions.
    pub(super) out: &'a mut [f32],
}

impl SimdOp for Conv<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        if self.shape.is_depthwise() {
            return self.depthwise();
        }
        // AVX2 alone has vectors of eight, and registers for two of them at each position.
        match isa.f32().len() {
            8 => self.full::<I, 2>(isa),
            _ => self.full::<I, 4>(isa),
        }
    }
}

impl Conv<'_> {
    #[inline(always)]
    fn depthwise(self) {
        let ConvShape { input, channels, kernel, dilation, .. } = self.shape;
        let Self { shape, x, filters, bias, first, out } = self;
        for (at, out) in out.chunks_exact_mut(channels).enumerate() {
            let start = shape.start(first + at);
            match bias {
                Some(bias) => out.copy_from_slice(bias),
                None => out.fill(0.0),
            }
            let mut taps = filters.chunks_exact(channels);
            for row in 0..kernel[0] {
                for column in 0..kernel[1] {
                    let seen = row * dilation[0] * input[1] + column * dilation[1];
                    let x = &x[start + seen * channels..][..channels];
                    let weights = taps.next().unwrap_or_default();
                    let pairs = out.iter_mut().zip(x).zip(weights);
                    pairs.for_each(|((y, x), w)| *y += x * w);
                }
            }
        }
    }

    #[inline(always)]
    fn full<I: Isa, const P: usize>(mut self, isa: I) {
        let ConvShape { filters, groups, .. } = self.shape;
        let (depth, outer) = (self.shape.depth(), self.shape.outer());
        let (blocks, width) = (outer.div_ceil(BLOCK), P * isa.f32().len());
        let count = self.out.len() / filters;
        for shared in (0..count).step_by(SHARED) {
            let end = count.min(shared + SHARED);
            for group in 0..groups {
                let weights = &self.filters[group * blocks * depth * BLOCK..];
                for column in (0..outer).step_by(width) {
                    let place = Place { group, column, weights };
                    let mut at = shared;
                    while at < end {
                        at += match end - at {
                            TILE.. => self.tile::<I, TILE, P>(isa, &place, at),
                            4.. => self.tile::<I, 4, P>(isa, &place, at),
                            2.. => self.tile::<I, 2, P>(isa, &place, at),
                            _ => self.tile::<I, 1, P>(isa, &place, at),
                        };
                    }
                }
            }
        }
    }

    /// `P` vectors of outputs at `M` positions from `at` on, and how many positions that are.
    #[inline(always)]
    fn tile<I: Isa, const M: usize, const P: usize>(
        &mut self,
        isa: I,
        place: &Place<'_>,
        at: usize,
    ) -> usize {
        let ops = isa.f32();
        let lanes = ops.len();
        let shape = self.shape;
        let ConvShape { input, channels, filters, groups, kernel, dilation, .. } = shape;
        let (inner, depth) = (shape.inner(), shape.depth());
        // Columns that follow each other are one run where all channels are seen.
        let (runs, run) = match groups == 1 && dilation[1] == 1 {
            true => (1, kernel[1] * inner),
            false => (kernel[1], inner),
        };
        let weights: [&[f32]; P] = from_fn(|part| {
            // Vectors behind the last block compute again what the last one does, and are not kept.
            let column = place.column + part * lanes;
            let last = shape.outer().div_ceil(BLOCK) * BLOCK - lanes;
            let column = column.min(last);
            let from = column / BLOCK * depth * BLOCK + column % BLOCK;
            &place.weights[from..from + (depth - 1) * BLOCK + lanes]
        });
        let starts: [usize; M] =
            from_fn(|m| shape.start(self.first + at + m) + place.group * inner);
        let mut sums = [[ops.zero(); P]; M];
        let mut k = 0;
        for row in 0..kernel[0] {
            for column in 0..runs {
                let seen = (row * dilation[0] * input[1] + column * dilation[1]) * channels;
                let x: [&[f32]; M] = from_fn(|m| &self.x[starts[m] + seen..][..run]);
                for step in 0..run {
                    let mut parts = [ops.zero(); P];
                    for (part, value) in parts.iter_mut().enumerate() {
                        // SAFETY: `k + step < depth`, and `weights` has `lanes` elements from each `BLOCK`th on.
                        *value =
                            unsafe { ops.load_ptr(weights[part].as_ptr().add((k + step) * BLOCK)) };
                    }
                    for m in 0..M {
                        // SAFETY: each run has `run` elements.
                        let factor = ops.splat(unsafe { *x[m].as_ptr().add(step) });
                        for part in 0..P {
                            sums[m][part] = ops.mul_add(factor, parts[part], sums[m][part]);
                        }
                    }
                }
                k += run;
            }
        }
        let from = place.group * shape.outer() + place.column;
        let count = (P * lanes).min(shape.outer() - place.column);
        for (m, sums) in sums.into_iter().enumerate() {
            let out = &mut self.out[(at + m) * filters + from..][..count];
            for (to, sum) in out.chunks_mut(lanes).zip(sums) {
                match to.len() == lanes {
                    true => ops.store(sum, to),
                    false => to.copy_from_slice(&sum.to_array().as_ref()[..to.len()]),
                }
            }
            if let Some(bias) = self.bias {
                out.iter_mut().zip(&bias[from..]).for_each(|(y, b)| *y += b);
            }
        }
        M
    }
}

/// Outputs of a group.
struct Place<'a> {
    group: usize,
    /// The first of them.
    column: usize,
    /// Weights of the group and of those behind it.
    weights: &'a [f32],
}

/// Zeros around each image of `x` `[batch, rows, columns, channels]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Padding {
    pub(super) batch: usize,
    pub(super) rows: usize,
    /// Elements of a row: columns times channels.
    pub(super) width: usize,
    /// Rows of zeros above and below.
    pub(super) around: [usize; 2],
    /// Zeros before and behind each row.
    pub(super) beside: [usize; 2],
}

impl Padding {
    /// Elements of a row with its zeros.
    pub(super) fn stride(&self) -> usize {
        self.beside[0] + self.width + self.beside[1]
    }

    /// Elements of the result.
    pub(super) fn len(&self) -> usize {
        self.batch * (self.around[0] + self.rows + self.around[1]) * self.stride()
    }

    /// The row of `x` that row `at` of the result holds, if it is not one of zeros.
    pub(super) fn source(&self, at: usize) -> Option<usize> {
        let height = self.around[0] + self.rows + self.around[1];
        let (image, row) = (at / height, at % height);
        let row = row.checked_sub(self.around[0]).filter(|row| *row < self.rows)?;
        Some(image * self.rows + row)
    }
}
