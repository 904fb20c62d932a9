//! The vision tower: patches to rows for the decoder.
//!
//! Arithmetic: `Qwen3VLVisionModel` of `transformers`, from the rows after patch embedding and learned positions on.

use qhx_core::Result;

use super::config::Vision;
use crate::builder::GraphBuilder;
use crate::graph::{Elem, Graph, TensorId};
use crate::kit::{AttendInputs, Layers, rotate};

/// What a vision graph takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patches {
    /// A square of so many by so many patches; its rotary tables are constants.
    Square(usize),
    /// Any grid of at most so many patches; rotary tables and a mask are inputs.
    AtMost(usize),
}

impl Patches {
    /// Rows of the graph.
    pub const fn count(self) -> usize {
        match self {
            Self::Square(side) => side * side,
            Self::AtMost(count) => count,
        }
    }
}

/// What the blocks of a graph share.
struct Shared<'a> {
    layers: Layers<'a>,
    vision: &'a Vision,
    rows: usize,
    /// `[rows, 1, dim / 2]`
    tables: [TensorId; 2],
    /// `[1, 1, rows]`, added to the scores.
    mask: Option<TensorId>,
    /// Width of a row for the decoder.
    out: usize,
}

/// The graph `name`: rows `x` `[patches, hidden]` to `embeds` and `deepstack_k`, each `[tokens, out]`.
pub(super) fn graph(
    layers: Layers<'_>,
    vision: &Vision,
    name: &str,
    patches: Patches,
    out: usize,
) -> Result<Graph> {
    let mut b = GraphBuilder::new(name);
    let (rows, half) = (patches.count(), vision.dim() / 2);
    let mut h = b.input("x", Elem::Activation, &[rows, vision.hidden])?;
    let (tables, mask) = match patches {
        Patches::Square(side) => {
            let [cos, sin] = vision.rotary(side, side);
            let mut table =
                |name: &str, values| b.constant(name, Elem::Activation, &[rows, 1, half], values);
            ([table("cos", cos)?, table("sin", sin)?], None)
        }
        Patches::AtMost(_) => {
            let tables = AttendInputs::new(vision.dim(), rows, 0).tables(&mut b)?;
            let mask = b.input("cmask", Elem::Activation, &[1, rows])?;
            (tables, Some(b.reshape(mask, &[1, 1, rows])?))
        }
    };
    let shared = Shared { layers, vision, rows, tables, mask, out };
    let mut features = Vec::new();
    for index in 0..vision.depth {
        h = shared.block(&mut b, h, index)?;
        if let Some(merger) = vision.deepstack.iter().position(|block| *block == index) {
            b.scope(format!("deepstack{merger}"));
            features.push(shared.merge(
                &mut b,
                h,
                &format!("visual.deepstack_merger_list.{merger}"),
                true,
            )?);
        }
    }
    b.scope("merger");
    let embeds = shared.merge(&mut b, h, "visual.merger", false)?;
    b.output("embeds", embeds)?;
    for (index, feature) in features.into_iter().enumerate() {
        b.output(&format!("deepstack_{index}"), feature)?;
    }
    b.finish()
}

impl Shared<'_> {
    /// Attention over all patches, and an MLP, each after a LayerNorm and added to the rows.
    fn block(&self, b: &mut GraphBuilder, h: TensorId, index: usize) -> Result<TensorId> {
        let tensor = |part: &str| format!("visual.blocks.{index}.{part}");
        let Vision { hidden, intermediate, .. } = *self.vision;
        b.scope(format!("v{index}_attn"));
        let normed = self.layers.layer_norm(b, h, &tensor("norm1"))?;
        let mixed = self.attention(b, normed, &tensor("attn"))?;
        let h = b.add(h, mixed)?;
        b.scope(format!("v{index}_mlp"));
        let normed = self.layers.layer_norm(b, h, &tensor("norm2"))?;
        let up = self.layers.linear(b, normed, &tensor("mlp.linear_fc1"), intermediate, true)?;
        let up = b.gelu_tanh(up)?;
        let down = self.layers.linear(b, up, &tensor("mlp.linear_fc2"), hidden, true)?;
        b.add(h, down)
    }

    fn attention(&self, b: &mut GraphBuilder, x: TensorId, name: &str) -> Result<TensorId> {
        let (rows, heads, dim, hidden) =
            (self.rows, self.vision.heads, self.vision.dim(), self.vision.hidden);
        let qkv = self.layers.linear(b, x, &format!("{name}.qkv"), 3 * hidden, true)?;
        let qkv = b.reshape(qkv, &[rows, 3 * heads, dim])?;
        let part = |b: &mut GraphBuilder, index: usize| {
            b.slice(qkv, 1, index * heads, (index + 1) * heads)
        };
        let (q, k, v) = (part(b, 0)?, part(b, 1)?, part(b, 2)?);
        let (q, k) = (rotate(b, q, self.tables)?, rotate(b, k, self.tables)?);
        let q = b.scale(q, 1.0 / (dim as f32).sqrt())?;
        let [q, k, v] = [q, k, v].map(|part| b.transpose(part, &[1, 0, 2]));
        let scores = b.matmul(q?, k?, true)?;
        let scores = match self.mask {
            Some(mask) => b.add(scores, mask)?,
            None => scores,
        };
        let weights = b.softmax(scores)?;
        let mixed = b.matmul(weights, v?, false)?;
        let mixed = b.transpose(mixed, &[1, 0, 2])?;
        let joined = b.reshape(mixed, &[rows, hidden])?;
        self.layers.linear(b, joined, &format!("{name}.proj"), hidden, true)
    }

    /// The patches of a square to one row for the decoder. The norm is over a patch, or, with `joined`, over the
    /// square. Unlike the blocks, mergers have the GELU with the error function.
    fn merge(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        name: &str,
        joined: bool,
    ) -> Result<TensorId> {
        let unit = self.vision.unit();
        let wide = unit * self.vision.hidden;
        let shape = [self.rows / unit, wide];
        let norm = format!("{name}.norm");
        let rows = if joined {
            let rows = b.reshape(h, &shape)?;
            self.layers.layer_norm(b, rows, &norm)?
        } else {
            let rows = self.layers.layer_norm(b, h, &norm)?;
            b.reshape(rows, &shape)?
        };
        let up = self.layers.linear(b, rows, &format!("{name}.linear_fc1"), wide, true)?;
        let up = b.gelu(up)?;
        self.layers.linear(b, up, &format!("{name}.linear_fc2"), self.out, true)
    }
}
