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
//! Their weights are inputs: f16, or int8 with scales that the output is multiplied by.
//! `lmhead_ar1` is final norm and head.

mod config;
mod layers;

use qhx_core::{Error, ErrorKind, Result};
use serde_json::{Map, Value, json};

use crate::checkpoint::Checkpoint;
use crate::graph::Graph;
use crate::kit::{
    DecoderParams, EXPERTS, ExpertInputs, ExpertNames, Layers, check_shape, object, prefill_rows,
};
use crate::recipe::{ContextPlan, MAX_CONTEXTS, Recipe, RecipeOptions};
use crate::register_recipe;
use crate::registry::RecipeEntry;
use config::Config;
use layers::{attention, head};

/// Tokens of the longest prompt that goes through the prefill graphs, by default.
const DEFAULT_WINDOW: usize = 576;

// The older of the two names stands in older checkpoints.
register_recipe!(
    RecipeEntry::new(&["PhimoeForCausalLM", "PhiMoEForCausalLM"], recipe)
        .prefill_graphs()
        .options(&[EXPERTS])
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint)?;
    let window = check(&config, options)?;
    let layers = Layers::decoder(checkpoint, options, config.eps);
    let (experts, inputs) = (config.experts(), ExpertInputs::of(options));
    // Graphs that share weights stand in one context, of which no part can be left out.
    let optional = (!options.share_weights).then(|| "prefill".to_owned());
    let mut contexts: Vec<ContextPlan> = Vec::new();
    let mut spread = |letter: &str, rows: usize, max_ctx: usize, optional: Option<String>| {
        for shard in 0..options.shards {
            let range = shard * config.layers / options.shards
                ..(shard + 1) * config.layers / options.shards;
            let graphs: Vec<_> = range
                .map(|layer| {
                    let name = format!("{letter}{layer}");
                    attention(&layers, &config, &name, layer, rows, max_ctx)
                })
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
            let optional = optional.clone();
            let context = ContextPlan::new(key, options.precision, graphs);
            contexts.push(ContextPlan { optional, ..context });
        }
        Ok::<_, Error>(())
    };
    spread("a", 1, options.max_ctx, None)?;
    if let Some(window) = window {
        spread("pf", window, options.max_ctx, optional.clone())?;
    }
    let mut alone = |graph: Graph, optional| {
        contexts.push(ContextPlan { optional, ..ContextPlan::alone(graph) });
    };
    alone(experts.token_graph("ffn2", inputs)?, None);
    if let Some(window) = window {
        alone(experts.rows_graph("ffn_pf", inputs, window)?, optional);
    }
    alone(head(&layers, &config, "lmhead_ar1")?, None);
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
        .hint(match window {
            Some(_) => "ask for fewer shards, or omit the prefill graphs with --prefill 0",
            None => "ask for fewer shards",
        }));
    }
    Ok(Recipe::new("phimoe", "phimoe_generate", contexts, plan_params(inputs, window))
        .embed(checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?)
        .params(params(&config, options))
        .tables(vec![experts.tables(checkpoint, (0..config.layers).map(names))?]))
}

/// Checks the options; returns the tokens that the prefill graphs take, if there are any.
fn check(config: &Config, options: &RecipeOptions) -> Result<Option<usize>> {
    check_shape(options, config.layers, config.max_positions)?;
    if let Some(list) = options.prefill.as_ref().filter(|list| list.len() > 1) {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "{} sizes of prefill graphs, expected one: a prompt goes through them whole",
                list.len()
            ),
        ));
    }
    Ok(prefill_rows(options, &[DEFAULT_WINDOW])?.pop())
}

fn params(config: &Config, options: &RecipeOptions) -> Map<String, Value> {
    let Config { hidden, vocab, layers, heads, rope_theta, .. } = *config;
    let mut params =
        DecoderParams { hidden, vocab, layers, heads, rope_theta }.map(options.max_ctx);
    params.extend(object(json!({
        "n_experts": config.experts,
        "expert_width": config.width,
        "router_jitter_noise": config.jitter,
        "sliding_window": config.window,
    })));
    params
}

fn plan_params(inputs: ExpertInputs, window: Option<usize>) -> Map<String, Value> {
    let mut plan = object(json!({"decode": "a*", "ffn": "ffn2", "lmhead": "lmhead_ar1"}));
    if window.is_some() {
        plan.insert("prefill".to_owned(), json!("pf*"));
        plan.insert("ffn_prefill".to_owned(), json!("ffn_pf"));
    }
    inputs.plan(&mut plan);
    plan
}

/// Where a layer's experts are: stacks of `transformers`, or one by one as in published checkpoints.
fn names(layer: usize) -> ExpertNames {
    ExpertNames {
        experts: format!("layers.{layer}.block_sparse_moe.experts"),
        parts: ["w1", "w3", "w2"],
        ..ExpertNames::new(format!("layers.{layer}.mlp.experts"))
    }
}
