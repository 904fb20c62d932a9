//! Qwen3.5, `Qwen3_5ForCausalLM`, and `Qwen3_5ForConditionalGeneration` with its vision tower, see `recipes/vision`;
//! and Qwen3-Next, `Qwen3NextForCausalLM`.
//!
//! Arithmetic: `transformers`, `models/qwen3_5/modeling_qwen3_5.py`, stated in `tests/oracle/QWEN35.md`.
//! One graph `decode` per shard takes one token through a range of layers, graphs `prefill<P>` take P tokens of a
//! prompt over the same states; the head is a graph of its own.
//!
//! | tensor | shape, P = 1 for `decode` | |
//! |---|---|---|
//! | `x` → `y` | `[P, hidden]` | residual in and out; normalised after the last layer |
//! | `cos`, `sin` | `[P, rotary_dim / 2]` | half tables; shards with full attention |
//! | `cmask` | `[P, max_ctx + P]` | added to scores; the last P slots are the graph's own tokens |
//! | `valid` | `[P, 1]` | `prefill<P>`, shards with linear attention: 1 for tokens, 0 for rows behind them, which change no state |
//! | `keep` | `[kernel − 1, kernel − 1 + P]` | the same: a 1 in each row, for the columns that the convolution keeps: those before the first row that is not valid, of `past_conv_i` and then the graph's own |
//! | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[kv_heads, max_ctx, head_dim]` → `[kv_heads, P, head_dim]` | layer `i` of full attention; keys after norm and rope |
//! | `past_conv_i` → `present_conv_i` | `[kernel − 1, conv_dim]` | rows oldest first; layer `i` of linear attention |
//! | `past_ssm_i` → `present_ssm_i` | f32 `[v_heads, k_dim, v_dim]` | |
//! | head: `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |
//!
//! The drafting head (multi-token prediction, `mtp.*`), where the checkpoint has one:
//!
//! | graph | tensors | |
//! |---|---|---|
//! | `mtp<P>` | `x`, `h` → `y` `[P, hidden]` | embeddings of tokens, hidden states of the positions before them → hidden states of draft tokens; P is 1, and the smallest of the prefill graphs |
//! | | `cos`, `sin`, `cmask`, `past_k_n`, `past_v_n` → `new_k_n`, `new_v_n` | as full attention; n is the number of the decoder's layers |
//!
//! Classes with experts (`Qwen3NextForCausalLM`, `models/qwen3_next`, and `Qwen3_5MoeForCausalLM`,
//! `models/qwen3_5_moe`) have a graph a layer, `decode<n>` and `prefill<P>_<n>`, which ends where the experts begin,
//! see [`crate::kit::Experts`]; the expert that every token goes to is in it. The head normalises.
//!
//! The convolution's FIFO has time as its first dimension: the new column is a row as the projection
//! gives it, and neither the convolution nor the shift transposes.

mod chunk;
mod config;
mod layers;
mod mtp;

use std::ops::Range;

use serde_json::json;

use crate::kit::{
    Attend, AttendInputs, Decoder, DecoderParams, EXPERTS, ExpertNames, Layers, Mlp, PREFILL_ROWS,
    Step, VISION_WEIGHTS, check_shape, decoder, expert_decoder, prefill_rows,
};
use crate::recipe::{Recipe, RecipeOptions};
use crate::recipes::vision::{self, DEFAULT_SIZE, IMAGE_PATCHES, IMAGE_SIZE, Vision};
use crate::register_recipe;
use crate::registry::{RecipeEntry, RecipeOption};
use chunk::Chunks;
use config::{Config, Images, LayerKind, NEXT};
use layers::Model;
use mtp::MTP;
use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph};

/// Same option as that of other recipes with such a tower, which may be left out here.
const TOWER: RecipeOption = RecipeOption {
    values: &["fp16", "w8a16", "none"],
    help: "precision of the vision tower's weights, where the checkpoint has one; none leaves it out",
    ..VISION_WEIGHTS
};

register_recipe!(
    RecipeEntry::new(&["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .int8_caches()
        .options(&[IMAGE_SIZE, IMAGE_PATCHES, TOWER, MTP])
);
register_recipe!(
    RecipeEntry::new(&["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .int8_caches()
        .options(&[EXPERTS, IMAGE_SIZE, IMAGE_PATCHES, TOWER])
);
register_recipe!(
    RecipeEntry::new(&[NEXT], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .int8_caches()
        .options(&[EXPERTS])
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint)?;
    check_shape(options, config.layers.len(), config.max_positions)?;
    // `Qwen3_5RMSNorm` stores the difference from one.
    let layers = Layers { norm_offset: 1.0, ..Layers::decoder(checkpoint, options, config.eps) };
    let model = Model { layers, config: &config };
    let count = config.layers.len();
    let make = |name: &str, range, step| graph(&model, name, range, step);
    let (hidden, vocab, tied) = (config.hidden, config.vocab, config.tied);
    let (decoder, tables) = match &config.experts {
        None => {
            let rows = prefill_rows(options, &PREFILL_ROWS)?;
            let head = layers.lmhead(hidden, vocab, tied, None)?;
            let mut decoder = decoder(options, count, &rows, make, head)?;
            mtp::add(&mut decoder, &model, options, &rows)?;
            (decoder, Vec::new())
        }
        Some(experts) => {
            let rows = prefill_rows(options, &PREFILL_ROWS)?;
            let head = layers.lmhead(hidden, vocab, tied, Some("norm"))?;
            let names = |layer| ExpertNames::new(format!("layers.{layer}.mlp.experts"));
            let tables = experts.tables(checkpoint, (0..count).map(names))?;
            (expert_decoder(options, &vec![true; count], &rows, experts, make, head)?, vec![tables])
        }
    };
    let Decoder { contexts, plan_params } = decoder;
    let Config { heads, rope_theta, .. } = config;
    let mut params =
        DecoderParams { hidden, vocab, layers: count, heads, rope_theta }.map(options.max_ctx);
    params.insert("rotary_dim".to_owned(), json!(config.rotary_dim));
    if let Some(experts) = &config.experts {
        params.insert("n_experts".to_owned(), json!(experts.count));
        params
            .insert("router".to_owned(), json!({"rule": "softmax", "normalize": config.normalize}));
    }
    let images = images(&config, options)?;
    if let Some(Images { section, .. }) = images {
        let scaling =
            json!({"rope_type": "default", "mrope_interleaved": true, "mrope_section": section});
        params.insert("rope_scaling".to_owned(), scaling);
    }
    let mut recipe = Recipe::new("qwen3_5", "qwen3_5_generate", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?)
        .params(params)
        .tables(tables);
    if config.experts.is_some() {
        checkpoint.leave_out("mtp");
    }
    match images {
        Some(Images { tower, .. }) => {
            vision::add(&mut recipe, checkpoint, tower, options, size(tower, options))?;
        }
        None => checkpoint.leave_out("visual"),
    }
    Ok(recipe)
}

/// The vision tower of the bundle; an error when sizes of images are asked for, and there is none.
fn images<'a>(config: &'a Config, options: &RecipeOptions) -> Result<Option<&'a Images>> {
    let wanted = options.choice(TOWER.name) != Some("none");
    let images = config.vision.as_ref().filter(|_| wanted);
    let asked = [IMAGE_SIZE, IMAGE_PATCHES].into_iter().find(|o| options.choice(o.name).is_some());
    match (images, asked) {
        (None, Some(option)) => {
            let why = if wanted { "the checkpoint has no vision tower" } else { "vision is none" };
            let what = format!("{} is set, but {why}", option.name);
            Err(Error::new(ErrorKind::Usage, what).hint(
                "leave the option out, or use a checkpoint with vision_config and tensors visual.*",
            ))
        }
        (images, _) => Ok(images),
    }
}

/// The side of images by default: less than usual where the context is short.
fn size(tower: &Vision, options: &RecipeOptions) -> usize {
    tower.side_within(DEFAULT_SIZE, options.max_ctx)
}

/// Tokens through the layers of `range`.
fn graph(model: &Model<'_>, name: &str, range: Range<usize>, step: Step) -> Result<Graph> {
    let (layers, config, rows) = (&model.layers, model.config, step.rows);
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[rows, config.hidden])?;
    let full = |i: usize| config.layers.get(i) == Some(&LayerKind::Full);
    let inputs = AttendInputs::of(config.rotary_dim, step);
    let attend = range.clone().any(full).then(|| Attend::inputs(&mut b, &inputs)).transpose()?;
    let several = rows > 1 && range.clone().any(|i| !full(i));
    let chunks = several.then(|| Chunks::inputs(&mut b, model, rows)).transpose()?;
    let last = range.end == config.layers.len();
    for index in range {
        let attend = attend.as_ref().filter(|_| full(index));
        b.scope(format!("l{index}_{}", if attend.is_some() { "attn" } else { "gdn" }));
        let normed = layers.norm(&mut b, h, &format!("layers.{index}.input_layernorm"))?;
        let mixed = match (attend, &chunks) {
            (Some(attend), _) => {
                let place = format!("layers.{index}");
                model.attention(&mut b, normed, (&place, index), attend)?
            }
            (None, Some(chunks)) => model.delta_net_of_rows(&mut b, normed, index, chunks)?,
            (None, None) => model.delta_net(&mut b, normed, index)?,
        };
        h = b.add(h, mixed)?;
        b.scope(format!("l{index}_mlp"));
        if let Some(experts) = &config.experts {
            let name = format!("layers.{index}.post_attention_layernorm");
            let normed = layers.norm(&mut b, h, &name)?;
            let part = |part: &str| format!("layers.{index}.mlp.{part}");
            let shared = Mlp::new(part("shared_expert"), config.intermediate);
            let gate = part("shared_expert_gate");
            let h = layers.shared_expert(&mut b, [h, normed], &shared, &gate)?;
            layers.route(&mut b, [h, normed], &part("gate"), experts)?;
            return b.finish();
        }
        h = model.feed_forward(&mut b, h, &format!("layers.{index}"))?;
    }
    if last {
        b.scope("final");
        h = layers.norm(&mut b, h, "norm")?;
    }
    b.output("y", h)?;
    b.finish()
}
