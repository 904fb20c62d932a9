//! One recipe per family: from a checkpoint to graphs and the plan that runs them.

mod qwen35;

use std::sync::Arc;

use qhx_core::{Error, ErrorKind, Result};
use serde_json::{Map, Value};

use crate::checkpoint::Checkpoint;
use crate::graph::Graph;
use crate::weight::{RowSource, Storage};

/// Precision of the weights. Activations are f16 on the NPU either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// f16 weights.
    #[default]
    Fp16,
    /// int8 weights with one scale per output channel in the decoder; the head stays f16.
    W8A16,
}

impl Precision {
    /// The name in options and manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp16 => "fp16",
            Self::W8A16 => "w8a16",
        }
    }

    /// Ends the name of a context binary.
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Fp16 => "f16",
            Self::W8A16 => "w8",
        }
    }

    /// How a decoder weight of `rows` outputs and `cols` inputs is stored.
    ///
    /// The NPU library gives wrong numbers, and no error, for int8 weights whose inputs are not a
    /// multiple of 4 (unless the outputs are few); those stay f16.
    pub const fn storage(self, rows: usize, cols: usize) -> Storage {
        match self {
            Self::W8A16 if rows > 0 && cols.is_multiple_of(4) => Storage::Int8,
            _ => Storage::Float,
        }
    }
}

impl std::str::FromStr for Precision {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        [Self::Fp16, Self::W8A16].into_iter().find(|p| p.name() == name).ok_or_else(|| {
            Error::new(ErrorKind::Usage, format!("precision {name:?}, expected fp16 or w8a16"))
        })
    }
}

/// What a recipe is told.
#[derive(Debug, Clone, Copy)]
pub struct RecipeOptions {
    /// Precision of the decoder's weights.
    pub precision: Precision,
    /// Number of contexts that the decoder's layers are spread over.
    pub shards: usize,
    /// Positions of the KV cache.
    pub max_ctx: usize,
}

/// Graphs that share one context.
#[derive(Debug, Clone)]
pub struct ContextPlan {
    /// Key in the manifest, and part of the file's name.
    pub key: String,
    /// Precision of its weights.
    pub precision: Precision,
    /// The graphs.
    pub graphs: Vec<Graph>,
}

/// What a recipe makes of a checkpoint.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// `model.family`.
    pub family: &'static str,
    /// `plan.steps[0].host`: the host-op that runs the graphs.
    pub host_op: &'static str,
    /// The contexts, in the order in which a step runs them.
    pub contexts: Vec<ContextPlan>,
    /// The embedding table `[vocab, hidden]`.
    pub embed: Arc<dyn RowSource>,
    /// `params` of the manifest, without token ids.
    pub params: Map<String, Value>,
    /// `plan.params`.
    pub plan_params: Map<String, Value>,
}

/// Model classes and what makes their graphs.
type Maker = fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>;
const RECIPES: [(&str, Maker); 2] =
    [("Qwen3_5ForCausalLM", qwen35::recipe), ("Qwen3_5ForConditionalGeneration", qwen35::recipe)];

/// Model classes that have a recipe.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    RECIPES.into_iter().map(|(name, _)| name)
}

/// Applies the recipe for the checkpoint's model class.
pub fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let found = checkpoint.architecture().unwrap_or_default();
    let Some((_, make)) = RECIPES.into_iter().find(|(name, _)| *name == found) else {
        return Err(Error::new(
            ErrorKind::Artifact,
            format!(
                "{}: no recipe for architectures[0] = {found:?}; there is one for {}",
                checkpoint.dir().join("config.json").display(),
                architectures().collect::<Vec<_>>().join(", ")
            ),
        )
        .hint("a recipe is a file in forge/src/recipes; see how qwen35 does it"));
    };
    make(checkpoint, options)
}
