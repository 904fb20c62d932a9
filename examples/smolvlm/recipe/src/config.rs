//! The keys of `config.json` that shape the graphs, checked.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_forge::kit::{Heads, Processor, Reader, Siglip, SiglipSizes, added_tokens};
use qhx_forge::recipe::Precision;
use serde_json::{Map, Value, json};

/// The tower where `vision_config` leaves keys out (`Idefics3VisionConfig`, `SmolVLMVisionConfig`).
const TOWER: SiglipSizes =
    SiglipSizes { hidden: 1152, intermediate: 3072, layers: 12, heads: 16, image: 224, patch: 32 };

/// Sizes and constants of the decoder, a Llama.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    pub hidden: usize,
    pub vocab: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: Heads,
    pub rope_theta: f64,
    pub bias: bool,
    pub mlp_bias: bool,
    pub eps: f32,
    pub tied: bool,
    pub max_positions: usize,
    /// The token that stands at each position of a tile.
    pub image_token: usize,
}

impl Config {
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        reader.only("hidden_act", &json!("silu"))?;
        reader.only("qk_layer_norms", &json!(false))?;
        let hidden = reader.size("hidden_size")?;
        let vocab = reader.size("vocab_size")?;
        let image_token = Reader::whole(checkpoint).size("image_token_id")?;
        if image_token >= vocab {
            return Err(reader.fault(format!(
                "image_token_id is {image_token}, expected less than vocab_size {vocab}"
            )));
        }
        Ok(Self {
            hidden,
            vocab,
            intermediate: reader.size("intermediate_size")?,
            layers: reader.layers()?,
            heads: reader.heads(hidden, None, None)?,
            rope_theta: reader.rope_theta(1e4)?,
            bias: reader.flag("attention_bias")?,
            mlp_bias: reader.flag("mlp_bias")?,
            eps: reader.epsilon(&["rms_norm_eps"], 1e-6)?,
            tied: reader.tied(false)?,
            max_positions: reader.size_or("max_position_embeddings", 2048)?,
            image_token,
        })
    }
}

/// The tower, in blocks of `scale_factor` by `scale_factor` patches.
pub(crate) fn tower(checkpoint: &Checkpoint, precision: Precision) -> Result<Siglip<'_>> {
    let scale = Reader::whole(checkpoint).size_or("scale_factor", 2)?;
    Siglip::read(checkpoint, "vision_model", TOWER, precision)?.in_blocks(scale)
}

/// `Idefics3Processor`: the texts around tiles. `token` stands at each position of a tile, and in the place of an image.
pub(crate) fn prompts(token: usize) -> Value {
    json!({
        "token": token,
        "tile": "<fake_token_around_image><row_{row}_col_{column}>",
        "line": "\n",
        "thumbnail": "\n<fake_token_around_image><global-img>",
        "single": "<fake_token_around_image><global-img>",
        "after": ["<fake_token_around_image>"],
    })
}

/// The special tokens that are text of an answer: where there is `<doctag>` (Granite-Docling, SmolDocling), all but those
/// of conversations and images.
pub(crate) fn marks(checkpoint: &Checkpoint) -> Result<Vec<String>> {
    const OTHERS: [&str; 6] =
        ["<|", "<image>", "<fake_token", "<global-img>", "<row_", "<end_of_utterance>"];
    let mut tokens: Vec<_> = added_tokens(checkpoint)?.into_iter().map(|(text, _)| text).collect();
    if !tokens.iter().any(|text| text == "<doctag>") {
        return Ok(Vec::new());
    }
    tokens.retain(|text| !OTHERS.iter().any(|other| text.starts_with(other)));
    Ok(tokens)
}

/// Parameters with which the host cuts an image into tiles: the keys of `Idefics3ImageProcessor` and
/// `SmolVLMImageProcessor`, with the defaults of the classes.
pub(crate) fn tiling(processor: &Processor, tower: &Siglip<'_>) -> Result<Map<String, Value>> {
    let side = tower.image_size() as u64;
    let edge = |key: &str, default: u64| match processor.get(key) {
        None => Ok(default),
        Some(value) => value
            .as_u64()
            .filter(|edge| (1..=1 << 14).contains(edge))
            .ok_or_else(|| processor.bad(key, "a number of pixels up to 16384")),
    };
    // Positions of a tile of another size would be others.
    let tile = "/max_image_size/longest_edge";
    if edge(tile, side)? != side {
        return Err(processor.bad(tile, &format!("{side}, the tower's image_size")));
    }
    let split = match processor.get("/do_image_splitting") {
        None => true,
        Some(value) => {
            value.as_bool().ok_or_else(|| processor.bad("/do_image_splitting", "true or false"))?
        }
    };
    Ok(qhx_forge::kit::object(json!({
        "rule": "longest_edge",
        "longest_edge": edge("/size/longest_edge", 4 * side)?,
        "split": split,
    })))
}
