//! Graphs of attention and router, of experts, and of the head.

use qhx_core::Result;

use super::config::Config;
use super::experts::router;
use crate::builder::GraphBuilder;
use crate::graph::{Elem, Graph, TensorId};
use crate::kit::{Attend, AttendInputs, Attention, Layers};

/// What graphs of experts take as weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpertInputs {
    /// The table's own int8 values, and scales; nothing is converted on the host.
    Int8,
    /// f16 values, which the host makes of the table for each token.
    F16,
}

/// `rows` tokens through attention and router of a layer, over a cache of `max_ctx` positions.
pub(super) fn attention(
    layers: &Layers<'_>,
    config: &Config,
    name: &str,
    layer: usize,
    rows: usize,
    max_ctx: usize,
) -> Result<Graph> {
    let tensor = |part: &str| format!("layers.{layer}.{part}");
    let mut b = GraphBuilder::new(name);
    let x = b.input("x", Elem::Activation, &[rows, config.hidden])?;
    let attend = Attend::inputs(&mut b, &AttendInputs::new(config.heads.dim, rows, max_ctx))?;
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
    // Scores decide; they stay in the precision of activations.
    let router = router(layers.checkpoint, layer);
    let scores = layers.exact_linear(&mut b, z, &router, config.experts, false)?;
    b.output("y", y)?;
    b.output("z", z)?;
    b.output("router", scores)?;
    b.finish()
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

/// The two experts of a token: `y = residual + m1 · a(x) + m2 · b(x)`.
pub(super) fn pair(name: &str, config: &Config, inputs: ExpertInputs) -> Result<Graph> {
    let mut b = GraphBuilder::new(name);
    let x = b.input("x", Elem::Activation, &[1, config.hidden])?;
    let residual = b.input("residual", Elem::Activation, &[1, config.hidden])?;
    let m1 = b.input("m1", Elem::Activation, &[1, 1])?;
    let m2 = b.input("m2", Elem::Activation, &[1, 1])?;
    let first = expert(&mut b, x, "a_", config, inputs)?;
    let second = expert(&mut b, x, "b_", config, inputs)?;
    let first = b.mul(first, m1)?;
    let second = b.mul(second, m2)?;
    let sum = b.add(first, second)?;
    let y = b.add(residual, sum)?;
    b.output("y", y)?;
    b.finish()
}

/// One expert over `rows` tokens.
pub(super) fn single(
    name: &str,
    config: &Config,
    inputs: ExpertInputs,
    rows: usize,
) -> Result<Graph> {
    let mut b = GraphBuilder::new(name);
    let x = b.input("x", Elem::Activation, &[rows, config.hidden])?;
    let y = expert(&mut b, x, "", config, inputs)?;
    b.output("y", y)?;
    b.finish()
}

/// SwiGLU (Shazeer 2020, arXiv 2002.05202) with weights that are inputs.
fn expert(
    b: &mut GraphBuilder,
    x: TensorId,
    prefix: &str,
    config: &Config,
    inputs: ExpertInputs,
) -> Result<TensorId> {
    let (hidden, width) = (config.hidden, config.width);
    b.scope(format!("{prefix}expert"));
    let matmul = |b: &mut GraphBuilder, x: TensorId, name: &str, shape: [usize; 2]| {
        let name = format!("{prefix}{name}");
        match inputs {
            ExpertInputs::F16 => {
                let weight = b.input(&name, Elem::Activation, &shape)?;
                b.matmul(x, weight, true)
            }
            ExpertInputs::Int8 => {
                let weight = b.input(&name, Elem::Int8, &shape)?;
                let scale = b.input(&format!("{name}_scale"), Elem::Activation, &[1, shape[0]])?;
                let y = b.matmul(x, weight, true)?;
                b.mul(y, scale)
            }
        }
    };
    let gate = matmul(b, x, "gate", [width, hidden])?;
    let up = matmul(b, x, "up", [width, hidden])?;
    let gate = b.silu(gate)?;
    let inner = b.mul(gate, up)?;
    matmul(b, inner, "down", [hidden, width])
}
