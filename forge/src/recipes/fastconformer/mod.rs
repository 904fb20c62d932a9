//! FastConformer (Rekesh et al. 2023, arXiv 2305.05084), the encoder of several recognisers, as `transformers` has it
//! in `models/parakeet/modeling_parakeet.py`, and what its graphs take of audio.
//!
//! Tensors are asked for below `encoder.`. F frames become T = F / 2^halvings rows. Rows behind a clip are kept from
//! its own: zeros before each convolution, and a mask over keys.

mod audio;
mod stream;

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Conv1d, Conv2d, Elem, TensorId, UnaryOp};
use qhx_graph::weight::{Storage, Weight, held};
use rayon::prelude::*;
use serde_json::json;

use crate::kit::{Layers, Reader, filters, kept_mask};

pub(super) use audio::{Audio, WINDOWS};
pub(super) use stream::Stream;

/// Epsilon of LayerNorm and BatchNorm, which the configuration does not have.
pub(super) const EPS: f32 = 1e-5;
/// Longest wavelength of the relative positions.
const TIMESCALE: f32 = 10_000.0;

/// Fields of `encoder_config` that are read.
#[derive(Debug)]
pub(super) struct Sizes {
    pub(super) hidden: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    inner: usize,
    attention_bias: bool,
    convolution_bias: bool,
    /// Rows that the depthwise convolution sees; odd.
    kernel: usize,
    /// Convolutions that halve the frames.
    pub(super) halvings: usize,
    channels: usize,
    pub(super) mels: usize,
    /// Factor of the rows behind the convolutions.
    scale: f32,
}

/// Values of fields that a file may leave out, where classes differ in them.
#[derive(Debug)]
pub(super) struct Defaults {
    pub(super) layers: usize,
    pub(super) mels: usize,
    pub(super) scale_input: bool,
}

impl Sizes {
    /// `ParakeetEncoderConfig`.
    pub(super) fn read(reader: &Reader<'_>, defaults: &Defaults) -> Result<Self> {
        reader.only("hidden_act", &json!("silu"))?;
        reader.only("subsampling_conv_kernel_size", &json!(3))?;
        reader.only("subsampling_conv_stride", &json!(2))?;
        let hidden = reader.size_or("hidden_size", 1024)?;
        let heads = reader.size_or("num_attention_heads", 8)?;
        reader.only("num_key_value_heads", &json!(heads))?;
        reader.only("head_dim", &json!(hidden / heads))?;
        let kernel = reader.size_or("conv_kernel_size", 9)?;
        let factor = reader.size_or("subsampling_factor", 8)?;
        let mels = reader.size_or("num_mel_bins", defaults.mels)?;
        let even = hidden.is_multiple_of(heads) && hidden.is_multiple_of(2);
        if !even || kernel.is_multiple_of(2) {
            return Err(reader.fault(format!(
                "hidden_size {hidden}, num_attention_heads {heads}, conv_kernel_size {kernel}: expected an even width \
                 that the heads divide, and an odd kernel"
            )));
        }
        if !factor.is_power_of_two() || factor < 2 || !mels.is_multiple_of(factor) {
            return Err(reader.fault(format!(
                "subsampling_factor {factor}, num_mel_bins {mels}: expected a power of two that divides the mels"
            )));
        }
        let scaled = reader.flag_or("scale_input", defaults.scale_input)?;
        Ok(Self {
            hidden,
            layers: reader.layers_or(defaults.layers)?,
            heads,
            inner: reader.size_or("intermediate_size", 4096)?,
            attention_bias: reader.flag_or("attention_bias", true)?,
            convolution_bias: reader.flag_or("convolution_bias", true)?,
            kernel,
            halvings: factor.trailing_zeros() as usize,
            channels: reader.size_or("subsampling_conv_channels", 256)?,
            mels,
            scale: if scaled { (hidden as f32).sqrt() } else { 1.0 },
        })
    }
}

/// Builds the encoder for some frames.
#[derive(Debug, Clone, Copy)]
pub(super) struct FastConformer<'a> {
    pub(super) layers: Layers<'a>,
    pub(super) sizes: &'a Sizes,
    pub(super) frames: usize,
}

impl FastConformer<'_> {
    /// Rows that the layers have.
    pub(super) fn rows(&self) -> usize {
        self.frames >> self.sizes.halvings
    }

    /// The inputs `mel` `[frames, mels]` and `keep` `[frames, 1]`, which is 1 for frames of the clip, through the
    /// layers.
    pub(super) fn encode(&self, b: &mut GraphBuilder) -> Result<TensorId> {
        Ok(self.encode_with_mask(b)?.0)
    }

    /// The same, with the mask `[1, 1, rows]` that hides rows behind the clip.
    pub(super) fn encode_with_mask(&self, b: &mut GraphBuilder) -> Result<(TensorId, TensorId)> {
        let mel = b.input("mel", Elem::Activation, &[self.frames, self.sizes.mels])?;
        let keep = b.input("keep", Elem::Activation, &[self.frames, 1])?;
        let mut h = self.subsample(b, mel, keep)?;
        b.scope("mask");
        let keep = self.kept(b, keep, self.sizes.halvings)?;
        let mask = kept_mask(b, keep)?;
        for layer in 0..self.sizes.layers {
            let at = format!("encoder.layers.{layer}");
            let scope = |part: &str| format!("l{layer}_{part}");
            b.scope(scope("ffw1"));
            h = self.feed_forward(b, h, &at, 1)?;
            b.scope(scope("attn"));
            let normed = self.layers.layer_norm(b, h, &format!("{at}.norm_self_att"))?;
            let mixed = self.attention(b, normed, &format!("{at}.self_attn"), mask)?;
            h = b.add(h, mixed)?;
            b.scope(scope("conv"));
            let normed = self.layers.layer_norm(b, h, &format!("{at}.norm_conv"))?;
            let mixed = self.convolution(b, normed, &format!("{at}.conv"), keep)?;
            h = b.add(h, mixed)?;
            b.scope(scope("ffw2"));
            h = self.feed_forward(b, h, &at, 2)?;
            h = self.layers.layer_norm(b, h, &format!("{at}.norm_out"))?;
        }
        b.scope("out");
        Ok((h, mask))
    }

    /// Rest of `keep` `[frames, 1]` after `halvings` halvings, each of which keeps the first of two.
    fn kept(&self, b: &mut GraphBuilder, keep: TensorId, halvings: usize) -> Result<TensorId> {
        let pairs = b.reshape(keep, &[self.frames >> halvings, 1 << halvings])?;
        b.slice(pairs, 1, 0, 1)
    }

    /// `ParakeetEncoderSubsamplingConv2D`: a convolution that halves frames and mels, and then pairs of a depthwise one
    /// that does so and one that mixes the channels.
    fn subsample(&self, b: &mut GraphBuilder, mel: TensorId, keep: TensorId) -> Result<TensorId> {
        let Sizes { channels, mels, hidden, halvings, scale, .. } = *self.sizes;
        let checkpoint = self.layers.checkpoint;
        let halving = Conv2d { stride: [2, 2], padding: [[1, 1]; 2], ..Conv2d::new([3, 3]) };
        let conv = |b: &mut GraphBuilder, x, index: usize, shape: [usize; 4], conv| {
            let name = format!("encoder.subsampling.layers.{index}");
            let (weight, bias) = filters(checkpoint, &name, &shape)?;
            b.conv2d(&format!("conv{index}"), x, weight, Some(bias), conv)
        };
        b.scope("sub");
        let x = b.reshape(mel, &[1, 1, self.frames, mels])?;
        let mut x = conv(b, x, 0, [channels, 1, 3, 3], halving)?;
        x = b.relu(x)?;
        // ReLUs count among the layers.
        for step in 1..halvings {
            // Rows behind the clip are not 0 behind a bias, but the next convolution shall find zeros there.
            let kept = self.kept(b, keep, step)?;
            let kept = b.reshape(kept, &[1, 1, self.frames >> step, 1])?;
            x = b.mul(x, kept)?;
            let depthwise = Conv2d { groups: channels, ..halving };
            x = conv(b, x, 3 * step - 1, [channels, 1, 3, 3], depthwise)?;
            x = conv(b, x, 3 * step, [channels, channels, 1, 1], Conv2d::new([1, 1]))?;
            x = b.relu(x)?;
        }
        let x = b.transpose(x, &[0, 2, 1, 3])?;
        let x = b.reshape(x, &[self.rows(), channels * (mels >> halvings)])?;
        let x = self.layers.linear(b, x, "encoder.subsampling.linear", hidden, true)?;
        if scale == 1.0 { Ok(x) } else { b.scale(x, scale) }
    }

    /// `ParakeetEncoderFeedForward`, half of which is added.
    fn feed_forward(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        at: &str,
        which: usize,
    ) -> Result<TensorId> {
        let Sizes { inner, attention_bias: bias, hidden, .. } = *self.sizes;
        let at = format!("{at}.feed_forward{which}");
        let norm = at.replace("feed_forward", "norm_feed_forward");
        let x = self.layers.layer_norm(b, h, &norm)?;
        let x = self.layers.linear(b, x, &format!("{at}.linear1"), inner, bias)?;
        let x = b.silu(x)?;
        let x = self.layers.linear(b, x, &format!("{at}.linear2"), hidden, bias)?;
        let x = b.scale(x, 0.5)?;
        b.add(h, x)
    }

    /// `ParakeetEncoderAttention` (Dai et al. 2019, arXiv 1901.02860): scores are `(q + u)·k + (q + v)·r` with a key r
    /// for each distance.
    fn attention(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        at: &str,
        mask: TensorId,
    ) -> Result<TensorId> {
        let Sizes { hidden, heads, attention_bias: bias, .. } = *self.sizes;
        let (rows, dim) = (self.rows(), hidden / heads);
        let scale = 1.0 / (dim as f32).sqrt();
        let name = |part: &str| format!("{at}.{part}");
        let project = |b: &mut GraphBuilder, part: &str| {
            let y = self.layers.linear(b, x, &name(part), hidden, bias)?;
            let y = b.reshape(y, &[rows, heads, dim])?;
            b.transpose(y, &[1, 0, 2])
        };
        let q = project(b, "q_proj")?;
        let q = b.scale(q, scale)?;
        let [k, v] = [project(b, "k_proj")?, project(b, "v_proj")?];
        let biased = |b: &mut GraphBuilder, part: &str| {
            let mut values = self.layers.checkpoint.values(&name(part), &[heads, dim])?;
            values.iter_mut().for_each(|value| *value *= scale);
            let values = b.constant(part, Elem::Activation, &[heads, 1, dim], values)?;
            b.add(q, values)
        };
        let [by_content, by_distance] = [biased(b, "bias_u")?, biased(b, "bias_v")?];
        // Row i has the distance i − j in column rows − 1 − i + j: rows of one column less, from column rows − 1 of the
        // first on, are shifted so.
        let distances = 2 * rows - 1;
        let relative = self.relative_keys(&name("relative_k_proj"))?;
        let shape = [heads, distances, dim];
        let relative = b.constant("relative_k", Elem::Activation, &shape, relative)?;
        let shifted = b.matmul(by_distance, relative, true)?;
        let shifted = b.reshape(shifted, &[heads, rows * distances])?;
        let from = rows - 1;
        let shifted = b.slice(shifted, 1, from, from + rows * (distances - 1))?;
        let shifted = b.reshape(shifted, &[heads, rows, distances - 1])?;
        let shifted = b.slice(shifted, 2, 0, rows)?;
        let scores = b.matmul(by_content, k, true)?;
        let scores = b.add(scores, shifted)?;
        let scores = b.add(scores, mask)?;
        let weights = b.softmax(scores)?;
        let mixed = b.matmul(weights, v, false)?;
        let mixed = b.transpose(mixed, &[1, 0, 2])?;
        let mixed = b.reshape(mixed, &[rows, hidden])?;
        self.layers.linear(b, mixed, &name("o_proj"), hidden, bias)
    }

    /// `relative_k_proj` of sinusoids (`ParakeetEncoderRelPositionalEncoding`) as `[heads, 2 · rows − 1, dim]`, the
    /// distance `rows − 1` first. Sines change their sign with the distance, cosines do not.
    fn relative_keys(&self, name: &str) -> Result<Vec<f32>> {
        let Sizes { hidden, heads, .. } = *self.sizes;
        let (rows, dim, half) = (self.rows(), hidden / heads, hidden / 2);
        let weight = format!("{name}.weight");
        let weight = self.layers.checkpoint.values(&weight, &[hidden, hidden])?;
        if self.layers.checkpoint.seed().is_some() {
            // Of random weights these are as random, and there at once.
            let keys = weight.iter().cycle().take((2 * rows - 1) * hidden);
            return Ok(keys.copied().collect());
        }
        let tables: Vec<[Vec<f64>; 2]> = (0..half)
            .map(|j| {
                let frequency = TIMESCALE.powf(2.0 * j as f32 / hidden as f32).recip();
                let angles = (0..rows).map(|d| f64::from(d as f32 * frequency));
                let (sines, cosines) = angles.map(f64::sin_cos).unzip();
                [sines, cosines]
            })
            .collect();
        let distances = 2 * rows - 1;
        let mut keys = vec![0.0; heads * distances * dim];
        let by_head = weight.par_chunks_exact(dim * hidden);
        keys.par_chunks_exact_mut(distances * dim).zip(by_head).for_each(|(keys, weight)| {
            for (element, weights) in weight.chunks_exact(hidden).enumerate() {
                let (mut odd, mut even) = (vec![0.0; rows], vec![0.0; rows]);
                for ([sines, cosines], pair) in tables.iter().zip(weights.chunks_exact(2)) {
                    let [sine, cosine] = [0, 1].map(|at| f64::from(pair[at]));
                    odd.iter_mut().zip(sines).for_each(|(sum, s)| *sum += sine * s);
                    even.iter_mut().zip(cosines).for_each(|(sum, c)| *sum += cosine * c);
                }
                let before = even.iter().zip(&odd).rev().map(|(even, odd)| even + odd);
                let behind = even.iter().zip(&odd).skip(1).map(|(even, odd)| even - odd);
                let column = keys[element..].iter_mut().step_by(dim);
                column.zip(before.chain(behind)).for_each(|(key, value)| *key = value as f32);
            }
        });
        Ok(keys)
    }

    /// `ParakeetEncoderConvolutionModule`: a gate, a depthwise convolution that sees as far on either side, and a norm
    /// by the numbers of the training, which is part of the convolution here.
    fn convolution(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        at: &str,
        keep: TensorId,
    ) -> Result<TensorId> {
        let Sizes { hidden, kernel, convolution_bias: biased, .. } = *self.sizes;
        let (rows, checkpoint) = (self.rows(), self.layers.checkpoint);
        let pointwise = |b: &mut GraphBuilder, x, part: &str, outputs: usize| {
            let name = format!("{at}.{part}");
            let weight = checkpoint.rows(&format!("{name}.weight"), &[outputs, hidden, 1])?;
            let bias = biased.then(|| checkpoint.values(&format!("{name}.bias"), &[outputs]));
            b.linear(part, x, self.layers.precision.weight(weight), bias.transpose()?)
        };
        let h = pointwise(b, x, "pointwise_conv1", 2 * hidden)?;
        let value = b.slice(h, 1, 0, hidden)?;
        let gate = b.slice(h, 1, hidden, 2 * hidden)?;
        let gate = b.unary(UnaryOp::Sigmoid, gate)?;
        let h = b.mul(value, gate)?;
        let h = b.mul(h, keep)?;
        let h = b.transpose(h, &[1, 0])?;
        let h = b.reshape(h, &[1, hidden, rows])?;
        let (factors, shift) = self.batch_norm(&format!("{at}.norm"))?;
        let name = |part: &str| format!("{at}.depthwise_conv.{part}");
        let taps = checkpoint.rows(&name("weight"), &[hidden, 1, kernel])?;
        let mut taps = Weight::new(taps, Storage::Float).to_f32()?;
        for (row, factor) in taps.chunks_exact_mut(kernel).zip(&factors) {
            row.iter_mut().for_each(|tap| *tap *= factor);
        }
        let bias = match biased {
            true => checkpoint.values(&name("bias"), &[hidden])?,
            false => vec![0.0; hidden],
        };
        let bias = bias.iter().zip(&factors).zip(shift).map(|((bias, f), shift)| bias * f + shift);
        let bias = Some(bias.collect());
        let taps = held(name("weight"), [hidden, kernel], taps);
        let weight = Weight::new(taps, Storage::Float);
        let padding = [kernel / 2; 2];
        let conv = Conv1d { groups: hidden, padding, ..Conv1d::new(kernel) };
        let h = b.conv1d("depthwise", h, weight, bias, conv)?;
        let h = b.reshape(h, &[hidden, rows])?;
        let h = b.transpose(h, &[1, 0])?;
        let h = b.silu(h)?;
        pointwise(b, h, "pointwise_conv2", hidden)
    }

    /// `torch.nn.BatchNorm1d` in evaluation (Ioffe and Szegedy 2015, arXiv 1502.03167) as a factor and a summand of
    /// each channel.
    fn batch_norm(&self, at: &str) -> Result<(Vec<f32>, Vec<f32>)> {
        let (hidden, checkpoint) = (self.sizes.hidden, self.layers.checkpoint);
        checkpoint.leave_out(&format!("{at}.num_batches_tracked"));
        let values = |part: &str| checkpoint.values(&format!("{at}.{part}"), &[hidden]);
        let [weight, bias, mean] = [values("weight")?, values("bias")?, values("running_mean")?];
        let mut variance = values("running_var")?;
        if checkpoint.seed().is_some() {
            // Drawn ones may be below 0.
            variance.fill(1.0);
        }
        if let Some(bad) = variance.iter().find(|value| **value < 0.0) {
            let what = format!("tensor {at}.running_var holds {bad}, expected variances");
            return Err(Error::new(ErrorKind::Artifact, what));
        }
        let factors: Vec<f32> =
            weight.iter().zip(&variance).map(|(w, var)| w / (var + EPS).sqrt()).collect();
        let shift = bias.iter().zip(mean).zip(&factors).map(|((bias, mean), f)| bias - mean * f);
        let shift = shift.collect();
        Ok((factors, shift))
    }
}
