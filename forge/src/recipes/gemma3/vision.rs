//! The vision tower: SigLIP, average pooling, a norm and a projection (`Gemma3MultiModalProjector`).

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::weight::{Storage, Weight, transposed};
use serde_json::{Value, json};

use crate::kit::{
    Layers, MAX_MASK, PREFILL_ROWS, Processor, Reader, Siglip, SiglipSizes, VISION_WEIGHTS,
    whole_prefill_rows,
};
use crate::recipe::{Recipe, RecipeOptions};
use crate::registry::RecipeOption;

/// Option that makes the tower a graph, or leaves it out.
pub(crate) const TOWERS: RecipeOption = RecipeOption {
    name: "towers",
    values: &["all", "none"],
    help: "none leaves the tower for images out: the bundle takes text only, and needs no wide prefill graph",
};

/// `SiglipVisionConfig`, for keys that `vision_config` leaves out.
const TOWER: SiglipSizes =
    SiglipSizes { hidden: 768, intermediate: 3072, layers: 12, heads: 12, image: 224, patch: 16 };

/// `vocab_size` of the configuration class.
const VOCAB: usize = 262_208;
/// `mm_tokens_per_image` of the configuration class.
const IMAGE_TOKENS: usize = 256;

/// The longest context in which the mask of the prefill graph that takes an image whole is no larger than [`MAX_MASK`].
pub(super) fn default_context(checkpoint: &Checkpoint) -> Option<usize> {
    checkpoint.config().get("vision_config").filter(|vision| vision.is_object())?;
    let tokens = Reader::whole(checkpoint).size_or("mm_tokens_per_image", IMAGE_TOKENS).ok()?;
    (MAX_MASK / 2 / tokens).checked_sub(tokens).filter(|positions| *positions > tokens)
}

/// The tower of a checkpoint.
pub(super) struct Vision<'a> {
    checkpoint: &'a Checkpoint,
    tower: Siglip<'a>,
    processor: Processor,
}

impl<'a> Vision<'a> {
    /// None of a checkpoint without a tower, and where the bundle is to do without.
    pub fn read(checkpoint: &'a Checkpoint, options: &RecipeOptions) -> Result<Option<Self>> {
        // The head is for whole images.
        checkpoint.leave_out("vision_tower.head");
        let there = checkpoint.config().get("vision_config").is_some_and(Value::is_object);
        if !there || TOWERS.choice(options) == Some("none") {
            checkpoint.leave_out("vision_tower");
            checkpoint.leave_out("multi_modal_projector");
            return Ok(None);
        }
        let precision = VISION_WEIGHTS.precision(options);
        let tower = Siglip::read(checkpoint, "vision_tower", TOWER, precision)?;
        let whole = Reader::whole(checkpoint);
        let tokens = whole.size_or("mm_tokens_per_image", IMAGE_TOKENS)?;
        let (side, patches) = (tokens.isqrt(), tower.grid().rows);
        if side * side != tokens || !patches.is_multiple_of(side) {
            return Err(whole.fault(format!(
                "mm_tokens_per_image is {tokens}, expected the square of a divisor of {patches}, the patches of a side"
            )));
        }
        let processor = Processor::image(checkpoint)?;
        if processor.get("/do_pan_and_scan") == Some(&json!(true)) {
            return Err(processor.bad("/do_pan_and_scan", "false").hint(
                "images are not cut into crops (pan and scan): set it to false, and each image is seen whole",
            ));
        }
        for side in ["/size/height", "/size/width"] {
            processor.only(side, &json!(tower.image_size()))?;
        }
        Ok(Some(Self { checkpoint, tower: tower.in_blocks(patches / side)?, processor }))
    }

    /// The numbers of tokens that prefill graphs take: one of them takes an image whole, since its tokens see each
    /// other.
    pub fn prefill_rows(&self, options: &RecipeOptions) -> Result<Vec<usize>> {
        let tokens = self.tower.tokens();
        let rows = whole_prefill_rows(options, &[PREFILL_ROWS[0], tokens], tokens)?;
        if rows.iter().any(|rows| *rows >= tokens) {
            return Ok(rows);
        }
        let what = format!(
            "prefill graphs of {rows:?} tokens, expected one of {tokens} or more: the tokens of an image see each other, \
             and one graph takes them all"
        );
        Err(Error::new(ErrorKind::Usage, what).hint(format!(
            "ask for --prefill {tokens} and a --max-ctx above that, or for text alone by --recipe-option towers=none"
        )))
    }

    /// Adds the graph, and the tokens around an image.
    pub fn add(&self, recipe: &mut Recipe, hidden: usize) -> Result<()> {
        let whole = Reader::whole(self.checkpoint);
        let vocab = Reader::new(self.checkpoint).size_or("vocab_size", VOCAB)?;
        // The second spelling is that of published checkpoints.
        let id = |keys: [&str; 2], default: u64| whole.token(&keys, default, vocab);
        let begin = id(["boi_token_id", "boi_token_index"], 255_999)?;
        let end = id(["eoi_token_id", "eoi_token_index"], 256_000)?;
        // `Gemma3Processor`: empty lines around the tokens of an image.
        recipe.params.insert(
            "image".to_owned(),
            json!({
                "token": id(["image_token_id", "image_token_index"], 262_144)?,
                "marker": begin,
                "before": ["\n\n", begin],
                "after": [end, "\n\n"],
                "together": true,
            }),
        );
        let projector = "multi_modal_projector.mm_input_projection_weight";
        let projector = self.checkpoint.matrix(projector, [self.tower.hidden(), hidden])?;
        let layers = Layers { norm_offset: 1.0, ..self.tower.layers() };
        self.tower.add(recipe, &self.processor, |b, rows| {
            let pooled = self.tower.pooled(b, rows)?;
            let normed = layers.norm(b, pooled, "multi_modal_projector.mm_soft_emb_norm")?;
            b.linear("projector", normed, Weight::new(transposed(projector), Storage::Float), None)
        })
    }
}
