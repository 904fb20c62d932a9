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
    let name = format!("layers.{layer}");
    let attention = Attention {
        norms: config.qk_norm.then_some(["q_norm", "k_norm"]),
        bias: [config.qkv_bias; 3],
        out_bias: config.o_bias,
        cached: attend.capacity > 0,
        ..Attention::new(format!("{name}.self_attn"), layer, config.heads)
    };
    let mlp = Mlp { bias: config.mlp_bias, ..Mlp::new(format!("{name}.mlp"), config.intermediate) };
    layers.block(b, h, &name, &attention, &mlp, attend)
}
