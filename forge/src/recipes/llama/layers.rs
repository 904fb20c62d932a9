//! One decoder layer, and several up to one with experts.

use std::ops::Range;

use qhx_core::Result;

use super::config::{Config, Sparse};
use crate::builder::GraphBuilder;
use crate::graph::{Elem, Graph, TensorId};
use crate::kit::{Attend, AttendInputs, Attention, Layers, Mlp};

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
    let attention = attention(config, layer, attend);
    let mlp = Mlp { bias: config.mlp_bias, ..Mlp::new(format!("{name}.mlp"), config.intermediate) };
    layers.block(b, h, &name, &attention, &mlp, attend)
}

/// The attention of a layer.
fn attention(config: &Config, layer: usize, attend: &Attend) -> Attention<'static> {
    Attention {
        norms: config.qk_norm.then_some(["q_norm", "k_norm"]),
        bias: [config.qkv_bias; 3],
        out_bias: config.o_bias,
        cached: attend.capacity > 0,
        ..Attention::new(format!("layers.{layer}.self_attn"), layer, config.heads)
    }
}

/// Tokens through the layers of `range`, of which only the last may have experts: the graph ends where they begin.
pub(super) fn until_experts(
    layers: &Layers<'_>,
    config: &Config,
    sparse: &Sparse,
    name: &str,
    range: Range<usize>,
    inputs: &AttendInputs<'_>,
) -> Result<Graph> {
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[inputs.rows, config.hidden])?;
    let attend = Attend::inputs(&mut b, inputs)?;
    for index in range {
        if sparse.layers.get(index) != Some(&true) {
            h = layer(layers, config, &mut b, h, index, &attend)?;
            continue;
        }
        let (name, attention) = (format!("layers.{index}"), attention(config, index, &attend));
        let ends = layers.attention_block(&mut b, h, &name, &attention, &attend)?;
        layers.route(&mut b, ends, &format!("{name}.mlp.gate"), &sparse.experts)?;
        return b.finish();
    }
    b.output("y", h)?;
    b.finish()
}
