//! Layers that several families share, put together from the builder's ops.

use qhx_base::Result;

use crate::builder::GraphBuilder;
use crate::graph::{BinaryOp, Elem, TensorId, UnaryOp};

/// Methods that are one op of [`GraphBuilder::binary`] or [`GraphBuilder::unary`] each.
macro_rules! elementwise {
    ($($doc:literal $name:ident($($x:ident),+) = $method:ident($op:expr),)+) => {
        impl GraphBuilder {
            $(
                #[doc = $doc]
                ///
                /// # Errors
                #[doc = concat!("Errors of [`GraphBuilder::", stringify!($method), "`].")]
                pub fn $name(&mut self, $($x: TensorId),+) -> Result<TensorId> {
                    self.$method($op, $($x),+)
                }
            )+
        }
    };
}

elementwise! {
    "a + b" add(a, b) = binary(BinaryOp::Add),
    "a − b" sub(a, b) = binary(BinaryOp::Sub),
    "a · b" mul(a, b) = binary(BinaryOp::Mul),
    "a / b" div(a, b) = binary(BinaryOp::Div),
    "`x · σ(x)`, see [`UnaryOp::Silu`]." silu(x) = unary(UnaryOp::Silu),
    "`max(x, 0)`, see [`UnaryOp::Relu`]." relu(x) = unary(UnaryOp::Relu),
    "GELU by the error function, see [`UnaryOp::Gelu`]." gelu(x) = unary(UnaryOp::Gelu),
    "GELU by the hyperbolic tangent, see [`UnaryOp::GeluTanh`]." gelu_tanh(x) = unary(UnaryOp::GeluTanh),
}

impl GraphBuilder {
    /// Size of the last axis.
    ///
    /// # Errors
    /// When `x` has no dimensions.
    pub fn width(&self, x: TensorId) -> Result<usize> {
        Ok(self.shape(x)?.last().copied().unwrap_or(1))
    }

    /// `log(1 + eˣ)` as `max(x, 0) + log(1 + e^−|x|)`, which overflows nowhere.
    ///
    /// The sum `s = 1 + e` keeps few digits of a small `e`. The lost part, `e − (s − 1)`, is added to the logarithm
    /// times the logarithm's derivative `1 / s`: `log(1 + e) = log s + (e − (s − 1)) / s`.
    ///
    /// # Errors
    /// Errors of [`GraphBuilder::unary`].
    pub fn softplus(&mut self, x: TensorId) -> Result<TensorId> {
        let one = self.scalar(x, 1.0)?;
        let positive = self.relu(x)?;
        let magnitude = self.unary(UnaryOp::Abs, x)?;
        let negated = self.unary(UnaryOp::Neg, magnitude)?;
        let small = self.unary(UnaryOp::Exp, negated)?;
        let sum = self.add(small, one)?;
        let log = self.unary(UnaryOp::Log, sum)?;
        let rounded = self.sub(sum, one)?;
        let lost = self.sub(small, rounded)?;
        let correction = self.div(lost, sum)?;
        let rest = self.add(log, correction)?;
        self.add(positive, rest)
    }

    /// `x · rsqrt(Σx² + eps) · gain` along the last axis.
    ///
    /// Computed as an RMSNorm over the axis of `n` elements: `Σx² + eps = n · (mean(x²) + eps / n)`.
    ///
    /// # Errors
    /// When the shapes or element types do not fit; the message names the node.
    pub fn l2_norm(&mut self, x: TensorId, eps: f32, gain: f32) -> Result<TensorId> {
        let n = self.width(x)?;
        let weight = vec![gain / (n as f32).sqrt(); n];
        let name = self.numbered("l2_weight", x);
        let weight = self.constant(&name, Elem::Activation, &[n], weight)?;
        self.rms_norm(x, eps / n as f32, weight)
    }

    /// Repeats every row of `x` `[rows, width]` `times` times in place (`repeat_interleave`).
    ///
    /// # Errors
    /// When `x` is no matrix.
    pub fn repeat_rows(&mut self, x: TensorId, times: usize) -> Result<TensorId> {
        if times == 1 {
            return Ok(x);
        }
        let (rows, width) = {
            let shape = self.shape(x)?;
            (shape[0], shape[1])
        };
        // Side by side in the row, then split: row r becomes rows r·times .. (r+1)·times.
        let wide = self.concat(&vec![x; times], 1)?;
        self.reshape(wide, &[rows * times, width])
    }

    /// A constant row `[1, n]` of the activation type.
    ///
    /// # Errors
    /// When a value is not finite.
    pub fn row(&mut self, name: &str, values: Vec<f32>) -> Result<TensorId> {
        let shape = [1, values.len()];
        self.constant(name, Elem::Activation, &shape, values)
    }
}
