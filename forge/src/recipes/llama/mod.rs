//! Llama-like models: Llama, Mistral, Qwen2 and Qwen3 as decoders (`…ForCausalLM`), and as encoders
//! (`…Model`, `MistralBiDirectionalModel`, `LlamaBidirectionalModel`).
//!
//! Arithmetic: `transformers`, `models/{llama,mistral,qwen2,qwen3,qwen3_moe}`, stated in `tests/oracle/LLAMA.md`.
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
//! Decoder with experts (`Qwen3MoeForCausalLM`): graphs `decode<n>` and `prefill<P>_<n>` end where a layer's experts
//! begin, see [`crate::kit::Experts`]; the head normalises.
//!
//! Encoder: graphs `enc` take S tokens, a text with its padding.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `x` → `y` | `[S, hidden]` | residual in and out; normalised after the last layer |
//! | `cos`, `sin` | `[S, head_dim / 2]` | |
//! | `cmask` | `[S, S]`, or `[1, S]` where S > 512 and texts are not causal | added to scores; hides padding, and texts from each other |

mod config;
mod layers;

use std::ops::Range;

use qhx_core::{Error, ErrorKind, Result};
use serde_json::{Map, Value};

use super::encoder::{self, Encoder, EncoderGraphs, bidirectional};
use crate::builder::GraphBuilder;
use crate::checkpoint::Checkpoint;
use crate::graph::{Elem, Graph};
use crate::kit::{
    Attend, AttendInputs, Decoder, DecoderParams, EXPERTS, ExpertNames, Layers, PREFILL_ROWS,
    check_shape, decoder, expert_decoder, expert_prefill_rows, object, prefill_rows,
};
use crate::recipe::{Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::RecipeEntry;
use config::{Config, Kind};
use layers::{layer, until_experts};

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

register_recipe!(
    RecipeEntry::new(&DECODERS, recipe)
        .tasks(&[Task::Generate, Task::Embed])
        .prefill_graphs()
        .longest(longest)
);
register_recipe!(
    RecipeEntry::new(&["Qwen3MoeForCausalLM"], recipe)
        .prefill_graphs()
        .longest(longest)
        .options(&[EXPERTS])
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
    let inputs = |rows| AttendInputs::new(config.heads.dim, rows, options.max_ctx);
    let mut params = params(config, options);
    let (decoder, tables) = match &config.sparse {
        None => {
            let decoder = decoder(
                options,
                config.layers,
                &prefill_rows(options, &PREFILL_ROWS)?,
                |name, range, rows| run(&layers, config, name, range, inputs(rows)),
                layers.lmhead(config.hidden, config.vocab, config.tied)?,
            )?;
            (decoder, Vec::new())
        }
        Some(sparse) => {
            params.extend(object(json!({
                "n_experts": sparse.experts.count,
                "router": {"rule": "softmax", "normalize": sparse.normalize},
            })));
            let decoder = expert_decoder(
                options,
                &sparse.layers,
                &expert_prefill_rows(options, &PREFILL_ROWS)?,
                &sparse.experts,
                |name, range, rows| {
                    until_experts(&layers, config, sparse, name, range, &inputs(rows))
                },
                layers.normed_lmhead(config.hidden, config.vocab, config.tied, "norm")?,
            )?;
            let with_experts = (0..config.layers).filter(|layer| sparse.layers[*layer]);
            let names = |layer| ExpertNames::new(format!("layers.{layer}.mlp.experts"));
            (decoder, vec![sparse.experts.tables(checkpoint, with_experts.map(names))?])
        }
    };
    let Decoder { contexts, plan_params } = decoder;
    Ok(Recipe::new(config.kind.family(), "llama_generate", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?)
        .params(params)
        .tables(tables))
}

fn layers<'a>(checkpoint: &'a Checkpoint, config: &Config, options: &RecipeOptions) -> Layers<'a> {
    Layers::decoder(checkpoint, options, config.eps)
}

fn embed(checkpoint: &Checkpoint, config: &Config, options: &RecipeOptions) -> Result<Recipe> {
    let encoder = Encoder::read(checkpoint, config.hidden)?;
    if encoder.causal {
        check_window(config, options)?;
    }
    // Of a decoder that is used as an encoder.
    checkpoint.leave_out("lm_head");
    let layers = layers(checkpoint, config, options);
    let mut params = params(config, options);
    let EncoderGraphs { contexts, plan_params, tables } =
        encoder.graphs(options, config.layers, &mut params, |name, range, rows, mask_rows| {
            let attend = AttendInputs { mask_rows, ..AttendInputs::new(config.heads.dim, rows, 0) };
            run(&layers, config, name, range, attend)
        })?;
    Ok(Recipe::new(config.kind.family(), encoder::HOST_OP, contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?)
        .params(params)
        .tables(tables))
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
