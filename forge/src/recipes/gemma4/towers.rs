//! Parts that the vision and audio towers share.

use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::TensorId;
use qhx_graph::weight::RowSource;

use crate::recipe::Precision;

/// A linear layer whose input and output are clamped to bounds that the checkpoint gives (`Gemma4ClippableLinear`).
#[derive(Debug, Clone, Copy)]
pub(super) struct Clipped<'a> {
    pub checkpoint: &'a Checkpoint,
    /// `use_clipped_linears`
    pub clips: bool,
    /// Precision of the weights.
    pub precision: Precision,
}

impl Clipped<'_> {
    /// x `[rows, in]` to `[rows, outputs]`.
    pub fn linear(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        outputs: usize,
    ) -> Result<TensorId> {
        self.linear_of(b, x, name, self.weight(name, outputs, b.width(x)?)?)
    }

    /// The weight `<name>.linear.weight`.
    pub fn weight(&self, name: &str, outputs: usize, inputs: usize) -> Result<Arc<dyn RowSource>> {
        self.checkpoint.matrix(&format!("{name}.linear.weight"), [outputs, inputs])
    }

    /// Same as [`Clipped::linear`], with a weight made from that in the checkpoint.
    pub fn linear_of(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        weight: Arc<dyn RowSource>,
    ) -> Result<TensorId> {
        let x = self.clip(b, x, name, "input")?;
        let short = name.rsplit('.').next().unwrap_or(name);
        let y = b.linear(short, x, self.precision.weight(weight), None)?;
        self.clip(b, y, name, "output")
    }

    fn clip(&self, b: &mut GraphBuilder, x: TensorId, name: &str, side: &str) -> Result<TensorId> {
        // Bounds that are drawn would not be in order.
        if !self.clips || self.checkpoint.seed().is_some() {
            return Ok(x);
        }
        let [min, max] = ["min", "max"].map(|end| format!("{name}.{side}_{end}"));
        let bounds = [self.checkpoint.scalar(&min)?, self.checkpoint.scalar(&max)?];
        match bounds {
            [f32::NEG_INFINITY, f32::INFINITY] => Ok(x),
            [low, high] if low <= high => b.clamp(x, low, high),
            [low, high] => Err(Error::new(
                ErrorKind::Artifact,
                format!("tensors {min} and {max} are {low} and {high}, expected bounds in order"),
            )),
        }
    }
}
