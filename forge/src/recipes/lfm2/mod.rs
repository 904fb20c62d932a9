//! The recipe for `Lfm2ForCausalLM` and `Lfm2MoeForCausalLM`: LFM2 and LFM2.5 checkpoints to graphs.
//!
//! Arithmetic: `transformers`, `models/lfm2/modeling_lfm2.py` and `models/lfm2_moe`. Graphs `decode` take
//! one token, graphs `prefill<P>` take P tokens of a prompt over the same states; the head is a graph of its own.
//!
//! | tensor | shape, P = 1 for `decode` | |
//! |---|---|---|
//! | `x` → `y` | `[P, hidden]` | residual in and out; normalised after the last layer |
//! | `cos`, `sin` | `[P, head_dim / 2]` | half tables; where there is attention |
//! | `cmask` | `[P, max_ctx + P]` | added to scores; the last P slots are the graph's own tokens |
//! | `keep` | `[kernel − 1, kernel − 1 + P]` | `prefill<P>`, where there are convolutions: the columns that they keep, those before the first row that is no token |
//! | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[kv_heads, max_ctx, head_dim]` → `[kv_heads, P, head_dim]` | attention layers; keys after norm and rope |
//! | `past_conv_i` → `present_conv_i` | `[kernel − 1, hidden]` | convolution layers; rows oldest first |
//! | head: `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |
//!
//! In models with experts, graphs `decode<n>` and `prefill<P>_<n>` end before them, see
//! [`Experts`](crate::kit::Experts), and the head normalises.

mod config;
mod vision;

use std::ops::Range;

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use serde_json::json;

use crate::kit::{
    Attend, AttendInputs, Attention, Decoder, DecoderParams, EXPERTS, ExpertNames, Layers, Mlp,
    PREFILL_ROWS, Step, check_shape, decoder, expert_decoder, prefill_rows,
};
use crate::recipe::{Recipe, RecipeOptions};
use crate::register_recipe;
use crate::registry::RecipeEntry;
use config::{Config, Sparse};

const PARTS: [&str; 3] = ["w1", "w3", "w2"];

register_recipe!(
    RecipeEntry::new(&["Lfm2ForCausalLM"], recipe).prefill_graphs().smaller_contexts()
);
register_recipe!(
    RecipeEntry::new(&["Lfm2MoeForCausalLM"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .options(&[EXPERTS])
);

/// The graphs of a checkpoint, and the plan that runs them with `decoder_generate`.
fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint)?;
    let Config { hidden, vocab, heads, rope_theta, tied, .. } = config;
    let count = config.attention.len();
    check_shape(options, count, config.max_positions)?;
    let layers = Layers::decoder(checkpoint, options, config.eps);
    let make = |name: &str, range, step| graph(&layers, &config, name, range, step);
    let mut params =
        DecoderParams { hidden, vocab, layers: count, heads, rope_theta }.map(options.max_ctx);
    let (decoder, tables) = match &config.sparse {
        None => {
            let rows = prefill_rows(options, &PREFILL_ROWS)?;
            let head = layers.lmhead(hidden, vocab, tied, None)?;
            (decoder(options, count, &rows, make, head)?, Vec::new())
        }
        Some(Sparse { experts, dense, bias, router }) => {
            params.insert("n_experts".to_owned(), json!(experts.count));
            params.insert("router".to_owned(), router.clone());
            let rows = prefill_rows(options, &PREFILL_ROWS)?;
            let sparse: Vec<_> = (0..count).map(|layer| layer >= *dense).collect();
            let head = layers.lmhead(hidden, vocab, tied, Some("embedding_norm"))?;
            let names = |layer: usize| {
                let part = |part: &str| format!("layers.{layer}.feed_forward.{part}");
                let bias = bias.then(|| part("expert_bias"));
                ExpertNames { parts: PARTS, bias, ..ExpertNames::new(part("experts")) }
            };
            let tables = experts.tables(checkpoint, (*dense..count).map(names))?;
            (expert_decoder(options, &sparse, &rows, experts, make, head)?, vec![tables])
        }
    };
    if config.attention.contains(&false) {
        params.insert("states".to_owned(), json!(["conv"]));
    }
    let Decoder { contexts, plan_params } = decoder;
    Ok(Recipe::new("lfm2", "decoder_generate", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [vocab, hidden])?)
        .params(params)
        .tables(tables))
}

/// Tokens through the layers of `range`.
fn graph(
    layers: &Layers<'_>,
    config: &Config,
    name: &str,
    range: Range<usize>,
    step: Step,
) -> Result<Graph> {
    let rows = step.rows;
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[rows, config.hidden])?;
    let inputs = AttendInputs::of(config.heads.dim, step);
    let kinds = &config.attention[range.clone()];
    let attend = kinds.contains(&true).then(|| Attend::inputs(&mut b, &inputs)).transpose()?;
    let older = config.kernel - 1;
    let keep = (rows > 1 && kinds.contains(&false))
        .then(|| b.input("keep", Elem::Activation, &[older, older + rows]))
        .transpose()?;
    let last = range.end == config.attention.len() && config.sparse.is_none();
    for (i, &attention) in range.zip(kinds) {
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
            _ => short_conv(layers, config, &mut b, normed, (i, rows, keep))?,
        };
        h = b.add(h, mixed)?;
        b.scope(format!("l{i}_mlp"));
        let normed = layers.norm(&mut b, h, &format!("layers.{i}.ffn_norm"))?;
        let name = format!("layers.{i}.feed_forward");
        if let Some(sparse) = config.sparse.as_ref().filter(|sparse| i >= sparse.dense) {
            layers.route(&mut b, [h, normed], &format!("{name}.gate"), &sparse.experts)?;
            return b.finish();
        }
        let mlp = Mlp { parts: PARTS, ..Mlp::new(name, config.intermediate) };
        let out = layers.mlp(&mut b, normed, &mlp, GraphBuilder::silu)?;
        h = b.add(h, out)?;
    }
    if last {
        b.scope("final");
        h = layers.norm(&mut b, h, "embedding_norm")?;
    }
    b.output("y", h)?;
    b.finish()
}

/// `Lfm2ShortConv`: `C · conv(B · x)`, a causal depthwise convolution between two gates. Of several rows, `keep`
/// chooses those that the next step begins with.
fn short_conv(
    layers: &Layers<'_>,
    config: &Config,
    b: &mut GraphBuilder,
    x: TensorId,
    (layer, rows, keep): (usize, usize, Option<TensorId>),
) -> Result<TensorId> {
    let (hidden, kernel, bias) = (config.hidden, config.kernel, config.conv_bias);
    let part = |name: &str| format!("layers.{layer}.conv.{name}");
    let past = b.input(&format!("past_conv_{layer}"), Elem::Activation, &[kernel - 1, hidden])?;
    let all = layers.linear(b, x, &part("in_proj"), 3 * hidden, bias)?;
    let before = b.slice(all, 1, 0, hidden)?;
    let after = b.slice(all, 1, hidden, 2 * hidden)?;
    let value = b.slice(all, 1, 2 * hidden, 3 * hidden)?;
    let columns = b.mul(before, value)?;

    // Time is the first dimension of the FIFO: new columns are rows as they come.
    let window = b.concat(&[past, columns], 0)?;
    let present = match keep {
        Some(keep) => b.matmul(keep, window, false)?,
        None => b.slice(window, 0, 1, kernel)?,
    };
    let stored = layers.checkpoint.values(&part("conv.weight"), &[hidden, 1, kernel])?;
    let product = |b: &mut GraphBuilder, tap: usize| {
        let shifted = b.slice(window, 0, tap, tap + rows)?;
        let taps = stored.iter().skip(tap).step_by(kernel).copied().collect();
        let taps = b.row(&format!("tap_{tap}"), taps)?;
        b.mul(shifted, taps)
    };
    let mut mixed = product(b, 0)?;
    for tap in 1..kernel {
        let product = product(b, tap)?;
        mixed = b.add(mixed, product)?;
    }
    if bias {
        let bias = b.row("bias", layers.checkpoint.values(&part("conv.bias"), &[hidden])?)?;
        mixed = b.add(mixed, bias)?;
    }
    let gated = b.mul(after, mixed)?;
    let out = layers.linear(b, gated, &part("out_proj"), hidden, bias)?;
    b.output(&format!("present_conv_{layer}"), present)?;
    Ok(out)
}
