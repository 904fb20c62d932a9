//! Builds a [`Graph`]: one method per op, shapes inferred and checked, errors that name the node.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use qhx_base::{Error, ErrorKind, Result};

use crate::graph::{
    BinaryOp, Constant, Elem, Graph, MAX_RANK, Node, Op, Origin, ReduceOp, Tensor, TensorId,
    UnaryOp,
};
use crate::weight::Weight;

mod attention;
mod batch;
mod composites;
mod conv;
mod finish;
mod gather;
mod heads;
mod rebuild;

pub use batch::{batched, sequence_port};
pub use rebuild::{NodeParts, rebuild};

/// Builds one graph. Nodes, and the tensors that they write, are named `<scope>_<op>_<n>`; inputs and outputs of
/// the graph have the given names.
#[derive(Debug)]
pub struct GraphBuilder {
    graph: Graph,
    names: HashSet<String>,
    scope: String,
    /// Number of the next node in its name: a composite counts as the nodes that it stands for.
    next: usize,
    scalars: HashMap<(Elem, usize, u32), TensorId>,
    /// Results of [`GraphBuilder::reorder`]: the tensor, the order, and the reordered tensor.
    reordered: Vec<(TensorId, Arc<[u32]>, TensorId)>,
}

impl GraphBuilder {
    /// An empty graph.
    pub fn new(name: impl Into<String>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            graph: Graph {
                identity: NEXT.fetch_add(1, Ordering::Relaxed),
                name: name.into(),
                tensors: Vec::new(),
                nodes: Vec::new(),
                inputs: Vec::new(),
                outputs: Vec::new(),
            },
            names: HashSet::new(),
            scope: String::new(),
            next: 0,
            scalars: HashMap::new(),
            reordered: Vec::new(),
        }
    }

    /// Prefix of the names of nodes and tensors made from now on, such as `l3_attn`.
    pub fn scope(&mut self, scope: impl Into<String>) {
        self.scope = scope.into();
    }

    /// Builds with `scope` behind the present scope, to which it then returns: `attn` within `l3` is
    /// `l3_attn`.
    ///
    /// # Errors
    /// Errors of `build`.
    pub fn scoped<T>(
        &mut self,
        scope: &str,
        build: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let inner = self.qualified(scope);
        let outer = std::mem::replace(&mut self.scope, inner);
        let built = build(self);
        self.scope = outer;
        built
    }

    /// The tensor behind an id.
    ///
    /// # Errors
    /// When the id is not of this graph.
    pub fn tensor(&self, id: TensorId) -> Result<&Tensor> {
        self.graph.tensor(id)
    }

    /// The shape of a tensor.
    ///
    /// # Errors
    /// When the id is not of this graph.
    pub fn shape(&self, id: TensorId) -> Result<&[usize]> {
        Ok(&self.graph.tensor(id)?.shape)
    }

    /// Adds an input that the caller of the graph gives.
    ///
    /// # Errors
    /// When the name is taken, or the shape has no elements or too many dimensions.
    pub fn input(&mut self, name: &str, elem: Elem, shape: &[usize]) -> Result<TensorId> {
        let id = self.push(name.to_owned(), elem, shape.to_vec(), Origin::Input)?;
        self.graph.inputs.push(id);
        Ok(id)
    }

    /// Declares `id` to be the output called `name`.
    ///
    /// # Errors
    /// When the name is taken, or the id is not of this graph.
    pub fn output(&mut self, name: &str, id: TensorId) -> Result<()> {
        let tensor = self.graph.tensor(id)?;
        let direct = matches!(tensor.origin, Origin::Node(_)) && !self.graph.outputs.contains(&id);
        let id = if direct {
            id
        } else {
            // An input handed through, or one value under two names: give it a node of its own.
            let shape = tensor.shape.clone();
            self.reshape(id, &shape)?
        };
        self.check_name(name)?;
        self.names.insert(name.to_owned());
        // The old name stays that of the node.
        name.clone_into(&mut self.graph.tensors[id.index()].name);
        self.graph.outputs.push(id);
        Ok(())
    }

    /// A small constant of floats.
    ///
    /// # Errors
    /// When the values do not fill the shape, one is not finite, or the element type is an integer.
    pub fn constant(
        &mut self,
        name: &str,
        elem: Elem,
        shape: &[usize],
        values: Vec<f32>,
    ) -> Result<TensorId> {
        if elem == Elem::I32 || elem.is_int8() {
            return Err(self.bad("constant", name, "float values for an integer type"));
        }
        let name = self.qualified(name);
        let expected: usize = elements(shape).unwrap_or(0);
        if expected != values.len() {
            return Err(self.bad(
                "constant",
                &name,
                &format!("{} values for shape {shape:?}, which has {expected}", values.len()),
            ));
        }
        if let Some(index) = values.iter().position(|v| !v.is_finite()) {
            let found = format!("value {index} is {}, expected a finite number", values[index]);
            return Err(self.bad("constant", &name, &found));
        }
        self.push(name, elem, shape.to_vec(), Origin::Constant(Constant::Float(Arc::from(values))))
    }

    /// One value, of the element type and rank of `like`, for use in a binary op with it.
    ///
    /// # Errors
    /// When the id is not of this graph.
    pub fn scalar(&mut self, like: TensorId, value: f32) -> Result<TensorId> {
        let tensor = self.graph.tensor(like)?;
        let (elem, rank) = (tensor.elem, tensor.shape.len());
        if let Some(&id) = self.scalars.get(&(elem, rank, value.to_bits())) {
            return Ok(id);
        }
        let constant = match elem {
            Elem::Activation | Elem::F32 => Constant::Float(Arc::from([value])),
            Elem::I32 | Elem::Int8 | Elem::Int8Cache => Constant::Int(Arc::from([value as i32])),
        };
        let name = format!("scalar_{}", self.graph.tensors.len() + self.counted());
        let id = self.push(name, elem, vec![1; rank], Origin::Constant(constant))?;
        self.scalars.insert((elem, rank, value.to_bits()), id);
        Ok(id)
    }

    /// `x·Wᵀ (+ b)` for x `[m, in]`. The weight's name in the graph is `<scope>_<name>`.
    ///
    /// # Errors
    /// When the shapes or element types do not fit; the message names the node.
    pub fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        weight: Weight,
        bias: Option<Vec<f32>>,
    ) -> Result<TensorId> {
        let name = self.qualified(name);
        let (rows, cols) = (weight.rows(), weight.cols());
        let shape = self.linear_shape(&name, x, [rows, cols])?;
        let mut inputs = vec![x, self.weight(&name, weight, vec![rows, cols])?];
        inputs.extend(self.bias("linear", &name, bias, rows)?);
        self.node_named(name, Op::Linear, inputs, Elem::Activation, shape)
    }

    /// The shape of what a `Linear` makes of `x` with a weight of these rows and columns.
    fn linear_shape(
        &self,
        name: &str,
        x: TensorId,
        [rows, cols]: [usize; 2],
    ) -> Result<Vec<usize>> {
        let input = self.graph.tensor(x)?;
        if input.elem != Elem::Activation || input.shape.len() != 2 || input.shape[1] != cols {
            let found = format!(
                "input is {input}, expected activation[m, {cols}] for a weight [{rows}, {cols}]"
            );
            return Err(self.bad("linear", name, &found));
        }
        Ok(vec![input.shape[0], rows])
    }

    /// The weight of the node `name`, seen as a tensor of `shape`.
    fn weight(&mut self, name: &str, weight: Weight, shape: Vec<usize>) -> Result<TensorId> {
        let origin = Origin::Weight(weight);
        self.push(format!("{name}_weight"), Elem::Activation, shape, origin)
    }

    /// The bias of the node `name` with `rows` outputs.
    fn bias(
        &mut self,
        op: &str,
        name: &str,
        bias: Option<Vec<f32>>,
        rows: usize,
    ) -> Result<Option<TensorId>> {
        let Some(bias) = bias else { return Ok(None) };
        if bias.len() != rows {
            let found = format!("bias of {} values, expected {rows}", bias.len());
            return Err(self.bad(op, name, &found));
        }
        let constant = Origin::Constant(Constant::Float(Arc::from(bias)));
        let name = format!("{name}_bias");
        self.push(name, Elem::Activation, vec![rows], constant).map(Some)
    }

    /// Batched matmul of activations; see [`Op::MatMul`].
    ///
    /// # Errors
    /// When the shapes or element types do not fit; the message names the node.
    pub fn matmul(&mut self, a: TensorId, b: TensorId, transpose_b: bool) -> Result<TensorId> {
        let op = Op::MatMul { transpose_b };
        let (ta, tb) = (self.graph.tensor(a)?, self.graph.tensor(b)?);
        let (sa, sb) = (&ta.shape, &tb.shape);
        let rank = sa.len();
        let same = ta.elem == tb.elem || ta.elem == Elem::Activation && tb.elem.is_int8();
        let fits = rank >= 2 && sb.len() == rank && same && ta.elem != Elem::I32 && {
            let (k, n) = if transpose_b { (rank - 1, rank - 2) } else { (rank - 2, rank - 1) };
            sa[..rank - 2] == sb[..rank - 2] && sa[rank - 1] == sb[k] && n < rank
        };
        if !fits {
            return Err(self.mismatch(&op, &[a, b], "equal batch dimensions and inner sizes"));
        }
        let mut shape = sa.clone();
        shape[rank - 1] = if transpose_b { sb[rank - 2] } else { sb[rank - 1] };
        let elem = ta.elem;
        self.node(op, vec![a, b], elem, shape)
    }

    /// Element-wise on two tensors of one rank and element type, with broadcasting.
    ///
    /// # Errors
    /// When the shapes or element types do not fit; the message names the node.
    pub fn binary(&mut self, op: BinaryOp, a: TensorId, b: TensorId) -> Result<TensorId> {
        let (ta, tb) = (self.graph.tensor(a)?, self.graph.tensor(b)?);
        let op = Op::Binary(op);
        let shape = broadcast(&ta.shape, &tb.shape);
        let elem = ta.elem;
        match shape {
            Some(shape) if ta.elem == tb.elem => self.node(op, vec![a, b], elem, shape),
            _ => Err(self.mismatch(&op, &[a, b], "one element type, one rank, sizes equal or 1")),
        }
    }

    /// x · value
    ///
    /// # Errors
    /// When the shapes or element types do not fit; the message names the node.
    pub fn scale(&mut self, x: TensorId, value: f32) -> Result<TensorId> {
        let value = self.scalar(x, value)?;
        self.mul(x, value)
    }

    /// Element-wise on one floating-point tensor.
    ///
    /// # Errors
    /// When `x` holds integers.
    pub fn unary(&mut self, op: UnaryOp, x: TensorId) -> Result<TensorId> {
        let tensor = self.graph.tensor(x)?;
        let op = Op::Unary(op);
        if tensor.elem == Elem::I32 {
            return Err(self.mismatch(&op, &[x], "a floating-point tensor"));
        }
        let (elem, shape) = (tensor.elem, tensor.shape.clone());
        self.node(op, vec![x], elem, shape)
    }

    /// x between `min` and `max`, see [`Op::Clamp`]. `min` is at most `max`; one of them may be infinite.
    ///
    /// # Errors
    /// When `x` holds integers, or the bounds are not in order.
    pub fn clamp(&mut self, x: TensorId, min: f32, max: f32) -> Result<TensorId> {
        let tensor = self.graph.tensor(x)?;
        let op = Op::Clamp { min, max };
        let bounds = min <= max && min < f32::INFINITY && max > f32::NEG_INFINITY;
        if tensor.elem == Elem::I32 || !bounds {
            let expected =
                format!("a floating-point tensor, and bounds in order, not {min} and {max}");
            return Err(self.mismatch(&op, &[x], &expected));
        }
        let (elem, shape) = (tensor.elem, tensor.shape.clone());
        self.node(op, vec![x], elem, shape)
    }

    /// Reduces one axis to size 1.
    ///
    /// # Errors
    /// When `x` has no such axis.
    pub fn reduce(&mut self, op: ReduceOp, x: TensorId, axis: usize) -> Result<TensorId> {
        let tensor = self.graph.tensor(x)?;
        let op = Op::Reduce { op, axis };
        let mut shape = tensor.shape.clone();
        let elem = tensor.elem;
        match shape.get_mut(axis) {
            Some(size) => *size = 1,
            None => return Err(self.mismatch(&op, &[x], &format!("an axis {axis}"))),
        }
        self.node(op, vec![x], elem, shape)
    }

    /// Softmax along the last axis.
    ///
    /// # Errors
    /// When `x` holds integers.
    pub fn softmax(&mut self, x: TensorId) -> Result<TensorId> {
        let tensor = self.graph.tensor(x)?;
        if tensor.elem == Elem::I32 {
            return Err(self.mismatch(&Op::Softmax, &[x], "a floating-point tensor"));
        }
        let (elem, shape) = (tensor.elem, tensor.shape.clone());
        self.node(Op::Softmax, vec![x], elem, shape)
    }

    /// RMSNorm along the last axis, see [`Op::RmsNorm`]. `weight` is a constant of as many values as
    /// that axis has, which no other node reads; it becomes one-dimensional.
    ///
    /// # Errors
    /// When `weight` is no constant, or has another number of values.
    pub fn rms_norm(&mut self, x: TensorId, epsilon: f32, weight: TensorId) -> Result<TensorId> {
        let tensor = self.graph.tensor(x)?;
        let (elem, shape) = (tensor.elem, tensor.shape.clone());
        let width = shape.last().copied().unwrap_or(1);
        let rows = [tensor.elements() / width, width];
        let op = Op::RmsNorm { epsilon };
        self.norm_vectors(&op, epsilon, &[x, weight])?;
        if shape.len() == 2 {
            return self.node(op, vec![x, weight], elem, shape);
        }
        // The NPU library is wrong about some tensors of more dimensions, such as [64, 2, 32].
        let x = self.reshape(x, &rows)?;
        let y = self.node(op, vec![x, weight], elem, rows.to_vec())?;
        self.reshape(y, &shape)
    }

    /// LayerNorm along the last axis, see [`Op::LayerNorm`]. `weight` and `bias` are constants of as many values
    /// as that axis has, which no node but a norm reads; they become one-dimensional.
    ///
    /// # Errors
    /// When `weight` or `bias` is no constant, or has another number of values.
    pub fn layer_norm(
        &mut self,
        x: TensorId,
        epsilon: f32,
        weight: TensorId,
        bias: TensorId,
    ) -> Result<TensorId> {
        let op = Op::LayerNorm { epsilon };
        self.norm_vectors(&op, epsilon, &[x, weight, bias])?;
        let tensor = self.graph.tensor(x)?;
        let (elem, shape) = (tensor.elem, tensor.shape.clone());
        self.node(op, vec![x, weight, bias], elem, shape)
    }

    /// Checks the inputs of a norm, x and constants of its last axis, and makes the constants one-dimensional.
    fn norm_vectors(&mut self, op: &Op, epsilon: f32, inputs: &[TensorId]) -> Result<()> {
        let Some((&x, vectors)) = inputs.split_first() else { return Ok(()) };
        let tensor = self.graph.tensor(x)?;
        let width = tensor.shape.last().copied().unwrap_or(0);
        let mut fits = tensor.elem != Elem::I32 && epsilon > 0.0;
        for &id in vectors {
            let vector = self.graph.tensor(id)?;
            let norm = |op: &Op| matches!(op, Op::RmsNorm { .. } | Op::LayerNorm { .. });
            let elsewhere = self.graph.nodes.iter().any(|n| n.inputs.contains(&id) && !norm(&n.op));
            fits &= matches!(vector.origin, Origin::Constant(Constant::Float(_)))
                && !elsewhere
                && vector.elements() == width
                && vector.shape.last() == Some(&width);
        }
        if !fits {
            let expected = "a floating-point tensor, and constants [n] of its last axis";
            return Err(self.mismatch(op, inputs, expected));
        }
        for id in vectors {
            let vector = &mut self.graph.tensors[id.index()];
            vector.shape = vec![width];
            vector.elem = Elem::Activation;
        }
        Ok(())
    }

    /// The same elements in another shape. Nothing is added when the shape is the same and `x` is not
    /// made an output by it.
    ///
    /// # Errors
    /// When the number of elements is another.
    pub fn reshape(&mut self, x: TensorId, shape: &[usize]) -> Result<TensorId> {
        let tensor = self.graph.tensor(x)?;
        let elem = tensor.elem;
        if elements(shape) != Some(tensor.elements()) {
            return Err(self.mismatch(
                &Op::Reshape,
                &[x],
                &format!("as many elements as {shape:?}"),
            ));
        }
        self.node(Op::Reshape, vec![x], elem, shape.to_vec())
    }

    /// Permutes dimensions: output dimension `i` is input dimension `perm[i]`.
    ///
    /// # Errors
    /// When `perm` is no permutation of the dimensions.
    pub fn transpose(&mut self, x: TensorId, perm: &[usize]) -> Result<TensorId> {
        let tensor = self.graph.tensor(x)?;
        let op = Op::Transpose { perm: perm.to_vec() };
        let mut sorted = perm.to_vec();
        sorted.sort_unstable();
        if !sorted.iter().copied().eq(0..tensor.shape.len()) {
            return Err(self.mismatch(
                &op,
                &[x],
                &format!("a tensor whose dimensions {perm:?} permutes"),
            ));
        }
        let (elem, shape) = (tensor.elem, perm.iter().map(|&i| tensor.shape[i]).collect());
        self.node(op, vec![x], elem, shape)
    }

    /// Joins tensors along `axis`. One tensor alone is handed back as it is.
    ///
    /// # Errors
    /// When the tensors differ in more than that axis.
    pub fn concat(&mut self, inputs: &[TensorId], axis: usize) -> Result<TensorId> {
        let op = Op::Concat { axis };
        let Some((&first, rest)) = inputs.split_first() else {
            return Err(self.bad("concat", &self.scope, "no inputs"));
        };
        if rest.is_empty() {
            return Ok(first);
        }
        let tensor = self.graph.tensor(first)?;
        let (elem, mut shape) = (tensor.elem, tensor.shape.clone());
        for &id in rest {
            let other = self.graph.tensor(id)?;
            let same = other.elem == elem
                && other.shape.len() == shape.len()
                && axis < shape.len()
                && (0..shape.len()).all(|i| i == axis || shape[i] == other.shape[i]);
            let Some(size) = shape.get(axis).and_then(|n| n.checked_add(*other.shape.get(axis)?))
            else {
                return Err(self.mismatch(&op, inputs, &format!("an axis {axis}")));
            };
            if !same {
                return Err(self.mismatch(
                    &op,
                    inputs,
                    &format!("one element type and equal sizes except along axis {axis}"),
                ));
            }
            shape[axis] = size;
        }
        self.node(op, inputs.to_vec(), elem, shape)
    }

    /// Elements `start..end` along `axis`. The whole axis is handed back as it is.
    ///
    /// # Errors
    /// When the range is empty or leaves the axis.
    pub fn slice(
        &mut self,
        x: TensorId,
        axis: usize,
        start: usize,
        end: usize,
    ) -> Result<TensorId> {
        let tensor = self.graph.tensor(x)?;
        let op = Op::Slice { axis, start, end };
        let elem = tensor.elem;
        let mut shape = tensor.shape.clone();
        match shape.get_mut(axis) {
            Some(size) if start == 0 && end == *size => return Ok(x),
            Some(size) if start < end && end <= *size => *size = end - start,
            _ => {
                let wanted = format!("an axis {axis} with elements {start}..{end}");
                return Err(self.mismatch(&op, &[x], &wanted));
            }
        }
        self.node(op, vec![x], elem, shape)
    }

    /// Converts to another element type. Nothing is added when it has that type already.
    ///
    /// # Errors
    /// When the types cannot be converted into one another.
    pub fn cast(&mut self, x: TensorId, elem: Elem) -> Result<TensorId> {
        let tensor = self.graph.tensor(x)?;
        if tensor.elem == elem {
            return Ok(x);
        }
        let shape = tensor.shape.clone();
        self.node(Op::Cast, vec![x], elem, shape)
    }

    fn node(
        &mut self,
        op: Op,
        inputs: Vec<TensorId>,
        elem: Elem,
        shape: Vec<usize>,
    ) -> Result<TensorId> {
        let name = self.qualified(&format!("{}_{}", op.name(), self.next));
        self.node_named(name, op, inputs, elem, shape)
    }

    fn node_named(
        &mut self,
        name: String,
        op: Op,
        inputs: Vec<TensorId>,
        elem: Elem,
        shape: Vec<usize>,
    ) -> Result<TensorId> {
        for (index, &id) in inputs.iter().enumerate() {
            let weight = matches!(self.graph.tensor(id)?.origin, Origin::Weight(_));
            let layer = matches!(op, Op::Linear | Op::Conv2d(_)) && index == 1;
            let table = op == Op::Gather && index == 0;
            if weight && !layer && !table || layer && !weight {
                let expected =
                    "a weight as second input of linear and conv2d or table of gather only";
                return Err(self.mismatch(&op, &inputs, expected));
            }
            let int8 = self.graph.tensor(id)?.elem.is_int8();
            let cache = matches!(op, Op::Attention(_)) && matches!(index, 3 | 4);
            let part = matches!(op, Op::Slice { axis: 0, .. });
            if int8 && !(matches!(op, Op::MatMul { .. }) && index == 1 || cache || part) {
                let expected =
                    "int8 as second input of matmul, cache of attention, or heads of it, only";
                return Err(self.mismatch(&op, &inputs, expected));
            }
        }
        let index = self.graph.nodes.len();
        let output = self.push(name.clone(), elem, shape, Origin::Node(index))?;
        self.graph.nodes.push(Node { name, op, inputs, output });
        self.next += 1;
        Ok(output)
    }

    fn push(
        &mut self,
        name: String,
        elem: Elem,
        shape: Vec<usize>,
        origin: Origin,
    ) -> Result<TensorId> {
        self.check_name(&name)?;
        if shape.is_empty() || shape.len() > MAX_RANK || elements(&shape).is_none_or(|n| n == 0) {
            return Err(self.bad(
                "tensor",
                &name,
                &format!("shape {shape:?}, expected 1 to {MAX_RANK} dimensions of at least 1"),
            ));
        }
        let index = u32::try_from(self.graph.tensors.len())
            .map_err(|_| self.bad("tensor", &name, "more than 2^32 tensors"))?;
        self.names.insert(name.clone());
        self.graph.tensors.push(Tensor { name, elem, shape, origin });
        Ok(TensorId { graph: self.graph.identity, index })
    }

    fn check_name(&self, name: &str) -> Result<()> {
        let legal =
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if !legal {
            return Err(self.bad(
                "tensor",
                name,
                "a name of ASCII letters, digits and _ was expected",
            ));
        }
        if self.names.contains(name) {
            return Err(self.bad("tensor", name, "the name is taken"));
        }
        Ok(())
    }

    /// Nodes that composites stand for, beyond the composites themselves.
    fn counted(&self) -> usize {
        self.next.saturating_sub(self.graph.nodes.len())
    }

    /// Name of a constant for the tensor `x` that was made last: `prefix`, and the number of `x`.
    pub fn numbered(&self, prefix: &str, x: TensorId) -> String {
        format!("{prefix}_{}", x.index() + self.counted())
    }

    fn qualified(&self, name: &str) -> String {
        if self.scope.is_empty() { name.to_owned() } else { format!("{}_{name}", self.scope) }
    }

    fn bad(&self, what: &str, name: &str, found: &str) -> Error {
        self.fault(&format!("{what} {name:?}: {found}"))
    }

    fn fault(&self, what: &str) -> Error {
        Error::new(ErrorKind::Graph, format!("graph {:?}: {what}", self.graph.name))
    }

    fn mismatch(&self, op: &Op, inputs: &[TensorId], expected: &str) -> Error {
        self.misused(op.name(), inputs, expected)
    }

    /// The error for inputs of `op`, an op or a layer put together from several, that are not what it takes.
    pub fn misused(&self, op: &str, inputs: &[TensorId], expected: &str) -> Error {
        let found: Vec<_> = inputs
            .iter()
            .map(|id| self.graph.tensor(*id).map_or_else(|e| e.to_string(), ToString::to_string))
            .collect();
        let name = self.qualified(&format!("{op}_{}", self.next));
        self.bad(op, &name, &format!("found {}; expected {expected}", found.join(", ")))
    }
}

/// Number of elements; none when it does not fit.
fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))
}

fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    if a.len() != b.len() {
        return None;
    }
    a.iter()
        .zip(b)
        .map(|(&x, &y)| match (x, y) {
            (x, y) if x == y => Some(x),
            (x, 1) => Some(x),
            (1, y) => Some(y),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests;
