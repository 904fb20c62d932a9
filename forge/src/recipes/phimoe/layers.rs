//! Graphs of attention and router, of experts, and of the head.

use qhx_core::Result;

use super::config::Config;
use super::experts::router;
use crate::builder::GraphBuilder;
use crate::graph::{Elem, Graph, TensorId};
use crate::recipes::ExpertInputs;
use crate::recipes::attention::{Attend, Heads, mix, rope};
use crate::recipes::layers::Layers;
use crate::weight::{Storage, Weight};

impl Layers<'_, Config> {
    /// `rows` tokens through attention and router of a layer, over a cache of `max_ctx` positions, or
    /// from the first token of a text on when that is 0.
    pub fn attention(
        &self,
        name: &str,
        layer: usize,
        rows: usize,
        max_ctx: usize,
    ) -> Result<Graph> {
        let c = self.config;
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[rows, c.hidden])?;
        let attend = Attend::inputs(&mut b, c.head_dim, rows, rows, max_ctx)?;
        b.scope("pre");
        let normed = self.norm(&mut b, x, &format!("layers.{layer}.input_layernorm"))?;
        let mixed = self.attend(&mut b, normed, layer, &attend)?;
        let y = b.add(x, mixed)?;
        b.scope("post");
        let z = self.norm(&mut b, y, &format!("layers.{layer}.post_attention_layernorm"))?;
        // Scores decide; they stay in the precision of activations.
        let weight =
            self.checkpoint.matrix(&router(self.checkpoint, layer), [c.experts, c.hidden])?;
        let scores = b.linear("gate", z, Weight::new(weight, Storage::Float), None)?;
        b.output("y", y)?;
        b.output("z", z)?;
        b.output("router", scores)?;
        b.finish()
    }

    fn attend(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        layer: usize,
        attend: &Attend,
    ) -> Result<TensorId> {
        let c = self.config;
        let (rows, d) = (attend.rows, c.head_dim);
        let heads = Heads { query: c.heads, groups: c.kv_heads, dim: d };
        let (wide, bias) = (heads.query * d, c.attention_bias);
        b.scope("attn");
        let past = if attend.max_ctx == 0 {
            None
        } else {
            let cache = [heads.groups, attend.max_ctx, d];
            let k = b.input(&format!("past_k_{layer}"), Elem::Activation, &cache)?;
            let v = b.input(&format!("past_v_{layer}"), Elem::Activation, &cache)?;
            Some((k, v))
        };
        let tensor = |name: &str| format!("layers.{layer}.self_attn.{name}");
        let q = self.linear(b, x, &tensor("q_proj"), [wide, c.hidden], bias)?;
        let k = self.linear(b, x, &tensor("k_proj"), [heads.groups * d, c.hidden], bias)?;
        let v = self.linear(b, x, &tensor("v_proj"), [heads.groups * d, c.hidden], bias)?;
        let q = b.reshape(q, &[rows, heads.query, d])?;
        let k = b.reshape(k, &[rows, heads.groups, d])?;
        let v = b.reshape(v, &[rows, heads.groups, d])?;
        let q = rope(b, q, attend)?;
        let k = rope(b, k, attend)?;
        let q = b.scale(q, 1.0 / (d as f32).sqrt())?;
        let mixed = mix(b, [q, k, v], past, heads, attend)?;
        let out = self.linear(b, mixed.out, &tensor("o_proj"), [c.hidden, wide], bias)?;
        b.output(&format!("new_k_{layer}"), mixed.k)?;
        b.output(&format!("new_v_{layer}"), mixed.v)?;
        Ok(out)
    }

    /// Residual to logits: the final norm and the head.
    pub fn head(&self, name: &str) -> Result<Graph> {
        let c = self.config;
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[1, c.hidden])?;
        b.scope("final");
        let normed = self.norm(&mut b, x, "norm")?;
        let tensor = if c.tied { "embed_tokens.weight" } else { "lm_head.weight" };
        let weight = self.checkpoint.matrix(tensor, [c.vocab, c.hidden])?;
        let bias = c.head_bias.then(|| self.checkpoint.values("lm_head.bias", &[c.vocab]));
        let weight = Weight::new(weight, Storage::Float);
        let logits = b.linear("head", normed, weight, bias.transpose()?)?;
        b.output("logits", logits)?;
        b.finish()
    }

    /// LayerNorm with weight and bias.
    fn norm(&self, b: &mut GraphBuilder, x: TensorId, name: &str) -> Result<TensorId> {
        let hidden = [self.config.hidden];
        let weight = b.row("norm", self.checkpoint.values(&format!("{name}.weight"), &hidden)?)?;
        let bias = b.row("shift", self.checkpoint.values(&format!("{name}.bias"), &hidden)?)?;
        b.layer_norm(x, self.config.eps, weight, bias)
    }
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
    let product = |b: &mut GraphBuilder, x: TensorId, name: &str, shape: [usize; 2]| {
        let name = format!("{prefix}{name}");
        match inputs {
            ExpertInputs::F16 => {
                let weight = b.input(&name, Elem::Activation, &shape)?;
                b.matmul(x, weight, true)
            }
            ExpertInputs::Int8 => {
                let weight = b.input(&name, Elem::Int8, &shape)?;
                let scale = b.input(&format!("{name}_scale"), Elem::Activation, &[1, shape[0]])?;
                let product = b.matmul(x, weight, true)?;
                b.mul(product, scale)
            }
        }
    };
    let gate = product(b, x, "gate", [width, hidden])?;
    let up = product(b, x, "up", [width, hidden])?;
    let gate = b.silu(gate)?;
    let inner = b.mul(gate, up)?;
    product(b, inner, "down", [hidden, width])
}
