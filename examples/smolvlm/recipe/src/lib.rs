//! The recipe for SmolVLM and Idefics 3 (`SmolVLMForConditionalGeneration`, `Idefics3ForConditionalGeneration`).
//!
//! Arithmetic: `transformers`, `models/{idefics3,smolvlm}`: a SigLIP tower over tiles of one size, whose rows a
//! connector joins in squares and projects, and a Llama.
//!
//! | graph | tensor | shape, P = 1 for `decode` | |
//! |---|---|---|---|
//! | `vision` | `pixels` → `embeds` | `[patches, 3 · patch²]` → `[tokens, hidden]` | a tile, see [`Siglip`] |
//! | `decode`, `prefill<P>` | `x` → `y` | `[P, hidden]` | normalised after the last layer |
//! | | `cos`, `sin` | `[P, head_dim / 2]` | half tables |
//! | | `cmask` | `[P, max_ctx + P]` | added to scores; the last P slots are the graph's own tokens |
//! | | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[kv_heads, max_ctx, head_dim]` → `[kv_heads, P, head_dim]` | |
//! | `lmhead` | `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |
//!
//! [`Siglip`]: qhx_forge::kit::Siglip

mod config;

use std::ops::Range;

use config::Config;
use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_forge::RecipeEntry;
use qhx_forge::kit::{
    Attend, AttendInputs, Attention, Decoder, DecoderParams, Layers, Mlp, Processor, Step,
    VISION_WEIGHTS, check_shape, decoder, prefill_rows,
};
use qhx_forge::recipe::{Recipe, RecipeOptions};
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph};

/// Tokens that prefill graphs take by default: a question, and the tiles of an image.
const PREFILL: [usize; 2] = [16, 256];

qhx_forge::register_recipe!(
    RecipeEntry::new(
        &["SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"],
        recipe
    )
    .prefill_graphs()
    .smaller_contexts()
    .options(&[VISION_WEIGHTS])
);

/// Names of a tensor: of the decoder, of tower and connector, and of the head.
fn names(name: &str) -> Vec<String> {
    ["model.text_model.", "model.", ""].map(|prefix| format!("{prefix}{name}")).to_vec()
}

/// The graphs of a checkpoint, and the plan that runs them with `smolvlm_generate`.
fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(names);
    let config = Config::read(checkpoint)?;
    let max_ctx = options.max_ctx;
    check_shape(options, config.layers, Some(config.max_positions))?;
    let layers = Layers::decoder(checkpoint, options, config.eps);
    let Decoder { contexts, plan_params } = decoder(
        options,
        config.layers,
        &prefill_rows(options, &PREFILL)?,
        |name, range, step| graph(&layers, &config, name, range, step),
        layers.lmhead(config.hidden, config.vocab, config.tied, None)?,
    )?;
    let Config { hidden, vocab, heads, rope_theta, .. } = config;
    let mut params =
        DecoderParams { hidden, vocab, layers: config.layers, heads, rope_theta }.map(max_ctx);
    params.insert("image".to_owned(), config::prompts(config.image_token));
    let processor = Processor::image(checkpoint)?;
    let tower = config::tower(checkpoint, VISION_WEIGHTS.precision(options))?;
    params.insert("tiles".to_owned(), config::tiling(&processor, &tower)?.into());
    let mut recipe = Recipe::new("smolvlm", "smolvlm_generate", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [vocab, hidden])?)
        .params(params);
    tower.add(&mut recipe, &processor, |b, rows| {
        let joined = tower.joined(b, rows)?;
        tower.layers().linear(b, joined, "connector.modality_projection.proj", hidden, false)
    })?;
    recipe.shown_tokens = config::marks(checkpoint)?;
    Ok(recipe)
}

/// Tokens through the layers of `range`.
fn graph(
    layers: &Layers<'_>,
    config: &Config,
    name: &str,
    range: Range<usize>,
    step: Step,
) -> Result<Graph> {
    let last = range.end == config.layers;
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[step.rows, config.hidden])?;
    let attend = Attend::inputs(&mut b, &AttendInputs::of(config.heads.dim, step))?;
    for layer in range {
        let name = format!("layers.{layer}");
        let attention = Attention {
            bias: [config.bias; 3],
            out_bias: config.bias,
            ..Attention::new(format!("{name}.self_attn"), layer, config.heads)
        };
        let mlp = Mlp {
            bias: config.mlp_bias,
            down_bias: config.mlp_bias,
            ..Mlp::new(format!("{name}.mlp"), config.intermediate)
        };
        h = layers.block(&mut b, h, &name, &attention, &mlp, &attend)?;
    }
    if last {
        b.scope("final");
        h = layers.norm(&mut b, h, "norm")?;
    }
    b.output("y", h)?;
    b.finish()
}
