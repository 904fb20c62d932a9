//! The parts of a layer: norms, MLP, gated attention, gated delta net.

use std::sync::Arc;

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, ReduceOp, TensorId, UnaryOp};

use super::config::Config;
use crate::kit::{Attend, CausalConv, Layers, Mlp, conv_taps, gcd, mix, rope};
use crate::recipe::Precision;

/// The literal of `l2norm` in the model class; not `rms_norm_eps`.
pub(super) const L2_EPS: f32 = 1e-6;

/// Builds the layers of a model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Model<'a> {
    pub layers: Layers<'a>,
    pub config: &'a Config,
}

impl Model<'_> {
    /// `Qwen3_5Attention` of the layer at `place`, `layers.3`, whose cache has the number `layer`: queries against the
    /// cache and the graph's own rows, their result gated.
    pub fn attention(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        (place, layer): (&str, usize),
        attend: &Attend,
    ) -> Result<TensorId> {
        let (layers, c) = (&self.layers, self.config);
        let (query, groups, d, rows) = (c.heads.query, c.heads.groups, c.heads.dim, attend.rows);
        let tensor = |name: &str| format!("{place}.self_attn.{name}");
        let past = attend.past(b, layer, c.heads)?;

        // Per head, the query and then its gate.
        let both = layers.linear(b, x, &tensor("q_proj"), query * 2 * d, c.attention_bias)?;
        let both = b.reshape(both, &[rows, query, 2 * d])?;
        let q = b.slice(both, 2, 0, d)?;
        let gate = b.slice(both, 2, d, 2 * d)?;
        let k = layers.linear(b, x, &tensor("k_proj"), groups * d, c.attention_bias)?;
        let k = b.reshape(k, &[rows, groups, d])?;
        let v = layers.linear(b, x, &tensor("v_proj"), groups * d, c.attention_bias)?;
        let v = b.reshape(v, &[rows, groups, d])?;

        // What follows is linear in q: the factor of the scores stands in the norm's weight.
        let q = layers.scaled_norm(b, q, &tensor("q_norm"), c.heads.scale())?;
        let k = layers.norm(b, k, &tensor("k_norm"))?;
        let (q, k) = (rope(b, q, attend)?, rope(b, k, attend)?);
        let mixed = mix(b, [q, k, v], past, c.heads, attend)?;
        let shape = b.shape(mixed.out)?.to_vec();
        let gate = b.reshape(gate, &shape)?;
        let gate = b.unary(UnaryOp::Sigmoid, gate)?;
        let gated = b.mul(mixed.out, gate)?;
        let gated = b.reshape(gated, &[rows, query * d])?;
        let out = layers.linear(b, gated, &tensor("o_proj"), c.hidden, c.attention_bias)?;
        mixed.outputs(b, layer)?;
        Ok(out)
    }

    /// Adds the MLP of the layer at `place` to the stream.
    pub fn feed_forward(&self, b: &mut GraphBuilder, h: TensorId, place: &str) -> Result<TensorId> {
        let normed = self.layers.norm(b, h, &format!("{place}.post_attention_layernorm"))?;
        let mlp = Mlp::new(format!("{place}.mlp"), self.config.intermediate);
        let out = self.layers.mlp(b, normed, &mlp, GraphBuilder::silu)?;
        b.add(h, out)
    }

    /// `Qwen3_5GatedDeltaNet`: the recurrent gated delta rule (Yang et al. 2024) for one token.
    pub fn delta_net(&self, b: &mut GraphBuilder, x: TensorId, layer: usize) -> Result<TensorId> {
        let c = self.config;
        let (key_heads, heads, dk, dv) = (c.key_heads, c.value_heads, c.key_dim, c.value_dim);
        let (keys, channels) = (key_heads * dk, c.conv_dim());
        let past_ssm = b.input(&format!("past_ssm_{layer}"), Elem::F32, &[heads, dk, dv])?;

        // A column is laid out as rows of a head's width, which is what follows needs.
        let column = self.projected(b, x, layer, Projected::Mixed)?;
        let mixed = self.convolution(layer)?.build(b, column, None)?;
        let width = b.width(mixed)?;
        let rows = channels / width;
        let mixed = b.silu(mixed)?;

        // Queries and keys: unit length, and value head j uses key head j / (heads / key_heads).
        let head = |b: &mut GraphBuilder, start: usize, gain: f32| {
            let head = b.slice(mixed, 0, start / width, (start + keys) / width)?;
            let head = b.reshape(head, &[key_heads, dk])?;
            let head = b.cast(head, Elem::F32)?;
            b.l2_norm(head, L2_EPS, gain)
        };
        let q = head(b, 0, 1.0 / (dk as f32).sqrt())?;
        let q = b.repeat_rows(q, heads / key_heads)?;
        let q = b.reshape(q, &[heads, 1, dk])?;
        let k = head(b, keys, 1.0)?;
        let k = b.repeat_rows(k, heads / key_heads)?;
        let k = b.reshape(k, &[heads, 1, dk])?;
        let v = b.slice(mixed, 0, 2 * keys / width, rows)?;
        let v = b.reshape(v, &[heads, 1, dv])?;
        let v = b.cast(v, Elem::F32)?;

        let beta = self.projected(b, x, layer, Projected::Beta)?;
        let beta = b.unary(UnaryOp::Sigmoid, beta)?;
        let beta = b.cast(beta, Elem::F32)?;
        let beta = b.reshape(beta, &[heads, 1, 1])?;
        let decay = self.projected(b, x, layer, Projected::Decay)?;
        let decay = self.log_decay(b, decay, layer)?;
        let decay = b.unary(UnaryOp::Exp, decay)?;
        let decay = b.reshape(decay, &[heads, 1, 1])?;

        // The state S decays, is corrected towards v along k, and is read along q:
        //   delta = beta · (v − decay · kS),  S' = decay · S + kᵀ delta,
        //   out = qS' = decay · qS + (q·k) · delta.
        // So both reads are one matmul with the old state, which the NPU's matrix unit computes.
        let both = b.concat(&[q, k], 1)?;
        let reads = b.matmul(both, past_ssm, false)?;
        let reads = b.mul(reads, decay)?;
        let along_q = b.slice(reads, 1, 0, 1)?;
        let along_k = b.slice(reads, 1, 1, 2)?;
        let error = b.sub(v, along_k)?;
        let delta = b.mul(error, beta)?;
        let overlap = b.mul(q, k)?;
        let overlap = b.reduce(ReduceOp::Sum, overlap, 2)?;
        let own = b.mul(delta, overlap)?;
        let out = b.add(along_q, own)?;
        let state = b.mul(past_ssm, decay)?;
        let column = b.reshape(k, &[heads, dk, 1])?;
        let update = b.mul(column, delta)?;
        let state = b.add(state, update)?;

        let out = b.reshape(out, &[heads, dv])?;
        let y = self.gated(b, x, out, layer, 1)?;
        b.output(&format!("present_ssm_{layer}"), state)?;
        Ok(y)
    }

    /// Contribution of the rows x `[rows, hidden]` to the stream: `out` `[rows · heads, value_dim]` normalised head by
    /// head, gated and projected. This norm's weight has no 1 +.
    pub fn gated(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        out: TensorId,
        layer: usize,
        rows: usize,
    ) -> Result<TensorId> {
        let (layers, c) = (&self.layers, self.config);
        let (heads, dv) = (c.value_heads, c.value_dim);
        let tensor = |name: &str| format!("layers.{layer}.linear_attn.{name}");
        let z = self.projected(b, x, layer, Projected::Gate)?;
        let weight = layers.checkpoint.values(&tensor("norm.weight"), &[dv])?;
        let elem = b.tensor(out)?.elem;
        let weight = b.constant("norm", elem, &[1, dv], weight)?;
        let out = b.rms_norm(out, c.eps, weight)?;
        let out = b.cast(out, Elem::Activation)?;
        let z = b.reshape(z, &[rows * heads, dv])?;
        let gate = b.silu(z)?;
        let gated = b.mul(out, gate)?;
        let gated = b.reshape(gated, &[rows, heads * dv])?;
        layers.linear(b, gated, &tensor("out_proj"), c.hidden, false)
    }

    /// `−exp(A_log) · softplus(a + dt_bias)` for a `[rows, heads]`, in f32: the logarithm of what is left of the state.
    pub fn log_decay(&self, b: &mut GraphBuilder, a: TensorId, layer: usize) -> Result<TensorId> {
        let (checkpoint, heads) = (self.layers.checkpoint, self.config.value_heads);
        let values =
            |name: &str| checkpoint.values(&format!("layers.{layer}.linear_attn.{name}"), &[heads]);
        let rate = values("A_log")?.into_iter().map(|a| -a.exp()).collect();
        let rate = b.constant("rate", Elem::F32, &[1, heads], rate)?;
        let bias = b.constant("dt_bias", Elem::F32, &[1, heads], values("dt_bias")?)?;
        let a = b.cast(a, Elem::F32)?;
        let a = b.add(a, bias)?;
        let step = b.softplus(a)?;
        b.mul(step, rate)
    }

    /// The convolution of queries, keys and values.
    pub fn convolution(&self, layer: usize) -> Result<CausalConv> {
        let c = self.config;
        let (channels, kernel) = (c.conv_dim(), c.kernel);
        let name = format!("layers.{layer}.linear_attn.conv1d.weight");
        let taps = conv_taps(self.layers.checkpoint, &name, [channels, kernel])?;
        let width = gcd(c.key_dim, c.value_dim);
        Ok(CausalConv { layer, channels, kernel, width, taps, bias: None })
    }

    /// A projection of the rows x: a tensor of its own, or in Qwen3-Next a part of one in which the rows of each key
    /// head stand together (`fix_query_key_value_ordering`).
    pub fn projected(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        layer: usize,
        part: Projected,
    ) -> Result<TensorId> {
        let (c, heads) = (self.config, self.config.value_heads);
        // One output per head: as int8 they would save nothing and cost accuracy where it counts.
        let small = matches!(part, Projected::Beta | Projected::Decay);
        let layers = match small {
            true => Layers { precision: Precision::Fp16, ..self.layers },
            false => self.layers,
        };
        let (channels, values) = (c.conv_dim(), heads * c.value_dim);
        let (name, rows) = match part {
            Projected::Mixed => ("in_proj_qkv", 0..channels),
            Projected::Gate => ("in_proj_z", channels..channels + values),
            Projected::Beta => ("in_proj_b", 0..heads),
            Projected::Decay => ("in_proj_a", heads..2 * heads),
        };
        let tensor = |name: &str| format!("layers.{layer}.linear_attn.{name}");
        let own = tensor(name);
        if !c.fused || layers.checkpoint.has(&format!("{own}.weight")) {
            return layers.linear(b, x, &own, rows.len(), false);
        }
        let each = heads / c.key_heads;
        let (fused, parts) = match small {
            false => {
                let values = each * c.value_dim;
                ("in_proj_qkvz", vec![c.key_dim, c.key_dim, values, values])
            }
            true => ("in_proj_ba", vec![each, each]),
        };
        let order = by_part(c.key_heads, &parts);
        layers.ordered_linear(b, x, [&tensor(fused), name], &order, rows)
    }
}

/// Projections of a layer of linear attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Projected {
    /// Queries, keys and values.
    Mixed,
    /// The gate of what is read.
    Gate,
    /// Share of its value that a token writes.
    Beta,
    /// Part of the state that a token forgets.
    Decay,
}

/// Rows of `heads` heads, each with rows of all parts, in the order in which the first part of all heads comes first.
fn by_part(heads: usize, parts: &[usize]) -> Arc<[u32]> {
    let each: usize = parts.iter().sum();
    let starts = parts.iter().scan(0, |start, part| {
        *start += part;
        Some(*start - part)
    });
    let rows = starts.zip(parts).flat_map(|(start, part)| {
        (0..heads).flat_map(move |head| (0..*part).map(move |row| head * each + start + row))
    });
    rows.map(|row| row as u32).collect()
}
