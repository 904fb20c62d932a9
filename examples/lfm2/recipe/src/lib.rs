//! The recipe for `Lfm2ForCausalLM`: LFM2 and LFM2.5 checkpoints to graphs.
//!
//! Arithmetic: `transformers`, `models/lfm2/modeling_lfm2.py`. One context with two graphs:
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `x` → `y` | `[1, hidden]` | residual in, normalised row out |
//! | `cos`, `sin` | `[1, head_dim / 2]` | half tables |
//! | `cmask` | `[1, max_ctx + 1]` | added to scores; the last slot is the current token |
//! | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[kv_heads, max_ctx, head_dim]` → `[kv_heads, 1, head_dim]` | attention layers; keys after norm and rope |
//! | `past_conv_i` → `present_conv_i` | `[kernel − 1, hidden]` | convolution layers; rows oldest first |
//! | head: `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |

mod config;

use qhx_core::{Error, ErrorKind, Result};
use qhx_forge::builder::GraphBuilder;
use qhx_forge::checkpoint::Checkpoint;
use qhx_forge::graph::{Elem, Graph, ReduceOp, TensorId};
use qhx_forge::kit::{
    Attend, AttendInputs, Attention, DecoderParams, Layers, Mlp, check_shape, object,
};
use qhx_forge::recipe::{ContextPlan, Recipe, RecipeOptions};
use qhx_forge::{RecipeEntry, register_recipe};
use serde_json::json;

use config::Config;

register_recipe!(RecipeEntry::new(&["Lfm2ForCausalLM"], recipe));

/// The graphs of a checkpoint, and the plan that runs them with `lfm2_generate`.
fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    if options.shards != 1 {
        return Err(Error::new(
            ErrorKind::Usage,
            format!("{} shards, expected 1: lfm2_generate runs one decode graph", options.shards),
        ));
    }
    let config = Config::read(checkpoint)?;
    let Config { hidden, vocab, heads, rope_theta, tied, .. } = config;
    let count = config.attention.len();
    check_shape(options, count, config.max_positions)?;
    let layers = Layers::new(checkpoint, options.precision, config.eps);
    let graphs =
        vec![decode(&layers, &config, options.max_ctx)?, layers.lmhead(hidden, vocab, tied)?];
    Ok(Recipe {
        family: "lfm2".to_owned(),
        host_op: "lfm2_generate".to_owned(),
        contexts: vec![ContextPlan::new("decode".to_owned(), options.precision, graphs)],
        embed: checkpoint.matrix("embed_tokens.weight", [vocab, hidden])?,
        params: DecoderParams { hidden, vocab, layers: count, heads, rope_theta }
            .map(options.max_ctx),
        plan_params: object(json!({"decode": "decode", "lmhead": "lmhead"})),
        tables: Vec::new(),
    })
}

/// One token through all layers.
fn decode(layers: &Layers<'_>, config: &Config, max_ctx: usize) -> Result<Graph> {
    let mut b = GraphBuilder::new("decode");
    let mut h = b.input("x", Elem::Activation, &[1, config.hidden])?;
    let inputs = AttendInputs::new(config.heads.dim, 1, max_ctx);
    let any = config.attention.contains(&true);
    let attend = any.then(|| Attend::inputs(&mut b, &inputs)).transpose()?;
    for (i, &attention) in config.attention.iter().enumerate() {
        b.scope(format!("l{i}"));
        let normed = layers.norm(&mut b, h, &format!("layers.{i}.operator_norm"))?;
        let mixed = match &attend {
            Some(attend) if attention => {
                let attention = Attention {
                    norms: Some(["q_layernorm", "k_layernorm"]),
                    out: "out_proj",
                    ..Attention::new(format!("layers.{i}.self_attn"), i, config.heads)
                };
                layers.attention(&mut b, normed, &attention, attend)?
            }
            _ => short_conv(layers, config, &mut b, normed, i)?,
        };
        h = b.add(h, mixed)?;
        b.scope(format!("l{i}_mlp"));
        let normed = layers.norm(&mut b, h, &format!("layers.{i}.ffn_norm"))?;
        let name = format!("layers.{i}.feed_forward");
        let mlp = Mlp { parts: ["w1", "w3", "w2"], ..Mlp::new(name, config.intermediate) };
        let out = layers.mlp(&mut b, normed, &mlp, GraphBuilder::silu)?;
        h = b.add(h, out)?;
    }
    b.scope("final");
    let y = layers.norm(&mut b, h, "embedding_norm")?;
    b.output("y", y)?;
    b.finish()
}

/// `Lfm2ShortConv`: `C · conv(B · x)`, a causal depthwise convolution between two gates.
fn short_conv(
    layers: &Layers<'_>,
    config: &Config,
    b: &mut GraphBuilder,
    x: TensorId,
    layer: usize,
) -> Result<TensorId> {
    let (hidden, kernel, bias) = (config.hidden, config.kernel, config.conv_bias);
    let part = |name: &str| format!("layers.{layer}.conv.{name}");
    let past = b.input(&format!("past_conv_{layer}"), Elem::Activation, &[kernel - 1, hidden])?;
    let all = layers.linear(b, x, &part("in_proj"), 3 * hidden, bias)?;
    let before = b.slice(all, 1, 0, hidden)?;
    let after = b.slice(all, 1, hidden, 2 * hidden)?;
    let value = b.slice(all, 1, 2 * hidden, 3 * hidden)?;
    let column = b.mul(before, value)?;

    // Time is the first dimension of the FIFO: a new column is a row as it comes.
    let window = b.concat(&[past, column], 0)?;
    let present = b.slice(window, 0, 1, kernel)?;
    let stored = layers.checkpoint.values(&part("conv.weight"), &[hidden, 1, kernel])?;
    let taps = (0..kernel * hidden).map(|i| stored[(i % hidden) * kernel + i / hidden]);
    let taps = b.constant("taps", Elem::Activation, &[kernel, hidden], taps.collect())?;
    let products = b.mul(window, taps)?;
    let mut mixed = b.reduce(ReduceOp::Sum, products, 0)?;
    if bias {
        let bias = b.row("bias", layers.checkpoint.values(&part("conv.bias"), &[hidden])?)?;
        mixed = b.add(mixed, bias)?;
    }
    let gated = b.mul(after, mixed)?;
    let out = layers.linear(b, gated, &part("out_proj"), hidden, bias)?;
    b.output(&format!("present_conv_{layer}"), present)?;
    Ok(out)
}
