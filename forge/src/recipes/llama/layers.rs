//! The parts of a layer: norms, MLP, attention over a cache or within a text.

use qhx_core::Result;

use super::config::Config;
use crate::builder::GraphBuilder;
use crate::graph::{Elem, TensorId};
use crate::recipes::attention::{Attend, Heads, mix, rope};
use crate::recipes::layers::Layers;

impl Layers<'_, Config> {
    /// One decoder layer on rows `[rows, hidden]`.
    pub fn layer(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        layer: usize,
        attend: &Attend,
    ) -> Result<TensorId> {
        b.scope(format!("l{layer}_pre"));
        let normed = self.norm(b, h, &format!("layers.{layer}.input_layernorm.weight"))?;
        let mixed = self.attention(b, normed, layer, attend)?;
        let h = b.add(h, mixed)?;
        b.scope(format!("l{layer}_post"));
        let name = format!("layers.{layer}.post_attention_layernorm.weight");
        let normed = self.norm(b, h, &name)?;
        let out = self.mlp(b, normed, layer)?;
        b.add(h, out)
    }

    /// RMSNorm of hidden rows.
    pub fn norm(&self, b: &mut GraphBuilder, x: TensorId, name: &str) -> Result<TensorId> {
        let weight = b.row("norm", self.checkpoint.values(name, &[self.config.hidden])?)?;
        b.rms_norm(x, self.config.eps, weight)
    }

    /// SwiGLU (Shazeer 2020, arXiv 2002.05202).
    fn mlp(&self, b: &mut GraphBuilder, x: TensorId, layer: usize) -> Result<TensorId> {
        b.scope(format!("l{layer}_mlp"));
        let (hidden, wide) = (self.config.hidden, self.config.intermediate);
        let bias = self.config.mlp_bias;
        let tensor = |name: &str| format!("layers.{layer}.mlp.{name}");
        let gate = self.linear(b, x, &tensor("gate_proj"), [wide, hidden], bias)?;
        let up = self.linear(b, x, &tensor("up_proj"), [wide, hidden], bias)?;
        let gate = b.silu(gate)?;
        let product = b.mul(gate, up)?;
        self.linear(b, product, &tensor("down_proj"), [hidden, wide], bias)
    }

    /// Grouped-query attention; see [`mix`].
    fn attention(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        layer: usize,
        attend: &Attend,
    ) -> Result<TensorId> {
        let c = self.config;
        let (heads, groups, d) = (c.heads, c.kv_heads, c.head_dim);
        let (rows, ctx) = (attend.rows, attend.max_ctx);
        b.scope(format!("l{layer}_attn"));
        let tensor = |name: &str| format!("layers.{layer}.self_attn.{name}");
        let past = if ctx == 0 {
            None
        } else {
            let cache = [groups, ctx, d];
            let k = b.input(&format!("past_k_{layer}"), Elem::Activation, &cache)?;
            let v = b.input(&format!("past_v_{layer}"), Elem::Activation, &cache)?;
            Some((k, v))
        };

        let q = self.linear(b, x, &tensor("q_proj"), [heads * d, c.hidden], c.qkv_bias)?;
        let k = self.linear(b, x, &tensor("k_proj"), [groups * d, c.hidden], c.qkv_bias)?;
        let v = self.linear(b, x, &tensor("v_proj"), [groups * d, c.hidden], c.qkv_bias)?;
        let q = b.reshape(q, &[rows, heads, d])?;
        let k = b.reshape(k, &[rows, groups, d])?;
        let v = b.reshape(v, &[rows, groups, d])?;
        let (q, k) = if c.qk_norm {
            (self.head_norm(b, q, &tensor("q_norm"))?, self.head_norm(b, k, &tensor("k_norm"))?)
        } else {
            (q, k)
        };
        let q = rope(b, q, attend)?;
        let k = rope(b, k, attend)?;
        let q = b.scale(q, 1.0 / (d as f32).sqrt())?;

        let heads = Heads { query: heads, groups, dim: d };
        let mixed = mix(b, [q, k, v], past, heads, attend)?;
        let out =
            self.linear(b, mixed.out, &tensor("o_proj"), [c.hidden, heads.query * d], c.o_bias)?;
        if past.is_some() {
            b.output(&format!("new_k_{layer}"), mixed.k)?;
            b.output(&format!("new_v_{layer}"), mixed.v)?;
        }
        Ok(out)
    }

    /// RMSNorm of every head `[rows, heads, d]` with one weight.
    fn head_norm(&self, b: &mut GraphBuilder, x: TensorId, name: &str) -> Result<TensorId> {
        let d = self.config.head_dim;
        let short = name.rsplit('.').next().unwrap_or(name);
        let weight = self.checkpoint.values(&format!("{name}.weight"), &[d])?;
        let weight = b.constant(short, Elem::Activation, &[1, 1, d], weight)?;
        b.rms_norm(x, self.config.eps, weight)
    }
}
