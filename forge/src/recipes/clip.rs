//! CLIP (`CLIPModel`): images and texts in one space.
//!
//! Arithmetic: `transformers`, `models/clip/modeling_clip.py` (Radford et al. 2021, arXiv 2103.00020). The host-op is
//! that of SigLIP.
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `text` | `x` | `[L, hidden]` | rows of the embedding table for a text and its padding; a token sees those before it |
//! | | `pooled` | `[1, L]` | 1 at the token that ends the text, 0 elsewhere |
//! | `vision` | `patches` | `[N, 3 · side²]` | normalised patches of an image |
//! | each | → `y` | `[1, width]` | the vector, not normalised |

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph};
use qhx_types::MASK_VALUE;
use serde_json::{Map, Value, json};

use crate::kit::{Attend, Blocks, Processor, Reader, SiglipSizes, check_shape, object};
use crate::recipe::{ContextPlan, Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::RecipeEntry;

register_recipe!(
    RecipeEntry::new(&["CLIPModel"], recipe)
        .tasks(&[Task::Embed])
        .longest(|checkpoint, _| { Reader::part(checkpoint, TEXT).ok()?.size_or(LENGTH, 77).ok() })
);

const TEXT: &str = "text_config";
const VISION: &str = "vision_config";
const LENGTH: &str = "max_position_embeddings";
/// Patches of an image at most.
const MAX_PATCHES: usize = 4096;
/// Defaults of `CLIPTextConfig`, of which the image has no part, and of `CLIPVisionConfig`.
const TEXT_SIZES: SiglipSizes =
    SiglipSizes { hidden: 512, intermediate: 2048, layers: 12, heads: 8, image: 0, patch: 0 };
const VISION_SIZES: SiglipSizes =
    SiglipSizes { hidden: 768, intermediate: 3072, layers: 12, heads: 12, image: 224, patch: 32 };
/// Default epsilon of the norms, and default activation.
const DEFAULTS: (f32, &str) = (1e-5, "quick_gelu");
/// The mean and the deviation of the images of the first CLIP, which the processor has by default.
const MEAN_STD: [[f64; 3]; 2] =
    [[0.481_454_66, 0.457_827_5, 0.408_210_73], [0.268_629_54, 0.261_302_58, 0.275_777_11]];
/// A token that the first configurations name as the end of texts and that is none: it is the highest one there.
const NO_END: u64 = 2;

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(|name| vec![name.to_owned()]);
    let (text, vision) = (Reader::part(checkpoint, TEXT)?, Reader::part(checkpoint, VISION)?);
    vision.only("num_channels", &json!(3))?;
    for (key, reader) in [("text_config_dict", &text), ("vision_config_dict", &vision)] {
        same(checkpoint, key, reader)?;
    }
    let blocks = |part, place, sizes| {
        Blocks::read_clip(checkpoint, part, place, sizes, options.precision, DEFAULTS)
    };
    let of_text = blocks(TEXT, "text_model", &TEXT_SIZES)?;
    let of_vision = blocks(VISION, "vision_model", &VISION_SIZES)?;
    let width = Reader::whole(checkpoint).size_or("projection_dim", 512)?;
    let (vocab, length) = (text.size_or("vocab_size", 49_408)?, text.size_or(LENGTH, 77)?);
    let patch = vision.size_or("patch_size", VISION_SIZES.patch)?;
    let side = vision.size_or("image_size", VISION_SIZES.image)? / patch;
    if side == 0 || side * side > MAX_PATCHES {
        return Err(vision.fault(format!(
            "image_size and patch_size: {side} patches a side, expected a square of at most {MAX_PATCHES} patches"
        )));
    }
    check_shape(options, 1, Some(length))?;
    // Of the loss, and buffers of older checkpoints.
    checkpoint.leave_out("logit_scale");
    for tower in ["text_model", "vision_model"] {
        checkpoint.leave_out(&format!("{tower}.embeddings.position_ids"));
    }
    let contexts = vec![
        ContextPlan::new(
            "text".to_owned(),
            options.precision,
            vec![text_graph(&of_text, length, width)?],
        ),
        ContextPlan::new(
            "vision".to_owned(),
            options.precision,
            vec![vision_graph(&of_vision, patch, side, width)?],
        )
        .once(),
    ];
    let ends = text.get("eos_token_id").map_or(Some(49_407), Value::as_u64);
    let Some(end) = ends.filter(|end| *end < vocab as u64) else {
        let found = text.get("eos_token_id").unwrap_or(&Value::Null);
        return Err(text.bad("eos_token_id", found, "a token"));
    };
    let mut image = image(checkpoint, side * patch)?;
    image.extend(object(json!({"patch": patch, "side": side})));
    let params = object(json!({
        "hidden": of_text.hidden,
        "vocab": vocab,
        "n_layers": of_text.count,
        "max_ctx": length,
        "width": width,
        // What stands behind the end of a text is seen by nothing that is pooled.
        "padding": {"token": end, "left": false},
        "pooled": {"token": (end != NO_END).then_some(end)},
        "image": image,
    }));
    let plan_params = object(json!({"text": "text", "vision": "vision"}));
    let embed = checkpoint
        .matrix("text_model.embeddings.token_embedding.weight", [vocab, of_text.hidden])?;
    Ok(Recipe::new("clip", "siglip_embed", contexts, plan_params).embed(embed).params(params))
}

/// Errors when the object `key` beside a part, which counts before it, has another value for a key.
fn same(checkpoint: &Checkpoint, key: &str, part: &Reader<'_>) -> Result<()> {
    let whole = Reader::whole(checkpoint);
    let beside = whole.get(key).and_then(Value::as_object);
    for (name, value) in beside.into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        if let Some(other) = part.get(name).filter(|other| *other != value) {
            return Err(whole.fault(format!(
                "{key}: {name} is {value}, expected {other} as in the part itself"
            )));
        }
    }
    Ok(())
}

/// Conversion of an image to patches: `CLIPImageProcessor`.
fn image(checkpoint: &Checkpoint, pixels: usize) -> Result<Map<String, Value>> {
    let processor = Processor::image(checkpoint)?;
    for key in ["/do_resize", "/do_rescale", "/do_normalize"] {
        processor.only(key, &json!(true))?;
    }
    let side = |key: &str, part: &str| {
        let found = processor.get(&format!("{key}/{part}")).or_else(|| processor.get(key));
        found.and_then(Value::as_u64)
    };
    let cropped = processor.get("/do_center_crop") != Some(&json!(false));
    let shortest = match processor.get("/size").filter(|size| size.get("height").is_some()) {
        // Stretched to the square.
        Some(_) if !cropped => {
            for key in ["/size/height", "/size/width"] {
                processor.only(key, &json!(pixels))?;
            }
            None
        }
        Some(_) => return Err(processor.bad("/size", "shortest_edge, or no do_center_crop")),
        None if !cropped => {
            return Err(processor.bad("/do_center_crop", "true, with a shortest_edge"));
        }
        None => {
            let shortest = side("/size", "shortest_edge").unwrap_or(224);
            for part in ["height", "width"] {
                if side("/crop_size", part).unwrap_or(224) != pixels as u64 {
                    return Err(processor.bad("/crop_size", &format!("{pixels} pixels a side")));
                }
            }
            if shortest < pixels as u64 || shortest > 1 << 14 {
                return Err(
                    processor.bad("/size", &format!("a shortest edge from {pixels} to 16384"))
                );
            }
            Some(shortest)
        }
    };
    let mean_std = processor.mean_std_or(MEAN_STD)?;
    Ok(object(json!({
        "filter": processor.resample()?.unwrap_or("bicubic"),
        "mean": mean_std[0],
        "std": mean_std[1],
        "scale": processor.rescale_factor()?,
        "shortest": shortest,
    })))
}

/// `CLIPTextTransformer`: the row of the token that ends a text, projected.
fn text_graph(text: &Blocks<'_>, length: usize, width: usize) -> Result<Graph> {
    let mut b = GraphBuilder::new("text");
    let x = b.input("x", Elem::Activation, &[length, text.hidden])?;
    let pooled = b.input("pooled", Elem::Activation, &[1, length])?;
    let h = text.positioned(&mut b, x, (0..length as u32).collect())?;
    let hidden = |(from, to)| if to > from { MASK_VALUE } else { 0.0 };
    let pairs = (0..length).flat_map(|from| (0..length).map(move |to| (from, to)));
    let mask = pairs.map(hidden).collect();
    let shape: &[usize] = if length == 1 { &[1, 1, 1] } else { &[1, 1, length, length] };
    let mask = b.constant("causal", Elem::Activation, shape, mask)?;
    let attend = Attend { mask: Some(mask), ..Attend::whole(length) };
    let h = text.build(&mut b, h, &attend)?;
    b.scope("head");
    let h = b.matmul(pooled, h, false)?;
    let h = text.layers.layer_norm(&mut b, h, &text.tensor("final_layer_norm"))?;
    let y = text.layers.linear(&mut b, h, "text_projection", width, false)?;
    b.output("y", y)?;
    b.finish()
}

/// `CLIPVisionTransformer`: the row of the class, projected.
fn vision_graph(vision: &Blocks<'_>, patch: usize, side: usize, width: usize) -> Result<Graph> {
    let Blocks { layers, hidden, .. } = *vision;
    let count = side * side;
    let mut b = GraphBuilder::new("vision");
    let patches = b.input("patches", Elem::Activation, &[count, 3 * patch * patch])?;
    b.scope("embed");
    let checkpoint = layers.checkpoint;
    let name = vision.tensor("embeddings.patch_embedding.weight");
    let weight = checkpoint.rows(&name, &[hidden, 3, patch, patch])?;
    let x = b.linear("patch_embedding", patches, layers.precision.weight(weight), None)?;
    let class = checkpoint.values(&vision.tensor("embeddings.class_embedding"), &[hidden])?;
    let class = b.constant("class", Elem::Activation, &[1, hidden], class)?;
    let x = b.concat(&[class, x], 0)?;
    let x = vision.positioned(&mut b, x, (0..=count as u32).collect())?;
    let x = layers.layer_norm(&mut b, x, &vision.tensor("pre_layrnorm"))?;
    let (x, attend) = Attend::filled(&mut b, x)?;
    let h = vision.build(&mut b, x, &attend)?;
    b.scope("head");
    let h = b.slice(h, 0, 0, 1)?;
    let h = layers.layer_norm(&mut b, h, &vision.tensor("post_layernorm"))?;
    let y = layers.linear(&mut b, h, "visual_projection", width, false)?;
    b.output("y", y)?;
    b.finish()
}
