//! Convolutions, in the layouts that checkpoints of PyTorch have: channels before rows and columns.

use qhx_base::Result;

use super::GraphBuilder;
use crate::graph::{Conv1d, Conv2d, Elem, Op, TensorId};
use crate::weight::{Storage, Weight};

impl GraphBuilder {
    /// Convolution of images as `torch.nn.Conv2d`, see [`Op::Conv2d`]: x `[n, in, rows, columns]` becomes
    /// `[n, out, rows', columns']`.
    ///
    /// `weight` is the checkpoint's `[out, in / groups, kernel rows, kernel columns]` as a matrix
    /// `[out, in / groups · kernel rows · kernel columns]`, stored as floats. Its name in the graph is
    /// `<scope>_<name>`.
    ///
    /// # Errors
    /// When the shapes or element types do not fit; the message names the node.
    pub fn conv2d(
        &mut self,
        name: &str,
        x: TensorId,
        weight: Weight,
        bias: Option<Vec<f32>>,
        conv: Conv2d,
    ) -> Result<TensorId> {
        let name = self.qualified(name);
        let out = weight.rows();
        let (filter, shape) = self.conv2d_shapes(&name, x, &weight, conv)?;
        let mut inputs = vec![x, self.weight(&name, weight, filter)?];
        inputs.extend(self.bias("conv2d", &name, bias, out)?);
        self.node_named(name, Op::Conv2d(conv), inputs, Elem::Activation, shape)
    }

    /// The shapes of the filters of an [`Op::Conv2d`] with this weight, and of what it makes of `x`.
    pub(super) fn conv2d_shapes(
        &self,
        name: &str,
        x: TensorId,
        weight: &Weight,
        conv: Conv2d,
    ) -> Result<(Vec<usize>, Vec<usize>)> {
        let input = self.graph.tensor(x)?;
        let (out, cols) = (weight.rows(), weight.cols());
        let Conv2d { kernel, stride, dilation, groups, .. } = conv;
        let shape = match input.shape[..] {
            [n, channels, rows, columns] if input.elem == Elem::Activation => {
                let inner = channels / groups.max(1);
                let numbers = kernel.into_iter().chain(stride).chain(dilation).chain([groups]);
                let numbers = numbers.into_iter().all(|n| n > 0 && u32::try_from(n).is_ok());
                let whole = numbers && inner * groups == channels && out.is_multiple_of(groups);
                let filter = inner.checked_mul(kernel[0]).and_then(|n| n.checked_mul(kernel[1]));
                let rows = steps(&conv, 0, rows).filter(|_| whole && filter == Some(cols));
                rows.zip(steps(&conv, 1, columns)).map(|(r, c)| ([n, out, r, c], inner))
            }
            _ => None,
        };
        let Some((shape, inner)) = shape else {
            let found = format!(
                "input is {input}, expected activation[n, in, rows, columns] for a weight [{out}, {cols}] and \
                 {conv:?}: in and out are multiples of the groups, {cols} is in / groups · kernel rows · kernel \
                 columns, the filter fits into the padded input, and no filter sees zeros only"
            );
            return Err(self.bad("conv2d", name, &found));
        };
        if weight.storage() != Storage::Float {
            let found = "an int8 weight, expected floats: only linear takes int8";
            return Err(self.bad("conv2d", name, found));
        }
        Ok((vec![out, inner, kernel[0], kernel[1]], shape.to_vec()))
    }

    /// Convolution along time as `torch.nn.Conv1d`: x `[n, in, length]` becomes `[n, out, length']`. `weight` is
    /// the checkpoint's `[out, in / groups, kernel]` as a matrix `[out, in / groups · kernel]`.
    ///
    /// It is a [`GraphBuilder::conv2d`] of one row, as the NPU library has no convolution of one dimension.
    ///
    /// # Errors
    /// When the shapes or element types do not fit; the message names the node.
    pub fn conv1d(
        &mut self,
        name: &str,
        x: TensorId,
        weight: Weight,
        bias: Option<Vec<f32>>,
        conv: Conv1d,
    ) -> Result<TensorId> {
        let &[n, channels, length] = self.shape(x)? else {
            return Err(self.misused("conv1d", &[x], "activation[n, in, length]"));
        };
        let flat = Conv2d {
            kernel: [1, conv.kernel],
            stride: [1, conv.stride],
            padding: [[0, 0], conv.padding],
            dilation: [1, conv.dilation],
            groups: conv.groups,
        };
        let row = self.reshape(x, &[n, channels, 1, length])?;
        let y = self.conv2d(name, row, weight, bias, flat)?;
        let &[n, out, _, length] = self.shape(y)? else {
            return Err(self.misused("conv1d", &[y], "four dimensions"));
        };
        self.reshape(y, &[n, out, length])
    }
}

/// Outputs along one axis of `size` elements; none when the filter does not fit.
fn steps(conv: &Conv2d, axis: usize, size: usize) -> Option<usize> {
    let [before, after] = conv.padding[axis];
    let reach = conv.dilation[axis].checked_mul(conv.kernel[axis].checked_sub(1)?)?;
    // The NPU library computes wrong numbers where a filter sees zeros only.
    if before > reach || after > reach || u32::try_from(reach).is_err() {
        return None;
    }
    let room = size.checked_add(before)?.checked_add(after)?.checked_sub(reach.checked_add(1)?)?;
    Some(room.checked_div(conv.stride[axis])? + 1)
}
