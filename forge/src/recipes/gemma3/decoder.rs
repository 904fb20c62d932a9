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
//! | `vision`: `pixels` → `embeds` | `[patches, 3 · patch²]` → `[tokens, hidden]` | an image, see [`Siglip`](crate::kit::Siglip) |
//! | head: `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |
//!
//! `rows` is `max_ctx` for full layers. For sliding ones it is the window, or P of the widest graph where that is
//! more, and the host keeps the cache as a ring.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::json;

use super::layers::{Config, Model, Rope};
use super::vision::{self, TOWERS, Vision};
use crate::kit::{
    AttendInputs, Decoder, DecoderParams, PREFILL_ROWS, VISION_WEIGHTS, check_shape, decoder,
    object, prefill_rows, tower_names,
};
use crate::recipe::{Recipe, RecipeOptions};
use crate::register_recipe;
use crate::registry::RecipeEntry;

register_recipe!(
    RecipeEntry::new(&["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .default_context(vision::default_context)
        .options(&[TOWERS, VISION_WEIGHTS])
);

/// The graphs of a checkpoint, and the plan that runs them: with `vision_generate` where it sees.
fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(tower_names);
    let config = Config::read(checkpoint, false)?;
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
    let model = Model::new(checkpoint, options, &config);
    let inputs = |step| AttendInputs::of(config.heads.dim, step);
    let Decoder { contexts, plan_params } = decoder(
        options,
        layers,
        &prompts,
        |name, range, step| model.graph(name, range, inputs(step), ring),
        model.parts.lmhead(config.hidden, config.vocab, config.tied, None)?,
    )?;
    let Config { hidden, vocab, heads, full, local, .. } = config;
    let mut params =
        DecoderParams { hidden, vocab, layers, heads, rope_theta: full.theta }.map(max_ctx);
    let scaling = |rope: Rope| json!({"rope_type": "linear", "factor": rope.factor.unwrap_or(1.0)});
    params.extend(object(json!({
        "embed_scale": config.embed_scale,
        "rope_scaling": scaling(full),
        "local": {
            "layers": (0..layers).filter(|layer| config.sliding[*layer]).collect::<Vec<_>>(),
            "window": window,
            "head_dim": heads.dim,
            "rope_theta": local.theta,
            "rope_scaling": scaling(local),
        },
    })));
    let host_op = if vision.is_some() { "vision_generate" } else { "decoder_generate" };
    let mut recipe = Recipe::new("gemma3", host_op, contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [vocab, hidden])?)
        .params(params);
    if let Some(vision) = vision {
        vision.add(&mut recipe, hidden)?;
    }
    Ok(recipe)
}
