//! The mask of encoders.

use super::input::FloatInput;
use super::mask::{MASK_VALUE, VISIBLE};
use qhx_op::{GraphId, Host, Port, Result};

/// The mask of an encoder with a fixed length for the input `cmask`: padded positions are hidden
/// as keys. `[1, length]` hides them from every query; `[length, length]` can be causal too, and keeps several texts in
/// one graph to themselves.
#[derive(Debug)]
pub struct PaddingMask {
    /// One for each size and element type among the graphs.
    inputs: Vec<FloatInput>,
    length: usize,
    causal: bool,
    /// Positions before and after its own that a token sees.
    reach: usize,
    /// Tokens of the texts that the mask is filled for.
    filled: Vec<usize>,
}

impl PaddingMask {
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
        let legal = |rows: usize| rows == length || rows == 1 && !causal;
        let expected = if causal { "causal" } else { "bidirectional" };
        Self::check(host, graphs, "cmask", length, legal, expected)?;
        let inputs = FloatInput::bind_all(host, graphs, "cmask")?;
        let filled = Vec::with_capacity(length);
        Ok(Self { inputs, length, causal, reach: usize::MAX, filled })
    }

    /// Same as [`PaddingMask::bind_all`], for the input `role`, such as `cmask_local`, of layers in which a token sees
    /// only tokens of its text at most `reach` positions before or after it. Has a row for each position.
    ///
    /// # Errors
    /// Errors of [`PaddingMask::bind_all`].
    pub fn bind_local(
        host: &mut Host,
        graphs: &[GraphId],
        role: &str,
        length: usize,
        reach: usize,
    ) -> Result<Self> {
        Self::check(host, graphs, role, length, |rows| rows == length, "local")?;
        let inputs = FloatInput::bind_all(host, graphs, role)?;
        Ok(Self { inputs, length, causal: false, reach, filled: Vec::with_capacity(length) })
    }

    /// Errors when the input `role` of a graph does not have rows of `length` values, a `legal` number of them.
    fn check(
        host: &Host,
        graphs: &[GraphId],
        role: &str,
        length: usize,
        legal: impl Fn(usize) -> bool,
        attention: &str,
    ) -> Result<()> {
        for &graph in graphs {
            let info = host.graph(graph);
            let Some(port) = info.input(role) else { continue };
            host.require_float(graph, Port::Input(port))?;
            let tensor = &info.inputs[port];
            let rows = tensor.elements() / length.max(1);
            if !legal(rows) || tensor.width() != length {
                let one = if legal(1) { "1 or " } else { "" };
                let what = format!(
                    "expected {one}{length} rows of {length} values for attention that \
                     is {attention}"
                );
                return Err(host.misfit(graph, Port::Input(port), what));
            }
        }
        Ok(())
    }

    /// True when no graph has such a mask.
    pub fn is_empty(&self) -> bool {
        self.inputs.is_empty()
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
                // A row of the padding is as the last one of the text.
                let place = row.min(text.end.saturating_sub(1));
                let seen = text.start.max(place.saturating_sub(self.reach))
                    ..text.end.min(place.saturating_add(self.reach).saturating_add(1));
                let open = if self.causal { seen.end.min(row + 1) } else { seen.end };
                input.set(host, first..first + seen.start, MASK_VALUE);
                input.set(host, first + seen.start..first + open, VISIBLE);
                input.set(host, first + open..first + self.length, MASK_VALUE);
            }
        }
    }
}
