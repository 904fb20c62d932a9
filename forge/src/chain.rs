//! Graphs that a step runs one after the other: what one writes is what the next reads.
//!
//! A host-op binds the output `y` of a graph and the input `x` of the next to one buffer. That they fit is seen here,
//! when the bundle is made, and not when it is opened.

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::graph::{Graph, Tensor, TensorId};
use serde_json::{Map, Value};

use crate::recipe::Recipe;

/// Keys of `plan.params` under which graphs stand whose last one writes what the head reads.
pub(crate) const DECODERS: [&str; 2] = ["decode", "prefill"];
/// The key of lists such as those of `decode` and `prefill` together, one for each smaller context.
const WITHIN: &str = "within";
/// The key of the head.
pub(crate) const HEAD: &str = "lmhead";
/// The key of the graphs of a drafting head, each for another number of rows.
pub(crate) const DRAFT_HEAD: &str = "draft_head";

/// Keys of `plan.params` that name graphs and nothing else. Under another key a list is one of graphs where it names
/// one.
const GRAPHS: [&str; 12] = [
    "decode",
    "prefill",
    WITHIN,
    HEAD,
    DRAFT_HEAD,
    "ffn",
    "ffn_prefill",
    "ple",
    "parts",
    "buckets",
    "vision",
    "audio_enc",
];

/// Errors when `plan.params` names a graph that no context has, or lists two one after the other that do not fit: the
/// input `x` of the second has another width or another element type than the output `y` of the first.
pub(crate) fn check(recipe: &Recipe) -> Result<()> {
    let lists = recipe.plan_params.iter().map(|(key, value)| (key.as_str(), value));
    let lists = lists.filter(|(key, _)| *key != WITHIN);
    let within = within(&recipe.plan_params).map(|list| (WITHIN, list));
    for (key, value) in lists.chain(within) {
        let mut chain = named(recipe, key, value)?;
        if key == WITHIN || DECODERS.contains(&key) {
            let head = recipe.plan_params.get(HEAD).map(|head| named(recipe, HEAD, head));
            chain.extend(head.transpose()?.unwrap_or_default());
        }
        for pair in chain.windows(2) {
            fits(key, pair[0], pair[1])?;
        }
    }
    Ok(())
}

/// Lists of graphs whose last one writes what the head reads.
pub(crate) fn decoders(params: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    DECODERS.into_iter().filter_map(|key| params.get(key)).chain(within(params))
}

/// The lists of [`WITHIN`].
pub(crate) fn within(params: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    params.get(WITHIN).and_then(Value::as_array).into_iter().flatten()
}

/// The names of a value, a string or a list of strings.
pub(crate) fn names(value: &Value) -> impl Iterator<Item = &str> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter().filter_map(Value::as_str)
}

/// True if a value names a graph, by its name or by one with `*` for a number at its end.
pub(crate) fn names_graph(value: &Value, graph: &str) -> bool {
    names(value).any(|name| {
        let number = name.strip_suffix('*').and_then(|stem| graph.strip_prefix(stem));
        name == graph
            || number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    })
}

/// The graphs that a value names, a string or a list of strings; `a*` names `a0`, `a1` and so on, none of which hands
/// on to the next. Errors when the key is for graphs, and one of its names is no graph's.
fn named<'a>(recipe: &'a Recipe, key: &str, value: &Value) -> Result<Vec<&'a Graph>> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let graphs = || recipe.contexts.iter().flat_map(|context| &context.graphs);
    let find = |name: &Value| graphs().find(|graph| Some(graph.name()) == name.as_str());
    let numbered = |name: &Value| {
        let start = name.as_str().and_then(|name| name.strip_suffix('*'));
        start.is_some_and(|start| graphs().any(|graph| graph.name().starts_with(start)))
    };
    let found: Vec<_> = list.iter().filter_map(find).collect();
    let missing = list.iter().find(|name| find(name).is_none() && !numbered(name));
    match missing.filter(|_| GRAPHS.contains(&key) || !found.is_empty()) {
        None => Ok(found),
        Some(name) => {
            let names: Vec<_> = graphs().map(Graph::name).collect();
            Err(Error::new(
                ErrorKind::Graph,
                format!("plan.params.{key} names {name}, and no context has such a graph"),
            )
            .hint(format!("the recipe's graphs are {}", names.join(", "))))
        }
    }
}

fn fits(key: &str, first: &Graph, second: &Graph) -> Result<()> {
    let (Some(y), Some(x)) =
        (find(first, first.outputs(), "y"), find(second, second.inputs(), "x"))
    else {
        return Ok(());
    };
    // The numbers of rows may differ: those of a prompt and of one token.
    if y.elem == x.elem && y.shape.last() == x.shape.last() {
        return Ok(());
    }
    let hint = if y.elem == x.elem {
        "graphs of one chain hand on rows of one width"
    } else {
        "cast the output in the recipe: `b.cast(y, Elem::Activation)`"
    };
    Err(Error::new(
        ErrorKind::Graph,
        format!(
            "plan.params.{key}: graph {:?} writes {y}, and graph {:?} after it reads {x}",
            first.name(),
            second.name()
        ),
    )
    .hint(hint))
}

fn find<'a>(graph: &'a Graph, ids: &[TensorId], name: &str) -> Option<&'a Tensor> {
    let mut tensors = ids.iter().filter_map(|id| graph.tensors().get(id.index()));
    tensors.find(|tensor| tensor.name == name)
}
