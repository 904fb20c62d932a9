//! LFM2-VL and LFM2.5-VL (`Lfm2VlForConditionalGeneration`): a SigLIP 2 over images that keep their shape, or tiles of
//! them, whose rows are joined in squares and projected, before the decoder of LFM2.
//!
//! Arithmetic: `transformers`, `models/lfm2_vl/modeling_lfm2_vl.py`.
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `vision` | `pixels` → `embeds` | `[N, 3 · patch²]` → `[N / block², hidden]` | patches of an image, blocks one behind the other |
//! | | `positions` | `[N, tower's hidden]` | learned positions for the image's shape |
//! | | `cmask` | `[1, N]` | added to scores: hides what is no patch of the image |
//! | others | as those of LFM2 | | |

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, TensorId};
use serde_json::{Value, json};

use super::recipe as decoder;
use crate::kit::{
    Attend, AttendInputs, Blocks, Layers, MatrixFile, Processor, Reader, SiglipSizes, Square,
    VISION_WEIGHTS, matrices, prefill_rows, processor_size, tower_names,
};
use crate::recipe::{Precision, Recipe, RecipeOptions};
use crate::register_recipe;
use crate::registry::RecipeEntry;

/// Tokens that prefill graphs take by default: a question, and a tile.
const PREFILL: [usize; 2] = [16, 256];
/// Epsilon of the projector's norm, which no file says.
const PROJECTOR_EPS: f32 = 1e-5;
/// `Siglip2VisionConfig`, for keys that `vision_config` leaves out.
const TOWER: SiglipSizes =
    SiglipSizes { hidden: 768, intermediate: 3072, layers: 12, heads: 12, image: 224, patch: 16 };
const PLACE: &str = "vision_tower";

register_recipe!(
    RecipeEntry::new(&["Lfm2VlForConditionalGeneration"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .options(&[VISION_WEIGHTS])
);

/// The graphs of a checkpoint, and the plan that runs them with `vision_generate`.
fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(tower_names);
    // The head is for whole images.
    checkpoint.leave_out("vision_tower.head");
    let tower = Tower::read(checkpoint, VISION_WEIGHTS.precision(options))?;
    let processor = Processor::image(checkpoint)?;
    let square = tower.square(&processor)?;
    let prefill = Some(prefill_rows(options, &PREFILL)?);
    let mut recipe = decoder(checkpoint, &RecipeOptions { prefill, ..options.clone() })?;
    "lfm2_vl".clone_into(&mut recipe.family);
    "vision_generate".clone_into(&mut recipe.host_op);
    square.add(&mut recipe, &processor, tower.blocks.layers.precision, |b, pixels| {
        let rows = tower.rows(b, pixels, square.patches())?;
        b.scope("projector");
        let joined = square.joined(b, rows)?;
        tower.projected(b, joined, Reader::new(checkpoint).size("hidden_size")?)
    })?;
    if let Some(Value::Object(vision)) = recipe.params.get_mut("vision") {
        vision.insert("position_side".to_owned(), json!(tower.side));
        vision.insert("channels_last".to_owned(), json!(true));
        vision.entry("resample").or_insert(json!("bilinear"));
    }
    recipe.params.insert("image".to_owned(), prompts(checkpoint)?);
    recipe.params.insert("tiles".to_owned(), tower.tiles(&processor)?);
    let positions = tower.blocks.tensor("embeddings.position_embedding.weight");
    let positions = checkpoint.matrix(&positions, [tower.side.pow(2), tower.blocks.hidden])?;
    let file = MatrixFile::in_f32("vision", "vision_positions", positions);
    recipe.tables.push(matrices("positions", vec![file]));
    Ok(recipe)
}

/// `Lfm2VlProcessor`.
fn prompts(checkpoint: &Checkpoint) -> Result<Value> {
    let reader = Reader::whole(checkpoint);
    // The second spelling is that of older checkpoints.
    let key = reader.first(&["image_token_id", "image_token_index"]).map_or("", |(key, _)| key);
    Ok(json!({
        "token": reader.size_or(key, 396)?,
        "before": ["<|image_start|>"],
        "tile": "<|img_row_{row}_col_{column}|>",
        "thumbnail": "<|img_thumbnail|>",
        "after": ["<|image_end|>"],
    }))
}

/// Tower and projector.
struct Tower<'a> {
    blocks: Blocks<'a>,
    patch: usize,
    /// Patches of a side of the square that has learned positions.
    side: usize,
    /// Patches of a side that become one token.
    factor: usize,
    /// Values between the projections.
    width: usize,
    normed: bool,
    bias: bool,
}

impl<'a> Tower<'a> {
    fn read(checkpoint: &'a Checkpoint, precision: Precision) -> Result<Self> {
        let blocks = Blocks::read(checkpoint, "vision_config", PLACE, &TOWER, precision)?;
        let vision = Reader::part(checkpoint, "vision_config")?;
        vision.only("num_channels", &json!(3))?;
        let patches = vision.size_or("num_patches", 256)?;
        if patches.isqrt().pow(2) != patches {
            return Err(vision.fault(format!("num_patches is {patches}, expected a square")));
        }
        let reader = Reader::whole(checkpoint);
        reader.only("projector_hidden_act", &json!("gelu"))?;
        Ok(Self {
            blocks,
            patch: vision.size_or("patch_size", TOWER.patch)?,
            side: patches.isqrt(),
            factor: reader.size_or("downsample_factor", 2)?,
            width: reader.size_or("projector_hidden_size", 2560)?,
            normed: reader.flag_or("projector_use_layernorm", true)?,
            bias: reader.flag_or("projector_bias", true)?,
        })
    }

    /// A tile, and the most patches of an image that is not cut.
    fn square(&self, processor: &Processor) -> Result<Square> {
        let vision = Reader::part(self.blocks.layers.checkpoint, "vision_config")?;
        for (key, only) in
            [("/encoder_patch_size", self.patch), ("/downsample_factor", self.factor)]
        {
            processor.only(key, &json!(only))?;
        }
        let tile = processor_size(processor, "/tile_size", 32 * self.patch)?;
        let square = Square::new(&vision, tile, self.patch)?.in_blocks(self.factor)?;
        let most = processor_size(processor, "/max_image_tokens", 256)? * self.factor.pow(2);
        square.for_patches(&vision, most.max(square.patches()))
    }

    /// `params.tiles`: the keys of `Lfm2VlImageProcessor`, with its defaults.
    fn tiles(&self, processor: &Processor) -> Result<Value> {
        let number = |key: &str, default| processor_size(processor, key, default);
        let flag = |key: &str| match processor.get(key) {
            None => Ok(true),
            Some(value) => value.as_bool().ok_or_else(|| processor.bad(key, "true or false")),
        };
        let tolerance = match processor.get("/max_pixels_tolerance") {
            None => 2.0,
            Some(value) => value
                .as_f64()
                .filter(|value| *value > 0.0)
                .ok_or_else(|| processor.bad("/max_pixels_tolerance", "a positive number"))?,
        };
        let pixels = (self.patch * self.factor).pow(2);
        let cut = flag("/do_image_splitting")?;
        let [min, max] = [number("/min_tiles", 2)?, number("/max_tiles", 10)?];
        Ok(json!({
            "rule": "nearest",
            "min": if cut { min } else { 1 },
            "max": if cut { max } else { 1 },
            "thumbnail": flag("/use_thumbnail")?,
            "whole": {
                "min_pixels": number("/min_image_tokens", 64)? * pixels,
                "max_pixels": number("/max_image_tokens", 256)? * pixels,
                "tolerance": tolerance,
            },
        }))
    }

    /// `Siglip2VisionModel` without its head, over `count` patches or fewer.
    fn rows(&self, b: &mut GraphBuilder, pixels: TensorId, count: usize) -> Result<TensorId> {
        let Blocks { layers, hidden, .. } = self.blocks;
        let name = self.blocks.tensor("embeddings.patch_embedding");
        b.scope("embeddings");
        let shape = [hidden, 3 * self.patch * self.patch];
        let weight = layers.checkpoint.matrix(&format!("{name}.weight"), shape)?;
        let bias = layers.checkpoint.values(&format!("{name}.bias"), &[hidden])?;
        let x = b.linear("patches", pixels, Precision::Fp16.weight(weight), Some(bias))?;
        let positions = b.input("positions", Elem::Activation, &[count, hidden])?;
        let x = b.add(x, positions)?;
        let inputs = AttendInputs { mask_rows: 1, ..AttendInputs::new(0, count, 0) };
        let attend = Attend::inputs(b, &inputs)?;
        let h = self.blocks.build(b, x, &attend)?;
        b.scope("post");
        layers.layer_norm(b, h, &self.blocks.tensor("post_layernorm"))
    }

    /// `Lfm2VlMultiModalProjector` behind its pixel unshuffle.
    fn projected(&self, b: &mut GraphBuilder, mut x: TensorId, hidden: usize) -> Result<TensorId> {
        let layers = Layers { eps: PROJECTOR_EPS, ..self.blocks.layers };
        let name = |part: &str| format!("multi_modal_projector.{part}");
        if self.normed {
            x = layers.layer_norm(b, x, &name("layer_norm"))?;
        }
        let x = layers.linear(b, x, &name("linear_1"), self.width, self.bias)?;
        let x = b.gelu(x)?;
        layers.linear(b, x, &name("linear_2"), hidden, self.bias)
    }
}
