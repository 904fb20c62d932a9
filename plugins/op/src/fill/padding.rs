//! The mask of encoders.

use super::input::FloatInput;
use super::mask::{HIDDEN, VISIBLE};
use crate::{Error, GraphId, Host, Port, Result};

/// The mask of an encoder with a fixed length for the input `cmask`: padded positions are hidden
/// as keys. `[1, length]` hides them from every query; `[length, length]` can be causal too, and keeps several texts in
/// one graph to themselves.
#[derive(Debug)]
pub struct PaddingMask {
    /// One for each size and element type among the graphs.
    inputs: Vec<FloatInput>,
    length: usize,
    causal: bool,
    /// Tokens of the texts that the mask is filled for.
    filled: Vec<usize>,
}

impl PaddingMask {
    /// Binds the input `cmask` of a graph over `length` positions; `None` when the graph has no
    /// such input.
    ///
    /// # Errors
    /// When the input has another shape or element type.
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
    ///
    /// # Errors
    /// When an input has another shape or element type.
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
        Ok(Self { inputs, length, causal, filled: Vec::with_capacity(length) })
    }

    /// True when the mask can keep several texts to themselves: it has a row for each position.
    pub fn separates(&self) -> bool {
        let rows = |input: &FloatInput| input.len() / self.length.max(1);
        !self.inputs.is_empty() && self.inputs.iter().all(|input| rows(input) == self.length)
    }

    /// Fills the mask for a text of `real` tokens, at least one and at most as many as positions.
    pub fn fill(&mut self, host: &mut Host, real: usize) {
        self.fill_texts(host, &[real]);
    }

    /// Fills the mask for texts of these numbers of tokens, at least one each, that stand one behind the other: a block
    /// for each on the diagonal. A mask without a row for each position shows every token all texts.
    ///
    /// The rows of the padding see what the last text sees. Nobody reads what becomes of them, and a row in which
    /// all is hidden would be the odd one out.
    pub fn fill_texts(&mut self, host: &mut Host, lengths: &[usize]) {
        if self.filled == lengths {
            return;
        }
        self.filled.clear();
        self.filled.extend_from_slice(lengths);
        for input in &self.inputs {
            let separate = input.len() > self.length;
            let (mut texts, mut text) = (lengths.iter(), 0..0);
            if !separate {
                text = 0..lengths.iter().sum::<usize>().min(self.length);
            }
            for (row, first) in (0..input.len()).step_by(self.length.max(1)).enumerate() {
                while separate && row >= text.end {
                    let Some(length) = texts.next() else { break };
                    text = text.end..text.end.saturating_add(*length).min(self.length);
                }
                let open = if self.causal { text.end.min(row + 1) } else { text.end };
                input.set(host, first..first + text.start, HIDDEN);
                input.set(host, first + text.start..first + open, VISIBLE);
                input.set(host, first + open..first + self.length, HIDDEN);
            }
        }
    }
}
