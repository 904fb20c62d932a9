//! The graphs of the decoder.
//!
//! Arithmetic: `transformers`, `models/gemma4/modeling_gemma4.py`, `Gemma4TextDecoderLayer`.

use std::ops::Range;

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use qhx_graph::weight::row_range;

use super::config::Config;
use crate::kit::{Attend, AttendInputs, Heads, Layers, Past, Step, mix, mix_past, rope, rotate};

/// Names of the rotary tables and the mask of full and of sliding layers.
const NAMES: [[&str; 3]; 2] = [["cos_f", "sin_f", "cmask_f"], ["cos_s", "sin_s", "cmask_s"]];

/// Makes the graphs of the decoder.
#[derive(Debug, Clone, Copy)]
pub(super) struct Model<'a> {
    pub parts: Layers<'a>,
    pub config: &'a Config,
    /// Rows of the caches of sliding layers.
    pub ring: usize,
    /// Inputs of an MLP's down projection are divided by 2 to this power.
    pub down_shift: i32,
    /// Rows of the graphs that verify draft tokens: they have all layers.
    pub verify: Option<usize>,
}

/// Keys and values that the layers of a graph read: the cache, and the rows of the graph's own tokens.
#[derive(Debug, Clone, Copy)]
struct Shared {
    layer: usize,
    past: Option<Past>,
    /// `[rows, groups, dim]`
    k: TensorId,
    v: TensorId,
}

/// A drafting head, whose layers a [`Model`] has: they read the caches of a target's layers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Drafter {
    /// Elements of the target's hidden states.
    pub backbone: usize,
    /// The target's layers that full and sliding layers read.
    pub donors: [Option<usize>; 2],
    /// Clusters of tokens, where there are scores of them.
    pub clusters: Option<usize>,
}

/// Inputs that the layers of a graph share.
struct Inputs {
    /// `[rows, layers of the graph · ple]`
    ple: Option<TensorId>,
    /// First layer of the graph.
    first: usize,
    /// Rotary tables of full and of sliding layers, where the graph has such.
    tables: [Option<[TensorId; 2]>; 2],
    /// All that attention of such layers takes.
    attend: [Option<Attend>; 2],
    shared: Vec<Shared>,
    /// Caches of another model, all that full and sliding layers read.
    borrowed: [Option<Past>; 2],
}

impl Model<'_> {
    /// True when graphs of `rows` rows only fill caches: no logits are needed but those of a prompt's last token.
    pub fn only_fills(&self, rows: usize) -> bool {
        rows > 1 && self.verify != Some(rows) && self.config.shared > 0
    }

    /// Tokens through the layers of `range`, over caches.
    ///
    /// A graph that only fills caches ends with the keys and values of the last layer that has some, and gives no `y`
    /// there. Layers after that are not in such a graph.
    pub fn graph(&self, name: &str, range: Range<usize>, step: Step) -> Result<Graph> {
        let (config, rows) = (self.config, step.rows);
        let capacities = [step.positions, self.ring];
        let fills = self.only_fills(rows);
        let range = if fills { range.start..range.end.min(config.first_shared()) } else { range };
        // Of the last layer with a cache such a graph needs keys and values alone.
        let attending = if fills {
            range.start..range.end.min(config.attending_prompts()).max(range.start)
        } else {
            range.clone()
        };
        let mut b = GraphBuilder::new(name);
        let mut x = self.streams(&mut b, range.start, rows)?;
        let mut inputs = Inputs {
            ple: None,
            first: range.start,
            tables: [None; 2],
            attend: [None; 2],
            shared: Vec::new(),
            borrowed: [None; 2],
        };
        if !attending.is_empty() {
            let width = attending.len() * config.ple;
            inputs.ple = Some(b.input("ple", Elem::Activation, &[rows, width])?);
        }
        for (kind, names) in NAMES.into_iter().enumerate() {
            let among = |layers: &Range<usize>| {
                config.sliding.get(layers.clone()).unwrap_or_default().contains(&(kind == 1))
            };
            let sizes = AttendInputs::new(config.heads[kind].dim, rows, capacities[kind]);
            let sizes = AttendInputs { names, ..sizes };
            if among(&attending) {
                let attend = Attend::inputs(&mut b, &sizes)?;
                inputs.tables[kind] = attend.tables;
                inputs.attend[kind] = Some(attend);
            } else if among(&range) {
                inputs.tables[kind] = Some(sizes.tables(&mut b)?);
            }
        }
        for layer in range.clone() {
            if let Some(altup) = &config.altup {
                // Keys and values need the first stream alone.
                let wanted = if attending.contains(&layer) { altup.streams } else { 1 };
                x = self.predict(&mut b, &x, (layer, wanted), altup)?;
            }
            b.scope(format!("l{layer}_attn"));
            let h = self.parts.norm(&mut b, x[0], &format!("layers.{layer}.input_layernorm"))?;
            if !attending.contains(&layer) {
                let [k, v] = self.own(&mut b, h, layer, rows, &inputs)?;
                for (role, own) in [("k", k), ("v", v)] {
                    let own = b.transpose(own, &[1, 0, 2])?;
                    b.output(&format!("new_{role}_{layer}"), own)?;
                }
                return b.finish();
            }
            x = self.layer(&mut b, &x, h, layer, &mut inputs)?;
        }
        let mut y = x[0];
        if range.end == config.layers() {
            b.scope("final");
            if config.altup.is_some() {
                y = self.leave(&mut b, &x)?;
            }
            y = self.parts.norm(&mut b, y, "norm")?;
        } else if x.len() > 1 {
            y = b.concat(&x, 1)?;
        }
        b.output("y", y)?;
        b.finish()
    }

    /// Rows of a graph whose first layer is `first`: the input x, or the streams that it holds side by side.
    fn streams(&self, b: &mut GraphBuilder, first: usize, rows: usize) -> Result<Vec<TensorId>> {
        let hidden = self.config.hidden;
        let streams = self.config.altup.as_ref().map_or(1, |altup| altup.streams);
        let width = if first == 0 { hidden } else { streams * hidden };
        let x = b.input("x", Elem::Activation, &[rows, width])?;
        match &self.config.altup {
            None => Ok(vec![x]),
            Some(altup) if first == 0 => self.enter(b, x, altup),
            Some(_) => (0..streams).map(|i| b.slice(x, 1, i * hidden, (i + 1) * hidden)).collect(),
        }
    }

    /// A drafting head over caches of `positions` rows, or of a ring's: the embedding x of a token and the hidden state
    /// h before it to the state y that stands in the place of the token's own, and to logits
    /// (`Gemma4AssistantForCausalLM`).
    pub fn draft(&self, name: &str, drafter: Drafter, positions: usize) -> Result<Graph> {
        let (config, parts) = (self.config, &self.parts);
        let mut b = GraphBuilder::new(name);
        let [x, h] = ["x", "h"].map(|name| b.input(name, Elem::Activation, &[1, drafter.backbone]));
        let pair = b.concat(&[x?, h?], 1)?;
        let mut x = vec![parts.linear(&mut b, pair, "pre_projection", config.hidden, false)?];
        let (tables, attend, borrowed) = ([None; 2], [None; 2], [None; 2]);
        let mut inputs =
            Inputs { ple: None, first: 0, tables, attend, shared: Vec::new(), borrowed };
        for (kind, rows) in [positions, self.ring].into_iter().enumerate() {
            let Some(donor) = drafter.donors[kind] else { continue };
            let sizes = AttendInputs::new(config.heads[kind].dim, 1, rows);
            let sizes = AttendInputs { names: NAMES[kind], ..sizes };
            let tables = Some(sizes.tables(&mut b)?);
            // No column for the token itself: its row is in no cache.
            let mask = b.input(NAMES[kind][2], Elem::Activation, &[1, rows])?;
            let mask = Some(b.reshape(mask, &[1, 1, rows])?);
            let attend = Attend { tables, mask, rows: 1, capacity: rows, caches: sizes.caches };
            inputs.borrowed[kind] = attend.past(&mut b, donor, config.heads[kind])?;
            inputs.attend[kind] = Some(attend);
        }
        for layer in 0..config.layers() {
            b.scope(format!("l{layer}_attn"));
            let h = parts.norm(&mut b, x[0], &format!("layers.{layer}.input_layernorm"))?;
            x = self.layer(&mut b, &x, h, layer, &mut inputs)?;
        }
        b.scope("final");
        let x = parts.norm(&mut b, x[0], "norm")?;
        let y = parts.linear(&mut b, x, "post_projection", drafter.backbone, false)?;
        b.output("y", y)?;
        if let Some(clusters) = drafter.clusters {
            let name = "masked_embedding.centroids";
            let scores = parts.exact_linear(&mut b, x, name, clusters, false)?;
            b.output("centroids", scores)?;
        }
        let logits = parts.head(&mut b, x, config.vocab, true, false)?;
        b.output("logits", logits)?;
        b.finish()
    }

    /// Projection of the first layer's rows to the per-layer inputs of the first `layers` layers: x `[rows, hidden]` →
    /// `context` `[rows, layers · ple]`, normalised layer by layer (`Gemma4TextModel.project_per_layer_inputs`).
    pub fn projection(&self, name: &str, rows: usize, layers: usize) -> Result<Graph> {
        let config = self.config;
        let [all, width] = [config.layers(), layers].map(|layers| layers * config.ple);
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[rows, config.hidden])?;
        // Before the matmul, so that its sums stay small.
        let x = b.scale(x, (config.hidden as f32).sqrt().recip())?;
        let name = "per_layer_model_projection";
        let weight =
            self.parts.checkpoint.matrix(&format!("{name}.weight"), [all, config.hidden])?;
        let weight = self.parts.precision.weight(row_range(&weight, 0..width));
        let y = b.linear(name, x, weight, None)?;
        let y = b.reshape(y, &[rows * layers, config.ple])?;
        let y = self.parts.norm(&mut b, y, "per_layer_projection_norm")?;
        let y = b.reshape(y, &[rows, width])?;
        b.output("context", y)?;
        b.finish()
    }

    /// A layer on streams of rows `[rows, hidden]`, of whose first one h is the norm.
    fn layer(
        &self,
        b: &mut GraphBuilder,
        streams: &[TensorId],
        h: TensorId,
        layer: usize,
        inputs: &mut Inputs,
    ) -> Result<Vec<TensorId>> {
        let (parts, altup) = (&self.parts, self.config.altup.as_ref());
        let tensor = |part: &str| format!("layers.{layer}.{part}");
        let mixed = self.attention(b, h, layer, inputs)?;
        let mixed = parts.norm(b, mixed, &tensor("post_attention_layernorm"))?;
        let mut x = b.add(streams[0], mixed)?;
        if let Some(altup) = altup {
            x = self.laurel(b, [x, h], layer, altup)?;
        }
        b.scope(format!("l{layer}_mlp"));
        let h = parts.norm(b, x, &tensor("pre_feedforward_layernorm"))?;
        let out = self.mlp(b, h, layer)?;
        let x = b.add(x, out)?;
        b.scope(format!("l{layer}_ple"));
        let Some(altup) = altup else {
            let x = match inputs.ple {
                Some(_) => {
                    let out = self.per_layer_input(b, x, layer, inputs)?;
                    b.add(x, out)?
                }
                None => x,
            };
            let scalar = parts.checkpoint.values(&tensor("layer_scalar"), &[1])?;
            return Ok(vec![b.scale(x, scalar.first().copied().unwrap_or(1.0))?]);
        };
        let mut corrected = self.correct(b, streams, x, layer, altup)?;
        let gating = self.gating(b, corrected[0], layer, altup)?;
        let out = self.per_layer_input(b, gating, layer, inputs)?;
        for stream in corrected.iter_mut().skip(1) {
            *stream = b.add(*stream, out)?;
        }
        Ok(corrected)
    }

    /// `Gemma4TextAttention`: queries, keys and values are normalised head by head, the values without a weight, and
    /// scores are not scaled.
    fn attention(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        layer: usize,
        inputs: &mut Inputs,
    ) -> Result<TensorId> {
        let (config, parts) = (self.config, &self.parts);
        let (heads, kind) = (self.heads(layer), self.kind(layer));
        let Some(attend) = inputs.attend[kind] else { return Err(outside(layer)) };
        let name = |part: &str| format!("layers.{layer}.self_attn.{part}");
        let q = parts.linear(b, h, &name("q_proj"), heads.query * heads.dim, false)?;
        let q = b.reshape(q, &[attend.rows, heads.query, heads.dim])?;
        let q = parts.norm(b, q, &name("q_norm"))?;
        let q = rope(b, q, &attend)?;
        let own = layer < config.first_shared();
        let joined = |b: &mut GraphBuilder, out: TensorId| {
            let joined = b.reshape(out, &[attend.rows, heads.query * heads.dim])?;
            parts.linear(b, joined, &name("o_proj"), config.hidden, false)
        };
        if let Some(past) = inputs.borrowed[kind] {
            let out = mix_past(b, q, past, heads, &attend)?;
            return joined(b, out);
        }
        let shared = if own {
            let past = attend.past(b, layer, heads)?;
            let [k, v] = self.own(b, h, layer, attend.rows, inputs)?;
            inputs.shared.push(Shared { layer, past, k, v });
            Shared { layer, past, k, v }
        } else {
            self.donated(b, layer, &attend, inputs)?
        };
        let mixed = mix(b, [q, shared.k, shared.v], shared.past, heads, &attend)?;
        if own {
            mixed.outputs(b, layer)?;
        }
        joined(b, mixed.out)
    }

    /// 0 for a full layer, 1 for a sliding one.
    fn kind(&self, layer: usize) -> usize {
        usize::from(self.config.sliding.get(layer) == Some(&true))
    }

    fn heads(&self, layer: usize) -> Heads {
        self.config.heads[self.kind(layer)]
    }

    /// A layer's own keys and values `[rows, groups, dim]`, of rows h that are normalised.
    fn own(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        layer: usize,
        rows: usize,
        inputs: &Inputs,
    ) -> Result<[TensorId; 2]> {
        let parts = &self.parts;
        let Heads { groups, dim, .. } = self.heads(layer);
        let Some(tables) = inputs.tables[self.kind(layer)] else { return Err(outside(layer)) };
        let name = |part: &str| format!("layers.{layer}.self_attn.{part}");
        let k = parts.linear(b, h, &name("k_proj"), groups * dim, false)?;
        let v = parts.linear(b, h, &name("v_proj"), groups * dim, false)?;
        let k = b.reshape(k, &[rows, groups, dim])?;
        let v = b.reshape(v, &[rows, groups, dim])?;
        let k = parts.norm(b, k, &name("k_norm"))?;
        Ok([rotate(b, k, tables)?, plain_norm(b, v, parts.eps)?])
    }

    /// The keys and values of a layer's donor: of this graph, or inputs `past_k_<donor>`, `row_k_<donor>` and so on.
    fn donated(
        &self,
        b: &mut GraphBuilder,
        layer: usize,
        attend: &Attend,
        inputs: &mut Inputs,
    ) -> Result<Shared> {
        let (donor, heads) = (self.config.donor(layer), self.heads(layer));
        if let Some(shared) = inputs.shared.iter().find(|shared| shared.layer == donor) {
            return Ok(*shared);
        }
        let past = attend.past(b, donor, heads)?;
        let Heads { groups, dim, .. } = heads;
        let mut row = |role: &str| {
            let name = format!("row_{role}_{donor}");
            let row = b.input(&name, Elem::Activation, &[groups, attend.rows, dim])?;
            b.transpose(row, &[1, 0, 2])
        };
        let shared = Shared { layer: donor, past, k: row("k")?, v: row("v")? };
        inputs.shared.push(shared);
        Ok(shared)
    }

    /// The gated MLP and the norm behind it, which takes away the factor 2^-[`Model::down_shift`] of its inputs: so
    /// their sum does not leave the range in which f16 is precise, however wide the MLP is.
    fn mlp(&self, b: &mut GraphBuilder, h: TensorId, layer: usize) -> Result<TensorId> {
        let parts = &self.parts;
        let width = self.config.mlp_width(layer);
        let name = |part: &str| format!("layers.{layer}.mlp.{part}");
        let gate = parts.linear(b, h, &name("gate_proj"), width, false)?;
        let up = parts.linear(b, h, &name("up_proj"), width, false)?;
        let gate = self.sparse(b, gate, layer)?;
        let gate = b.gelu_tanh(gate)?;
        let factor = 2f32.powi(-self.down_shift);
        let up = if self.down_shift == 0 { up } else { b.scale(up, factor)? };
        let inner = b.mul(gate, up)?;
        let out = parts.linear(b, inner, &name("down_proj"), self.config.hidden, false)?;
        let behind = Layers { eps: parts.eps * factor * factor, ..*parts };
        behind.norm(b, out, &format!("layers.{layer}.post_feedforward_layernorm"))
    }

    /// Contribution of a layer's per-layer input; its gate reads rows that are not normalised.
    fn per_layer_input(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        layer: usize,
        inputs: &Inputs,
    ) -> Result<TensorId> {
        let (parts, width) = (&self.parts, self.config.ple);
        let tensor = |part: &str| format!("layers.{layer}.{part}");
        let gate = parts.linear(b, x, &tensor("per_layer_input_gate"), width, false)?;
        let gate = b.gelu_tanh(gate)?;
        let first = (layer - inputs.first) * width;
        let Some(ple) = inputs.ple else { return Err(outside(layer)) };
        let own = b.slice(ple, 1, first, first + width)?;
        let gated = b.mul(gate, own)?;
        let out =
            parts.linear(b, gated, &tensor("per_layer_projection"), self.config.hidden, false)?;
        parts.norm(b, out, &tensor("post_per_layer_input_norm"))
    }
}

fn outside(layer: usize) -> Error {
    Error::new(ErrorKind::Internal, format!("layer {layer} is outside its graph"))
}

/// RMSNorm without a weight along the last axis.
pub(super) fn plain_norm(b: &mut GraphBuilder, x: TensorId, eps: f32) -> Result<TensorId> {
    let width = b.width(x)?;
    let ones = b.constant(&b.numbered("ones", x), Elem::Activation, &[width], vec![1.0; width])?;
    b.rms_norm(x, eps, ones)
}
