//! From graphs to the contexts of a bundle and the plan that runs them.

use std::fmt::Display;
use std::ops::Range;

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::graph::Graph;
use serde_json::{Map, Value, json};

use super::attention::Heads;
use super::step::Step;
use crate::recipe::{ContextPlan, Precision, Recipe, RecipeOptions, Task};

/// Checks the shards and the context that the options ask for against `layers` and the model's `max_positions`.
///
/// # Errors
/// When there are more shards than layers, or when the context is longer than the model's.
pub fn check_shape(
    options: &RecipeOptions,
    layers: usize,
    max_positions: Option<usize>,
) -> Result<()> {
    if options.shards == 0 || options.shards > layers {
        return Err(Error::new(
            ErrorKind::Usage,
            format!("{} shards, expected 1 to {layers}, the number of layers", options.shards),
        ));
    }
    if options.max_ctx == 0 || max_positions.is_some_and(|max| options.max_ctx > max) {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "a context of {} tokens, expected 1 to {}, the model's max_position_embeddings",
                options.max_ctx,
                max_positions.unwrap_or(usize::MAX)
            ),
        ));
    }
    Ok(())
}

/// Names of the shards of `name`, and their layers: `name` alone, or `name_p0`, `name_p1`, ….
pub fn shards(name: &str, layers: usize, shards: usize) -> Vec<(String, Range<usize>)> {
    named(name, &even(layers, shards))
}

/// `layers` layers in `shards` ranges, as even as can be.
pub(super) fn even(layers: usize, shards: usize) -> Vec<Range<usize>> {
    (0..shards).map(|shard| shard * layers / shards..(shard + 1) * layers / shards).collect()
}

pub(super) fn named(name: &str, ranges: &[Range<usize>]) -> Vec<(String, Range<usize>)> {
    let name = |shard: usize| sized(name, format_args!("_p{shard}"), ranges.len());
    ranges.iter().enumerate().map(|(shard, range)| (name(shard), range.clone())).collect()
}

/// Name of one of `count` graphs: with `size` behind it where there are several.
pub(crate) fn sized(name: &str, size: impl Display, count: usize) -> String {
    if count == 1 { name.to_owned() } else { format!("{name}{size}") }
}

/// The numbers of tokens that prefill graphs take at once by default: few for the ends of prompts and
/// for short ones, many for the rest.
pub const PREFILL_ROWS: [usize; 2] = [16, 128];

/// Further prefill sizes of decoders for the CPU alone, between [`PREFILL_ROWS`]'s first and a family's larger ones: a
/// CPU computes all rows of a graph, also those behind the end of a prompt.
const CPU_PREFILL_ROWS: [usize; 2] = [32, 64];

/// Bytes that the mask of a prefill graph has at most by default on the NPU. The library's compiled addition of a
/// larger one was seen to pair rows with wrong rows on v79 and v81, without an error (google-ai-edge/LiteRT-LM#3508):
/// 1,048,576 bytes are right, 1,081,344 wrong. The emulator is right at both sizes.
pub(crate) const MAX_MASK: usize = 1 << 20;

/// The fewest rows that the default number is lowered to for the sake of `MAX_MASK`.
const MIN_MASKED_ROWS: usize = 48;

/// Rows of a mask `[rows, positions + rows]` of f16 within `MAX_MASK`, at most `rows`, a multiple of 8. All of them
/// where that would leave fewer than `least`.
fn masked_rows(rows: usize, positions: usize, least: usize) -> usize {
    let fits = |rows: &usize| rows.saturating_mul(positions.saturating_add(*rows)) <= MAX_MASK / 2;
    let fewer = (least..rows).rev().filter(|rows| rows.is_multiple_of(8));
    std::iter::once(rows).chain(fewer).find(fits).unwrap_or(rows)
}

/// The numbers of tokens that prefill graphs take at once, ascending: those of the options, each from 2 to
/// the context, or else `default`, as far as it and a mask of `MAX_MASK` fit, with 32 and 64 beside 16 where no NPU
/// computes them.
///
/// # Errors
/// When a number is below 2 or above the context.
pub fn prefill_rows(options: &RecipeOptions, default: &[usize]) -> Result<Vec<usize>> {
    whole_prefill_rows(options, default, MIN_MASKED_ROWS)
}

/// [`prefill_rows`], where one graph has to take `whole` tokens at once, as of an image whose tokens see each other:
/// such a number of `default` stays as it is.
///
/// # Errors
/// The errors of [`prefill_rows`].
pub fn whole_prefill_rows(
    options: &RecipeOptions,
    default: &[usize],
    whole: usize,
) -> Result<Vec<usize>> {
    let mut rows = match &options.prefill {
        Some(asked) => asked.clone(),
        None => {
            let few = options.cpu_only && default.contains(&PREFILL_ROWS[0]);
            let between = |rows: &&usize| few && default.iter().any(|most| most > *rows);
            let all = default.iter().chain(CPU_PREFILL_ROWS.iter().filter(between));
            // An encoder's masks have no more columns than rows.
            let decodes = !matches!(options.task, Task::Embed | Task::Score);
            let fits = |rows: usize| match decodes && !options.cpu_only {
                true => masked_rows(rows, options.max_ctx, whole),
                false => rows,
            };
            all.map(|rows| fits(*rows.min(&options.max_ctx))).filter(|rows| *rows > 1).collect()
        }
    };
    rows.sort_unstable();
    rows.dedup();
    if let Some(bad) = rows.iter().find(|p| **p < 2 || **p > options.max_ctx) {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "a prefill graph of {bad} tokens, expected 2 to {}, the context",
                options.max_ctx
            ),
        ));
    }
    Ok(rows)
}

/// The sizes of a decoder's graphs: for one token, for each number of `prompts`, and then the same in the smaller
/// contexts of the options.
pub fn steps(options: &RecipeOptions, prompts: &[usize]) -> Vec<Step> {
    let rows = || std::iter::once(1).chain(prompts.iter().copied());
    let step = |rows, positions| Step { rows, positions, caches: options.caches };
    let whole = rows().map(|rows| step(rows, options.max_ctx));
    let within = options.contexts.iter().flat_map(|&positions| {
        rows().filter(move |rows| *rows <= positions).map(move |rows| step(rows, positions))
    });
    whole.chain(within).collect()
}

/// Contexts of a decoder, and `plan.params`.
#[derive(Debug, Clone)]
pub struct Decoder {
    /// The contexts, in the order in which a step runs them.
    pub contexts: Vec<ContextPlan>,
    /// The graphs' names under `decode`, `prefill` and `within` (where there are such graphs) and `lmhead`.
    pub plan_params: Map<String, Value>,
}

/// Parts of a decoder that have been made so far.
#[derive(Debug)]
pub(super) struct Parts<'a> {
    options: &'a RecipeOptions,
    contexts: Vec<ContextPlan>,
    decode: Vec<String>,
    prefill: Vec<String>,
    /// For each of the smaller contexts.
    within: Vec<Vec<String>>,
}

impl<'a> Parts<'a> {
    pub fn new(options: &'a RecipeOptions) -> Self {
        let within = vec![Vec::new(); options.contexts.len()];
        let (contexts, decode, prefill) = Default::default();
        Self { options, contexts, decode, prefill, within }
    }

    /// Adds graphs of the layers of a shard to the shard's context, of which `key` is the name if it is new.
    pub fn add(&mut self, step: Step, shard: usize, key: String, graphs: Vec<Graph>) {
        let smaller = self.options.contexts.iter().position(|context| *context == step.positions);
        let list = match smaller {
            Some(context) => &mut self.within[context],
            None if step.rows == 1 => &mut self.decode,
            None => &mut self.prefill,
        };
        list.extend(graphs.iter().map(|graph| graph.name().to_owned()));
        match self.contexts.get_mut(shard) {
            Some(context) => context.graphs.extend(graphs),
            None => self.contexts.push(ContextPlan::new(key, self.options.precision, graphs)),
        }
    }

    /// With the head, before which come further contexts.
    pub fn finish(mut self, others: Option<ContextPlan>, head: Graph) -> Decoder {
        let mut plan_params = Map::new();
        plan_params.insert("decode".to_owned(), one_or_many(self.decode));
        if !self.prefill.is_empty() {
            plan_params.insert("prefill".to_owned(), one_or_many(self.prefill));
        }
        if !self.within.is_empty() {
            let lists = self.within.into_iter().map(one_or_many).collect();
            plan_params.insert("within".to_owned(), lists);
        }
        plan_params.insert("lmhead".to_owned(), json!(head.name()));
        self.contexts.extend(others);
        self.contexts.push(ContextPlan::alone(head));
        Decoder { contexts: self.contexts, plan_params }
    }
}

/// The contexts of a decoder of `layers` layers: one for each shard of the options, with a graph `decode` for one
/// token, graphs `prefill<P>` for each P of `prompts`, and the same for smaller contexts ([`steps`]); and that of the
/// head.
///
/// `make` makes the graph of the given name and size that goes through some layers.
///
/// # Errors
/// Errors of `make`.
pub fn decoder(
    options: &RecipeOptions,
    layers: usize,
    prompts: &[usize],
    make: impl Fn(&str, Range<usize>, Step) -> Result<Graph>,
    head: Graph,
) -> Result<Decoder> {
    let ranges = even(layers, options.shards);
    let make = |name: &str, range, step| make(name, range, step).map(Some);
    decoder_of(options, &ranges, prompts, make, head)
}

/// Same as [`decoder`], with the layers of each shard. `make` returns none where a prompt does not need the layers:
/// those behind the last cache, which only its last token passes.
///
/// # Errors
/// Errors of `make`.
pub fn decoder_of(
    options: &RecipeOptions,
    ranges: &[Range<usize>],
    prompts: &[usize],
    make: impl Fn(&str, Range<usize>, Step) -> Result<Option<Graph>>,
    head: Graph,
) -> Result<Decoder> {
    let mut parts = Parts::new(options);
    for step in steps(options, prompts) {
        for (shard, (name, range)) in named(&step.stem(options), ranges).into_iter().enumerate() {
            if let Some(graph) = make(&name, range, step)? {
                parts.add(step, shard, name, vec![graph]);
            }
        }
    }
    Ok(parts.finish(None, head))
}

/// Keys of `params` of the manifest that every decoder has.
#[derive(Debug, Clone, Copy)]
pub struct DecoderParams {
    /// Elements of a hidden state.
    pub hidden: usize,
    /// Number of tokens of the vocabulary.
    pub vocab: usize,
    /// Number of layers.
    pub layers: usize,
    /// Heads of attention.
    pub heads: Heads,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
}

impl DecoderParams {
    /// The keys, for a bundle with a context of `max_ctx` tokens. A family adds its own.
    pub fn map(&self, max_ctx: usize) -> Map<String, Value> {
        object(json!({
            "hidden": self.hidden,
            "vocab": self.vocab,
            "n_layers": self.layers,
            "max_ctx": max_ctx,
            "n_heads": self.heads.query,
            "n_kv_heads": self.heads.groups,
            "head_dim": self.heads.dim,
            "kv_dim": self.heads.groups * self.heads.dim,
            "rope_theta": self.rope_theta,
        }))
    }
}

/// The members of a JSON object, as `json!` writes one; none of any other value.
pub fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

impl Recipe {
    /// With graphs that run ahead of the others, once for a prompt, in a context `name` of their own. `plan.params` has
    /// their names under the same.
    #[must_use]
    pub fn ahead(mut self, name: &str, precision: Precision, graphs: Vec<Graph>) -> Self {
        let names = graphs.iter().map(|graph| graph.name().to_owned()).collect();
        self.plan_params.insert(name.to_owned(), one_or_many(names));
        self.contexts.insert(0, ContextPlan::new(name.to_owned(), precision, graphs).once());
        self
    }
}

/// One name as a string, several as a list: how `plan.params` names graphs.
pub fn one_or_many(names: Vec<String>) -> Value {
    if let [name] = names.as_slice() { json!(name) } else { json!(names) }
}
