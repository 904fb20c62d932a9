//! Tables and the choice of their rows.

use std::sync::Arc;

use qhx_base::Result;

use super::{GraphBuilder, elements};
use crate::graph::{Constant, Elem, MAX_RANK, Op, Origin, TensorId};
use crate::weight::{Storage, Weight};

impl GraphBuilder {
    /// A table `[rows, columns]` of the checkpoint, such as learned positions, for [`GraphBuilder::gather`] along
    /// axis 0. It is stored as floats. Its name in the graph is `<scope>_<name>`.
    ///
    /// # Errors
    /// When the name is taken.
    pub fn table(&mut self, name: &str, weight: Weight) -> Result<TensorId> {
        let name = self.qualified(name);
        if weight.storage() != Storage::Float {
            let found = "an int8 weight, expected floats: only linear takes int8";
            return Err(self.bad("table", &name, found));
        }
        let shape = vec![weight.rows(), weight.cols()];
        self.push(name, Elem::Activation, shape, Origin::Weight(weight))
    }

    /// The columns of x `[rows, columns]` in this order: column n is column `order[n]` of x. Once for each x and order.
    ///
    /// # Errors
    /// When the order is not of as many columns, or names one that is not there.
    pub fn reorder(&mut self, x: TensorId, order: &Arc<[u32]>) -> Result<TensorId> {
        let known = self.reordered.iter().find(|(of, by, _)| *of == x && by == order);
        if let Some((_, _, y)) = known {
            return Ok(*y);
        }
        let columns = self.width(x)?;
        let places = order.iter().map(|place| i32::try_from(*place));
        let places: Vec<i32> = places.filter_map(Result::ok).collect();
        let inside = order.iter().all(|place| (*place as usize) < columns);
        if self.shape(x)?.len() != 2 || places.len() != columns || !inside {
            let expected = format!("a matrix and an order of its {columns} columns");
            return Err(self.misused("reorder", &[x], &expected));
        }
        let name = format!("order_{}", self.graph.tensors.len());
        let constant = Origin::Constant(Constant::Int(Arc::from(places)));
        let indices = self.push(name, Elem::I32, vec![columns], constant)?;
        let y = self.gather(x, indices, 1)?;
        self.reordered.push((x, Arc::clone(order), y));
        Ok(y)
    }

    /// Elements of `x` along `axis`, at the positions in `indices` (`torch.index_select`, `numpy.take`):
    /// the indices' dimensions take the place of the axis. `x` is a table or any other tensor but int8.
    ///
    /// `indices` are of [`Elem::I32`], each from 0 to the axis' size less one. The NPU fails on others with error
    /// 1100, or returns values of its own.
    ///
    /// # Errors
    /// When the shapes or element types do not fit; the message names the node.
    pub fn gather(&mut self, x: TensorId, indices: TensorId, axis: usize) -> Result<TensorId> {
        let (tensor, list) = (self.graph.tensor(x)?, self.graph.tensor(indices)?);
        let rank = tensor.shape.len();
        let fits = list.elem == Elem::I32
            && tensor.elem != Elem::Int8
            && axis < rank
            && rank - 1 + list.shape.len() <= MAX_RANK;
        if !fits {
            let expected =
                format!("an axis {axis}, i32 indices, and at most {MAX_RANK} dimensions of both");
            return Err(self.mismatch(&Op::Gather, &[x, indices], &expected));
        }
        let (elem, size, count) = (tensor.elem, tensor.shape[axis], list.elements());
        let flat = list.shape.len() == 1;
        let mut rest = tensor.shape.clone();
        rest.remove(axis);
        let width = elements(&rest).unwrap_or(0);
        let mut shape = tensor.shape.clone();
        shape.splice(axis..=axis, list.shape.iter().copied());
        let moved = tensor.shape[..axis].iter().any(|&n| n != 1);
        let plain = tensor.shape == [size, width];
        // The NPU library is wrong about an axis in the middle, so it always gets rows.
        let mut rows = x;
        if moved {
            let front: Vec<_> =
                std::iter::once(axis).chain((0..rank).filter(|&i| i != axis)).collect();
            rows = self.transpose(rows, &front)?;
        }
        if moved || !plain {
            rows = self.reshape(rows, &[size, width])?;
        }
        let indices = if flat { indices } else { self.reshape(indices, &[count])? };
        let mut y = self.node(Op::Gather, vec![rows, indices], elem, vec![count, width])?;
        if moved {
            let chosen: Vec<_> = std::iter::once(count).chain(rest).collect();
            y = self.reshape(y, &chosen)?;
            let back: Vec<_> = (1..=axis).chain([0]).chain(axis + 1..rank).collect();
            y = self.transpose(y, &back)?;
        }
        if self.shape(y)? != shape {
            y = self.reshape(y, &shape)?;
        }
        Ok(y)
    }
}
