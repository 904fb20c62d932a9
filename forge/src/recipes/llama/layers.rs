//! One decoder layer.

use qhx_core::Result;

use super::config::Config;
use crate::builder::GraphBuilder;
use crate::graph::TensorId;
use crate::kit::{Attend, Attention, Layers, Mlp};

/// One layer on rows `[rows, hidden]`: attention and SwiGLU, each after an RMSNorm.
pub(super) fn layer(
    layers: &Layers<'_>,
    config: &Config,
    b: &mut GraphBuilder,
    h: TensorId,
    layer: usize,
    attend: &Attend,
) -> Result<TensorId> {
    let tensor = |part: &str| format!("layers.{layer}.{part}");
    b.scope(format!("l{layer}_attn"));
    let normed = layers.norm(b, h, &tensor("input_layernorm"))?;
    let attention = Attention {
        norms: config.qk_norm.then_some(["q_norm", "k_norm"]),
        qkv_bias: config.qkv_bias,
        out_bias: config.o_bias,
        cached: attend.capacity > 0,
        ..Attention::new(tensor("self_attn"), layer, config.heads)
    };
    let mixed = layers.attention(b, normed, &attention, attend)?;
    let h = b.add(h, mixed)?;
    b.scope(format!("l{layer}_mlp"));
    let normed = layers.norm(b, h, &tensor("post_attention_layernorm"))?;
    let mlp = Mlp { bias: config.mlp_bias, ..Mlp::new(tensor("mlp"), config.intermediate) };
    let out = layers.mlp(b, normed, &mlp, GraphBuilder::silu)?;
    b.add(h, out)
}
