//! From an ONNX graph to instructions.

use std::collections::HashMap;

use qhx_core::artifacts::Mapped;
use rten_onnx::onnx::{DataType, ModelProto, NodeProto, ValueInfoProto};

use super::attend::{Attend, MaskShape, Shape};
use super::fused::{self, Fused};
use super::kernels::{Binary, Reduction, Unary};
use super::view::{Dim, Place, View, Walk, common};
use super::{By, Dense, Instruction, Product, Tape};
use crate::cut::{self, Factor, Reader, domain, integer, integers};
use crate::weights::Floats;

/// Elements of a constant factor from which on rten multiplies, which brings it into its own order once.
const LARGE: usize = 1 << 16;

/// A graph whose external data lies in `files`, or none where an operator, a type or a size is not one of a tape.
pub(super) fn compile(model: &ModelProto, files: &HashMap<String, Mapped>) -> Option<Tape> {
    if cfg!(target_endian = "big") {
        return None;
    }
    let graph = model.graph.as_ref()?;
    let reader = Reader::new(graph, files)?;
    let mut compiler = Compiler::new(&reader);
    for (index, input) in graph.input.iter().enumerate() {
        let (elem, shape) = declared(input)?;
        let view = View::whole(Place::Input(index), &shape)?;
        compiler.values.insert(input.name.as_deref()?, Value { view, elem });
    }
    let mut fused = Fused::all(&reader);
    let live = live(&reader, &fused)?;
    for (at, node) in graph.node.iter().enumerate().filter(|(at, _)| live[*at]) {
        match fused.remove(&at) {
            Some(fused) => compiler.fused(node, fused)?,
            None => compiler.node(node)?,
        }
    }
    let mut outputs = Vec::with_capacity(graph.output.len());
    for output in &graph.output {
        let value = compiler.values.get(output.name.as_deref()?)?;
        if declared(output)? != (Elem::F32, value.view.shape()) || value.elem != Elem::F32 {
            return None;
        }
        let view = value.view.clone();
        // Outputs are written when inputs may not be read any more.
        outputs.push(match view.place {
            Place::Input(_) => compiler.unary(Unary::Copy, &view)?,
            _ => view,
        });
    }
    compiler.finish(&outputs)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Elem {
    F32,
    I32,
    I8,
    U8,
}

fn declared(info: &ValueInfoProto) -> Option<(Elem, Vec<usize>)> {
    let tensor = info.r#type.as_ref()?.tensor_type.as_ref()?;
    let elem = match tensor.elem_type? {
        DataType::FLOAT => Elem::F32,
        DataType::INT32 => Elem::I32,
        DataType::INT8 => Elem::I8,
        DataType::UINT8 => Elem::U8,
        _ => return None,
    };
    let dims = tensor.shape.as_ref()?.dim.iter();
    let shape: Vec<usize> = dims.map(|dim| positive(dim.dim_value?)).collect::<Option<_>>()?;
    Some((elem, shape))
}

/// Which nodes an output needs. Others could be anything.
fn live(reader: &Reader<'_, '_>, fused: &HashMap<usize, Fused<'_>>) -> Option<Vec<bool>> {
    let mut live = vec![false; reader.graph.node.len()];
    let mut open: Vec<&str> =
        reader.graph.output.iter().map(|o| o.name.as_deref()).collect::<Option<_>>()?;
    while let Some(name) = open.pop() {
        if let Some(&at) = reader.producers.get(name)
            && !std::mem::replace(&mut live[at], true)
        {
            match fused.get(&at) {
                Some(fused) => open.extend(fused.reads()),
                None => open.extend(reader.graph.node[at].input.iter().map(String::as_str)),
            }
        }
    }
    Some(live)
}

#[derive(Debug, Clone)]
struct Value {
    view: View,
    elem: Elem,
}

struct Compiler<'a, 'r, 'f> {
    reader: &'r Reader<'a, 'f>,
    values: HashMap<&'a str, Value>,
    instructions: Vec<Instruction>,
    constants: Vec<Floats>,
    /// Elements of each buffer. Each is written by one instruction, or by several that fill parts of it.
    buffers: Vec<usize>,
    /// Masks that were looked at.
    seen: Vec<(Place, usize, MaskShape)>,
}

impl<'a, 'r, 'f> Compiler<'a, 'r, 'f> {
    fn new(reader: &'r Reader<'a, 'f>) -> Self {
        Self {
            reader,
            values: HashMap::new(),
            instructions: Vec::new(),
            constants: Vec::new(),
            buffers: Vec::new(),
            seen: Vec::new(),
        }
    }

    /// What a name stands for. Constants get their place when they are read first.
    fn value(&mut self, name: &'a str) -> Option<Value> {
        if let Some(value) = self.values.get(name) {
            return Some(value.clone());
        }
        let tensor = self.reader.initializers.get(name)?;
        let shape = sizes(&tensor.dims)?;
        let values = self.reader.floats(name, &shape)?;
        let view = View::whole(Place::Constant(self.constants.len()), &shape)?;
        self.constants.push(values);
        let value = Value { view, elem: Elem::F32 };
        self.values.insert(name, value.clone());
        Some(value)
    }

    fn floats(&mut self, name: &'a str) -> Option<View> {
        self.value(name).filter(|value| value.elem == Elem::F32).map(|value| value.view)
    }

    fn buffer(&mut self, shape: &[usize]) -> Option<(usize, View)> {
        let view = View::whole(Place::Buffer(self.buffers.len()), shape)?;
        // Its bytes are counted in an `isize`.
        self.buffers.push(
            view.len()
                .checked_mul(size_of::<f32>())
                .and_then(|bytes| isize::try_from(bytes).ok().map(|_| bytes / size_of::<f32>()))?,
        );
        Some((self.buffers.len() - 1, view))
    }

    fn unary(&mut self, op: Unary, x: &View) -> Option<View> {
        let walk = Walk::new([x])?;
        let (out, view) = self.buffer(&x.shape())?;
        self.instructions.push(Instruction::Unary { op, walk, out });
        Some(view)
    }

    /// The same elements one after the other.
    fn dense(&mut self, x: View) -> Option<(Dense, View)> {
        let view = if x.is_dense() { x } else { self.unary(Unary::Copy, &x)? };
        Some((Dense { place: view.place, start: view.start, len: view.len() }, view))
    }

    fn fused(&mut self, node: &'a NodeProto, fused: Fused<'a>) -> Option<()> {
        let [output] = node.output.as_slice() else { return None };
        let view = match fused {
            Fused::Stored(product) => self.stored(product)?,
            Fused::Given(given) => self.given(&given)?,
            Fused::Attention(attention) => self.attention(&attention)?,
        };
        self.values.insert(output, Value { view, elem: Elem::F32 });
        Some(())
    }

    fn node(&mut self, node: &'a NodeProto) -> Option<()> {
        let [output] = node.output.as_slice() else { return None };
        let (kind, name) = (node.op_type.as_deref()?, node.input.first()?.as_str());
        // Weights are read by products, which find them by themselves.
        let widens = matches!(kind, "Cast" | "DequantizeLinear") && domain(node).is_empty();
        if widens && self.reader.initializers.contains_key(name) {
            return Some(());
        }
        let value = match (domain(node), kind) {
            ("", "Cast") => self.cast(node, name)?,
            ("", "Identity") => self.value(name)?,
            ("", "DequantizeLinear") => self.dequantized(node, name)?,
            ("", _) => Value { view: self.standard(node, kind, name)?, elem: Elem::F32 },
            _ => return None,
        };
        self.values.insert(output, value);
        Some(())
    }

    fn standard(&mut self, node: &'a NodeProto, kind: &str, name: &'a str) -> Option<View> {
        let unary = match kind {
            "Abs" => Some(Unary::Abs),
            "Neg" => Some(Unary::Neg),
            "Exp" => Some(Unary::Exp),
            "Log" => Some(Unary::Log),
            "Sqrt" => Some(Unary::Sqrt),
            "Reciprocal" => Some(Unary::Reciprocal),
            "Sigmoid" => Some(Unary::Sigmoid),
            "Tanh" => Some(Unary::Tanh),
            "Relu" => Some(Unary::Relu),
            "Erf" => Some(Unary::Erf),
            "Clip" => {
                let bound = |at: usize, missing| match node.input.get(at).map(String::as_str) {
                    None | Some("") => Some(missing),
                    Some(name) => self.reader.floats(name, &[])?.get().first().copied(),
                };
                Some(Unary::Clip(bound(1, f32::NEG_INFINITY)?, bound(2, f32::INFINITY)?))
            }
            _ => None,
        };
        if let Some(op) = unary {
            let x = self.floats(name)?;
            return self.unary(op, &x);
        }
        let op = match kind {
            "Add" => Binary::Add,
            "Sub" => Binary::Sub,
            "Mul" => Binary::Mul,
            "Div" => Binary::Div,
            "Max" => Binary::Max,
            "Min" => Binary::Min,
            _ => return self.shaped(node, kind, name),
        };
        let [a, b] = node.input.as_slice() else { return None };
        let (a, b) = (self.floats(a)?, self.floats(b)?);
        let shape = common(&a.shape(), &b.shape())?;
        // What is too large is refused here; the walk multiplies the same sizes.
        let (out, view) = self.buffer(&shape)?;
        let walk = Walk::new([&a.broadcast(&shape)?, &b.broadcast(&shape)?])?;
        self.instructions.push(Instruction::Binary { op, walk, out });
        Some(view)
    }

    fn shaped(&mut self, node: &'a NodeProto, kind: &str, name: &'a str) -> Option<View> {
        match kind {
            "Reshape" => {
                let x = self.floats(name)?;
                let wanted = self.integers(node, 1)?;
                if integer(node, "allowzero").unwrap_or(0) != 0 {
                    return None;
                }
                let shape = reshaped(&x.shape(), &wanted)?;
                let (_, x) = self.dense(x)?;
                x.reshaped(&shape)
            }
            "Transpose" => {
                let x = self.floats(name)?;
                let perm = node.attribute.iter().find(|a| a.name.as_deref() == Some("perm"))?;
                let mut seen = vec![false; x.dims.len()];
                let dims = perm.ints.iter().map(|&axis| {
                    let axis = usize::try_from(axis).ok()?;
                    (!std::mem::replace(seen.get_mut(axis)?, true)).then(|| x.dims[axis])
                });
                let dims: Vec<Dim> = dims.collect::<Option<_>>()?;
                (dims.len() == x.dims.len()).then_some(View { dims, ..x })
            }
            "Slice" => self.slice(node, name),
            "Concat" => self.concat(node),
            "ReduceSum" => self.reduce(node, name, Reduction::Sum),
            "ReduceMean" => self.reduce(node, name, Reduction::Mean),
            "ReduceMax" => self.reduce(node, name, Reduction::Max),
            "ReduceMin" => self.reduce(node, name, Reduction::Min),
            "Softmax" => {
                let x = self.floats(name)?;
                let axis = axis(integer(node, "axis").unwrap_or(-1), x.dims.len())?;
                let size = x.dims.last()?.size;
                if axis + 1 != x.dims.len() {
                    return None;
                }
                let (x, view) = self.dense(x)?;
                let (out, result) = self.buffer(&view.shape())?;
                self.instructions.push(Instruction::Softmax { x, size, out });
                Some(result)
            }
            "LayerNormalization" => self.layer_norm(node, name),
            "Gather" => self.gather(node, name),
            "MatMul" => self.matmul(node, name),
            _ => None,
        }
    }

    /// A constant of int64.
    fn integers(&self, node: &NodeProto, at: usize) -> Option<Vec<i64>> {
        integers(self.reader.initializers.get(node.input.get(at)?.as_str())?)
    }

    fn slice(&mut self, node: &'a NodeProto, name: &'a str) -> Option<View> {
        let mut x = self.floats(name)?;
        let (starts, ends) = (self.integers(node, 1)?, self.integers(node, 2)?);
        let axes = self.integers(node, 3)?;
        if let Some(steps) = node.input.get(4).filter(|name| !name.is_empty()) {
            let steps = integers(self.reader.initializers.get(steps.as_str())?)?;
            steps.iter().all(|step| *step == 1).then_some(())?;
        }
        if starts.len() != axes.len() || ends.len() != axes.len() {
            return None;
        }
        let rank = x.dims.len();
        for ((start, end), wanted) in starts.into_iter().zip(ends).zip(axes) {
            let dim = &mut x.dims[axis(wanted, rank)?];
            let size = i64::try_from(dim.size).ok()?;
            let place = |at: i64| if at < 0 { at.saturating_add(size) } else { at }.clamp(0, size);
            let (start, end) = (place(start) as usize, place(end) as usize);
            dim.size = end.checked_sub(start).filter(|size| *size > 0)?;
            x.start += start * dim.step;
        }
        Some(x)
    }

    fn concat(&mut self, node: &'a NodeProto) -> Option<View> {
        let mut views = Vec::with_capacity(node.input.len());
        for name in &node.input {
            views.push(self.floats(name)?);
        }
        let mut shape = views.first()?.shape();
        let at = axis(integer(node, "axis")?, shape.len())?;
        shape[at] = 0;
        for view in &views {
            let mut other = view.shape();
            let size = std::mem::take(other.get_mut(at)?);
            let fits =
                other.iter().enumerate().all(|(n, size)| n == at || shape.get(n) == Some(size));
            (fits && other.len() == shape.len()).then_some(())?;
            shape[at] = shape[at].checked_add(size)?;
        }
        // Copies would be written by instructions after the first part.
        let mut walks = Vec::with_capacity(views.len());
        let below: usize = shape[at + 1..].iter().product();
        for view in views {
            let width = view.dims[at].size * below;
            let mut walk = Walk::new([&view])?;
            if !walk.begins_rows(width) {
                walk = Walk::new([&self.unary(Unary::Copy, &view)?])?;
            }
            walks.push((walk, width));
        }
        let (out, result) = self.buffer(&shape)?;
        let (stride, mut start) = (shape[at] * below, 0);
        for (walk, width) in walks {
            self.instructions.push(Instruction::Part { walk, out, start, width, stride });
            start += width;
        }
        Some(result)
    }

    fn reduce(&mut self, node: &'a NodeProto, name: &'a str, op: Reduction) -> Option<View> {
        let x = self.floats(name)?;
        let axes = match node.input.get(1) {
            Some(_) => self.integers(node, 1)?,
            None => node.attribute.iter().find(|a| a.name.as_deref() == Some("axes"))?.ints.clone(),
        };
        let [only] = axes.as_slice() else { return None };
        let at = axis(*only, x.dims.len())?;
        let (x, view) = self.dense(x)?;
        let mut shape = view.shape();
        let (size, inner) = (shape[at], shape[at + 1..].iter().product());
        let (out, _) = self.buffer(&[x.len / size])?;
        self.instructions.push(Instruction::Reduce { op, x, size, inner, out });
        match integer(node, "keepdims").unwrap_or(1) {
            0 => {
                shape.remove(at);
            }
            _ => shape[at] = 1,
        }
        View::whole(Place::Buffer(out), &shape)
    }

    fn layer_norm(&mut self, node: &'a NodeProto, name: &'a str) -> Option<View> {
        let x = self.floats(name)?;
        let at = axis(integer(node, "axis").unwrap_or(-1), x.dims.len())?;
        let size = x.dims.last()?.size;
        let epsilon = node.attribute.iter().find(|a| a.name.as_deref() == Some("epsilon"));
        let epsilon = epsilon.map_or(Some(1e-5), |a| a.f)?;
        let vector = |this: &mut Self, name: &'a str| {
            let view = this.floats(name)?;
            let (dense, view) = this.dense(view)?;
            (view.shape() == [size]).then_some(dense)
        };
        let weight = vector(self, node.input.get(1)?)?;
        let bias = match node.input.get(2).map(String::as_str) {
            None | Some("") => None,
            Some(name) => Some(vector(self, name)?),
        };
        if at + 1 != x.dims.len() {
            return None;
        }
        let (x, view) = self.dense(x)?;
        let (out, result) = self.buffer(&view.shape())?;
        self.instructions.push(Instruction::LayerNorm { x, weight, bias, epsilon, out });
        Some(result)
    }

    fn gather(&mut self, node: &'a NodeProto, name: &'a str) -> Option<View> {
        let table = self.floats(name)?;
        let indices = self.value(node.input.get(1)?)?;
        let plain = integer(node, "axis").unwrap_or(0) == 0
            && indices.elem == Elem::I32
            && indices.view.is_dense();
        let [_, row @ ..] = table.dims.as_slice() else { return None };
        let mut shape = indices.view.shape();
        shape.extend(row.iter().map(|dim| dim.size));
        let width = row.iter().map(|dim| dim.size).product();
        let Value { view: View { place, start, .. }, .. } = indices;
        let indices = Dense { place, start, len: indices.view.len() };
        let (table, _) = self.dense(table)?;
        let (out, result) = self.buffer(&shape)?;
        self.instructions.push(Instruction::Gather { table, width, indices, out });
        plain.then_some(result)
    }

    fn cast(&mut self, node: &NodeProto, name: &'a str) -> Option<Value> {
        let value = self.value(name)?;
        if integer(node, "to") != Some(i64::from(DataType::FLOAT.0)) {
            return None;
        }
        let view = match value.elem {
            Elem::F32 => value.view,
            _ => self.unary(Unary::Copy, &value.view)?,
        };
        Some(Value { view, elem: Elem::F32 })
    }

    /// Integers that a step makes numbers of.
    fn dequantized(&mut self, node: &'a NodeProto, name: &'a str) -> Option<Value> {
        let [_, step] = node.input.as_slice() else { return None };
        let (x, step) = (self.value(name)?, self.floats(step)?);
        if x.elem == Elem::F32 || step.len() != 1 {
            return None;
        }
        let wide = self.unary(Unary::Copy, &x.view)?;
        let shape = wide.shape();
        let walk = Walk::new([&wide, &step.broadcast(&shape)?])?;
        let (out, view) = self.buffer(&shape)?;
        self.instructions.push(Instruction::Binary { op: Binary::Mul, walk, out });
        Some(Value { view, elem: Elem::F32 })
    }

    fn product(&mut self, x: Dense, by: By, shape: &[usize]) -> Option<View> {
        let (out, view) = self.buffer(shape)?;
        let product = Product { x, out, by };
        // Products that wait for nothing of each other are computed at once.
        match self.instructions.last_mut() {
            Some(Instruction::Products(all))
                if all.iter().all(|one| !product.reads(Place::Buffer(one.out))) =>
            {
                all.push(product);
            }
            _ => self.instructions.push(Instruction::Products(vec![product])),
        }
        Some(view)
    }

    fn stored(&mut self, product: cut::Product<'a>) -> Option<View> {
        let Factor::Stored(weights, bias) = product.by else { return None };
        let x = self.floats(product.x)?;
        let (x, view) = self.dense(x)?;
        let mut shape = view.shape();
        *shape.last_mut().filter(|last| **last == weights.columns)? = weights.rows;
        self.product(x, By::Stored(weights, bias), &shape)
    }

    fn given(&mut self, given: &fused::Given<'a>) -> Option<View> {
        let step = self.reader.floats(given.step, &[])?.get().first().copied()?;
        let b = self.value(given.b)?;
        let [rows, columns] = *b.view.shape() else { return None };
        let x = self.floats(given.x)?;
        let (x, view) = self.dense(x)?;
        let mut shape = view.shape();
        *shape.last_mut().filter(|last| **last == columns)? = rows;
        let Value { view: b, elem: Elem::I8 } = b else { return None };
        let b = Dense { place: b.place, start: b.start, len: b.len() };
        self.product(x, By::Given { b, scales: vec![step; rows], columns }, &shape)
    }

    fn attention(&mut self, attention: &fused::Attention<'a>) -> Option<View> {
        let q = self.floats(attention.q)?;
        let mask = self.floats(attention.mask)?;
        let [heads, queries, dim] = *q.shape() else { return None };
        let sizes = mask.shape();
        let [ones @ .., mask_rows, width] = sizes.as_slice() else { return None };
        let (mask_rows, width) = (*mask_rows, *width);
        let mut caches = Vec::with_capacity(4);
        for name in attention.keys.iter().chain(&attention.values) {
            caches.push(self.floats(name)?);
        }
        let rows_of = |view: &View| match *view.shape() {
            [n, rows, d] if n == heads && d == dim => Some(rows),
            _ => None,
        };
        let [Some(capacity), Some(rows), past, own] = [0, 1, 2, 3].map(|at| rows_of(&caches[at]))
        else {
            return None;
        };
        let fits = (past, own) == (Some(capacity), Some(rows))
            && queries.is_multiple_of(rows)
            && capacity.checked_add(rows) == Some(width)
            && (mask_rows == 1 || mask_rows == rows)
            && ones.iter().all(|size| *size == 1);
        fits.then_some(())?;
        let repeat = queries / rows;
        let mut dense = Vec::with_capacity(4);
        for view in caches {
            dense.push(self.dense(view)?.0);
        }
        let [past_k, k, past_v, v] = *dense.as_slice() else { return None };
        let (q, _) = self.dense(q)?;
        let (mask, _) = self.dense(mask)?;
        let shape = MaskShape::new(mask_rows, width, repeat);
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
        let attend = Box::new(Attend { q, keys, values, mask, seen, shape });
        self.instructions.push(Instruction::Attend { attend, out });
        Some(view)
    }

    fn matmul(&mut self, node: &'a NodeProto, name: &'a str) -> Option<View> {
        let [_, b] = node.input.as_slice() else { return None };
        let (a, b) = (self.floats(name)?, self.floats(b)?);
        if matches!(b.place, Place::Constant(_)) && b.len() >= LARGE {
            return None;
        }
        let ([batch @ .., m, k], [batch_b @ .., k_b, n]) = (&a.shape()[..], &b.shape()[..]) else {
            return None;
        };
        let (m, k, n) = (*m, *k, *n);
        let (heads, heads_b): (usize, usize) = (batch.iter().product(), batch_b.iter().product());
        let all = common(batch, batch_b)?;
        // One matrix for all, or one for each.
        let count: usize = all.iter().product();
        if k != *k_b || [heads, heads_b].iter().any(|&heads| heads != 1 && heads != count) {
            return None;
        }
        let shape = [count, m, n];
        let (a, _) = self.dense(a)?;
        let mut swapped = b.clone();
        let rank = swapped.dims.len();
        swapped.dims.swap(rank - 1, rank - 2);
        let transposed = !b.is_dense() && swapped.is_dense();
        let (b, _) = self.dense(if transposed { swapped } else { b })?;
        let by = By::Heads { b, shape, k, transposed };
        let view = self.product(a, by, &[all, vec![m, n]].concat())?;
        Some(view)
    }

    /// Puts values into the memory of others that nobody reads any more.
    fn finish(mut self, outputs: &[View]) -> Option<Tape> {
        let mut last = vec![0; self.buffers.len()];
        for (at, instruction) in self.instructions.iter_mut().enumerate() {
            instruction.reads(|place| {
                if let Place::Buffer(buffer) = place {
                    last[*buffer] = at;
                }
            });
        }
        for output in outputs {
            if let Place::Buffer(buffer) = output.place {
                last[buffer] = usize::MAX;
            }
        }
        let mut memory: Vec<usize> = Vec::new();
        let mut free: Vec<usize> = Vec::new();
        let mut places: Vec<Option<usize>> = vec![None; self.buffers.len()];
        let mut ends: HashMap<usize, Vec<usize>> = HashMap::new();
        for (at, instruction) in self.instructions.iter_mut().enumerate() {
            instruction.reads(|place| {
                if let Place::Buffer(buffer) = place
                    && let Some(moved) = places.get(*buffer).copied().flatten()
                {
                    *buffer = moved;
                }
            });
            instruction.writes(|out| {
                let place = *places[*out].get_or_insert_with(|| {
                    let size = self.buffers[*out];
                    // What stays to the end takes memory of its own size. Others take the nearest that is neither
                    // much too large nor much too small.
                    let most = if last[*out] == usize::MAX { size } else { 2 * size };
                    let near = |&index: &usize| {
                        let found: usize = memory[free[index]];
                        found <= most && 2 * found > size && (most > size || found == size)
                    };
                    let fits = |&index: &usize| {
                        let found = memory[free[index]];
                        (found < size, found.abs_diff(size))
                    };
                    let best = (0..free.len()).filter(near).min_by_key(fits);
                    let place = best.map_or_else(
                        || {
                            memory.push(0);
                            memory.len() - 1
                        },
                        |index| free.swap_remove(index),
                    );
                    memory[place] = memory[place].max(size);
                    ends.entry(last[*out].max(at)).or_default().push(place);
                    place
                });
                *out = place;
            });
            free.extend(ends.remove(&at).unwrap_or_default());
        }
        let mut walks = Vec::with_capacity(outputs.len());
        for output in outputs {
            let mut view = output.clone();
            if let Place::Buffer(buffer) = &mut view.place {
                *buffer = (*places.get(*buffer)?)?;
            }
            walks.push(Walk::new([&view])?);
        }
        let Self { instructions, constants, buffers, .. } = self;
        let elements = buffers.iter().fold(0, |all: u64, size| all.saturating_add(*size as u64));
        let products = instructions.iter().flat_map(|one| match one {
            Instruction::Products(all) => all.as_slice(),
            _ => &[],
        });
        let work = products.fold(elements, |all, one| all.saturating_add(one.work()));
        let work = instructions.iter().fold(work, |all, one| match one {
            Instruction::Attend { attend, .. } => all.saturating_add(attend.shape.work()),
            _ => all,
        });
        Some(Tape { instructions, constants, buffers: memory, outputs: walks, work })
    }
}

impl Product {
    /// Multiplications.
    fn work(&self) -> u64 {
        let count = match &self.by {
            By::Stored(weights, _) => self.x.len.saturating_mul(weights.rows),
            By::Given { scales, .. } => self.x.len.saturating_mul(scales.len()),
            By::Heads { shape, k, .. } => shape.iter().fold(*k, |all, n| all.saturating_mul(*n)),
        };
        count as u64
    }

    fn reads(&self, place: Place) -> bool {
        let by = match &self.by {
            By::Heads { b, .. } | By::Given { b, .. } => b.place == place,
            By::Stored(..) => false,
        };
        by || self.x.place == place
    }
}

impl Instruction {
    fn reads(&mut self, mut f: impl FnMut(&mut Place)) {
        match self {
            Self::Binary { walk, .. } => walk.places.iter_mut().for_each(f),
            Self::Unary { walk, .. } | Self::Part { walk, .. } => {
                walk.places.iter_mut().for_each(f);
            }
            Self::Reduce { x, .. } | Self::Softmax { x, .. } => f(&mut x.place),
            Self::LayerNorm { x, weight, bias, .. } => {
                f(&mut x.place);
                f(&mut weight.place);
                if let Some(bias) = bias {
                    f(&mut bias.place);
                }
            }
            Self::Gather { table, indices, .. } => {
                f(&mut table.place);
                f(&mut indices.place);
            }
            Self::See { mask, .. } => f(&mut mask.place),
            Self::Attend { attend, .. } => {
                let Attend { q, keys, values, mask, .. } = &mut **attend;
                f(&mut q.place);
                f(&mut mask.place);
                keys.iter_mut().chain(values).for_each(|one| f(&mut one.place));
            }
            Self::Products(products) => {
                for product in products {
                    f(&mut product.x.place);
                    if let By::Heads { b, .. } | By::Given { b, .. } = &mut product.by {
                        f(&mut b.place);
                    }
                }
            }
        }
    }

    fn writes(&mut self, mut f: impl FnMut(&mut usize)) {
        match self {
            Self::Binary { out, .. }
            | Self::Unary { out, .. }
            | Self::Part { out, .. }
            | Self::Reduce { out, .. }
            | Self::Softmax { out, .. }
            | Self::LayerNorm { out, .. }
            | Self::Gather { out, .. }
            | Self::Attend { out, .. } => f(out),
            Self::See { .. } => {}
            Self::Products(products) => products.iter_mut().for_each(|product| f(&mut product.out)),
        }
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

fn axis(axis: i64, rank: usize) -> Option<usize> {
    let from_end = if axis < 0 { i64::try_from(rank).ok()? } else { 0 };
    usize::try_from(axis.checked_add(from_end)?).ok().filter(|axis| *axis < rank)
}

fn sizes(dims: &[i64]) -> Option<Vec<usize>> {
    dims.iter().map(|&size| positive(size)).collect()
}

fn positive(size: i64) -> Option<usize> {
    usize::try_from(size).ok().filter(|size| *size > 0)
}
