//! Layers that several families share, put together from the builder's ops.

use qhx_core::Result;

use crate::builder::GraphBuilder;
use crate::graph::{BinaryOp, Elem, ReduceOp, TensorId, UnaryOp};

impl GraphBuilder {
    /// `x · σ(x)` (Elfwing et al. 2018, `torch.nn.functional.silu`).
    pub fn silu(&mut self, x: TensorId) -> Result<TensorId> {
        let gate = self.unary(UnaryOp::Sigmoid, x)?;
        self.mul(x, gate)
    }

    /// `log(1 + eˣ)` as `max(x, 0) + log(1 + e^−|x|)`, which overflows nowhere.
    pub fn softplus(&mut self, x: TensorId) -> Result<TensorId> {
        let zero = self.scalar(x, 0.0)?;
        let one = self.scalar(x, 1.0)?;
        let positive = self.binary(BinaryOp::Max, x, zero)?;
        let magnitude = self.unary(UnaryOp::Abs, x)?;
        let negated = self.unary(UnaryOp::Neg, magnitude)?;
        let small = self.unary(UnaryOp::Exp, negated)?;
        let sum = self.add(small, one)?;
        let rest = self.unary(UnaryOp::Log, sum)?;
        self.add(positive, rest)
    }

    /// RMSNorm along the last axis (Zhang and Sennrich 2019): `x · rsqrt(mean(x²) + eps) · w`.
    ///
    /// Computed on `x / s` with `s = max(max|x|, √eps)`, as `(x/s) · rsqrt(mean((x/s)²) + (√eps/s)²) · w`.
    /// The factor cancels, so the result is the same in exact arithmetic; in f16 no square overflows
    /// (|x| > 255 would), and `eps` is not lost below the smallest f16.
    pub fn rms_norm(&mut self, x: TensorId, eps: f32, weight: TensorId) -> Result<TensorId> {
        let (scaled, inverse) = self.inverse_norm(x, eps, ReduceOp::Mean)?;
        let normed = self.mul(scaled, inverse)?;
        self.mul(normed, weight)
    }

    /// `x · rsqrt(Σx² + eps)` along the last axis, with the scaling of [`GraphBuilder::rms_norm`].
    pub fn l2_norm(&mut self, x: TensorId, eps: f32) -> Result<TensorId> {
        let unit = self.inverse_norm(x, eps, ReduceOp::Sum)?;
        self.mul(unit.0, unit.1)
    }

    /// `x / s` and `rsqrt(reduce((x/s)²) + (√eps/s)²)`; see [`GraphBuilder::rms_norm`].
    fn inverse_norm(
        &mut self,
        x: TensorId,
        eps: f32,
        by: ReduceOp,
    ) -> Result<(TensorId, TensorId)> {
        let axis = self.shape(x)?.len() - 1;
        let root = self.scalar(x, eps.sqrt())?;
        let magnitude = self.unary(UnaryOp::Abs, x)?;
        let peak = self.reduce(ReduceOp::Max, magnitude, axis)?;
        let s = self.binary(BinaryOp::Max, peak, root)?;
        let scaled = self.div(x, s)?;
        let squares = self.mul(scaled, scaled)?;
        let reduced = self.reduce(by, squares, axis)?;
        let small = self.div(root, s)?;
        let small = self.mul(small, small)?;
        let sum = self.add(reduced, small)?;
        Ok((scaled, self.unary(UnaryOp::Rsqrt, sum)?))
    }

    /// Rotary embedding (Su et al. 2021) of `x` `[heads, d]` in the half-split form, on the first
    /// `2·half` elements of every head; the rest pass. `cos` and `sin` are half tables `[1, half]`.
    pub fn rope(&mut self, x: TensorId, cos: TensorId, sin: TensorId) -> Result<TensorId> {
        let width = self.shape(x)?[1];
        let half = self.shape(cos)?[1];
        let first = self.slice(x, 1, 0, half)?;
        let second = self.slice(x, 1, half, 2 * half)?;
        let first_cos = self.mul(first, cos)?;
        let second_sin = self.mul(second, sin)?;
        let second_cos = self.mul(second, cos)?;
        let first_sin = self.mul(first, sin)?;
        let mut parts = vec![self.sub(first_cos, second_sin)?, self.add(second_cos, first_sin)?];
        if width > 2 * half {
            parts.push(self.slice(x, 1, 2 * half, width)?);
        }
        self.concat(&parts, 1)
    }

    /// Repeats every row of `x` `[rows, width]` `times` times in place (`repeat_interleave`).
    pub fn repeat_rows(&mut self, x: TensorId, times: usize) -> Result<TensorId> {
        if times == 1 {
            return Ok(x);
        }
        let (rows, width) = {
            let shape = self.shape(x)?;
            (shape[0], shape[1])
        };
        // Side by side in the row, then cut: row r becomes rows r·times .. (r+1)·times.
        let wide = self.concat(&vec![x; times], 1)?;
        self.reshape(wide, &[rows * times, width])
    }

    /// A constant row `[1, n]` of the activation type.
    pub fn row(&mut self, name: &str, values: Vec<f32>) -> Result<TensorId> {
        let shape = [1, values.len()];
        self.constant(name, Elem::Activation, &shape, values)
    }
}
