//! Canary (`CanaryForConditionalGeneration`): speech in many languages, written down or translated.
//!
//! Arithmetic: `transformers`, `models/canary/modeling_canary.py` (Puvvada et al. 2024, arXiv 2406.19674):
//! FastConformer ([`super::fastconformer`]) and a decoder over its rows. An encoder has one graph for each length of
//! window; F frames become T = F / 8 rows. In archives of NeMo (`EncDecMultiTaskModel`) a projection may stand between
//! encoder and decoder, and the table of positions is a tensor.
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `encoder`, or `encoder<F>` | `mel` | `[F, mels]` | normalised log-mel frames; anything behind the clip |
//! | | `keep` | `[F, 1]` | 1 for each frame of the clip, 0 behind it |
//! | | → `cross_k_i`, `cross_v_i` | `[heads, dim, longest]`, `[heads, longest, dim]` | of each layer of the decoder; keys transposed |
//! | | → `cross_mask` | `[1, longest]` | hides what lies behind the clip |
//! | `decode`, `prefill<P>` | `x`, `pos` → `y` | `[P, hidden]` | rows of the embedding table and of the positions |
//! | | `cmask` | `[P, max_ctx + P]` | added to scores; the last P slots are the graph's own tokens |
//! | | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[heads, max_ctx, dim]` → `[heads, P, dim]` | |
//! | | `cross_*` | as the encoder gives them | |
//! | `lmhead` | `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |

use std::ops::Range;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use qhx_graph::weight::{RowSource, held};
use serde_json::{Map, Value, json};

use super::fastconformer::{Audio, Defaults, EPS, FastConformer, Sizes, WINDOWS};
use super::whisper::names;
use crate::kit::{
    Attend, AttendInputs, Attention, CrossRows, Decoder, ENCODER_WEIGHTS, Heads, Layers,
    MatrixFile, Reader, Step, check_shape, decoder, encoder_precision, matrices, object,
    prefill_rows, sized,
};
use crate::recipe::{Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::{RecipeEntry, RecipeOption};

const CLASSES: [&str; 1] = ["CanaryForConditionalGeneration"];
/// Languages of `canary-1b-v2`; the vocabulary has tokens of many more.
const LANGUAGES: [&str; 25] = [
    "bg", "cs", "da", "de", "el", "en", "es", "et", "fi", "fr", "hr", "hu", "it", "lt", "lv", "mt",
    "nl", "pl", "pt", "ro", "ru", "sk", "sl", "sv", "uk",
];
const SPOKEN: RecipeOption = RecipeOption {
    name: "languages",
    values: &[],
    help: "codes of the languages that the model knows, with commas between them; unless given, those that have a \
           vocabulary of their own in an archive of NeMo, or else those of canary-1b-v2 whose tokens there are",
};
/// The language that is taken where none is given, as `apply_transcription_request` has it.
const DEFAULT: &str = "en";
/// What asks for the words, behind the token `<|startofcontext|>` at whose position the audio stands.
const PROMPT: &str = "{audio}<|startoftranscript|><|emo:undefined|>{language}{into}{punctuation}<|noitn|>\
                      <|notimestamp|><|nodiarize|>";
/// Table of positions, where it is a tensor.
const POSITIONS: &str = "positions.weight";
/// Tokens of the prefill graph by default: those that begin an answer.
const PREFILL: [usize; 1] = [9];

register_recipe!(
    RecipeEntry::new(&CLASSES, recipe)
        .tasks(&[Task::Transcribe])
        .prefill_graphs()
        .longest(longest)
        .options(&[WINDOWS, SPOKEN, ENCODER_WEIGHTS])
);

/// Fields of `config.json` that are read.
#[derive(Debug)]
struct Config {
    sizes: Sizes,
    /// Width of the decoder, which may be another one than the encoder's.
    hidden: usize,
    vocab: usize,
    layers: usize,
    heads: Heads,
    inner: usize,
    bias: bool,
    positions: usize,
    tied: bool,
    start: usize,
}

impl Config {
    fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let whole = Reader::whole(checkpoint);
        let encoder = Reader::part(checkpoint, "encoder_config")?;
        let defaults = Defaults { layers: 32, mels: 128, scale_input: false };
        let sizes = Sizes::read(&encoder, &defaults)?;
        let reader = Reader::part(checkpoint, "decoder_config")?;
        reader.only("hidden_act", &json!("relu"))?;
        let hidden = reader.size_or("hidden_size", 1024)?;
        if hidden != sizes.hidden && !whole.flag("encoder_projection")? {
            return Err(reader.fault(format!(
                "hidden_size is {hidden}, expected that of encoder_config, {}: the class has no projection between them",
                sizes.hidden
            )));
        }
        let query = reader.size_or("num_attention_heads", 8)?;
        reader.only("num_key_value_heads", &json!(query))?;
        let vocab = whole.size_or("vocab_size", 16384)?;
        reader.only("vocab_size", &json!(vocab))?;
        let layers = match reader.get("num_hidden_layers") {
            Some(_) => reader.layers()?,
            None => 8,
        };
        let start = checkpoint.generation_config().get("decoder_start_token_id");
        let start = start.and_then(Value::as_u64).map(|start| start as usize);
        Ok(Self {
            sizes,
            hidden,
            vocab,
            layers,
            heads: Heads { query, groups: query, dim: reader.size_or("head_dim", 128)? },
            inner: reader.size_or("intermediate_size", 4096)?,
            bias: reader.flag_or("attention_bias", true)?,
            positions: reader.size_or("max_position_embeddings", 1024)?,
            tied: whole.tied(true)?,
            start: match start {
                Some(start) => start,
                None => whole.size_or("decoder_start_token_id", 7)?,
            },
        })
    }
}

fn longest(checkpoint: &Checkpoint, _: Task) -> Option<usize> {
    Config::read(checkpoint).ok().map(|config| config.positions)
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint)?;
    let Config { hidden, vocab, layers: count, heads, positions, .. } = config;
    check_shape(options, count, Some(positions))?;
    let languages = languages(checkpoint, options)?;
    let checkpoint = &checkpoint.renamed(names);
    let audio = Audio::read(checkpoint, &config.sizes, options)?;
    let rows_of = |frames: usize| frames >> config.sizes.halvings;
    let longest = audio.frames.last().copied().map_or(1, rows_of);
    let layers = Layers::decoder(checkpoint, options, EPS);
    let model = Model { layers, config: &config, longest };
    let Decoder { contexts, plan_params } = decoder(
        options,
        count,
        &prefill_rows(options, &PREFILL)?,
        |name, range, step| model.decoder(name, range, step),
        model.head()?,
    )?;
    let (precision, note) = encoder_precision(options);
    let of_encoder = Model { layers: Layers { precision, ..layers }, ..model };
    let sized = |frames: usize| sized("encoder", frames, audio.frames.len());
    let graph = |frames: &usize| of_encoder.encoder(&sized(*frames), *frames);
    let graphs = audio.frames.iter().map(graph).collect::<Result<_>>()?;
    let default = languages.contains_key(DEFAULT).then_some(DEFAULT);
    let params = object(json!({
        "hidden": hidden,
        "vocab": vocab,
        "n_layers": count,
        "max_ctx": options.max_ctx,
        "n_heads": heads.query,
        "n_kv_heads": heads.groups,
        "head_dim": heads.dim,
        "kv_dim": heads.query * heads.dim,
        "audio": {
            "front_end": audio.front_end,
            "preemphasis": audio.preemphasis,
            "token_id": config.start,
        },
        "transcription": {
            "prompt": PROMPT,
            "language": default.or_else(|| languages.keys().next().map(String::as_str)),
            "languages": languages,
            "tasks": {"transcribe": "", "translate": ""},
            "punctuation": {"on": "<|pnc|>", "off": "<|nopnc|>"},
        },
    }));
    let table = match checkpoint.has(POSITIONS) {
        true => checkpoint.matrix(POSITIONS, [positions, hidden])?,
        false => table(positions, hidden),
    };
    let table = MatrixFile::in_f32("table", "positions", table);
    Ok(Recipe::new("canary", "canary_transcribe", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [vocab, hidden])?)
        .params(params)
        .ahead("encoder", precision, graphs)
        .notes(note.into_iter().collect())
        .tables(vec![matrices("positions", vec![table])]))
}

/// Tokens of the languages, by their codes.
fn languages(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Map<String, Value>> {
    let token = |code: &str| format!("<|{code}|>");
    let asked = options.choice(SPOKEN.name);
    let own = checkpoint.config().get("languages").and_then(Value::as_array);
    let codes: Vec<&str> = match (asked, own) {
        (Some(text), _) => text.split(',').map(str::trim).collect(),
        (None, Some(own)) if !own.is_empty() => own.iter().filter_map(Value::as_str).collect(),
        (None, _) => LANGUAGES.to_vec(),
    };
    let mut found = Map::new();
    // Of a synthetic model there is no vocabulary.
    let tokenizer = match checkpoint.seed() {
        None => Some(checkpoint.tokenizer()?),
        Some(_) => None,
    };
    for code in codes {
        let known = |spelled: &str| {
            tokenizer.as_ref().is_none_or(|tokenizer| tokenizer.token_to_id(spelled).is_some())
        };
        match known(&token(code)) {
            true => {
                found.insert(code.to_owned(), json!(token(code)));
            }
            false if asked.is_some() => {
                let what = format!(
                    "recipe option {}: {code:?}, expected codes whose tokens the vocabulary has; it has no {}",
                    SPOKEN.name,
                    token(code)
                );
                return Err(Error::new(ErrorKind::Usage, what));
            }
            false => {}
        }
    }
    if found.is_empty() {
        let what = format!(
            "{}: tokenizer.json has none of the tokens {}, expected that of a language at least",
            checkpoint.dir().display(),
            LANGUAGES.map(token).join(" ")
        );
        return Err(Error::new(ErrorKind::Artifact, what)
            .hint(format!("name those that it has: --recipe-option {}=…", SPOKEN.name)));
    }
    Ok(found)
}

/// `CanaryPositionalEmbedding`: sines, and behind them cosines, divided by √hidden.
fn table(positions: usize, hidden: usize) -> Arc<dyn RowSource> {
    let half = hidden / 2;
    let longest = 10_000f64.powf((hidden as f64 - 2.0) / hidden as f64);
    let step = -(longest.ln() / (half.max(2) - 1) as f64) as f32;
    let scale = (hidden as f32).sqrt();
    let frequencies: Vec<f32> = (0..half).map(|at| (step * at as f32).exp()).collect();
    let row = |position: usize| {
        let angles = frequencies.iter().map(move |frequency| position as f32 * frequency);
        let sines = angles.clone().map(|angle| f64::from(angle).sin());
        sines.chain(angles.map(|angle| f64::from(angle).cos())).map(|value| value as f32 / scale)
    };
    held("positions", [positions, hidden], (0..positions).flat_map(row).collect())
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
    fn encoder(&self, name: &str, frames: usize) -> Result<Graph> {
        let conformer = FastConformer { layers: self.layers, sizes: &self.config.sizes, frames };
        let cross = CrossRows { rows: conformer.rows(), longest: self.longest };
        let mut b = GraphBuilder::new(name);
        let (mut h, mask) = conformer.encode_with_mask(&mut b)?;
        let hidden = self.config.hidden;
        if hidden != self.config.sizes.hidden {
            b.scope("projection");
            h = self.layers.linear(&mut b, h, "encoder.projection", hidden, true)?;
        }
        for layer in 0..self.config.layers {
            b.scope(format!("cross{layer}"));
            let keys = self.layers.cross_keys(&mut b, h, &self.cross(layer))?;
            cross.outputs(&mut b, layer, keys)?;
        }
        cross.mask_output(&mut b, mask)?;
        b.finish()
    }

    /// Tokens through the layers of `range`.
    fn decoder(&self, name: &str, range: Range<usize>, step: Step) -> Result<Graph> {
        let Config { hidden, heads, layers: count, inner, .. } = *self.config;
        let last = range.end == count;
        let mut b = GraphBuilder::new(name);
        let mut h = b.input("x", Elem::Activation, &[step.rows, hidden])?;
        if range.start == 0 {
            let positions = b.input("pos", Elem::Activation, &[step.rows, hidden])?;
            h = b.add(h, positions)?;
            b.scope("embed");
            h = self.layers.layer_norm(&mut b, h, "embedding_layernorm")?;
        }
        let attend = Attend::inputs(&mut b, &AttendInputs::of(0, step))?;
        let cross = CrossRows { rows: self.longest, longest: self.longest };
        let mask = cross.mask_input(&mut b)?;
        for layer in range {
            let at = format!("layers.{layer}");
            let norm = |b: &mut GraphBuilder, h: TensorId, part: &str| {
                self.layers.layer_norm(b, h, &format!("{at}.{part}"))
            };
            b.scope(format!("l{layer}_attn"));
            let normed = norm(&mut b, h, "input_layernorm")?;
            let own =
                Attention { cached: true, ..self.attention(format!("{at}.self_attn"), layer) };
            let mixed = self.layers.attention(&mut b, normed, &own, &attend)?;
            h = b.add(h, mixed)?;
            b.scope(format!("l{layer}_cross"));
            let keys = cross.inputs(&mut b, layer, heads)?;
            let normed = norm(&mut b, h, "post_attention_layernorm")?;
            let attention = self.cross(layer);
            let [mixed, _] =
                self.layers.cross_attention(&mut b, normed, &attention, keys, Some(mask))?;
            h = b.add(h, mixed)?;
            b.scope(format!("l{layer}_mlp"));
            let normed = norm(&mut b, h, "final_layernorm")?;
            let [first, second] = ["fc1", "fc2"].map(|part| format!("{at}.mlp.{part}"));
            let parts = [first.as_str(), second.as_str()];
            let out = self.layers.feed_forward(&mut b, normed, parts, inner, GraphBuilder::relu)?;
            h = b.add(h, out)?;
        }
        if last {
            b.scope("final");
            h = self.layers.layer_norm(&mut b, h, "norm")?;
        }
        b.output("y", h)?;
        b.finish()
    }

    fn head(&self) -> Result<Graph> {
        let Config { hidden, vocab, tied, .. } = *self.config;
        let mut b = GraphBuilder::new("lmhead");
        let x = b.input("x", Elem::Activation, &[1, hidden])?;
        let logits = self.layers.head(&mut b, x, vocab, tied, true)?;
        b.output("logits", logits)?;
        b.finish()
    }

    fn cross(&self, layer: usize) -> Attention<'static> {
        self.attention(format!("layers.{layer}.encoder_attn"), layer)
    }

    /// `CanarySelfAttention` and `CanaryCrossAttention`.
    fn attention(&self, name: String, layer: usize) -> Attention<'static> {
        let Config { heads, bias, .. } = *self.config;
        Attention { bias: [bias; 3], out_bias: bias, ..Attention::new(name, layer, heads) }
    }
}
