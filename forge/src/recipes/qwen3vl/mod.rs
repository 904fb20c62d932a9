//! Qwen3-VL: a vision tower whose rows stand in a text for images, and a decoder that takes further rows of the tower
//! after its first layers (deepstack). Qwen2.5-VL: a tower with windows, without such rows, and Qwen2's decoder.
//! Qwen2-VL: the same without windows. PaddleOCR-VL: SigLIP's tower with rotary positions, and ERNIE 4.5's decoder.
//!
//! Arithmetic: `transformers`, `models/{qwen3_vl,qwen2_5_vl,qwen2_vl,paddleocr_vl}`. The host embeds patches and adds
//! learned positions; then
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `vision`, `vision<N>` | see `recipes/vision` | | |
//! | `decode`, `prefill<P>` | as those of Llama-like models | | `cos` and `sin` by the position of each token |
//! | | `deepstack_k` | `[P, hidden]` | zeros where a token is no image's |
//! | `lmhead` | `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |

mod config;

use std::ops::Range;

use serde_json::{Map, Value, json};

use crate::kit::{
    Attend, AttendInputs, Attention, Decoder, DecoderParams, Layers, Mlp, Step, VISION_WEIGHTS,
    check_shape, decoder, prefill_rows,
};
use crate::recipe::{Recipe, RecipeOptions};
use crate::recipes::vision::{self, DEFAULT_SIZE, IMAGE_PATCHES, IMAGE_SIZE};
use crate::register_recipe;
use crate::registry::RecipeEntry;
use config::{Config, PADDLE, QWEN2, QWEN2_5};
use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph};

/// Tokens that prefill graphs take by default: 256 of an image and a question, and the rest of a prompt.
const DEFAULT_PREFILL: [usize; 2] = [16, 320];

register_recipe!(
    RecipeEntry::new(&["Qwen3VLForConditionalGeneration", QWEN2_5, QWEN2, PADDLE], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .options(&[IMAGE_SIZE, IMAGE_PATCHES, VISION_WEIGHTS])
);

/// Names of a tensor: as usual, and of PaddleOCR-VL the projector's as `transformers` 5 saves it.
fn names(name: &str) -> Vec<String> {
    let projector = name.strip_prefix("mlp_AR.").map(|rest| format!("model.projector.{rest}"));
    let usual = ["model.language_model.", "model.", ""].map(|prefix| format!("{prefix}{name}"));
    usual.into_iter().chain(projector).collect()
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(names);
    if checkpoint.architecture() == Some(PADDLE) {
        // `_keys_to_ignore_on_load_unexpected` of the class.
        checkpoint.leave_out("visual.vision_model.head");
        checkpoint.leave_out("visual.vision_model.embeddings.packing_position_embedding");
    }
    let config = Config::read(checkpoint)?;
    check_shape(options, config.layers, config.max_positions)?;
    let layers = Layers::decoder(checkpoint, options, config.eps);
    let Decoder { contexts, plan_params } = decoder(
        options,
        config.layers,
        &prefill_rows(options, &DEFAULT_PREFILL)?,
        |name, range, step| run(&layers, &config, name, range, step),
        layers.lmhead(config.hidden, config.vocab, config.tied, None)?,
    )?;
    let mut recipe = Recipe::new(config.family, "qwen3vl_generate", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?)
        .params(params(&config, options.max_ctx));
    let side = match config.vision.shaped() {
        true => config.vision.side_within(DEFAULT_SIZE, options.max_ctx),
        false => default_size(&config),
    };
    vision::add(&mut recipe, checkpoint, &config.vision, options, side)?;
    Ok(recipe)
}

/// Whole tokens of [`DEFAULT_SIZE`].
fn default_size(Config { vision, .. }: &Config) -> usize {
    let token = vision.patch * vision.merge;
    (DEFAULT_SIZE / token).max(1) * token
}

fn params(config: &Config, max_ctx: usize) -> Map<String, Value> {
    let Config { hidden, vocab, layers, heads, rope_theta, section, interleaved, .. } = *config;
    let mut params = DecoderParams { hidden, vocab, layers, heads, rope_theta }.map(max_ctx);
    let scaling =
        json!({"rope_type": "default", "mrope_interleaved": interleaved, "mrope_section": section});
    params.insert("rope_scaling".to_owned(), scaling);
    params
}

/// Tokens through the layers of `range`.
fn run(
    layers: &Layers<'_>,
    config: &Config,
    name: &str,
    range: Range<usize>,
    step: Step,
) -> Result<Graph> {
    let rows = step.rows;
    let last = range.end == config.layers;
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[rows, config.hidden])?;
    let attend = Attend::inputs(&mut b, &AttendInputs::of(config.heads.dim, step))?;
    for layer in range {
        let name = format!("layers.{layer}");
        let attention = Attention {
            norms: config.head_norms.then_some(["q_norm", "k_norm"]),
            bias: [config.qkv_bias; 3],
            out_bias: config.out_bias,
            ..Attention::new(format!("{name}.self_attn"), layer, config.heads)
        };
        let mlp = Mlp {
            bias: config.mlp_bias,
            down_bias: config.mlp_bias,
            ..Mlp::new(format!("{name}.mlp"), config.intermediate)
        };
        h = layers.block(&mut b, h, &name, &attention, &mlp, &attend)?;
        if layer < config.vision.deepstack.len() {
            let rows =
                b.input(&format!("deepstack_{layer}"), Elem::Activation, &[rows, config.hidden])?;
            h = b.add(h, rows)?;
        }
    }
    if last {
        b.scope("final");
        h = layers.norm(&mut b, h, "norm")?;
    }
    b.output("y", h)?;
    b.finish()
}
