//! The vision tower: its graphs, and what the host needs around them.
//!
//! Arithmetic: `transformers`, `models/gemma4/modeling_gemma4.py`, `Gemma4VisionModel`. A graph `vision` takes the
//! patches of an image, fewer than it has room for:
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `x` → `y` | `[patches, hidden]` | embedded patches with their positions in; rows before pooling out |
//! | `cos`, `sin` | `[patches, head_dim / 2]` | angles of the column, then of the row |
//! | `cmask` | `[1, patches]` | added to scores: hides the patches that are not there |
//!
//! In a checkpoint the first half of a head turns by the column and the second by the row, each as a rotary embedding
//! of its own. Here the rows of the query and key weights are reordered, so that one rotary embedding over the whole
//! head does both; scores do not depend on the order of a head's elements.

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use qhx_graph::weight::row_order;
use serde_json::{Map, Value, json};

use super::decoder::plain_norm;
use super::towers::Clipped;
use crate::kit::{
    Attend, AttendInputs, Heads, Layers, MatrixFile, Processor, Reader, matrices, mix, object,
    rope, sized,
};
use crate::recipe::{Precision, RecipeOptions, Tables};
use crate::recipes::choices::numbers;
use crate::registry::RecipeOption;

/// Numbers of patches that graphs take.
pub(super) const IMAGE_PATCHES: RecipeOption = RecipeOption {
    name: "image-patches",
    values: &[],
    help: "patches of the vision graphs, such as 630,2304; each image goes through the smallest that holds it",
};
/// The budget of soft tokens.
pub(super) const IMAGE_TOKENS: RecipeOption = RecipeOption {
    name: "image-tokens",
    values: &[],
    help: "max soft tokens of an image: 70, 140, 280, 560 or 1120; by default those of processor_config.json",
};
/// Budgets that the processor takes.
const BUDGETS: [usize; 5] = [70, 140, 280, 560, 1120];
const DEFAULT_BUDGET: usize = 280;

/// Sizes and constants of the tower.
#[derive(Debug, Clone)]
pub(super) struct Vision {
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: Heads,
    /// Pixels of a patch's side.
    patch: usize,
    /// Patches of the side of a soft token.
    pool: usize,
    /// Entries of the table of positions, for each axis.
    entries: usize,
    theta: f64,
    clips: bool,
    eps: f32,
    /// Max soft tokens of an image.
    budget: usize,
    /// Patches of the graphs, ascending.
    patches: Vec<usize>,
}

impl Vision {
    /// Reads `vision_config`.
    pub fn read(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Self> {
        let reader = Reader::part(checkpoint, "vision_config")?;
        reader.only("hidden_activation", &json!("gelu_pytorch_tanh"))?;
        reader.only("standardize", &json!(false))?;
        reader.only("attention_bias", &json!(false))?;
        let hidden = reader.size_or("hidden_size", 768)?;
        let heads = match reader.get("num_attention_heads") {
            Some(_) => reader.heads(hidden, Some(12), Some(64))?,
            None => Heads { query: 12, groups: 12, dim: 64 },
        };
        if !heads.dim.is_multiple_of(4) {
            return Err(
                reader.fault(format!("head_dim is {}, expected a multiple of 4", heads.dim))
            );
        }
        let pool = reader.size_or("pooling_kernel_size", 3)?;
        let patch = reader.size_or("patch_size", 16)?;
        let budget = budget(checkpoint, options, patch, pool)?;
        let all = budget.saturating_mul(pool).saturating_mul(pool);
        let min = pool * pool;
        let patches = numbers(options, IMAGE_PATCHES.name, min..=all)?.unwrap_or_else(|| vec![all]);
        let theta = reader.positive(&["rope_parameters.rope_theta"])?.unwrap_or(100.0);
        Ok(Self {
            hidden,
            intermediate: reader.size_or("intermediate_size", 3072)?,
            layers: reader.layers_or(16)?,
            heads,
            patch,
            pool,
            entries: reader.size_or("position_embedding_size", 10_240)?,
            theta,
            clips: reader.flag("use_clipped_linears")?,
            eps: reader.epsilon(&["rms_norm_eps"], 1e-6)?,
            budget,
            patches,
        })
    }

    /// The graphs, for the smallest number of patches first.
    pub fn graphs(&self, checkpoint: &Checkpoint, precision: Precision) -> Result<Vec<Graph>> {
        let name = |n: usize| sized("vision", format_args!("_{n}"), self.patches.len());
        let clipped = Clipped { checkpoint, clips: self.clips, precision };
        self.patches.iter().map(|&n| self.graph(clipped, &name(n), n)).collect()
    }

    /// Patch embedding, positions and projector, in the names of published files.
    pub fn tables(&self, checkpoint: &Checkpoint, hidden: usize) -> Result<Tables> {
        let pixels = 3 * self.patch * self.patch;
        let embedder = "vision_tower.patch_embedder";
        let table = |field: &str, file: &str, source| MatrixFile::in_f32(field, file, source);
        let projector = "embed_vision.embedding_projection.weight";
        Ok(matrices(
            "vision",
            vec![
                table(
                    "patch_embed",
                    "g4v_patch_embed",
                    checkpoint
                        .matrix(&format!("{embedder}.input_proj.weight"), [self.hidden, pixels])?,
                ),
                table(
                    "pos_table",
                    "g4v_pos_table",
                    checkpoint.stack(
                        &format!("{embedder}.position_embedding_table"),
                        [2, self.entries, self.hidden],
                    )?,
                ),
                table("proj", "g4v_proj_w", checkpoint.matrix(projector, [hidden, self.hidden])?),
            ],
        ))
    }

    /// `params.vision` of the manifest.
    pub fn params(&self) -> Map<String, Value> {
        object(json!({
            "hidden": self.hidden,
            "patch_size": self.patch,
            "pooling_kernel_size": self.pool,
            "head_dim": self.heads.dim,
            "rope_theta": self.theta,
            "position_embedding_size": self.entries,
            "max_soft_tokens": self.budget,
            "eps": self.eps,
        }))
    }

    fn graph(&self, clipped: Clipped<'_>, name: &str, patches: usize) -> Result<Graph> {
        let parts = Layers::new(clipped.checkpoint, Precision::Fp16, self.eps);
        let mut b = GraphBuilder::new(name);
        let mut x = b.input("x", Elem::Activation, &[patches, self.hidden])?;
        let inputs = AttendInputs { mask_rows: 1, ..AttendInputs::new(self.heads.dim, patches, 0) };
        let attend = Attend::inputs(&mut b, &inputs)?;
        for layer in 0..self.layers {
            let at = format!("vision_tower.encoder.layers.{layer}");
            b.scope(format!("l{layer}_attn"));
            let h = parts.norm(&mut b, x, &format!("{at}.input_layernorm"))?;
            let mixed = self.attention(&mut b, h, &at, clipped, &attend)?;
            let mixed = parts.norm(&mut b, mixed, &format!("{at}.post_attention_layernorm"))?;
            x = b.add(x, mixed)?;
            b.scope(format!("l{layer}_mlp"));
            let h = parts.norm(&mut b, x, &format!("{at}.pre_feedforward_layernorm"))?;
            let gate =
                clipped.linear(&mut b, h, &format!("{at}.mlp.gate_proj"), self.intermediate)?;
            let up = clipped.linear(&mut b, h, &format!("{at}.mlp.up_proj"), self.intermediate)?;
            let gate = b.gelu_tanh(gate)?;
            let inner = b.mul(gate, up)?;
            let out = clipped.linear(&mut b, inner, &format!("{at}.mlp.down_proj"), self.hidden)?;
            let out = parts.norm(&mut b, out, &format!("{at}.post_feedforward_layernorm"))?;
            x = b.add(x, out)?;
        }
        b.output("y", x)?;
        b.finish()
    }

    /// `Gemma4VisionAttention`: scores are not scaled, values are normalised without a weight.
    fn attention(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        at: &str,
        clipped: Clipped<'_>,
        attend: &Attend,
    ) -> Result<TensorId> {
        let Heads { query, groups, dim } = self.heads;
        let name = |part: &str| format!("{at}.self_attn.{part}");
        let mut turned = |part: &str, norm: &str, heads: usize| {
            let source = clipped.weight(&name(part), heads * dim, self.hidden)?;
            let order =
                (0..heads * dim).map(|row| (row / dim * dim + place(row % dim, dim)) as u32);
            let x = clipped.linear_of(b, h, &name(part), row_order(source, order.collect()))?;
            let x = b.reshape(x, &[attend.rows, heads, dim])?;
            let weight = clipped.checkpoint.values(&format!("{}.weight", name(norm)), &[dim])?;
            let weight = (0..dim).map(|i| weight.get(place(i, dim)).copied().unwrap_or(1.0));
            let weight = weight.collect();
            let weight = b.row(norm, weight)?;
            let x = b.rms_norm(x, self.eps, weight)?;
            rope(b, x, attend)
        };
        let q = turned("q_proj", "q_norm", query)?;
        let k = turned("k_proj", "k_norm", groups)?;
        let v = clipped.linear(b, h, &name("v_proj"), groups * dim)?;
        let v = b.reshape(v, &[attend.rows, groups, dim])?;
        let v = plain_norm(b, v, self.eps)?;
        let mixed = mix(b, [q, k, v], None, self.heads, attend)?;
        let joined = b.reshape(mixed.out, &[attend.rows, query * dim])?;
        clipped.linear(b, joined, &name("o_proj"), self.hidden)
    }
}

/// The element of a head in the checkpoint that is element `i` in the graph: the first elements of the column's pairs,
/// those of the row's, and then the second elements of both.
const fn place(i: usize, dim: usize) -> usize {
    let quarter = dim / 4;
    match i / quarter {
        1 => i + quarter,
        2 => i - quarter,
        _ => i,
    }
}

/// `max_soft_tokens`: the option, what the processor's configuration says, or what its class has. What else that says
/// has to be what the host-op does.
fn budget(
    checkpoint: &Checkpoint,
    options: &RecipeOptions,
    patch: usize,
    pool: usize,
) -> Result<usize> {
    let asked = numbers(options, IMAGE_TOKENS.name, 1..=1120)?;
    let processor = match Processor::image(checkpoint) {
        Ok(processor) => Some(processor),
        // Nothing else of it is needed.
        Err(_) if asked.is_some() => None,
        Err(e) => return Err(e),
    };
    if let Some(processor) = &processor {
        processor.only_all([
            ("/patch_size", json!(patch)),
            ("/pooling_kernel_size", json!(pool)),
            ("/do_resize", json!(true)),
            ("/do_rescale", json!(true)),
            ("/do_normalize", json!(false)),
            // Bicubic.
            ("/resample", json!(3)),
        ])?;
        processor.scale_of_bytes()?;
    }
    if let Some(numbers) = asked {
        return match numbers[..] {
            [budget] if BUDGETS.contains(&budget) => Ok(budget),
            _ => Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "recipe option {}: {numbers:?}, expected 70, 140, 280, 560 or 1120",
                    IMAGE_TOKENS.name
                ),
            )),
        };
    }
    let Some(processor) = processor else { return Ok(DEFAULT_BUDGET) };
    let key = "/max_soft_tokens";
    let Some(found) = processor.get(key) else { return Ok(DEFAULT_BUDGET) };
    let budget = found.as_u64().and_then(|n| usize::try_from(n).ok());
    budget
        .filter(|budget| BUDGETS.contains(budget))
        .ok_or_else(|| processor.bad(key, "70, 140, 280, 560 or 1120"))
}
