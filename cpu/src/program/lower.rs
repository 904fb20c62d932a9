//! The operators of ONNX as instructions.

use qhx_types::onnx::{Operator, attribute};
use rten_onnx::onnx::{DataType, NodeProto};

use super::attend::{Attend, CacheScales, Shape};
use super::compile::{Compiler, Lowered, TOO_LARGE, Value, walk};
use super::conv::{ConvShape, Padding};
use super::kernels::{Binary, Reduction, Unary};
use super::reader::{StoredMatmul, integer, integers, plain_attribute, positive, to_float};
use super::view::{Dim, Place, View, common};
use super::{By, Dense, Elem, Instruction, Matmul, Table, attend, fused};
use crate::weights::Weights;

/// Elements of a constant factor from which on it is multiplied like stored weights, which takes a copy of it in their
/// order.
const LARGE: usize = 1 << 16;

impl<'a> Compiler<'a, '_, '_> {
    /// An operator on what the graph computes.
    pub(super) fn operator(
        &mut self,
        node: &'a NodeProto,
        operator: Operator,
        name: &'a str,
    ) -> Lowered<Value> {
        let view = match operator {
            Operator::Cast => return self.cast(node, name),
            Operator::Identity => return self.value(name),
            Operator::DequantizeLinear => self.dequantized(node, name)?,
            Operator::Add => return self.binary(node, Binary::Add),
            Operator::Sub => return self.binary(node, Binary::Sub),
            Operator::Mul => return self.binary(node, Binary::Mul),
            Operator::Div => return self.binary(node, Binary::Div),
            Operator::Max => return self.binary(node, Binary::Max),
            Operator::Min => return self.binary(node, Binary::Min),
            Operator::Reshape
            | Operator::Transpose
            | Operator::Slice
            | Operator::Concat
            | Operator::Gather => return self.moved(node, operator, name),
            Operator::ReduceSum => self.reduce(node, name, Reduction::Sum)?,
            Operator::ReduceMean => self.reduce(node, name, Reduction::Mean)?,
            Operator::ReduceMax => self.reduce(node, name, Reduction::Max)?,
            Operator::ReduceMin => self.reduce(node, name, Reduction::Min)?,
            Operator::Softmax => {
                let x = self.floats(name)?;
                let axis = axis(integer(node, attribute::AXIS).unwrap_or(-1), x.dims.len())?;
                if axis + 1 != x.dims.len() {
                    return Err("its axis is not the last".to_owned());
                }
                let (x, view) = self.dense(x)?;
                let size = view.dims.last().ok_or(NO_DIMENSIONS)?.size;
                let (out, result) = self.buffer(&view.shape())?;
                self.instructions.push(Instruction::Softmax { x, size, out });
                result
            }
            Operator::LayerNormalization => self.layer_norm(node, name)?,
            Operator::MatMul => self.matmul(node, name)?,
            Operator::Gemm => self.gemm(node, name)?,
            Operator::Conv => self.conv(node, name)?,
            // Its weights are stored in a form that is multiplied as it is, or it is not known.
            Operator::MatMulNBits => return Err(format!("an operator of {:?}", operator.domain())),
            Operator::Abs => self.each(name, Unary::Abs)?,
            Operator::Neg => self.each(name, Unary::Neg)?,
            Operator::Exp => self.each(name, Unary::Exp)?,
            Operator::Log => self.each(name, Unary::Log)?,
            Operator::Sqrt => self.each(name, Unary::Sqrt)?,
            Operator::Reciprocal => self.each(name, Unary::Reciprocal)?,
            Operator::Sigmoid => self.each(name, Unary::Sigmoid)?,
            Operator::Sin => self.each(name, Unary::Sin)?,
            Operator::Tanh => self.each(name, Unary::Tanh)?,
            Operator::Relu => self.each(name, Unary::Relu)?,
            Operator::Erf => self.each(name, Unary::Erf)?,
            Operator::Clip => {
                let clip = self.clip(node)?;
                self.each(name, clip)?
            }
        };
        Ok(Value { view, elem: Elem::F32 })
    }

    fn each(&mut self, name: &'a str, op: Unary) -> Lowered<View> {
        let x = self.floats(name)?;
        self.unary(op, &x)
    }

    fn clip(&self, node: &'a NodeProto) -> Lowered<Unary> {
        let bound = |at: usize, missing| match self.input(node, at) {
            None => Ok(missing),
            Some(name) => {
                let found = self.reader.floats(name, &[]);
                let found = found.and_then(|value| value.get().first().copied());
                found.ok_or_else(|| format!("the bound {name:?} is no constant of f32"))
            }
        };
        Ok(Unary::Clip(bound(1, f32::NEG_INFINITY)?, bound(2, f32::INFINITY)?))
    }

    fn binary(&mut self, node: &'a NodeProto, op: Binary) -> Lowered<Value> {
        let [a, b] = node.input.as_slice() else {
            return Err(format!("it has {} inputs, not 2", node.input.len()));
        };
        let (a, b) = (self.value(a)?, self.value(b)?);
        if a.elem != b.elem || !matches!(a.elem, Elem::F32 | Elem::I32) {
            return Err(format!("its inputs are {:?} and {:?}", a.elem, b.elem));
        }
        let view = self.pair(op, &a.view, &b.view, a.elem)?;
        Ok(Value { view, elem: a.elem })
    }

    fn pair(&mut self, op: Binary, a: &View, b: &View, elem: Elem) -> Lowered<View> {
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

    /// Lowers an operator that only moves elements.
    fn moved(&mut self, node: &'a NodeProto, kind: Operator, name: &'a str) -> Lowered<Value> {
        let Value { view: x, elem } = self.stored_or_value(kind, name)?;
        if !matches!(elem, Elem::F32 | Elem::I32) {
            return Err(format!("its input is {elem:?}"));
        }
        let view = match kind {
            Operator::Reshape => {
                let wanted = self.integers(node, 1)?;
                if integer(node, attribute::ALLOW_ZERO).unwrap_or(0) != 0 {
                    return Err("sizes of 0".to_owned());
                }
                let shape = reshaped(&x.shape(), &wanted)
                    .ok_or_else(|| format!("{:?} to {wanted:?}", x.shape()))?;
                let (_, x) = self.dense(x)?;
                x.reshaped(&shape).ok_or(TOO_LARGE)?
            }
            Operator::Transpose => {
                let reversed: Vec<i64> = (0..x.dims.len() as i64).rev().collect();
                let perm = integers(node, attribute::PERM).unwrap_or(&reversed);
                let mut seen = vec![false; x.dims.len()];
                let dims = perm.iter().map(|&axis| {
                    let axis = usize::try_from(axis).ok()?;
                    (!std::mem::replace(seen.get_mut(axis)?, true)).then(|| x.dims[axis])
                });
                let dims: Option<Vec<Dim>> = dims.collect();
                let dims = dims.filter(|dims| dims.len() == x.dims.len());
                let dims = dims.ok_or_else(|| format!("{perm:?} of {:?}", x.shape()))?;
                View { dims, ..x }
            }
            Operator::Slice => self.slice(node, x)?,
            Operator::Concat => self.concat(node, elem)?,
            _ => self.gather(node, name, x)?,
        };
        Ok(Value { view, elem })
    }

    /// The value of a name; of a table that is gathered from, only its shape.
    fn stored_or_value(&mut self, kind: Operator, name: &'a str) -> Lowered<Value> {
        let table = (kind == Operator::Gather).then(|| self.table(name)).flatten();
        match table.and_then(|table| View::whole(Place::Constant(0), &[table.rows, table.columns]))
        {
            Some(view) => Ok(Value { view, elem: Elem::F32 }),
            None => self.value(name),
        }
    }

    /// The weights that a name stands for, if no node computes it.
    fn table(&self, name: &str) -> Option<Weights> {
        if self.values.contains_key(name) {
            return None;
        }
        self.reader.weights(name).filter(|weights| weights.offsets.is_none())
    }

    /// A constant of int64.
    fn integers(&self, node: &'a NodeProto, at: usize) -> Lowered<Vec<i64>> {
        let found = self.input(node, at).and_then(|name| self.reader.integers(name));
        found.ok_or_else(|| format!("its input {at} is no constant of int64"))
    }

    fn slice(&mut self, node: &'a NodeProto, mut x: View) -> Lowered<View> {
        let (starts, ends) = (self.integers(node, 1)?, self.integers(node, 2)?);
        let axes = match self.input(node, 3) {
            Some(_) => self.integers(node, 3)?,
            None => (0..starts.len() as i64).collect(),
        };
        if self.input(node, 4).is_some() && self.integers(node, 4)?.iter().any(|step| *step != 1) {
            return Err("its steps are not 1".to_owned());
        }
        if starts.len() != axes.len() || ends.len() != axes.len() {
            return Err("it has not as many starts and ends as axes".to_owned());
        }
        let rank = x.dims.len();
        for ((start, end), wanted) in starts.into_iter().zip(ends).zip(axes) {
            let dim = &mut x.dims[axis(wanted, rank)?];
            let size = i64::try_from(dim.size).map_err(|_| TOO_LARGE)?;
            let place = |at: i64| if at < 0 { at.saturating_add(size) } else { at }.clamp(0, size);
            let (start, end) = (place(start) as usize, place(end) as usize);
            let size = end.checked_sub(start).filter(|size| *size > 0);
            dim.size = size.ok_or("it leaves nothing")?;
            x.start += start * dim.step;
        }
        Ok(x)
    }

    fn concat(&mut self, node: &'a NodeProto, elem: Elem) -> Lowered<View> {
        let mut views = Vec::with_capacity(node.input.len());
        for name in &node.input {
            let value = self.value(name)?;
            if value.elem != elem {
                return Err(format!("its inputs are {elem:?} and {:?}", value.elem));
            }
            views.push(value.view);
        }
        let mut shape = views.first().ok_or("it has no inputs")?.shape();
        let at = axis(integer(node, attribute::AXIS).ok_or("it has no axis")?, shape.len())?;
        shape[at] = 0;
        for view in &views {
            let mut other = view.shape();
            let size = other.get_mut(at).map(std::mem::take);
            let fits =
                other.iter().enumerate().all(|(n, size)| n == at || shape.get(n) == Some(size));
            let size = size.filter(|_| fits && other.len() == shape.len());
            let size = size.ok_or_else(|| format!("its shapes do not fit: {:?}", view.shape()))?;
            shape[at] = shape[at].checked_add(size).ok_or(TOO_LARGE)?;
        }
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
        Ok(result)
    }

    fn reduce(&mut self, node: &'a NodeProto, name: &'a str, op: Reduction) -> Lowered<View> {
        let x = self.floats(name)?;
        let axes = match self.input(node, 1) {
            Some(_) => self.integers(node, 1)?,
            None => integers(node, attribute::AXES).unwrap_or_default().to_vec(),
        };
        let [only] = axes.as_slice() else {
            return Err(format!("it has {} axes, not 1", axes.len()));
        };
        let at = axis(*only, x.dims.len())?;
        let (x, view) = self.dense(x)?;
        let mut shape = view.shape();
        let (size, inner) = (shape[at], shape[at + 1..].iter().product());
        let (out, _) = self.buffer(&[x.len / size])?;
        self.instructions.push(Instruction::Reduce { op, x, size, inner, out });
        match integer(node, attribute::KEEP_DIMS).unwrap_or(1) {
            0 => {
                shape.remove(at);
            }
            _ => shape[at] = 1,
        }
        Ok(View::whole(Place::Buffer(out), &shape).ok_or(TOO_LARGE)?)
    }

    fn layer_norm(&mut self, node: &'a NodeProto, name: &'a str) -> Lowered<View> {
        let x = self.floats(name)?;
        let at = axis(integer(node, attribute::AXIS).unwrap_or(-1), x.dims.len())?;
        if at + 1 != x.dims.len() {
            return Err("its axis is not the last".to_owned());
        }
        let size = x.dims.last().ok_or(NO_DIMENSIONS)?.size;
        let epsilon = node.attribute.iter().find(|a| a.name.as_deref() == Some(attribute::EPSILON));
        let epsilon = epsilon.and_then(|a| a.f).unwrap_or(1e-5);
        let vector = |this: &mut Self, name: &'a str| {
            let view = this.floats(name)?;
            let (dense, view) = this.dense(view)?;
            let fits = (view.shape() == [size]).then_some(dense);
            fits.ok_or_else(|| format!("{name:?} is {:?}, not [{size}]", view.shape()))
        };
        let weight = vector(self, self.input(node, 1).ok_or("it has no weight")?)?;
        let bias = self.input(node, 2).map(|name| vector(self, name)).transpose()?;
        let (x, view) = self.dense(x)?;
        let (out, result) = self.buffer(&view.shape())?;
        self.instructions.push(Instruction::LayerNorm { x, weight, bias, epsilon, out });
        Ok(result)
    }

    /// Rows of `x`, or of the table of that name.
    fn gather(&mut self, node: &'a NodeProto, name: &'a str, x: View) -> Lowered<View> {
        let indices = self.value(self.input(node, 1).ok_or("it has no indices")?)?;
        if integer(node, attribute::AXIS).unwrap_or(0) != 0 {
            return Err("its axis is not the first".to_owned());
        }
        if indices.elem != Elem::I32 {
            return Err(format!("its indices are {:?}, not i32", indices.elem));
        }
        let [_, row @ ..] = x.dims.as_slice() else { return Err(NO_DIMENSIONS.to_owned()) };
        let mut shape = indices.view.shape();
        shape.extend(row.iter().map(|dim| dim.size));
        let width = row.iter().map(|dim| dim.size).product();
        let (indices, _) = self.dense(indices.view)?;
        let table = match self.table(name) {
            Some(weights) => Table::Stored(Box::new(weights)),
            None => Table::Values(self.dense(x)?.0),
        };
        let (out, result) = self.buffer(&shape)?;
        self.instructions.push(Instruction::Gather { table, width, indices, out });
        Ok(result)
    }

    fn cast(&mut self, node: &'a NodeProto, name: &'a str) -> Lowered<Value> {
        let Value { view, elem } = self.value(name)?;
        let to = match to_float(node) {
            true => Elem::F32,
            false if integer(node, attribute::TO) == Some(i64::from(DataType::INT32.0)) => {
                Elem::I32
            }
            false => return Err("it is to another type than f32 and i32".to_owned()),
        };
        let view = match (elem, to) {
            _ if elem == to => view,
            (_, Elem::F32) => self.convert(elem, &view)?,
            (Elem::F32, _) => self.unary(Unary::Truncate, &view)?,
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

    /// Integers that a scale makes numbers of.
    fn dequantized(&mut self, node: &'a NodeProto, name: &'a str) -> Lowered<View> {
        let [_, scale] = node.input.as_slice() else {
            return Err("it has a zero point".to_owned());
        };
        let (x, scale) = (self.value(name)?, self.floats(scale)?);
        if x.elem == Elem::F32 || scale.len() != 1 {
            return Err("it is not one of integers with one scale".to_owned());
        }
        let converted = self.convert(x.elem, &x.view)?;
        let scale = scale.broadcast(&converted.shape()).ok_or("its scale has dimensions")?;
        self.pair(Binary::Mul, &converted, &scale, Elem::F32)
    }

    fn conv(&mut self, node: &'a NodeProto, name: &'a str) -> Lowered<View> {
        let mut x = self.floats(name)?;
        let flat = x.dims.len() == 3;
        if flat {
            x.dims.insert(2, Dim { size: 1, step: 0 });
        }
        let filters = self.input(node, 1).ok_or("it has no filters")?;
        let found = self.reader.constant(filters);
        let (values, mut sizes) =
            found.ok_or_else(|| format!("its filters {filters:?} are no constant"))?;
        if flat && sizes.len() == 3 {
            sizes.insert(2, 1);
        }
        let (&[batch, channels, rows, columns], &[count, inner, down, across]) =
            (&x.shape()[..], &sizes[..])
        else {
            return Err(format!("its shapes are {:?} and {sizes:?}", x.shape()));
        };
        let auto = node.attribute.iter().find(|a| a.name.as_deref() == Some(attribute::AUTO_PAD));
        if auto.is_some_and(|auto| auto.s.as_deref() != Some("NOTSET")) {
            return Err("it has auto_pad".to_owned());
        }
        let (stride, dilation) =
            (pair(node, attribute::STRIDES, flat)?, pair(node, attribute::DILATIONS, flat)?);
        let pads = pads(node, flat)?;
        let groups = integer(node, attribute::GROUP).map_or(Some(1), positive);
        let groups = groups.filter(|groups| {
            inner.checked_mul(*groups) == Some(channels) && count.is_multiple_of(*groups)
        });
        let groups = groups.ok_or_else(|| {
            format!("{channels} channels and filters {sizes:?} do not fit its groups")
        })?;
        let padded =
            |at: usize, size: usize| size.checked_add(pads[at][0])?.checked_add(pads[at][1]);
        let steps = |at: usize, size: usize, kernel: usize| {
            let reach = dilation[at].checked_mul(kernel - 1)?.checked_add(1)?;
            Some(padded(at, size)?.checked_sub(reach)? / stride[at] + 1)
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
            groups,
            kernel: [down, across],
            stride,
            dilation,
        };
        let bias = match self.input(node, 2) {
            Some(name) => Some(self.floats(name).and_then(|bias| {
                let fits = bias.shape() == [count];
                let (bias, _) = self.dense(bias)?;
                fits.then_some(bias).ok_or_else(|| format!("{name:?} is not [{count}]"))
            })?),
            None => None,
        };
        let packed = shape.pack(values.get());
        let len = packed.len();
        let filters = self.constant(crate::weights::Floats::Own(packed), &[len])?;
        let filters = Dense { place: filters.place, start: 0, len };
        // Channels last.
        let dims = [0, 2, 3, 1].map(|at| x.dims[at]).to_vec();
        let x = self.padded(View { dims, ..x }, pads)?;
        let (x, _) = self.dense(x)?;
        let (out, result) = self.buffer(&[batch, shape.output[0], shape.output[1], count])?;
        self.instructions.push(Instruction::Conv { shape, x, filters, bias, out });
        let [batch, rows, columns, channels] = *result.dims.as_slice() else {
            return Err(NO_DIMENSIONS.to_owned());
        };
        let dims = match flat {
            true => vec![batch, channels, columns],
            false => vec![batch, channels, rows, columns],
        };
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

    pub(super) fn stored(&mut self, matmul: StoredMatmul<'a>) -> Lowered<View> {
        let StoredMatmul { x, weights, bias } = matmul;
        let x = self.floats(x)?;
        self.by_weights(x, By::Stored(weights, bias))
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

    pub(super) fn input_matmul(&mut self, matmul: &fused::InputMatmul<'a>) -> Lowered<View> {
        let scale = self.reader.floats(matmul.scale, &[]);
        let scale = scale.and_then(|scale| scale.get().first().copied());
        let scale = scale.ok_or("the scale of its weights is no constant of f32")?;
        let b = self.value(matmul.b)?;
        let [rows, columns] = *b.view.shape() else {
            return Err(format!("its weights are {:?}", b.view.shape()));
        };
        let x = self.floats(matmul.x)?;
        let b = Dense { place: b.view.place, start: b.view.start, len: b.view.len() };
        self.by_weights(x, By::Input { b, scales: vec![scale; rows], columns })
    }

    pub(super) fn attention(&mut self, attention: &fused::Attention<'a>) -> Lowered<View> {
        const SIZES: &str = "the sizes of an attention with caches do not fit";
        let q = self.floats(attention.q)?;
        let mask = self.floats(attention.mask)?;
        let [heads, queries, dim] = *q.shape() else { return Err(SIZES.to_owned()) };
        let sizes = mask.shape();
        let [ones @ .., mask_rows, width] = sizes.as_slice() else {
            return Err(SIZES.to_owned());
        };
        let (mask_rows, width) = (*mask_rows, *width);
        let mut caches = Vec::with_capacity(4);
        for [past, own] in [attention.keys, attention.values] {
            caches.push(match self.value(past)? {
                Value { view, elem } if attention.scales.is_some() || elem == Elem::F16 => view,
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
        let scales = match attention.scales {
            Some((names, step)) => {
                let step = self.reader.floats(step, &[]);
                let step = step.and_then(|step| step.get().first().copied());
                let step = step.ok_or("the step of its caches is no constant of f32")?;
                let mut rows = |name| {
                    let view = self.floats(name)?;
                    let fits = view.shape() == [heads, 1, capacity];
                    if fits { Ok(self.dense(view)?.0) } else { Err(SIZES.to_owned()) }
                };
                Some(CacheScales { rows: [rows(names[0])?, rows(names[1])?], step })
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

    fn matmul(&mut self, node: &'a NodeProto, name: &'a str) -> Lowered<View> {
        let [_, b] = node.input.as_slice() else { return Err("it has not 2 inputs".to_owned()) };
        let (a, b) = (self.floats(name)?, self.floats(b)?);
        self.multiplied(a, b)
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

    /// Lowers a matmul of matrices that are no stored weights.
    fn gemm(&mut self, node: &'a NodeProto, name: &'a str) -> Lowered<View> {
        let plain = node.attribute.iter().all(plain_attribute);
        let b = self.input(node, 1).filter(|_| plain).ok_or("it has transA, alpha or beta")?;
        let (a, mut b) = (self.floats(name)?, self.floats(b)?);
        let ([_, _], [_, _]) = (&a.dims[..], &b.dims[..]) else {
            return Err(format!("its shapes are {:?} and {:?}", a.shape(), b.shape()));
        };
        if integer(node, attribute::TRANS_B).unwrap_or(0) != 0 {
            b.dims.swap(0, 1);
        }
        let y = self.multiplied(a, b)?;
        let Some(bias) = self.input(node, 2) else { return Ok(y) };
        let bias = self.floats(bias)?;
        let bias = bias.broadcast(&y.shape()).ok_or("its bias does not fit")?;
        self.pair(Binary::Add, &y, &bias, Elem::F32)
    }
}

const NO_DIMENSIONS: &str = "its input has too few dimensions";

/// An attribute of `Conv` for rows and columns.
fn pair(node: &NodeProto, name: &str, flat: bool) -> Lowered<[usize; 2]> {
    let fault = || format!("its {name} are not above 0, one for each dimension");
    match (integers(node, name).unwrap_or_default(), flat) {
        ([], _) => Ok([1, 1]),
        ([columns], true) => Ok([1, positive(*columns).ok_or_else(fault)?]),
        ([rows, columns], false) => {
            let sizes = positive(*rows).zip(positive(*columns));
            Ok(sizes.ok_or_else(fault)?.into())
        }
        _ => Err(fault()),
    }
}

/// Zeros above and below, before and behind.
fn pads(node: &NodeProto, flat: bool) -> Lowered<[[usize; 2]; 2]> {
    let pads = integers(node, attribute::PADS).unwrap_or_default();
    let pads: Result<Vec<usize>, _> = pads.iter().map(|&pad| usize::try_from(pad)).collect();
    match (pads.as_deref(), flat) {
        (Ok([]), _) => Ok([[0; 2]; 2]),
        (Ok(&[before, behind]), true) => Ok([[0, 0], [before, behind]]),
        (Ok(&[top, left, bottom, right]), false) => Ok([[top, bottom], [left, right]]),
        _ => Err("its pads are not two for each dimension".to_owned()),
    }
}

/// The shape that `Reshape` gives: 0 keeps a size, -1 is what is left.
fn reshaped(from: &[usize], wanted: &[i64]) -> Option<Vec<usize>> {
    let all: usize = from.iter().product();
    let mut shape = Vec::with_capacity(wanted.len());
    let mut open = None;
    for (at, &size) in wanted.iter().enumerate() {
        shape.push(match size {
            0 => *from.get(at)?,
            -1 if open.is_none() => {
                open = Some(at);
                1
            }
            size => positive(size)?,
        });
    }
    let known = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size))?;
    if let Some(at) = open {
        shape[at] = all / known;
    }
    (shape.iter().product::<usize>() == all).then_some(shape)
}

fn axis(axis: i64, rank: usize) -> Lowered<usize> {
    let from_end = if axis < 0 { rank as i64 } else { 0 };
    let found = axis.checked_add(from_end).and_then(|axis| usize::try_from(axis).ok());
    found.filter(|axis| *axis < rank).ok_or_else(|| format!("axis {axis} of {rank} dimensions"))
}
