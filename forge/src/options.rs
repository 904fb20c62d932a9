//! Options of a forge: the bundle to make, its folder, and the backends that check it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_core::manifest::Rerank;
use qhx_exec::backend::Backend;

use crate::compile::Compiler;
use crate::f16_range::Fold;
use crate::measured::{Columns, Receipt};
use crate::overrides::Override;
use crate::recipe::{Activations, Caches, ContextPlan, Precision, RecipeOptions, Task};
use crate::registry::{default_context, longest, task};

/// Positions of the KV cache by default: a question with its answer, reasoning included.
pub const DEFAULT_MAX_CTX: usize = 4096;
/// Positions of the text that an encoder takes by default.
pub const DEFAULT_TEXT: usize = 512;
/// Shards are chosen so that no context exceeds its budget.
pub const AUTO_SHARDS: usize = 0;
/// Bytes that one process of the NPU can map, with room for its own needs: devices refuse contexts above about 3.5 GB.
pub const CONTEXT_BUDGET: u64 = 3_300_000_000;

/// Opens a backend. Called when it is needed, so that a missing library is an error only then.
pub type BackendFactory = Box<dyn Fn() -> Result<Arc<dyn Backend>> + Send + Sync>;

/// The two backends that a check compares.
pub struct CheckBackends {
    /// Runs the context binaries.
    pub qnn: BackendFactory,
    /// Runs the ONNX reference graphs.
    pub cpu: BackendFactory,
    /// Seed of the random inputs.
    pub seed: u64,
}

impl std::fmt::Debug for CheckBackends {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CheckBackends").field("seed", &self.seed).finish_non_exhaustive()
    }
}

/// Options of a forge: the bundle to make, and its folder.
#[derive(Debug)]
pub struct ForgeOptions {
    /// The bundle's folder.
    pub out: PathBuf,
    /// Replace `out` when a bundle is there already.
    pub overwrite: bool,
    /// Name of the model, of the manifest and of the files; the checkpoint folder's name if none.
    pub name: Option<String>,
    /// Task of the bundle; if none, see [`crate::registry::task`].
    pub task: Option<Task>,
    /// Precision of the decoder's weights.
    pub precision: Precision,
    /// Precision of the head's weight; none chooses, see [`RecipeOptions::head()`].
    pub head: Option<Precision>,
    /// Number of contexts that the decoder's layers are spread over; [`AUTO_SHARDS`] takes the family's
    /// own number, one for most, or as many more as [`ForgeOptions::context_budget`] asks for.
    pub shards: usize,
    /// Bytes that one context may take on a device, its inputs and outputs included.
    pub context_budget: u64,
    /// Positions of the KV cache, or of the text that an encoder takes; [`DEFAULT_MAX_CTX`] or
    /// [`DEFAULT_TEXT`], or fewer when the model has fewer, if none.
    pub max_ctx: Option<usize>,
    /// Tokens that the prefill graphs take at once; the family's own choice if none, and no such
    /// graph for an empty list.
    pub prefill: Option<Vec<usize>>,
    /// Positions of smaller contexts that get graphs of their own: a token reads as many rows of caches.
    pub contexts: Vec<usize>,
    /// Numbers of sequences that get graphs of a step of their own, in context binaries: see
    /// [`ContextPlan::batches`].
    pub batch: Vec<usize>,
    /// Element type of the caches of keys and values.
    pub caches: Caches,
    /// Numbers that 4-bit weights are multiplied with.
    pub activations: Activations,
    /// Context binaries hold a weight of several graphs once. Such binaries load on devices from v73 on, not in the
    /// emulator. Without, each graph has its own copy.
    pub share_weights: bool,
    /// Options that only the family's recipe knows: names and values.
    pub recipe_options: BTreeMap<String, String>,
    /// Weights in another precision, no lower than [`ForgeOptions::precision`].
    pub weights: Vec<Override>,
    /// Powers of two in weights, which keep what graphs compute within f16, see [`crate::f16_range::measure`].
    pub folds: Vec<Fold>,
    /// Worth of weights' inputs where values are quantized, see [`crate::f16_range::measure`].
    pub columns: Columns,
    /// Cost of the weights to the model's predictions, for the manifest.
    pub receipt: Option<Receipt>,
    /// Tensors of the checkpoint that no graph and no table needs to read: words of their names, as in
    /// [`Override::part`].
    pub ignore_tensors: Vec<String>,
    /// Reranking entry of the manifest: the prompt that asks the model about a document.
    pub rerank: Option<Rerank>,
    /// Makes the context binaries. Without one the bundle runs on the CPU only.
    pub compiler: Option<Arc<dyn Compiler>>,
    /// Write the ONNX reference graphs, which the CPU backend runs, beside context binaries, too. Other bundles always
    /// have them.
    pub onnx: bool,
    /// Make a bundle that is compiled where it runs, see [`crate::prepare`]: as for the NPU, with ONNX graphs instead
    /// of context binaries.
    pub portable: bool,
    /// Compare each compiled graph with its ONNX reference graph.
    pub check: Option<CheckBackends>,
}

impl ForgeOptions {
    /// fp16, as few shards as possible, without a compiler and without a check.
    pub fn new(out: impl Into<PathBuf>) -> Self {
        Self {
            out: out.into(),
            overwrite: false,
            name: None,
            task: None,
            precision: Precision::default(),
            head: None,
            shards: AUTO_SHARDS,
            context_budget: CONTEXT_BUDGET,
            max_ctx: None,
            prefill: None,
            contexts: Vec::new(),
            batch: Vec::new(),
            caches: Caches::default(),
            activations: Activations::default(),
            share_weights: false,
            recipe_options: BTreeMap::new(),
            weights: Vec::new(),
            folds: Vec::new(),
            columns: Columns::new(),
            receipt: None,
            ignore_tensors: Vec::new(),
            rerank: None,
            compiler: None,
            onnx: false,
            portable: false,
            check: None,
        }
    }
}

impl ForgeOptions {
    /// True if the NPU will compute the graphs, now or later.
    pub(crate) fn for_npu(&self) -> bool {
        self.compiler.is_some() || self.portable
    }

    /// True if the bundle has ONNX reference graphs, given that it has context binaries if `compiled`.
    pub(crate) fn has_onnx(&self, compiled: bool) -> bool {
        self.onnx || self.portable || !compiled
    }

    /// True if the graphs of a context hold weights together.
    pub(crate) fn shares(&self, context: &ContextPlan) -> bool {
        self.share_weights && context.compiled().count() > 1
    }

    /// The options of the checkpoint's recipe. Errors when the recipe lacks the task.
    pub(crate) fn for_recipe(&self, checkpoint: &Checkpoint) -> Result<RecipeOptions> {
        let task = task(checkpoint, self.task)?;
        let default = match task {
            Task::Embed | Task::Score => DEFAULT_TEXT,
            _ => default_context(checkpoint).unwrap_or(usize::MAX).min(DEFAULT_MAX_CTX),
        };
        let max_ctx = self.max_ctx.unwrap_or_else(|| {
            longest(checkpoint, task).map_or(default, |longest| longest.min(default))
        });
        Ok(RecipeOptions {
            precision: self.precision,
            head: self.head,
            shards: self.shards,
            max_ctx,
            task,
            prefill: self.prefill.clone(),
            cpu_only: false,
            contexts: self.contexts.clone(),
            caches: self.caches,
            choices: self.recipe_options.clone(),
        })
    }
}
