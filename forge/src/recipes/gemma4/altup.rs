//! What layers of Gemma 3n have beside those of Gemma 4: several streams of hidden states, of which a layer computes
//! one and corrects the others (AltUp, Baykal et al. 2023, arXiv 2301.13310), a low-rank residual beside attention
//! (LAuReL, Menghani et al. 2024, arXiv 2411.07501), and MLPs whose gates keep their largest values alone.
//!
//! Arithmetic: `transformers`, `models/gemma3n/modeling_gemma3n.py`.

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{ReduceOp, TensorId, UnaryOp};

use super::config::AltUp;
use super::decoder::Model;

/// Factor of values before they are squared, so that f16 holds squares of up to 2,040 instead of 255.
const SMALLER: f32 = 0.125;
/// Least mean of squares that is divided by (`AltUp`, `epsilon_tensor`).
const LEAST: f32 = 1e-5;

/// The mean of x² of each row, at least [`LEAST`], times the square of [`SMALLER`]; and the inverse of its root.
fn mean_square(b: &mut GraphBuilder, x: TensorId) -> Result<[TensorId; 2]> {
    let small = b.scale(x, SMALLER)?;
    let squares = b.mul(small, small)?;
    let mean = b.reduce(ReduceOp::Mean, squares, 1)?;
    // The larger of the two. What is added to all would show in small values.
    let least = b.scalar(mean, LEAST * SMALLER * SMALLER)?;
    let above = b.sub(mean, least)?;
    let above = b.relu(above)?;
    let mean = b.add(above, least)?;
    Ok([mean, b.unary(UnaryOp::Rsqrt, mean)?])
}

/// √(mean x²) of each row `[rows, 1]`.
fn magnitude(b: &mut GraphBuilder, x: TensorId) -> Result<TensorId> {
    let [mean, inverse] = mean_square(b, x)?;
    let root = b.mul(mean, inverse)?;
    b.scale(root, SMALLER.recip())
}

/// The value below which a share of a normal distribution lies: `torch.distributions.Normal(0, 1).icdf`, by bisection
/// of its cumulative distribution.
fn quantile(share: f64) -> f64 {
    let (mut low, mut high) = (-10.0, 10.0);
    for _ in 0..80 {
        let middle = 0.5 * (low + high);
        if cumulative(middle) < share { low = middle } else { high = middle }
    }
    low
}

/// Share of a normal distribution below x, by the series of the error function.
fn cumulative(x: f64) -> f64 {
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while f64::abs(term) > 1e-18 * f64::abs(sum) && n < 1000.0 {
        term *= x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    0.5 + sum * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

impl Model<'_> {
    /// The streams of rows x of the embedding: x, and projections of it that are as large.
    pub(super) fn enter(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        altup: &AltUp,
    ) -> Result<Vec<TensorId>> {
        let size = magnitude(b, x)?;
        let mut streams = vec![x];
        for i in 0..altup.streams - 1 {
            streams.push(self.projected(b, x, &format!("altup_projections.{i}"), size)?);
        }
        Ok(streams)
    }

    /// The mean of the streams behind the last layer, each projected and as large as the first.
    pub(super) fn leave(&self, b: &mut GraphBuilder, streams: &[TensorId]) -> Result<TensorId> {
        let Some((&first, others)) = streams.split_first() else { return self.lost() };
        let size = magnitude(b, first)?;
        let mut sum = first;
        for (i, stream) in others.iter().enumerate() {
            let name = format!("altup_unembed_projections.{i}");
            let other = self.projected(b, *stream, &name, size)?;
            sum = b.add(sum, other)?;
        }
        b.scale(sum, (streams.len() as f32).recip())
    }

    fn projected(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        size: TensorId,
    ) -> Result<TensorId> {
        let y = self.parts.linear(b, x, name, self.config.hidden, false)?;
        let [_, inverse] = mean_square(b, y)?;
        let y = b.scale(y, SMALLER)?;
        let y = b.mul(y, inverse)?;
        b.mul(y, size)
    }

    /// `n` numbers of each row: how streams are mixed, from the tanh of a router over rows x.
    fn coefficients(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        (layer, name, n): (usize, &str, usize),
        altup: &AltUp,
    ) -> Result<TensorId> {
        let part = |part: &str| format!("layers.{layer}.altup.{part}");
        let normed = self.parts.norm(b, x, &part("router_norm"))?;
        let routed =
            self.parts.exact_linear(b, normed, &part("modality_router"), altup.streams, false)?;
        let routed = b.scale(routed, (self.config.hidden as f32).recip())?;
        let routed = b.unary(UnaryOp::Tanh, routed)?;
        self.parts.exact_linear(b, routed, &part(name), n, false)
    }

    /// Predictions of the first `wanted` streams behind a layer: `h_j + Σ_i c[j, i] · h_i`.
    pub(super) fn predict(
        &self,
        b: &mut GraphBuilder,
        streams: &[TensorId],
        (layer, wanted): (usize, usize),
        altup: &AltUp,
    ) -> Result<Vec<TensorId>> {
        b.scope(format!("l{layer}_altup"));
        let count = streams.len();
        let which = (layer, "prediction_coefs", count * count);
        let all = self.coefficients(b, streams[0], which, altup)?;
        let mut predicted = Vec::new();
        for (j, own) in streams.iter().enumerate().take(wanted) {
            let mut sum = *own;
            for (i, stream) in streams.iter().enumerate() {
                let place = j * count + i;
                let factor = b.slice(all, 1, place, place + 1)?;
                let part = b.mul(*stream, factor)?;
                sum = b.add(sum, part)?;
            }
            predicted.push(sum);
        }
        Ok(predicted)
    }

    /// Predictions that are corrected by what the layer made of the first one.
    pub(super) fn correct(
        &self,
        b: &mut GraphBuilder,
        predicted: &[TensorId],
        computed: TensorId,
        layer: usize,
        altup: &AltUp,
    ) -> Result<Vec<TensorId>> {
        let which = (layer, "correction_coefs", predicted.len());
        let all = self.coefficients(b, computed, which, altup)?;
        let one = b.scalar(all, 1.0)?;
        let all = b.add(all, one)?;
        let news = b.sub(computed, predicted[0])?;
        let corrected = predicted.iter().enumerate().map(|(i, stream)| {
            let factor = b.slice(all, 1, i, i + 1)?;
            let part = b.mul(news, factor)?;
            b.add(*stream, part)
        });
        corrected.collect()
    }

    /// The corrected first stream as it gates per-layer inputs.
    pub(super) fn gating(
        &self,
        b: &mut GraphBuilder,
        first: TensorId,
        layer: usize,
        altup: &AltUp,
    ) -> Result<TensorId> {
        if !altup.scaled {
            return Ok(first);
        }
        let name = format!("layers.{layer}.altup.correct_output_scale");
        let values = self.parts.checkpoint.values(&name, &[self.config.hidden])?;
        let scale = b.row(&b.numbered("output_scale", first), values)?;
        b.mul(first, scale)
    }

    /// x with LAuReL beside it: `(x + h + norm(R · L · h)) / √2`, h the rows that attention got.
    pub(super) fn laurel(
        &self,
        b: &mut GraphBuilder,
        [x, h]: [TensorId; 2],
        layer: usize,
        altup: &AltUp,
    ) -> Result<TensorId> {
        let part = |part: &str| format!("layers.{layer}.laurel.{part}");
        let low = self.parts.linear(b, h, &part("linear_left"), altup.rank, false)?;
        let out = self.parts.linear(b, low, &part("linear_right"), self.config.hidden, false)?;
        let out = self.parts.norm(b, out, &part("post_laurel_norm"))?;
        let out = b.add(h, out)?;
        let sum = b.add(x, out)?;
        b.scale(sum, std::f32::consts::FRAC_1_SQRT_2)
    }

    /// Gates above all but the layer's share of a normal distribution of their mean and variance.
    pub(super) fn sparse(
        &self,
        b: &mut GraphBuilder,
        gate: TensorId,
        layer: usize,
    ) -> Result<TensorId> {
        let share = self.config.altup.as_ref().and_then(|altup| altup.sparsity.get(layer));
        let Some(share) = share.copied().filter(|share| *share > 0.0) else { return Ok(gate) };
        let mean = b.reduce(ReduceOp::Mean, gate, 1)?;
        let apart = b.sub(gate, mean)?;
        let deviation = magnitude(b, apart)?;
        let cut = b.scale(deviation, quantile(share) as f32)?;
        let above = b.sub(apart, cut)?;
        b.relu(above)
    }

    fn lost<T>(&self) -> Result<T> {
        Err(qhx_base::Error::new(qhx_base::ErrorKind::Internal, "a decoder without a stream"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_a_normal_distribution() {
        for (share, expected) in
            [(0.5, 0.0), (0.95, 1.644_853_626_951_472_2), (0.1, -1.281_551_565_544_600_4)]
        {
            assert!((quantile(share) - expected).abs() < 1e-9, "{share}: {}", quantile(share));
        }
    }
}
