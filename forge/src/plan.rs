//! Contents of a bundle and the cost of making it, before it is made.
//!
//! Sizes follow from the graphs; memory and time from figures measured with QAIRT 2.51 on two x86-64
//! cores (docs/performance.md), so that they distinguish minutes from hours, and not one minute from two.

use std::collections::BTreeMap;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::{Checkpoint, summary};
use qhx_graph::graph::{Elem, Graph};
use qhx_graph::weight::Weight;
use qhx_types::DType;

use crate::f16_range::rescale;
use crate::kit::table_bytes;
use crate::measured;
use crate::options::{AUTO_SHARDS, ForgeOptions};
use crate::recipe::{
    Activations, ContextPlan, MAX_CONTEXTS, Precision, Recipe, RecipeOptions, Task,
};
use crate::registry::{min_shards, task};
use crate::{batches, chain, names, overrides};

/// More shards than any model has layers.
const MAX_SHARDS: usize = 4096;
/// Bytes of a binary for each node, and weights for each byte beside them: ops, as the compiler splits them
/// up, and what it keeps of a weight for each part that it loads.
const NODE_BYTES: u64 = 4_000;
const WEIGHTS_PER_BYTE: u64 = 300;
/// Memory that a compilation takes, as a multiple of the weights, and apart from them.
const PEAK_FACTOR: f64 = 4.5;
const PEAK_BASE: u64 = 250 << 20;
/// Memory of which a compilation takes no more where more shards help.
const COMPILE_MEMORY: u64 = 16_000_000_000;
/// Bytes of weights per second.
const COMPILE_RATE: f64 = 15e6;
const WRITE_RATE: f64 = 80e6;

/// Expected sizes of one context of a bundle.
#[derive(Debug, Clone, PartialEq)]
pub struct ContextSizes {
    /// Key in the manifest.
    pub key: String,
    /// Names of its graphs.
    pub graphs: Vec<String>,
    /// Precision of its weights.
    pub precision: Precision,
    /// Bytes of weights as they are stored in the context binary.
    pub weight_bytes: u64,
    /// Bytes of the weights of all graphs, each with a copy of its own: the compiler holds them so, shared or not.
    pub compiled_bytes: u64,
    /// Expected bytes of the context binary.
    pub binary_bytes: u64,
    /// Bytes of inputs and outputs, which a device holds beside the binary.
    pub io_bytes: u64,
    /// Expected bytes of the ONNX reference graphs; 0 without.
    pub onnx_bytes: u64,
}

impl ContextSizes {
    /// Bytes of the budget that the context takes.
    pub fn device_bytes(&self) -> u64 {
        self.binary_bytes.saturating_add(self.io_bytes)
    }
}

/// Contents of a planned bundle.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Model family.
    pub family: String,
    /// Task of the bundle.
    pub task: Task,
    /// Precision of the decoder's weights.
    pub precision: Precision,
    /// Contexts that the layers are spread over.
    pub shards: usize,
    /// Positions of the KV cache, or of the texts of an encoder.
    pub max_ctx: usize,
    /// The contexts.
    pub contexts: Vec<ContextSizes>,
    /// Bytes of the embedding table.
    pub embed_bytes: u64,
    /// Element type of the embedding table.
    pub embed_dtype: DType,
    /// The other tables: their keys in the manifest, and their bytes.
    pub tables: Vec<(String, u64)>,
    /// True if context binaries are made.
    pub compiled: bool,
    /// Context binaries hold a weight of several graphs once.
    pub shared: bool,
    /// Largest size of a context.
    pub budget: u64,
    /// Tensors of the checkpoint that the bundle does without.
    pub left_out: Vec<String>,
    /// The recipe's notes.
    pub recipe_notes: Vec<String>,
    /// Options that were given, which no hint suggests.
    given: Given,
}

/// Options that were given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Given {
    no_prefill: bool,
    shards: bool,
}

impl Plan {
    /// Expected bytes of the bundle, without the tokenizer.
    pub fn bytes(&self) -> u64 {
        let binary = |c: &ContextSizes| if self.compiled { c.binary_bytes } else { 0 };
        let contexts = self.contexts.iter().flat_map(|c| [c.onnx_bytes, binary(c)]);
        let tables = self.tables.iter().map(|(_, bytes)| *bytes);
        total(contexts.chain(tables).chain([self.embed_bytes]))
    }

    /// Expected peak of the memory while the bundle is made.
    pub fn peak_bytes(&self) -> u64 {
        let weights = self.contexts.iter().map(|c| c.compiled_bytes).max().unwrap_or(0) as f64;
        // Without a compiler, some buffers.
        let factor = if self.compiled { PEAK_FACTOR } else { 0.0 };
        PEAK_BASE.saturating_add((weights * factor) as u64)
    }

    /// Way to lower the [peak](Self::peak_bytes), besides closing programs.
    pub fn lower_peak(&self) -> Option<&'static str> {
        (self.compiled && !self.given.shards).then_some("give more --shards")
    }

    /// Warning about running such a bundle, in one sentence; none as a rule.
    pub fn warning(&self) -> Option<String> {
        (self.compiled && self.contexts.len() > MAX_CONTEXTS).then(|| {
            let Given { no_prefill, shards } = self.given;
            let ways = [
                (shards, "fewer shards"),
                (!shards && self.precision == Precision::Fp16, "w8a16"),
                (!shards && self.precision != Precision::W4A16, "w4a16"),
                (!shards && !self.shared && !no_prefill, "no graphs for prompts (--prefill 0)"),
            ];
            let ways: Vec<_> = ways.iter().filter(|(open, _)| *open).map(|(_, way)| *way).collect();
            let fewer = match ways.as_slice() {
                [] => String::new(),
                ways => format!("{} make fewer of them, and ", ways.join(" or ")),
            };
            format!(
                "{} contexts are more than the {MAX_CONTEXTS} that a device holds at once: {fewer}--max-contexts loads \
                 them in turn",
                self.contexts.len()
            )
        })
    }

    /// The recipe's notes, and which tensors of the checkpoint the bundle does without, each in one sentence.
    pub fn notes(&self) -> Vec<String> {
        let count = self.left_out.len();
        let left_out = (count > 0).then(|| {
            format!("{count} tensors of the checkpoint are left out: {}", summary(&self.left_out))
        });
        self.recipe_notes.iter().cloned().chain(left_out).collect()
    }

    /// Expected seconds on two cores.
    pub fn seconds(&self) -> f64 {
        let weights = total(self.contexts.iter().map(|c| c.compiled_bytes));
        let compile = if self.compiled { weights as f64 / COMPILE_RATE } else { 0.0 };
        compile + self.bytes() as f64 / WRITE_RATE
    }
}

/// Plans a bundle, with context binaries if `compiled`, and chooses the number of shards where
/// [`ForgeOptions::shards`] is [`AUTO_SHARDS`].
///
/// # Errors
/// When two graphs, contexts or tables of the recipe have one name, when graphs that run one after the other do not
/// fit, when neither graphs nor tables read a tensor of the checkpoint that the recipe does not leave out, and with the
/// numbers when a context would exceed the budget whatever the number of shards, or with the number that is asked for.
pub fn plan(
    checkpoint: &Checkpoint,
    recipe: impl Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>,
    options: &ForgeOptions,
    compiled: bool,
) -> Result<(Plan, Recipe)> {
    let recipe = |checkpoint: &Checkpoint, wanted: &RecipeOptions| -> Result<Recipe> {
        let mut made =
            overrides::apply(|wanted| recipe(checkpoint, wanted), wanted, &options.weights)?;
        // Folds change the range of values.
        let folded = !options.folds.is_empty();
        let activations = if folded { Activations::F16 } else { options.activations };
        measured::weigh(&mut made, &options.columns, activations);
        rescale::apply(&mut made, &options.folds)?;
        if compiled {
            batches::add(&mut made, &options.batch)?;
        }
        Ok(made)
    };
    let mut wanted = RecipeOptions { cpu_only: !compiled, ..options.for_recipe(checkpoint)? };
    let checkpoint = &checkpoint.unused();
    let automatic = wanted.shards == AUTO_SHARDS;
    if automatic {
        wanted.shards = min_shards(checkpoint);
    }
    let mut built = recipe(checkpoint, &wanted)?;
    check(&built)?;
    let sizes = |recipe: &Recipe, wanted: &RecipeOptions| sizes(recipe, options, wanted, compiled);
    let mut plan = sizes(&built, &wanted);
    while let Some(worst) = over_budget(&plan) {
        if !automatic {
            return Err(too_large(&plan, worst, &suggestion(&plan, worst)));
        }
        // As many as would do if layers could be split anywhere, and at least one more.
        let ratio = worst.device_bytes().div_ceil(plan.budget.max(1));
        let more = usize::try_from(ratio).unwrap_or(MAX_SHARDS).saturating_mul(plan.shards);
        let next = RecipeOptions { shards: more.max(plan.shards + 1), ..wanted.clone() };
        // A recipe refuses more shards than there are layers, or more contexts than a device holds.
        let finer = match recipe(checkpoint, &next) {
            Ok(finer) => finer,
            Err(why) => {
                let layers = checkpoint.text_config().get("num_hidden_layers");
                let layers = layers.and_then(serde_json::Value::as_u64);
                let whole = layers.is_some_and(|layers| next.shards as u64 > layers);
                return Err(too_large(&plan, worst, if whole { WHOLE } else { why.message() }));
            }
        };
        check(&finer)?;
        let smaller = sizes(&finer, &next);
        if over_budget(&smaller).is_some_and(|c| c.device_bytes() >= worst.device_bytes()) {
            return Err(too_large(&plan, worst, WHOLE));
        }
        (plan, built) = (smaller, finer);
    }
    while automatic && plan.compiled && plan.peak_bytes() > COMPILE_MEMORY {
        let ratio = plan.peak_bytes().div_ceil(COMPILE_MEMORY) as usize;
        let most = plan.shards.saturating_add(MAX_CONTEXTS.saturating_sub(plan.contexts.len()));
        let shards = plan.shards.saturating_mul(ratio).min(most);
        let next = RecipeOptions { shards, ..wanted.clone() };
        let Ok(finer) = recipe(checkpoint, &next) else { break };
        let smaller = sizes(&finer, &next);
        let fits = smaller.contexts.len() <= MAX_CONTEXTS && check(&finer).is_ok();
        if !fits || smaller.peak_bytes() >= plan.peak_bytes() {
            break;
        }
        (plan, built) = (smaller, finer);
    }
    if options.task.is_none() && plan.task == Task::Embed && makes(checkpoint, Task::Generate) {
        plan.recipe_notes.push(VECTORS.to_owned());
    }
    plan.left_out = checkpoint.check_unread(&options.ignore_tensors)?;
    Ok((plan, built))
}

/// Said where a model that could generate makes vectors, and nobody asked for them.
const VECTORS: &str = "the bundle makes vectors, since the checkpoint says how texts are pooled; --task generate makes \
     one that writes";

fn makes(checkpoint: &Checkpoint, wanted: Task) -> bool {
    task(checkpoint, Some(wanted)).is_ok()
}

/// Checks the graphs of a recipe against each other.
fn check(recipe: &Recipe) -> Result<()> {
    names::check(recipe)?;
    chain::check(recipe)
}

/// The largest context that a device could not map. A CPU has no such limit.
fn over_budget(plan: &Plan) -> Option<&ContextSizes> {
    if !plan.compiled {
        return None;
    }
    let over = plan.contexts.iter().filter(|c| c.device_bytes() > plan.budget);
    over.max_by_key(|c| c.device_bytes())
}

/// Hint for a context whose size does not depend on the number of shards.
const WHOLE: &str = "it cannot be split further";

/// Hint with the number of shards that would do, for a context that is one of several.
fn suggestion(plan: &Plan, context: &ContextSizes) -> String {
    if is_head(context) {
        return WHOLE.to_owned();
    }
    let ratio = context.device_bytes().div_ceil(plan.budget.max(1));
    let shards = usize::try_from(ratio).unwrap_or(MAX_SHARDS).saturating_mul(plan.shards.max(1));
    format!("spread the layers over {shards} shards")
}

fn is_head(context: &ContextSizes) -> bool {
    context.key.starts_with("lmhead")
}

/// The error of a context beyond the budget, with what can be done about its shards, and what else would make it
/// smaller.
fn too_large(plan: &Plan, context: &ContextSizes, shards: &str) -> Error {
    let error = Error::new(
        ErrorKind::Usage,
        format!(
            "context {:?} would take {} bytes on the device ({} of weights, {} of inputs and \
             outputs) with {} shards, more than the {} that one process of the NPU can map",
            context.key,
            context.device_bytes(),
            context.weight_bytes,
            context.io_bytes,
            plan.shards,
            plan.budget
        ),
    );
    let lower = match (is_head(context), plan.precision, context.precision) {
        (true, _, Precision::Fp16) => "--head w8a16 halves it",
        (true, _, Precision::W8A16) => "--head w4a16 halves it once more",
        (true, ..) => "a smaller vocabulary would do",
        (_, asked, Precision::Fp16) if asked != Precision::Fp16 => {
            "its weights have a --recipe-option of their own, and a shorter context makes its caches smaller"
        }
        (_, Precision::Fp16, _) => "w8a16 halves the layers, a shorter context the caches",
        (_, Precision::W8A16, _) => {
            "w4a16 halves the layers once more, a shorter context the caches"
        }
        (_, Precision::W4A16, _) => "a shorter context may do",
    };
    let own = plan.precision != Precision::Fp16 && context.precision == Precision::Fp16;
    let prefill = if plan.shared || plan.given.no_prefill || own || is_head(context) {
        ""
    } else {
        "; --prefill 0 leaves out graphs for prompts, which have weights of their own"
    };
    error.hint(format!(
        "{shards}; {lower}{prefill}; `qhx forge plan` tries options without making anything"
    ))
}

fn sizes(recipe: &Recipe, options: &ForgeOptions, wanted: &RecipeOptions, compiled: bool) -> Plan {
    let onnx = options.has_onnx(compiled);
    let embed_dtype = match &recipe.embed {
        _ if recipe.has_int8_table() => DType::I8,
        Some(table) if onnx && table.stored_dtype() == DType::F32 => DType::F32,
        _ => DType::F16,
    };
    let embed_bytes =
        recipe.embed.as_ref().map_or(0, |table| table_bytes(table.shape(), embed_dtype));
    let context_sizes = |context| context_sizes(context, options.share_weights, onnx);
    Plan {
        family: recipe.family.clone(),
        task: wanted.task,
        precision: wanted.precision,
        shards: wanted.shards,
        max_ctx: wanted.max_ctx,
        contexts: recipe.contexts.iter().map(context_sizes).collect(),
        embed_bytes,
        embed_dtype,
        tables: recipe.tables.iter().map(|t| (t.key.clone(), t.source.bytes())).collect(),
        compiled,
        shared: options.share_weights,
        budget: options.context_budget,
        left_out: Vec::new(),
        recipe_notes: recipe.notes.clone(),
        given: Given {
            no_prefill: wanted.prefill.as_ref().is_some_and(Vec::is_empty),
            shards: options.shards != AUTO_SHARDS,
        },
    }
}

/// Sizes of a context, with a weight of several graphs once where they share it.
fn context_sizes(context: &ContextPlan, share_weights: bool, onnx: bool) -> ContextSizes {
    let shared_bytes = total(distinct_weights(context.compiled()));
    let compiled_bytes = total(context.compiled().map(Graph::weight_bytes));
    let weight_bytes = if share_weights { shared_bytes } else { compiled_bytes };
    let nodes = total(context.compiled().map(|graph| {
        graph.decomposed().map_or(graph.nodes().len(), |graph| graph.nodes().len()) as u64
    }));
    ContextSizes {
        key: context.key.clone(),
        graphs: context.graphs.iter().map(|g| g.name().to_owned()).collect(),
        precision: context.precision,
        weight_bytes,
        compiled_bytes,
        binary_bytes: total([weight_bytes, weight_bytes / WEIGHTS_PER_BYTE, nodes * NODE_BYTES]),
        io_bytes: io_bytes(context.compiled()),
        onnx_bytes: if onnx { total([shared_bytes, nodes * 200]) } else { 0 },
    }
}

/// Bytes of the weights of graphs. Those in common are there once; parts of one tensor, such as Q, K and V of Phi-3's
/// `qkv_proj`, are weights of their own.
fn distinct_weights<'a>(graphs: impl IntoIterator<Item = &'a Graph>) -> impl Iterator<Item = u64> {
    let weights = graphs.into_iter().flat_map(Graph::weights);
    let part = |weight: &'a Weight| (weight.source().name(), weight.source().first_row());
    let once: BTreeMap<_, _> = weights.map(|weight| (part(weight), weight.qnn_bytes())).collect();
    once.into_values()
}

/// Bytes of the inputs and outputs of a context's graphs, of which those that are the same cache lie in one buffer.
fn io_bytes<'a>(graphs: impl IntoIterator<Item = &'a Graph>) -> u64 {
    let mut caches: BTreeMap<String, u64> = BTreeMap::new();
    let mut others = Vec::new();
    for graph in graphs {
        let info = graph.info(Elem::qnn);
        for tensor in info.inputs.into_iter().chain(info.outputs) {
            let bytes = tensor.try_byte_len().map_or(u64::MAX, |n| n as u64);
            match ["past_", "scale_"].iter().any(|cache| tensor.name.starts_with(cache)) {
                true => {
                    let largest = caches.entry(tensor.name).or_default();
                    *largest = bytes.max(*largest);
                }
                false => others.push(bytes),
            }
        }
    }
    total(caches.into_values().chain(others))
}

/// A sum of sizes. Those of a configuration that is inconsistent may be larger than any number of bytes.
fn total(sizes: impl IntoIterator<Item = u64>) -> u64 {
    sizes.into_iter().fold(0, u64::saturating_add)
}
