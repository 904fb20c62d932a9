//! Arithmetic on single elements, rows and columns.
//!
//! Loops are compiled for the vector instructions of the processor, as [`SimdOp`] has them run. Exponentials and what
//! is made of them come from `rten_vecmath`.

use qhx_graph::graph::{BinaryOp, ReduceOp, UnaryOp};
use rten_simd::{Isa, SimdOp, SimdUnaryOp};
use rten_vecmath::{Erf, Exp, Sigmoid, Sin, Softmax, Tanh};

use super::view::Walk;

/// `out = a ∘ b`, from element `at` of the whole result on.
pub(super) struct Pairs<'a> {
    pub(super) op: BinaryOp,
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
            BinaryOp::Add => self.each(|a, b| a + b),
            BinaryOp::Sub => self.each(|a, b| a - b),
            BinaryOp::Mul => self.each(|a, b| a * b),
            BinaryOp::Div => self.each(|a, b| a / b),
            // NaN stays.
            BinaryOp::Max => self.each(|a, b| if a >= b || a.is_nan() { a } else { b }),
            BinaryOp::Min => self.each(|a, b| if a <= b || a.is_nan() { a } else { b }),
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
    pub(super) op: BinaryOp,
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
            BinaryOp::Add => |a, b| Some(a.wrapping_add(b)),
            BinaryOp::Sub => |a, b| Some(a.wrapping_sub(b)),
            BinaryOp::Mul => |a, b| Some(a.wrapping_mul(b)),
            BinaryOp::Div => |a, b| (b != 0).then(|| a.wrapping_div(b)),
            BinaryOp::Max => |a, b| Some(a.max(b)),
            BinaryOp::Min => |a, b| Some(a.min(b)),
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
    /// To the i32 nearer to 0, whose bits the result holds.
    Truncate,
    Clip(f32, f32),
    Op(UnaryOp),
}

impl Unary {
    /// True if it takes many instructions for an element.
    pub(super) const fn is_long(self) -> bool {
        let Self::Op(op) = self else { return false };
        !matches!(op, UnaryOp::Abs | UnaryOp::Neg | UnaryOp::Rsqrt | UnaryOp::Relu)
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
        let op = match op {
            Unary::Copy => return,
            Unary::Truncate => {
                return each(out, |x| f32::from_bits((x as i32).cast_unsigned()));
            }
            Unary::Clip(min, max) => {
                return each(out, |x| {
                    let x = if x < min { min } else { x };
                    if x > max { max } else { x }
                });
            }
            Unary::Op(op) => op,
        };
        match op {
            UnaryOp::Abs => each(out, f32::abs),
            UnaryOp::Neg => each(out, |x| -x),
            UnaryOp::Rsqrt => each(out, |x| 1.0 / x.sqrt()),
            UnaryOp::Relu => each(out, |x| if x < 0.0 { 0.0 } else { x }),
            UnaryOp::Log => each(out, f32::ln),
            UnaryOp::Exp => vectors(isa, Exp {}, out),
            UnaryOp::Sigmoid => vectors(isa, Sigmoid {}, out),
            UnaryOp::Sin => vectors(isa, Sin::new(), out),
            UnaryOp::Tanh => vectors(isa, Tanh {}, out),
            UnaryOp::Silu => gated(isa, Sigmoid {}, out, |x| x, |x, y| x * y),
            UnaryOp::Gelu => {
                let argument = |x| x * std::f32::consts::FRAC_1_SQRT_2;
                gated(isa, Erf {}, out, argument, |x, y| x * 0.5 * (y + 1.0));
            }
            UnaryOp::GeluTanh => {
                let [linear, cubic] = UnaryOp::GeluTanh.gelu_terms().unwrap_or_default();
                let argument = |x| x * (x * x * cubic + linear);
                gated(isa, Tanh {}, out, argument, |x, y| x * 0.5 * (y + 1.0));
            }
        }
    }
}

/// Elements that [`gated`] computes at a time.
const GATED: usize = 256;

/// `out = join(x, op(argument(x)))` of the `x` in `out`.
#[inline(always)]
fn gated<I: Isa>(
    _: I,
    op: impl SimdUnaryOp<f32>,
    out: &mut [f32],
    argument: impl Fn(f32) -> f32,
    join: impl Fn(f32, f32) -> f32,
) {
    let mut memory = [0f32; GATED];
    for out in out.chunks_mut(GATED) {
        let curve = &mut memory[..out.len()];
        curve.iter_mut().zip(&*out).for_each(|(y, x)| *y = argument(*x));
        op.map_mut(curve);
        out.iter_mut().zip(&*curve).for_each(|(x, y)| *x = join(*x, *y));
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

impl ToF32 for i32 {
    /// Rounds to the nearest.
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self as f32
    }
}

/// Columns of `[size, inner]` become one number each; there are as many matrices as `out` has times `inner`.
pub(super) struct Reduce<'a> {
    pub(super) op: ReduceOp,
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
            ReduceOp::Sum => self.all(0.0, |a, b| a + b),
            ReduceOp::Mean => {
                let Self { size, inner, .. } = self;
                let Self { x, out, .. } = self;
                Reduce { op: ReduceOp::Sum, x, size, inner, out: &mut *out }.all(0.0, |a, b| a + b);
                out.iter_mut().for_each(|y| *y /= size as f32);
            }
            ReduceOp::Max => {
                self.all(f32::NEG_INFINITY, |a, b| if a >= b || a.is_nan() { a } else { b });
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

/// `(x - mean) / √(variance + epsilon) · weight + bias` for each row, see `Op::LayerNorm` of the graph.
pub(super) struct LayerNorm<'a> {
    pub(super) x: &'a [f32],
    pub(super) weight: &'a [f32],
    pub(super) bias: &'a [f32],
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
            out.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
    }
}

/// `x / √(mean(x²) + epsilon) · weight` for each row, see `Op::RmsNorm` of the graph.
pub(super) struct RmsNorm<'a> {
    pub(super) x: &'a [f32],
    pub(super) weight: &'a [f32],
    pub(super) epsilon: f32,
    pub(super) out: &'a mut [f32],
}

impl SimdOp for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let Self { x, weight, epsilon, out } = self;
        let size = weight.len();
        for (out, x) in out.chunks_exact_mut(size).zip(x.chunks_exact(size)) {
            out.iter_mut().zip(x).for_each(|(y, x)| *y = x * x);
            let scale = 1.0 / (fold(out, 0.0, |a, b| a + b) / size as f32 + epsilon).sqrt();
            out.iter_mut().zip(x).zip(weight).for_each(|((y, x), w)| *y = x * scale * w);
        }
    }
}
