//! Parts of voices that turn frames into samples: convolutions with weight norm along time, and their frames in a clip
//! of a graph of fixed length.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{BinaryOp, Conv1d, TensorId};
use qhx_graph::weight::{self, RowSource, Storage, Weight};

/// Convolutions of a checkpoint, whose weights graphs of several lengths share. Tensors of frames are
/// `[1, channels, frames]`.
#[derive(Debug)]
pub(super) struct Convolutions<'a> {
    checkpoint: &'a Checkpoint,
    /// Weights by name.
    held: RefCell<BTreeMap<String, Arc<dyn RowSource>>>,
}

impl<'a> Convolutions<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, held: RefCell::default() }
    }

    /// A convolution.
    pub(super) fn conv(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        at: &str,
        [outputs, inputs]: [usize; 2],
        conv: Conv1d,
        biased: bool,
    ) -> Result<TensorId> {
        let weight = self.hold(at, || {
            let values = self.normed(at, &[outputs, inputs, conv.kernel])?;
            Ok(([outputs, inputs * conv.kernel], values))
        })?;
        let bias = biased.then(|| self.checkpoint.values(&format!("{at}.bias"), &[outputs]));
        b.conv1d(&graph_name(at), x, Weight::new(weight, Storage::Float), bias.transpose()?, conv)
    }

    /// A weight as it is stored, or with weight norm (Salimans and Kingma 2016, arXiv 1602.07868): `v`, each of its
    /// first dimension of the length `g`.
    pub(super) fn normed(&self, at: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let has = |name: &str| self.checkpoint.has(name);
        let new = [0, 1].map(|part| format!("{at}.parametrizations.weight.original{part}"));
        let old = ["g", "v"].map(|part| format!("{at}.weight_{part}"));
        let Some([lengths, values]) = [new, old].into_iter().find(|[_, values]| has(values)) else {
            return self.checkpoint.values(&format!("{at}.weight"), shape);
        };
        let lengths = self.checkpoint.values(&lengths, &[shape[0], 1, 1])?;
        let mut values = self.checkpoint.values(&values, shape)?;
        let rest = shape.iter().skip(1).product::<usize>().max(1);
        for (row, length) in values.chunks_exact_mut(rest).zip(lengths) {
            let norm = row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>().sqrt();
            let factor = if norm > 0.0 { (f64::from(length) / norm) as f32 } else { 0.0 };
            row.iter_mut().for_each(|value| *value *= factor);
        }
        Ok(values)
    }

    /// A weight that was made of the checkpoint's, once for all graphs.
    pub(super) fn hold(
        &self,
        name: &str,
        make: impl FnOnce() -> Result<([usize; 2], Vec<f32>)>,
    ) -> Result<Arc<dyn RowSource>> {
        if let Some(held) = self.held.borrow().get(name) {
            return Ok(Arc::clone(held));
        }
        let (shape, values) = make()?;
        let held = weight::held(format!("{name}.weight"), shape, values);
        self.held.borrow_mut().insert(name.to_owned(), Arc::clone(&held));
        Ok(held)
    }

    /// `ConvTranspose1d` with a kernel of twice its stride, `[1, from, frames]` to `[1, to, frames · rate]`: each frame
    /// and the one before it give as many as the rate, of which half a rate is cut off at both ends.
    pub(super) fn up(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        at: &str,
        [to, from]: [usize; 2],
        rate: usize,
    ) -> Result<TensorId> {
        let weight = self.hold(at, || {
            let values = self.normed(at, &[from, to, 2 * rate])?;
            let mut turned = vec![0.0; values.len()];
            for (input, of_input) in values.chunks_exact(to * 2 * rate).enumerate() {
                for (row, value) in of_input.iter().enumerate() {
                    let (output, step) = (row / (2 * rate), row % (2 * rate));
                    // The frame before gives the second half of what it spreads to.
                    let (step, tap) = if step < rate { (step, 1) } else { (step - rate, 0) };
                    turned[((output * rate + step) * from + input) * 2 + tap] = *value;
                }
            }
            Ok(([to * rate, from * 2], turned))
        })?;
        let len = b.width(x)?;
        let bias = self.checkpoint.values(&format!("{at}.bias"), &[to])?;
        let bias = bias.iter().flat_map(|value| std::iter::repeat_n(*value, rate)).collect();
        let conv = Conv1d { padding: [1, 1], ..Conv1d::new(2) };
        let y =
            b.conv1d(&graph_name(at), x, Weight::new(weight, Storage::Float), Some(bias), conv)?;
        let y = b.reshape(y, &[to, rate, len + 1])?;
        let y = b.transpose(y, &[0, 2, 1])?;
        let y = b.reshape(y, &[1, to, (len + 1) * rate])?;
        b.slice(y, 2, rate / 2, rate / 2 + len * rate)
    }
}

/// `max(x, slope · x)`.
pub(super) fn leaky(b: &mut GraphBuilder, x: TensorId, slope: f32) -> Result<TensorId> {
    let low = b.scale(x, slope)?;
    b.binary(BinaryOp::Max, x, low)
}

/// `[rows, channels]` as `[1, channels, rows]`.
pub(super) fn by_channels(b: &mut GraphBuilder, x: TensorId) -> Result<TensorId> {
    let &[rows, channels] = b.shape(x)? else {
        return Err(Error::new(ErrorKind::Internal, "frames of other than two dimensions"));
    };
    let x = b.transpose(x, &[1, 0])?;
    b.reshape(x, &[1, channels, rows])
}

/// `[1, 1, len]`, 1 in a clip and 0 behind it, at a rate that has `times` values for each.
pub(super) fn finer(b: &mut GraphBuilder, keep: TensorId, times: usize) -> Result<TensorId> {
    let len = b.width(keep)?;
    let keep = b.reshape(keep, &[len, 1])?;
    let keep = b.concat(&vec![keep; times], 1)?;
    b.reshape(keep, &[1, 1, len * times])
}

/// The last parts of a tensor's name, as a name in a graph.
pub(super) fn graph_name(at: &str) -> String {
    let mut parts: Vec<_> = at.rsplit('.').take(2).collect();
    parts.reverse();
    parts.join("_")
}
