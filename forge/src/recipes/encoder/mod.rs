//! Code that the recipes of encoders share: the files of `sentence-transformers` beside a checkpoint, graphs for
//! several lengths of texts, and the plan that `llama_embed_sharded` runs.

mod modules;
mod text;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::read_json_value;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Graph, TensorId};
use qhx_graph::weight::RowSource;
use serde_json::{Map, Value, json};

use crate::kit::{matrices, one_or_many, prefill_rows, shards};
use crate::recipe::{ContextPlan, Recipe, RecipeOptions};
use crate::rerank;
pub(super) use modules::{DOCUMENT_PREFIX, Dense, Norm, OPTIONS, QUERY_PREFIX};
pub(super) use text::{Encoder, bidirectional, max_text};

/// Names of activations that [`activate`] has.
pub(super) const ACTIVATIONS: [&str; 7] =
    ["gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "silu", "swish", "relu"];

/// An activation by its name in a configuration (`ACT2FN`), of [`ACTIVATIONS`].
pub(super) fn activate(b: &mut GraphBuilder, x: TensorId, name: &str) -> Result<TensorId> {
    match name {
        "gelu" => b.gelu(x),
        "silu" | "swish" => b.silu(x),
        "relu" => b.relu(x),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => b.gelu_tanh(x),
        other => Err(Error::new(ErrorKind::Internal, format!("no activation {other:?}"))),
    }
}

/// The host-op that runs what [`Encoder::recipe`] makes.
const HOST_OP: &str = "llama_embed_sharded";

/// Positions of the longest encoder that takes several short texts at once. Its mask has a row for each position then;
/// in longer ones such a mask is more to fill and to read than sharing them is worth.
const SHARED: usize = 512;

/// Tokens of the shorter texts that an encoder has graphs for by default.
const BUCKETS: [usize; 2] = [32, 128];

/// A JSON file of `sentence-transformers`, if it is there.
fn read(path: &Path) -> Result<Option<Value>> {
    path.exists().then(|| read_json_value(path)).transpose()
}

/// The error about a file of `sentence-transformers` that asks for what is not done.
fn unsupported(path: &Path, what: &str) -> Error {
    Error::new(ErrorKind::Artifact, format!("{}: {what}", path.display()))
        .hint("vectors would be others than those of sentence-transformers")
}

/// Said of an encoder that nothing declares the pooling of.
const UNDECLARED: &str = "neither modules.json nor another file says how the rows of a text become a vector: it is their \
     mean; where the model's page says otherwise, name it: --recipe-option pooling=cls";

impl Encoder {
    /// A recipe of the graphs `enc`, and `enc<S>` for shorter texts of up to S tokens, over the shards of the options.
    /// `make` makes the graph of a name that takes the layers of a range, a number of positions, and masks of a number
    /// of rows: one for each position, or 1. The prefixes of texts go to `params`.
    pub fn recipe(
        self,
        family: &str,
        options: &RecipeOptions,
        (layers, embed): (usize, Arc<dyn RowSource>),
        mut params: Map<String, Value>,
        make: impl Fn(&str, Range<usize>, usize, usize) -> Result<Graph>,
    ) -> Result<Recipe> {
        let Self { causal, modules, query_prefix, document_prefix, rerank } = self;
        let (longest, undeclared) = (options.max_ctx, modules.undeclared);
        let (mut contexts, mut parts, mut buckets) =
            (Vec::<ContextPlan>::new(), Vec::new(), Vec::new());
        for length in bucket_lengths(options)?.into_iter().rev() {
            let mask_rows = if causal || length <= SHARED { length } else { 1 };
            let (name, names) = if length == longest {
                ("enc".to_owned(), &mut parts)
            } else {
                (format!("enc{length}"), &mut buckets)
            };
            let shards = shards(&name, layers, options.shards);
            for (index, (name, range)) in shards.into_iter().enumerate() {
                let graph = make(&name, range, length, mask_rows)?;
                names.push(name.clone());
                match contexts.get_mut(index) {
                    Some(context) => context.graphs.push(graph),
                    None => contexts.push(ContextPlan::new(name, options.precision, vec![graph])),
                }
            }
        }
        let mut plan_params = Map::new();
        plan_params.insert("parts".to_owned(), one_or_many(parts));
        if !buckets.is_empty() {
            plan_params.insert("buckets".to_owned(), one_or_many(buckets));
        }
        plan_params.insert("causal".to_owned(), json!(causal));
        let pooling = match *modules.poolings {
            [one] => json!(one),
            ref several => json!(several),
        };
        plan_params.insert("pooling".to_owned(), pooling);
        plan_params.insert("normalize".to_owned(), json!(modules.normalize));
        if !modules.steps.is_empty() {
            plan_params.insert("modules".to_owned(), Value::Array(modules.steps));
        }
        if !modules.of_tokens.is_empty() {
            plan_params.insert("of_tokens".to_owned(), Value::Object(modules.of_tokens));
        }
        let tables = match modules.files.is_empty() {
            true => Vec::new(),
            false => vec![matrices("modules", modules.files)],
        };
        match rerank {
            Some(rerank) => {
                plan_params.insert("scores".to_owned(), json!(1));
                params.insert("rerank".to_owned(), rerank::to_json(&rerank));
            }
            None => {
                params.insert("query_prefix".to_owned(), json!(query_prefix));
                params.insert("document_prefix".to_owned(), json!(document_prefix));
            }
        }
        let notes = undeclared.then(|| UNDECLARED.to_owned()).into_iter().collect();
        let recipe = Recipe::new(family, HOST_OP, contexts, plan_params).embed(embed);
        Ok(recipe.params(params).tables(tables).notes(notes))
    }
}

/// Lengths of the texts that the graphs of an encoder take, ascending: the longest is the context.
fn bucket_lengths(options: &RecipeOptions) -> Result<Vec<usize>> {
    let mut lengths = prefill_rows(options, &BUCKETS)?;
    lengths.retain(|length| *length < options.max_ctx);
    lengths.push(options.max_ctx);
    Ok(lengths)
}
