//! Qwen3-VL: a vision tower whose rows stand in a text for pictures, and a decoder that takes further rows of the tower
//! after its first layers (deepstack).
//!
//! Arithmetic: `transformers`, `models/qwen3_vl`. The host embeds patches and adds learned positions; then
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `vision`, `vision<N>` | `x` | `[N, vision hidden]` | patches, squares of merged ones together |
//! | | `cos`, `sin` | `[N, head_dim / 2]` | rows and columns of the patches; constants for a fixed size |
//! | | `cmask` | `[1, N]` | hides rows after the last patch; not for a fixed size |
//! | | → `embeds` | `[N / merge², hidden]` | rows in place of the embedding table's |
//! | | → `deepstack_k` | `[N / merge², hidden]` | added after layer k |
//! | `decode`, `prefill<P>` | as those of Llama-like models | | `cos` and `sin` by the position of each token |
//! | | `deepstack_k` | `[P, hidden]` | zeros where a token is no picture's |
//! | `lmhead` | `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |

mod choices;
mod config;
mod probe;
mod tables;
mod vision;

use std::ops::Range;

use qhx_core::{Error, ErrorKind, Result};
use serde_json::{Map, Value, json};

use crate::builder::GraphBuilder;
use crate::checkpoint::Checkpoint;
use crate::graph::{Elem, Graph};
use crate::kit::{
    Attend, AttendInputs, Attention, Decoder, DecoderParams, Layers, Mlp, check_shape, decoder,
    one_or_many, prompt_rows,
};
use crate::recipe::{ContextPlan, MAX_CONTEXTS, Precision, Recipe, RecipeOptions};
use crate::register_recipe;
use crate::registry::RecipeEntry;
use choices::{HEAD, IMAGE_PATCHES, IMAGE_SIZE, VISION_SHIFT, VISION_WEIGHTS, patches, tower};
use config::{Config, Patches};
use vision::Tower;

/// Tokens that a prompt graph takes when nothing is said: 256 of a picture, and a question.
const DEFAULT_PREFILL: usize = 320;
/// The set of contexts that texts alone do without.
const VISION: &str = "vision";

register_recipe!(
    RecipeEntry::new(&["Qwen3VLForConditionalGeneration"], recipe)
        .prompt_graphs()
        .options(&[IMAGE_SIZE, IMAGE_PATCHES, VISION_WEIGHTS, HEAD, VISION_SHIFT])
        .probe(probe::probe)
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint)?;
    check_shape(options, config.layers, config.max_positions)?;
    let patches = patches(&config, options)?;
    let mut layers = Layers::new(checkpoint, options.precision, config.eps);
    if options.choice(HEAD.name) == Some("int8") {
        layers.head = Precision::W8A16.storage(config.vocab, config.hidden);
    }
    let Decoder { contexts: text, mut plan_params } = decoder(
        options,
        config.layers,
        &prompt_rows(options, DEFAULT_PREFILL)?,
        |name, range, rows| run(&layers, &config, name, range, rows, options.max_ctx),
        layers.lmhead(config.hidden, config.vocab, config.tied)?,
    )?;
    let tower = tower(checkpoint, &config, options);
    let (mut contexts, names) = vision_contexts(tower, options, &patches)?;
    plan_params.insert(VISION.to_owned(), one_or_many(names));
    contexts.extend(text);
    if contexts.len() > MAX_CONTEXTS {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "{} vision graphs and {} shards make {} contexts, expected at most {MAX_CONTEXTS}, which the NPU \
                 holds at once",
                patches.len(),
                options.shards,
                contexts.len()
            ),
        )
        .hint("ask for fewer shards or fewer sizes in image-patches, or share weights"));
    }
    Ok(Recipe {
        family: "qwen3vl".to_owned(),
        host_op: "qwen3vl_generate".to_owned(),
        contexts,
        embed: checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?,
        params: params(checkpoint, &config, options, &patches)?,
        plan_params,
        tables: vec![tables::tables(checkpoint, &config.vision, tower.scale)?],
    })
}

/// The vision graphs in contexts of their own, or in one that shares their weights; and their names.
fn vision_contexts(
    tower: Tower<'_>,
    options: &RecipeOptions,
    patches: &[Patches],
) -> Result<(Vec<ContextPlan>, Vec<String>)> {
    let precision = tower.layers.precision;
    let mut contexts: Vec<ContextPlan> = Vec::new();
    let mut names = Vec::new();
    for &size in patches {
        let name = match size {
            Patches::Square(_) => VISION.to_owned(),
            Patches::AtMost(count) => format!("{VISION}{count}"),
        };
        let graph = tower.graph(&name, size)?;
        names.push(name.clone());
        match contexts.first_mut().filter(|_| options.share_weights) {
            Some(context) => context.graphs.push(graph),
            None => contexts.push(ContextPlan {
                optional: Some(VISION.to_owned()),
                ..ContextPlan::new(name, precision, vec![graph])
            }),
        }
    }
    Ok((contexts, names))
}

fn params(
    checkpoint: &Checkpoint,
    config: &Config,
    options: &RecipeOptions,
    patches: &[Patches],
) -> Result<Map<String, Value>> {
    let Config { hidden, vocab, layers, heads, rope_theta, section, .. } = *config;
    let mut params =
        DecoderParams { hidden, vocab, layers, heads, rope_theta }.map(options.max_ctx);
    let scaling =
        json!({"rope_type": "default", "mrope_interleaved": true, "mrope_section": section});
    params.insert("rope_scaling".to_owned(), scaling);
    params.extend(config.tokens.map(|(key, id)| (key.to_owned(), json!(id))));
    let vision = tables::params(checkpoint, &config.vision, patches)?;
    params.insert(VISION.to_owned(), Value::Object(vision));
    Ok(params)
}

/// Tokens through the layers of `range`.
fn run(
    layers: &Layers<'_>,
    config: &Config,
    name: &str,
    range: Range<usize>,
    rows: usize,
    max_ctx: usize,
) -> Result<Graph> {
    let last = range.end == config.layers;
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[rows, config.hidden])?;
    let attend = Attend::inputs(&mut b, &AttendInputs::new(config.heads.dim, rows, max_ctx))?;
    for layer in range {
        let name = format!("layers.{layer}");
        let attention = Attention {
            norms: Some(["q_norm", "k_norm"]),
            qkv_bias: config.bias,
            out_bias: config.bias,
            ..Attention::new(format!("{name}.self_attn"), layer, config.heads)
        };
        let mlp = Mlp::new(format!("{name}.mlp"), config.intermediate);
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
