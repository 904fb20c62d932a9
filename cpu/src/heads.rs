//! Matmuls of what is computed, those of attention above all: nothing in them is stored, and rows are short.

#![expect(
    unsafe_code,
    reason = "loads without checks, which could panic and so would keep sums in memory"
)]

use std::array::from_fn;
use std::ops::Range;
use std::slice::ChunksExact;

use rten_simd::ops::Extend;
use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, Simd, SimdOp, f16};

use crate::kernels::{floats_of_i8, halves};

/// Vectors of a row of `out` that are summed at a time.
const WIDE: usize = 4;
/// The same where a processor has sixteen registers, as those with AVX2 do.
const NARROW: usize = 2;

/// `out = x · b`, where a row of `b` begins every `stride` elements and has at least as many elements as one of `out`.
/// Rows of `b` that all rows of `x` multiply with 0 are not read: those are the positions that attention masks, which
/// hold anything.
pub(crate) struct Columns<'a, 'o> {
    /// For each row of `out` a number for each row of `b`.
    pub(crate) x: &'a [f32],
    pub(crate) b: &'a [f32],
    pub(crate) stride: usize,
    /// The result is added to what is in `out`.
    pub(crate) add: bool,
    pub(crate) out: Vec<&'o mut [f32]>,
}

impl SimdOp for Columns<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let Self { x, b, stride, add, mut out } = self;
        let depth = x.len() / out.len().max(1);
        // Bits other than that of the sign, of all rows.
        let mut bits = vec![0u32; depth];
        for row in x.chunks_exact(depth.max(1)) {
            bits.iter_mut().zip(row).for_each(|(all, x)| *all |= x.abs().to_bits());
        }
        let masked = bits.contains(&0);
        let width = out.first().map_or(0, |row| row.len());
        let max = max_vectors(isa);
        let mut start = 0;
        while start < width {
            let whole = (width - start).div_ceil(isa.f32().len()).min(max);
            // One, two or four vectors: three are two and one.
            let vectors = 1 << whole.ilog2();
            let to = start..width.min(start + vectors * isa.f32().len());
            start = to.end;
            let b = &b[to.start.min(b.len())..];
            let masked = masked.then_some(&*bits);
            let block = Block { x, depth, b, stride, masked, add };
            block.eval(isa, vectors, &mut out, to);
        }
    }
}

/// Adds `x · b` to `out`, where `b` is int8 or f16 and a row of it has as many elements as one of `out`. It is for few
/// rows: `b` is read as it is stored, once for four of them, or for two with sixteen registers. Rows of `b` that all of
/// these multiply with 0 are not read.
pub(crate) struct StoredColumns<'a, 'o, T> {
    /// For each row of `out` a number for each row of `b`.
    pub(crate) x: &'a [f32],
    pub(crate) b: &'a [T],
    pub(crate) out: Vec<&'o mut [f32]>,
}

/// An element as it is stored.
pub(crate) trait Element: Copy {
    fn float(self) -> f32;

    /// Four vectors of f32, of as many elements.
    ///
    /// # Safety
    /// All of them may be read.
    unsafe fn floats<I: Isa>(isa: I, from: *const Self) -> [I::F32; 4];
}

/// Bytes between the elements of a cache that are read and those that are fetched from memory meanwhile. Few positions
/// end soon after.
const AHEAD: usize = 2048;

/// Has the processor fetch what comes after four vectors of f32, stored in `bytes` each.
#[inline(always)]
fn ahead<I: Isa, T>(isa: I, from: *const T, bytes: usize) {
    const LINE: usize = 64;
    for line in (0..4 * isa.f32().len() * bytes).step_by(LINE) {
        isa.i8().prefetch(from.wrapping_byte_add(AHEAD + line).cast());
    }
}

impl Element for i8 {
    fn float(self) -> f32 {
        f32::from(self)
    }

    #[inline(always)]
    unsafe fn floats<I: Isa>(isa: I, from: *const Self) -> [I::F32; 4] {
        ahead(isa, from, 1);
        // SAFETY: the contract of the trait.
        floats_of_i8(isa, unsafe { isa.i8().load_ptr(from) })
    }
}

impl Element for f16 {
    fn float(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    unsafe fn floats<I: Isa>(isa: I, from: *const Self) -> [I::F32; 4] {
        let ops = isa.f16();
        ahead(isa, from, 2);
        // SAFETY: the contract of the trait: a vector of f16 has the elements of two of f32.
        let [a, b] = unsafe { [ops.load_ptr(from), ops.load_ptr(from.add(ops.len()))] };
        [ops.extend_low(a), ops.extend_high(a), ops.extend_low(b), ops.extend_high(b)]
    }
}

impl<'a, 'o> StoredColumns<'a, 'o, f16> {
    /// The matmul over the bits of f16.
    pub(crate) fn of_halves(x: &'a [f32], b: &'a [u16], out: Vec<&'o mut [f32]>) -> Self {
        Self { x, b: halves(b), out }
    }
}

impl<T: Element> SimdOp for StoredColumns<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let Self { x, b, mut out } = self;
        let width = out.first().map_or(0, |row| row.len());
        let depth = x.len() / out.len().max(1);
        assert!(b.len() >= depth * width, "as many rows of b as there are numbers for them");
        let mut x = x.chunks_exact(depth.max(1));
        let fours = if max_vectors(isa) == WIDE { out.len() / 4 * 4 } else { 0 };
        let (fours, rest) = out.split_at_mut(fours);
        for out in fours.as_chunks_mut::<4>().0 {
            stored_rows(isa, &mut x, depth, b, out);
        }
        let (twos, rest) = rest.as_chunks_mut::<2>();
        for out in twos {
            stored_rows(isa, &mut x, depth, b, out);
        }
        for out in rest.as_chunks_mut::<1>().0 {
            stored_rows(isa, &mut x, depth, b, out);
        }
    }
}

/// The next `M` rows of [`StoredColumns`].
#[inline(always)]
fn stored_rows<I: Isa, T: Element, const M: usize>(
    isa: I,
    x: &mut ChunksExact<'_, f32>,
    depth: usize,
    b: &[T],
    out: &mut [&mut [f32]; M],
) {
    let ops = isa.f32();
    let (lanes, step, width) = (ops.len(), 4 * ops.len(), out[0].len());
    let x: [&[f32]; M] = from_fn(|_| &x.next().unwrap_or_default()[..depth]);
    let whole = width / step * step;
    for start in (0..whole).step_by(step) {
        let mut sums = [[ops.zero(); 4]; M];
        for at in 0..depth {
            let mut factors = [0f32; M];
            for m in 0..M {
                // SAFETY: each row has `depth` elements.
                factors[m] = unsafe { *x[m].as_ptr().add(at) };
            }
            if factors == [0.0; M] {
                continue;
            }
            // SAFETY: `b` has `depth` rows of `width` elements, and `start + step <= whole <= width`.
            let parts = unsafe { T::floats(isa, b.as_ptr().add(at * width + start)) };
            for m in 0..M {
                let factor = ops.splat(factors[m]);
                for part in 0..4 {
                    sums[m][part] = ops.mul_add(factor, parts[part], sums[m][part]);
                }
            }
        }
        for m in 0..M {
            let places = out[m][start..start + step].chunks_exact_mut(lanes);
            places.zip(sums[m]).for_each(|(to, sum)| ops.store(ops.add(sum, ops.load(to)), to));
        }
    }
    if whole == width {
        return;
    }
    for (row, b) in b.chunks_exact(width).take(depth).enumerate() {
        for m in 0..M {
            let factor = x[m][row];
            if factor != 0.0 {
                let rest = out[m][whole..].iter_mut().zip(&b[whole..]);
                rest.for_each(|(to, b)| *to += factor * b.float());
            }
        }
    }
}

/// `out = x · bᵀ`, where `b` is int8 or f16 and each row of it has as many elements as one of `x`. It is for few rows
/// of `x`: `b` is read as it is stored, once for two of them.
pub(crate) struct StoredRows<'a, 'o, T> {
    pub(crate) x: &'a [f32],
    pub(crate) b: &'a [T],
    /// Elements of a row of `x` and of `b`.
    pub(crate) columns: usize,
    /// Results: each has as many elements as `b` has rows.
    pub(crate) out: Vec<&'o mut [f32]>,
}

impl<'a, 'o> StoredRows<'a, 'o, f16> {
    /// The matmul over the bits of f16.
    pub(crate) fn of_halves(
        x: &'a [f32],
        b: &'a [u16],
        columns: usize,
        out: Vec<&'o mut [f32]>,
    ) -> Self {
        Self { x, b: halves(b), columns, out }
    }
}

impl<T: Element> SimdOp for StoredRows<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let Self { x, b, columns, mut out } = self;
        if columns == 0 {
            return out.iter_mut().for_each(|row| row.fill(0.0));
        }
        let mut x = x.chunks_exact(columns);
        let (twos, rest) = out.as_chunks_mut::<2>();
        for out in twos {
            stored_dots(isa, &mut x, b, columns, out);
        }
        for out in rest.as_chunks_mut::<1>().0 {
            stored_dots(isa, &mut x, b, columns, out);
        }
    }
}

/// The next `M` rows of [`StoredRows`], with some rows of `b` at a time, whose sums do not wait for each other.
#[inline(always)]
fn stored_dots<I: Isa, T: Element, const M: usize>(
    isa: I,
    x: &mut ChunksExact<'_, f32>,
    b: &[T],
    columns: usize,
    out: &mut [&mut [f32]; M],
) {
    const BESIDE: usize = 4;
    let ops = isa.f32();
    let (lanes, step) = (ops.len(), 4 * ops.len());
    let x: [&[f32]; M] = from_fn(|_| &x.next().unwrap_or_default()[..columns]);
    let (whole, count) = (columns / step * step, b.len() / columns);
    let last = count.saturating_sub(1);
    for first in (0..count).step_by(BESIDE) {
        // The last row comes again in the place of those that are not there.
        let rows: [usize; BESIDE] = from_fn(|n| (first + n).min(last) * columns);
        let mut sums = [[ops.zero(); BESIDE]; M];
        for start in (0..whole).step_by(step) {
            for n in 0..BESIDE {
                // SAFETY: each row has `columns` elements, and `start + step <= whole <= columns`.
                let parts = unsafe { T::floats(isa, b.as_ptr().add(rows[n] + start)) };
                for m in 0..M {
                    for (part, b) in parts.into_iter().enumerate() {
                        // SAFETY: as above.
                        let x = unsafe { ops.load_ptr(x[m].as_ptr().add(start + part * lanes)) };
                        sums[m][n] = ops.mul_add(x, b, sums[m][n]);
                    }
                }
            }
        }
        for m in 0..M {
            let to = out[m][first..].iter_mut().zip(rows).zip(sums[m]);
            for ((to, row), sum) in to {
                let rest = x[m][whole..].iter().zip(&b[row + whole..row + columns]);
                *to = rest.fold(ops.sum(sum), |sum, (x, b)| sum + x * b.float());
            }
        }
    }
}

/// `out = x · bᵀ`, where each row of `b` has as many elements as one of `x`.
pub(crate) struct Turned<'a, 'o> {
    pub(crate) x: &'a [f32],
    pub(crate) b: &'a [f32],
    /// Elements of a row of `x` and of `b`.
    pub(crate) columns: usize,
    /// Results: each has as many elements as `b` has rows.
    pub(crate) out: Vec<&'o mut [f32]>,
}

impl SimdOp for Turned<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let Self { x, b, columns, mut out } = self;
        let vectors = max_vectors(isa);
        let width = vectors * isa.f32().len();
        if columns == 0 {
            return out.iter_mut().for_each(|row| row.fill(0.0));
        }
        // Some rows of `b` beside each other. Where the last are fewer, what is left of those before computes nothing
        // that is kept.
        let mut turned = vec![0f32; columns * width];
        for (index, rows) in b.chunks(columns * width).enumerate() {
            for (place, row) in rows.chunks_exact(columns).enumerate() {
                let places = turned[place..].iter_mut().step_by(width);
                places.zip(row).for_each(|(to, b)| *to = *b);
            }
            let first = index * width;
            let to = first..first + rows.len() / columns;
            let block =
                Block { x, depth: columns, b: &turned, stride: width, masked: None, add: false };
            block.eval(isa, vectors, &mut out, to);
        }
    }
}

/// Vectors of a row that are summed at a time.
#[inline(always)]
fn max_vectors<I: Isa>(isa: I) -> usize {
    // AVX2 alone has vectors of eight.
    if isa.f32().len() == 8 { NARROW } else { WIDE }
}

/// Some columns of a matmul.
struct Block<'a> {
    x: &'a [f32],
    /// Elements of a row of `x`, and rows of `b`.
    depth: usize,
    /// From the first of the columns on.
    b: &'a [f32],
    /// From one row of `b` to the next.
    stride: usize,
    /// For each row of `b` 0 where it is left out, as it is only multiplied with 0.
    masked: Option<&'a [u32]>,
    /// Results are added to what is there.
    add: bool,
}

impl Block<'_> {
    /// Computes the elements `to` of each row, which `vectors` vectors hold: one, two or four.
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, vectors: usize, out: &mut [&mut [f32]], to: Range<usize>) {
        match vectors {
            1 => self.rows::<I, 1>(isa, out, to),
            2 => self.rows::<I, 2>(isa, out, to),
            _ => self.rows::<I, WIDE>(isa, out, to),
        }
    }

    #[inline(always)]
    fn rows<I: Isa, const P: usize>(&self, isa: I, out: &mut [&mut [f32]], to: Range<usize>) {
        let mut x = self.x.chunks_exact(self.depth.max(1));
        // Few vectors of a row leave registers for more rows, where a processor has 32.
        let eights = if P < WIDE && max_vectors(isa) == WIDE { out.len() / 8 * 8 } else { 0 };
        let (eights, out) = out.split_at_mut(eights);
        for out in eights.as_chunks_mut::<8>().0 {
            self.few::<I, 8, P>(isa, &mut x, out, to.clone());
        }
        let (fours, rest) = out.as_chunks_mut::<4>();
        for out in fours {
            self.few::<I, 4, P>(isa, &mut x, out, to.clone());
        }
        let (twos, rest) = rest.as_chunks_mut::<2>();
        for out in twos {
            self.few::<I, 2, P>(isa, &mut x, out, to.clone());
        }
        for out in rest.as_chunks_mut::<1>().0 {
            self.few::<I, 1, P>(isa, &mut x, out, to.clone());
        }
    }

    /// The next `M` rows.
    #[inline(always)]
    fn few<I: Isa, const M: usize, const P: usize>(
        &self,
        isa: I,
        x: &mut ChunksExact<'_, f32>,
        out: &mut [&mut [f32]; M],
        to: Range<usize>,
    ) {
        let ops = isa.f32();
        let lanes = ops.len();
        let x: [&[f32]; M] = from_fn(|_| &x.next().unwrap_or_default()[..self.depth]);
        // The last rows may end before the last vector does, and the ones before are followed by what is not kept.
        let inside = self.b.len().checked_sub(P * lanes).map_or(0, |last| last / self.stride + 1);
        let inside = inside.min(self.depth);
        let mut sums = [[ops.zero(); P]; M];
        let bits = self.masked.map(|bits| &bits[..self.depth]);
        for at in 0..self.depth {
            // SAFETY: there are `depth` of them.
            if bits.is_some_and(|bits| unsafe { *bits.get_unchecked(at) } == 0) {
                continue;
            }
            let mut factors = [0f32; M];
            for m in 0..M {
                // SAFETY: each row has `depth` elements.
                factors[m] = unsafe { *x[m].as_ptr().add(at) };
            }
            let mut parts = [ops.zero(); P];
            if at < inside {
                for (part, value) in parts.iter_mut().enumerate() {
                    // SAFETY: `at * stride + P * lanes` is within `b` for all rows that are inside.
                    *value = unsafe {
                        ops.load_ptr(self.b.as_ptr().add(at * self.stride + part * lanes))
                    };
                }
            } else {
                let row = self.b.get(at * self.stride..).unwrap_or_default();
                for (part, value) in parts.iter_mut().enumerate() {
                    *value = ops.load_pad(row.get(part * lanes..).unwrap_or_default()).0;
                }
            }
            for m in 0..M {
                let factor = ops.splat(factors[m]);
                for part in 0..P {
                    sums[m][part] = ops.mul_add(factor, parts[part], sums[m][part]);
                }
            }
        }
        for m in 0..M {
            let places = out[m][to.clone()].chunks_mut(lanes);
            for (to, sum) in places.zip(sums[m]) {
                match (to.len() == lanes, self.add) {
                    (true, true) => ops.store(ops.add(sum, ops.load(to)), to),
                    (true, false) => ops.store(sum, to),
                    (false, add) => {
                        let sum = if add { ops.add(sum, ops.load_pad(to).0) } else { sum };
                        to.copy_from_slice(&sum.to_array().as_ref()[..to.len()]);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::tests::numbers;

    /// Rows of `x`, of `b` and their elements: none is a multiple of what is computed at a time, or each is.
    const SHAPES: [[usize; 3]; 9] = [
        [9, 1, 1],
        [1, 5, 7],
        [11, 31, 33],
        [64, 64, 64],
        [37, 130, 48],
        [12, 65, 32],
        [10, 200, 2],
        [15, 7, 129],
        [2, 16, 80],
    ];

    /// `x[m] · b(k, n)`, summed as f64, is near `found`.
    fn near(found: &[f32], x: &[f32], [m, n, k]: [usize; 3], b: impl Fn(usize, usize) -> f32) {
        assert_eq!(found.len(), m * n);
        for (at, y) in found.iter().enumerate() {
            let row = &x[at / n * k..][..k];
            let terms =
                row.iter().enumerate().map(|(i, x)| f64::from(*x) * f64::from(b(i, at % n)));
            let (sum, size) = terms.fold((0.0, 1.0), |(sum, size), t| (sum + t, size + t.abs()));
            assert!((f64::from(*y) - sum).abs() <= 1e-6 * size, "{m} × {k} × {n}: {y}, not {sum}");
        }
    }

    #[test]
    fn matmuls_with_rows_at_odd_shapes() {
        for [m, n, k] in SHAPES {
            let (x, b) = (numbers(m * k, 3), numbers(n * k, 5));
            let mut found = vec![f32::NAN; m * n];
            let out = found.chunks_exact_mut(n).collect();
            Turned { x: &x, b: &b, columns: k, out }.dispatch();
            near(&found, &x, [m, n, k], |i, j| b[j * k + i]);
        }
    }

    #[test]
    fn matmuls_with_columns_at_odd_shapes() {
        for [m, n, k] in SHAPES {
            let (x, b) = (numbers(m * k, 3), numbers(n * k, 5));
            let mut found = vec![f32::NAN; m * n];
            let out = found.chunks_exact_mut(n).collect();
            Columns { x: &x, b: &b, stride: n, add: false, out }.dispatch();
            near(&found, &x, [m, n, k], |i, j| b[i * n + j]);
            // Some of the columns of a wider matrix, added to what is there.
            let (stride, first) = (n + 5, 3);
            let b = numbers(stride * k, 5);
            found.fill(1.0);
            let out = found.chunks_exact_mut(n).collect();
            Columns { x: &x, b: &b[first..], stride, add: true, out }.dispatch();
            found.iter_mut().for_each(|y| *y -= 1.0);
            near(&found, &x, [m, n, k], |i, j| b[first + i * stride + j]);
        }
    }

    #[test]
    fn stored_rows_are_added_at_odd_shapes() {
        for [m, n, k] in SHAPES {
            let x = numbers(m * k, 3);
            let mut found = vec![1.0; m * n];
            let b: Vec<i8> = (0..n * k).map(|at| (at * 37 % 255) as u8 as i8).collect();
            let mut turned = vec![f32::NAN; m * n];
            let out = turned.chunks_exact_mut(n).collect();
            StoredRows { x: &x, b: &b, columns: k, out }.dispatch();
            near(&turned, &x, [m, n, k], |i, j| f32::from(b[j * k + i]));
            let out = found.chunks_exact_mut(n).collect();
            StoredColumns { x: &x, b: &b, out }.dispatch();
            found.iter_mut().for_each(|y| *y -= 1.0);
            near(&found, &x, [m, n, k], |i, j| f32::from(b[i * n + j]));
            found.fill(0.0);
            let b: Vec<u16> =
                numbers(n * k, 5).into_iter().map(|b| f16::from_f32(b).to_bits()).collect();
            let out = turned.chunks_exact_mut(n).collect();
            StoredRows::of_halves(&x, &b, k, out).dispatch();
            near(&turned, &x, [m, n, k], |i, j| f16::from_bits(b[j * k + i]).to_f32());
            let out = found.chunks_exact_mut(n).collect();
            StoredColumns::of_halves(&x, &b, out).dispatch();
            near(&found, &x, [m, n, k], |i, j| f16::from_bits(b[i * n + j]).to_f32());
        }
    }

    #[test]
    fn what_is_masked_may_be_anything_and_nothing_else_may() {
        let [m, n, k] = [13, 37, 24];
        let (mut x, mut b) = (numbers(m * k, 3), numbers(n * k, 5));
        let masked = [0, 7, 23];
        for at in masked {
            x.iter_mut().skip(at).step_by(k).for_each(|x| *x = 0.0);
            b[at * n..][..n].fill(f32::NAN);
        }
        let columns = |b: &[f32]| {
            let mut found = vec![f32::INFINITY; m * n];
            let out = found.chunks_exact_mut(n).collect();
            Columns { x: &x, b, stride: n, add: false, out }.dispatch();
            found
        };
        near(
            &columns(&b),
            &x,
            [m, n, k],
            |i, j| if masked.contains(&i) { 0.0 } else { b[i * n + j] },
        );
        b[3 * n + 2] = f32::NAN;
        let found = columns(&b);
        assert!(found.iter().enumerate().all(|(at, y)| y.is_nan() == (at % n == 2)));
        // A key that holds no number spoils its own scores, also where it is multiplied with 0.
        let mut keys = numbers(n * k, 5);
        keys[5 * k] = f32::NAN;
        let mut found = vec![0.0; m * n];
        Turned { x: &x, b: &keys, columns: k, out: found.chunks_exact_mut(n).collect() }.dispatch();
        assert!(found.iter().enumerate().all(|(at, y)| y.is_nan() == (at % n == 5)));
    }
}
