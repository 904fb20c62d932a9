//! Whisper (`WhisperForConditionalGeneration`): tiny to large-v3-turbo.
//!
//! Arithmetic: `transformers`, `models/whisper/modeling_whisper.py` (Radford et al. 2022, arXiv 2212.04356).
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `encoder` | `mel` | `[2 · positions, mels]` | log-mel frames of a clip with silence behind it |
//! | | → `cross_k_i`, `cross_v_i` | `[heads, dim, positions]`, `[heads, positions, dim]` | of each layer of the decoder; keys transposed |
//! | `decode`, `prefill<P>` | `x`, `pos` → `y` | `[P, hidden]` | rows of the embedding table and of the positions |
//! | | `cmask` | `[P, max_ctx + P]` | added to scores; the last P slots are the graph's own tokens |
//! | | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[heads, max_ctx, dim]` → `[heads, P, dim]` | |
//! | | `cross_k_i`, `cross_v_i` | as the encoder gives them | |
//! | | → `align_i` | `[n, P, positions]` | weights of the n alignment heads of layer i, for times of words; of the narrowest graph for several tokens, or of `decode` where there is none |
//! | `lmhead` | `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |

use std::ops::Range;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use qhx_graph::weight::{Storage, Weight, held};
use serde_json::{Map, Value, json};

use crate::kit::{
    Attend, AttendInputs, Attention, CrossRows, Decoder, ENCODER_WEIGHTS, Heads, Layers,
    MatrixFile, Processor, Reader, Step, check_shape, decoder, encoder_precision, filters,
    matrices, object, prefill_rows,
};
use crate::recipe::{Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::RecipeEntry;

const CLASSES: [&str; 1] = ["WhisperForConditionalGeneration"];
/// Epsilon of the norms, which the configuration does not have.
const EPS: f32 = 1e-5;
/// Tokens of the prefill graph by default: those that begin a transcription.
const PREFILL: [usize; 1] = [4];
/// Samples of a second, of a frame, and between frames.
const RATE: usize = 16_000;
const FRAME: usize = 400;
const HOP: usize = 160;
/// Frames that a convolution of the encoder sees.
const TAPS: usize = 3;
/// Argument whose GELU is 0.
const FAR_BELOW: f32 = -1024.0;

register_recipe!(
    RecipeEntry::new(&CLASSES, recipe)
        .tasks(&[Task::Transcribe])
        .prefill_graphs()
        .longest(longest)
        .options(&[ENCODER_WEIGHTS])
);

/// Fields of `config.json` that are read.
#[derive(Debug)]
struct Config {
    hidden: usize,
    vocab: usize,
    mels: usize,
    /// Positions of the encoder, two frames each.
    sources: usize,
    /// Positions of the decoder.
    targets: usize,
    encoder: Tower,
    decoder: Tower,
    /// Width of the median filter of times.
    median: usize,
}

#[derive(Debug, Clone, Copy)]
struct Tower {
    layers: usize,
    heads: Heads,
    inner: usize,
}

impl Config {
    fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::whole(checkpoint);
        reader.only("activation_function", &json!("gelu"))?;
        reader.only("scale_embedding", &json!(false))?;
        reader.only("tie_word_embeddings", &json!(true))?;
        let hidden = reader.size("d_model")?;
        let tower = |part: &str| -> Result<Tower> {
            let query = reader.size(&format!("{part}_attention_heads"))?;
            if !hidden.is_multiple_of(query) {
                return Err(reader.fault(format!(
                    "d_model is {hidden}, expected a multiple of {part}_attention_heads, {query}"
                )));
            }
            Ok(Tower {
                layers: reader.bounded(&format!("{part}_layers"), 256)?,
                heads: Heads { query, groups: query, dim: hidden / query },
                inner: reader.size(&format!("{part}_ffn_dim"))?,
            })
        };
        Ok(Self {
            hidden,
            vocab: reader.size("vocab_size")?,
            mels: reader.size_or("num_mel_bins", 80)?,
            sources: reader.size_or("max_source_positions", 1500)?,
            targets: reader.size_or("max_target_positions", 448)?,
            encoder: tower("encoder")?,
            decoder: tower("decoder")?,
            median: reader.size_or("median_filter_width", 7)?,
        })
    }
}

/// Names of tensors of an encoder and a decoder: the decoder's are asked for without its prefix.
pub(super) fn names(name: &str) -> Vec<String> {
    if let Some(head) = name.strip_prefix("lm_head") {
        return vec![format!("proj_out{head}")];
    }
    let whole = name.starts_with("encoder.");
    let name = if whole { name.to_owned() } else { format!("decoder.{name}") };
    vec![format!("model.{name}"), name]
}

/// The decoder has no positions beyond.
fn longest(checkpoint: &Checkpoint, _: Task) -> Option<usize> {
    Config::read(checkpoint).ok().map(|config| config.targets)
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint)?;
    let Config { hidden, vocab, targets, decoder: Tower { layers: count, heads, .. }, .. } = config;
    check_shape(options, count, Some(targets))?;
    let checkpoint = &checkpoint.renamed(names);
    let layers = Layers::decoder(checkpoint, options, EPS);
    let prefill = prefill_rows(options, &PREFILL)?;
    let aligning = prefill.first().copied().unwrap_or(1);
    let alignment = alignment_heads(checkpoint, &config)?;
    let timed = !alignment.is_empty();
    let model = Model { layers, config: &config, alignment, aligning };
    let Decoder { contexts, plan_params } = decoder(
        options,
        count,
        &prefill,
        |name, range, step| model.decoder(name, range, step),
        layers.lmhead(hidden, vocab, true, None)?,
    )?;
    let (precision, note) = encoder_precision(options);
    let encoder = Model { layers: Layers { precision, ..model.layers }, ..model }.encoder()?;
    let mut params = object(json!({
        "hidden": hidden,
        "vocab": vocab,
        "n_layers": count,
        "max_ctx": options.max_ctx,
        "n_heads": heads.query,
        "n_kv_heads": heads.groups,
        "head_dim": heads.dim,
        "kv_dim": hidden,
    }));
    let start = Reader::whole(checkpoint).size("decoder_start_token_id")?;
    let audio = json!({"front_end": front_end(checkpoint, &config)?, "token_id": start});
    params.insert("audio".to_owned(), audio);
    let mut transcription = transcription(checkpoint, vocab)?;
    if timed {
        transcription.insert("median".to_owned(), json!(config.median));
    }
    params.insert("transcription".to_owned(), Value::Object(transcription));
    let positions = checkpoint.matrix("embed_positions.weight", [targets, hidden])?;
    Ok(Recipe::new("whisper", "whisper_transcribe", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [vocab, hidden])?)
        .params(params)
        .ahead("encoder", precision, vec![encoder])
        .notes(note.into_iter().collect())
        .tables(vec![matrices(
            "positions",
            vec![MatrixFile::stored("table", "positions", positions)],
        )]))
}

/// `WhisperFeatureExtractor`, whose frames are centred and whose last one is left out.
fn front_end(checkpoint: &Checkpoint, config: &Config) -> Result<Value> {
    let processor = Processor::audio(checkpoint)?;
    processor.only_all([
        ("/sampling_rate", json!(RATE)),
        ("/n_fft", json!(FRAME)),
        ("/hop_length", json!(HOP)),
        ("/feature_size", json!(config.mels)),
        ("/dither", json!(0.0)),
        ("/padding_value", json!(0.0)),
        // Two frames a position.
        ("/chunk_length", json!((2 * config.sources * HOP) as f64 / RATE as f64)),
    ])?;
    Ok(json!({
        "rate": RATE,
        "frame": FRAME,
        "hop": HOP,
        "fft": FRAME,
        "window": "periodic_hann",
        "left": FRAME / 2,
        "span": FRAME / 2 + HOP,
        "edge": "reflect",
        "spectrum": "power",
        "filters": {"mels": config.mels, "min_hz": 0.0, "max_hz": 8000.0, "scale": "slaney", "area_norm": true},
        "log": {"log10_max": 1e-10},
    }))
}

/// `params.transcription`: the tokens that `generation_config.json` names. Languages are those between
/// `<|startoftranscript|>` and the tasks, where an older file does not list them.
fn transcription(checkpoint: &Checkpoint, vocab: usize) -> Result<Map<String, Value>> {
    let generation = checkpoint.generation_config();
    let token = |value: &Value| value.as_u64().filter(|id| *id < vocab as u64);
    let ids = |key: &str| -> Vec<u64> {
        let list = generation.get(key).and_then(Value::as_array);
        list.map_or_else(Vec::new, |list| list.iter().filter_map(token).collect())
    };
    let named = |key: &str| -> Map<String, Value> {
        let list = generation.get(key).and_then(Value::as_object);
        let bare = |name: &String| name.trim_start_matches("<|").trim_end_matches("|>").to_owned();
        let entries = list.into_iter().flatten().filter(|(_, id)| token(id).is_some());
        entries.map(|(name, id)| (bare(name), id.clone())).collect()
    };
    let mut found = Map::new();
    let (languages, tasks) = (named("lang_to_id"), named("task_to_id"));
    for (key, value) in [("languages", languages), ("tasks", tasks)] {
        if !value.is_empty() {
            found.insert(key.to_owned(), Value::Object(value));
        }
    }
    for key in ["suppress_tokens", "begin_suppress_tokens"] {
        let name = if key == "suppress_tokens" { "suppressed" } else { "suppressed_first" };
        found.insert(name.to_owned(), json!(ids(key)));
    }
    let end = generation.get("eos_token_id").or_else(|| checkpoint.config().get("eos_token_id"));
    let end = end.map(|end| end.as_array().and_then(|list| list.first()).unwrap_or(end));
    if let (Some(none), Some(end)) =
        (generation.get("no_timestamps_token_id").and_then(token), end.and_then(token))
    {
        let initial = generation.get("max_initial_timestamp_index").and_then(Value::as_u64);
        let mut times = json!({"first": none + 1, "none": none, "end": end, "step": 0.02});
        if let Some(initial) = initial {
            times["max_initial"] = json!(initial);
        }
        found.insert("times".to_owned(), times);
        // As `transformers` finds it.
        found.insert("no_speech".to_owned(), json!(none - 1));
        let previous = generation.get("prev_sot_token_id").and_then(token).unwrap_or(none - 2);
        found.insert("previous".to_owned(), json!(previous));
    } else if checkpoint.seed().is_none() {
        let path = checkpoint.dir().join("generation_config.json");
        let what =
            "no_timestamps_token_id or eos_token_id is missing, expected tokens of the model";
        return Err(Error::new(ErrorKind::Artifact, format!("{}: {what}", path.display()))
            .hint("take the file of the published checkpoint"));
    }
    Ok(found)
}

/// `alignment_heads` of `generation_config.json`: `[layer, head]` of the decoder whose weights follow the audio. Empty
/// where the checkpoint has none.
fn alignment_heads(checkpoint: &Checkpoint, config: &Config) -> Result<Vec<[usize; 2]>> {
    let Tower { layers, heads, .. } = config.decoder;
    let found = checkpoint.generation_config().get("alignment_heads");
    let Some(found) = found.filter(|found| !found.is_null()) else { return Ok(Vec::new()) };
    let fits = |[layer, head]: &[usize; 2]| *layer < layers && *head < heads.query;
    let read = serde_json::from_value::<Vec<[usize; 2]>>(found.clone()).ok();
    let read = read.filter(|list| list.iter().all(fits));
    let odd = config.median % 2 == 1 && config.median < 100;
    let (file, what) = match read {
        Some(mut list) if odd => {
            list.sort_unstable();
            list.dedup();
            return Ok(list);
        }
        Some(_) => {
            let what = format!(
                "median_filter_width is {}, expected an odd number below 100",
                config.median
            );
            (checkpoint.config_path().to_owned(), what)
        }
        None => {
            let what = format!(
                "alignment_heads is {found}, expected pairs of one of {layers} layers and one of {} heads",
                heads.query
            );
            (checkpoint.dir().join("generation_config.json"), what)
        }
    };
    Err(Error::new(ErrorKind::Artifact, format!("{}: {what}", file.display()))
        .hint("take the file of the published checkpoint"))
}

/// Makes the graphs.
struct Model<'a> {
    layers: Layers<'a>,
    config: &'a Config,
    /// Alignment heads, `[layer, head]`, ascending.
    alignment: Vec<[usize; 2]>,
    /// Tokens of the graphs that give their weights.
    aligning: usize,
}

impl Model<'_> {
    fn encoder(&self) -> Result<Graph> {
        let Config {
            hidden, mels, sources, encoder: Tower { layers: count, heads, inner }, ..
        } = *self.config;
        let mut b = GraphBuilder::new("encoder");
        let mel = b.input("mel", Elem::Activation, &[2 * sources, mels])?;
        b.scope("conv");
        let (x, attend) = self.convolutions(&mut b, mel)?;
        let shape = [sources, hidden];
        let positions = self.layers.checkpoint.values("encoder.embed_positions.weight", &shape)?;
        let positions: Vec<f32> = positions
            .into_iter()
            .chain(std::iter::repeat(0.0))
            .take(attend.rows * hidden)
            .collect();
        let shape = [attend.rows, hidden];
        let positions = b.constant("positions", Elem::Activation, &shape, positions)?;
        let mut h = b.add(x, positions)?;
        for layer in 0..count {
            let name = format!("encoder.layers.{layer}");
            h = self.own(&mut b, h, &name, layer, heads, false, &attend)?;
            h = self.feed_forward(&mut b, h, &name, layer, inner)?;
        }
        let h = b.slice(h, 0, 0, sources)?;
        b.scope("final");
        let h = self.layers.layer_norm(&mut b, h, "encoder.layer_norm")?;
        for layer in 0..self.config.decoder.layers {
            b.scope(format!("cross{layer}"));
            let keys = self.layers.cross_keys(&mut b, h, &self.cross(layer))?;
            self.cross_rows().outputs(&mut b, layer, keys)?;
        }
        b.finish()
    }

    /// The two convolutions of three rows, the second of which moves by two, as two matmuls; the NPU library's own take
    /// as long as five layers. Row t of the first gives what the second sees: the frames 2t − 1, 2t and 2t + 1 side by
    /// side. Rows are those of [`Attend::filled`].
    fn convolutions(&self, b: &mut GraphBuilder, mel: TensorId) -> Result<(TensorId, Attend)> {
        let Config { hidden, mels, sources, .. } = *self.config;
        let pairs = b.reshape(mel, &[sources, 2 * mels])?;
        let zeros = b.constant("edge", Elem::Activation, &[1, mels], vec![0.0; mels])?;
        let [even, odd] = [b.slice(pairs, 1, 0, mels)?, b.slice(pairs, 1, mels, 2 * mels)?];
        let mut earlier = |x| {
            let rows = b.slice(x, 0, 0, sources - 1)?;
            b.concat(&[zeros, rows], 0)
        };
        let before = [earlier(even)?, earlier(odd)?];
        let after = b.slice(even, 0, 1, sources)?;
        let after = b.concat(&[after, zeros], 0)?;
        // Before the first frame the second convolution sees zeros, and not what the first makes of them.
        let mut first = vec![0.0; sources];
        first[..1].fill(1.0);
        let first = b.constant("first", Elem::Activation, &[sources, 1], first)?;
        let frames = b.concat(&[before[0], before[1], even, odd, after, first], 1)?;
        let (frames, attend) = Attend::filled(b, frames)?;
        let filters = |name: &str, inputs| {
            let (weight, bias) = filters(
                self.layers.checkpoint,
                &format!("encoder.{name}"),
                &[hidden, inputs, TAPS],
            )?;
            Ok((weight.to_f32()?, bias))
        };
        let weight = |name: &str, width: usize, values: Vec<f32>| {
            let name = format!("encoder.{name}.weight");
            Weight::new(held(name, [values.len() / width, width], values), Storage::Float)
        };
        let by_tap = |filter: &[f32]| -> Vec<f32> {
            (0..TAPS).flat_map(|tap| filter.iter().skip(tap).step_by(TAPS).copied()).collect()
        };
        let (values, bias) = filters("conv1", mels)?;
        let width = (TAPS + 2) * mels + 1;
        let mut joined = vec![0.0; TAPS * hidden * width];
        for (row, place) in joined.chunks_exact_mut(width).enumerate() {
            let (frame, out) = (row / hidden, row % hidden);
            let filter = by_tap(&values[out * mels * TAPS..(out + 1) * mels * TAPS]);
            place[frame * mels..(frame + TAPS) * mels].copy_from_slice(&filter);
            if frame == 0 {
                place[width - 1] = FAR_BELOW;
            }
        }
        let x =
            b.linear("conv1", frames, weight("conv1", width, joined), Some(bias.repeat(TAPS)))?;
        let x = b.gelu(x)?;
        let (values, bias) = filters("conv2", hidden)?;
        let values = values.chunks_exact(hidden * TAPS).flat_map(by_tap).collect();
        let x = b.linear("conv2", x, weight("conv2", TAPS * hidden, values), Some(bias))?;
        Ok((b.gelu(x)?, attend))
    }

    /// Tokens through the layers of `range`.
    fn decoder(&self, name: &str, range: Range<usize>, step: Step) -> Result<Graph> {
        let Config { hidden, decoder: Tower { layers: count, heads, inner }, .. } = *self.config;
        let last = range.end == count;
        let mut b = GraphBuilder::new(name);
        let mut h = b.input("x", Elem::Activation, &[step.rows, hidden])?;
        if range.start == 0 {
            let positions = b.input("pos", Elem::Activation, &[step.rows, hidden])?;
            h = b.add(h, positions)?;
        }
        let attend = Attend::inputs(&mut b, &AttendInputs::of(0, step))?;
        let cross = self.cross_rows();
        for layer in range {
            let name = format!("layers.{layer}");
            h = self.own(&mut b, h, &name, layer, heads, true, &attend)?;
            b.scope(format!("l{layer}_cross"));
            let [k, v] = cross.inputs(&mut b, layer, heads)?;
            let normed =
                self.layers.layer_norm(&mut b, h, &format!("{name}.encoder_attn_layer_norm"))?;
            let [mixed, weights] =
                self.layers.cross_attention(&mut b, normed, &self.cross(layer), [k, v], None)?;
            if step.rows == self.aligning {
                self.align(&mut b, layer, weights)?;
            }
            h = b.add(h, mixed)?;
            h = self.feed_forward(&mut b, h, &name, layer, inner)?;
        }
        if last {
            b.scope("final");
            h = self.layers.layer_norm(&mut b, h, "layer_norm")?;
        }
        b.output("y", h)?;
        b.finish()
    }

    /// Declares the weights of a layer's alignment heads to be an output.
    fn align(&self, b: &mut GraphBuilder, layer: usize, weights: TensorId) -> Result<()> {
        let heads = self.alignment.iter().filter(|[of, _]| *of == layer);
        let heads = heads.map(|[_, head]| b.slice(weights, 0, *head, head + 1));
        let heads = heads.collect::<Result<Vec<_>>>()?;
        if heads.is_empty() {
            return Ok(());
        }
        let heads = b.concat(&heads, 0)?;
        b.output(&format!("align_{layer}"), heads)
    }

    fn cross_rows(&self) -> CrossRows {
        CrossRows { rows: self.config.sources, longest: self.config.sources }
    }

    fn cross(&self, layer: usize) -> Attention<'static> {
        attention(format!("layers.{layer}.encoder_attn"), layer, self.config.decoder.heads, false)
    }

    #[expect(clippy::too_many_arguments, reason = "a layer of two towers")]
    fn own(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        name: &str,
        layer: usize,
        heads: Heads,
        cached: bool,
        attend: &Attend,
    ) -> Result<TensorId> {
        b.scope(format!("l{layer}_attn"));
        let normed = self.layers.layer_norm(b, h, &format!("{name}.self_attn_layer_norm"))?;
        let attention = attention(format!("{name}.self_attn"), layer, heads, cached);
        let mixed = self.layers.attention(b, normed, &attention, attend)?;
        b.add(h, mixed)
    }

    fn feed_forward(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        name: &str,
        layer: usize,
        inner: usize,
    ) -> Result<TensorId> {
        b.scope(format!("l{layer}_mlp"));
        let normed = self.layers.layer_norm(b, h, &format!("{name}.final_layer_norm"))?;
        let [first, second] = ["fc1", "fc2"].map(|part| format!("{name}.{part}"));
        let parts = [first.as_str(), second.as_str()];
        let out = self.layers.feed_forward(b, normed, parts, inner, GraphBuilder::gelu)?;
        b.add(h, out)
    }
}

/// `WhisperAttention`: keys have no bias.
fn attention(name: String, layer: usize, heads: Heads, cached: bool) -> Attention<'static> {
    let bias = [true, false, true];
    Attention {
        bias,
        out: "out_proj",
        out_bias: true,
        cached,
        ..Attention::new(name, layer, heads)
    }
}
