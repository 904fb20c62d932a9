//! The mask of encoders.

use super::input::FloatInput;
use super::mask::{HIDDEN, VISIBLE};
use crate::{Error, GraphId, Host, Port, Result};

/// The mask of an encoder with a fixed length for the input `cmask`: padded positions are hidden
/// as keys. `[1, length]` hides them from every query; `[length, length]` can be causal too.
#[derive(Debug)]
pub struct PaddingMask {
    /// One for each size and element type among the graphs.
    inputs: Vec<FloatInput>,
    length: usize,
    causal: bool,
    /// Number of real tokens that the mask is filled for.
    real: usize,
}

impl PaddingMask {
    /// Binds the input `cmask` of a graph over `length` positions; `None` when the graph has no
    /// such input.
    pub fn bind(
        host: &mut Host,
        graph: GraphId,
        length: usize,
        causal: bool,
    ) -> Result<Option<Self>> {
        let mask = Self::bind_all(host, &[graph], length, causal)?;
        Ok((!mask.inputs.is_empty()).then_some(mask))
    }

    /// Binds the input `cmask` of the graphs of an encoder over `length` positions. Graphs whose masks
    /// are alike read the same buffer; one without this input needs none.
    pub fn bind_all(
        host: &mut Host,
        graphs: &[GraphId],
        length: usize,
        causal: bool,
    ) -> Result<Self> {
        for &graph in graphs {
            let info = host.graph(graph);
            let Some(port) = info.input("cmask") else { continue };
            host.require_float(graph, Port::Input(port))?;
            let tensor = &info.inputs[port];
            let rows = tensor.elements() / length.max(1);
            let legal = if causal { rows == length } else { rows == 1 || rows == length };
            if !legal || tensor.width() != length {
                return Err(Error::graph(format!(
                    "graph {:?}: tensor {tensor}: expected {} of {length} values for attention that \
                     is {}",
                    info.name,
                    if causal { format!("{length} rows") } else { format!("1 or {length} rows") },
                    if causal { "causal" } else { "bidirectional" }
                )));
            }
        }
        let inputs = FloatInput::bind_all(host, graphs, "cmask")?;
        Ok(Self { inputs, length, causal, real: usize::MAX })
    }

    /// Fills the mask for a text of `real` tokens, at least one and at most as many as positions.
    pub fn fill(&mut self, host: &mut Host, real: usize) {
        let real = real.min(self.length);
        if real == self.real {
            return;
        }
        for input in &self.inputs {
            for (row, first) in (0..input.len()).step_by(self.length.max(1)).enumerate() {
                let open = if self.causal { real.min(row + 1) } else { real };
                input.set(host, first..first + open, VISIBLE);
                input.set(host, first + open..first + self.length, HIDDEN);
            }
        }
        self.real = real;
    }
}
