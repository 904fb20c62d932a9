//! What the layers of every family are built from.

use qhx_core::Result;

use super::Precision;
use crate::builder::GraphBuilder;
use crate::checkpoint::Checkpoint;
use crate::graph::TensorId;
use crate::weight::Weight;

/// Builds parts of layers from the tensors of a checkpoint. Each family has its own configuration `C`,
/// and adds its own parts.
#[derive(Debug)]
pub(super) struct Layers<'a, C> {
    pub checkpoint: &'a Checkpoint,
    pub config: &'a C,
    /// Of the weights that may be quantised.
    pub precision: Precision,
}

impl<C> Layers<'_, C> {
    /// `x·Wᵀ (+ b)` with the tensors `<name>.weight` of `shape` `[out, in]` and, if `bias`, `<name>.bias`.
    pub fn linear(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        shape: [usize; 2],
        bias: bool,
    ) -> Result<TensorId> {
        let source = self.checkpoint.matrix(&format!("{name}.weight"), shape)?;
        let storage = self.precision.storage(shape[0], shape[1]);
        let bias = bias
            .then(|| self.checkpoint.values(&format!("{name}.bias"), &[shape[0]]))
            .transpose()?;
        let short = name.rsplit('.').next().unwrap_or(name);
        b.linear(short, x, Weight::new(source, storage), bias)
    }
}
