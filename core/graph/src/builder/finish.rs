//! Checks of a complete graph.

use qhx_base::Result;

use super::GraphBuilder;
use crate::graph::{Graph, Origin, Tensor};

/// Tensors that a message lists.
const LISTED: usize = 5;

impl GraphBuilder {
    /// The finished graph.
    ///
    /// # Errors
    /// When it has no output, and when something in it is for nothing: an input, a constant or a weight that no node
    /// reads, or a node whose output neither is read nor is an output of the graph.
    pub fn finish(self) -> Result<Graph> {
        let graph = &self.graph;
        if graph.outputs.is_empty() {
            return Err(self.fault("no output"));
        }
        let mut used = vec![false; graph.tensors.len()];
        let read = graph.nodes.iter().flat_map(|node| &node.inputs);
        for id in read.chain(&graph.outputs) {
            used[id.index()] = true;
        }
        let unused: Vec<_> =
            graph.tensors.iter().zip(used).filter(|(_, used)| !used).map(|(t, _)| t).collect();
        if unused.is_empty() {
            return Ok(self.graph);
        }
        let mut listed: Vec<_> =
            unused.iter().take(LISTED).map(|tensor| self.role(tensor)).collect();
        if unused.len() > LISTED {
            listed.push(format!("{} more", unused.len() - LISTED));
        }
        let found = format!("nothing reads {}", listed.join(", "));
        Err(self.fault(&found).hint("declare it an output, use it, or leave it out of the graph"))
    }

    /// A tensor with what it is, for messages.
    fn role(&self, tensor: &Tensor) -> String {
        let what = match tensor.origin {
            Origin::Input => "the input",
            Origin::Constant(_) => "the constant",
            Origin::Weight(_) => "the weight",
            Origin::Node(node) => {
                let op = self.graph.nodes.get(node).map_or("node", |node| node.op.name());
                return format!("the output of {op} {tensor}");
            }
        };
        format!("{what} {tensor}")
    }
}
