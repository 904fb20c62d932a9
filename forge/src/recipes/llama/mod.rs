//! Llama-like models: Llama, Mistral, Qwen2 and Qwen3 as decoders (`…ForCausalLM`), and as encoders
//! (`…Model`, `MistralBiDirectionalModel`, `LlamaBidirectionalModel`).
//!
//! Arithmetic: `transformers`, `models/{llama,mistral,qwen2,qwen3}`, stated in `tests/oracle/LLAMA.md`.
//!
//! Decoder: graphs `decode` take one token, graphs `prefill<P>` take P tokens of a prompt over the
//! same caches, each shard in a context of its own; the head is a graph of its own.
//!
//! | tensor | shape, P = 1 for `decode` | |
//! |---|---|---|
//! | `x` → `y` | `[P, hidden]` | residual in and out; normalised after the last layer |
//! | `cos`, `sin` | `[P, head_dim / 2]` | half tables, a row for each token |
//! | `cmask` | `[P, max_ctx + P]` | added to scores; the last P slots are the graph's own tokens |
//! | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[kv_heads, max_ctx, head_dim]` → `[kv_heads, P, head_dim]` | keys after norm and rope |
//! | head: `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |
//!
//! Encoder: graphs `enc` take S tokens, a text with its padding.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `x` → `y` | `[S, hidden]` | residual in and out; normalised after the last layer |
//! | `cos`, `sin` | `[S, head_dim / 2]` | |
//! | `cmask` | `[1, S]`, causal `[S, S]` | added to scores; hides padding |

mod config;
mod encoder;
mod layers;

use std::ops::Range;

use qhx_core::{Error, ErrorKind, Result};
use serde_json::{Map, Value, json};

use super::attention::Attend;
use super::layers::Layers;
use super::{ContextPlan, Precision, Recipe, RecipeOptions, Task};
use crate::builder::GraphBuilder;
use crate::checkpoint::Checkpoint;
use crate::graph::{Elem, Graph};
use crate::weight::{Storage, Weight};
use config::{Config, Kind};
use encoder::{Encoder, bidirectional};

/// Tokens that a prompt graph takes when nothing is said.
const DEFAULT_PREFILL: usize = 128;

/// The recipe.
pub(super) fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint, kind(checkpoint)?)?;
    check(&config, options)?;
    match options.task {
        Task::Generate => generate(checkpoint, &config, options),
        Task::Embed => embed(checkpoint, &config, options),
    }
}

/// Longest context of a task: within a sliding window, or as long as an encoder's own texts.
pub(super) fn longest(checkpoint: &Checkpoint, task: Task) -> Result<Option<usize>> {
    match task {
        Task::Generate => Ok(Config::read(checkpoint, kind(checkpoint)?)?.window),
        Task::Embed => encoder::max_text(checkpoint),
    }
}

fn kind(checkpoint: &Checkpoint) -> Result<Kind> {
    let class = checkpoint.architecture().unwrap_or_default();
    Kind::of(class).ok_or_else(|| {
        Error::new(ErrorKind::Internal, format!("model class {class:?} has no Llama-like recipe"))
    })
}

fn check(config: &Config, options: &RecipeOptions) -> Result<()> {
    let usage = |message| Err(Error::new(ErrorKind::Usage, message));
    if options.shards == 0 || options.shards > config.layers {
        return usage(format!(
            "{} shards, expected 1 to {}, the number of layers",
            options.shards, config.layers
        ));
    }
    if options.max_ctx == 0 || config.max_positions.is_some_and(|max| options.max_ctx > max) {
        return usage(format!(
            "a context of {} tokens, expected 1 to {}, the model's max_position_embeddings",
            options.max_ctx,
            config.max_positions.unwrap_or(usize::MAX)
        ));
    }
    Ok(())
}

/// A causal layer that slides would see fewer positions than the graphs show it.
fn check_window(config: &Config, options: &RecipeOptions) -> Result<()> {
    let Some(window) = config.window.filter(|window| options.max_ctx > *window) else {
        return Ok(());
    };
    Err(Error::new(
        ErrorKind::Usage,
        format!(
            "a context of {} tokens, but layers of this model see only the last {window} \
             (sliding_window), which the graphs do not limit",
            options.max_ctx
        ),
    )
    .hint(format!("make the bundle for a context of at most {window} tokens")))
}

/// Names of the shards of `name`, and their layers.
fn shards(name: &str, config: &Config, shards: usize) -> Vec<(String, Range<usize>)> {
    let layers = config.layers;
    (0..shards)
        .map(|shard| {
            let range = shard * layers / shards..(shard + 1) * layers / shards;
            let name = if shards == 1 { name.to_owned() } else { format!("{name}_p{shard}") };
            (name, range)
        })
        .collect()
}

fn generate(checkpoint: &Checkpoint, config: &Config, options: &RecipeOptions) -> Result<Recipe> {
    if bidirectional(checkpoint.config()) {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "{} is an encoder (each token sees those after it), which cannot generate",
                checkpoint.dir().display()
            ),
        )
        .hint("ask for the task embed"));
    }
    check_window(config, options)?;
    let mut rows = options.prefill.clone().unwrap_or_else(|| vec![DEFAULT_PREFILL]);
    if options.prefill.is_none() {
        rows.retain_mut(|p| {
            *p = (*p).min(options.max_ctx);
            *p > 1
        });
    }
    rows.sort_unstable();
    rows.dedup();
    if let Some(bad) = rows.iter().find(|p| **p < 2 || **p > options.max_ctx) {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "a prompt graph of {bad} tokens, expected 2 to {}, the context",
                options.max_ctx
            ),
        ));
    }
    let mut contexts: Vec<ContextPlan> = Vec::new();
    let precision = options.precision;
    let mut decode = Vec::new();
    for (name, range) in shards("decode", config, options.shards) {
        let graphs = vec![decoder_shard(checkpoint, config, options, &name, range, 1)?];
        contexts.push(ContextPlan { key: name.clone(), precision, graphs, optional: None });
        decode.push(name);
    }
    let mut prefill = Vec::new();
    for rows in rows {
        let widths = shards(&format!("prefill{rows}"), config, options.shards);
        for (index, (name, range)) in widths.into_iter().enumerate() {
            let graph = decoder_shard(checkpoint, config, options, &name, range, rows)?;
            prefill.push(name.clone());
            match contexts.get_mut(index).filter(|_| options.share_weights) {
                // Weights are shared by the graphs of one context.
                Some(context) => context.graphs.push(graph),
                None => {
                    let graphs = vec![graph];
                    contexts.push(ContextPlan { key: name, precision, graphs, optional: None });
                }
            }
        }
    }
    let embed = checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?;
    let head = if config.tied {
        embed.clone()
    } else {
        checkpoint.matrix("lm_head.weight", [config.vocab, config.hidden])?
    };
    let head = lmhead(config, Weight::new(head, Storage::Float))?;
    contexts.push(ContextPlan {
        key: "lmhead".to_owned(),
        precision: Precision::Fp16,
        graphs: vec![head],
        optional: None,
    });
    let mut plan_params = Map::new();
    plan_params.insert("decode".to_owned(), one_or_many(decode));
    if !prefill.is_empty() {
        plan_params.insert("prefill".to_owned(), one_or_many(prefill));
    }
    plan_params.insert("lmhead".to_owned(), json!("lmhead"));
    Ok(Recipe {
        family: config.kind.family(),
        host_op: "llama_generate",
        contexts,
        embed,
        params: params(config, options),
        plan_params,
        tables: Vec::new(),
    })
}

fn embed(checkpoint: &Checkpoint, config: &Config, options: &RecipeOptions) -> Result<Recipe> {
    if options.prefill.is_some() {
        return Err(Error::new(
            ErrorKind::Usage,
            "prompt graphs are asked for, but an encoder takes each text in one piece",
        )
        .hint("omit the option: the length of the encoder is that of the context"));
    }
    let encoder = Encoder::read(checkpoint)?;
    if encoder.causal {
        check_window(config, options)?;
    }
    let mut contexts = Vec::new();
    let mut names = Vec::new();
    for (name, range) in shards("enc", config, options.shards) {
        let graph = encoder_shard(checkpoint, config, options, &name, range, encoder.causal)?;
        let precision = options.precision;
        let graphs = vec![graph];
        contexts.push(ContextPlan { key: name.clone(), precision, graphs, optional: None });
        names.push(name);
    }
    let mut plan_params = Map::new();
    plan_params.insert("parts".to_owned(), one_or_many(names));
    plan_params.insert("causal".to_owned(), json!(encoder.causal));
    plan_params.insert("pooling".to_owned(), json!(encoder.pooling));
    plan_params.insert("normalize".to_owned(), json!(encoder.normalize));
    let mut params = params(config, options);
    params.insert("query_prefix".to_owned(), json!(encoder.query_prefix));
    params.insert("document_prefix".to_owned(), json!(encoder.document_prefix));
    Ok(Recipe {
        family: config.kind.family(),
        host_op: "llama_embed_sharded",
        contexts,
        embed: checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?,
        params,
        plan_params,
        tables: Vec::new(),
    })
}

fn one_or_many(names: Vec<String>) -> Value {
    if let [name] = names.as_slice() { json!(name) } else { json!(names) }
}

fn params(config: &Config, options: &RecipeOptions) -> Map<String, Value> {
    let mut params = Map::new();
    for (key, value) in [
        ("hidden", config.hidden),
        ("vocab", config.vocab),
        ("n_layers", config.layers),
        ("max_ctx", options.max_ctx),
        ("n_heads", config.heads),
        ("n_kv_heads", config.kv_heads),
        ("head_dim", config.head_dim),
        ("kv_dim", config.kv_heads * config.head_dim),
    ] {
        params.insert(key.to_owned(), json!(value));
    }
    params.insert("rope_theta".to_owned(), json!(config.rope_theta));
    if let Some(scaling) = &config.rope_scaling {
        params.insert("rope_scaling".to_owned(), scaling.clone());
    }
    params
}

/// `rows` tokens through the layers of `range`, over caches.
fn decoder_shard(
    checkpoint: &Checkpoint,
    config: &Config,
    options: &RecipeOptions,
    name: &str,
    range: Range<usize>,
    rows: usize,
) -> Result<Graph> {
    let layers = Layers { checkpoint, config, precision: options.precision };
    run(&layers, name, range, rows, rows, options.max_ctx)
}

/// A text with its padding through the layers of `range`.
fn encoder_shard(
    checkpoint: &Checkpoint,
    config: &Config,
    options: &RecipeOptions,
    name: &str,
    range: Range<usize>,
    causal: bool,
) -> Result<Graph> {
    let layers = Layers { checkpoint, config, precision: options.precision };
    let length = options.max_ctx;
    run(&layers, name, range, length, if causal { length } else { 1 }, 0)
}

fn run(
    layers: &Layers<'_, Config>,
    name: &str,
    range: Range<usize>,
    rows: usize,
    mask_rows: usize,
    max_ctx: usize,
) -> Result<Graph> {
    let config = layers.config;
    let last = range.end == config.layers;
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[rows, config.hidden])?;
    let attend = Attend::inputs(&mut b, config.head_dim, rows, mask_rows, max_ctx)?;
    for index in range {
        h = layers.layer(&mut b, h, index, &attend)?;
    }
    if last {
        b.scope("final");
        h = layers.norm(&mut b, h, "norm.weight")?;
    }
    b.output("y", h)?;
    b.finish()
}

/// Normalised row to logits.
fn lmhead(config: &Config, weight: Weight) -> Result<Graph> {
    let mut b = GraphBuilder::new("lmhead");
    let x = b.input("x", Elem::Activation, &[1, config.hidden])?;
    let logits = b.linear("head", x, weight, None)?;
    b.output("logits", logits)?;
    b.finish()
}
