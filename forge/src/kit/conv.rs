//! Causal depthwise convolution over a state of older rows.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, TensorId};

/// A causal depthwise convolution, whose older rows are the state `past_conv_<layer>` `[kernel − 1, channels]`.
#[derive(Debug, Clone)]
pub struct CausalConv {
    /// Number of the layer in the names of its states.
    pub layer: usize,
    /// Number of channels.
    pub channels: usize,
    /// Rows that one output sees, at least 2.
    pub kernel: usize,
    /// Width of the rows that one token's channels are laid out in, a divisor of `channels`: full rows fill the NPU's
    /// tiles, of which a single row leaves most empty.
    pub width: usize,
    /// Weights `[kernel, channels]`, the oldest row first; see [`conv_taps`].
    pub taps: Vec<f32>,
    /// One value a channel that is added.
    pub bias: Option<Vec<f32>>,
}

/// The tensor `name` `[channels, 1, kernel]` as `[kernel, channels]`.
///
/// # Errors
/// When the tensor is missing, or has another shape.
pub fn conv_taps(
    checkpoint: &Checkpoint,
    name: &str,
    [channels, kernel]: [usize; 2],
) -> Result<Vec<f32>> {
    let stored = checkpoint.values(name, &[channels, 1, kernel])?;
    let mut taps = vec![0f32; stored.len()];
    for (channel, row) in stored.chunks_exact(kernel).enumerate() {
        for (tap, &value) in row.iter().enumerate() {
            taps[tap * channels + channel] = value;
        }
    }
    Ok(taps)
}

impl CausalConv {
    /// The convolution over the state and rows `own` `[rows, channels]`: the same shape, or
    /// `[channels / width, width]` of one row. `keep` `[kernel − 1, kernel − 1 + rows]` chooses the rows that the next
    /// graph begins with, of several.
    ///
    /// Products and a sum of rows: a reduction over that few costs the NPU many times as much.
    ///
    /// # Errors
    /// Errors of the builder.
    pub fn build(
        self,
        b: &mut GraphBuilder,
        own: TensorId,
        keep: Option<TensorId>,
    ) -> Result<TensorId> {
        let Self { layer, channels, kernel, .. } = self;
        let shape = [kernel - 1, channels];
        let past = b.input(&format!("past_conv_{layer}"), Elem::Activation, &shape)?;
        let (out, present) = match keep {
            Some(keep) => self.of_rows(b, past, own, keep)?,
            None => self.of_one(b, past, own)?,
        };
        b.output(&format!("present_conv_{layer}"), present)?;
        Ok(out)
    }

    fn of_rows(
        self,
        b: &mut GraphBuilder,
        past: TensorId,
        own: TensorId,
        keep: TensorId,
    ) -> Result<(TensorId, TensorId)> {
        let rows = b.shape(own)?.first().copied().unwrap_or(1);
        let window = b.concat(&[past, own], 0)?;
        let mut sums = self.bias.map(|bias| b.row("conv_bias", bias)).transpose()?;
        for (tap, weights) in self.taps.chunks_exact(self.channels).enumerate() {
            let shifted = b.slice(window, 0, tap, tap + rows)?;
            let weights = b.row(&format!("conv_{tap}"), weights.to_vec())?;
            let term = b.mul(shifted, weights)?;
            sums = Some(match sums {
                Some(sums) => b.add(sums, term)?,
                None => term,
            });
        }
        let present = b.matmul(keep, window, false)?;
        Ok((sums.unwrap_or(own), present))
    }

    fn of_one(
        self,
        b: &mut GraphBuilder,
        past: TensorId,
        own: TensorId,
    ) -> Result<(TensorId, TensorId)> {
        let Self { channels, kernel, width, mut taps, bias, .. } = self;
        // The library leaves whatever is in memory in the tiles of constants with an odd number of rows.
        let rows = channels / width;
        let newest = taps.split_off((kernel - 1) * channels);
        let fifo = [(kernel - 1) * rows, width];
        let older = b.constant("conv_older", Elem::Activation, &fifo, taps)?;
        let newest = b.constant("conv_newest", Elem::Activation, &[rows, width], newest)?;
        let window = b.reshape(past, &fifo)?;
        let older = b.mul(window, older)?;
        let current = b.reshape(own, &[rows, width])?;
        let mut sums = b.mul(current, newest)?;
        for start in (0..fifo[0]).step_by(rows) {
            let term = b.slice(older, 0, start, start + rows)?;
            sums = b.add(sums, term)?;
        }
        if let Some(bias) = bias {
            let bias = b.constant("conv_bias", Elem::Activation, &[rows, width], bias)?;
            sums = b.add(sums, bias)?;
        }
        let present = if kernel > 2 {
            let kept = b.slice(window, 0, rows, fifo[0])?;
            b.concat(&[kept, current], 0)?
        } else {
            current
        };
        Ok((sums, b.reshape(present, &[kernel - 1, channels])?))
    }
}

/// The greatest common divisor (Euclid).
pub(crate) const fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
