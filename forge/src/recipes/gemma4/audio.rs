//! The audio tower: its graphs, and what the host needs around them.
//!
//! Arithmetic: `transformers`, `models/gemma4/modeling_gemma4.py`, `Gemma4AudioModel`: two convolutions that leave a
//! quarter of the frames, and conformer layers (arXiv 2005.08100) that attend within chunks. A graph `audio_enc` takes
//! the frames of a clip, fewer than it has room for:
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `mel` | `[4 · tokens, mels]` | log-mel frames; zeros behind the clip |
//! | `keep` | `[2 · tokens, 1]` | 1 for each second frame of the clip, 0 behind it |
//! | → `y` | `[tokens, width]` | rows before the projector's norm |
//!
//! No layer looks ahead, so that rows behind the clip reach none of its rows and need no mask.

use std::f64::consts::{E, LN_2};

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Conv1d, Conv2d, Elem, Graph, TensorId, UnaryOp};
use qhx_graph::weight::{Storage, Weight};
use qhx_types::MASK_VALUE;
use serde_json::{Map, Value, json};

use super::towers::Clipped;
use crate::kit::{Layers, MatrixFile, Processor, Reader, matrices, object, sized};
use crate::recipe::{Precision, RecipeOptions, Tables};
use crate::recipes::choices::numbers;
use crate::registry::RecipeOption;

/// Numbers of soft tokens that graphs make.
pub(super) const AUDIO_TOKENS: RecipeOption = RecipeOption {
    name: "audio-tokens",
    values: &[],
    help: "soft tokens of the audio graphs, 25 a second; 48,192,750 by default. Each clip goes through the smallest \
           that holds it",
};
/// Soft tokens of the longest clip, 30 seconds.
const MAX_TOKENS: usize = 750;
/// Soft tokens of the graphs by default: a command, a sentence, and the longest clip.
const DEFAULT_TOKENS: [usize; 3] = [48, 192, MAX_TOKENS];
/// Samples a second, and of a frame of 20 ms.
const RATE: usize = 16_000;
const FRAME: usize = 320;
/// Mels where the processor declares none.
const MELS: usize = 128;
/// Longest wavelength of the relative positions.
const TIMESCALE: f64 = 10_000.0;
/// Epsilon of the norms for which the configuration has none.
const EPS: f32 = 1e-6;

/// Sizes and constants of the tower.
#[derive(Debug, Clone)]
pub(super) struct Audio {
    hidden: usize,
    layers: usize,
    heads: usize,
    /// Channels of the two convolutions.
    channels: [usize; 2],
    /// Frames of the depthwise convolution.
    kernel: usize,
    residual: f32,
    /// Frames that attention takes at a time: each sees itself and `chunk` − 1 before it.
    chunk: usize,
    cap: f32,
    clips: bool,
    eps: f32,
    /// Width of the rows that come out.
    width: usize,
    mels: usize,
    /// From samples to frames, as `qhx_kit::audio::FrontEnd` reads it.
    front_end: Value,
    /// Soft tokens of the graphs, ascending; whole chunks.
    tokens: Vec<usize>,
}

impl Audio {
    /// Reads `audio_config`.
    pub fn read(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Self> {
        let reader = Reader::part(checkpoint, "audio_config")?;
        reader.only("hidden_act", &json!("silu"))?;
        reader.only("attention_context_right", &json!(0))?;
        let hidden = reader.size_or("hidden_size", 1024)?;
        let heads = reader.size_or("num_attention_heads", 8)?;
        let chunk = reader.size_or("attention_chunk_size", 12)?;
        let left = reader.size_or("attention_context_left", 13)?;
        if !hidden.is_multiple_of(heads) || !hidden.is_multiple_of(2) || left != chunk + 1 {
            return Err(reader.fault(format!(
                "hidden_size {hidden}, num_attention_heads {heads}, attention_chunk_size {chunk}, \
                 attention_context_left {left}: expected an even width that the heads divide, and a context of one more \
                 than the chunk"
            )));
        }
        let channels = reader.get("subsampling_conv_channels").cloned().unwrap_or(json!([128, 32]));
        let channels: Option<Vec<usize>> = channels.as_array().and_then(|list| {
            let size = |n: &Value| n.as_u64().filter(|n| (1..1 << 16).contains(n));
            list.iter().map(|n| size(n).map(|n| n as usize)).collect()
        });
        let Some(Ok(channels)) = channels.map(<[usize; 2]>::try_from) else {
            return Err(reader.fault("subsampling_conv_channels: expected two sizes".to_owned()));
        };
        let processor = Processor::audio(checkpoint)?;
        let mels = mels(&processor, channels[0])?;
        let asked = numbers(options, AUDIO_TOKENS.name, 1..=MAX_TOKENS)?;
        let asked = asked.unwrap_or_else(|| DEFAULT_TOKENS.to_vec());
        let mut tokens: Vec<_> = asked.iter().map(|n| n.next_multiple_of(chunk)).collect();
        tokens.dedup();
        Ok(Self {
            hidden,
            layers: reader.layers_or(12)?,
            heads,
            channels,
            kernel: reader.size_or("conv_kernel_size", 5)?,
            residual: reader.positive(&["residual_weight"])?.unwrap_or(0.5) as f32,
            chunk,
            cap: reader.positive(&["attention_logit_cap"])?.unwrap_or(50.0) as f32,
            clips: reader.flag_or("use_clipped_linears", true)?,
            eps: reader.epsilon(&["rms_norm_eps"], EPS)?,
            width: reader.size_or("output_proj_dims", 1536)?,
            mels,
            front_end: front_end(&processor, mels)?,
            tokens,
        })
    }

    /// The graphs, for the smallest number of soft tokens first.
    pub fn graphs(&self, checkpoint: &Checkpoint, precision: Precision) -> Result<Vec<Graph>> {
        let name = |n: usize| sized("audio_enc", format_args!("_{n}"), self.tokens.len());
        let tower = |&tokens: &usize| Tower {
            config: self,
            clipped: Clipped { checkpoint, clips: self.clips, precision },
            parts: Layers::new(checkpoint, precision, EPS),
            tokens,
        };
        self.tokens.iter().map(tower).map(|tower| tower.graph(&name(tower.tokens))).collect()
    }

    /// The projector.
    pub fn tables(&self, checkpoint: &Checkpoint, hidden: usize) -> Result<Tables> {
        let projector =
            checkpoint.matrix("embed_audio.embedding_projection.weight", [hidden, self.width])?;
        Ok(matrices("audio", vec![MatrixFile::in_f32("proj", "audio_host_proj", projector)]))
    }

    /// `params.audio` of the manifest.
    pub fn params(&self) -> Map<String, Value> {
        object(json!({
            "front_end": self.front_end,
            "width": self.width,
            "max_soft_tokens": MAX_TOKENS.min(self.tokens.last().copied().unwrap_or(MAX_TOKENS)),
            "eps": self.eps,
        }))
    }
}

/// Values of a frame: the `feature_size` of the processor. The convolutions leave a quarter of them, rounded up, and
/// the class derives that quarter from the first number of `channels`, rounded down.
fn mels(processor: &Processor, channels: usize) -> Result<usize> {
    let key = "/feature_size";
    let Some(found) = processor.get(key) else {
        // Of a synthetic model, or the class's own number.
        return Ok(if processor.is_empty() { channels / 4 * 4 } else { MELS });
    };
    let mels = found.as_u64().and_then(|n| usize::try_from(n).ok());
    mels.filter(|mels| mels.div_ceil(4) == channels / 4).ok_or_else(|| {
        let quarter = channels / 4;
        processor.bad(
            key,
            &format!(
                "{} to {}, a quarter of which is the {quarter} columns that subsampling_conv_channels[0] = {channels} \
                 stands for",
                (quarter * 4).saturating_sub(3),
                quarter * 4
            ),
        )
    })
}

/// `Gemma4AudioFeatureExtractor`, with what `processor_config.json` says of it. The class makes a frame where one
/// sample more than its length is there, half of which lies before the clip at first.
fn front_end(processor: &Processor, mels: usize) -> Result<Value> {
    processor.only_all([
        ("/sampling_rate", json!(RATE)),
        ("/dither", json!(0.0)),
        ("/preemphasis", json!(0.0)),
        ("/input_scale_factor", json!(1.0)),
        ("/fft_overdrive", json!(false)),
        ("/padding_value", json!(0.0)),
        ("/mel_floor", json!(0.001)),
        ("/frame_length_ms", json!(1e3 * FRAME as f64 / RATE as f64)),
        ("/hop_length_ms", json!(5e2 * FRAME as f64 / RATE as f64)),
    ])?;
    for key in ["/per_bin_mean", "/per_bin_stddev"] {
        processor.only(key, &Value::Null)?;
    }
    let hertz = |key: &str, default: f64| match processor.get(key) {
        None => Ok(default),
        Some(found) => found
            .as_f64()
            .filter(|found| (0.0..=RATE as f64 / 2.0).contains(found))
            .ok_or_else(|| processor.bad(key, "a frequency up to half the rate")),
    };
    Ok(json!({
        "rate": RATE,
        "frame": FRAME,
        "hop": FRAME / 2,
        "fft": FRAME.next_power_of_two(),
        "window": "periodic_hann",
        "left": FRAME / 2,
        "span": FRAME + 1,
        "spectrum": "magnitude",
        "filters": {
            "mels": mels,
            "min_hz": hertz("/min_frequency", 0.0)?,
            "max_hz": hertz("/max_frequency", 8000.0)?,
            "scale": "htk",
        },
        "log": {"ln_add": 0.001},
    }))
}

/// Makes a graph.
struct Tower<'a> {
    config: &'a Audio,
    clipped: Clipped<'a>,
    parts: Layers<'a>,
    /// Soft tokens that it gives.
    tokens: usize,
}

impl Tower<'_> {
    fn graph(&self, name: &str) -> Result<Graph> {
        let Audio { width, layers, .. } = *self.config;
        let mut b = GraphBuilder::new(name);
        let mut x = self.subsample(&mut b)?;
        for layer in 0..layers {
            let at = format!("audio_tower.layers.{layer}");
            let scope = |part: &str| format!("l{layer}_{part}");
            b.scope(scope("ffw1"));
            x = self.feed_forward(&mut b, x, &format!("{at}.feed_forward1"))?;
            b.scope(scope("attn"));
            x = self.attention(&mut b, x, &at)?;
            b.scope(scope("conv"));
            x = self.convolution(&mut b, x, &format!("{at}.lconv1d"))?;
            b.scope(scope("ffw2"));
            x = self.feed_forward(&mut b, x, &format!("{at}.feed_forward2"))?;
            x = self.parts.norm(&mut b, x, &format!("{at}.norm_out"))?;
        }
        b.scope("out");
        let y = self.parts.linear(&mut b, x, "audio_tower.output_proj", width, true)?;
        b.output("y", y)?;
        b.finish()
    }

    /// `Gemma4AudioSubSampleConvProjection`: frames to rows `[tokens, hidden]`.
    fn subsample(&self, b: &mut GraphBuilder) -> Result<TensorId> {
        let Audio { channels: [first, second], mels, hidden, eps, .. } = *self.config;
        let tokens = self.tokens;
        let mel = b.input("mel", Elem::Activation, &[4 * tokens, mels])?;
        let keep = b.input("keep", Elem::Activation, &[2 * tokens, 1])?;
        let conv = Conv2d { stride: [2, 2], padding: [[1, 1]; 2], ..Conv2d::new([3, 3]) };
        let at = "audio_tower.subsample_conv_projection";
        let mut x = b.reshape(mel, &[1, 1, 4 * tokens, mels])?;
        for (layer, inputs, outputs) in [(0, 1, first), (1, first, second)] {
            b.scope(format!("sub{layer}"));
            let name = format!("{at}.layer{layer}");
            let weight = self
                .clipped
                .checkpoint
                .rows(&format!("{name}.conv.weight"), &[outputs, inputs, 3, 3])?;
            let y = b.conv2d("conv", x, Weight::new(weight, Storage::Float), None, conv)?;
            let (rows, columns) = (2 * tokens / (layer + 1), mels.div_ceil(2 * (layer + 1)));
            // Channels last, as the norm takes them.
            let y = b.transpose(y, &[0, 2, 3, 1])?;
            let y = b.reshape(y, &[rows * columns, outputs])?;
            let weight =
                self.clipped.checkpoint.values(&format!("{name}.norm.weight"), &[outputs])?;
            let weight = b.row("norm_weight", weight)?;
            let bias = b.row("norm_bias", vec![0.0; outputs])?;
            let y = b.layer_norm(y, eps, weight, bias)?;
            let y = b.relu(y)?;
            if layer == 1 {
                x = b.reshape(y, &[rows, columns * outputs])?;
                continue;
            }
            // Rows behind the clip are not 0 behind a norm, but the next convolution shall find zeros there.
            let y = b.reshape(y, &[rows, columns * outputs])?;
            let y = b.mul(y, keep)?;
            let y = b.reshape(y, &[1, rows, columns, outputs])?;
            x = b.transpose(y, &[0, 3, 1, 2])?;
        }
        b.scope("sub");
        self.parts.linear(b, x, &format!("{at}.input_proj_linear"), hidden, false)
    }

    /// `Gemma4AudioFeedForward`.
    fn feed_forward(&self, b: &mut GraphBuilder, x: TensorId, at: &str) -> Result<TensorId> {
        let hidden = self.config.hidden;
        let h = self.parts.norm(b, x, &format!("{at}.pre_layer_norm"))?;
        let h = self.clipped.linear(b, h, &format!("{at}.ffw_layer_1"), 4 * hidden)?;
        let h = b.silu(h)?;
        let h = self.clipped.linear(b, h, &format!("{at}.ffw_layer_2"), hidden)?;
        let post = format!("{at}.post_layer_norm");
        let h = self.parts.scaled_norm(b, h, &post, self.config.residual)?;
        b.add(x, h)
    }

    /// `Gemma4AudioAttention`: a frame sees itself and the `chunk` − 1 before it, those of its own chunk and of the one
    /// before. Scores are `q·(k + r)` with a learned r for each distance, and capped.
    fn attention(&self, b: &mut GraphBuilder, x: TensorId, at: &str) -> Result<TensorId> {
        let tokens = self.tokens;
        let Audio { hidden, heads, chunk, cap, .. } = *self.config;
        let (dim, chunks, context) = (hidden / heads, tokens / chunk, 2 * chunk);
        let name = |part: &str| format!("{at}.self_attn.{part}");
        let h = self.parts.norm(b, x, &format!("{at}.norm_pre_attn"))?;
        let project = |b: &mut GraphBuilder, part: &str| {
            let y = self.clipped.linear(b, h, &name(part), hidden)?;
            b.reshape(y, &[tokens, heads, dim])
        };
        let q = project(b, "q_proj")?;
        let factors = self.query_factors(&name("per_dim_scale"), dim)?;
        let factors = b.constant("per_dim_scale", Elem::Activation, &[1, 1, dim], factors)?;
        let q = b.mul(q, factors)?;
        let q = b.transpose(q, &[1, 0, 2])?;
        let [k, v] = [("k_proj", "k_pad"), ("v_proj", "v_pad")].map(|(part, pad)| {
            let y = project(b, part)?;
            let y = b.transpose(y, &[1, 0, 2])?;
            let zeros = vec![0.0; heads * chunk * dim];
            let zeros = b.constant(pad, Elem::Activation, &[heads, chunk, dim], zeros)?;
            // Before each chunk the one in front of it; before the first, zeros.
            let padded = b.concat(&[zeros, y], 1)?;
            let before = b.slice(padded, 1, 0, tokens)?;
            let before = b.reshape(before, &[heads, chunks, chunk, dim])?;
            let own = b.reshape(y, &[heads, chunks, chunk, dim])?;
            b.concat(&[before, own], 2)
        });
        let (k, v) = (k?, v?);
        // Scores by distance; row i of a chunk has distance d in column chunk − d, which is column i + chunk − d of
        // its context: rows of one more than the context, read as rows of the context, are shifted so.
        let relative = self.relative_keys(&name("relative_k_proj"), heads, dim)?;
        let relative =
            b.constant("relative_k", Elem::Activation, &[heads, context + 1, dim], relative)?;
        let shifted = b.matmul(q, relative, true)?;
        let shifted = b.reshape(shifted, &[heads, chunks, chunk * (context + 1)])?;
        let shifted = b.slice(shifted, 2, 0, chunk * context)?;
        let shifted = b.reshape(shifted, &[heads, chunks, chunk, context])?;
        let q = b.reshape(q, &[heads, chunks, chunk, dim])?;
        let scores = b.matmul(q, k, true)?;
        let scores = b.add(scores, shifted)?;
        let scores = b.scale(scores, 1.0 / cap)?;
        let scores = b.unary(UnaryOp::Tanh, scores)?;
        let scores = b.scale(scores, cap)?;
        let mask = b.constant(
            "band",
            Elem::Activation,
            &[1, chunks, chunk, context],
            band(chunks, chunk),
        )?;
        let scores = b.add(scores, mask)?;
        let weights = b.softmax(scores)?;
        let mixed = b.matmul(weights, v, false)?;
        let mixed = b.reshape(mixed, &[heads, tokens, dim])?;
        let mixed = b.transpose(mixed, &[1, 0, 2])?;
        let mixed = b.reshape(mixed, &[tokens, hidden])?;
        let out = self.clipped.linear(b, mixed, &name("post"), hidden)?;
        let out = self.parts.norm(b, out, &format!("{at}.norm_post_attn"))?;
        b.add(x, out)
    }

    /// Factors of the elements of a query: `d^-½ / ln 2 · softplus(per_dim_scale)`, and those of the keys, `ln(1 + e) /
    /// ln 2`, which stand here instead.
    fn query_factors(&self, name: &str, dim: usize) -> Result<Vec<f32>> {
        let scales = self.clipped.checkpoint.values(name, &[dim])?;
        let factor = key_factor() / ((dim as f64).sqrt() * LN_2);
        let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
        Ok(scales.iter().map(|s| (softplus(f64::from(*s)) * factor) as f32).collect())
    }

    /// `relative_k_proj` of sinusoids (`Gemma4AudioRelPositionalEncoding`) as `[heads, context + 1, dim]`: the distance
    /// `chunk` first, 0 last, and zeros behind it. Divided by the keys' factor, that of the queries has it.
    fn relative_keys(&self, name: &str, heads: usize, dim: usize) -> Result<Vec<f32>> {
        let Audio { hidden, chunk, .. } = *self.config;
        let weight =
            self.clipped.checkpoint.values(&format!("{name}.weight"), &[hidden, hidden])?;
        let half = hidden / 2;
        let step = TIMESCALE.ln() / (half.max(2) - 1) as f64;
        let context = 2 * chunk;
        let mut keys = vec![0.0; heads * (context + 1) * dim];
        for (row, distance) in (0..=chunk).rev().enumerate() {
            let angle = |j: usize| distance as f64 * (-step * j as f64).exp();
            let sinusoid: Vec<f64> = (0..half)
                .map(|j| angle(j).sin())
                .chain((0..half).map(|j| angle(j).cos()))
                .collect();
            for (output, weights) in weight.chunks_exact(hidden.max(1)).enumerate() {
                let sum: f64 = weights.iter().zip(&sinusoid).map(|(w, s)| f64::from(*w) * s).sum();
                let (head, element) = (output / dim, output % dim);
                let place = (head * (context + 1) + row) * dim + element;
                if let Some(key) = keys.get_mut(place) {
                    *key = (sum / key_factor()) as f32;
                }
            }
        }
        Ok(keys)
    }

    /// `Gemma4AudioLightConv1d`: a gate, a depthwise convolution that looks back only, and a norm.
    fn convolution(&self, b: &mut GraphBuilder, x: TensorId, at: &str) -> Result<TensorId> {
        let tokens = self.tokens;
        let Audio { hidden, kernel, eps, .. } = *self.config;
        let parts = Layers { eps, ..self.parts };
        let h = parts.norm(b, x, &format!("{at}.pre_layer_norm"))?;
        let h = self.clipped.linear(b, h, &format!("{at}.linear_start"), 2 * hidden)?;
        let value = b.slice(h, 1, 0, hidden)?;
        let gate = b.slice(h, 1, hidden, 2 * hidden)?;
        let gate = b.unary(UnaryOp::Sigmoid, gate)?;
        let h = b.mul(value, gate)?;
        let h = b.transpose(h, &[1, 0])?;
        let h = b.reshape(h, &[1, hidden, tokens])?;
        let weight = format!("{at}.depthwise_conv1d.weight");
        let weight = self.clipped.checkpoint.rows(&weight, &[hidden, 1, kernel])?;
        let conv = Conv1d { groups: hidden, ..Conv1d::causal(kernel) };
        let h = b.conv1d("depthwise", h, Weight::new(weight, Storage::Float), None, conv)?;
        let h = b.reshape(h, &[hidden, tokens])?;
        let h = b.transpose(h, &[1, 0])?;
        let h = parts.norm(b, h, &format!("{at}.conv_norm"))?;
        let h = b.silu(h)?;
        let h = self.clipped.linear(b, h, &format!("{at}.linear_end"), hidden)?;
        b.add(x, h)
    }
}

/// `ln(1 + e) / ln 2`, which multiplies the keys.
fn key_factor() -> f64 {
    E.ln_1p() / LN_2
}

/// The mask `[chunks, chunk, 2 · chunk]`: row i sees the columns after i up to i + chunk; those of a chunk before the
/// first are not there.
fn band(chunks: usize, chunk: usize) -> Vec<f32> {
    let mut mask = Vec::with_capacity(chunks * chunk * 2 * chunk);
    for part in 0..chunks {
        for row in 0..chunk {
            let seen = |column: usize| {
                (row + 1..=row + chunk).contains(&column) && (part > 0 || column >= chunk)
            };
            mask.extend((0..2 * chunk).map(|column| if seen(column) { 0.0 } else { MASK_VALUE }));
        }
    }
    mask
}
