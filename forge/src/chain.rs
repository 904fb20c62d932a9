//! Graphs that a step runs one after the other: what one writes is what the next reads.
//!
//! A host-op binds the output `y` of a graph and the input `x` of the next to one buffer. That they fit is seen here,
//! when the bundle is made, and not when it is opened.

use qhx_core::{Error, ErrorKind, Result};
use serde_json::Value;

use crate::graph::{Graph, Tensor, TensorId};
use crate::recipe::Recipe;

/// Keys of `plan.params` under which graphs stand whose last one writes what the head reads.
const DECODERS: [&str; 2] = ["decode", "prefill"];
/// The key of the head.
const HEAD: &str = "lmhead";

/// Errors when two graphs that `plan.params` lists one after the other do not fit: the input `x` of the second has
/// another width or another element type than the output `y` of the first.
pub(crate) fn check(recipe: &Recipe) -> Result<()> {
    for (key, value) in &recipe.plan_params {
        let mut chain = named(recipe, value);
        if DECODERS.contains(&key.as_str()) {
            chain.extend(recipe.plan_params.get(HEAD).into_iter().flat_map(|v| named(recipe, v)));
        }
        for pair in chain.windows(2) {
            fits(key, pair[0], pair[1])?;
        }
    }
    Ok(())
}

/// The graphs that a value names, a string or a list of strings. What names none is no graph.
fn named<'a>(recipe: &'a Recipe, value: &Value) -> Vec<&'a Graph> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let graphs = || recipe.contexts.iter().flat_map(|context| &context.graphs);
    list.iter()
        .filter_map(|name| graphs().find(|graph| Some(graph.name()) == name.as_str()))
        .collect()
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
