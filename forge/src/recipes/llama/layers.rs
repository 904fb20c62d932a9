//! The parts of a layer: norms, MLP, attention over a cache or within a text.

use qhx_core::Result;

use super::config::Config;
use crate::builder::GraphBuilder;
use crate::checkpoint::Checkpoint;
use crate::graph::{Elem, TensorId};
use crate::recipes::Precision;
use crate::weight::Weight;

/// Inputs that all layers of a graph share, and the graph's sizes.
#[derive(Debug)]
pub(super) struct Attend {
    /// `[rows, 1, head_dim / 2]`
    cos: TensorId,
    /// `[rows, 1, head_dim / 2]`
    sin: TensorId,
    /// `[1, 1, rows or 1, width]`; `[1, 1, width]` for one row.
    mask: TensorId,
    /// Tokens that the graph takes at once.
    rows: usize,
    /// Positions of the KV cache; 0 without one.
    max_ctx: usize,
}

impl Attend {
    /// Adds the inputs `cos`, `sin` and `cmask` `[mask_rows, max_ctx + rows]`.
    pub fn inputs(
        b: &mut GraphBuilder,
        head_dim: usize,
        rows: usize,
        mask_rows: usize,
        max_ctx: usize,
    ) -> Result<Self> {
        let (half, width) = (head_dim / 2, max_ctx + rows);
        let cos = b.input("cos", Elem::Activation, &[rows, half])?;
        let sin = b.input("sin", Elem::Activation, &[rows, half])?;
        let mask = b.input("cmask", Elem::Activation, &[mask_rows, width])?;
        let cos = b.reshape(cos, &[rows, 1, half])?;
        let sin = b.reshape(sin, &[rows, 1, half])?;
        let mask = match rows {
            1 => b.reshape(mask, &[1, 1, width])?,
            _ => b.reshape(mask, &[1, 1, mask_rows, width])?,
        };
        Ok(Self { cos, sin, mask, rows, max_ctx })
    }
}

/// Builds parts of layers from the tensors of a checkpoint.
#[derive(Debug)]
pub(super) struct Layers<'a> {
    pub checkpoint: &'a Checkpoint,
    pub config: &'a Config,
    pub precision: Precision,
}

impl Layers<'_> {
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
        let part = |name: &str| format!("layers.{layer}.mlp.{name}");
        let gate = self.linear(b, x, &part("gate_proj"), [wide, hidden], bias)?;
        let up = self.linear(b, x, &part("up_proj"), [wide, hidden], bias)?;
        let gate = b.silu(gate)?;
        let product = b.mul(gate, up)?;
        self.linear(b, product, &part("down_proj"), [hidden, wide], bias)
    }

    /// Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): query head `a` uses key
    /// head `a / (heads / kv_heads)`, so the query heads of a group are rows of one product.
    ///
    /// Scores of the cache and of the graph's own tokens are separate products that are joined
    /// before the softmax, so that the cache is read where it lies and not copied to append rows.
    fn attention(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        layer: usize,
        attend: &Attend,
    ) -> Result<TensorId> {
        let c = self.config;
        let (heads, groups, d) = (c.heads, c.kv_heads, c.head_dim);
        let (repeat, rows, ctx) = (heads / groups, attend.rows, attend.max_ctx);
        b.scope(format!("l{layer}_attn"));
        let part = |name: &str| format!("layers.{layer}.self_attn.{name}");
        let past = if ctx == 0 {
            None
        } else {
            let cache = [groups, ctx, d];
            let k = b.input(&format!("past_k_{layer}"), Elem::Activation, &cache)?;
            let v = b.input(&format!("past_v_{layer}"), Elem::Activation, &cache)?;
            Some((k, v))
        };

        let q = self.linear(b, x, &part("q_proj"), [heads * d, c.hidden], c.qkv_bias)?;
        let k = self.linear(b, x, &part("k_proj"), [groups * d, c.hidden], c.qkv_bias)?;
        let v = self.linear(b, x, &part("v_proj"), [groups * d, c.hidden], c.qkv_bias)?;
        let q = b.reshape(q, &[rows, heads, d])?;
        let k = b.reshape(k, &[rows, groups, d])?;
        let v = b.reshape(v, &[rows, groups, d])?;
        let (q, k) = if c.qk_norm {
            (self.head_norm(b, q, &part("q_norm"))?, self.head_norm(b, k, &part("k_norm"))?)
        } else {
            (q, k)
        };
        let q = rope(b, q, attend)?;
        let k = rope(b, k, attend)?;
        let q = b.scale(q, 1.0 / (d as f32).sqrt())?;

        // Groups first: [groups, repeat · rows, d] against [groups, rows, d].
        let (q, k, v) = if rows == 1 {
            (
                b.reshape(q, &[groups, repeat, d])?,
                b.reshape(k, &[groups, 1, d])?,
                b.reshape(v, &[groups, 1, d])?,
            )
        } else {
            let q = b.reshape(q, &[rows, groups, repeat, d])?;
            let q = b.transpose(q, &[1, 2, 0, 3])?;
            (
                b.reshape(q, &[groups, repeat * rows, d])?,
                b.transpose(k, &[1, 0, 2])?,
                b.transpose(v, &[1, 0, 2])?,
            )
        };
        let own = b.matmul(q, k, true)?;
        let scores = match past {
            Some((past_k, _)) => {
                let old = b.matmul(q, past_k, true)?;
                b.concat(&[old, own], 2)?
            }
            None => own,
        };
        let weights = if rows == 1 {
            let scores = b.add(scores, attend.mask)?;
            b.softmax(scores)?
        } else {
            let scores = b.reshape(scores, &[groups, repeat, rows, ctx + rows])?;
            let scores = b.add(scores, attend.mask)?;
            let weights = b.softmax(scores)?;
            b.reshape(weights, &[groups, repeat * rows, ctx + rows])?
        };
        let own = b.slice(weights, 2, ctx, ctx + rows)?;
        // With one row the product is one of a column and a row.
        let own = if rows == 1 { b.mul(own, v)? } else { b.matmul(own, v, false)? };
        let mixed = match past {
            Some((_, past_v)) => {
                let old = b.slice(weights, 2, 0, ctx)?;
                let old = b.matmul(old, past_v, false)?;
                b.add(old, own)?
            }
            None => own,
        };
        let mixed = if rows == 1 {
            mixed
        } else {
            let mixed = b.reshape(mixed, &[groups, repeat, rows, d])?;
            b.transpose(mixed, &[2, 0, 1, 3])?
        };
        let mixed = b.reshape(mixed, &[rows, heads * d])?;
        let out = self.linear(b, mixed, &part("o_proj"), [c.hidden, heads * d], c.o_bias)?;
        if past.is_some() {
            b.output(&format!("new_k_{layer}"), k)?;
            b.output(&format!("new_v_{layer}"), v)?;
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

    fn linear(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        shape: [usize; 2],
        bias: bool,
    ) -> Result<TensorId> {
        let source = self.checkpoint.matrix(&format!("{name}.weight"), shape)?;
        let storage = self.precision.storage(shape[0], shape[1]);
        let bias = bias
            .then(|| self.checkpoint.values(&format!("{name}.bias"), &[shape[0]]))
            .transpose()?;
        let short = name.rsplit('.').next().unwrap_or(name);
        b.linear(short, x, Weight::new(source, storage), bias)
    }
}

/// Rotary embedding of whole heads `[rows, heads, d]` in the half-split form (RoFormer,
/// arXiv 2104.09864): each row has the tables of its own position.
fn rope(b: &mut GraphBuilder, x: TensorId, attend: &Attend) -> Result<TensorId> {
    let (cos, sin) = (attend.cos, attend.sin);
    let half = b.shape(cos)?[2];
    let first = b.slice(x, 2, 0, half)?;
    let second = b.slice(x, 2, half, 2 * half)?;
    let first_cos = b.mul(first, cos)?;
    let second_sin = b.mul(second, sin)?;
    let second_cos = b.mul(second, cos)?;
    let first_sin = b.mul(first, sin)?;
    let low = b.sub(first_cos, second_sin)?;
    let high = b.add(second_cos, first_sin)?;
    b.concat(&[low, high], 2)
}
