//! The graph from hidden row to logits.

use qhx_op::{Error, GraphId, Host, Port, Result, View};

use crate::layers::{Layers, Side, port};

/// The head, bound to one row of one of the steps.
#[derive(Debug)]
pub(crate) struct Head {
    graph: GraphId,
    input: Port,
    /// What it gives.
    pub logits: View,
    row_bytes: usize,
    /// Step and row whose hidden row it reads.
    reads: (usize, usize),
}

impl Head {
    /// Finds the tensors and checks that the rows of all steps fit.
    pub fn open(host: &mut Host, graph: GraphId, steps: &[&Layers]) -> Result<Self> {
        let input = port(host, graph, Side::Input, "x")?;
        let output = port(host, graph, Side::Output, "logits")?;
        let dtype = host.require_float(graph, output)?;
        let len = host.tensor(graph, output).elements();
        let buffer = host.allocate_for(graph, output)?;
        let info = host.tensor(graph, input);
        for step in steps {
            if info.dtype != step.x.dtype || info.elements() != step.hidden {
                return Err(Error::graph(format!(
                    "graph {:?} (manifest /plan/params/lmhead): tensor {info}: expected {} with {} \
                     values, a hidden row",
                    host.graph(graph).name,
                    step.x.dtype,
                    step.hidden
                )));
            }
        }
        let row_bytes = info.byte_len();
        let logits = View { buffer, dtype, offset: 0, len };
        Ok(Self { graph, input, logits, row_bytes, reads: (usize::MAX, 0) })
    }

    /// Logits of a row of the residual `x` of a step. Nothing is copied.
    pub fn run(
        &mut self,
        host: &mut Host,
        step: usize,
        layers: &Layers,
        row: usize,
    ) -> Result<View> {
        if self.reads != (step, row) {
            host.bind(self.graph, self.input, layers.x.buffer, row * self.row_bytes)?;
            self.reads = (step, row);
        }
        host.execute(self.graph)?;
        Ok(self.logits)
    }
}
