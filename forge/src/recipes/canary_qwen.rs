//! Canary-Qwen (NeMo's class `SALM`): FastConformer, whose rows stand in a prompt for audio, and Qwen3's decoder.
//!
//! Arithmetic: NeMo, `speechlm2/models/salm.py` (Chen et al. 2024, arXiv 2310.09424), [`super::fastconformer`] and
//! [`super::qwen3asr`]. An encoder has one graph for each length of window; F frames become F / 8 rows:
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `audio`, or `audio<F>` | `mel` | `[F, mels]` | normalised log-mel frames; anything behind the clip |
//! | | `keep` | `[F, 1]` | 1 for each frame of the clip, 0 behind it |
//! | | → `rows` | `[F / 8, hidden]` | what stands in the prompt |
//! | `decode`, `prefill<P>` | as those of Llama-like models | | |
//! | `lmhead` | `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use serde_json::{Value, json};

use super::fastconformer::{Audio, Defaults, EPS, FastConformer, Sizes, WINDOWS};
use super::qwen3asr::behind_tower;
use crate::kit::{ENCODER_WEIGHTS, Layers, Reader, encoder_precision, sized};
use crate::recipe::{Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::RecipeEntry;

const CLASSES: [&str; 1] = ["NeMoSpeechLMForConditionalGeneration"];
/// The question that the model was trained with.
const PROMPT: &str =
    "<|im_start|>user\nTranscribe the following: {audio}<|im_end|>\n<|im_start|>assistant\n";

register_recipe!(
    RecipeEntry::new(&CLASSES, recipe)
        .tasks(&[Task::Transcribe])
        .prefill_graphs()
        .smaller_contexts()
        .options(&[WINDOWS, ENCODER_WEIGHTS])
);

/// Names of tensors: the decoder's are asked for without their prefix.
fn names(name: &str) -> Vec<String> {
    vec![name.to_owned(), format!("model.{name}")]
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let reader = Reader::new(checkpoint);
    let (hidden, vocab) = (reader.size("hidden_size")?, reader.size("vocab_size")?);
    let defaults = Defaults { layers: 32, mels: 128, scale_input: false };
    let sizes = Sizes::read(&Reader::part(checkpoint, "encoder_config")?, &defaults)?;
    let token = audio_token(checkpoint, vocab)?;
    let checkpoint = &checkpoint.renamed(names);
    let audio = Audio::read(checkpoint, &sizes, options)?;
    let layers = Layers::new(checkpoint, encoder_precision(options).0, EPS);
    let graph = |&frames: &usize| {
        let mut b = GraphBuilder::new(sized("audio", frames, audio.frames.len()));
        let rows = FastConformer { layers, sizes: &sizes, frames }.encode(&mut b)?;
        b.scope("projection");
        let rows = layers.linear(&mut b, rows, "encoder.projection", hidden, true)?;
        b.output("rows", rows)?;
        b.finish()
    };
    let graphs = audio.frames.iter().map(graph).collect::<Result<_>>()?;
    let mut recipe = behind_tower("canary_qwen", graphs, checkpoint, options)?;
    let audio = json!({
        "front_end": audio.front_end,
        "preemphasis": audio.preemphasis,
        "token_id": token,
        "halvings": sizes.halvings,
    });
    recipe.params.insert("audio".to_owned(), audio);
    recipe.params.insert("transcription".to_owned(), json!({"prompt": PROMPT}));
    Ok(recipe)
}

/// The token of a clip, `audio_locator_tag`.
fn audio_token(checkpoint: &Checkpoint, vocab: usize) -> Result<usize> {
    // Of a synthetic model there is no vocabulary.
    if checkpoint.seed().is_some() {
        return Ok(vocab.saturating_sub(1));
    }
    let tokenizer = checkpoint.tokenizer()?;
    let tag = checkpoint.config().get("audio_locator_tag").and_then(Value::as_str);
    let token = tag.and_then(|tag| tokenizer.token_to_id(tag)).map(|token| token as usize);
    token.filter(|token| *token < vocab).ok_or_else(|| {
        let what = format!(
            "{}: the token of audio, audio_locator_tag, is {token:?}, expected one below vocab_size, {vocab}",
            tokenizer.path().display()
        );
        Error::new(ErrorKind::Artifact, what)
            .hint("take tokenizer.json of the decoder that config.json names as pretrained_llm")
    })
}
