//! PhiMoE decoders: attention and router as graphs, experts as tables on the host.
//!
//! Arithmetic: `transformers`, `models/phimoe`. Graphs of one layer each, spread over contexts by layers; `a<i>` takes
//! one token, `pf<i>` P tokens of a prompt over the same caches (`pf<P>_<i>` where there are several P):
//!
//! | tensor | shape, P = 1 for `a<i>` | |
//! |---|---|---|
//! | `x` → `y` | `[P, hidden]` | residual in, residual after attention |
//! | → `z` | `[P, hidden]` | normalised, for the experts |
//! | → `router` | `[P, experts]` | scores |
//! | `cos`, `sin` | `[P, head_dim / 2]` | half tables, a row for each token |
//! | `cmask` | `[P, max_ctx + P]` | added to scores |
//! | `past_k_i`, `past_v_i` | `[kv_heads, max_ctx, head_dim]` | |
//! | → `new_k_i`, `new_v_i` | `[kv_heads, P, head_dim]` | keys after rope |
//!
//! Graphs of a smaller context of N positions are `a<N>_<i>` and `pf<P>_<N>_<i>`, with N rows of caches.
//!
//! `ffn2` runs the two experts of a token and adds the residual, `ffn_pf` one expert over some of the tokens that chose
//! it. Their weights are inputs: f16, or int8 with scales that the output is multiplied by. `lmhead_ar1` is final norm
//! and head.

mod config;
mod layers;

use serde_json::{Map, Value, json};

use crate::kit::{
    DecoderParams, EXPERTS, ExpertInputs, ExpertNames, Layers, Step, check_shape, object,
    one_or_many, prefill_rows, shards, steps,
};
use crate::recipe::{ContextPlan, MAX_CONTEXTS, Recipe, RecipeOptions};
use crate::register_recipe;
use crate::registry::RecipeEntry;
use config::Config;
use layers::{attention, head};
use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;

/// Tokens that the prefill graphs take at once, by default. One number only: each makes as many graphs again as there
/// are layers, and the NPU's own memory holds few.
const PREFILL: [usize; 1] = [128];

// The older of the two names stands in older checkpoints.
register_recipe!(
    RecipeEntry::new(&["PhimoeForCausalLM", "PhiMoEForCausalLM"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .int8_caches()
        .options(&[EXPERTS])
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint)?;
    check_shape(options, config.layers, config.max_positions)?;
    let prompts = prefill_rows(options, &PREFILL)?;
    let layers = Layers::decoder(checkpoint, options, config.eps);
    let (experts, inputs) = (config.experts(), ExpertInputs::of(options));
    let mut contexts: Vec<ContextPlan> = Vec::new();
    let (mut prefill, mut within) = (Vec::new(), vec![Vec::new(); options.contexts.len()]);
    for step in steps(options, &prompts) {
        let stem = stem(options, &prompts, step);
        let shards = shards(stem.trim_end_matches('_'), config.layers, options.shards);
        for (shard, (key, range)) in shards.into_iter().enumerate() {
            let graph = |layer| attention(&layers, &config, &format!("{stem}{layer}"), layer, step);
            let graphs: Vec<_> = range.map(graph).collect::<Result<_>>()?;
            if let Some(other) = contexts.get_mut(shard) {
                other.graphs.extend(graphs);
                continue;
            }
            let key = match options.shards {
                2 => key.replace("_p0", "_lo").replace("_p1", "_hi"),
                _ => key,
            };
            contexts.push(ContextPlan::new(key, options.precision, graphs));
        }
        let smaller = options.contexts.iter().position(|context| *context == step.positions);
        match smaller.and_then(|context| within.get_mut(context)) {
            Some(names) => names.push(format!("{stem}*")),
            None if step.rows > 1 => prefill.push(format!("{stem}*")),
            None => {}
        }
    }
    contexts.push(ContextPlan::alone(experts.token_graph("ffn2", inputs)?));
    if let Some(widest) = prompts.iter().max() {
        let graph = experts.rows_graph("ffn_pf", inputs, experts.rows_of(*widest))?;
        contexts.push(ContextPlan::alone(graph));
    }
    contexts.push(ContextPlan::alone(head(&layers, &config, "lmhead_ar1")?));
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
        .hint("ask for fewer shards"));
    }
    Ok(Recipe::new("phimoe", "phimoe_generate", contexts, plan_params(inputs, prefill, within))
        .embed(checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?)
        .params(params(&config, options))
        .tables(vec![experts.tables(checkpoint, (0..config.layers).map(names))?]))
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

/// Prefix of the names of graphs, before the number of the layer.
fn stem(options: &RecipeOptions, prompts: &[usize], Step { rows, positions, .. }: Step) -> String {
    match (rows, positions == options.max_ctx) {
        (1, true) => "a".to_owned(),
        (1, false) => format!("a{positions}_"),
        (_, true) if prompts.len() == 1 => "pf".to_owned(),
        (_, true) => format!("pf{rows}_"),
        (_, false) => format!("pf{rows}_{positions}_"),
    }
}

fn plan_params(
    inputs: ExpertInputs,
    prefill: Vec<String>,
    within: Vec<Vec<String>>,
) -> Map<String, Value> {
    let mut plan = object(json!({"decode": "a*", "ffn": "ffn2", "lmhead": "lmhead_ar1"}));
    if !prefill.is_empty() {
        plan.insert("prefill".to_owned(), one_or_many(prefill));
        plan.insert("ffn_prefill".to_owned(), json!("ffn_pf"));
    }
    if !within.is_empty() {
        plan.insert("within".to_owned(), within.into_iter().map(one_or_many).collect());
    }
    inputs.plan(&mut plan);
    plan
}

/// Names of a layer's experts: stacks of `transformers`, or one by one as in published checkpoints.
fn names(layer: usize) -> ExpertNames {
    ExpertNames {
        experts: format!("layers.{layer}.block_sparse_moe.experts"),
        parts: ["w1", "w3", "w2"],
        ..ExpertNames::new(format!("layers.{layer}.mlp.experts"))
    }
}
