//! Output of an encoder, row by row, and the choice among logits.

use qhx_op::{Error, ErrorCode, GraphId, Host, Result};

/// Rows of the encoder, one for each step of time.
pub(crate) struct Rows<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) width: usize,
    /// Seconds from one row to the next.
    pub(crate) step: f32,
}

impl Rows<'_> {
    pub(super) fn get(&self, at: usize) -> Option<&[f32]> {
        self.values.chunks_exact(self.width).nth(at)
    }

    /// Start of a row, in seconds.
    pub(super) fn seconds(&self, at: usize) -> f32 {
        at as f32 * self.step
    }
}

/// The place of the largest logit, the first of equal ones.
pub(super) fn likeliest(host: &Host, graph: GraphId, logits: &[f32]) -> Result<u32> {
    let mut best = (0, f32::NEG_INFINITY);
    for (at, &logit) in logits.iter().enumerate() {
        if logit.is_nan() {
            return Err(Error::new(
                ErrorCode::INTERNAL,
                format!(
                    "graph {:?}: logit {at} is not a number: values left the range of f16, or the weights are damaged",
                    host.graph(graph).name
                ),
            ));
        }
        if logit > best.1 {
            best = (at, logit);
        }
    }
    Ok(best.0 as u32)
}
