//! What is checked when a graph is whole.

use qhx_core::Result;

use super::GraphBuilder;
use crate::graph::Graph;

impl GraphBuilder {
    /// The finished graph. Errors when it has no output.
    pub fn finish(self) -> Result<Graph> {
        if self.graph.outputs.is_empty() {
            return Err(self.fault("no output"));
        }
        Ok(self.graph)
    }
}
