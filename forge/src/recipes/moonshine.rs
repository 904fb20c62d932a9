//! Moonshine (`MoonshineForConditionalGeneration`): tiny, base, and those of one other language each.
//!
//! Arithmetic: `transformers`, `models/moonshine/modeling_moonshine.py` (Jeffries et al. 2024, arXiv 2410.15608). The
//! host makes frames of samples: the first convolution, tanh, and the norm over all frames of the clip and no others.
//! An encoder has one graph for each length of window, of R rows and F = 6 R + 12 frames:
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `encoder`, or `encoder<R>` | `frames` | `[F, hidden]` | normalised frames, and zeros behind the clip |
//! | | `keep` | `[R, 1]` | 1 for each row of the clip, 0 behind it |
//! | | → `cross_k_i`, `cross_v_i` | `[heads, dim, longest]`, `[heads, longest, dim]` | of each layer of the decoder; keys transposed |
//! | | → `cross_mask` | `[1, longest]` | hides what lies behind the clip |
//! | `decode`, `prefill<P>` | `x` → `y` | `[P, hidden]` | rows of the embedding table |
//! | | `cos`, `sin` | `[P, rotary / 2]` | |
//! | | `cmask` | `[P, max_ctx + P]` | added to scores; the last P slots are the graph's own tokens |
//! | | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[heads, max_ctx, dim]` → `[heads, P, dim]` | |
//! | | `cross_*` | as the encoder gives them | |
//! | `lmhead` | `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |

use std::ops::Range;

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use qhx_graph::weight::{Storage, Weight, held};
use serde_json::json;

use super::choices::{number, windows};
use super::whisper::names;
use crate::kit::{
    Attend, AttendInputs, Attention, CrossRows, Decoder, DecoderParams, ENCODER_WEIGHTS, Heads,
    Layers, MatrixFile, Processor, Reader, Step, check_shape, decoder, encoder_precision, filters,
    kept_mask, matrices, object, prefill_rows, sized,
};
use crate::recipe::{Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::{RecipeEntry, RecipeOption};

const WINDOWS: RecipeOption = RecipeOption {
    name: "windows",
    values: &[],
    help: "seconds of the audio that the encoder's graphs take at once; 10,30 by default. Each clip goes through the \
           shortest that holds it, a longer one is cut into windows of the longest",
};
const DEFAULT_WINDOWS: [usize; 2] = [10, 30];
/// The longest window in seconds; published models are trained on up to 30.
const MAX_WINDOW: usize = 60;
const RATE_OF_TOKENS: RecipeOption = RecipeOption {
    name: "tokens-per-second",
    values: &[],
    help: "the most tokens that a second of audio gives, as the model's card has it: 6 by default, 13 for models of \
           languages with many tokens",
};
/// Tokens of a second, `6.5` of the cards of English models.
const TOKENS_PER_SECOND: f64 = 6.5;
/// Samples of a second.
const RATE: usize = 16_000;
/// Samples that the first convolution sees, and by which it moves on.
const FRAME: usize = 127;
const HOP: usize = 64;
/// Frames that the second convolution sees, and by which it moves on; and of the third.
const TAPS: [usize; 2] = [7, 3];
const STRIDES: [usize; 2] = [3, 2];
/// Epsilon of the norms, which the configuration does not have.
const EPS: f32 = 1e-5;

register_recipe!(
    RecipeEntry::new(&["MoonshineForConditionalGeneration"], recipe)
        .tasks(&[Task::Transcribe])
        .prefill_graphs()
        .longest(longest)
        .options(&[WINDOWS, RATE_OF_TOKENS, ENCODER_WEIGHTS])
);

/// Fields of `config.json` that are read.
#[derive(Debug)]
struct Config {
    hidden: usize,
    vocab: usize,
    inner: usize,
    /// Layers of the encoder and of the decoder.
    layers: [usize; 2],
    heads: Heads,
    bias: bool,
    /// Elements of a head that turn.
    rotary: usize,
    theta: f64,
    /// Positions of the decoder.
    positions: usize,
    tied: bool,
    start: u64,
}

impl Config {
    fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::whole(checkpoint);
        reader.only("encoder_hidden_act", &json!("gelu"))?;
        reader.only("decoder_hidden_act", &json!("silu"))?;
        let hidden = reader.size_or("hidden_size", 288)?;
        let query = reader.size_or("encoder_num_attention_heads", 8)?;
        // The class makes the queries of as many heads as the keys have, and has one number for both halves.
        for key in [
            "decoder_num_attention_heads",
            "encoder_num_key_value_heads",
            "decoder_num_key_value_heads",
        ] {
            reader.only(key, &json!(query))?;
        }
        if !hidden.is_multiple_of(query) {
            return Err(reader.fault(format!(
                "hidden_size is {hidden}, expected a multiple of encoder_num_attention_heads, {query}"
            )));
        }
        let heads = Heads { query, groups: query, dim: hidden / query };
        reader.only("head_dim", &json!(heads.dim))?;
        let nested = format!("{}.partial_rotary_factor", reader.rope_key());
        let share = reader.positive(&[&nested, "partial_rotary_factor"])?.unwrap_or(0.9);
        let rotary = (heads.dim as f64 * share) as usize;
        if rotary == 0 || rotary > heads.dim || !rotary.is_multiple_of(2) {
            return Err(reader.fault(format!(
                "partial_rotary_factor is {share} of heads of {}, expected an even number of elements",
                heads.dim
            )));
        }
        let layers = |part: &str| reader.layers_of(&format!("{part}_num_hidden_layers"), 6);
        Ok(Self {
            hidden,
            vocab: reader.size_or("vocab_size", 32768)?,
            inner: reader.size_or("intermediate_size", 1152)?,
            layers: [layers("encoder")?, layers("decoder")?],
            heads,
            bias: reader.flag_or("attention_bias", false)?,
            rotary,
            theta: reader.rope_theta(10_000.0)?,
            positions: reader.size_or("max_position_embeddings", 512)?,
            tied: reader.tied(true)?,
            start: reader.size_or("decoder_start_token_id", 1)? as u64,
        })
    }
}

fn longest(checkpoint: &Checkpoint, _: Task) -> Option<usize> {
    Config::read(checkpoint).ok().map(|config| config.positions)
}

/// Rows of the encoder that samples become; 0 for fewer than one row sees.
fn rows_of(samples: usize) -> usize {
    let steps = |size: usize, taps: usize, stride: usize| {
        size.checked_sub(taps).map_or(0, |rest| rest / stride + 1)
    };
    let frames = steps(samples, FRAME, HOP);
    TAPS.iter().zip(STRIDES).fold(frames, |size, (taps, stride)| steps(size, *taps, stride))
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint)?;
    let Config { hidden, vocab, heads, rotary, theta, .. } = config;
    let count = config.layers[1];
    check_shape(options, count, Some(config.positions))?;
    Processor::audio(checkpoint)?.only_all([
        ("/sampling_rate", json!(RATE)),
        ("/feature_size", json!(1)),
        ("/do_normalize", json!(false)),
        ("/padding_value", json!(0.0)),
    ])?;
    let windows = windows(options, MAX_WINDOW, &DEFAULT_WINDOWS)?;
    let rows: Vec<usize> = windows.iter().map(|seconds| rows_of(seconds * RATE)).collect();
    let longest = rows.last().copied().unwrap_or(1);
    let checkpoint = &checkpoint.renamed(names);
    let layers = Layers::decoder(checkpoint, options, EPS);
    let model = Model { layers, config: &config, longest };
    let Decoder { contexts, plan_params } = decoder(
        options,
        count,
        &prefill_rows(options, &[])?,
        |name, range, step| model.decoder(name, range, step),
        layers.lmhead(hidden, vocab, config.tied, None)?,
    )?;
    let (precision, note) = encoder_precision(options);
    let of_encoder = Model { layers: Layers { precision, ..layers }, ..model };
    let graph = |rows: &usize| {
        let name = sized("encoder", *rows, windows.len());
        of_encoder.encoder(&name, CrossRows { rows: *rows, longest })
    };
    let graphs = rows.iter().map(graph).collect::<Result<_>>()?;
    let tokens = number(options, RATE_OF_TOKENS.name, 1..=100)?;
    let tokens = tokens.map_or(TOKENS_PER_SECOND, |tokens| tokens as f64);
    let shape = DecoderParams { hidden, vocab, layers: count, heads, rope_theta: theta };
    let mut params = shape.map(options.max_ctx);
    params.extend(object(json!({
        "rotary_dim": rotary,
        "audio": {
            "token_id": config.start,
            "rate": RATE,
            "frame": FRAME,
            "hop": HOP,
            "taps": TAPS,
            "strides": STRIDES,
            "window": windows.last(),
            "eps": EPS,
        },
        "transcription": {"prompt": "{audio}", "tokens_per_second": tokens},
    })));
    Ok(Recipe::new("moonshine", "moonshine_transcribe", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [vocab, hidden])?)
        .params(params)
        .ahead("encoder", precision, graphs)
        .notes(note.into_iter().collect())
        .tables(vec![matrices("frames", frames(checkpoint, hidden)?)]))
}

/// What the host makes frames with: the first convolution, and weight and bias of the norm behind it.
fn frames(checkpoint: &Checkpoint, hidden: usize) -> Result<Vec<MatrixFile>> {
    let convolution = checkpoint.rows("encoder.conv1.weight", &[hidden, 1, FRAME])?;
    let mut norm = checkpoint.values("encoder.groupnorm.weight", &[hidden])?;
    norm.extend(checkpoint.values("encoder.groupnorm.bias", &[hidden])?);
    let norm = held("encoder.groupnorm", [2, hidden], norm);
    Ok(vec![
        MatrixFile::in_f32("convolution", "convolution", convolution),
        MatrixFile::in_f32("norm", "norm", norm),
    ])
}

/// Makes the graphs.
#[derive(Clone, Copy)]
struct Model<'a> {
    layers: Layers<'a>,
    config: &'a Config,
    /// Rows of the encoder's longest graph.
    longest: usize,
}

impl Model<'_> {
    fn encoder(&self, name: &str, cross: CrossRows) -> Result<Graph> {
        let rows = cross.rows;
        let mut b = GraphBuilder::new(name);
        b.scope("conv");
        let mut h = self.convolutions(&mut b, rows)?;
        b.scope("mask");
        let keep = b.input("keep", Elem::Activation, &[rows, 1])?;
        let kept = kept_mask(&mut b, keep)?;
        let mask = b.reshape(kept, &[1, 1, 1, rows])?;
        let tables = self.tables(&mut b, rows)?;
        let attend = Attend { tables: Some(tables), mask: Some(mask), ..Attend::whole(rows) };
        for layer in 0..self.config.layers[0] {
            let at = format!("encoder.layers.{layer}");
            h = self.own(&mut b, h, &at, layer, false, &attend)?;
            b.scope(format!("l{layer}_mlp"));
            let normed = self.norm(&mut b, h, &format!("{at}.post_attention_layernorm"))?;
            let [first, second] = ["fc1", "fc2"].map(|part| format!("{at}.mlp.{part}"));
            let parts = [first.as_str(), second.as_str()];
            let inner = self.config.inner;
            let out = self.layers.feed_forward(&mut b, normed, parts, inner, GraphBuilder::gelu)?;
            h = b.add(h, out)?;
        }
        b.scope("final");
        let h = self.norm(&mut b, h, "encoder.layer_norm")?;
        for layer in 0..self.config.layers[1] {
            b.scope(format!("cross{layer}"));
            let attention = self.attention(format!("layers.{layer}.encoder_attn"), layer);
            let keys = self.layers.cross_keys(&mut b, h, &attention)?;
            cross.outputs(&mut b, layer, keys)?;
        }
        cross.mask_output(&mut b, kept)?;
        b.finish()
    }

    /// The second and the third convolution as matmuls over rows that stand side by side: no padding, so that what lies
    /// behind a clip reaches none of its rows.
    fn convolutions(&self, b: &mut GraphBuilder, rows: usize) -> Result<TensorId> {
        let hidden = self.config.hidden;
        let middle = 2 * (rows + 1);
        let groups = middle + 2;
        let frames = b.input("frames", Elem::Activation, &[3 * groups, hidden])?;
        let threes = b.reshape(frames, &[groups, 3 * hidden])?;
        let first = b.slice(threes, 0, 0, middle)?;
        let second = b.slice(threes, 0, 1, middle + 1)?;
        let third = b.slice(threes, 0, 2, middle + 2)?;
        let third = b.slice(third, 1, 0, hidden)?;
        let seen = b.concat(&[first, second, third], 1)?;
        let x = self.by_taps(b, "conv2", seen, 2 * hidden, TAPS[0])?;
        let pairs = b.reshape(x, &[rows + 1, 4 * hidden])?;
        let first = b.slice(pairs, 0, 0, rows)?;
        let second = b.slice(pairs, 0, 1, rows + 1)?;
        let second = b.slice(second, 1, 0, 2 * hidden)?;
        let seen = b.concat(&[first, second], 1)?;
        self.by_taps(b, "conv3", seen, hidden, TAPS[1])
    }

    /// GELU of a convolution whose inputs stand side by side, tap by tap.
    fn by_taps(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: TensorId,
        outputs: usize,
        taps: usize,
    ) -> Result<TensorId> {
        let (width, at) = (b.width(x)?, format!("encoder.{name}"));
        let (weight, bias) = filters(self.layers.checkpoint, &at, &[outputs, width / taps, taps])?;
        let values: Vec<f32> = weight
            .to_f32()?
            .chunks_exact(width)
            .flat_map(|filter| (0..taps).flat_map(|tap| filter.iter().skip(tap).step_by(taps)))
            .copied()
            .collect();
        let values = held(format!("{at}.weight"), [outputs, width], values);
        let x = b.linear(name, x, Weight::new(values, Storage::Float), Some(bias))?;
        b.gelu(x)
    }

    /// Cosines and sines of all rows.
    fn tables(&self, b: &mut GraphBuilder, rows: usize) -> Result<[TensorId; 2]> {
        let Config { rotary, theta, .. } = *self.config;
        let half = rotary / 2;
        let angle = |at: usize| {
            let frequency = theta.powf(-2.0 * (at % half) as f64 / rotary as f64) as f32;
            f64::from((at / half) as f32 * frequency)
        };
        let mut table = |name: &str, of: fn(f64) -> f64| {
            let values = (0..rows * half).map(|at| of(angle(at)) as f32).collect();
            b.constant(name, Elem::Activation, &[rows, 1, half], values)
        };
        Ok([table("cos", f64::cos)?, table("sin", f64::sin)?])
    }

    /// Tokens through the layers of `range`.
    fn decoder(&self, name: &str, range: Range<usize>, step: Step) -> Result<Graph> {
        let Config { hidden, heads, rotary, layers: [_, count], .. } = *self.config;
        let last = range.end == count;
        let mut b = GraphBuilder::new(name);
        let mut h = b.input("x", Elem::Activation, &[step.rows, hidden])?;
        let attend = Attend::inputs(&mut b, &AttendInputs::of(rotary, step))?;
        let cross = CrossRows { rows: self.longest, longest: self.longest };
        let mask = cross.mask_input(&mut b)?;
        for layer in range {
            let at = format!("layers.{layer}");
            h = self.own(&mut b, h, &at, layer, true, &attend)?;
            b.scope(format!("l{layer}_cross"));
            let keys = cross.inputs(&mut b, layer, heads)?;
            let normed = self.norm(&mut b, h, &format!("{at}.post_attention_layernorm"))?;
            let attention = self.attention(format!("{at}.encoder_attn"), layer);
            let [mixed, _] =
                self.layers.cross_attention(&mut b, normed, &attention, keys, Some(mask))?;
            h = b.add(h, mixed)?;
            b.scope(format!("l{layer}_mlp"));
            let normed = self.norm(&mut b, h, &format!("{at}.final_layernorm"))?;
            let out = self.gated(&mut b, normed, &format!("{at}.mlp"))?;
            h = b.add(h, out)?;
        }
        if last {
            b.scope("final");
            h = self.norm(&mut b, h, "norm")?;
        }
        b.output("y", h)?;
        b.finish()
    }

    /// `MoonshineDecoderMLP`: the second half of the first projection is the gate.
    fn gated(&self, b: &mut GraphBuilder, x: TensorId, at: &str) -> Result<TensorId> {
        let Config { hidden, inner, .. } = *self.config;
        let both = self.layers.linear(b, x, &format!("{at}.fc1"), 2 * inner, true)?;
        let value = b.slice(both, 1, 0, inner)?;
        let gate = b.slice(both, 1, inner, 2 * inner)?;
        let gate = b.silu(gate)?;
        let x = b.mul(value, gate)?;
        self.layers.linear(b, x, &format!("{at}.fc2"), hidden, true)
    }

    fn own(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        at: &str,
        layer: usize,
        cached: bool,
        attend: &Attend,
    ) -> Result<TensorId> {
        b.scope(format!("l{layer}_attn"));
        let normed = self.norm(b, h, &format!("{at}.input_layernorm"))?;
        let attention = self.attention(format!("{at}.self_attn"), layer);
        let attention = Attention { cached, neighbours: true, ..attention };
        let mixed = self.layers.attention(b, normed, &attention, attend)?;
        b.add(h, mixed)
    }

    /// `MoonshineAttention`: the projection back has no bias.
    fn attention(&self, name: String, layer: usize) -> Attention<'static> {
        let Config { heads, bias, .. } = *self.config;
        Attention { bias: [bias; 3], ..Attention::new(name, layer, heads) }
    }

    /// LayerNorm without a bias.
    fn norm(&self, b: &mut GraphBuilder, x: TensorId, name: &str) -> Result<TensorId> {
        self.layers.layer_norm_of(b, x, name, false)
    }
}
