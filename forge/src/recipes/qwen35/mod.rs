//! Qwen3.5 text decoder: `Qwen3_5ForCausalLM`, and the text part of `Qwen3_5ForConditionalGeneration`.
//!
//! Arithmetic: `transformers`, `models/qwen3_5/modeling_qwen3_5.py`, stated in `tests/oracle/QWEN35.md`.
//! One decode graph per shard takes one token through a range of layers; the head is a graph of its own.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `x` → `y` | `[1, hidden]` | residual in and out; normalised after the last layer |
//! | `cos`, `sin` | `[1, rotary_dim / 2]` | half tables; shards with full attention |
//! | `cmask` | `[1, max_ctx + 1]` | added to scores; the last slot is the current token |
//! | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[kv_heads, max_ctx, head_dim]` → `[kv_heads, 1, head_dim]` | layer `i` of full attention; keys after norm and rope |
//! | `past_conv_i` → `present_conv_i` | `[kernel − 1, conv_dim]` | rows oldest first; layer `i` of linear attention |
//! | `past_ssm_i` → `present_ssm_i` | f32 `[v_heads, k_dim, v_dim]` | |
//! | head: `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |
//!
//! The convolution's FIFO has time as its first dimension: the new column is a row as the projection
//! gives it, and neither the convolution nor the shift transposes.

mod config;
mod layers;

use qhx_core::{Error, ErrorKind, Result};
use serde_json::{Map, Value, json};

use super::layers::Layers;
use super::{ContextPlan, Precision, Recipe, RecipeOptions};
use crate::builder::GraphBuilder;
use crate::checkpoint::Checkpoint;
use crate::graph::{Elem, Graph};
use crate::weight::{Storage, Weight};
use config::{Config, LayerKind};
use layers::Attend;

/// The recipe.
pub(super) fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint)?;
    let layers = config.layers.len();
    if options.shards == 0 || options.shards > layers {
        return Err(Error::new(
            ErrorKind::Usage,
            format!("{} shards, expected 1 to {layers}, the number of layers", options.shards),
        ));
    }
    if options.max_ctx == 0 || config.max_positions.is_some_and(|max| options.max_ctx > max) {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "a context of {} tokens, expected 1 to {}, the model's max_position_embeddings",
                options.max_ctx,
                config.max_positions.unwrap_or(usize::MAX)
            ),
        ));
    }
    let mut contexts = Vec::new();
    let mut names = Vec::new();
    for shard in 0..options.shards {
        let range = shard * layers / options.shards..(shard + 1) * layers / options.shards;
        let name =
            if options.shards == 1 { "decode".to_owned() } else { format!("decode_p{shard}") };
        let graph = decode(checkpoint, &config, options, &name, range)?;
        contexts.push(ContextPlan {
            key: name.clone(),
            precision: options.precision,
            graphs: vec![graph],
            optional: None,
        });
        names.push(name);
    }
    let embed = checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?;
    let head = if config.tied {
        embed.clone()
    } else {
        checkpoint.matrix("lm_head.weight", [config.vocab, config.hidden])?
    };
    contexts.push(ContextPlan {
        key: "lmhead".to_owned(),
        precision: Precision::Fp16,
        graphs: vec![lmhead(&config, Weight::new(head, Storage::Float))?],
        optional: None,
    });
    let mut plan_params = Map::new();
    plan_params.insert(
        "decode".to_owned(),
        if let [name] = names.as_slice() { json!(name) } else { json!(names) },
    );
    plan_params.insert("lmhead".to_owned(), json!("lmhead"));
    let params = match json!({
        "hidden": config.hidden,
        "vocab": config.vocab,
        "n_layers": layers,
        "max_ctx": options.max_ctx,
        "n_heads": config.heads,
        "n_kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "kv_dim": config.kv_heads * config.head_dim,
        "rope_theta": config.rope_theta,
        "rotary_dim": config.rotary_dim,
    }) {
        Value::Object(map) => map,
        _ => Map::new(),
    };
    Ok(Recipe {
        family: "qwen3_5",
        host_op: "qwen3_5_generate",
        contexts,
        embed,
        params,
        plan_params,
        tables: Vec::new(),
    })
}

/// One token through the layers of `range`.
fn decode(
    checkpoint: &Checkpoint,
    config: &Config,
    options: &RecipeOptions,
    name: &str,
    range: std::ops::Range<usize>,
) -> Result<Graph> {
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[1, config.hidden])?;
    let full = |i: usize| config.layers.get(i) == Some(&LayerKind::Full);
    let attend = if range.clone().any(full) {
        let half = [1, config.rotary_dim / 2];
        let width = options.max_ctx + 1;
        let cos = b.input("cos", Elem::Activation, &half)?;
        let sin = b.input("sin", Elem::Activation, &half)?;
        let mask = b.input("cmask", Elem::Activation, &[1, width])?;
        let mask = b.reshape(mask, &[1, 1, width])?;
        Some(Attend { cos, sin, mask, max_ctx: options.max_ctx })
    } else {
        None
    };
    let last = range.end == config.layers.len();
    let layers = Layers { checkpoint, config, precision: options.precision };
    for index in range {
        let normed =
            layers.norm(&mut b, h, &format!("layers.{index}.input_layernorm.weight"), index)?;
        let mixed = match &attend {
            Some(attend) if full(index) => layers.attention(&mut b, normed, index, attend)?,
            _ => layers.delta_net(&mut b, normed, index)?,
        };
        h = b.add(h, mixed)?;
        let name = format!("layers.{index}.post_attention_layernorm.weight");
        let normed = layers.norm(&mut b, h, &name, index)?;
        let out = layers.mlp(&mut b, normed, index)?;
        h = b.add(h, out)?;
    }
    if last {
        b.scope("final");
        let weight = layers.one_plus("norm.weight", config.hidden)?;
        let weight = b.row("norm", weight)?;
        h = b.rms_norm(h, config.eps, weight)?;
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
