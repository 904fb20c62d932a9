//! Cosmos3-Edge as a decoder of text: `Cosmos3EdgeForConditionalGeneration` without its tower.
//!
//! Arithmetic: `transformers`, `models/cosmos3_edge/modeling_cosmos3_edge.py`. A Llama whose MLP has two projections
//! with the square of ReLU between them. Positions of text are equal on all axes of its M-RoPE, which is then plain.
//!
//! Graphs `decode` take one token, graphs `prefill<P>` take P tokens of a prompt over the same caches; the head is a
//! graph of its own. Their tensors are those of the kit's form of a decoder.

use std::ops::Range;

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph};
use serde_json::json;

use crate::kit::{
    Attend, AttendInputs, Attention, Decoder, DecoderParams, Heads, Layers, PREFILL_ROWS, Reader,
    Step, check_shape, decoder, prefill_rows,
};
use crate::recipe::{Recipe, RecipeOptions};
use crate::register_recipe;
use crate::registry::RecipeEntry;

register_recipe!(
    RecipeEntry::new(&["Cosmos3EdgeForConditionalGeneration"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .int8_caches()
);

/// Factor of what is squared.
const SMALLER: f32 = 0.125;

/// Sizes and constants of a model.
struct Config {
    hidden: usize,
    vocab: usize,
    intermediate: usize,
    layers: usize,
    heads: Heads,
    bias: bool,
    tied: bool,
}

/// Names of a tensor as published: projections of attention have names of their own.
fn names(name: &str) -> Vec<String> {
    let parts = [("q_proj", "to_q"), ("k_proj", "to_k"), ("v_proj", "to_v"), ("o_proj", "to_out")];
    let published =
        parts.iter().fold(name.to_owned(), |name, (ours, theirs)| name.replace(ours, theirs));
    vec![published]
}

/// The graphs of a checkpoint, and the plan that runs them with `decoder_generate`.
fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(names);
    for tower in ["model.visual", "model.projector"] {
        checkpoint.leave_out(tower);
    }
    let reader = Reader::new(checkpoint);
    reader.only("hidden_act", &json!("relu2"))?;
    reader.only("mlp_bias", &json!(false))?;
    let hidden = reader.size("hidden_size")?;
    let config = Config {
        hidden,
        vocab: reader.size("vocab_size")?,
        intermediate: reader.size("intermediate_size")?,
        layers: reader.layers()?,
        heads: reader.heads(hidden, None, Some(128))?,
        bias: reader.flag("attention_bias")?,
        tied: reader.tied(false)?,
    };
    let Config { vocab, layers, heads, .. } = config;
    check_shape(options, layers, reader.maybe_size("max_position_embeddings")?)?;
    let parts = Layers::decoder(checkpoint, options, reader.epsilon(&["rms_norm_eps"], 1e-5)?);
    let rope_theta = reader.rope_theta(1e8)?;
    let Decoder { contexts, plan_params } = decoder(
        options,
        layers,
        &prefill_rows(options, &PREFILL_ROWS)?,
        |name, range, step| graph(&parts, &config, name, range, step),
        parts.lmhead(hidden, vocab, config.tied, None)?,
    )?;
    Ok(Recipe::new("cosmos3", "decoder_generate", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [vocab, hidden])?)
        .params(DecoderParams { hidden, vocab, layers, heads, rope_theta }.map(options.max_ctx)))
}

/// Tokens through the layers of `range`.
fn graph(
    parts: &Layers<'_>,
    config: &Config,
    name: &str,
    range: Range<usize>,
    step: Step,
) -> Result<Graph> {
    let last = range.end == config.layers;
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[step.rows, config.hidden])?;
    let attend = Attend::inputs(&mut b, &AttendInputs::of(config.heads.dim, step))?;
    for i in range {
        let part = |part: &str| format!("layers.{i}.{part}");
        b.scope(format!("l{i}"));
        let normed = parts.norm(&mut b, h, &part("input_layernorm"))?;
        let attention = Attention {
            bias: [config.bias; 3],
            out_bias: config.bias,
            ..Attention::new(part("self_attn"), i, config.heads)
        };
        let mixed = parts.attention(&mut b, normed, &attention, &attend)?;
        h = b.add(h, mixed)?;
        b.scope(format!("l{i}_mlp"));
        let normed = parts.norm(&mut b, h, &part("post_attention_layernorm"))?;
        let inner =
            parts.linear(&mut b, normed, &part("mlp.up_proj"), config.intermediate, false)?;
        let positive = b.relu(inner)?;
        // Squares of up to 2,047 instead of 255 stay within f16.
        let smaller = b.scale(positive, SMALLER)?;
        let squared = b.mul(smaller, smaller)?;
        let out = parts.linear(&mut b, squared, &part("mlp.down_proj"), config.hidden, false)?;
        let out = b.scale(out, 1.0 / (SMALLER * SMALLER))?;
        h = b.add(h, out)?;
    }
    if last {
        b.scope("final");
        h = parts.norm(&mut b, h, "norm")?;
    }
    b.output("y", h)?;
    b.finish()
}
