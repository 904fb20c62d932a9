//! The head as a part of the graphs before it, which then give the logits of all of their rows at once.

use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::{NodeParts, rebuild};
use qhx_graph::graph::{Graph, Node, Origin, TensorId};
use serde_json::Value;

use crate::chain::{DECODERS, DRAFT_HEAD, HEAD, names};
use crate::recipe::{Recipe, RecipeOptions};

/// The same recipe without a graph of the head, whose nodes the last graph of each number of rows has; the recipe as
/// it is where that cannot be, such as where prefill graphs end before the last layers.
pub(crate) fn joined(recipe: Recipe) -> Recipe {
    let mut changed = recipe.clone();
    match join(&mut changed) {
        Some(()) => changed,
        None => recipe,
    }
}

/// A recipe as [`forge_known`](crate::forge::forge_known) takes it.
pub(crate) type Making<'a> = &'a dyn Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>;

/// Makes a bundle and opens it: of [`joined`] graphs as long as `join`, which is unset where the host-op wants a graph
/// of the head.
pub(crate) fn open_joined<T>(
    recipe: Making<'_>,
    join: &mut bool,
    mut make: impl FnMut(Making<'_>) -> Result<PathBuf>,
    open: &dyn Fn(&Path) -> Result<T>,
) -> Result<T> {
    loop {
        let joins = *join;
        let manifest = make(&|checkpoint: &Checkpoint, options: &RecipeOptions| {
            let recipe = recipe(checkpoint, options)?;
            Ok(if joins { joined(recipe) } else { recipe })
        })?;
        match open(&manifest) {
            Err(error) if joins && error.kind() != ErrorKind::Cancelled => *join = false,
            opened => return opened,
        }
    }
}

fn join(recipe: &mut Recipe) -> Option<()> {
    let head = recipe.plan_params.remove(HEAD)?;
    let mut last: Vec<(usize, String)> = Vec::new();
    for key in DECODERS {
        let Some(names) = recipe.plan_params.get(key) else { continue };
        for name in names.as_array().map_or(std::slice::from_ref(names), Vec::as_slice) {
            let graph = find(recipe, name)?;
            let rows = *graph.tensor(named(graph, graph.inputs(), "x")?).ok()?.shape.first()?;
            last.retain(|(other, _)| *other != rows);
            last.push((rows, graph.name().to_owned()));
        }
    }
    let head = find(recipe, &head)?.clone();
    // Nothing drafts while texts are compared, and what would needs the head's own graph.
    let drafts = recipe.plan_params.remove(DRAFT_HEAD).unwrap_or_default();
    let drafts = |graph: &Graph| names(&drafts).any(|name| name == graph.name());
    for context in &mut recipe.contexts {
        context.graphs.retain(|graph| graph.name() != head.name() && !drafts(graph));
        for graph in &mut context.graphs {
            if last.iter().any(|(_, name)| name == graph.name()) {
                *graph = behind(graph, &head).ok()?;
            }
        }
    }
    recipe.contexts.retain(|context| !context.graphs.is_empty());
    Some(())
}

fn find<'a>(recipe: &'a Recipe, name: &Value) -> Option<&'a Graph> {
    let mut graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
    graphs.find(|graph| Some(graph.name()) == name.as_str())
}

fn named(graph: &Graph, ids: &[TensorId], name: &str) -> Option<TensorId> {
    let is = |id: &&TensorId| graph.tensor(**id).is_ok_and(|t| t.name == name);
    ids.iter().find(is).copied()
}

/// `graph` with the nodes of `head` behind its output `y`, for as many rows.
fn behind(graph: &Graph, head: &Graph) -> Result<Graph> {
    let missing = || Error::new(ErrorKind::Graph, "no rows for a head");
    let y = named(graph, graph.outputs(), "y").ok_or_else(missing)?;
    let logits = named(head, head.outputs(), "logits").ok_or_else(missing)?;
    let rows = graph.tensor(y)?.shape.first().copied().unwrap_or(1);
    let own = |name: &str| format!("{HEAD}_{name}");
    let mut tensors = graph.tensors().to_vec();
    let mut places = Vec::new();
    for tensor in head.tensors() {
        if matches!(tensor.origin, Origin::Input) {
            places.push(y.index());
            continue;
        }
        let mut tensor = tensor.clone();
        if let (Origin::Node(_), Some(first @ 1)) = (&tensor.origin, tensor.shape.first_mut()) {
            *first = rows;
        }
        if tensor.name != "logits" {
            tensor.name = own(&tensor.name);
        }
        places.push(tensors.len());
        tensors.push(tensor);
    }
    let place = |places: &[usize], index: usize| places.get(index).copied().ok_or_else(missing);
    let parts = |node: &Node, name: String, at: &dyn Fn(usize) -> Result<usize>| {
        let inputs = node.inputs.iter().map(|id| at(id.index())).collect::<Result<_>>()?;
        Ok(NodeParts { name, op: node.op.clone(), inputs, output: at(node.output.index())? })
    };
    let before = graph.nodes().iter().map(|node| parts(node, node.name.clone(), &Ok));
    let after = head.nodes().iter();
    let after = after.map(|node| parts(node, own(&node.name), &|index| place(&places, index)));
    let nodes = before.chain(after).collect::<Result<Vec<_>>>()?;
    let logits = place(&places, logits.index())?;
    let outputs: Vec<_> = graph.outputs().iter().map(|id| id.index()).collect();
    let outputs: Vec<_> =
        outputs.into_iter().map(|id| if id == y.index() { logits } else { id }).collect();
    rebuild(graph.name(), tensors, nodes, &outputs)
}
