//! FastConformer that is given its audio piece by piece (Noroozi et al. 2023, arXiv 2312.17279), as `transformers` has
//! it in `models/nemotron_asr_streaming/modeling_nemotron_asr_streaming.py`.
//!
//! Rows go through the layers in chunks of C. A row sees its own chunk and some chunks before it; no convolution looks
//! ahead. What a chunk needs of earlier ones is a state of the graph:
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `mel` | `[2^h · C + 2^h − 1, mels]` | frames up to that of the chunk's last row; the first ones go before its own |
//! | `keep` | `[rows of the inner convolutions, 1]` | 0 for rows in front of the audio and behind it, 1 for others |
//! | `cmask` | `[1, K + C]` | added to scores: 0 for keys of the audio |
//! | `past_k_i`, `past_v_i` → `present_…` | `[heads, K, dim]` | keys and values of the K rows before the chunk |
//! | `past_conv_i` → `present_conv_i` | `[kernel − 1, hidden]` | what the depthwise convolution reaches back to |
//!
//! The h convolutions that halve the frames have no state: the frames that they reach back to come again.

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Conv1d, Conv2d, Elem, TensorId, UnaryOp};
use qhx_graph::weight::Weight;

use super::{FastConformer, Sizes};
use crate::kit::{Layers, filters};
use crate::recipe::Precision;

/// Builds the encoder for chunks of rows.
#[derive(Debug, Clone, Copy)]
pub(in crate::recipes) struct Stream<'a> {
    pub(in crate::recipes) layers: Layers<'a>,
    pub(in crate::recipes) sizes: &'a Sizes,
    /// Rows of a chunk.
    pub(in crate::recipes) rows: usize,
    /// Rows before a chunk that it sees.
    pub(in crate::recipes) past: usize,
}

impl<'a> Stream<'a> {
    /// Frames that a chunk takes.
    pub(in crate::recipes) fn frames(&self) -> usize {
        self.rows_at(0)
    }

    /// Rows behind `halvings` convolutions.
    fn rows_at(&self, halvings: usize) -> usize {
        let left = 1 << (self.sizes.halvings - halvings);
        left * self.rows + left - 1
    }

    /// Parts that do not depend on the number of rows, but for the table of distances.
    fn whole(&self) -> FastConformer<'a> {
        let frames = (self.past + self.rows) << self.sizes.halvings;
        FastConformer { layers: self.layers, sizes: self.sizes, frames }
    }

    /// The inputs through the layers; declares what the states become.
    pub(in crate::recipes) fn encode(&self, b: &mut GraphBuilder) -> Result<TensorId> {
        let mel = b.input("mel", Elem::Activation, &[self.frames(), self.sizes.mels])?;
        let inner = (1..self.sizes.halvings).map(|at| self.rows_at(at)).sum();
        let keep = b.input("keep", Elem::Activation, &[inner, 1])?;
        let total = self.past + self.rows;
        let mask = b.input("cmask", Elem::Activation, &[1, total])?;
        let mut h = self.subsample(b, mel, keep)?;
        let mask = b.reshape(mask, &[1, 1, total])?;
        let whole = self.whole();
        for layer in 0..self.sizes.layers {
            let at = format!("encoder.layers.{layer}");
            let scope = |part: &str| format!("l{layer}_{part}");
            b.scope(scope("ffw1"));
            h = whole.feed_forward(b, h, &at, 1)?;
            b.scope(scope("attn"));
            let normed = self.layers.layer_norm(b, h, &format!("{at}.norm_self_att"))?;
            let mixed = self.attention(b, normed, layer, mask)?;
            h = b.add(h, mixed)?;
            b.scope(scope("conv"));
            let normed = self.layers.layer_norm(b, h, &format!("{at}.norm_conv"))?;
            let mixed = self.convolution(b, normed, layer)?;
            h = b.add(h, mixed)?;
            b.scope(scope("ffw2"));
            h = whole.feed_forward(b, h, &at, 2)?;
            h = self.layers.layer_norm(b, h, &format!("{at}.norm_out"))?;
        }
        b.scope("out");
        Ok(h)
    }

    /// `NemotronAsrStreamingEncoderSubsamplingConv2D`. Mels are padded by two on one side and one on the other.
    fn subsample(&self, b: &mut GraphBuilder, mel: TensorId, keep: TensorId) -> Result<TensorId> {
        let Sizes { channels, mels, hidden, halvings, scale, .. } = *self.sizes;
        let checkpoint = self.layers.checkpoint;
        let halving = Conv2d { stride: [2, 2], padding: [[0, 0], [2, 1]], ..Conv2d::new([3, 3]) };
        let conv = |b: &mut GraphBuilder, x, part: &str, shape: [usize; 4], conv| {
            let name = format!("encoder.subsampling.{part}");
            let (weight, bias) = filters(checkpoint, &name, &shape)?;
            b.conv2d(&part.replace('.', "_"), x, weight, Some(bias), conv)
        };
        b.scope("sub");
        let x = b.reshape(mel, &[1, 1, self.frames(), mels])?;
        let mut x = conv(b, x, "conv_in", [channels, 1, 3, 3], halving)?;
        x = b.relu(x)?;
        let (mut first, mut width) = (0, mels / 2 + 1);
        for step in 1..halvings {
            // Rows in front of the audio and behind it are not 0 behind a bias, but the next convolution shall find
            // zeros there.
            let rows = self.rows_at(step);
            let kept = b.slice(keep, 0, first, first + rows)?;
            let kept = b.reshape(kept, &[1, 1, rows, 1])?;
            first += rows;
            x = b.mul(x, kept)?;
            let depthwise = Conv2d { groups: channels, ..halving };
            let part = |part: &str| format!("layers.{}.{part}", step - 1);
            x = conv(b, x, &part("depthwise_conv"), [channels, 1, 3, 3], depthwise)?;
            let shape = [channels, channels, 1, 1];
            x = conv(b, x, &part("pointwise_conv"), shape, Conv2d::new([1, 1]))?;
            x = b.relu(x)?;
            width = width / 2 + 1;
        }
        let x = b.transpose(x, &[0, 2, 1, 3])?;
        let x = b.reshape(x, &[self.rows, channels * width])?;
        let x = self.layers.linear(b, x, "encoder.subsampling.linear", hidden, true)?;
        if scale == 1.0 { Ok(x) } else { b.scale(x, scale) }
    }

    /// `past_<role>` and behind it `new` along an axis; the last of both becomes `present_<role>`.
    fn carried(
        b: &mut GraphBuilder,
        role: &str,
        new: TensorId,
        axis: usize,
        count: usize,
    ) -> Result<TensorId> {
        let mut shape = b.shape(new)?.to_vec();
        let rows = shape[axis];
        shape[axis] = count;
        let past = b.input(&format!("past_{role}"), Elem::Activation, &shape)?;
        let all = b.concat(&[past, new], axis)?;
        let present = b.slice(all, axis, rows, rows + count)?;
        b.output(&format!("present_{role}"), present)?;
        Ok(all)
    }

    /// `NemotronAsrStreamingEncoderAttention`: as [`FastConformer::attention`], over the rows before the chunk, too.
    fn attention(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        layer: usize,
        mask: TensorId,
    ) -> Result<TensorId> {
        let Sizes { hidden, heads, attention_bias: bias, .. } = *self.sizes;
        let (rows, total, dim) = (self.rows, self.past + self.rows, hidden / heads);
        let scale = 1.0 / (dim as f32).sqrt();
        let name = |part: &str| format!("encoder.layers.{layer}.self_attn.{part}");
        let project = |b: &mut GraphBuilder, part: &str| {
            let y = self.layers.linear(b, x, &name(part), hidden, bias)?;
            let y = b.reshape(y, &[rows, heads, dim])?;
            b.transpose(y, &[1, 0, 2])
        };
        let q = project(b, "q_proj")?;
        let q = b.scale(q, scale)?;
        let k = project(b, "k_proj")?;
        let k = Self::carried(b, &format!("k_{layer}"), k, 1, self.past)?;
        let v = project(b, "v_proj")?;
        let v = Self::carried(b, &format!("v_{layer}"), v, 1, self.past)?;
        let biased = |b: &mut GraphBuilder, part: &str| {
            let mut values = self.layers.checkpoint.values(&name(part), &[heads, dim])?;
            values.iter_mut().for_each(|value| *value *= scale);
            let values = b.constant(part, Elem::Activation, &[heads, 1, dim], values)?;
            b.add(q, values)
        };
        let [by_content, by_distance] = [biased(b, "bias_u")?, biased(b, "bias_v")?];
        // The distances past + i − j, from that of the last row to the first key down to that of the first row to the
        // last key. Row i has key j in column rows − 1 − i + j.
        let distances = total + rows - 1;
        let relative = self.whole().relative_keys(&name("relative_k_proj"))?;
        let table = (2 * total - 1) * dim;
        let relative = relative.chunks_exact(table).flat_map(|head| &head[..distances * dim]);
        let relative = relative.copied().collect();
        let shape = [heads, distances, dim];
        let relative = b.constant("relative_k", Elem::Activation, &shape, relative)?;
        let mut shifted = b.matmul(by_distance, relative, true)?;
        if rows > 1 {
            let (from, shorter) = (rows - 1, distances - 1);
            shifted = b.reshape(shifted, &[heads, rows * distances])?;
            shifted = b.slice(shifted, 1, from, from + rows * shorter)?;
            shifted = b.reshape(shifted, &[heads, rows, shorter])?;
            shifted = b.slice(shifted, 2, 0, total)?;
        }
        let scores = b.matmul(by_content, k, true)?;
        let scores = b.add(scores, shifted)?;
        let scores = b.add(scores, mask)?;
        let weights = b.softmax(scores)?;
        let mixed = b.matmul(weights, v, false)?;
        let mixed = b.transpose(mixed, &[1, 0, 2])?;
        let mixed = b.reshape(mixed, &[rows, hidden])?;
        self.layers.linear(b, mixed, &name("o_proj"), hidden, bias)
    }

    /// `NemotronAsrStreamingEncoderConvolutionModule`: a gate, a depthwise convolution that looks back, and LayerNorm.
    fn convolution(&self, b: &mut GraphBuilder, x: TensorId, layer: usize) -> Result<TensorId> {
        let Sizes { hidden, kernel, convolution_bias: biased, .. } = *self.sizes;
        let (rows, checkpoint) = (self.rows, self.layers.checkpoint);
        let at = format!("encoder.layers.{layer}.conv");
        let values = |part: &str| -> Result<Option<Vec<f32>>> {
            let name = format!("{at}.{part}.bias");
            let width = if part == "pointwise_conv1" { 2 * hidden } else { hidden };
            biased.then(|| checkpoint.values(&name, &[width])).transpose()
        };
        let pointwise = |b: &mut GraphBuilder, x, part: &str, outputs: usize| {
            let weight = checkpoint.rows(&format!("{at}.{part}.weight"), &[outputs, hidden, 1])?;
            b.linear(part, x, self.layers.precision.weight(weight), values(part)?)
        };
        let h = pointwise(b, x, "pointwise_conv1", 2 * hidden)?;
        let value = b.slice(h, 1, 0, hidden)?;
        let gate = b.slice(h, 1, hidden, 2 * hidden)?;
        let gate = b.unary(UnaryOp::Sigmoid, gate)?;
        let h = b.mul(value, gate)?;
        let h = Self::carried(b, &format!("conv_{layer}"), h, 0, kernel - 1)?;
        let h = b.transpose(h, &[1, 0])?;
        let h = b.reshape(h, &[1, hidden, rows + kernel - 1])?;
        let taps = checkpoint.rows(&format!("{at}.depthwise_conv.weight"), &[hidden, 1, kernel])?;
        let weight: Weight = Precision::Fp16.weight(taps);
        let conv = Conv1d { groups: hidden, ..Conv1d::new(kernel) };
        let h = b.conv1d("depthwise", h, weight, values("depthwise_conv")?, conv)?;
        let h = b.reshape(h, &[hidden, rows])?;
        let h = b.transpose(h, &[1, 0])?;
        let h = self.layers.layer_norm(b, h, &format!("{at}.norm"))?;
        let h = b.silu(h)?;
        pointwise(b, h, "pointwise_conv2", hidden)
    }
}
