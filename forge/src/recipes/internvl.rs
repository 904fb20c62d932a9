//! InternVL 2.5 to 3.5 (`InternVLForConditionalGeneration`, and `InternVLChatModel` of the original code): an InternViT
//! over tiles of one size, whose rows are joined in squares and projected, and a Llama-like decoder.
//!
//! Arithmetic: `transformers`, `models/internvl`; of the original code `modeling_intern_vit.py` and
//! `modeling_internvl_chat.py`, which is the same under other names.
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `vision` | `pixels` → `embeds` | `[patches, 3 · patch²]` → `[tokens, hidden]` | a tile, see [`Square`] |
//! | others | as those of Llama-like models | | |

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, TensorId};
use serde_json::{Value, json};

use super::llama::decoder_part;
use crate::kit::{
    Attend, Attention, Heads, Layers, Processor, Reader, Square, VISION_WEIGHTS, added_tokens,
    prefill_rows, processor_size, tower_names,
};
use crate::recipe::{Precision, Recipe, RecipeOptions};
use crate::register_recipe;
use crate::registry::RecipeEntry;

const ORIGINAL: &str = "InternVLChatModel";
/// Tokens that prefill graphs take by default: a question, and a tile.
const PREFILL: [usize; 2] = [16, 256];
/// Epsilon of the projector's norm, which no file says.
const PROJECTOR_EPS: f32 = 1e-5;
/// Stands at each position of a tile.
const CONTEXT: &str = "<IMG_CONTEXT>";

register_recipe!(
    RecipeEntry::new(&["InternVLForConditionalGeneration", ORIGINAL], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .options(&[VISION_WEIGHTS])
);

/// Names of tensors.
#[derive(Debug)]
struct Layout {
    /// Prefix of the tower's.
    place: &'static str,
    class: &'static str,
    positions: &'static str,
    patches: &'static str,
    layers: &'static str,
    attention: &'static str,
    joined: Option<&'static str>,
    out: &'static str,
    scales: [&'static str; 2],
    norms: [&'static str; 2],
    /// A norm and two projections.
    projector: [&'static str; 3],
}

static TRANSFORMERS: Layout = Layout {
    place: "vision_tower",
    class: "embeddings.cls_token",
    positions: "embeddings.position_embeddings",
    patches: "embeddings.patch_embeddings.projection",
    layers: "encoder.layer",
    attention: "attention",
    joined: None,
    out: "projection_layer",
    scales: ["lambda_1", "lambda_2"],
    norms: ["layernorm_before", "layernorm_after"],
    projector: [
        "multi_modal_projector.layer_norm",
        "multi_modal_projector.linear_1",
        "multi_modal_projector.linear_2",
    ],
};

static CODE: Layout = Layout {
    place: "vision_model",
    class: "embeddings.class_embedding",
    positions: "embeddings.position_embedding",
    patches: "embeddings.patch_embedding",
    layers: "encoder.layers",
    attention: "attn",
    joined: Some("qkv"),
    out: "proj",
    scales: ["ls1", "ls2"],
    norms: ["norm1", "norm2"],
    projector: ["mlp1.0", "mlp1.1", "mlp1.3"],
};

/// The graphs of a checkpoint, and the plan that runs them with `vision_generate`.
fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(tower_names);
    let original = checkpoint.architecture() == Some(ORIGINAL);
    let layout = if original { &CODE } else { &TRANSFORMERS };
    let tower = Tower::read(checkpoint, layout, VISION_WEIGHTS.precision(options))?;
    let prefill = Some(prefill_rows(options, &PREFILL)?);
    let mut recipe = decoder_part(checkpoint, &RecipeOptions { prefill, ..options.clone() })?;
    "internvl".clone_into(&mut recipe.family);
    "vision_generate".clone_into(&mut recipe.host_op);
    let reader = Reader::whole(checkpoint);
    let token = match original {
        true => token(checkpoint)?,
        false => reader.size_or("image_token_id", 151_667)?,
    };
    let image = json!({"token": token, "before": ["<img>"], "after": ["</img>"]});
    recipe.params.insert("image".to_owned(), image);
    let (processor, tiles) = match original {
        true => of_code(checkpoint)?,
        false => of_processor(checkpoint, &tower.square)?,
    };
    recipe.params.extend(tiles.map(|tiles| ("tiles".to_owned(), tiles)));
    let hidden = Reader::new(checkpoint).size("hidden_size")?;
    tower.square.add(&mut recipe, &processor, tower.layers.precision, |b, pixels| {
        let rows = tower.rows(b, pixels)?;
        b.scope("projector");
        let joined = tower.square.joined(b, rows)?;
        let layers = Layers { eps: PROJECTOR_EPS, ..tower.layers };
        let [norm, first, second] = layout.projector;
        let x = layers.layer_norm(b, joined, norm)?;
        let x = layers.linear(b, x, first, hidden, true)?;
        let x = b.gelu(x)?;
        layers.linear(b, x, second, hidden, true)
    })?;
    Ok(recipe)
}

/// Processor and tiles as files declare them: `InternVLProcessor` and `GotOcr2ImageProcessor`. The first cuts images
/// whatever `crop_to_patches` says.
fn of_processor(checkpoint: &Checkpoint, square: &Square) -> Result<(Processor, Option<Value>)> {
    let processor = Processor::image(checkpoint)?;
    for side in ["/size/height", "/size/width"] {
        processor.only(side, &json!(square.image_size()))?;
    }
    if !processor.is_empty() && processor.get("/image_mean").is_none() {
        return Err(processor.bad("/image_mean", "three numbers"));
    }
    let [min, max] = [("/min_patches", 1), ("/max_patches", 12)]
        .map(|(key, default)| processor_size(&processor, key, default));
    let tiles = json!({"rule": "nearest", "min": min?, "max": max?, "thumbnail": true});
    Ok((processor, Some(tiles)))
}

/// The same as the original code has it: `load_image` of the model's card, with the keys of `config.json`.
fn of_code(checkpoint: &Checkpoint) -> Result<(Processor, Option<Value>)> {
    let reader = Reader::whole(checkpoint);
    // The default of the original code is another order of the rows that are joined.
    match reader.get("ps_version") {
        Some(version) if version == "v2" => {}
        found => return Err(reader.bad("ps_version", found.unwrap_or(&Value::Null), "\"v2\"")),
    }
    let processor = json!({
        "resample": 3,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    });
    let tiles = json!({
        "rule": "nearest",
        "min": reader.size_or("min_dynamic_patch", 1)?,
        "max": reader.size_or("max_dynamic_patch", 6)?,
        "thumbnail": reader.flag("use_thumbnail")?,
    });
    let cut = reader.flag("dynamic_image_size")?;
    Ok((Processor::of_code(checkpoint, processor), cut.then_some(tiles)))
}

/// The number of the token at each position of a tile, which this layout's `config.json` does not have.
fn token(checkpoint: &Checkpoint) -> Result<usize> {
    if checkpoint.seed().is_some() {
        return Ok(0);
    }
    let found = added_tokens(checkpoint)?.into_iter().find(|(content, _)| content == CONTEXT);
    found.map(|(_, id)| id).ok_or_else(|| {
        let place = checkpoint.dir().display();
        let what =
            format!("{place}: no token {CONTEXT} in tokenizer.json or tokenizer_config.json");
        Error::new(ErrorKind::Artifact, what)
            .hint("put the model's tokenizer beside its config.json")
    })
}

/// `InternVLVisionModel`, which the original code calls `InternVisionModel`.
struct Tower<'a> {
    layout: &'static Layout,
    layers: Layers<'a>,
    square: Square,
    hidden: usize,
    intermediate: usize,
    count: usize,
    heads: Heads,
    bias: bool,
    head_norms: bool,
    rms: bool,
}

impl<'a> Tower<'a> {
    fn read(
        checkpoint: &'a Checkpoint,
        layout: &'static Layout,
        precision: Precision,
    ) -> Result<Self> {
        let reader = Reader::part(checkpoint, "vision_config")?;
        reader.only("hidden_act", &json!("gelu"))?;
        reader.only("num_channels", &json!(3))?;
        let (image, patch) = (side(&reader, "image_size", 448)?, side(&reader, "patch_size", 14)?);
        let whole = Reader::whole(checkpoint);
        if whole.size_or("force_image_size", image)? != image {
            return Err(whole.fault(format!(
                "force_image_size is another than vision_config.image_size, {image}: expected the same"
            )));
        }
        let ratio = whole.positive(&["downsample_ratio"])?.unwrap_or(0.5);
        let block = (1.0 / ratio) as usize;
        if block == 0 || ratio * block as f64 != 1.0 {
            return Err(whole.fault(format!(
                "downsample_ratio is {ratio}, expected one half, or another part of one"
            )));
        }
        let hidden = reader.size_or("hidden_size", 1024)?;
        let query = reader.size_or("num_attention_heads", 16)?;
        if !hidden.is_multiple_of(query) {
            return Err(reader.fault(format!(
                "hidden_size is {hidden}, expected a multiple of num_attention_heads, {query}"
            )));
        }
        let rms = match reader.get("norm_type") {
            Some(kind) if kind == "rms_norm" => true,
            Some(kind) if kind != "layer_norm" => {
                return Err(reader.bad("norm_type", kind, "\"layer_norm\" or \"rms_norm\""));
            }
            _ => false,
        };
        let eps = reader.epsilon(&["layer_norm_eps"], 1e-6)?;
        let [bias, head_norms] = match layout.joined {
            None => ["attention_bias", "use_qk_norm"],
            Some(_) => ["qkv_bias", "qk_normalization"],
        };
        Ok(Self {
            layout,
            layers: Layers::new(checkpoint, precision, eps),
            square: Square::new(&reader, image, patch)?.in_blocks(block)?,
            hidden,
            intermediate: reader.size_or("intermediate_size", 4096)?,
            count: reader.layers_or(24)?,
            heads: Heads { query, groups: query, dim: hidden / query },
            bias: reader.flag(bias)?,
            head_norms: reader.flag(head_norms)?,
            rms,
        })
    }

    fn tensor(&self, part: &str) -> String {
        format!("{}.{part}", self.layout.place)
    }

    /// Patches `pixels` to rows of them.
    fn rows(&self, b: &mut GraphBuilder, pixels: TensorId) -> Result<TensorId> {
        let Self { layout, layers, square, hidden, .. } = self;
        let checkpoint = layers.checkpoint;
        let (patches, patch, hidden) = (square.patches(), square.patch_size(), *hidden);
        b.scope("embeddings");
        let name = self.tensor(layout.patches);
        let weight = checkpoint.rows(&format!("{name}.weight"), &[hidden, 3, patch, patch])?;
        let bias = checkpoint.values(&format!("{name}.bias"), &[hidden])?;
        let weight = Precision::Fp16.weight(weight);
        let x = b.linear("patches", pixels, weight, Some(bias))?;
        // The class token stands behind the patches, in whose order their positions are.
        let learned =
            checkpoint.values(&self.tensor(layout.positions), &[1, patches + 1, hidden])?;
        let (first, learned) = learned.split_at(hidden);
        let class = checkpoint.values(&self.tensor(layout.class), &[1, 1, hidden])?;
        let class = class.iter().zip(first).map(|(class, position)| class + position).collect();
        let class = b.constant("class", Elem::Activation, &[1, hidden], class)?;
        let rows = square.order()?;
        let rows = rows.iter().flat_map(|row| &learned[*row as usize * hidden..][..hidden]);
        let rows = rows.copied().collect();
        let positions = b.constant("positions", Elem::Activation, &[patches, hidden], rows)?;
        let x = b.add(x, positions)?;
        let x = b.concat(&[x, class], 0)?;
        let (mut h, attend) = Attend::filled(b, x)?;
        for index in 0..self.count {
            h = self.layer(b, h, index, &attend)?;
        }
        b.slice(h, 0, 0, patches)
    }

    fn layer(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        index: usize,
        attend: &Attend,
    ) -> Result<TensorId> {
        let Self { layout, layers, hidden, .. } = self;
        let part = |part: &str| self.tensor(&format!("{}.{index}.{part}", layout.layers));
        let norm = |b: &mut GraphBuilder, h, name: &str| match self.rms {
            true => layers.norm(b, h, &part(name)),
            false => layers.layer_norm(b, h, &part(name)),
        };
        let add = |b: &mut GraphBuilder, h, out, name: &str| {
            let scale = layers.checkpoint.values(&part(name), &[*hidden])?;
            let scale = b.row(name, scale)?;
            let out = b.mul(out, scale)?;
            b.add(h, out)
        };
        b.scope(format!("l{index}_attn"));
        let attention = Attention {
            joined: layout.joined,
            norms: self.head_norms.then_some(["q_norm", "k_norm"]),
            whole_norms: true,
            bias: [self.bias; 3],
            out: layout.out,
            out_bias: true,
            turned: false,
            cached: false,
            ..Attention::new(part(layout.attention), index, self.heads)
        };
        let x = norm(b, h, layout.norms[0])?;
        let x = layers.attention(b, x, &attention, attend)?;
        let h = add(b, h, x, layout.scales[0])?;
        b.scope(format!("l{index}_mlp"));
        let x = norm(b, h, layout.norms[1])?;
        let names = ["fc1", "fc2"].map(|name| part(&format!("mlp.{name}")));
        let names = names.each_ref().map(String::as_str);
        let x = layers.feed_forward(b, x, names, self.intermediate, GraphBuilder::gelu)?;
        add(b, h, x, layout.scales[1])
    }
}

/// A number of pixels, or two that are the same.
fn side(reader: &Reader<'_>, key: &str, default: usize) -> Result<usize> {
    match reader.get(key) {
        Some(Value::Array(sides)) => match sides.as_slice() {
            [width, height] if width == height => {
                width.as_u64().filter(|side| *side > 0).map(|side| side as usize)
            }
            _ => None,
        }
        .ok_or_else(|| {
            reader.bad(key, &Value::Array(sides.clone()), "two equal numbers of pixels")
        }),
        _ => reader.size_or(key, default),
    }
}
