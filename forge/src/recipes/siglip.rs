//! SigLIP and SigLIP 2 (`SiglipModel`, `Siglip2Model`): images and texts in one space.
//!
//! Arithmetic: `transformers`, `models/siglip/modeling_siglip.py` and `models/siglip2/modeling_siglip2.py` (Zhai et al.
//! 2023, arXiv 2303.15343; Tschannen et al. 2025, arXiv 2502.14786). Published checkpoints of SigLIP 2 for images of
//! one size are of the first class, those for images of any shape (NaFlex) of the second.
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `text` | `x` | `[L, hidden]` | rows of the embedding table for a text and its padding, which all tokens see |
//! | `vision`, or `vision<N>` | `patches` | `[N, 3 · side²]` | normalised patches of an image |
//! | | `positions` | `[N, hidden]` | learned positions for the image's shape; NaFlex |
//! | | `cmask` | `[1, N]` | added to scores: hides what is no patch of the image; NaFlex |
//! | each | → `y` | `[1, width]` | the vector, not normalised |

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use qhx_graph::weight::{read, row_range};
use serde_json::{Map, Value, json};

use super::choices::numbers;
use crate::kit::{
    Attend, AttendInputs, Blocks, Heads, MatrixFile, Processor, Reader, SiglipSizes, matrices,
    object, one_or_many, sized,
};
use crate::recipe::{ContextPlan, Precision, Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::{RecipeEntry, RecipeOption};

const CLASSES: [&str; 2] = ["SiglipModel", "Siglip2Model"];
const IMAGE_PATCHES: RecipeOption = RecipeOption {
    name: "image-patches",
    values: &[],
    help: "patches of the vision graphs of a NaFlex checkpoint, such as 256,1024; 256 by default. An image goes through \
           the smallest that holds it at its own size, or is made smaller for the largest",
};
/// `max_num_patches` of the image processor.
const DEFAULT_PATCHES: usize = 256;
const MAX_PATCHES: usize = 4096;

register_recipe!(
    RecipeEntry::new(&CLASSES, recipe)
        .tasks(&[Task::Embed])
        .longest(longest)
        .options(&[IMAGE_PATCHES])
);

/// Defaults of the configuration classes for the keys that a part leaves out.
const TOWER: SiglipSizes =
    SiglipSizes { hidden: 768, intermediate: 3072, layers: 12, heads: 12, image: 224, patch: 16 };

/// Fields of `config.json` that are read.
#[derive(Debug)]
struct Config<'a> {
    text: Blocks<'a>,
    vision: Blocks<'a>,
    vocab: usize,
    /// Tokens of a text with its padding.
    length: usize,
    /// Values of a vector.
    width: usize,
    /// Pixels of a patch's side.
    patch: usize,
    /// Patches of a side of the square that has learned positions.
    side: usize,
    /// Images keep their shape.
    naflex: bool,
}

impl<'a> Config<'a> {
    fn read(checkpoint: &'a Checkpoint, precision: Precision) -> Result<Self> {
        let naflex = checkpoint.architecture() == Some("Siglip2Model");
        let (text, vision) =
            (Reader::part(checkpoint, "text_config")?, Reader::part(checkpoint, "vision_config")?);
        vision.only("vision_use_head", &json!(true))?;
        vision.only("num_channels", &json!(3))?;
        let blocks = |part, place| Blocks::read(checkpoint, part, place, &TOWER, precision);
        let of_text = blocks("text_config", "text_model")?;
        let of_vision = blocks("vision_config", "vision_model")?;
        let width = text.size_or("projection_size", of_text.hidden)?;
        if width != of_vision.hidden {
            return Err(text.fault(format!(
                "projection_size is {width}, expected {} values, those of an image's vector",
                of_vision.hidden
            )));
        }
        let patch = vision.size_or("patch_size", TOWER.patch)?;
        let side = if naflex {
            vision.size_or("num_patches", 256)?.isqrt()
        } else {
            vision.size_or("image_size", TOWER.image)? / patch
        };
        if side == 0
            || side * side > MAX_PATCHES
            || (naflex && side * side != vision.size_or("num_patches", 256)?)
        {
            let keys = if naflex { "num_patches" } else { "image_size and patch_size" };
            return Err(vision.fault(format!(
                "{keys}: {side} patches a side, expected a square of at most {MAX_PATCHES} patches"
            )));
        }
        Ok(Self {
            text: of_text,
            vision: of_vision,
            vocab: text.size_or("vocab_size", 32_000)?,
            length: text.size_or("max_position_embeddings", 64)?,
            width,
            patch,
            side,
            naflex,
        })
    }

    /// Patches of the vision graphs, ascending.
    fn patches(&self, options: &RecipeOptions) -> Result<Vec<usize>> {
        let asked = numbers(options, IMAGE_PATCHES.name, 1..=MAX_PATCHES)?;
        match asked {
            Some(_) if !self.naflex => {
                let what = "recipe option image-patches: the checkpoint takes images of one size";
                Err(Error::new(ErrorKind::Usage, what).hint("leave it out"))
            }
            Some(patches) => Ok(patches),
            None if self.naflex => Ok(vec![DEFAULT_PATCHES]),
            None => Ok(vec![self.side * self.side]),
        }
    }
}

/// Texts are as long as their positions.
fn longest(checkpoint: &Checkpoint, _: Task) -> Option<usize> {
    Config::read(checkpoint, Precision::Fp16).ok().map(|config| config.length)
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(|name| vec![name.to_owned()]);
    let config = Config::read(checkpoint, options.precision)?;
    let Config { vocab, length, width, patch, side, naflex, .. } = config;
    if options.shards != 1 {
        let what =
            format!("{} shards, expected 1: each tower stands in one context", options.shards);
        return Err(Error::new(ErrorKind::Usage, what));
    }
    // Of the loss, and buffers of older checkpoints.
    for part in ["logit_scale", "logit_bias"] {
        checkpoint.leave_out(part);
    }
    for tower in ["text_model", "vision_model"] {
        checkpoint.leave_out(&format!("{tower}.embeddings.position_ids"));
    }
    let patches = config.patches(options)?;
    let (mut graphs, mut names) = (Vec::new(), Vec::new());
    for &count in &patches {
        let name = sized("vision", count, patches.len());
        graphs.push(config.vision_graph(&name, count)?);
        names.push(name);
    }
    let text = config.text_graph()?;
    let contexts = vec![
        ContextPlan::new("text".to_owned(), options.precision, vec![text]),
        ContextPlan::new("vision".to_owned(), options.precision, graphs).once(),
    ];
    let mut plan_params = Map::new();
    plan_params.insert("text".to_owned(), json!("text"));
    plan_params.insert("vision".to_owned(), one_or_many(names));
    let mut image = image(checkpoint, &config)?;
    image.insert("patch".to_owned(), json!(patch));
    image.insert("side".to_owned(), json!(side));
    image.insert("naflex".to_owned(), json!(naflex));
    let params = object(json!({
        "hidden": config.text.hidden,
        "vocab": vocab,
        "n_layers": config.text.count,
        "max_ctx": length,
        "width": width,
        "padding": padding(checkpoint, naflex)?,
        "image": image,
    }));
    let mut tables = Vec::new();
    if naflex {
        let name = "vision_model.embeddings.position_embedding.weight";
        let positions = checkpoint.matrix(name, [side * side, config.vision.hidden])?;
        tables.push(matrices(
            "positions",
            vec![MatrixFile::in_f32("vision", "vision_positions", positions)],
        ));
    }
    let embed = checkpoint
        .matrix("text_model.embeddings.token_embedding.weight", [vocab, config.text.hidden])?;
    let texts = TextPipeline::read(checkpoint)?;
    Ok(Recipe::new("siglip", "siglip_embed", contexts, plan_params)
        .embed(embed)
        .params(params)
        .tables(tables)
        .normalizers(texts.normalizers(naflex)))
}

/// `tokenizer.json` and `tokenizer_config.json`; null where there are none.
struct TextPipeline {
    file: Value,
    config: Value,
}

impl TextPipeline {
    fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let read = |name: &str| {
            let path = checkpoint.dir().join(name);
            if path.is_file() { qhx_checkpoint::read_json_value(&path) } else { Ok(Value::Null) }
        };
        Ok(Self { file: read("tokenizer.json")?, config: read("tokenizer_config.json")? })
    }

    /// The tokenizer is one of SigLIP 2: `Siglip2Tokenizer`, or Gemma's as older files name it. SigLIP's is of
    /// SentencePiece's kind Unigram.
    fn second(&self, naflex: bool) -> bool {
        let class = self.config.get("tokenizer_class").and_then(Value::as_str);
        let unigram = || self.file.pointer("/model/type") == Some(&json!("Unigram"));
        naflex || class.map_or_else(|| !unigram(), |class| !class.starts_with("SiglipTokenizer"))
    }

    /// Normalizers for what the tokenizers of `transformers` do to texts in code: `Siglip2Tokenizer` puts `Lowercase`
    /// before the file's own, `SiglipTokenizer.canonicalize_text` takes ASCII punctuation out, too, and leaves single
    /// spaces between words. None where the file has `Lowercase` already.
    fn normalizers(&self, naflex: bool) -> Vec<Value> {
        let own = &self.file["normalizer"];
        let list = own["normalizers"].as_array().map_or(std::slice::from_ref(own), Vec::as_slice);
        let kind = |kind: &str| list.iter().any(|one| one["type"] == kind);
        if self.file.is_null() || kind("Lowercase") {
            return Vec::new();
        }
        let lowercase = json!({"type": "Lowercase"});
        if self.second(naflex) {
            return vec![lowercase];
        }
        let replace = |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"Regex": pattern}, "content": content});
        let keeps_case = self.config.get("do_lower_case") == Some(&json!(false));
        let rest = [
            replace(r"[!-/:-@\[-`{-~]", ""),
            replace(r"\s+", " "),
            json!({"type": "Strip", "strip_left": true, "strip_right": true}),
        ];
        Some(lowercase).filter(|_| !keeps_case).into_iter().chain(rest).collect()
    }
}

/// Padding behind a text, or in front of it: `padding` of `tokenizer.json`, and `tokenizer_config.json`.
fn padding(checkpoint: &Checkpoint, naflex: bool) -> Result<Value> {
    if checkpoint.seed().is_some() {
        return Ok(json!({"token": 0, "left": false}));
    }
    let texts = TextPipeline::read(checkpoint)?;
    let TextPipeline { file, config } = &texts;
    let text = |value: &Value| {
        value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
    };
    let side = config.get("padding_side").and_then(text);
    let side = side.or_else(|| file.pointer("/padding/direction").and_then(text));
    // Where no file says it, the classes of SigLIP 2 fill up in front.
    let left = side.map_or_else(|| texts.second(naflex), |side| side.eq_ignore_ascii_case("left"));
    let named = config.get("pad_token").and_then(text);
    let by_name = |name: &String| {
        let added = file.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
        let of =
            |token: &Value| token.get("content").and_then(Value::as_str) == Some(name.as_str());
        let added = added.clone().find(|token| of(token)).and_then(|token| token.get("id"));
        added.or_else(|| file.pointer("/model/vocab")?.get(name)).and_then(Value::as_u64)
    };
    let token = named.as_ref().and_then(by_name);
    let token = token.or_else(|| file.pointer("/padding/pad_id").and_then(Value::as_u64));
    let Some(token) = token else {
        let what =
            "no pad_token of tokenizer_config.json, and no padding of tokenizer.json, expected one";
        let path = checkpoint.dir().join("tokenizer_config.json");
        return Err(Error::new(ErrorKind::Artifact, format!("{}: {what}", path.display()))
            .hint("texts are padded to one length, and the padding is part of what is learned"));
    };
    Ok(json!({"token": token, "left": left}))
}

/// Conversion of an image to patches: `SiglipImageProcessor`, `Siglip2ImageProcessor`.
fn image(checkpoint: &Checkpoint, config: &Config<'_>) -> Result<Map<String, Value>> {
    let processor = Processor::image(checkpoint)?;
    let pixels = config.side * config.patch;
    processor.only_all([
        ("/do_resize", json!(true)),
        ("/do_rescale", json!(true)),
        ("/do_normalize", json!(true)),
        ("/size/height", json!(pixels)),
        ("/size/width", json!(pixels)),
        ("/patch_size", json!(config.patch)),
    ])?;
    let default = if config.naflex { "bilinear" } else { "bicubic" };
    let [mean, std] = processor.mean_std()?;
    let scale = processor.rescale_factor()?;
    Ok(object(json!({
        "filter": processor.resample()?.unwrap_or(default),
        "mean": mean,
        "std": std,
        "scale": scale,
    })))
}

impl Config<'_> {
    /// `SiglipTextModel`: the last row of a text with its padding, projected.
    fn text_graph(&self) -> Result<Graph> {
        let Self { text, length, width, .. } = *self;
        let mut b = GraphBuilder::new("text");
        let x = b.input("x", Elem::Activation, &[length, text.hidden])?;
        let h = text.positioned(&mut b, x, (0..length as u32).collect())?;
        let h = text.build(&mut b, h, &Attend::whole(length))?;
        b.scope("head");
        let h = b.slice(h, 0, length - 1, length)?;
        let h = text.layers.layer_norm(&mut b, h, &text.tensor("final_layer_norm"))?;
        let y = text.layers.linear(&mut b, h, &text.tensor("head"), width, true)?;
        b.output("y", y)?;
        b.finish()
    }

    /// `SiglipVisionModel`, `Siglip2VisionModel`: an image of `count` patches, or at most as many.
    fn vision_graph(&self, name: &str, count: usize) -> Result<Graph> {
        let Self { vision, patch, naflex, .. } = *self;
        let Blocks { layers, hidden, .. } = vision;
        let mut b = GraphBuilder::new(name);
        let patches = b.input("patches", Elem::Activation, &[count, 3 * patch * patch])?;
        b.scope("embed");
        let part = vision.tensor("embeddings.patch_embedding");
        let name = format!("{part}.weight");
        let weight = match naflex {
            true => layers.checkpoint.matrix(&name, [hidden, 3 * patch * patch]),
            false => layers.checkpoint.rows(&name, &[hidden, 3, patch, patch]),
        };
        let bias = layers.checkpoint.values(&format!("{part}.bias"), &[hidden])?;
        let weight = layers.precision.weight(weight?);
        let x = b.linear("patch_embedding", patches, weight, Some(bias))?;
        let (x, attend) = if naflex {
            let positions = b.input("positions", Elem::Activation, &[count, hidden])?;
            let inputs = AttendInputs { mask_rows: 1, ..AttendInputs::new(0, count, 0) };
            (b.add(x, positions)?, Attend::inputs(&mut b, &inputs)?)
        } else {
            let order = (0..count as u32).collect();
            (vision.positioned(&mut b, x, order)?, Attend::whole(count))
        };
        let h = vision.build(&mut b, x, &attend)?;
        b.scope("head");
        let h = layers.layer_norm(&mut b, h, &vision.tensor("post_layernorm"))?;
        let y = self.pooled(&mut b, h, &attend)?;
        b.output("y", y)?;
        b.finish()
    }

    /// `SiglipMultiheadAttentionPoolingHead`: one learned query over all rows. It is a constant, with its projection.
    fn pooled(&self, b: &mut GraphBuilder, h: TensorId, attend: &Attend) -> Result<TensorId> {
        let Blocks { layers, hidden, heads: Heads { query: heads, dim, .. }, .. } = self.vision;
        let (checkpoint, at) = (layers.checkpoint, self.vision.tensor("head"));
        let weight = format!("{at}.attention.in_proj_weight");
        let joined = checkpoint.matrix(&weight, [3 * hidden, hidden])?;
        let bias = checkpoint.values(&format!("{at}.attention.in_proj_bias"), &[3 * hidden])?;
        let probe = checkpoint.values(&format!("{at}.probe"), &[1, 1, hidden])?;
        let mut row = vec![0.0; hidden];
        let scale = 1.0 / (dim as f64).sqrt();
        let mut query = Vec::with_capacity(hidden);
        for (at, bias) in bias.iter().enumerate().take(hidden) {
            read(&*joined, at, &mut row)?;
            let sum: f64 = row.iter().zip(&probe).map(|(w, p)| f64::from(*w) * f64::from(*p)).sum();
            query.push(((sum + f64::from(*bias)) * scale) as f32);
        }
        let query = b.constant("query", Elem::Activation, &[heads, 1, dim], query)?;
        let project = |b: &mut GraphBuilder, name: &str, place: usize| {
            let range = place * hidden..(place + 1) * hidden;
            let bias = bias[range.clone()].to_vec();
            let weight = layers.precision.weight(row_range(&joined, range));
            let y = b.linear(name, h, weight, Some(bias))?;
            let y = b.reshape(y, &[attend.rows, heads, dim])?;
            b.transpose(y, &[1, 0, 2])
        };
        let [k, v] = [project(b, "k_proj", 1)?, project(b, "v_proj", 2)?];
        let mut scores = b.matmul(query, k, true)?;
        if let Some(mask) = attend.mask {
            let mask = b.reshape(mask, &[1, 1, attend.rows])?;
            scores = b.add(scores, mask)?;
        }
        let weights = b.softmax(scores)?;
        let mixed = b.matmul(weights, v, false)?;
        let mixed = b.reshape(mixed, &[1, hidden])?;
        let out = layers.linear(b, mixed, &format!("{at}.attention.out_proj"), hidden, true)?;
        let normed = layers.layer_norm(b, out, &format!("{at}.layernorm"))?;
        let inner = self.vision.mlp(b, normed, &format!("{at}.mlp"))?;
        b.add(out, inner)
    }
}
