//! The ops of a graph as instructions.

use qhx_graph::graph::{
    AttentionInputs, BinaryOp, Conv2d, INT8_STEP, Node, Op, Origin, ReduceOp, TensorId,
};

use super::attend::{self, Attend, CacheScales, Shape};
use super::compile::{Compiler, Lowered, TOO_LARGE, Value, walk};
use super::conv::{ConvShape, Padding};
use super::kernels::Unary;
use super::view::{Place, View, common};
use super::{By, Dense, Elem, Instruction, Matmul, Table};
use crate::weights::{Floats, Weights};

/// Elements of a constant factor from which on it is multiplied like stored weights, which takes a copy of it in their
/// order.
const LARGE: usize = 1 << 16;

impl Compiler<'_> {
    /// The value of a node.
    pub(super) fn node(&mut self, node: &Node) -> Lowered<Value> {
        let view = match (&node.op, &node.inputs[..]) {
            (Op::Linear, &[x, weight, ref bias @ ..]) => self.linear(x, weight, bias)?,
            (Op::MatMul { transpose_b }, &[a, b]) => self.matmul(a, b, *transpose_b)?,
            (Op::Binary(op), &[a, b]) => return self.binary(*op, a, b),
            (Op::Unary(op), &[x]) => self.each(x, Unary::Op(*op))?,
            (Op::Clamp { min, max }, &[x]) => self.each(x, Unary::Clip(*min, *max))?,
            (Op::Reduce { op, axis }, &[x]) => self.reduce(*op, x, *axis)?,
            (Op::Softmax, &[x]) => {
                let (x, view) = self.dense_floats(x)?;
                let size = view.dims.last().ok_or(NO_DIMENSIONS)?.size;
                let (out, result) = self.buffer(&view.shape())?;
                self.instructions.push(Instruction::Softmax { x, size, out });
                result
            }
            (Op::RmsNorm { epsilon }, &[x, weight]) => {
                let (epsilon, (weight, _)) = (*epsilon, self.dense_floats(weight)?);
                let (x, view) = self.dense_floats(x)?;
                let (out, result) = self.buffer(&view.shape())?;
                self.instructions.push(Instruction::RmsNorm { x, weight, epsilon, out });
                result
            }
            (Op::LayerNorm { epsilon }, &[x, weight, bias]) => {
                let (epsilon, (weight, _), (bias, _)) =
                    (*epsilon, self.dense_floats(weight)?, self.dense_floats(bias)?);
                let (x, view) = self.dense_floats(x)?;
                let (out, result) = self.buffer(&view.shape())?;
                self.instructions.push(Instruction::LayerNorm { x, weight, bias, epsilon, out });
                result
            }
            (Op::Conv2d(conv), &[x, filters, ref bias @ ..]) => {
                self.conv(conv, x, filters, bias.first().copied())?
            }
            (Op::Gather, &[table, indices]) => return self.gather(table, indices),
            (Op::Reshape, &[x]) => {
                let shape = &self.graph.tensor(node.output).map_err(|e| e.to_string())?.shape;
                let Value { view, elem } = self.value(x)?;
                let (_, view) = self.dense(view)?;
                return Ok(Value { view: view.reshaped(shape).ok_or(TOO_LARGE)?, elem });
            }
            (Op::Transpose { perm }, &[x]) => {
                let Value { view, elem } = self.value(x)?;
                let dims = perm.iter().map(|&axis| view.dims.get(axis).copied());
                let dims = dims.collect::<Option<_>>().ok_or(NO_DIMENSIONS)?;
                return Ok(Value { view: View { dims, ..view }, elem });
            }
            (Op::Concat { axis }, inputs) => return self.concat(inputs, *axis),
            (Op::Slice { axis, start, end }, &[x]) => {
                let mut value = self.value(x)?;
                let dim = value.view.dims.get_mut(*axis).ok_or(NO_DIMENSIONS)?;
                dim.size = end.checked_sub(*start).ok_or(NO_DIMENSIONS)?;
                value.view.start += start * dim.step;
                return Ok(value);
            }
            (Op::Cast, &[x]) => return self.cast(x, node.output),
            (Op::Attention(form), inputs) => {
                let inputs = AttentionInputs::of(*form, inputs).ok_or(INPUTS)?;
                self.attention(inputs)?
            }
            _ => return Err(INPUTS.to_owned()),
        };
        Ok(Value { view, elem: Elem::F32 })
    }

    fn each(&mut self, x: TensorId, op: Unary) -> Lowered<View> {
        let x = self.floats(x)?;
        self.unary(op, &x)
    }

    fn dense_floats(&mut self, x: TensorId) -> Lowered<(Dense, View)> {
        let x = self.floats(x)?;
        self.dense(x)
    }

    /// The weight that a tensor is.
    fn weights(&self, id: TensorId) -> Lowered<Weights> {
        let tensor = self.graph.tensor(id).map_err(|e| e.to_string())?;
        match &tensor.origin {
            Origin::Weight(weight) => Weights::of(weight),
            _ => Err(format!("{:?} is no weight", tensor.name)),
        }
    }

    fn linear(&mut self, x: TensorId, weight: TensorId, bias: &[TensorId]) -> Lowered<View> {
        let weights = Box::new(self.weights(weight)?);
        let bias = bias.first().map(|&bias| self.constant_values(bias)).transpose()?;
        let x = self.floats(x)?;
        self.by_weights(x, By::Stored(weights, bias))
    }

    /// The values of a constant of f32.
    fn constant_values(&mut self, id: TensorId) -> Lowered<Floats> {
        let view = self.floats(id)?;
        let Place::Constant(index) = view.place else { return Err("it is no constant".to_owned()) };
        Ok(Floats::Own(self.constants[index].get().to_vec()))
    }

    fn binary(&mut self, op: BinaryOp, a: TensorId, b: TensorId) -> Lowered<Value> {
        let (a, b) = (self.value(a)?, self.value(b)?);
        let view = self.pair(op, &a.view, &b.view, a.elem)?;
        Ok(Value { view, elem: a.elem })
    }

    fn pair(&mut self, op: BinaryOp, a: &View, b: &View, elem: Elem) -> Lowered<View> {
        let shapes = || format!("its shapes are {:?} and {:?}", a.shape(), b.shape());
        let shape = common(&a.shape(), &b.shape()).ok_or_else(shapes)?;
        // What is too large is refused here; the walk multiplies the same sizes.
        let (out, view) = self.buffer(&shape)?;
        let (a, b) = (a.broadcast(&shape), b.broadcast(&shape));
        let walk = walk([&a.ok_or_else(shapes)?, &b.ok_or_else(shapes)?])?;
        self.instructions.push(match elem {
            Elem::I32 => Instruction::IntBinary { op, walk, out },
            _ => Instruction::Binary { op, walk, out },
        });
        Ok(view)
    }

    fn concat(&mut self, inputs: &[TensorId], at: usize) -> Lowered<Value> {
        let mut views = Vec::with_capacity(inputs.len());
        let mut elem = Elem::F32;
        for &id in inputs {
            let value = self.value(id)?;
            elem = value.elem;
            views.push(value.view);
        }
        let mut shape = views.first().ok_or(INPUTS)?.shape();
        let sizes = views.iter().map(|view| view.dims.get(at).map(|dim| dim.size));
        let all = sizes.sum::<Option<usize>>().ok_or(NO_DIMENSIONS)?;
        *shape.get_mut(at).ok_or(NO_DIMENSIONS)? = all;
        // Copies would be written by instructions after the first part.
        let mut walks = Vec::with_capacity(views.len());
        let below: usize = shape[at + 1..].iter().product();
        for view in views {
            let width = view.dims[at].size * below;
            let mut over = walk([&view])?;
            if !over.begins_rows(width) {
                over = walk([&self.unary(Unary::Copy, &view)?])?;
            }
            walks.push((over, width));
        }
        let (out, result) = self.buffer(&shape)?;
        let (stride, mut start) = (shape[at] * below, 0);
        for (walk, width) in walks {
            self.instructions.push(Instruction::Part { walk, out, start, width, stride });
            start += width;
        }
        Ok(Value { view: result, elem })
    }

    fn reduce(&mut self, op: ReduceOp, x: TensorId, at: usize) -> Lowered<View> {
        let (x, view) = self.dense_floats(x)?;
        let mut shape = view.shape();
        let size = std::mem::replace(shape.get_mut(at).ok_or(NO_DIMENSIONS)?, 1);
        let inner = shape[at + 1..].iter().product();
        let (out, result) = self.buffer(&shape)?;
        self.instructions.push(Instruction::Reduce { op, x, size, inner, out });
        Ok(result)
    }

    /// Rows of a table.
    fn gather(&mut self, table: TensorId, indices: TensorId) -> Lowered<Value> {
        let indices = self.value(indices)?;
        if indices.elem != Elem::I32 {
            return Err(format!("its indices are {:?}, not i32", indices.elem));
        }
        let stored = match self.graph.tensor(table).map_err(|e| e.to_string())?.origin {
            Origin::Weight(_) => Some(self.weights(table)?),
            _ => None,
        };
        let (table, width, elem) = match stored {
            Some(weights) => {
                let width = weights.columns;
                (Table::Stored(Box::new(weights)), width, Elem::F32)
            }
            None => {
                let Value { view, elem } = self.value(table)?;
                let &[_, width] = &view.shape()[..] else { return Err(NO_DIMENSIONS.to_owned()) };
                (Table::Values(self.dense(view)?.0), width, elem)
            }
        };
        let shape = [indices.view.len(), width];
        let (indices, _) = self.dense(indices.view)?;
        let (out, view) = self.buffer(&shape)?;
        self.instructions.push(Instruction::Gather { table, width, indices, out });
        Ok(Value { view, elem })
    }

    fn cast(&mut self, x: TensorId, output: TensorId) -> Lowered<Value> {
        let Value { view, elem } = self.value(x)?;
        let to = self.declared(output)?.1;
        let view = match (elem, to) {
            _ if elem == to => view,
            (_, Elem::F32) => self.convert(elem, &view)?,
            (Elem::F32, Elem::I32) => self.unary(Unary::Truncate, &view)?,
            _ => return Err(format!("it is from {elem:?} to {to:?}")),
        };
        Ok(Value { view, elem: to })
    }

    /// Integers as f32.
    fn convert(&mut self, from: Elem, x: &View) -> Lowered<View> {
        let walk = walk([x])?;
        let (out, view) = self.buffer(&x.shape())?;
        self.instructions.push(Instruction::Convert { from, walk, out });
        Ok(view)
    }

    fn conv(
        &mut self,
        conv: &Conv2d,
        x: TensorId,
        filters: TensorId,
        bias: Option<TensorId>,
    ) -> Lowered<View> {
        let x = self.floats(x)?;
        let values = self.weights(filters)?.dequantized();
        let sizes = &self.graph.tensor(filters).map_err(|e| e.to_string())?.shape;
        let (&[batch, channels, rows, columns], &[count, _, down, across]) =
            (&x.shape()[..], &sizes[..])
        else {
            return Err(NO_DIMENSIONS.to_owned());
        };
        let padded = |at: usize, size: usize| {
            size.checked_add(conv.padding[at][0])?.checked_add(conv.padding[at][1])
        };
        let steps = |at: usize, size: usize, kernel: usize| {
            let reach = conv.dilation[at].checked_mul(kernel - 1)?.checked_add(1)?;
            Some(padded(at, size)?.checked_sub(reach)? / conv.stride[at] + 1)
        };
        let input = padded(0, rows).zip(padded(1, columns)).ok_or(TOO_LARGE)?;
        let output = steps(0, rows, down).zip(steps(1, columns, across));
        let output = output.ok_or("its filters do not fit into its input")?;
        let shape = ConvShape {
            batch,
            input: input.into(),
            channels,
            output: output.into(),
            filters: count,
            groups: conv.groups,
            kernel: [down, across],
            stride: conv.stride,
            dilation: conv.dilation,
        };
        let bias = bias.map(|bias| Ok::<_, String>(self.dense_floats(bias)?.0)).transpose()?;
        let packed = shape.pack(&values);
        let len = packed.len();
        let filters = self.constant(Floats::Own(packed), &[len])?;
        let filters = Dense { place: filters.place, start: 0, len };
        // Channels last.
        let dims = [0, 2, 3, 1].map(|at| x.dims[at]).to_vec();
        let x = self.padded(View { dims, ..x }, conv.padding)?;
        let (x, _) = self.dense(x)?;
        let (out, result) = self.buffer(&[batch, shape.output[0], shape.output[1], count])?;
        self.instructions.push(Instruction::Conv { shape, x, filters, bias, out });
        let [batch, rows, columns, channels] = *result.dims.as_slice() else {
            return Err(NO_DIMENSIONS.to_owned());
        };
        let dims = vec![batch, channels, rows, columns];
        Ok(View { dims, ..result })
    }

    /// `x` `[batch, rows, columns, channels]` with zeros around each image.
    fn padded(&mut self, x: View, pads: [[usize; 2]; 2]) -> Lowered<View> {
        if pads == [[0; 2]; 2] {
            return Ok(x);
        }
        let [batch, rows, columns, channels] = *x.shape() else {
            return Err(NO_DIMENSIONS.to_owned());
        };
        let [around, beside] = pads;
        let full = |size: usize, pads: [usize; 2]| size + pads[0] + pads[1];
        let shape = [batch, full(rows, around), full(columns, beside), channels];
        let (out, result) = self.buffer(&shape)?;
        let mut over = walk([&x])?;
        if !over.begins_rows(columns * channels) {
            over = walk([&self.unary(Unary::Copy, &x)?])?;
        }
        let padding = Padding {
            batch,
            rows,
            width: columns * channels,
            around,
            beside: beside.map(|columns| columns * channels),
        };
        self.instructions.push(Instruction::Pad { padding, walk: over, out });
        Ok(result)
    }

    fn push_matmul(&mut self, x: Dense, by: By, shape: &[usize]) -> Lowered<View> {
        let (out, view) = self.buffer(shape)?;
        let matmul = Matmul { x, out, by };
        // Matmuls that wait for nothing of each other are computed at once.
        match self.instructions.last_mut() {
            Some(Instruction::Matmuls(all))
                if all.iter().all(|one| !matmul.reads(Place::Buffer(one.out))) =>
            {
                all.push(matmul);
            }
            _ => self.instructions.push(Instruction::Matmuls(vec![matmul])),
        }
        Ok(view)
    }

    /// `x` by weights of as many columns as a row of it has.
    fn by_weights(&mut self, x: View, by: By) -> Lowered<View> {
        let (rows, columns) = match &by {
            By::Stored(weights, _) => (weights.rows, weights.columns),
            By::Input { scales, columns, .. } => (scales.len(), *columns),
            By::Heads { shape: [.., n], k, .. } => (*n, *k),
        };
        let (x, view) = self.dense(x)?;
        let mut shape = view.shape();
        let last = shape.last_mut().filter(|last| **last == columns);
        *last.ok_or_else(|| {
            format!("rows of {:?} by weights of {columns} columns", view.shape())
        })? = rows;
        self.push_matmul(x, by, &shape)
    }

    /// A matmul of two values; the second may be int8 of an input.
    fn matmul(&mut self, a: TensorId, b: TensorId, transpose_b: bool) -> Lowered<View> {
        let (x, Value { view: mut b, elem }) = (self.floats(a)?, self.value(b)?);
        if elem == Elem::I8 {
            if let (&[rows, columns], true) = (&b.shape()[..], transpose_b) {
                let b = Dense { place: b.place, start: b.start, len: b.len() };
                let scales = vec![INT8_STEP; rows];
                return self.by_weights(x, By::Input { b, scales, columns });
            }
            let converted = self.convert(elem, &b)?;
            let step = self.constant(Floats::Own(vec![INT8_STEP]), &[1])?;
            let step = step.broadcast(&converted.shape()).ok_or(NO_DIMENSIONS)?;
            b = self.pair(BinaryOp::Mul, &converted, &step, Elem::F32)?;
        }
        if transpose_b && let [.., rows, columns] = &mut b.dims[..] {
            std::mem::swap(rows, columns);
        }
        self.multiplied(x, b)
    }

    fn attention(&mut self, inputs: AttentionInputs<TensorId>) -> Lowered<View> {
        const SIZES: &str = "the sizes of an attention with caches do not fit";
        let AttentionInputs { q, k, v, past: Some(past), scales, mask: Some(mask), .. } = inputs
        else {
            return Err(INPUTS.to_owned());
        };
        if inputs.cap.is_some() || inputs.sinks.is_some() {
            return Err(INPUTS.to_owned());
        }
        let (q, mask) = (self.floats(q)?, self.floats(mask)?);
        let [heads, queries, dim] = *q.shape() else { return Err(SIZES.to_owned()) };
        let sizes = mask.shape();
        let [ones @ .., mask_rows, width] = sizes.as_slice() else {
            return Err(SIZES.to_owned());
        };
        let (mask_rows, width) = (*mask_rows, *width);
        let mut caches = Vec::with_capacity(4);
        for (past, own) in past.into_iter().zip([k, v]) {
            caches.push(match self.value(past)? {
                Value { view, elem } if scales.is_some() || elem == Elem::F16 => view,
                _ => self.floats(past)?,
            });
            caches.push(self.floats(own)?);
        }
        let rows_of = |view: &View| match *view.shape() {
            [n, rows, d] if n == heads && d == dim => Some(rows),
            _ => None,
        };
        let [Some(capacity), Some(rows), past, own] = [0, 1, 2, 3].map(|at| rows_of(&caches[at]))
        else {
            return Err(SIZES.to_owned());
        };
        let fits = (past, own) == (Some(capacity), Some(rows))
            && queries.is_multiple_of(rows)
            && capacity.checked_add(rows) == Some(width)
            && (mask_rows == 1 || mask_rows == rows)
            && ones.iter().all(|size| *size == 1);
        if !fits {
            return Err(SIZES.to_owned());
        }
        let repeat = queries / rows;
        let scales = match scales {
            Some([of_k, of_v]) => {
                let rows = [self.dense_floats(of_k)?.0, self.dense_floats(of_v)?.0];
                Some(CacheScales { rows, step: INT8_STEP })
            }
            None => None,
        };
        let mut dense = Vec::with_capacity(4);
        for view in caches {
            // Those of int8 and f16 are inputs of the graph, as they are.
            dense.push(self.dense(view)?.0);
        }
        let [past_k, k, past_v, v] = *dense.as_slice() else { return Err(SIZES.to_owned()) };
        let (q, _) = self.dense(q)?;
        let (mask, _) = self.dense(mask)?;
        let shape = attend::MaskShape::new(mask_rows, width, repeat);
        let key = (mask.place, mask.start, shape);
        let known = self.seen.iter().position(|known| *known == key);
        let seen = known.unwrap_or_else(|| {
            self.seen.push(key);
            let seen = self.seen.len() - 1;
            self.instructions.push(Instruction::See { mask, shape, seen });
            seen
        });
        let shape = Shape { heads, repeat, rows, capacity, dim, mask: shape };
        let (keys, values) = ([past_k, k], [past_v, v]);
        let (out, view) = self.buffer(&[heads, queries, dim])?;
        let attend = Box::new(Attend { q, keys, values, scales, mask, seen, shape });
        self.instructions.push(Instruction::Attend { attend, out });
        Ok(view)
    }

    fn multiplied(&mut self, a: View, b: View) -> Lowered<View> {
        let shapes = || format!("its shapes are {:?} and {:?}", a.shape(), b.shape());
        let (sizes, sizes_b) = (a.shape(), b.shape());
        let ([batch @ .., m, k], [batch_b @ .., k_b, n]) = (&sizes[..], &sizes_b[..]) else {
            return Err(shapes());
        };
        let (m, k, n) = (*m, *k, *n);
        let (heads, heads_b): (usize, usize) = (batch.iter().product(), batch_b.iter().product());
        let all = common(batch, batch_b).ok_or_else(shapes)?;
        // One matrix for all, or one for each.
        let count: usize = all.iter().product();
        if k != *k_b || [heads, heads_b].iter().any(|&heads| heads != 1 && heads != count) {
            return Err(shapes());
        }
        let mut swapped = b.clone();
        let rank = swapped.dims.len();
        swapped.dims.swap(rank - 1, rank - 2);
        if let Place::Constant(constant) = b.place
            && batch_b.is_empty()
            && b.len() >= LARGE
        {
            let values = self.constants.get(constant).map(|values| values.get());
            let values = values.and_then(|values| swapped.collect(values)).ok_or_else(shapes)?;
            let weights = Box::new(Weights::own(n, k, &values));
            return self.by_weights(a, By::Stored(weights, None));
        }
        let shape = [count, m, n];
        let (a, _) = self.dense(a)?;
        let transposed = !b.is_dense() && swapped.is_dense();
        let (b, _) = self.dense(if transposed { swapped } else { b })?;
        let by = By::Heads { b, shape, k, transposed };
        self.push_matmul(a, by, &[all, vec![m, n]].concat())
    }
}

const NO_DIMENSIONS: &str = "its inputs have other dimensions";
const INPUTS: &str = "it has other inputs";
