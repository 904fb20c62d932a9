//! Gemma 3 text as an encoder: `Gemma3TextModel` with `use_bidirectional_attention`, such as EmbeddingGemma.
//!
//! Arithmetic: `transformers`, `models/gemma3/modeling_gemma3.py`. Graphs `enc` take S tokens, a text with its padding.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `x` → `y` | `[S, hidden]` | embedding rows times `params.embed_scale` in; normalised rows out |
//! | `cos`, `sin`; `cos_local`, `sin_local` | `[S, head_dim / 2]` | half tables of full and of sliding layers |
//! | `cmask` | `[S, S]`, or `[1, S]` where S > 512 | added to scores; hides padding, and texts from each other |
//! | `cmask_local` | `[S, S]` | as `cmask`, and hides positions further than `params.local.reach` |

mod config;

use std::ops::Range;

use serde_json::json;

use super::encoder::{self, Encoder, EncoderGraphs, bidirectional, max_text};
use crate::kit::{
    Attend, AttendInputs, Attention, DecoderParams, Layers, Mlp, check_shape, object,
};
use crate::recipe::{Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::RecipeEntry;
use config::Config;
use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};

/// The hidden states between layers are those of the reference times this, so that their sums stay within f16. Each
/// layer normalises what it reads and what it adds, so the factor stands in the weights of the norms, and the result is
/// the same.
const RESIDUAL: f32 = 1.0 / 64.0;

register_recipe!(
    RecipeEntry::new(&["Gemma3TextModel"], recipe)
        .tasks(&[Task::Embed])
        .prefill_graphs()
        .longest(|checkpoint, _| max_text(checkpoint).ok()?)
        .options(&[encoder::POOLING])
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint)?;
    let layers = config.sliding.len();
    check_shape(options, layers, Some(config.max_positions))?;
    let causal = !bidirectional(checkpoint.config());
    let encoder = Encoder::read(checkpoint, options, config.hidden, causal)?;
    let Config { hidden, vocab, heads, thetas: [rope_theta, local_theta], .. } = config;
    let mut params =
        DecoderParams { hidden, vocab, layers, heads, rope_theta }.map(options.max_ctx);
    params.extend(object(json!({
        "embed_scale": config.embed_scale,
        "local": {"reach": config.reach, "head_dim": heads.dim, "rope_theta": local_theta},
    })));
    let parts = Layers { norm_offset: 1.0, ..Layers::decoder(checkpoint, options, config.eps) };
    let model = Model { parts, config: &config };
    let EncoderGraphs { contexts, plan_params, tables, notes } =
        encoder.graphs(options, layers, &mut params, |name, range, rows, mask_rows| {
            model.graph(name, range, rows, mask_rows)
        })?;
    Ok(Recipe::new("gemma3", encoder::HOST_OP, contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [vocab, hidden])?)
        .params(params)
        .tables(tables)
        .notes(notes))
}

/// Makes the graphs.
struct Model<'a> {
    parts: Layers<'a>,
    config: &'a Config,
}

impl Model<'_> {
    /// `rows` tokens through the layers of `range`.
    fn graph(
        &self,
        name: &str,
        range: Range<usize>,
        rows: usize,
        mask_rows: usize,
    ) -> Result<Graph> {
        let config = self.config;
        let mut b = GraphBuilder::new(name);
        let mut h = b.input("x", Elem::Activation, &[rows, config.hidden])?;
        let kinds = &config.sliding[range.clone()];
        let sizes = AttendInputs::new(config.heads.dim, rows, 0);
        let full = AttendInputs { mask_rows, ..sizes };
        let local = AttendInputs { names: ["cos_local", "sin_local", "cmask_local"], ..sizes };
        // Each kind of layers has inputs where the range has such a layer.
        let mut attend = |slides: bool, inputs| -> Result<Option<Attend>> {
            let used = kinds.contains(&slides);
            used.then(|| Attend::inputs(&mut b, &inputs)).transpose()
        };
        let (full, local) = (attend(false, full)?, attend(true, local)?);
        if range.start == 0 {
            h = b.scale(h, RESIDUAL)?;
        }
        for layer in range.clone() {
            if let Some(attend) = if config.sliding[layer] { &local } else { &full } {
                h = self.layer(&mut b, h, layer, attend)?;
            }
        }
        if range.end == config.sliding.len() {
            b.scope("final");
            h = self.residual().norm(&mut b, h, "norm")?;
        }
        b.output("y", h)?;
        b.finish()
    }

    /// Norms of the hidden states between layers: as of the reference, their epsilon beside a mean of squares.
    fn residual(&self) -> Layers<'_> {
        Layers { eps: self.parts.eps * RESIDUAL * RESIDUAL, ..self.parts }
    }

    /// `Gemma3DecoderLayer` on rows `[rows, hidden]`: attention and a GELU-gated MLP, each between two norms.
    fn layer(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        layer: usize,
        attend: &Attend,
    ) -> Result<TensorId> {
        let (config, parts) = (self.config, &self.parts);
        let tensor = |part: &str| format!("layers.{layer}.{part}");
        b.scope(format!("l{layer}_attn"));
        let normed = self.residual().norm(b, h, &tensor("input_layernorm"))?;
        let attention = Attention {
            scale: config.scale,
            norms: Some(["q_norm", "k_norm"]),
            bias: [config.attention_bias; 3],
            out_bias: config.attention_bias,
            cached: false,
            ..Attention::new(tensor("self_attn"), layer, config.heads)
        };
        let mixed = parts.attention(b, normed, &attention, attend)?;
        let mixed = parts.scaled_norm(b, mixed, &tensor("post_attention_layernorm"), RESIDUAL)?;
        let h = b.add(h, mixed)?;
        b.scope(format!("l{layer}_mlp"));
        let normed = self.residual().norm(b, h, &tensor("pre_feedforward_layernorm"))?;
        let mlp = Mlp::new(tensor("mlp"), config.intermediate);
        let out = parts.mlp(b, normed, &mlp, GraphBuilder::gelu_tanh)?;
        let out = parts.scaled_norm(b, out, &tensor("post_feedforward_layernorm"), RESIDUAL)?;
        b.add(h, out)
    }
}
