//! Mistral 3 with images (`Mistral3ForConditionalGeneration`: Mistral Small 3.1 and 3.2, Ministral 3): Pixtral's tower
//! over images of any shape, whose squares of patches are merged and projected, and a Mistral decoder.
//!
//! Arithmetic: `transformers`, `models/mistral3` and `models/pixtral`.
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `vision`, `vision<N>` | see `recipes/vision` | | |
//! | others | as those of Llama-like models | | |
//!
//! In a prompt a text stands behind each row of an image's tokens, and another behind the last one.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::json;

use super::gemma3::TOWERS;
use super::llama::decoder_part;
use super::vision::{self, DEFAULT_SIZE, IMAGE_PATCHES, IMAGE_SIZE, Vision};
use crate::kit::{Reader, VISION_WEIGHTS, prefill_rows, tower_names};
use crate::recipe::{Recipe, RecipeOptions};
use crate::register_recipe;
use crate::registry::RecipeEntry;

/// Tokens that prefill graphs take by default: the end of a prompt, and an image.
const PREFILL: [usize; 2] = [16, 256];

register_recipe!(
    RecipeEntry::new(&["Mistral3ForConditionalGeneration"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .int8_caches()
        .options(&[TOWERS, IMAGE_SIZE, IMAGE_PATCHES, VISION_WEIGHTS])
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(tower_names);
    if TOWERS.choice(options) == Some("none") {
        for tower in ["vision_tower", "multi_modal_projector"] {
            checkpoint.leave_out(tower);
        }
        return decoder_part(checkpoint, options);
    }
    let hidden = Reader::new(checkpoint).size("hidden_size")?;
    let tower = Vision::of_pixtral(checkpoint, hidden)?;
    let prefill = Some(prefill_rows(options, &PREFILL)?);
    let options = &RecipeOptions { prefill, ..options.clone() };
    let mut recipe = decoder_part(checkpoint, options)?;
    "mistral3".clone_into(&mut recipe.family);
    "vision_generate".clone_into(&mut recipe.host_op);
    let whole = Reader::whole(checkpoint);
    let vocab = Reader::new(checkpoint).size("vocab_size")?;
    let token = whole.token(&["image_token_index", "image_token_id"], 10, vocab)?;
    let image = json!({"token": token, "row": "[IMG_BREAK]", "last": "[IMG_END]"});
    recipe.params.insert("image".to_owned(), image);
    let side = tower.side_within(DEFAULT_SIZE, options.max_ctx);
    vision::add(&mut recipe, checkpoint, &tower, options, side)?;
    Ok(recipe)
}
