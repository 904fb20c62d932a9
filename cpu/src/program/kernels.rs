//! Arithmetic on single elements, rows and columns.
//!
//! Loops are compiled for the vector instructions of the processor, as [`SimdOp`] has them run. Exponentials and what
//! is made of them come from `rten_vecmath`.

use rten_simd::{Isa, SimdOp, SimdUnaryOp};
use rten_vecmath::{Erf, Exp, Sigmoid, Sin, Softmax, Tanh};

use super::view::Walk;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Max,
    Min,
}

/// `out = a ∘ b`, from element `at` of the whole result on.
pub(super) struct Pairs<'a> {
    pub(super) op: Binary,
    pub(super) walk: &'a Walk<2>,
    pub(super) at: usize,
    pub(super) a: &'a [f32],
    pub(super) b: &'a [f32],
    pub(super) out: &'a mut [f32],
}

impl SimdOp for Pairs<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        match self.op {
            Binary::Add => self.each(|a, b| a + b),
            Binary::Sub => self.each(|a, b| a - b),
            Binary::Mul => self.each(|a, b| a * b),
            Binary::Div => self.each(|a, b| a / b),
            // NaN stays.
            Binary::Max => self.each(|a, b| if a >= b || a.is_nan() { a } else { b }),
            Binary::Min => self.each(|a, b| if a <= b || a.is_nan() { a } else { b }),
        }
    }
}

impl Pairs<'_> {
    #[inline(always)]
    fn each(self, f: impl Fn(f32, f32) -> f32) {
        let Self { walk, at, a, b, out, .. } = self;
        let mut cursor = walk.cursor(at);
        for out in out.chunks_mut(walk.inner) {
            let n = out.len();
            let [from_a, from_b] = cursor.next();
            match walk.steps {
                [1, 1] => {
                    let (a, b) = (&a[from_a..][..n], &b[from_b..][..n]);
                    out.iter_mut().zip(a).zip(b).for_each(|((y, a), b)| *y = f(*a, *b));
                }
                [1, 0] => {
                    let (a, b) = (&a[from_a..][..n], b[from_b]);
                    out.iter_mut().zip(a).for_each(|(y, a)| *y = f(*a, b));
                }
                [0, 1] => {
                    let (a, b) = (a[from_a], &b[from_b..][..n]);
                    out.iter_mut().zip(b).for_each(|(y, b)| *y = f(a, *b));
                }
                [step_a, step_b] => {
                    for (index, y) in out.iter_mut().enumerate() {
                        *y = f(a[from_a + index * step_a], b[from_b + index * step_b]);
                    }
                }
            }
        }
    }
}

/// The same of i32, whose bits `out` gets. Results that do not fit wrap around.
pub(super) struct IntPairs<'a> {
    pub(super) op: Binary,
    pub(super) walk: &'a Walk<2>,
    pub(super) at: usize,
    pub(super) a: &'a [i32],
    pub(super) b: &'a [i32],
    pub(super) out: &'a mut [i32],
}

impl IntPairs<'_> {
    /// Computes them, or says that a divisor is 0.
    pub(super) fn run(self) -> Result<(), DividedByZero> {
        let f: fn(i32, i32) -> Option<i32> = match self.op {
            Binary::Add => |a, b| Some(a.wrapping_add(b)),
            Binary::Sub => |a, b| Some(a.wrapping_sub(b)),
            Binary::Mul => |a, b| Some(a.wrapping_mul(b)),
            Binary::Div => |a, b| (b != 0).then(|| a.wrapping_div(b)),
            Binary::Max => |a, b| Some(a.max(b)),
            Binary::Min => |a, b| Some(a.min(b)),
        };
        let mut cursor = self.walk.cursor(self.at);
        for out in self.out.chunks_mut(self.walk.inner) {
            let [from_a, from_b] = cursor.next();
            let [step_a, step_b] = self.walk.steps;
            for (index, y) in out.iter_mut().enumerate() {
                let (a, b) = (self.a[from_a + index * step_a], self.b[from_b + index * step_b]);
                *y = f(a, b).ok_or(DividedByZero)?;
            }
        }
        Ok(())
    }
}

/// An integer was to be divided by 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DividedByZero;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Unary {
    /// Only brings the elements into another order.
    Copy,
    Abs,
    Neg,
    Exp,
    Log,
    Sqrt,
    Reciprocal,
    Sigmoid,
    Sin,
    Tanh,
    Relu,
    Erf,
    /// To the i32 nearer to 0, whose bits the result holds.
    Truncate,
    Clip(f32, f32),
}

impl Unary {
    /// True if it takes many instructions for an element.
    pub(super) const fn is_long(self) -> bool {
        matches!(self, Self::Exp | Self::Log | Self::Sigmoid | Self::Sin | Self::Tanh | Self::Erf)
    }
}

/// `out = op(x)`, from element `at` of the whole result on.
pub(super) struct Singles<'a, T> {
    pub(super) op: Unary,
    pub(super) walk: &'a Walk<1>,
    pub(super) at: usize,
    pub(super) x: &'a [T],
    pub(super) out: &'a mut [f32],
}

impl<T: ToF32> SimdOp for Singles<'_, T> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let Self { op, walk, at, x, out } = self;
        let mut cursor = walk.cursor(at);
        for out in out.chunks_mut(walk.inner) {
            let [from] = cursor.next();
            match walk.steps {
                [1] => {
                    let x = &x[from..][..out.len()];
                    out.iter_mut().zip(x).for_each(|(y, x)| *y = x.to_f32());
                }
                [0] => out.fill(x[from].to_f32()),
                [step] => {
                    for (index, y) in out.iter_mut().enumerate() {
                        *y = x[from + index * step].to_f32();
                    }
                }
            }
        }
        match op {
            Unary::Copy => {}
            Unary::Abs => each(out, f32::abs),
            Unary::Neg => each(out, |x| -x),
            Unary::Sqrt => each(out, f32::sqrt),
            Unary::Reciprocal => each(out, |x| 1.0 / x),
            Unary::Relu => each(out, |x| if x < 0.0 { 0.0 } else { x }),
            Unary::Log => each(out, f32::ln),
            Unary::Clip(min, max) => each(out, |x| {
                let x = if x < min { min } else { x };
                if x > max { max } else { x }
            }),
            Unary::Truncate => each(out, |x| f32::from_bits((x as i32).cast_unsigned())),
            Unary::Exp => vectors(isa, Exp {}, out),
            Unary::Sigmoid => vectors(isa, Sigmoid {}, out),
            Unary::Sin => vectors(isa, Sin::new(), out),
            Unary::Tanh => vectors(isa, Tanh {}, out),
            Unary::Erf => vectors(isa, Erf {}, out),
        }
    }
}

#[inline(always)]
fn each(out: &mut [f32], f: impl Fn(f32) -> f32) {
    out.iter_mut().for_each(|x| *x = f(*x));
}

#[inline(always)]
fn vectors<I: Isa>(_: I, op: impl SimdUnaryOp<f32>, out: &mut [f32]) {
    op.map_mut(out);
}

/// Types that convert to f32.
pub(super) trait ToF32: Copy + Sync {
    fn to_f32(self) -> f32;
}

impl ToF32 for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl ToF32 for i8 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from(self)
    }
}

impl ToF32 for u8 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from(self)
    }
}

impl ToF32 for i32 {
    /// Rounds to the nearest, as `Cast` of ONNX does.
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self as f32
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reduction {
    Sum,
    Mean,
    Max,
    Min,
}

/// Columns of `[size, inner]` become one number each; there are as many matrices as `out` has times `inner`.
pub(super) struct Reduce<'a> {
    pub(super) op: Reduction,
    pub(super) x: &'a [f32],
    pub(super) size: usize,
    pub(super) inner: usize,
    pub(super) out: &'a mut [f32],
}

impl SimdOp for Reduce<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        match self.op {
            Reduction::Sum => self.all(0.0, |a, b| a + b),
            Reduction::Mean => {
                let Self { size, inner, .. } = self;
                let Self { x, out, .. } = self;
                Reduce { op: Reduction::Sum, x, size, inner, out: &mut *out }
                    .all(0.0, |a, b| a + b);
                out.iter_mut().for_each(|y| *y /= size as f32);
            }
            Reduction::Max => {
                self.all(f32::NEG_INFINITY, |a, b| if a >= b || a.is_nan() { a } else { b });
            }
            Reduction::Min => {
                self.all(f32::INFINITY, |a, b| if a <= b || a.is_nan() { a } else { b });
            }
        }
    }
}

/// Numbers that are reduced beside each other, so that they are vectors.
const LANES: usize = 32;

impl Reduce<'_> {
    #[inline(always)]
    fn all(self, start: f32, f: impl Fn(f32, f32) -> f32) {
        let Self { x, size, inner, out, .. } = self;
        if inner == 1 {
            for (y, row) in out.iter_mut().zip(x.chunks_exact(size)) {
                *y = fold(row, start, &f);
            }
            return;
        }
        for (out, matrix) in out.chunks_exact_mut(inner).zip(x.chunks_exact(size * inner)) {
            out.fill(start);
            for row in matrix.chunks_exact(inner) {
                out.iter_mut().zip(row).for_each(|(y, x)| *y = f(*y, *x));
            }
        }
    }
}

#[inline(always)]
fn fold(row: &[f32], start: f32, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; LANES];
    let (whole, rest) = row.as_chunks::<LANES>();
    for x in whole {
        lanes.iter_mut().zip(x).for_each(|(y, x)| *y = f(*y, *x));
    }
    lanes.iter_mut().zip(rest).for_each(|(y, x)| *y = f(*y, *x));
    let mut width = LANES / 2;
    while width > 0 {
        let (low, high) = lanes.split_at_mut(width);
        low.iter_mut().zip(high).for_each(|(a, b)| *a = f(*a, *b));
        width /= 2;
    }
    lanes[0]
}

/// Rows of `size` elements as probabilities, each for itself.
pub(super) fn softmax(x: &[f32], size: usize, out: &mut [f32]) {
    out.copy_from_slice(x);
    for row in out.chunks_exact_mut(size) {
        Softmax::new_mut(row).dispatch();
    }
}

/// `(x - mean) / √(variance + epsilon) · weight + bias` for each row, as `LayerNormalization` of ONNX.
pub(super) struct LayerNorm<'a> {
    pub(super) x: &'a [f32],
    pub(super) weight: &'a [f32],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) epsilon: f32,
    pub(super) out: &'a mut [f32],
}

impl SimdOp for LayerNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let Self { x, weight, bias, epsilon, out } = self;
        let size = weight.len();
        for (out, x) in out.chunks_exact_mut(size).zip(x.chunks_exact(size)) {
            let mean = fold(x, 0.0, |a, b| a + b) / size as f32;
            out.iter_mut().zip(x).for_each(|(y, x)| *y = (x - mean) * (x - mean));
            let scale = 1.0 / (fold(out, 0.0, |a, b| a + b) / size as f32 + epsilon).sqrt();
            let weighted = out.iter_mut().zip(x).zip(weight);
            weighted.for_each(|((y, x), w)| *y = (x - mean) * scale * w);
            if let Some(bias) = bias {
                out.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }
}
