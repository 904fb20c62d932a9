//! The recipe for Gemma 3: text (`Gemma3ForCausalLM`), and images (`Gemma3ForConditionalGeneration`).
//!
//! Arithmetic: `transformers`, `models/gemma3/modeling_gemma3.py`. Graphs `decode` take one token, graphs
//! `prefill<P>` take P tokens of a prompt over the same caches; the head is a graph of its own.
//!
//! | tensor | shape, P = 1 for `decode` | |
//! |---|---|---|
//! | `x` → `y` | `[P, hidden]` | embedding rows times `params.embed_scale` in; normalised rows out |
//! | `cos`, `sin`; `cos_local`, `sin_local` | `[P, head_dim / 2]` | half tables of full and of sliding layers |
//! | `cmask`; `cmask_local` | `[P, rows + P]` | added to scores; the last P slots are the graph's own tokens |
//! | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[kv_heads, rows, head_dim]` → `[kv_heads, P, head_dim]` | keys after norm and rope |
//! | `vision`: `pixels` → `embeds` | `[patches, 3 · patch²]` → `[tokens, hidden]` | an image, see `qhx_forge::kit::Siglip` |
//! | head: `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |
//!
//! `rows` is `max_ctx` for full layers. For sliding ones it is the window, or P of the widest graph where that is
//! more, and the host keeps the cache as a ring.

mod config;
mod vision;

use std::ops::Range;

use qhx_forge::RecipeEntry;
use qhx_forge::kit::{
    Attend, AttendInputs, Attention, Decoder, DecoderParams, Layers, Mlp, PREFILL_ROWS, Step,
    VISION_WEIGHTS, check_shape, decoder, object, prefill_rows,
};
use qhx_forge::recipe::{Recipe, RecipeOptions};
use serde_json::json;

use config::{Config, Rope};
use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use vision::{TOWERS, Vision};

/// The hidden states between layers are those of the reference times this. In published checkpoints the sums there
/// exceed the largest f16, 65,504. Each layer normalises what it reads and what it adds, so the factor stands in the
/// weights of the norms, and the result is the same.
const RESIDUAL: f32 = 1.0 / 64.0;

qhx_forge::register_recipe!(
    RecipeEntry::new(&["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .options(&[TOWERS, VISION_WEIGHTS])
);

/// Names of a tensor: in checkpoints of text, in multimodal ones as `transformers` 5 saves them, and as published.
/// Head and tower stand beside the decoder; in the tower of older checkpoints is one module more.
fn names(name: &str) -> Vec<String> {
    let inner =
        name.strip_prefix("vision_tower.").map(|rest| format!("vision_tower.vision_model.{rest}"));
    let prefixes =
        ["model.", "model.language_model.", "language_model.model.", "language_model.", ""];
    let every = |name: &str| prefixes.map(|prefix| format!("{prefix}{name}"));
    every(name).into_iter().chain(inner.iter().flat_map(|name| every(name))).collect()
}

/// The graphs of a checkpoint, and the plan that runs them with `gemma3_generate`.
fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(names);
    let config = Config::read(checkpoint)?;
    let vision = Vision::read(checkpoint, options)?;
    let (layers, max_ctx) = (config.sliding.len(), options.max_ctx);
    check_shape(options, layers, Some(config.max_positions))?;
    let prompts = match &vision {
        Some(vision) => vision.prefill_rows(options)?,
        None => prefill_rows(options, &PREFILL_ROWS)?,
    };
    let window = config.window.min(max_ctx);
    // A step writes all of its rows into the ring at once.
    let ring = prompts.iter().fold(window, |ring, rows| ring.max(*rows));
    let parts = Layers { norm_offset: 1.0, ..Layers::decoder(checkpoint, options, config.eps) };
    let model = Model { parts, config: &config, ring };
    let Decoder { contexts, plan_params } = decoder(
        options,
        layers,
        &prompts,
        |name, range, step| model.graph(name, range, step),
        parts.lmhead(config.hidden, config.vocab, config.tied)?,
    )?;
    let mut params = DecoderParams {
        hidden: config.hidden,
        vocab: config.vocab,
        layers,
        heads: config.heads,
        rope_theta: config.full.theta,
    }
    .map(max_ctx);
    let scaling = |rope: Rope| json!({"rope_type": "linear", "factor": rope.factor});
    params.extend(object(json!({
        "embed_scale": config.embed_scale,
        "rope_scaling": scaling(config.full),
        "local": {
            "layers": (0..layers).filter(|layer| config.sliding[*layer]).collect::<Vec<_>>(),
            "window": window,
            "head_dim": config.heads.dim,
            "rope_theta": config.local.theta,
            "rope_scaling": scaling(config.local),
        },
    })));
    let mut recipe = Recipe::new("gemma3", "gemma3_generate", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?)
        .params(params);
    if let Some(vision) = vision {
        vision.add(&mut recipe, config.hidden)?;
    }
    Ok(recipe)
}

/// Makes the graphs of the decoder.
struct Model<'a> {
    parts: Layers<'a>,
    config: &'a Config,
    /// Rows of the caches of sliding layers.
    ring: usize,
}

impl Model<'_> {
    /// Tokens through the layers of `range`, over caches.
    fn graph(&self, name: &str, range: Range<usize>, step: Step) -> Result<Graph> {
        let (config, rows) = (self.config, step.rows);
        let capacities = [step.positions, self.ring];
        let mut b = GraphBuilder::new(name);
        let mut h = b.input("x", Elem::Activation, &[rows, config.hidden])?;
        let kinds = &config.sliding[range.clone()];
        let mut attend = |kind: usize, names| {
            let used = kinds.contains(&(kind == 1));
            let sizes = AttendInputs::new(config.heads.dim, rows, capacities[kind]);
            let inputs = AttendInputs { names, ..sizes };
            used.then(|| Attend::inputs(&mut b, &inputs)).transpose()
        };
        let full = attend(0, AttendInputs::NAMES)?;
        let local = attend(1, ["cos_local", "sin_local", "cmask_local"])?;
        if range.start == 0 {
            h = b.scale(h, RESIDUAL)?;
        }
        for layer in range.clone() {
            let attend = if config.sliding[layer] { &local } else { &full };
            if let Some(attend) = attend {
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
