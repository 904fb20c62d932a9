//! The vision tower of Qwen3-VL, Qwen3.5, Qwen2.5-VL, Qwen2-VL, PaddleOCR-VL and Mistral 3: graphs, tables of the host,
//! and keys of the manifest.
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `vision`, `vision<N>` | `x` | `[N, vision hidden]` | patches, squares of merged ones together |
//! | | `cos`, `sin` | `[N, head_dim / 2]` | rows and columns of the patches; constants for a fixed size |
//! | | `cmask` | `[1, N]` | hides rows after the last patch; not for a fixed size |
//! | | `windows` | `[N, 1]` | the number of each patch's window, where blocks attend within windows; a constant for a fixed size |
//! | | → `embeds` | `[N / merge², hidden]` | rows in place of the embedding table's |
//! | | → `deepstack_k` | `[N / merge², hidden]` | added after layer k of the decoder, where the tower has such mergers |

mod choices;
mod config;
mod form;
mod tables;
mod tower;

use serde_json::{Value, json};

use crate::kit::one_or_many;
use crate::recipe::{ContextPlan, MAX_CONTEXTS, Recipe, RecipeOptions};
pub(super) use choices::{DEFAULT_SIZE, IMAGE_PATCHES, IMAGE_SIZE};
use config::Patches;
pub(super) use config::{Vision, section};
use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::graph::Graph;
use tower::Tower;

/// The set of contexts that texts alone do without, and the key of what the manifest declares about images.
const VISION: &str = "vision";

/// Puts the vision graphs of a checkpoint before the contexts of `recipe`, with what the host needs for them. Images
/// are stretched to squares of `default` pixels a side when no option sets their size.
pub(super) fn add(
    recipe: &mut Recipe,
    checkpoint: &Checkpoint,
    vision: &Vision,
    options: &RecipeOptions,
    default: usize,
) -> Result<()> {
    let patches = choices::patches(vision, options, default)?;
    let tower = choices::tower(checkpoint, vision, options);
    let graphs = graphs(tower, &patches)?;
    let names = graphs.iter().map(|graph| graph.name().to_owned()).collect();
    let context = ContextPlan::new(VISION.to_owned(), tower.layers.precision, graphs);
    recipe.contexts.insert(0, ContextPlan { optional: Some(VISION.to_owned()), ..context });
    if recipe.contexts.len() > MAX_CONTEXTS {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "the vision graphs and {} shards make {} contexts, expected at most {MAX_CONTEXTS}, which the NPU \
                 holds at once",
                options.shards,
                recipe.contexts.len()
            ),
        )
        .hint("ask for fewer shards"));
    }
    recipe.plan_params.insert(VISION.to_owned(), one_or_many(names));
    recipe.params.extend(vision.tokens.iter().map(|(key, id)| ((*key).to_owned(), json!(id))));
    let params = tables::params(checkpoint, vision, &patches)?;
    recipe.params.insert(VISION.to_owned(), Value::Object(params));
    recipe.tables.push(tables::tables(checkpoint, vision)?);
    Ok(())
}

/// A graph for each number of patches.
fn graphs(tower: Tower<'_>, patches: &[Patches]) -> Result<Vec<Graph>> {
    let graph = |size: &Patches| match *size {
        Patches::Square(_) => tower.graph(VISION, *size),
        Patches::UpTo(count) => tower.graph(&format!("{VISION}{count}"), *size),
    };
    patches.iter().map(graph).collect()
}
