//! PaliGemma (`PaliGemmaForConditionalGeneration`): a SigLIP tower over one square image, a projection, and a Gemma
//! decoder. The prompt, images and text, sees itself as a whole; the answer is causal.
//!
//! Arithmetic: `transformers`, `models/paligemma`; of the decoder `models/gemma2`.
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `vision` | `pixels` → `embeds` | `[patches, 3 · patch²]` → `[patches, hidden]` | an image, see [`Siglip`] |
//! | others | as those of Llama-like models | | |

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use serde_json::json;

use super::llama::decoder_part;
use crate::kit::{
    MAX_MASK, PREFILL_ROWS, Processor, Reader, Siglip, SiglipSizes, VISION_WEIGHTS, tower_names,
    whole_prefill_rows,
};
use crate::recipe::{Recipe, RecipeOptions};
use crate::register_recipe;
use crate::registry::RecipeEntry;

/// `SiglipVisionConfig`, for keys that `vision_config` leaves out.
const TOWER: SiglipSizes =
    SiglipSizes { hidden: 768, intermediate: 3072, layers: 12, heads: 12, image: 224, patch: 16 };
/// Tokens of a text that the widest prefill graph has room for beside an image by default.
const TEXT: usize = 64;
/// Tokens of a text that a prefill graph has to have room for.
const LEAST_TEXT: usize = 4;
/// The prompt of `PaliGemmaProcessor`: all images, BOS, the text, a line end. No template is published.
const TEMPLATE: &str = "{%- for message in messages -%}{%- if message['content'] is not string -%}\
    {%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}{{- '<image>' -}}{%- endif -%}\
    {%- endfor -%}{%- endif -%}{%- endfor -%}{{- bos_token -}}{%- for message in messages -%}\
    {%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}\
    {%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}\
    {%- endfor -%}{%- endif -%}{{- '\\n' -}}{%- endfor -%}";

register_recipe!(
    RecipeEntry::new(&["PaliGemmaForConditionalGeneration"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .default_context(default_context)
        .options(&[VISION_WEIGHTS])
);

/// Tokens of an image, by the sizes of the configuration alone.
fn image_tokens(checkpoint: &Checkpoint) -> Result<usize> {
    let reader = Reader::part(checkpoint, "vision_config")?;
    let (image, patch) = (reader.size_or("image_size", 224)?, reader.size_or("patch_size", 16)?);
    Ok((image / patch).pow(2))
}

/// The longest context in which the mask of the prefill graph that takes a prompt whole is no larger than [`MAX_MASK`].
/// None above twice that graph's tokens, as with images of 448 pixels: answers need some room.
fn default_context(checkpoint: &Checkpoint) -> Option<usize> {
    let rows = image_tokens(checkpoint).ok()? + TEXT;
    let within = (MAX_MASK / 2 / rows).saturating_sub(rows);
    Some(within.max(rows + rows / 2))
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(tower_names);
    // The head is for whole images.
    checkpoint.leave_out("vision_tower.head");
    let tower = Siglip::read(checkpoint, "vision_tower", TOWER, VISION_WEIGHTS.precision(options))?;
    let prefill = prefill_rows(&tower, options)?;
    let options = &RecipeOptions { prefill: Some(prefill), ..options.clone() };
    let mut recipe = decoder_part(checkpoint, options)?;
    "paligemma".clone_into(&mut recipe.family);
    "vision_generate".clone_into(&mut recipe.host_op);
    recipe.chat_template = Some(TEMPLATE);
    let (whole, text) = (Reader::whole(checkpoint), Reader::new(checkpoint));
    let hidden = text.size("hidden_size")?;
    Reader::part(checkpoint, "vision_config")?.only("projection_dim", &json!(hidden))?;
    let vocab = text.size("vocab_size")?;
    let token = whole.token(&["image_token_id", "image_token_index"], 256_000, vocab)?;
    let bos = whole.token(&["bos_token_id", "text_config.bos_token_id"], 2, vocab)?;
    let image = json!({"token": token, "closing": [bos], "prefix": true});
    recipe.params.insert("image".to_owned(), image);
    // The decoder's graph multiplies all of its rows with this factor, and the class those of tokens alone.
    let scale = text.in_model_type((hidden as f64).sqrt() as f32, "bfloat16")?;
    let processor = Processor::image(checkpoint)?;
    for side in ["/size/height", "/size/width"] {
        processor.only(side, &json!(tower.image_size()))?;
    }
    tower.add(&mut recipe, &processor, |b, rows| {
        let name = "multi_modal_projector.linear";
        let projected = tower.layers().exact_linear(b, rows, name, hidden, true)?;
        b.scale(projected, 1.0 / scale)
    })?;
    Ok(recipe)
}

/// The numbers of tokens that prefill graphs take: one of them takes an image and a text whole.
fn prefill_rows(tower: &Siglip<'_>, options: &RecipeOptions) -> Result<Vec<usize>> {
    let tokens = tower.tokens();
    let (all, least) = (tokens + TEXT, tokens + LEAST_TEXT);
    let rows = whole_prefill_rows(options, &[PREFILL_ROWS[0], all], all)?;
    if rows.iter().any(|rows| *rows >= least) {
        return Ok(rows);
    }
    let what = format!(
        "prefill graphs of {rows:?} tokens, expected one of {least} or more: the tokens of a prompt see each other, and \
         one graph takes all of them, {tokens} of an image and those of the text"
    );
    Err(Error::new(ErrorKind::Usage, what)
        .hint(format!("ask for --prefill {all} and a --max-ctx above that")))
}
