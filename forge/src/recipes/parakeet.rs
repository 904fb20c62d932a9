//! Parakeet: `ParakeetForCTC`, `ParakeetForRNNT`, `ParakeetForTDT`.
//!
//! Arithmetic: `transformers`, `models/parakeet/modeling_parakeet.py`: FastConformer ([`super::fastconformer`]),
//! transducers (Graves 2012, arXiv 1211.3711) and durations of tokens (Xu et al. 2023, arXiv 2304.06795).
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

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, UnaryOp};
use qhx_graph::weight::Weight;
use serde_json::{Map, Value, json};

use super::fastconformer::{Audio, Defaults, EPS, FastConformer, Sizes, WINDOWS};
use crate::kit::{ENCODER_WEIGHTS, Layers, Reader, encoder_precision, object, one_or_many, sized};
use crate::recipe::{ContextPlan, Precision, Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::RecipeEntry;

const CLASSES: [&str; 3] = ["ParakeetForCTC", "ParakeetForRNNT", "ParakeetForTDT"];

register_recipe!(
    RecipeEntry::new(&CLASSES, recipe)
        .tasks(&[Task::Transcribe])
        .options(&[WINDOWS, ENCODER_WEIGHTS])
);

/// Fields of `config.json` that are read.
#[derive(Debug)]
struct Config {
    sizes: Sizes,
    vocab: usize,
    /// The token that stands for none.
    blank: usize,
    transducer: Option<Transducer>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Transducer {
    pub(super) width: usize,
    layers: usize,
    max_symbols: usize,
    /// Numbers of frames that a token may last, from 0 on; 0 of them where a token says nothing of that.
    durations: usize,
}

impl Config {
    fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let whole = Reader::whole(checkpoint);
        let encoder = Reader::part(checkpoint, "encoder_config")?;
        let defaults = Defaults { layers: 24, mels: 80, scale_input: true };
        let sizes = Sizes::read(&encoder, &defaults)?;
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
        Ok(Self { sizes, vocab, blank: blank as usize, transducer })
    }
}

impl Transducer {
    pub(super) fn read(reader: &Reader<'_>, timed: bool) -> Result<Self> {
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

impl Transducer {
    /// `params.transducer` of the manifest.
    pub(super) fn steps(&self, checkpoint: &Checkpoint, blank: usize) -> Value {
        let Self { max_symbols, durations, .. } = *self;
        let start = checkpoint.generation_config().get("decoder_start_token_id");
        let start = start.and_then(Value::as_u64).unwrap_or(blank as u64);
        json!({"start": start, "max_symbols": max_symbols, "durations": durations})
    }
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(|name| vec![name.to_owned()]);
    let config = Config::read(checkpoint)?;
    let sizes = &config.sizes;
    let (precision, note) = encoder_precision(options);
    if options.shards != 1 {
        let what =
            format!("{} shards, expected 1: the encoder stands in one context", options.shards);
        return Err(Error::new(ErrorKind::Usage, what).hint(match precision {
            Precision::Fp16 => "where it does not fit, --recipe-option encoder=w8a16 halves it",
            _ => "leave --shards out",
        }));
    }
    let audio = Audio::read(checkpoint, sizes, options)?;
    let layers = Layers::new(checkpoint, precision, EPS);
    let (mut graphs, mut names) = (Vec::new(), Vec::new());
    for &frames in &audio.frames {
        let name = sized("encoder", frames, audio.frames.len());
        let conformer = FastConformer { layers, sizes, frames };
        graphs.push(encoder(&name, conformer, &config)?);
        names.push(name);
    }
    let encoder = ContextPlan::new("encoder".to_owned(), precision, graphs);
    let mut contexts = vec![encoder.once()];
    let mut plan_params = Map::new();
    plan_params.insert("encoder".to_owned(), one_or_many(names));
    let mut params = object(json!({
        // Of the embedding table, where there is one.
        "hidden": config.transducer.map_or(sizes.hidden, |transducer| transducer.width),
        "vocab": config.vocab,
        "n_layers": sizes.layers,
        "n_heads": sizes.heads,
        "audio": {
            "front_end": audio.front_end,
            "preemphasis": audio.preemphasis,
            "subsampling": 1 << sizes.halvings,
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
    let width = transducer.width;
    for graph in [predictor(checkpoint, transducer)?, joint(checkpoint, config.vocab, transducer)?]
    {
        plan_params.insert(graph.name().to_owned(), json!(graph.name()));
        contexts.push(ContextPlan::alone(graph));
    }
    params.insert("transducer".to_owned(), transducer.steps(checkpoint, config.blank));
    let embed = checkpoint.matrix("decoder.embedding.weight", [config.vocab, width])?;
    Ok(recipe(contexts, plan_params).embed(embed).params(params))
}

/// The prediction network: an embedding's row through LSTM layers (Hochreiter and Schmidhuber 1997; gates in the order
/// of `torch.nn.LSTM`) and a projection. In f16: its weights are few, and its state is carried on.
pub(super) fn predictor(checkpoint: &Checkpoint, transducer: Transducer) -> Result<Graph> {
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
pub(super) fn joint(
    checkpoint: &Checkpoint,
    vocab: usize,
    transducer: Transducer,
) -> Result<Graph> {
    let Transducer { width, durations, .. } = transducer;
    let parts = Layers::new(checkpoint, Precision::Fp16, EPS);
    let mut b = GraphBuilder::new("joint");
    let x = b.input("x", Elem::Activation, &[1, width])?;
    let predicted = b.input("pred", Elem::Activation, &[1, width])?;
    let both = b.add(x, predicted)?;
    let both = b.relu(both)?;
    let logits = parts.linear(&mut b, both, "joint.head", vocab + durations, true)?;
    b.output("logits", logits)?;
    b.finish()
}

fn encoder(name: &str, conformer: FastConformer<'_>, config: &Config) -> Result<Graph> {
    let Config { sizes, vocab, transducer, .. } = config;
    let (vocab, layers) = (*vocab, conformer.layers);
    let mut b = GraphBuilder::new(name);
    let rows = conformer.encode(&mut b)?;
    b.scope("out");
    match *transducer {
        None => {
            let weight = layers.checkpoint.rows("ctc_head.weight", &[vocab, sizes.hidden, 1])?;
            let bias = layers.checkpoint.values("ctc_head.bias", &[vocab])?;
            let logits = b.linear("ctc_head", rows, Precision::Fp16.weight(weight), Some(bias))?;
            b.output("logits", logits)?;
        }
        Some(Transducer { width, .. }) => {
            let y = layers.linear(&mut b, rows, "encoder_projector", width, true)?;
            b.output("y", y)?;
        }
    }
    b.finish()
}
