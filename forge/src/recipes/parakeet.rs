//! Parakeet: `ParakeetForCTC`, `ParakeetForRNNT`, `ParakeetForTDT`.
//!
//! Arithmetic: `transformers`, `models/parakeet/modeling_parakeet.py`: FastConformer (Rekesh et al. 2023, arXiv
//! 2305.05084), transducers (Graves 2012, arXiv 1211.3711) and durations of tokens (Xu et al. 2023, arXiv 2304.06795).
//! An encoder has one graph for each length of window, all in one context; F frames become T = F / 8 rows:
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `encoder`, or `encoder<F>` | `mel` | `[F, mels]` | normalised log-mel frames; anything behind the clip |
//! | | `keep` | `[F, 1]` | 1 for each frame of the clip, 0 behind it |
//! | | → `logits` | `[T, vocab]` | with a CTC head |
//! | | → `y` | `[T, width]` | with a transducer: rows for the joint network |
//! | `predictor` | `x` | `[1, width]` | row of the embedding table for the last token |
//! | | `state` → `next` | `[2 · layers, width]` | output and cell of each LSTM layer |
//! | | → `y` | `[1, width]` | |
//! | `joint` | `x`, `pred` | `[1, width]` | a row of the encoder, and what the predictor gave |
//! | | → `logits` | `[1, vocab + durations]` | |
//!
//! Rows behind a clip are kept from its own: zeros before each convolution, and a mask over keys.

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Conv1d, Conv2d, Elem, Graph, TensorId, UnaryOp};
use qhx_graph::weight::{Storage, Weight, held};
use qhx_types::MASK_VALUE;
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::choices::numbers;
use crate::kit::{
    ENCODER_WEIGHTS, Layers, Processor, Reader, encoder_precision, filters, object, one_or_many,
    sized,
};
use crate::recipe::{ContextPlan, Precision, Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::{RecipeEntry, RecipeOption};

const CLASSES: [&str; 3] = ["ParakeetForCTC", "ParakeetForRNNT", "ParakeetForTDT"];
/// Lengths of windows.
const WINDOWS: RecipeOption = RecipeOption {
    name: "windows",
    values: &[],
    help: "seconds of the audio that the encoder's graphs take at once; 10,30 by default. Each clip goes through the \
           shortest that holds it, a longer one is cut into windows of the longest",
};
const DEFAULT_WINDOWS: [usize; 2] = [10, 30];
/// The longest window in seconds: 5000 rows have positions, and attention grows with their square.
const MAX_WINDOW: usize = 120;
/// Ratio of the longest window to the seconds that only give context, on either side of a cut.
const CONTEXT: usize = 10;
/// Samples of a second.
const RATE: usize = 16_000;
/// Epsilon of LayerNorm and BatchNorm, which the configuration does not have.
const EPS: f32 = 1e-5;
/// Longest wavelength of the relative positions.
const TIMESCALE: f32 = 10_000.0;
/// Added to mels before the logarithm: `LOG_ZERO_GUARD_VALUE`, 2^-24.
const LOG_GUARD: f64 = 1.0 / (1u64 << 24) as f64;

register_recipe!(
    RecipeEntry::new(&CLASSES, recipe)
        .tasks(&[Task::Transcribe])
        .options(&[WINDOWS, ENCODER_WEIGHTS])
);

/// Fields of `config.json` that are read.
#[derive(Debug)]
struct Config {
    hidden: usize,
    layers: usize,
    heads: usize,
    inner: usize,
    attention_bias: bool,
    convolution_bias: bool,
    /// Rows that the depthwise convolution sees; odd.
    kernel: usize,
    /// Convolutions that halve the frames.
    halvings: usize,
    channels: usize,
    mels: usize,
    /// Factor of the rows behind the convolutions.
    scale: f32,
    vocab: usize,
    /// The token that stands for none.
    blank: usize,
    transducer: Option<Transducer>,
}

#[derive(Debug, Clone, Copy)]
struct Transducer {
    width: usize,
    layers: usize,
    max_symbols: usize,
    /// Numbers of frames that a token may last, from 0 on; 0 of them where a token says nothing of that.
    durations: usize,
}

impl Config {
    fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let whole = Reader::whole(checkpoint);
        let reader = Reader::part(checkpoint, "encoder_config")?;
        reader.only("hidden_act", &json!("silu"))?;
        reader.only("subsampling_conv_kernel_size", &json!(3))?;
        reader.only("subsampling_conv_stride", &json!(2))?;
        let hidden = reader.size_or("hidden_size", 1024)?;
        let heads = reader.size_or("num_attention_heads", 8)?;
        reader.only("num_key_value_heads", &json!(heads))?;
        reader.only("head_dim", &json!(hidden / heads))?;
        let kernel = reader.size_or("conv_kernel_size", 9)?;
        let factor = reader.size_or("subsampling_factor", 8)?;
        let mels = reader.size_or("num_mel_bins", 80)?;
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
        let class = checkpoint.architecture().unwrap_or_default();
        let (vocab, pad) = (whole.size("vocab_size")?, whole.get("pad_token_id"));
        let transducer = match class {
            "ParakeetForCTC" => None,
            _ => Some(Transducer::read(&whole, class.ends_with("TDT"))?),
        };
        let blank = if transducer.is_some() { whole.get("blank_token_id") } else { pad };
        let blank = blank.map_or(Some(vocab as u64 - 1), Value::as_u64);
        let Some(blank) = blank.filter(|id| *id < vocab as u64) else {
            let key = if transducer.is_some() { "blank_token_id" } else { "pad_token_id" };
            return Err(whole.fault(format!("{key}: expected a token below {vocab}")));
        };
        let scaled = reader.flag_or("scale_input", true)?;
        Ok(Self {
            hidden,
            layers: reader.layers_or(24)?,
            heads,
            inner: reader.size_or("intermediate_size", 4096)?,
            attention_bias: reader.flag_or("attention_bias", true)?,
            convolution_bias: reader.flag_or("convolution_bias", true)?,
            kernel,
            halvings: factor.trailing_zeros() as usize,
            channels: reader.size_or("subsampling_conv_channels", 256)?,
            mels,
            scale: if scaled { (hidden as f32).sqrt() } else { 1.0 },
            vocab,
            blank: blank as usize,
            transducer,
        })
    }
}

impl Transducer {
    fn read(reader: &Reader<'_>, timed: bool) -> Result<Self> {
        reader.only("hidden_act", &json!("relu"))?;
        let durations = match reader.get("durations").filter(|_| timed) {
            None if timed => 5,
            None => 0,
            Some(found) => {
                let list = found.as_array().map_or(&[][..], Vec::as_slice);
                let counts = list.iter().enumerate().all(|(at, n)| n.as_u64() == Some(at as u64));
                // `transformers` takes the place in the list for the duration.
                if !counts || list.len() < 2 {
                    return Err(reader.bad(
                        "durations",
                        found,
                        "the numbers from 0 on, two or more",
                    ));
                }
                list.len()
            }
        };
        Ok(Self {
            width: reader.size_or("decoder_hidden_size", 640)?,
            layers: match reader.get("num_decoder_layers") {
                Some(_) => reader.bounded("num_decoder_layers", 16)?,
                None => 2,
            },
            max_symbols: reader.size_or("max_symbols_per_step", 10)?,
            durations,
        })
    }
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(|name| vec![name.to_owned()]);
    let config = Config::read(checkpoint)?;
    let (precision, note) = encoder_precision(options);
    if options.shards != 1 {
        let what =
            format!("{} shards, expected 1: the encoder stands in one context", options.shards);
        return Err(Error::new(ErrorKind::Usage, what).hint(match precision {
            Precision::Fp16 => "where it does not fit, --recipe-option encoder=w8a16 halves it",
            _ => "leave --shards out",
        }));
    }
    let audio = Audio::read(checkpoint, &config, options)?;
    let layers = Layers::new(checkpoint, precision, EPS);
    let (mut graphs, mut names) = (Vec::new(), Vec::new());
    for &frames in &audio.frames {
        let name = sized("encoder", frames, audio.frames.len());
        graphs.push(Model { layers, config: &config, frames }.encoder(&name)?);
        names.push(name);
    }
    let encoder = ContextPlan::new("encoder".to_owned(), precision, graphs);
    let mut contexts = vec![encoder.once()];
    let mut plan_params = Map::new();
    plan_params.insert("encoder".to_owned(), one_or_many(names));
    let mut params = object(json!({
        // Of the embedding table, where there is one.
        "hidden": config.transducer.map_or(config.hidden, |transducer| transducer.width),
        "vocab": config.vocab,
        "n_layers": config.layers,
        "n_heads": config.heads,
        "audio": {
            "front_end": audio.front_end,
            "preemphasis": audio.preemphasis,
            "subsampling": 1 << config.halvings,
            "blank": config.blank,
        },
        "transcription": {"window": audio.window, "context": audio.context},
    }));
    let recipe = |contexts, plan_params| {
        Recipe::new("parakeet", "parakeet_transcribe", contexts, plan_params)
            .notes(note.into_iter().collect())
    };
    let Some(transducer) = config.transducer else {
        return Ok(recipe(contexts, plan_params).params(params));
    };
    let Transducer { width, max_symbols, durations, .. } = transducer;
    for graph in [predictor(checkpoint, transducer)?, joint(checkpoint, &config, transducer)?] {
        plan_params.insert(graph.name().to_owned(), json!(graph.name()));
        contexts.push(ContextPlan::alone(graph));
    }
    let start = checkpoint.generation_config().get("decoder_start_token_id");
    let start = start.and_then(Value::as_u64).unwrap_or(config.blank as u64);
    let loops = json!({"start": start, "max_symbols": max_symbols, "durations": durations});
    params.insert("transducer".to_owned(), loops);
    let embed = checkpoint.matrix("decoder.embedding.weight", [config.vocab, width])?;
    Ok(recipe(contexts, plan_params).embed(embed).params(params))
}

/// Conversion of audio to frames and windows.
struct Audio {
    front_end: Value,
    preemphasis: f64,
    /// Frames of the graphs, ascending.
    frames: Vec<usize>,
    /// Seconds of the longest.
    window: f64,
    /// Seconds in front of a window's own words and behind them.
    context: [f64; 2],
}

impl Audio {
    /// `ParakeetFeatureExtractor`: centred frames, of which the last one is masked.
    fn read(checkpoint: &Checkpoint, config: &Config, options: &RecipeOptions) -> Result<Self> {
        let processor = Processor::audio(checkpoint)?;
        for (key, only) in [
            ("/sampling_rate", json!(RATE)),
            ("/feature_size", json!(config.mels)),
            ("/padding_value", json!(0.0)),
        ] {
            processor.only(key, &only)?;
        }
        let size = |key: &str, default: usize| match processor.get(key) {
            None => Ok(default),
            Some(found) => {
                let size = found.as_u64().filter(|n| (1..1 << 16).contains(n));
                size.map(|n| n as usize).ok_or_else(|| processor.bad(key, "a number of samples"))
            }
        };
        let (hop, fft, frame) =
            (size("/hop_length", 160)?, size("/n_fft", 512)?, size("/win_length", 400)?);
        if frame > fft {
            return Err(processor.bad("/win_length", &format!("at most n_fft, {fft}")));
        }
        let preemphasis = match processor.get("/preemphasis") {
            None if processor.is_empty() => 0.97,
            None => 0.0,
            Some(found) => found
                .as_f64()
                .filter(|factor| (0.0..1.0).contains(factor))
                .ok_or_else(|| processor.bad("/preemphasis", "a number from 0 to below 1"))?,
        };
        let factor = 1usize << config.halvings;
        let asked = numbers(options, WINDOWS.name, 1..=MAX_WINDOW)?;
        let asked = asked.unwrap_or_else(|| DEFAULT_WINDOWS.to_vec());
        let whole = |seconds: usize| (seconds * RATE).div_ceil(hop * factor).max(2) * factor;
        let mut frames: Vec<usize> = asked.into_iter().map(whole).collect();
        frames.dedup();
        let seconds = |rows: usize| (rows * factor * hop) as f64 / RATE as f64;
        let rows = frames.last().copied().unwrap_or(2 * factor) / factor;
        let front_end = json!({
            "rate": RATE,
            "frame": frame,
            "hop": hop,
            "fft": fft,
            "window": "symmetric_hann",
            "left": frame / 2,
            "span": frame / 2 + hop,
            "spectrum": "power",
            "filters": {
                "mels": config.mels, "min_hz": 0.0, "max_hz": RATE as f64 / 2.0, "scale": "slaney", "area_norm": true
            },
            "log": {"ln_add": LOG_GUARD},
        });
        let context = [seconds(rows / CONTEXT); 2];
        Ok(Self { front_end, preemphasis, frames, window: seconds(rows), context })
    }
}

/// The prediction network: an embedding's row through LSTM layers (Hochreiter and Schmidhuber 1997; gates in the order
/// of `torch.nn.LSTM`) and a projection. In f16: its weights are few, and its state is carried on.
fn predictor(checkpoint: &Checkpoint, transducer: Transducer) -> Result<Graph> {
    let Transducer { width, layers, .. } = transducer;
    let parts = Layers::new(checkpoint, Precision::Fp16, EPS);
    let mut b = GraphBuilder::new("predictor");
    let mut x = b.input("x", Elem::Activation, &[1, width])?;
    let state = b.input("state", Elem::Activation, &[2 * layers, width])?;
    let mut next = Vec::new();
    for layer in 0..layers {
        b.scope(format!("l{layer}"));
        let tensor = |part: &str| format!("decoder.lstm.{part}_l{layer}");
        let weight = |part: &str| -> Result<Weight> {
            let source = checkpoint.matrix(&tensor(part), [4 * width, width])?;
            Ok(Precision::Fp16.weight(source))
        };
        let mut bias = checkpoint.values(&tensor("bias_ih"), &[4 * width])?;
        let own = checkpoint.values(&tensor("bias_hh"), &[4 * width])?;
        bias.iter_mut().zip(own).for_each(|(all, own)| *all += own);
        let before = b.slice(state, 0, 2 * layer, 2 * layer + 1)?;
        let cell = b.slice(state, 0, 2 * layer + 1, 2 * layer + 2)?;
        let seen = b.linear("ih", x, weight("weight_ih")?, Some(bias))?;
        let kept = b.linear("hh", before, weight("weight_hh")?, None)?;
        let gates = b.add(seen, kept)?;
        let gate = |b: &mut GraphBuilder, at: usize, op| {
            let part = b.slice(gates, 1, at * width, (at + 1) * width)?;
            b.unary(op, part)
        };
        let input = gate(&mut b, 0, UnaryOp::Sigmoid)?;
        let forget = gate(&mut b, 1, UnaryOp::Sigmoid)?;
        let value = gate(&mut b, 2, UnaryOp::Tanh)?;
        let output = gate(&mut b, 3, UnaryOp::Sigmoid)?;
        let kept = b.mul(forget, cell)?;
        let added = b.mul(input, value)?;
        let cell = b.add(kept, added)?;
        let shown = b.unary(UnaryOp::Tanh, cell)?;
        x = b.mul(output, shown)?;
        next.extend([x, cell]);
    }
    b.scope("out");
    let y = parts.linear(&mut b, x, "decoder.decoder_projector", width, true)?;
    b.output("y", y)?;
    let next = b.concat(&next, 0)?;
    b.output("next", next)?;
    b.finish()
}

/// The joint network: logits of tokens, and of durations behind them.
fn joint(checkpoint: &Checkpoint, config: &Config, transducer: Transducer) -> Result<Graph> {
    let Transducer { width, durations, .. } = transducer;
    let parts = Layers::new(checkpoint, Precision::Fp16, EPS);
    let mut b = GraphBuilder::new("joint");
    let x = b.input("x", Elem::Activation, &[1, width])?;
    let predicted = b.input("pred", Elem::Activation, &[1, width])?;
    let both = b.add(x, predicted)?;
    let both = b.relu(both)?;
    let logits = parts.linear(&mut b, both, "joint.head", config.vocab + durations, true)?;
    b.output("logits", logits)?;
    b.finish()
}

/// Makes the graph of the encoder that takes some frames.
struct Model<'a> {
    layers: Layers<'a>,
    config: &'a Config,
    frames: usize,
}

impl Model<'_> {
    /// Rows that the layers have.
    fn rows(&self) -> usize {
        self.frames >> self.config.halvings
    }

    fn encoder(&self, name: &str) -> Result<Graph> {
        let Config { layers: count, vocab, transducer, .. } = *self.config;
        let rows = self.rows();
        let mut b = GraphBuilder::new(name);
        let mel = b.input("mel", Elem::Activation, &[self.frames, self.config.mels])?;
        let keep = b.input("keep", Elem::Activation, &[self.frames, 1])?;
        let mut h = self.subsample(&mut b, mel, keep)?;
        b.scope("mask");
        let keep = self.kept(&mut b, keep, self.config.halvings)?;
        // 0 for rows of the clip, and below every score for those behind it.
        let hidden = b.scale(keep, -MASK_VALUE)?;
        let offset = b.scalar(hidden, MASK_VALUE)?;
        let hidden = b.add(hidden, offset)?;
        let mask = b.reshape(hidden, &[1, 1, rows])?;
        for layer in 0..count {
            let at = format!("encoder.layers.{layer}");
            let scope = |part: &str| format!("l{layer}_{part}");
            b.scope(scope("ffw1"));
            h = self.feed_forward(&mut b, h, &at, 1)?;
            b.scope(scope("attn"));
            let normed = self.layers.layer_norm(&mut b, h, &format!("{at}.norm_self_att"))?;
            let mixed = self.attention(&mut b, normed, &format!("{at}.self_attn"), mask)?;
            h = b.add(h, mixed)?;
            b.scope(scope("conv"));
            let normed = self.layers.layer_norm(&mut b, h, &format!("{at}.norm_conv"))?;
            let mixed = self.convolution(&mut b, normed, &format!("{at}.conv"), keep)?;
            h = b.add(h, mixed)?;
            b.scope(scope("ffw2"));
            h = self.feed_forward(&mut b, h, &at, 2)?;
            h = self.layers.layer_norm(&mut b, h, &format!("{at}.norm_out"))?;
        }
        b.scope("out");
        match transducer {
            None => {
                let weight = self
                    .layers
                    .checkpoint
                    .rows("ctc_head.weight", &[vocab, self.config.hidden, 1])?;
                let bias = self.layers.checkpoint.values("ctc_head.bias", &[vocab])?;
                let logits = b.linear("ctc_head", h, Precision::Fp16.weight(weight), Some(bias))?;
                b.output("logits", logits)?;
            }
            Some(Transducer { width, .. }) => {
                let y = self.layers.linear(&mut b, h, "encoder_projector", width, true)?;
                b.output("y", y)?;
            }
        }
        b.finish()
    }

    /// Rest of `keep` `[frames, 1]` after `halvings` halvings, each of which keeps the first of two.
    fn kept(&self, b: &mut GraphBuilder, keep: TensorId, halvings: usize) -> Result<TensorId> {
        let pairs = b.reshape(keep, &[self.frames >> halvings, 1 << halvings])?;
        b.slice(pairs, 1, 0, 1)
    }

    /// `ParakeetEncoderSubsamplingConv2D`: a convolution that halves frames and mels, and then pairs of a depthwise one
    /// that does so and one that mixes the channels.
    fn subsample(&self, b: &mut GraphBuilder, mel: TensorId, keep: TensorId) -> Result<TensorId> {
        let Config { channels, mels, hidden, halvings, scale, .. } = *self.config;
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
        let Config { inner, attention_bias: bias, hidden, .. } = *self.config;
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
        let Config { hidden, heads, attention_bias: bias, .. } = *self.config;
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
        let Config { hidden, heads, .. } = *self.config;
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
        let Config { hidden, kernel, convolution_bias: biased, .. } = *self.config;
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
        let (hidden, checkpoint) = (self.config.hidden, self.layers.checkpoint);
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
