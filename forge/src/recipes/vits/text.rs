//! The text encoder.

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Conv1d, Elem, Graph, TensorId, UnaryOp};
use qhx_graph::weight::{Storage, Weight};
use qhx_types::MASK_VALUE;

use super::Model;
use super::config::Config;
use crate::recipes::vocoder::by_channels;

impl Model<'_> {
    /// `VitsTextEncoder` behind its embedding.
    pub(super) fn encoder(&self, name: &str, rows: usize) -> Result<Graph> {
        let Config { hidden, layers, flow, .. } = *self.config;
        let mut b = GraphBuilder::new(name);
        let mut h = b.input("x", Elem::Activation, &[rows, hidden])?;
        let keep = b.input("keep", Elem::Activation, &[rows, 1])?;
        // 0 for symbols, and below every score for what lies behind them.
        let mask = b.scale(keep, -MASK_VALUE)?;
        let offset = b.scalar(mask, MASK_VALUE)?;
        let mask = b.add(mask, offset)?;
        let mask = b.reshape(mask, &[1, 1, rows])?;
        for layer in 0..layers {
            let at = format!("text_encoder.encoder.layers.{layer}");
            b.scope(format!("l{layer}"));
            let mixed = self.attention(&mut b, h, &format!("{at}.attention"), mask)?;
            let sum = b.add(h, mixed)?;
            h = self.layers.layer_norm(&mut b, sum, &format!("{at}.layer_norm"))?;
            let fed = self.feed_forward(&mut b, h, &format!("{at}.feed_forward"), keep)?;
            let sum = b.add(h, fed)?;
            h = self.layers.layer_norm(&mut b, sum, &format!("{at}.final_layer_norm"))?;
        }
        b.scope("");
        let h = b.mul(h, keep)?;
        let stats = self.linear(&mut b, h, "text_encoder.project", 2 * flow, true)?;
        b.output("y", h)?;
        b.output("stats", stats)?;
        b.finish()
    }

    /// A projection, which one class stores as a convolution of kernel 1.
    pub(super) fn linear(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        outputs: usize,
        biased: bool,
    ) -> Result<TensorId> {
        let inputs = b.width(x)?;
        let weight = self
            .convs
            .hold(name, || Ok(([outputs, inputs], self.projection(name, [outputs, inputs])?)))?;
        let bias = biased.then(|| self.checkpoint.values(&format!("{name}.bias"), &[outputs]));
        let short = name.rsplit('.').next().unwrap_or_default();
        b.linear(short, x, Weight::new(weight, Storage::Float), bias.transpose()?)
    }

    /// Attention with embeddings of the distance, within the window, for keys and for values (Shaw et al. 2018, arXiv
    /// 1803.02155).
    fn attention(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        at: &str,
        mask: TensorId,
    ) -> Result<TensorId> {
        let Config { hidden, heads, window, biased, .. } = *self.config;
        let (rows, dim, places) = (b.shape(x)?[0], hidden / heads, 2 * window + 1);
        let project = |b: &mut GraphBuilder, part: &str| {
            let y = self.linear(b, x, &format!("{at}.{part}"), hidden, biased)?;
            b.reshape(y, &[rows, heads, dim])
        };
        let by_heads = |b: &mut GraphBuilder, y: TensorId| b.transpose(y, &[1, 0, 2]);
        let q = project(b, "q_proj")?;
        let q = b.scale(q, 1.0 / (dim as f32).sqrt())?;
        let [k, v] = ["k_proj", "v_proj"].map(|part| project(b, part));
        let (k, v) = (by_heads(b, k?)?, by_heads(b, v?)?);
        let table = |part: &str| self.checkpoint.values(&format!("{at}.{part}"), &[1, places, dim]);

        let weight = self
            .convs
            .hold(&format!("{at}.emb_rel_k"), || Ok(([places, dim], table("emb_rel_k")?)))?;
        let flat = b.reshape(q, &[rows * heads, dim])?;
        let near = b.linear("emb_rel_k", flat, Weight::new(weight, Storage::Float), None)?;
        let near = b.reshape(near, &[rows, heads, places])?;
        let near = by_heads(b, near)?;
        // Row i of the distances −w … w becomes row i of the keys i − w … i + w: a row is one longer than it is read.
        let wide = rows + 2 * window;
        let zeros = |b: &mut GraphBuilder, name: &str, width: usize| {
            b.constant(
                name,
                Elem::Activation,
                &[heads, rows, width],
                vec![0.0; heads * rows * width],
            )
        };
        let rest = zeros(b, "rest", wide + 1 - places)?;
        let near = b.concat(&[near, rest], 2)?;
        let near = b.reshape(near, &[heads, rows * (wide + 1)])?;
        let near = b.slice(near, 1, 0, rows * wide)?;
        let near = b.reshape(near, &[heads, rows, wide])?;
        let near = b.slice(near, 2, window, window + rows)?;

        let q = by_heads(b, q)?;
        let scores = b.matmul(q, k, true)?;
        let scores = b.add(scores, near)?;
        let scores = b.add(scores, mask)?;
        let weights = b.softmax(scores)?;
        let mixed = b.matmul(weights, v, false)?;

        // And back.
        let side = zeros(b, "side", window)?;
        let near = b.concat(&[side, weights, side], 2)?;
        let near = b.reshape(near, &[heads, rows * wide])?;
        let last = b.constant("last", Elem::Activation, &[heads, rows], vec![0.0; heads * rows])?;
        let near = b.concat(&[near, last], 1)?;
        let near = b.reshape(near, &[heads, rows, wide + 1])?;
        let near = b.slice(near, 2, 0, places)?;
        let near = b.reshape(near, &[heads * rows, places])?;
        let weight = self.convs.hold(&format!("{at}.emb_rel_v"), || {
            let values = table("emb_rel_v")?;
            let turned =
                (0..dim).flat_map(|at| values.iter().skip(at).step_by(dim).copied()).collect();
            Ok(([dim, places], turned))
        })?;
        let near = b.linear("emb_rel_v", near, Weight::new(weight, Storage::Float), None)?;
        let near = b.reshape(near, &[heads, rows, dim])?;
        let mixed = b.add(mixed, near)?;
        let mixed = by_heads(b, mixed)?;
        let mixed = b.reshape(mixed, &[rows, hidden])?;
        self.linear(b, mixed, &format!("{at}.out_proj"), hidden, biased)
    }

    /// Two convolutions over the symbols.
    fn feed_forward(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        at: &str,
        keep: TensorId,
    ) -> Result<TensorId> {
        let Config { hidden, inner, kernel, .. } = *self.config;
        let rows = b.shape(x)?[0];
        let kept = b.reshape(keep, &[1, 1, rows])?;
        let conv = Conv1d { padding: [(kernel - 1) / 2, kernel / 2], ..Conv1d::new(kernel) };
        let x = by_channels(b, x)?;
        let x = b.mul(x, kept)?;
        let y = self.convs.conv(b, x, &format!("{at}.conv_1"), [inner, hidden], conv, true)?;
        let y = b.unary(UnaryOp::Relu, y)?;
        let y = b.mul(y, kept)?;
        let y = self.convs.conv(b, y, &format!("{at}.conv_2"), [hidden, inner], conv, true)?;
        let y = b.mul(y, kept)?;
        let y = b.reshape(y, &[hidden, rows])?;
        b.transpose(y, &[1, 0])
    }
}
