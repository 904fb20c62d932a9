//! The options of a recipe, and what it makes of a checkpoint: graphs, tables and the plan that runs them.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
pub use qhx_core::op::Task;
use qhx_graph::graph::{Graph, Origin};
use qhx_graph::progress::Progress;
use qhx_graph::quantize::{BLOCK, Bits, QuantizedForm};
use qhx_graph::weight::{RowSource, Storage, Weight};
use qhx_types::DType;
use serde_json::{Map, Value};

/// Contexts that a device holds at once.
pub const MAX_CONTEXTS: usize = 8;
/// The key of `params` that lists the positions of smaller contexts, as [`RecipeOptions::contexts`] does.
pub(crate) const CONTEXTS: &str = "contexts";

/// Precision of the weights, the highest first. Activations are f16 on the NPU either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Precision {
    /// f16 weights.
    #[default]
    Fp16,
    /// int8 weights with one scale per block of [`BLOCK`] inputs in the decoder.
    W8A16,
    /// 4-bit weights with one scale and one offset per block of [`BLOCK`] inputs in the decoder. Sensitive layers with
    /// few outputs, such as a router, stay f16.
    W4A16,
}

impl Precision {
    /// The name in options and manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp16 => "fp16",
            Self::W8A16 => "w8a16",
            Self::W4A16 => "w4a16",
        }
    }

    /// Ends the name of a context binary.
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Fp16 => "f16",
            Self::W8A16 => "w8",
            Self::W4A16 => "w4",
        }
    }

    /// All of them, the highest first.
    pub const ALL: [Self; 3] = [Self::Fp16, Self::W8A16, Self::W4A16];

    /// Storage of a decoder weight of `rows` outputs and `cols` inputs, if the checkpoint holds floating point.
    ///
    /// The NPU library gives wrong numbers, and no error, for int8 weights whose inputs are not a multiple of 4 (unless
    /// the outputs are few), and for 4-bit weights whose inputs are not a multiple of 8. 4-bit weights whose inputs are
    /// no multiple of [`BLOCK`] have one scale per output channel, or are int8, and int8 weights of such have one; int8
    /// weights that cannot be are f16.
    const fn storage(self, rows: usize, cols: usize) -> Storage {
        match self {
            Self::Fp16 => Storage::Float,
            _ if rows == 0 || cols == 0 => Storage::Float,
            Self::W4A16 if FOUR.fits(cols) => Storage::Blocks(FOUR),
            Self::W4A16 if four(cols).fits(cols) => Storage::Blocks(four(cols)),
            Self::W4A16 | Self::W8A16 if EIGHT.fits(cols) => Storage::Blocks(EIGHT),
            Self::W4A16 | Self::W8A16 if cols.is_multiple_of(Bits::Eight.npu_multiple()) => {
                Storage::Int8
            }
            Self::W4A16 | Self::W8A16 => Storage::Float,
        }
    }

    /// The weight of a linear layer with the rows of `source`: every recipe asks this method how a weight is stored.
    /// Quantized weights that the checkpoint holds stay as they are where the NPU computes them, or in the form that is
    /// nearest to theirs ([`RowSource::nearest_form`]), unless f16 is asked for.
    pub fn weight(self, source: Arc<dyn RowSource>) -> Weight {
        let [rows, cols] = source.shape();
        let stored = source.nearest_form().filter(|form| self != Self::Fp16 && form.fits(cols));
        let storage = match stored {
            // A scale for each output is that of int8, whose scales stay f32.
            Some(form) if form == QuantizedForm::symmetric(Bits::Eight, cols) => Storage::Int8,
            Some(form) => Storage::Blocks(form),
            None => self.storage(rows, cols),
        };
        Weight::new(source, storage)
    }
}

/// 8 bits in blocks, GGUF's Q8_0.
pub(crate) const EIGHT: QuantizedForm = QuantizedForm::symmetric(Bits::Eight, BLOCK);
/// 4 bits in blocks.
const FOUR: QuantizedForm = QuantizedForm { offsets: true, ..four(BLOCK) };

/// 4 bits without offsets.
const fn four(block: usize) -> QuantizedForm {
    QuantizedForm::symmetric(Bits::Four, block)
}

impl std::str::FromStr for Precision {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|p| p.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(" or ");
            Error::new(ErrorKind::Usage, format!("precision {name:?}, expected {names}"))
        })
    }
}

/// Element type of the caches of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Caches {
    /// Values: f16 on the NPU, f32 on the CPU.
    #[default]
    F16,
    /// int8 with a scale for each token and head.
    Int8,
}

/// Numbers that 4-bit weights are multiplied with on the NPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Activations {
    /// f16.
    #[default]
    F16,
    /// 16-bit integers, where the values that were measured allow it.
    Int16,
}

/// The options of a recipe.
#[derive(Debug, Clone, Default)]
pub struct RecipeOptions {
    /// Precision of the decoder's weights.
    pub precision: Precision,
    /// Precision of the head's weight; see [`RecipeOptions::head()`].
    pub head: Option<Precision>,
    /// Number of contexts that the decoder's layers are spread over.
    pub shards: usize,
    /// Positions of the KV cache, or of the text that an encoder takes.
    pub max_ctx: usize,
    /// Task of the bundle.
    pub task: Task,
    /// Tokens that the prefill graphs take at once; the family's own choice if none, and no such
    /// graph for an empty list.
    pub prefill: Option<Vec<usize>>,
    /// No NPU computes the graphs.
    pub cpu_only: bool,
    /// Positions of smaller contexts that have graphs of their own, ascending, each below [`RecipeOptions::max_ctx`]:
    /// see [`crate::kit::steps`].
    pub contexts: Vec<usize>,
    /// Element type of the caches of keys and values.
    pub caches: Caches,
    /// Options that only the family's recipe knows: names and values.
    pub choices: BTreeMap<String, String>,
}

impl RecipeOptions {
    /// Precision of the head's weight: what is asked for, else int8 beside low-bit layers. In f16 the head would be
    /// half of what a step of a small model reads.
    pub fn head(&self) -> Precision {
        self.head.unwrap_or(match self.precision {
            Precision::Fp16 => Precision::Fp16,
            Precision::W8A16 | Precision::W4A16 => Precision::W8A16,
        })
    }

    /// The value of an option that the recipe registers; none where the recipe is applied without it.
    pub fn choice(&self, name: &str) -> Option<&str> {
        self.choices.get(name).map(String::as_str)
    }
}

/// Graphs that share one context, and in it their weights: graphs over the same weights belong into one context.
#[derive(Debug, Clone)]
pub struct ContextPlan {
    /// Key in the manifest, and part of the file's name.
    pub key: String,
    /// Precision of its weights.
    pub precision: Precision,
    /// The graphs.
    pub graphs: Vec<Graph>,
    /// Graphs that do the work of others for several sequences at once. Only context binaries have them: the CPU needs
    /// none.
    pub batches: Vec<Graph>,
    /// Name of a set of contexts without which the bundle works, too; all of the set are there or none.
    pub optional: Option<String>,
    /// The graphs run once for what a prompt holds, such as a clip: they are no part of a step. Graphs without an
    /// input `x` of hidden states never are.
    pub once: bool,
}

impl ContextPlan {
    /// A context that the bundle needs.
    pub const fn new(key: String, precision: Precision, graphs: Vec<Graph>) -> Self {
        Self { key, precision, graphs, batches: Vec::new(), optional: None, once: false }
    }

    /// The same, of graphs that are no part of a step.
    #[must_use]
    pub fn once(self) -> Self {
        Self { once: true, ..self }
    }

    /// All graphs of its context binary.
    pub fn compiled(&self) -> impl Iterator<Item = &Graph> {
        self.graphs.iter().chain(&self.batches)
    }

    /// A context of one graph, of the graph's name and of the lowest precision of its weights.
    pub fn alone(graph: Graph) -> Self {
        let lowest = |storage| match storage {
            Storage::Float => Precision::Fp16,
            Storage::Int8 | Storage::Blocks(QuantizedForm { bits: Bits::Eight, .. }) => {
                Precision::W8A16
            }
            Storage::Blocks(_) => Precision::W4A16,
        };
        let weights = graph.tensors().iter().filter_map(|tensor| match &tensor.origin {
            Origin::Weight(weight) => Some(lowest(weight.storage())),
            _ => None,
        });
        let precision = weights.max().unwrap_or_default();
        Self::new(graph.name().to_owned(), precision, vec![graph])
    }

    /// The weights that are stored in a higher precision than that of the context, because their numbers of inputs
    /// leave no choice: their names in the checkpoint, and how they are stored. Each once.
    pub fn wider_weights(&self) -> Vec<(String, Storage)> {
        let usual = self.precision.storage(1, BLOCK);
        let mut found = Vec::new();
        for tensor in self.graphs.iter().flat_map(Graph::tensors) {
            let Origin::Weight(weight) = &tensor.origin else { continue };
            let storage = self.precision.storage(weight.rows(), weight.cols());
            // int8 with a scale for each output is no wider than int8 in blocks.
            let as_wide = self.precision == Precision::W8A16 && storage == Storage::Int8;
            let wider = storage != usual && !as_wide && weight.storage() == storage;
            let named = (weight.source().name().to_owned(), storage);
            if wider && !found.contains(&named) {
                found.push(named);
            }
        }
        found
    }
}

/// Further files of a bundle, written in one pass over the checkpoint.
#[derive(Debug, Clone)]
pub struct Tables {
    /// Key in the manifest's `artifacts`, an object of field → path.
    pub key: String,
    /// The files, in the order in which the source is given them.
    pub files: Vec<TableFile>,
    /// Source that writes the files.
    pub source: Arc<dyn TableSource>,
}

/// One of the files of [`Tables`].
#[derive(Debug, Clone)]
pub struct TableFile {
    /// Field of the object in the manifest.
    pub field: String,
    /// End of the file's name, after the model's name and `_`.
    pub name: String,
    /// Element type, where the manifest declares it: `{"path": …, "dtype": …}` instead of the path alone.
    pub dtype: Option<DType>,
    /// Values that share a scale, of `i8`.
    pub block: Option<usize>,
}

/// Writes [`Tables`].
pub trait TableSource: Send + Sync + fmt::Debug {
    /// Bytes of all files, for progress.
    fn bytes(&self) -> u64;

    /// Writes all files from their beginnings. Reads the checkpoint matrix by matrix, reports how many bytes
    /// are written.
    ///
    /// # Errors
    /// When a matrix cannot be read or a file not written, and `Cancelled` when `progress` stops it.
    fn write(&self, files: &mut [&mut dyn Write], progress: &mut dyn Progress) -> Result<()>;
}

/// Result of applying a recipe to a checkpoint. [`Recipe::new`] and its setters make one.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Recipe {
    /// `model.family`.
    pub family: String,
    /// `plan.steps[0].host`: the host-op that runs the graphs.
    pub host_op: String,
    /// The contexts, in the order in which a step runs them.
    pub contexts: Vec<ContextPlan>,
    /// The embedding table `[vocab, hidden]`; none for a model whose host-op takes no tokens.
    pub embed: Option<Arc<dyn RowSource>>,
    /// `params` of the manifest, without token ids.
    pub params: Map<String, Value>,
    /// `plan.params`.
    pub plan_params: Map<String, Value>,
    /// Files beside graphs and embedding table.
    pub tables: Vec<Tables>,
    /// The bundle has the checkpoint's tokenizer; not where the model's symbols are those of `params.speech`.
    pub tokenizer: bool,
    /// Normalizers of `tokenizer.json` that the bundle's has before its own: what the model's processor does to texts
    /// in code, and the checkpoint's file does not say.
    pub normalizers: Vec<Value>,
    /// Special tokens that are text of an answer, such as the marks of a document: in the bundle's `tokenizer.json`
    /// they are ordinary ones.
    pub shown_tokens: Vec<String>,
    /// Chat template of the bundle where the checkpoint has none: what the model's processor does in code.
    pub chat_template: Option<&'static str>,
    /// Notes to the user about the bundle, each in one sentence.
    pub notes: Vec<String>,
}

impl Recipe {
    /// A bundle of `family` whose graphs the host-op `host_op` runs. `plan_params` name the graphs.
    pub fn new(
        family: impl Into<String>,
        host_op: impl Into<String>,
        contexts: Vec<ContextPlan>,
        plan_params: Map<String, Value>,
    ) -> Self {
        Self {
            family: family.into(),
            host_op: host_op.into(),
            contexts,
            embed: None,
            params: Map::new(),
            plan_params,
            tables: Vec::new(),
            tokenizer: true,
            normalizers: Vec::new(),
            shown_tokens: Vec::new(),
            chat_template: None,
            notes: Vec::new(),
        }
    }

    /// True where the embedding table has 8 bits, in blocks of [`BLOCK`]: the head is quantized. With one scale a row
    /// the table alone would cost Gemma 3 270M more than its head does.
    pub(crate) fn has_int8_table(&self) -> bool {
        let Some([rows, cols]) = self.embed.as_ref().map(|table| table.shape()) else {
            return false;
        };
        let graphs = self.contexts.iter().flat_map(|context| &context.graphs);
        let mut heads = graphs.flat_map(Graph::weights).filter(|weight| {
            weight.source().shape() == [rows, cols] && weight.storage() != Storage::Float
        });
        heads.next().is_some() && cols.is_multiple_of(BLOCK)
    }

    /// With the embedding table `[vocab, hidden]`.
    #[must_use]
    pub fn embed(self, embed: Arc<dyn RowSource>) -> Self {
        Self { embed: Some(embed), ..self }
    }

    /// With these `params`.
    #[must_use]
    pub fn params(self, params: Map<String, Value>) -> Self {
        Self { params, ..self }
    }

    /// With these files.
    #[must_use]
    pub fn tables(self, tables: Vec<Tables>) -> Self {
        Self { tables, ..self }
    }

    /// Without a tokenizer.
    #[must_use]
    pub fn without_tokenizer(self) -> Self {
        Self { tokenizer: false, ..self }
    }

    /// With these normalizers before those of the checkpoint's tokenizer.
    #[must_use]
    pub fn normalizers(self, normalizers: Vec<Value>) -> Self {
        Self { normalizers, ..self }
    }

    /// With these notes for whoever makes the bundle.
    #[must_use]
    pub fn notes(self, notes: Vec<String>) -> Self {
        Self { notes, ..self }
    }
}

/// An error of the op author's kit, which a recipe computes constants with.
pub(crate) fn from_kit(error: qhx_op::Error) -> Error {
    Error::new(ErrorKind::Prompt, error.message())
}
