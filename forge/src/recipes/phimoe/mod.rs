//! PhiMoE decoders: attention and router as graphs, experts as tables on the host.
//!
//! Arithmetic: `transformers`, `models/phimoe`. Graphs of one layer each, spread over contexts by
//! layers; `a<i>` takes one token over a cache, `pf<i>` a prompt of up to P tokens from its first on:
//!
//! | tensor | shape, P = 1 for `a<i>` | |
//! |---|---|---|
//! | `x` → `y` | `[P, hidden]` | residual in, residual after attention |
//! | → `z` | `[P, hidden]` | normalised, for the experts |
//! | → `router` | `[P, experts]` | scores |
//! | `cos`, `sin` | `[P, head_dim / 2]` | half tables, a row for each token |
//! | `cmask` | `[1, max_ctx + 1]`; `[P, P]` for `pf<i>` | added to scores |
//! | `past_k_i`, `past_v_i` | `[kv_heads, max_ctx, head_dim]` | only `a<i>` |
//! | → `new_k_i`, `new_v_i` | `[kv_heads, P, head_dim]` | keys after rope |
//!
//! `ffn2` runs the two experts of a token and adds the residual, `ffn_pf` one expert over P tokens.
//! Their weights are inputs: f16, or int8 with scales that the product is multiplied by.
//! `lmhead_ar1` is final norm and head.

mod config;
mod experts;
mod layers;

use qhx_core::{Error, ErrorKind, Result};
use serde_json::{Map, Value, json};

use super::layers::Layers;
use super::{ContextPlan, ExpertInputs, Precision, Recipe, RecipeOptions};
use crate::checkpoint::Checkpoint;
use crate::graph::INT8_STEP;
use crate::plan::MAX_CONTEXTS;
use config::Config;
use layers::{pair, single};

/// Tokens of the longest prompt that goes through the graphs for prompts, when nothing is said.
const DEFAULT_WINDOW: usize = 576;

/// The recipe.
pub(super) fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint)?;
    let window = check(&config, options)?;
    let layers = Layers { checkpoint, config: &config, precision: options.precision };
    let inputs = options.expert_inputs;
    // Graphs that share weights stand in one context, of which no part can be left out.
    let optional = (!options.share_weights).then_some("prefill");
    let mut contexts: Vec<ContextPlan> = Vec::new();
    let mut spread = |letter: &str, rows: usize, max_ctx: usize, optional: Option<&'static str>| {
        for shard in 0..options.shards {
            let range = shard * config.layers / options.shards
                ..(shard + 1) * config.layers / options.shards;
            let graphs: Vec<_> = range
                .map(|layer| layers.attention(&format!("{letter}{layer}"), layer, rows, max_ctx))
                .collect::<Result<_>>()?;
            if let Some(other) = contexts.get_mut(shard).filter(|_| options.share_weights) {
                other.graphs.extend(graphs);
                continue;
            }
            let key = match options.shards {
                1 => letter.to_owned(),
                2 => format!("{letter}_{}", ["lo", "hi"][shard]),
                _ => format!("{letter}_p{shard}"),
            };
            contexts.push(ContextPlan { key, precision: options.precision, graphs, optional });
        }
        Ok::<_, Error>(())
    };
    spread("a", 1, options.max_ctx, None)?;
    if let Some(window) = window {
        spread("pf", window, 0, optional)?;
    }
    let mut alone = |graph: crate::graph::Graph, optional| {
        let (key, precision) = (graph.name().to_owned(), Precision::Fp16);
        contexts.push(ContextPlan { key, precision, graphs: vec![graph], optional });
    };
    alone(pair("ffn2", &config, inputs)?, None);
    if let Some(window) = window {
        alone(single("ffn_pf", &config, inputs, window)?, optional);
    }
    alone(layers.head("lmhead_ar1")?, None);
    if contexts.len() > MAX_CONTEXTS {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "{} shards make {} contexts, expected at most {MAX_CONTEXTS}, which the NPU holds at \
                 once",
                options.shards,
                contexts.len()
            ),
        )
        .hint("ask for fewer shards, or omit the prompt graphs with --prefill 0"));
    }
    Ok(Recipe {
        family: "phimoe",
        host_op: "phimoe_generate",
        contexts,
        embed: checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?,
        params: params(&config, options),
        plan_params: plan_params(inputs, window),
        tables: vec![experts::tables(checkpoint, &config)?],
    })
}

/// Checks the options; answers with the tokens that the graphs for prompts take, if there are any.
fn check(config: &Config, options: &RecipeOptions) -> Result<Option<usize>> {
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
    let window = match options.prefill.as_deref() {
        None => Some(DEFAULT_WINDOW.min(options.max_ctx)).filter(|window| *window > 1),
        Some([]) => None,
        Some([window]) => Some(*window),
        Some(list) => {
            return usage(format!(
                "{} sizes of prompt graphs, expected one: a prompt goes through them whole",
                list.len()
            ));
        }
    };
    match window {
        Some(rows) if rows < 2 || rows > options.max_ctx => usage(format!(
            "prompt graphs of {rows} tokens, expected 2 to {}, the context",
            options.max_ctx
        )),
        _ => Ok(window),
    }
}

fn params(config: &Config, options: &RecipeOptions) -> Map<String, Value> {
    let value = json!({
        "hidden": config.hidden,
        "vocab": config.vocab,
        "n_layers": config.layers,
        "max_ctx": options.max_ctx,
        "n_heads": config.heads,
        "n_kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "kv_dim": config.kv_heads * config.head_dim,
        "rope_theta": config.rope_theta,
        "n_experts": config.experts,
        "expert_width": config.width,
        "router_jitter_noise": config.jitter,
        "sliding_window": config.window,
    });
    object(value)
}

fn plan_params(inputs: ExpertInputs, window: Option<usize>) -> Map<String, Value> {
    let mut plan = object(json!({"decode": "a*", "ffn": "ffn2", "lmhead": "lmhead_ar1"}));
    if window.is_some() {
        plan.insert("prefill".to_owned(), json!("pf*"));
        plan.insert("ffn_prefill".to_owned(), json!("ffn_pf"));
    }
    if inputs == ExpertInputs::Int8 {
        plan.insert("int8_step".to_owned(), json!(INT8_STEP));
    }
    plan
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
