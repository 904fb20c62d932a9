//! One recipe per family: from a checkpoint to graphs and the plan that runs them.

mod llama;
mod phimoe;
mod qwen35;

use qhx_core::{Error, ErrorKind, Result};
use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::recipe::{Recipe, RecipeOptions, Task};

/// A model class and what makes its graphs.
struct Entry {
    class: &'static str,
    make: fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>,
    tasks: &'static [Task],
    /// Has graphs that take several tokens of a prompt.
    prefills: bool,
}

const QWEN35: Entry =
    Entry { class: "", make: qwen35::recipe, tasks: &[Task::Generate], prefills: false };
const DECODER: Entry =
    Entry { class: "", make: llama::recipe, tasks: &[Task::Generate, Task::Embed], prefills: true };
const ENCODER: Entry = Entry { tasks: &[Task::Embed], ..DECODER };

const PHIMOE: Entry =
    Entry { class: "", make: phimoe::recipe, tasks: &[Task::Generate], prefills: true };

const RECIPES: [Entry; 14] = [
    Entry { class: "Qwen3_5ForCausalLM", ..QWEN35 },
    Entry { class: "Qwen3_5ForConditionalGeneration", ..QWEN35 },
    Entry { class: "PhimoeForCausalLM", ..PHIMOE },
    Entry { class: "PhiMoEForCausalLM", ..PHIMOE },
    Entry { class: "LlamaForCausalLM", ..DECODER },
    Entry { class: "MistralForCausalLM", ..DECODER },
    Entry { class: "Qwen2ForCausalLM", ..DECODER },
    Entry { class: "Qwen3ForCausalLM", ..DECODER },
    Entry { class: "LlamaModel", ..ENCODER },
    Entry { class: "MistralModel", ..ENCODER },
    Entry { class: "Qwen2Model", ..ENCODER },
    Entry { class: "Qwen3Model", ..ENCODER },
    Entry { class: "MistralBiDirectionalModel", ..ENCODER },
    Entry { class: "LlamaBidirectionalModel", ..ENCODER },
];

/// Model classes that have a recipe.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    RECIPES.into_iter().map(|entry| entry.class)
}

/// Applies the recipe for the checkpoint's model class.
pub fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let found = checkpoint.architecture().unwrap_or_default();
    let Some(entry) = RECIPES.into_iter().find(|entry| entry.class == found) else {
        return Err(Error::new(
            ErrorKind::Artifact,
            format!(
                "{}: no recipe for architectures[0] = {found:?}; there is one for {}",
                checkpoint.config_path().display(),
                architectures().collect::<Vec<_>>().join(", ")
            ),
        )
        .hint(
            "a class of your own needs a recipe and a host-op, and no change to qhx: \
             docs/adding-a-family.md has the steps, examples/lfm2 is one",
        ));
    };
    if !entry.tasks.contains(&options.task) {
        let tasks: Vec<_> = entry.tasks.iter().map(|task| task.name()).collect();
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "{}: a {found} has no recipe for the task {}",
                checkpoint.dir().display(),
                options.task.name()
            ),
        )
        .hint(format!("ask for the task {}", tasks.join(" or "))));
    }
    if options.prefill.as_ref().is_some_and(|rows| !rows.is_empty()) && !entry.prefills {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "prompt graphs are asked for, but a {found} consumes its prompt token by token"
            ),
        )
        .hint("omit the option"));
    }
    (entry.make)(checkpoint, options)
}

/// The longest context that a checkpoint's recipe makes for a task; none without a limit.
pub(crate) fn longest(checkpoint: &Checkpoint, task: Task) -> Option<usize> {
    let positions = checkpoint
        .text_config()
        .get("max_position_embeddings")
        .and_then(Value::as_u64)
        .and_then(|n| usize::try_from(n).ok());
    let class = checkpoint.architecture().unwrap_or_default();
    let plain = RECIPES.iter().any(|entry| entry.class == class && entry.prefills);
    // What cannot be read is reported when the recipe reads it.
    let own = if plain { llama::longest(checkpoint, task).ok().flatten() } else { None };
    positions.into_iter().chain(own).min()
}
