//! The text encoders: ALBERT's layer, and the convolutions over symbols.

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Conv1d, Elem, Graph, TensorId, UnaryOp};
use qhx_types::MASK_VALUE;

use super::Model;
use super::config::{Albert, Config};
use super::layers::{EPS, SLOPES};
use crate::recipes::vocoder::leaky;

/// `½x · (1 + tanh(x · (a + b·x²)))` ([`UnaryOp::GeluTanh`]) by its parts. The NPU library's own GELU, which graphs of
/// encoders have for its speed, is that of the error function: what it is off by adds up over ALBERT's layers and moves
/// F0 by 20 Hz where this moves it by 10.
fn gelu(b: &mut GraphBuilder, x: TensorId) -> Result<TensorId> {
    let [linear, cubic] = UnaryOp::GeluTanh.gelu_terms().unwrap_or_default();
    let squares = b.mul(x, x)?;
    let terms = b.scale(squares, cubic)?;
    let linear = b.scalar(terms, linear)?;
    let terms = b.add(terms, linear)?;
    let argument = b.mul(x, terms)?;
    let tanh = b.unary(UnaryOp::Tanh, argument)?;
    let one = b.scalar(tanh, 1.0)?;
    let sum = b.add(tanh, one)?;
    let half = b.scale(x, 0.5)?;
    b.mul(sum, half)
}

impl Model<'_> {
    /// `AlbertLayer`.
    pub(super) fn albert(&self, name: &str, rows: usize) -> Result<Graph> {
        let Albert { width, heads, inner, .. } = self.config.albert;
        let at = |part: &str| format!("bert.encoder.albert_layer_groups.0.albert_layers.0.{part}");
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[rows, width])?;
        let keep = b.input("keep", Elem::Activation, &[rows, 1])?;
        // 0 for symbols, and below every score for what lies behind them.
        let hidden = b.scale(keep, -MASK_VALUE)?;
        let offset = b.scalar(hidden, MASK_VALUE)?;
        let hidden = b.add(hidden, offset)?;
        let mask = b.reshape(hidden, &[1, 1, rows])?;
        b.scope("attn");
        let dim = width / heads;
        let project = |b: &mut GraphBuilder, part: &str| {
            let y = self.layers.linear(b, x, &at(part), width, true)?;
            let y = b.reshape(y, &[rows, heads, dim])?;
            b.transpose(y, &[1, 0, 2])
        };
        let q = project(&mut b, "attention.query")?;
        let q = b.scale(q, 1.0 / (dim as f32).sqrt())?;
        let [k, v] = [project(&mut b, "attention.key")?, project(&mut b, "attention.value")?];
        let scores = b.matmul(q, k, true)?;
        let scores = b.add(scores, mask)?;
        let weights = b.softmax(scores)?;
        let mixed = b.matmul(weights, v, false)?;
        let mixed = b.transpose(mixed, &[1, 0, 2])?;
        let mixed = b.reshape(mixed, &[rows, width])?;
        let mixed = self.layers.linear(&mut b, mixed, &at("attention.dense"), width, true)?;
        let h = b.add(x, mixed)?;
        let h = self.layers.layer_norm(&mut b, h, &at("attention.LayerNorm"))?;
        b.scope("mlp");
        let names = [&at("ffn")[..], &at("ffn_output")[..]];
        let y = self.layers.feed_forward(&mut b, h, names, inner, gelu)?;
        let y = b.add(y, h)?;
        let y = self.layers.layer_norm(&mut b, y, &at("full_layer_layer_norm"))?;
        b.output("y", y)?;
        b.finish()
    }

    /// `TextEncoder` between its embedding and its LSTM.
    pub(super) fn symbols(&self, name: &str, rows: usize) -> Result<Graph> {
        let Config { hidden, kernel, layers, .. } = *self.config;
        let mut b = GraphBuilder::new(name);
        let mut h = b.input("x", Elem::Activation, &[rows, hidden])?;
        let keep = b.input("keep", Elem::Activation, &[rows, 1])?;
        for layer in 0..layers {
            b.scope(format!("l{layer}"));
            let at = format!("text_encoder.cnn.{layer}");
            let x = b.transpose(h, &[1, 0])?;
            let x = b.reshape(x, &[1, hidden, rows])?;
            let conv = Conv1d { padding: [kernel / 2; 2], ..Conv1d::new(kernel) };
            let x = self.convs.conv(&mut b, x, &format!("{at}.0"), [hidden, hidden], conv, true)?;
            let x = b.reshape(x, &[hidden, rows])?;
            let x = b.transpose(x, &[1, 0])?;
            let [gamma, beta] = ["gamma", "beta"]
                .map(|part| self.checkpoint.values(&format!("{at}.1.{part}"), &[hidden]));
            let (gamma, beta) = (b.row("gamma", gamma?)?, b.row("beta", beta?)?);
            let x = b.layer_norm(x, EPS, gamma, beta)?;
            let x = leaky(&mut b, x, SLOPES[0])?;
            h = b.mul(x, keep)?;
        }
        b.output("y", h)?;
        b.finish()
    }
}
