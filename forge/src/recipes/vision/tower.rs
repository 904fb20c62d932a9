//! The vision tower: patches to rows for the decoder.
//!
//! Arithmetic: `Qwen3VLVisionModel`, `Qwen2_5_VisionTransformerPretrainedModel`,
//! `Qwen2VisionTransformerPretrainedModel`, and with their projectors `PaddleOCRVisionModel` and `PixtralVisionModel`
//! of `transformers`, from the rows after patch embedding and learned positions on. The second has its patches in the
//! order of their windows; here they keep the image's, and a mask keeps attention within the windows.

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId, UnaryOp};
use qhx_kit::vision::{Grid, axial_rope, window_numbers};
use qhx_types::MASK_VALUE;

use super::config::{Patches, Vision, Windows};
use super::form::FeedForward;
use crate::kit::{AttendInputs, Layers, Mlp, rotate};
use crate::recipe::from_kit;

/// More values than a head of a tower has.
const MAX_DIM: usize = 4096;

/// The tower of a checkpoint.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tower<'a> {
    pub layers: Layers<'a>,
    pub vision: &'a Vision,
}

/// Inputs and sizes that the blocks of a graph share.
struct Blocks<'a> {
    tower: Tower<'a>,
    rows: usize,
    /// `[rows, 1, dim / 2]`
    tables: [TensorId; 2],
    /// `[1, 1, rows]`, added to the scores.
    mask: Option<TensorId>,
    /// `[1, rows, rows]`, added to the scores in its place within windows.
    windows: Option<TensorId>,
}

impl<'a> Tower<'a> {
    /// The graph `name`: rows `x` `[patches, hidden]` to `embeds` and `deepstack_k`, each `[tokens, out]`.
    pub fn graph(self, name: &str, patches: Patches) -> Result<Graph> {
        let mut b = GraphBuilder::new(name);
        let rows = patches.count();
        let mut h = b.input("x", Elem::Activation, &[rows, self.vision.hidden])?;
        let blocks = match patches {
            Patches::Square(side) => self.on_grid(&mut b, Grid { rows: side, columns: side })?,
            Patches::UpTo(_) => {
                let tables = AttendInputs::new(self.vision.dim(), rows, 0).tables(&mut b)?;
                let mask = b.input("cmask", Elem::Activation, &[1, rows])?;
                let mask = Some(b.reshape(mask, &[1, 1, rows])?);
                let windows = match self.vision.windows {
                    Some(_) => Some(b.input("windows", Elem::Activation, &[rows, 1])?),
                    None => None,
                };
                let windows = windows.map(|numbers| within(&mut b, numbers, rows)).transpose()?;
                Blocks { tower: self, rows, tables, mask, windows }
            }
        };
        if let Some(norm) = self.vision.form.before {
            b.scope("before");
            h = blocks.norm(&mut b, h, norm)?;
        }
        let mut features = Vec::new();
        for index in 0..self.vision.depth {
            h = blocks.block(&mut b, h, index)?;
            let merger = self.vision.deepstack.iter().position(|block| *block == index);
            if let Some(merger) = merger {
                b.scope(format!("deepstack{merger}"));
                let name = format!("visual.deepstack_merger_list.{merger}");
                features.push(blocks.merge(&mut b, h, &name, true)?);
            }
        }
        if let Some(norm) = self.vision.form.after {
            b.scope("after");
            h = blocks.norm(&mut b, h, norm)?;
        }
        b.scope("merger");
        let embeds = blocks.merge(&mut b, h, self.vision.form.merger, false)?;
        b.output("embeds", embeds)?;
        for (index, feature) in features.into_iter().enumerate() {
            b.output(&format!("deepstack_{index}"), feature)?;
        }
        b.finish()
    }

    /// Blocks over all patches of one grid, whose rotary tables are constants.
    fn on_grid(self, b: &mut GraphBuilder, grid: Grid) -> Result<Blocks<'a>> {
        let Vision { merge, rope_theta, .. } = *self.vision;
        let (rows, dim) = (grid.patches(), self.vision.dim());
        if dim > MAX_DIM {
            let what = format!(
                "vision_config: hidden_size is {}, expected heads of at most {MAX_DIM} values, found {dim}",
                self.vision.hidden
            );
            return Err(Error::new(ErrorKind::Artifact, what));
        }
        let [mut cos, mut sin] = [(); 2].map(|()| vec![0.0; rows * dim / 2]);
        let order = self.vision.form.rope;
        axial_rope(grid, merge, order, dim, rope_theta, &mut cos, &mut sin).map_err(from_kit)?;
        let shape = [rows, 1, dim / 2];
        let mut table = |name, values| b.constant(name, Elem::Activation, &shape, values);
        let tables = [table("cos", cos)?, table("sin", sin)?];
        let windows = match self.vision.windows {
            Some(Windows { side, .. }) => {
                let mut numbers = vec![0.0; rows];
                window_numbers(grid, merge, side, &mut numbers).map_err(from_kit)?;
                let numbers = b.constant("windows", Elem::Activation, &[rows, 1], numbers)?;
                Some(within(b, numbers, rows)?)
            }
            None => None,
        };
        Ok(Blocks { tower: self, rows, tables, mask: None, windows })
    }
}

/// The mask `[1, rows, rows]` that keeps patches within their windows, of the windows' numbers `[rows, 1]`: numbers
/// that differ do so by one at least.
fn within(b: &mut GraphBuilder, numbers: TensorId, rows: usize) -> Result<TensorId> {
    b.scope("windows");
    let others = b.reshape(numbers, &[1, rows])?;
    let apart = b.sub(numbers, others)?;
    let apart = b.unary(UnaryOp::Abs, apart)?;
    let apart = b.clamp(apart, 0.0, 1.0)?;
    let mask = b.scale(apart, MASK_VALUE)?;
    b.reshape(mask, &[1, rows, rows])
}

impl Blocks<'_> {
    /// Attention over the patches, and an MLP, each after a norm and added to the rows.
    fn block(&self, b: &mut GraphBuilder, h: TensorId, index: usize) -> Result<TensorId> {
        let Tower { layers, vision, .. } = self.tower;
        let form = vision.form;
        let tensor = |part: &str| format!("{}.{index}.{part}", form.blocks);
        let whole = vision.windows.as_ref().is_none_or(|windows| windows.full.contains(&index));
        b.scope(format!("v{index}_attn"));
        let normed = self.norm(b, h, &tensor(form.norms[0]))?;
        let mask = if whole { self.mask } else { self.windows };
        let mixed = self.attention(b, normed, &tensor(form.attention[0]), mask)?;
        let attended = b.add(h, mixed)?;
        b.scope(format!("v{index}_mlp"));
        let normed = self.norm(b, attended, &tensor(form.norms[1]))?;
        let down = match form.mlp {
            FeedForward::Gated(name, parts) => {
                let mlp = Mlp::new(tensor(name), vision.intermediate);
                let mlp = Mlp { parts, bias: form.bias, down_bias: form.bias, ..mlp };
                layers.mlp(b, normed, &mlp, vision.act)?
            }
            FeedForward::Plain(parts, act) => {
                let parts = parts.map(tensor);
                let parts = parts.each_ref().map(String::as_str);
                layers.feed_forward(b, normed, parts, vision.intermediate, act)?
            }
        };
        b.add(attended, down)
    }

    /// LayerNorm or RMSNorm, as the class has it.
    fn norm(&self, b: &mut GraphBuilder, x: TensorId, name: &str) -> Result<TensorId> {
        let Tower { layers, vision, .. } = self.tower;
        match vision.form.rms {
            true => layers.norm(b, x, name),
            false => layers.layer_norm(b, x, name),
        }
    }

    fn attention(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        mask: Option<TensorId>,
    ) -> Result<TensorId> {
        let Tower { layers, vision, .. } = self.tower;
        let (rows, heads, dim, hidden) = (self.rows, vision.heads, vision.dim(), vision.hidden);
        let [q, k, v] = match vision.form.joined {
            true => {
                let qkv = layers.linear(b, x, &format!("{name}.qkv"), 3 * hidden, true)?;
                let qkv = b.reshape(qkv, &[rows, 3 * heads, dim])?;
                let mut part = |index: usize| b.slice(qkv, 1, index * heads, (index + 1) * heads);
                [part(0)?, part(1)?, part(2)?]
            }
            false => {
                let mut part = |part: &str| {
                    let bias = vision.form.bias;
                    let rows_of = layers.linear(b, x, &format!("{name}.{part}"), hidden, bias)?;
                    b.reshape(rows_of, &[rows, heads, dim])
                };
                [part("q_proj")?, part("k_proj")?, part("v_proj")?]
            }
        };
        let (q, k) = (rotate(b, q, self.tables)?, rotate(b, k, self.tables)?);
        let q = b.scale(q, 1.0 / (dim as f32).sqrt())?;
        let [q, k, v] = [q, k, v].map(|part| b.transpose(part, &[1, 0, 2]));
        let scores = b.matmul(q?, k?, true)?;
        let scores = match mask {
            Some(mask) => b.add(scores, mask)?,
            None => scores,
        };
        let weights = b.softmax(scores)?;
        let mixed = b.matmul(weights, v?, false)?;
        let mixed = b.transpose(mixed, &[1, 0, 2])?;
        let joined = b.reshape(mixed, &[rows, hidden])?;
        let [_, out] = vision.form.attention;
        layers.linear(b, joined, &format!("{name}.{out}"), hidden, vision.form.bias)
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
        let Tower { layers, vision, .. } = self.tower;
        let unit = vision.unit();
        let wide = unit * vision.hidden;
        let shape = [self.rows / unit, wide];
        let [norm, first, second] = vision.form.merging.map(|part| format!("{name}.{part}"));
        let eps = vision.merger_eps;
        let normed = Self { tower: Tower { layers: Layers { eps, ..layers }, vision }, ..*self };
        let rows = if joined {
            let rows = b.reshape(h, &shape)?;
            normed.norm(b, rows, &norm)?
        } else {
            let rows = normed.norm(b, h, &norm)?;
            b.reshape(rows, &shape)?
        };
        let (rows, inner) = match vision.form.joining {
            None => (rows, wide),
            Some(joining) => {
                // Channel by channel, and the patches of the square within each (`unfold` of torch).
                let squares = b.reshape(rows, &[shape[0], unit, vision.hidden])?;
                let channels = b.transpose(squares, &[0, 2, 1])?;
                let channels = b.reshape(channels, &shape)?;
                (layers.linear(b, channels, joining, vision.hidden, false)?, vision.out)
            }
        };
        let up = layers.linear(b, rows, &first, inner, vision.merger_bias)?;
        let up = b.gelu(up)?;
        layers.linear(b, up, &second, vision.out, vision.merger_bias)
    }
}
