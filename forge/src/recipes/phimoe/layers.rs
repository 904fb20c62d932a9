//! Graphs of attention and router, and of the head.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph};

use super::config::Config;
use crate::kit::{Attend, AttendInputs, Attention, Layers, Step};

/// Tokens through attention and router of a layer, over a cache.
pub(super) fn attention(
    layers: &Layers<'_>,
    config: &Config,
    name: &str,
    layer: usize,
    step: Step,
) -> Result<Graph> {
    let tensor = |part: &str| format!("layers.{layer}.{part}");
    let mut b = GraphBuilder::new(name);
    let x = b.input("x", Elem::Activation, &[step.rows, config.hidden])?;
    let attend = Attend::inputs(&mut b, &AttendInputs::of(config.heads.dim, step))?;
    b.scope("attn");
    let normed = layers.layer_norm(&mut b, x, &tensor("input_layernorm"))?;
    let attention = Attention {
        bias: [config.attention_bias; 3],
        out_bias: config.attention_bias,
        ..Attention::new(tensor("self_attn"), layer, config.heads)
    };
    let mixed = layers.attention(&mut b, normed, &attention, &attend)?;
    let y = b.add(x, mixed)?;
    b.scope("post");
    let z = layers.layer_norm(&mut b, y, &tensor("post_attention_layernorm"))?;
    layers.route(&mut b, [y, z], &router(layers.checkpoint, layer), &config.experts())?;
    b.finish()
}

/// Name of a layer's router.
fn router(checkpoint: &Checkpoint, layer: usize) -> String {
    let new = format!("layers.{layer}.mlp.router");
    let found = checkpoint.has(&format!("{new}.weight"));
    if found { new } else { format!("layers.{layer}.block_sparse_moe.gate") }
}

/// Residual to logits: the final norm and the head.
pub(super) fn head(layers: &Layers<'_>, config: &Config, name: &str) -> Result<Graph> {
    let mut b = GraphBuilder::new(name);
    let x = b.input("x", Elem::Activation, &[1, config.hidden])?;
    b.scope("final");
    let normed = layers.layer_norm(&mut b, x, "norm")?;
    let logits = layers.head(&mut b, normed, config.vocab, config.tied, config.head_bias)?;
    b.output("logits", logits)?;
    b.finish()
}
