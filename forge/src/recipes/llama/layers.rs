//! One decoder layer, several up to one with experts, and the head.

use std::ops::Range;

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};

use super::classes::{HeadNorms, Norms};
use super::config::{Config, Sparse};
use crate::kit::{Attend, AttendInputs, Attention, Layers, Mlp};

/// Norms before and after attention, and before and after the MLP.
const fn norms(of: Norms) -> [[Option<&'static str>; 2]; 2] {
    let after = Some("post_attention_layernorm");
    match of {
        Norms::Before => [[Some("input_layernorm"), None], [after, None]],
        Norms::After => [[None, after], [None, Some("post_feedforward_layernorm")]],
        Norms::Both => [
            [Some("input_layernorm"), after],
            [Some("pre_feedforward_layernorm"), Some("post_feedforward_layernorm")],
        ],
    }
}

/// Norms of the hidden states between layers: as of the reference, their epsilon beside a mean of squares.
pub(super) fn residual<'a>(layers: &Layers<'a>, config: &Config) -> Layers<'a> {
    Layers { eps: layers.eps * config.residual * config.residual, ..*layers }
}

/// One layer on rows `[rows, hidden]`: attention and a gated MLP, with norms where the class has them.
pub(super) fn layer(
    layers: &Layers<'_>,
    config: &Config,
    b: &mut GraphBuilder,
    h: TensorId,
    layer: usize,
    attend: &Attend,
) -> Result<TensorId> {
    let class = config.class;
    let name = format!("layers.{layer}");
    let attention = attention(config, layer, attend);
    let mlp = Mlp {
        bias: config.mlp_bias,
        down_bias: config.mlp_bias,
        joined: class.joined.then_some("gate_up_proj"),
        ..Mlp::new(format!("{name}.mlp"), config.intermediate)
    };
    let [of_attention, of_mlp] = norms(class.norms);
    let before = |b: &mut GraphBuilder, h, norm: Option<&str>| match norm {
        Some(norm) => residual(layers, config).norm(b, h, &format!("{name}.{norm}")),
        None => Ok(h),
    };
    let add = |b: &mut GraphBuilder, h, out, norm: Option<&str>| {
        let out = match norm {
            Some(norm) => layers.scaled_norm(b, out, &format!("{name}.{norm}"), config.residual)?,
            None if config.added_scale != 1.0 => b.scale(out, config.added_scale)?,
            None => out,
        };
        b.add(h, out)
    };
    b.scope(format!("l{layer}_attn"));
    let x = before(b, h, of_attention[0])?;
    let out = layers.attention(b, x, &attention, attend)?;
    let h = add(b, h, out, of_attention[1])?;
    b.scope(format!("l{layer}_mlp"));
    let x = before(b, h, of_mlp[0])?;
    let act = if class.gemma { GraphBuilder::gelu_tanh } else { GraphBuilder::silu };
    let out = layers.mlp(b, x, &mlp, act)?;
    add(b, h, out, of_mlp[1])
}

/// The attention of a layer.
fn attention(config: &Config, layer: usize, attend: &Attend) -> Attention<'static> {
    let class = config.class;
    Attention {
        joined: class.joined.then_some("qkv_proj"),
        norms: (class.head_norms != HeadNorms::None).then_some(["q_norm", "k_norm"]),
        whole_norms: class.head_norms == HeadNorms::Whole,
        turned: config.turned.get(layer).copied().unwrap_or(true),
        scale: config.scale,
        cap: config.score_cap,
        bias: [config.qkv_bias; 3],
        centred: config.qkv_bias.then_some(config.rope.theta),
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

/// The graph `lmhead`: a normalised row `x` `[1, hidden]` to `logits` `[1, vocab]`, before their cap.
pub(super) fn head(layers: &Layers<'_>, config: &Config) -> Result<Graph> {
    let mut b = GraphBuilder::new("lmhead");
    let mut x = b.input("x", Elem::Activation, &[1, config.hidden])?;
    if config.logits_scale != 1.0 {
        x = b.scale(x, config.logits_scale)?;
    }
    let logits = layers.head(&mut b, x, config.vocab, config.tied, false)?;
    b.output("logits", logits)?;
    b.finish()
}
