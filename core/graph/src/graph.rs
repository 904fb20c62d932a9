//! The graph that a recipe builds and that is lowered twice: to QNN and to ONNX.
//!
//! A [`Graph`] is a list of [`Node`]s in execution order over named [`Tensor`]s. Every node has one
//! output. The op set is small on purpose: each op is lowered by every backend's lowering, so what can
//! be expressed with two ops is not a third one, but for composites that a backend computes at once ([`Op::Attention`]). The builder ([`crate::builder::GraphBuilder`]) infers
//! shapes and checks every node, so a lowering may rely on what this file says.
//!
//! Invariants of a built graph:
//! - names of tensors are unique and consist of ASCII letters, digits and `_`;
//! - ranks lie in `1..=`[`MAX_RANK`], no dimension is 0, element counts fit in `usize`;
//! - a node reads only inputs, constants, weights and outputs of earlier nodes;
//! - every output is the output of a node, so a lowering can write it in place;
//! - a weight is the second input of `Linear` and `Conv2d` nodes or the first of `Gather` nodes, nothing else;
//! - every tensor but an output is read by a node.

use std::fmt;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_types::{DType, GraphInfo, Quantization, TensorInfo};
use serde::{Deserialize, Serialize};

use crate::weight::Weight;

/// Largest rank of a tensor. The Hexagon backend handles four dimensions everywhere.
pub const MAX_RANK: usize = 4;

/// Logical element type. What it is in memory depends on the lowering.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Elem {
    /// f16 in a QNN graph, f32 in an ONNX graph.
    Activation,
    /// f32 in both: recurrent state and the arithmetic around it.
    F32,
    /// 32-bit integer in both.
    I32,
    /// int8 weights that the caller of the graph gives: an input only, read by [`Op::MatMul`] as its second input, or as
    /// the cache of [`Op::Attention`]. A value is the integer times [`INT8_STEP`].
    Int8,
    /// int8 rows of a cache, which the caller of the graph gives: as [`Elem::Int8`], with a scale for each row that the
    /// graph applies to scores and weights. Unsigned with its 0 at 128 in a QNN graph, which dequantizes that sooner.
    Int8Cache,
}

/// Value of one step of an [`Elem::Int8`] input. A power of two, so that nothing is lost; small enough that sums of
/// activations times the int8 values stay within f16.
pub const INT8_STEP: f32 = 1.0 / 128.0;

impl Elem {
    /// The element type in a QNN graph.
    pub const fn qnn(self) -> DType {
        match self {
            Self::Activation => DType::F16,
            Self::F32 => DType::F32,
            Self::I32 => DType::I32,
            Self::Int8 => DType::SFixed8,
            Self::Int8Cache => DType::UFixed8,
        }
    }

    /// Quantization of its values in a QNN graph.
    pub const fn quantization(self) -> Quantization {
        match self {
            Self::Activation | Self::F32 | Self::I32 => Quantization::None,
            Self::Int8 => Quantization::PerTensor { scale: INT8_STEP, offset: 0 },
            Self::Int8Cache => Quantization::PerTensor { scale: INT8_STEP, offset: -128 },
        }
    }

    /// Integers that only a matmul reads.
    pub const fn is_int8(self) -> bool {
        matches!(self, Self::Int8 | Self::Int8Cache)
    }

    /// The element type in an ONNX graph.
    pub const fn onnx(self) -> DType {
        match self {
            Self::Activation | Self::F32 => DType::F32,
            Self::I32 => DType::I32,
            Self::Int8 | Self::Int8Cache => DType::I8,
        }
    }
}

impl fmt::Display for Elem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Activation => "activation",
            Self::F32 => "f32",
            Self::I32 => "i32",
            Self::Int8 => "int8",
            Self::Int8Cache => "int8 cache",
        })
    }
}

/// A tensor of one graph. Another graph, and its builder, refuse it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId {
    pub(crate) graph: u64,
    pub(crate) index: u32,
}

impl TensorId {
    /// Its index in [`Graph::tensors`].
    pub const fn index(self) -> usize {
        self.index as usize
    }
}

/// Values of a small constant, row-major.
#[derive(Debug, Clone, PartialEq)]
pub enum Constant {
    /// For [`Elem::Activation`] (rounded to f16 by the QNN lowering) and [`Elem::F32`].
    Float(Arc<[f32]>),
    /// For [`Elem::I32`].
    Int(Arc<[i32]>),
}

/// Source of a tensor's values.
#[derive(Debug, Clone)]
pub enum Origin {
    /// Given by the caller of the graph.
    Input,
    /// Stored in the graph: norm weights, biases, scalars.
    Constant(Constant),
    /// Stored in the graph, and large: read from the checkpoint when it is lowered.
    Weight(Weight),
    /// The output of the node with this index in [`Graph::nodes`].
    Node(usize),
}

/// A named tensor of a graph.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Unique in the graph.
    pub name: String,
    /// Element type. `Activation` for weights, whose storage is [`Weight::storage`].
    pub elem: Elem,
    /// Row-major dimensions.
    pub shape: Vec<usize>,
    /// Source of the values.
    pub origin: Origin,
}

impl Tensor {
    /// Number of elements. The builder has checked that it fits.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{:?}", self.name, self.elem, self.shape)
    }
}

/// Element-wise operation on two tensors of one element type. Shapes broadcast as in NumPy, and have
/// the same rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BinaryOp {
    /// a + b
    Add,
    /// a − b
    Sub,
    /// a · b
    Mul,
    /// a / b
    Div,
    /// The larger of a and b.
    Max,
    /// The smaller of a and b.
    Min,
}

/// Element-wise operation on one floating-point tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnaryOp {
    /// |x|
    Abs,
    /// −x
    Neg,
    /// eˣ. On the NPU, x is kept between −40, where eˣ is 0 in f16, and 11.086, beyond which f16 overflows:
    /// the library returns NaN outside.
    Exp,
    /// Natural logarithm.
    Log,
    /// 1 / √x
    Rsqrt,
    /// 1 / (1 + e⁻ˣ)
    Sigmoid,
    /// x / (1 + e⁻ˣ) (Elfwing et al. 2018, `torch.nn.functional.silu`)
    Silu,
    /// Sine.
    Sin,
    /// Hyperbolic tangent.
    Tanh,
    /// max(x, 0)
    Relu,
    /// `½x · (1 + erf(x / √2))` (Hendrycks and Gimpel 2016, arXiv 1606.08415; `torch.nn.functional.gelu`).
    Gelu,
    /// `½x · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`, which the same paper gives as an approximation, and which
    /// checkpoints name `gelu_pytorch_tanh`.
    GeluTanh,
}

impl UnaryOp {
    /// `a` and `b` of `½x · (1 + tanh(x · (a + b·x²)))`, the form of a GELU on the NPU; none for other ops.
    ///
    /// The form is that of [`UnaryOp::GeluTanh`]. With the other two numbers it is within 2.8e-4 of
    /// [`UnaryOp::Gelu`], whose erf the NPU library does not have; its own `Gelu` is off by 0.016 at 12.
    pub const fn gelu_terms(self) -> Option<[f32; 2]> {
        match self {
            Self::Gelu => Some([0.800_157_1, 0.034_700_893]),
            Self::GeluTanh => Some([0.797_884_6, 0.035_677_407]),
            _ => None,
        }
    }
}

/// Reduction along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceOp {
    /// Sum of the elements.
    Sum,
    /// Arithmetic mean of the elements.
    Mean,
    /// Largest element.
    Max,
}

/// Geometry of the filters of an [`Op::Conv2d`]. Pairs are rows and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conv2d {
    /// Size of a filter.
    pub kernel: [usize; 2],
    /// Steps from one output to the next.
    pub stride: [usize; 2],
    /// Zeros before the first and behind the last row, and before the first and behind the last column; at most
    /// `dilation · (kernel − 1)` of them, so that every filter sees an element.
    pub padding: [[usize; 2]; 2],
    /// Distance of the elements that a filter sees.
    pub dilation: [usize; 2],
    /// Groups that channels are split into; each output sees the inputs of its group. As many as there are input
    /// channels make a depthwise convolution.
    pub groups: usize,
}

impl Conv2d {
    /// A filter that moves by one element, without padding.
    pub const fn new(kernel: [usize; 2]) -> Self {
        Self { kernel, stride: [1, 1], padding: [[0, 0]; 2], dilation: [1, 1], groups: 1 }
    }
}

/// Geometry of the filters of a convolution along one axis, see [`Conv2d`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Conv1d {
    /// Size of a filter.
    pub kernel: usize,
    /// Steps from one output to the next.
    pub stride: usize,
    /// Zeros before the first and behind the last element.
    pub padding: [usize; 2],
    /// Distance of the elements that a filter sees.
    pub dilation: usize,
    /// Groups that channels are split into.
    pub groups: usize,
}

impl Conv1d {
    /// A filter that moves by one element, without padding.
    pub const fn new(kernel: usize) -> Self {
        Self { kernel, stride: 1, padding: [0, 0], dilation: 1, groups: 1 }
    }

    /// A filter that sees an element and those before it, zeros before the first one.
    pub const fn causal(kernel: usize) -> Self {
        Self { padding: [kernel.saturating_sub(1), 0], ..Self::new(kernel) }
    }
}

/// Numbers of ops as text, which is exact and has infinities.
mod exact {
    use serde::de::{Deserialize as _, Deserializer, Error as _};
    use serde::ser::Serializer;

    pub(super) fn serialize<S: Serializer>(number: &f32, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(number)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
        let text = String::deserialize(from)?;
        let number: f32 = text.parse().map_err(D::Error::custom)?;
        if number.is_nan() { Err(D::Error::custom("not a number")) } else { Ok(number) }
    }
}

/// Operation of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// `y = x·Wᵀ (+ b)`. Inputs: x `[m, in]`, weight `[out, in]`, optionally bias `[out]` (a constant).
    /// Output `[m, out]`. QNN's `FullyConnected`.
    Linear,
    /// Matmul of two activations, batched over all dimensions but the last two, which are equal in
    /// both inputs. Inputs `[…, m, k]` and `[…, k, n]`, or `[…, n, k]` when `transpose_b`. The second may
    /// be [`Elem::Int8`] or [`Elem::Int8Cache`].
    MatMul {
        /// The second input is `[…, n, k]`.
        transpose_b: bool,
    },
    /// Element-wise on two tensors.
    Binary(BinaryOp),
    /// Element-wise on one tensor.
    Unary(UnaryOp),
    /// Along one axis, which stays with size 1.
    Reduce {
        /// The reduction to compute.
        op: ReduceOp,
        /// The axis.
        axis: usize,
    },
    /// x, or the nearer of two bounds where x lies outside.
    Clamp {
        /// Smallest value of the output.
        #[serde(with = "exact")]
        min: f32,
        /// Largest value of the output.
        #[serde(with = "exact")]
        max: f32,
    },
    /// Softmax along the last axis.
    Softmax,
    /// `x · rsqrt(mean(x²) + epsilon) · w` along the last axis (Zhang and Sennrich 2019). Inputs: x
    /// `[rows, n]`, and w `[n]`, a constant. The NPU library squares and sums in f32, so nothing
    /// overflows. The builder makes rows of any other shape, as the library is wrong about some of them.
    RmsNorm {
        /// Added to the mean of the squares; positive.
        #[serde(with = "exact")]
        epsilon: f32,
    },
    /// `(x − mean(x)) · rsqrt(variance(x) + epsilon) · w + b` along the last axis (Ba et al. 2016, arXiv
    /// 1607.06450). Inputs: x of any shape, w `[n]` and b `[n]`, constants. The NPU library takes mean and
    /// variance in f32.
    LayerNorm {
        /// Added to the variance; positive.
        #[serde(with = "exact")]
        epsilon: f32,
    },
    /// Cross-correlation as `torch.nn.Conv2d` has it. Inputs: x `[n, in, rows, columns]`, weight
    /// `[out, in / groups, kernel rows, kernel columns]`, optionally bias `[out]` (a constant). Output
    /// `[n, out, rows', columns']` with `rows' = (rows + padding − dilation · (kernel − 1) − 1) / stride + 1`,
    /// rounded down, and columns alike.
    Conv2d(Conv2d),
    /// Rows of a table. Inputs: the table `[size, width]`, a weight or another tensor, and indices `[m]`, an
    /// [`Elem::I32`]. Output `[m, width]`. The builder makes rows of any other axis, as the NPU library is
    /// wrong about some of them. An index outside of `0..size` is an error of the NPU when the graph runs.
    Gather,
    /// Same elements in row-major order; the shape is the output's.
    Reshape,
    /// Output dimension `i` is input dimension `perm[i]`.
    Transpose {
        /// The permutation.
        perm: Vec<usize>,
    },
    /// Joins two or more tensors along `axis`.
    Concat {
        /// The axis.
        axis: usize,
    },
    /// Elements `start..end` along `axis`.
    Slice {
        /// The axis.
        axis: usize,
        /// First index.
        start: usize,
        /// One past the last index.
        end: usize,
    },
    /// Converts to the output's element type.
    Cast,
    /// Softmax attention of some rows to a cache and to themselves, see [`AttentionInputs`]. Other ops compute the same:
    /// [`Graph::decomposed`]. A lowering that has nothing better lowers those.
    Attention(AttentionForm),
}

/// Which of the inputs of an [`Op::Attention`] there are, beside queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionForm {
    /// Keys and values of a cache.
    pub past: bool,
    /// Scales of the rows of the cache, which is int8.
    pub scales: bool,
    /// A mask.
    pub mask: bool,
    /// A cap.
    pub cap: bool,
    /// Sinks.
    #[serde(default)]
    pub sinks: bool,
}

/// Inputs of an [`Op::Attention`], as a node has them: those that there are, one behind the other.
///
/// The output `[groups, repeat · rows, dim]` is `softmax(cap · tanh(q · [past_k; k]ᵀ) + mask) · [past_v; v]`, without
/// what is missing (Vaswani et al. 2017, arXiv 1706.03762). Heads of queries that share keys and values are rows of one
/// group (Ainslie et al. 2023, arXiv 2305.13245), so that query `a · rows + r` is head `a` of token `r`. With sinks,
/// the softmax has one more score, whose share is added to nothing.
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputs<T> {
    /// Queries `[groups, repeat · rows, dim]`, scaled.
    pub q: T,
    /// Keys `[groups, rows, dim]`.
    pub k: T,
    /// Values, in the shape of the keys.
    pub v: T,
    /// Keys and values of the cache, `[groups, capacity, dim]`: of the elements of the queries, or int8 with scales.
    pub past: Option<[T; 2]>,
    /// Scales of the rows of the cache, `[groups, 1, capacity]`, of keys and of values.
    pub scales: Option<[T; 2]>,
    /// Added to the scores, the graph's own rows last: `[1, 1, rows or 1, capacity + rows]`; `[1, 1, capacity + 1]` for
    /// one row.
    pub mask: Option<T>,
    /// The cap `[1, 1, 1]` (Gemma 2, arXiv 2408.00118), by which the queries are divided already.
    pub cap: Option<T>,
    /// A score of each query that belongs to no key, `[groups, repeat · rows, 1]` (Xiao et al. 2023, arXiv 2309.17453).
    pub sinks: Option<T>,
}

impl<T: Copy> AttentionInputs<T> {
    /// Rows that see each other, without cache or mask.
    pub const fn new(q: T, k: T, v: T) -> Self {
        Self { q, k, v, past: None, scales: None, mask: None, cap: None, sinks: None }
    }

    /// The inputs of a node; none where they are not as many as the form has.
    pub fn of(form: AttentionForm, inputs: &[T]) -> Option<Self> {
        let mut all = inputs.iter().copied();
        let mut next = || all.next();
        let [q, k, v] = [next()?, next()?, next()?];
        let mut found = Self::new(q, k, v);
        if form.past {
            found.past = Some([next()?, next()?]);
        }
        if form.scales {
            found.scales = Some([next()?, next()?]);
        }
        if form.mask {
            found.mask = Some(next()?);
        }
        if form.cap {
            found.cap = Some(next()?);
        }
        if form.sinks {
            found.sinks = Some(next()?);
        }
        all.next().is_none().then_some(found)
    }

    /// Which of them there are.
    pub const fn form(&self) -> AttentionForm {
        let Self { past, scales, mask, cap, sinks, .. } = self;
        AttentionForm {
            past: past.is_some(),
            scales: scales.is_some(),
            mask: mask.is_some(),
            cap: cap.is_some(),
            sinks: sinks.is_some(),
        }
    }

    /// All of them, in order.
    pub fn list(&self) -> Vec<T> {
        let pairs = [self.past, self.scales].into_iter().flatten().flatten();
        let single = [self.mask, self.cap, self.sinks].into_iter().flatten();
        [self.q, self.k, self.v].into_iter().chain(pairs).chain(single).collect()
    }
}

impl Op {
    /// Short lower-case name, for tensor names and messages.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::MatMul { .. } => "matmul",
            Self::Binary(BinaryOp::Add) => "add",
            Self::Binary(BinaryOp::Sub) => "sub",
            Self::Binary(BinaryOp::Mul) => "mul",
            Self::Binary(BinaryOp::Div) => "div",
            Self::Binary(BinaryOp::Max) => "max",
            Self::Binary(BinaryOp::Min) => "min",
            Self::Unary(UnaryOp::Abs) => "abs",
            Self::Unary(UnaryOp::Neg) => "neg",
            Self::Unary(UnaryOp::Exp) => "exp",
            Self::Unary(UnaryOp::Log) => "log",
            Self::Unary(UnaryOp::Rsqrt) => "rsqrt",
            Self::Unary(UnaryOp::Sigmoid) => "sigmoid",
            Self::Unary(UnaryOp::Silu) => "silu",
            Self::Unary(UnaryOp::Sin) => "sin",
            Self::Unary(UnaryOp::Tanh) => "tanh",
            Self::Unary(UnaryOp::Relu) => "relu",
            Self::Unary(UnaryOp::Gelu) => "gelu",
            Self::Unary(UnaryOp::GeluTanh) => "gelu_tanh",
            Self::Clamp { .. } => "clamp",
            Self::Reduce { op: ReduceOp::Sum, .. } => "reduce_sum",
            Self::Reduce { op: ReduceOp::Mean, .. } => "reduce_mean",
            Self::Reduce { op: ReduceOp::Max, .. } => "reduce_max",
            Self::Softmax => "softmax",
            Self::RmsNorm { .. } => "rms_norm",
            Self::LayerNorm { .. } => "layer_norm",
            Self::Conv2d(_) => "conv2d",
            Self::Gather => "gather",
            Self::Reshape => "reshape",
            Self::Transpose { .. } => "transpose",
            Self::Concat { .. } => "concat",
            Self::Slice { .. } => "slice",
            Self::Cast => "cast",
            Self::Attention(_) => "attention",
        }
    }
}

/// One operation.
#[derive(Debug, Clone)]
pub struct Node {
    /// Its name, with the scope that it was made in. That of its output, unless that is an output of the graph.
    pub name: String,
    /// Op that it computes.
    pub op: Op,
    /// Tensors that it reads.
    pub inputs: Vec<TensorId>,
    /// Tensor that it writes.
    pub output: TensorId,
}

/// A built graph. See the module's invariants.
#[derive(Debug, Clone)]
pub struct Graph {
    /// Number that the ids of its tensors carry.
    pub(crate) identity: u64,
    pub(crate) name: String,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) inputs: Vec<TensorId>,
    pub(crate) outputs: Vec<TensorId>,
}

impl Graph {
    /// The name in its context.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// All tensors, by [`TensorId::index`].
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// All nodes in execution order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Tensors that the caller provides, in order.
    pub fn inputs(&self) -> &[TensorId] {
        &self.inputs
    }

    /// Tensors that the caller receives, in order.
    pub fn outputs(&self) -> &[TensorId] {
        &self.outputs
    }

    /// The tensor behind an id of this graph.
    ///
    /// # Errors
    /// When the id is of another graph.
    pub fn tensor(&self, id: TensorId) -> Result<&Tensor> {
        let own = id.graph == self.identity;
        self.tensors.get(id.index()).filter(|_| own).ok_or_else(|| {
            Error::new(
                ErrorKind::Graph,
                format!("graph {:?}: tensor {} belongs to another graph", self.name, id.index()),
            )
            .hint("give a builder the tensors that it made itself")
        })
    }

    /// The node that writes `id`; none for inputs, constants and weights.
    pub fn producer(&self, id: TensorId) -> Option<&Node> {
        match self.tensors.get(id.index())?.origin {
            Origin::Node(node) => self.nodes.get(node),
            _ => None,
        }
    }

    /// Names, element types and shapes of inputs and outputs, with `elem` as the mapping of element
    /// types ([`Elem::qnn`] or [`Elem::onnx`]).
    pub fn info(&self, elem: impl Fn(Elem) -> DType) -> GraphInfo {
        let list = |ids: &[TensorId]| {
            ids.iter()
                .filter_map(|id| self.tensors.get(id.index()))
                .map(|t| {
                    let mut info = TensorInfo::new(&t.name, elem(t.elem), t.shape.clone());
                    // A QNN graph declares it, an ONNX graph has it in a node.
                    if info.dtype == t.elem.qnn() {
                        info.quantization = t.elem.quantization();
                    }
                    info
                })
                .collect::<Vec<_>>()
        };
        GraphInfo::new(&self.name, list(&self.inputs), list(&self.outputs))
    }

    /// Hands everything that the graph computes to `take`: names, shapes, ops, constants, and of weights
    /// their names, shapes and storage. Equal graphs over equal checkpoints give equal bytes.
    pub fn describe(&self, mut take: impl FnMut(&[u8])) {
        take(self.name.as_bytes());
        for tensor in &self.tensors {
            take(tensor.to_string().as_bytes());
            match &tensor.origin {
                Origin::Constant(Constant::Float(values)) => take(bytemuck::cast_slice(values)),
                Origin::Constant(Constant::Int(values)) => take(bytemuck::cast_slice(values)),
                Origin::Weight(weight) => {
                    let (source, storage) = (weight.source(), weight.storage());
                    take(format!("{} {:?} {storage:?}", source.name(), source.shape()).as_bytes());
                }
                Origin::Input => take(b"input"),
                Origin::Node(node) => take(&node.to_le_bytes()),
            }
        }
        // Without the identity, which is another in every process.
        let list = |ids: &[TensorId]| ids.iter().map(|id| id.index).collect::<Vec<_>>();
        for node in &self.nodes {
            let Node { name, op, inputs, output } = node;
            take(format!("{name} {op:?} {:?} {}", list(inputs), output.index).as_bytes());
        }
        take(format!("{:?} {:?}", list(&self.inputs), list(&self.outputs)).as_bytes());
    }

    /// All weights.
    pub fn weights(&self) -> impl Iterator<Item = &Weight> {
        self.tensors.iter().filter_map(|tensor| match &tensor.origin {
            Origin::Weight(weight) => Some(weight),
            _ => None,
        })
    }

    /// Stores weights in another way: `other` says which, and how. They have to be the same matrices.
    pub fn store(&mut self, mut other: impl FnMut(&Weight) -> Option<Weight>) {
        for tensor in &mut self.tensors {
            if let Origin::Weight(weight) = &mut tensor.origin
                && let Some(changed) = other(weight)
            {
                *weight = changed;
            }
        }
    }

    /// Bytes of all weights as they are stored in a QNN graph. For progress and for size estimates.
    pub fn weight_bytes(&self) -> u64 {
        self.weights().map(Weight::qnn_bytes).fold(0, u64::saturating_add)
    }

    /// Bytes of weights that one execution reads: all of a layer's, and of a table the rows that are gathered.
    pub fn weight_bytes_read(&self) -> u64 {
        let inputs =
            self.nodes.iter().flat_map(|node| node.inputs.iter().map(move |&id| (node, id)));
        let read = inputs.filter_map(|(node, id)| {
            let Origin::Weight(weight) = &self.tensors.get(id.index())?.origin else { return None };
            let stored = weight.qnn_bytes();
            if node.op != Op::Gather {
                return Some(stored);
            }
            let rows = self.tensors.get(node.output.index())?.elements() as u64;
            Some(stored.min(rows.saturating_mul(2)))
        });
        read.fold(0, u64::saturating_add)
    }
}
