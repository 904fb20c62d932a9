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
//! | `cmask` | `[S, S]`, or `[1, S]` where S > 512 and texts are not causal | added to scores; hides padding, and texts from each other |

mod config;
mod encoder;
mod files;
mod layers;
mod modules;

use std::ops::Range;

use qhx_core::{Error, ErrorKind, Result};
use serde_json::{Map, Value, json};

use crate::builder::GraphBuilder;
use crate::checkpoint::Checkpoint;
use crate::graph::{Elem, Graph};
use crate::kit::{
    Attend, AttendInputs, Decoder, DecoderParams, Layers, PREFILL_ROWS, check_shape, decoder,
    matrices, one_or_many, prefill_rows, shards,
};
use crate::recipe::{ContextPlan, Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::RecipeEntry;
use config::{Config, Kind};
use encoder::{Encoder, bidirectional};
use layers::layer;

const DECODERS: [&str; 4] =
    ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"];
const ENCODERS: [&str; 6] = [
    "LlamaModel",
    "MistralModel",
    "Qwen2Model",
    "Qwen3Model",
    "MistralBiDirectionalModel",
    "LlamaBidirectionalModel",
];

/// Positions of the longest encoder that takes several short texts at once. Its mask has a row for each position then;
/// in longer ones such a mask is more to fill and to read than sharing them is worth.
const SHARED: usize = 512;

/// Tokens of the shorter texts that an encoder has graphs for by default.
const BUCKETS: [usize; 2] = [32, 128];

register_recipe!(
    RecipeEntry::new(&DECODERS, recipe)
        .tasks(&[Task::Generate, Task::Embed])
        .prefill_graphs()
        .longest(longest)
);
register_recipe!(
    RecipeEntry::new(&ENCODERS, recipe).tasks(&[Task::Embed]).prefill_graphs().longest(longest)
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint, kind(checkpoint)?)?;
    check_shape(options, config.layers, config.max_positions)?;
    match options.task {
        Task::Generate => generate(checkpoint, &config, options),
        Task::Embed => embed(checkpoint, &config, options),
        other => Err(no_graphs(other)),
    }
}

/// Longest context of a task: within a sliding window, or as long as an encoder's own texts.
fn longest(checkpoint: &Checkpoint, task: Task) -> Option<usize> {
    // What cannot be read is reported when the recipe reads it.
    match task {
        Task::Generate => Config::read(checkpoint, kind(checkpoint).ok()?).ok()?.window,
        Task::Embed => encoder::max_text(checkpoint).ok()?,
        _ => None,
    }
}

/// The registration lets no other task through.
fn no_graphs(task: Task) -> Error {
    Error::new(ErrorKind::Internal, format!("no graphs are known for the task {}", task.name()))
}

fn kind(checkpoint: &Checkpoint) -> Result<Kind> {
    let class = checkpoint.architecture().unwrap_or_default();
    Kind::of(class).ok_or_else(|| {
        Error::new(ErrorKind::Internal, format!("model class {class:?} has no Llama-like recipe"))
    })
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
    let layers = layers(checkpoint, config, options);
    let Decoder { contexts, plan_params } = decoder(
        options,
        config.layers,
        &prefill_rows(options, &PREFILL_ROWS)?,
        |name, range, rows| {
            run(
                &layers,
                config,
                name,
                range,
                AttendInputs::new(config.heads.dim, rows, options.max_ctx),
            )
        },
        layers.lmhead(config.hidden, config.vocab, config.tied)?,
    )?;
    Ok(Recipe {
        family: config.kind.family().to_owned(),
        host_op: "llama_generate".to_owned(),
        contexts,
        embed: checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?,
        params: params(config, options),
        plan_params,
        tables: Vec::new(),
    })
}

fn layers<'a>(checkpoint: &'a Checkpoint, config: &Config, options: &RecipeOptions) -> Layers<'a> {
    Layers::decoder(checkpoint, options, config.eps)
}

fn embed(checkpoint: &Checkpoint, config: &Config, options: &RecipeOptions) -> Result<Recipe> {
    let Encoder { causal, modules, query_prefix, document_prefix } =
        Encoder::read(checkpoint, config.hidden)?;
    if causal {
        check_window(config, options)?;
    }
    // Of a decoder that is used as an encoder.
    checkpoint.leave_out("lm_head");
    let layers = layers(checkpoint, config, options);
    let longest = options.max_ctx;
    let (mut contexts, mut parts, mut buckets) =
        (Vec::<ContextPlan>::new(), Vec::new(), Vec::new());
    for length in bucket_lengths(options)?.into_iter().rev() {
        let attend = AttendInputs {
            mask_rows: if causal || length <= SHARED { length } else { 1 },
            ..AttendInputs::new(config.heads.dim, length, 0)
        };
        let (name, names) = if length == longest {
            ("enc".to_owned(), &mut parts)
        } else {
            (format!("enc{length}"), &mut buckets)
        };
        let shards = shards(&name, config.layers, options.shards);
        for (index, (name, range)) in shards.into_iter().enumerate() {
            let graph = run(&layers, config, &name, range, attend)?;
            names.push(name.clone());
            match contexts.get_mut(index).filter(|_| options.share_weights && length < longest) {
                // Weights are shared by the graphs of one context.
                Some(context) => context.graphs.push(graph),
                None => contexts.push(ContextPlan::new(name, options.precision, vec![graph])),
            }
        }
    }
    let mut plan_params = Map::new();
    plan_params.insert("parts".to_owned(), one_or_many(parts));
    if !buckets.is_empty() {
        plan_params.insert("buckets".to_owned(), one_or_many(buckets));
    }
    plan_params.insert("causal".to_owned(), json!(causal));
    let pooling = match *modules.poolings {
        [one] => json!(one),
        ref several => json!(several),
    };
    plan_params.insert("pooling".to_owned(), pooling);
    plan_params.insert("normalize".to_owned(), json!(modules.normalize));
    if !modules.steps.is_empty() {
        plan_params.insert("modules".to_owned(), Value::Array(modules.steps));
    }
    let tables = match modules.files.is_empty() {
        true => Vec::new(),
        false => vec![matrices("modules", modules.files)],
    };
    let mut params = params(config, options);
    params.insert("query_prefix".to_owned(), json!(query_prefix));
    params.insert("document_prefix".to_owned(), json!(document_prefix));
    Ok(Recipe {
        family: config.kind.family().to_owned(),
        host_op: "llama_embed_sharded".to_owned(),
        contexts,
        embed: checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?,
        params,
        plan_params,
        tables,
    })
}

/// Lengths of the texts that the graphs of an encoder take, ascending: the longest is the context. Shorter ones hold
/// the weights once more, so an encoder that is too large for one context gets them only when they are asked for.
fn bucket_lengths(options: &RecipeOptions) -> Result<Vec<usize>> {
    let small = options.shards == 1 || options.share_weights;
    let mut lengths = prefill_rows(options, if small { &BUCKETS[..] } else { &[] })?;
    lengths.retain(|length| *length < options.max_ctx);
    lengths.push(options.max_ctx);
    Ok(lengths)
}

fn params(config: &Config, options: &RecipeOptions) -> Map<String, Value> {
    let Config { hidden, vocab, layers, heads, rope_theta, .. } = *config;
    let mut params =
        DecoderParams { hidden, vocab, layers, heads, rope_theta }.map(options.max_ctx);
    if let Some(scaling) = &config.rope_scaling {
        params.insert("rope_scaling".to_owned(), scaling.clone());
    }
    params
}

/// Tokens through the layers of `range`.
fn run(
    layers: &Layers<'_>,
    config: &Config,
    name: &str,
    range: Range<usize>,
    attend: AttendInputs<'_>,
) -> Result<Graph> {
    let last = range.end == config.layers;
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[attend.rows, config.hidden])?;
    let attend = Attend::inputs(&mut b, &attend)?;
    for index in range {
        h = layer(layers, config, &mut b, h, index, &attend)?;
    }
    if last {
        b.scope("final");
        h = layers.norm(&mut b, h, "norm")?;
    }
    b.output("y", h)?;
    b.finish()
}
