//! Graphs of a step for several sequences at once: weights are read once for the tokens of all of them.

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::builder::batched;
use qhx_graph::graph::Graph;

use crate::chain::{DECODERS, HEAD, names_graph, within};
use crate::recipe::Recipe;

/// Maximum number of sequences of a graph.
pub const MAX_SEQUENCES: usize = 16;

/// Adds to each context of `recipe` the graphs of a step of one token, once more for each number of sequences: `decode_x4`
/// has the tensors of `decode` for each of four.
///
/// # Errors
/// For a number of sequences that is not from 2 to [`MAX_SEQUENCES`], and where the recipe has no step of one token.
pub(crate) fn add(recipe: &mut Recipe, sequences: &[usize]) -> Result<()> {
    if let Some(count) = sequences.iter().find(|count| !(2..=MAX_SEQUENCES).contains(*count)) {
        return Err(Error::new(
            ErrorKind::Usage,
            format!("graphs for {count} sequences, expected 2 to {MAX_SEQUENCES}"),
        ));
    }
    let params = &recipe.plan_params;
    let whole = [DECODERS[0], HEAD].into_iter().filter_map(|key| params.get(key));
    let lists: Vec<_> = whole.chain(within(params)).cloned().collect();
    let of_step = |graph: &Graph| {
        takes_one_row(graph) && lists.iter().any(|list| names_graph(list, graph.name()))
    };
    let mut added = 0;
    for context in recipe.contexts.iter_mut().filter(|context| !context.once) {
        for &count in sequences {
            for graph in context.graphs.iter().filter(|graph| of_step(graph)) {
                context.batches.push(batched(graph, count, &format!("{}_x{count}", graph.name()))?);
                added += 1;
            }
        }
    }
    if added == 0 && !sequences.is_empty() {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "host-op {:?} has no step of one token that several sequences could take",
                recipe.host_op
            ),
        )
        .hint("leave out --batch"));
    }
    Ok(())
}

/// True if a graph takes the hidden states of one token.
fn takes_one_row(graph: &Graph) -> bool {
    let mut inputs = graph.inputs().iter().filter_map(|id| graph.tensors().get(id.index()));
    inputs.any(|tensor| {
        tensor.name == "x" && tensor.elements() == tensor.shape[tensor.shape.len() - 1]
    })
}
