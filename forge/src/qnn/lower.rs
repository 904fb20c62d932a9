//! Graph nodes to nodes of the HTP op package, and weights to constants.

use std::collections::HashMap;

use half::f16;
use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::graph::{
    BinaryOp, Constant, Conv2d, Elem, Graph, Node, Op, Origin, ReduceOp, Tensor, TensorId, UnaryOp,
};
use qhx_graph::progress::Progress;
use qhx_graph::weight::{F16_OVERFLOW, Range, Storage, Weight, beyond_f16, to_f16};
use qhx_qnn::compose::{GraphComposer, Param, TensorHandle, TensorSpec};
use qhx_types::quantized::Bits;
use qhx_types::{DType, Quantization};

use crate::kit::MAX_MASK;

/// Smallest exponent that the library is given. Its `ElementWiseExp` returns NaN for some arguments
/// below −88.4, such as −89. In f16, eˣ is 0 from −17.4 on.
const MIN_EXPONENT: f32 = -40.0;
/// Largest f16 whose exponential is finite in f16. Beyond it the library returns NaN.
const MAX_EXPONENT: f32 = 11.085_938;

/// Declares the tensors of a graph and adds its nodes; in attention of one row the queries turn around and not the cache,
/// if `turned`. `done` counts the bytes of weights.
pub(super) fn lower<'c>(
    (graph, turned): (&Graph, bool),
    composer: GraphComposer<'c>,
    done: &mut u64,
    progress: &mut dyn Progress,
) -> Result<GraphComposer<'c>> {
    let encoder = encodes(graph);
    let graph = &*graph.decomposed_where(|node| !(turned && graph.is_step(node)))?;
    let graph = &*graph.by_heads(MAX_MASK)?;
    let graph = &*graph.decomposed_by_groups()?;
    let (values, outputs, scalars) = Default::default();
    let (integers, whole, sums, ones) = Default::default();
    let mut lowering = Lowering {
        graph,
        composer,
        encoder,
        values,
        outputs,
        scalars,
        integers,
        whole,
        sums,
        ones,
    };
    // Inputs and outputs first: the binary lists them in the order in which they are declared.
    for &id in graph.inputs() {
        lowering.input(id)?;
    }
    for &id in graph.outputs() {
        let tensor = graph.tensor(id)?;
        let spec = TensorSpec::output(&tensor.name, tensor.elem.qnn(), &tensor.shape);
        let handle = lowering.composer.tensor(spec)?;
        lowering.outputs.insert(id.index(), handle);
    }
    for &id in graph.inputs() {
        lowering.convert_input(id)?;
    }
    for (index, tensor) in graph.tensors().iter().enumerate() {
        let handle = match &tensor.origin {
            Origin::Constant(constant) => lowering.constant(tensor, constant)?,
            Origin::Weight(weight) => {
                progress.stop_if_cancelled()?;
                let handle = lowering.weight(index, tensor, weight)?;
                *done += weight.qnn_bytes();
                progress.advance(*done);
                handle
            }
            Origin::Input | Origin::Node(_) => continue,
        };
        lowering.values.insert(index, handle);
    }
    for node in graph.nodes() {
        lowering.node(node)?;
    }
    Ok(lowering.composer)
}

/// True of encoders and towers: rows attend to each other, and to no cache.
fn encodes(graph: &Graph) -> bool {
    let given = |id: &TensorId| graph.tensor(*id).is_ok_and(|t| matches!(t.origin, Origin::Input));
    let cached = |node: &Node| match &node.op {
        Op::Attention(form) => form.past,
        Op::MatMul { .. } => node.inputs.last().is_some_and(given),
        _ => false,
    };
    let attends = |node: &Node| match node.op {
        Op::Attention(_) => true,
        Op::Softmax => graph.tensor(node.output).is_ok_and(|t| t.shape.len() > 2),
        _ => false,
    };
    graph.nodes().iter().any(attends) && !graph.nodes().iter().any(cached)
}

/// A weight that is multiplied with 16-bit integers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Integers {
    pub(super) range: Range,
    /// Offset times scale of each block, f16 `[outputs, blocks]`, where there are any.
    pub(super) offsets: Option<TensorHandle>,
}

pub(super) struct Lowering<'g, 'c> {
    pub(super) graph: &'g Graph,
    pub(super) composer: GraphComposer<'c>,
    /// See [`encodes`].
    encoder: bool,
    /// Tensors that nodes read, by their indices: f16 where the graph says f32.
    values: HashMap<usize, TensorHandle>,
    /// The declared outputs.
    outputs: HashMap<usize, TensorHandle>,
    /// Constants of one value, by rank and bits.
    scalars: HashMap<(usize, u32), TensorHandle>,
    /// Weights that are multiplied with 16-bit integers, by their indices.
    integers: HashMap<usize, Integers>,
    /// Tensors as 16-bit integers, by the bits of their largest magnitude.
    pub(super) whole: HashMap<(TensorHandle, u32), TensorHandle>,
    /// Sums of tensors over blocks of their last dimension.
    pub(super) sums: HashMap<TensorHandle, TensorHandle>,
    /// Matrices of ones that sum up blocks, by the length of a row.
    pub(super) ones: HashMap<usize, TensorHandle>,
}

impl Lowering<'_, '_> {
    fn input(&mut self, id: TensorId) -> Result<()> {
        let tensor = self.graph.tensor(id)?;
        let spec = TensorSpec::input(&tensor.name, tensor.elem.qnn(), &tensor.shape);
        let handle = self.composer.tensor(spec.quantized(tensor.elem.quantization()))?;
        self.set(id, handle);
        Ok(())
    }

    /// Converts an f32 input for the nodes that read it.
    fn convert_input(&mut self, id: TensorId) -> Result<()> {
        let tensor = self.graph.tensor(id)?;
        if tensor.elem == Elem::F32 {
            let wide = self.value(id)?;
            let name = format!("{}.f16", tensor.name);
            let spec = TensorSpec::native(&name, DType::F16, &tensor.shape);
            let handle = self.composer.tensor(spec)?;
            self.composer.node(&name, "Cast", &[], &[wide], &[handle])?;
            self.set(id, handle);
        }
        Ok(())
    }

    fn constant(&mut self, tensor: &Tensor, constant: &Constant) -> Result<TensorHandle> {
        let (name, shape) = (&tensor.name, &tensor.shape);
        let spec = |dtype, bytes| TensorSpec::constant(name, dtype, shape, bytes);
        match constant {
            Constant::Float(values) => {
                let half = f16_values(values).map_err(|e| e.context(format_args!("{tensor}")))?;
                self.composer.tensor(spec(DType::F16, bytemuck::cast_slice(&half)))
            }
            Constant::Int(values) => {
                self.composer.tensor(spec(DType::I32, bytemuck::cast_slice(values)))
            }
        }
    }

    fn weight(&mut self, index: usize, tensor: &Tensor, weight: &Weight) -> Result<TensorHandle> {
        let (name, shape) = (&tensor.name, &tensor.shape);
        match weight.storage() {
            Storage::Float => {
                let mut values = weight.to_f16()?;
                let mut shape = shape.clone();
                if let &[out, inner, rows, columns] = &shape[..] {
                    values = channels_last(&values, out, inner, rows * columns);
                    shape = vec![rows, columns, inner, out];
                }
                let bytes = bytemuck::cast_slice(&values);
                self.composer.tensor(TensorSpec::constant(name, DType::F16, &shape, bytes))
            }
            Storage::Int8 => {
                let multiple = Bits::Eight.npu_multiple();
                if !weight.cols().is_multiple_of(multiple) {
                    return Err(Error::new(
                        ErrorKind::Graph,
                        format!(
                            "weight {} has {} inputs; as int8 the NPU library computes wrong numbers \
                             unless they are a multiple of {multiple}",
                            weight.source().name(),
                            weight.cols()
                        ),
                    )
                    .hint("store this weight as f16"));
                }
                let rows = weight.to_int8()?;
                // The library dequantizes to f16.
                if rows.scales.iter().any(|scale| scale * 127.0 >= F16_OVERFLOW) {
                    return Err(beyond_f16(&**weight.source()));
                }
                let bytes = bytemuck::cast_slice(&rows.values);
                let spec = TensorSpec::constant(name, DType::SFixed8, shape, bytes);
                let quantization =
                    Quantization::PerAxis { axis: 0, scales: rows.scales, offsets: Vec::new() };
                self.composer.tensor(spec.quantized(quantization))
            }
            Storage::Blocks(form) => {
                let blocks = weight.to_blocks(form)?;
                // The library rounds scales and offsets to f16, and dequantizes to it.
                if blocks.as_ref().peak() >= F16_OVERFLOW {
                    return Err(beyond_f16(&**weight.source()));
                }
                if let Some((filter, integers)) = self.integers(tensor, weight, &blocks)? {
                    self.integers.insert(index, integers);
                    return Ok(filter);
                }
                let spec = TensorSpec::quantized_weights(name, shape, blocks.as_ref());
                let declared = self.composer.tensor(spec);
                declared.map_err(|e| e.context(weight.source().name()))
            }
        }
    }

    fn node(&mut self, node: &Node) -> Result<()> {
        let output = self.graph.tensor(node.output)?;
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for &id in &node.inputs {
            inputs.push(self.value(id)?);
        }
        let first = node.inputs.first().map(|&id| self.graph.tensor(id)).transpose()?;
        if node.op == Op::Cast
            && let (Some(from), [input]) = (first, &inputs[..])
            && from.elem != Elem::I32
            && output.elem != Elem::I32
        {
            return self.float_cast(node, output, *input);
        }
        let rank = first.map_or(0, |t| t.shape.len());
        match &node.op {
            Op::Linear => match node.inputs.get(1).and_then(|id| self.integers.get(&id.index())) {
                Some(&integers) => self.linear_of_integers(node, integers, &inputs),
                None => self.emit(node, "FullyConnected", &[], &inputs),
            },
            Op::MatMul { transpose_b } => {
                let params = [
                    ("transpose_in0", Param::Bool(false)),
                    ("transpose_in1", Param::Bool(*transpose_b)),
                ];
                let b = node.inputs.get(1).map(|&id| self.graph.tensor(id)).transpose()?;
                match (first, b.filter(|b| b.elem == Elem::Int8Cache)) {
                    (Some(a), Some(b)) => self.cache_matmul(node, &params, [a, b], &inputs),
                    _ => self.emit(node, "MatMul", &params, &inputs),
                }
            }
            Op::Binary(op) => self.emit(node, binary(*op), &[], &inputs),
            Op::Unary(UnaryOp::Exp) => self.exp(node, output, &inputs),
            Op::Unary(UnaryOp::Gelu | UnaryOp::GeluTanh) if self.encoder => {
                self.emit(node, "Gelu", &[], &inputs)
            }
            Op::Unary(UnaryOp::Silu) if self.encoder => {
                let sigmoid =
                    self.between(node, &output.shape, "sigmoid", "Sigmoid", &[], &inputs)?;
                self.emit(node, "ElementWiseMultiply", &[], &[inputs[0], sigmoid])
            }
            Op::Unary(op) => match (unary(*op), op.gelu_terms()) {
                (Some(name), _) => self.emit(node, name, &[], &inputs),
                (None, Some(terms)) => self.gelu(node, output, terms, &inputs),
                (None, None) => self.gate(node, output, *op, &inputs),
            },
            Op::Clamp { min, max } => {
                let params = [("min_value", Param::F32(*min)), ("max_value", Param::F32(*max))];
                self.emit(node, "ReluMinMax", &params, &inputs)
            }
            Op::Reduce { op, axis } => {
                let axes = [small(*axis)];
                let params = [("axes", Param::U32s(&[1], &axes)), ("keep_dims", Param::Bool(true))];
                self.emit(node, reduce(*op), &params, &inputs)
            }
            Op::Softmax => {
                let axis = small(rank.saturating_sub(1));
                let params = [("axis", Param::U32(axis)), ("beta", Param::F32(1.0))];
                self.emit(node, "Softmax", &params, &inputs)
            }
            Op::RmsNorm { epsilon } | Op::LayerNorm { epsilon } => {
                let axes = [small(rank.saturating_sub(1))];
                let params =
                    [("axes", Param::U32s(&[1], &axes)), ("epsilon", Param::F32(*epsilon))];
                let rms = matches!(node.op, Op::RmsNorm { .. });
                self.emit(node, if rms { "RmsNorm" } else { "LayerNorm" }, &params, &inputs)
            }
            Op::Conv2d(conv) => self.conv2d(node, conv, &inputs),
            Op::Gather => self.emit(node, "Gather", &[("axis", Param::I32(0))], &inputs),
            Op::Reshape => self.emit(node, "Reshape", &[], &inputs),
            Op::Transpose { perm } => {
                let perm: Vec<u32> = perm.iter().map(|&i| small(i)).collect();
                let params = [("perm", Param::U32s(&[perm.len()], &perm))];
                self.emit(node, "Transpose", &params, &inputs)
            }
            Op::Concat { axis } => {
                self.emit(node, "Concat", &[("axis", Param::U32(small(*axis)))], &inputs)
            }
            Op::Slice { axis, start, end } => {
                let shape = first.map_or(&[][..], |t| &t.shape);
                let mut ranges = Vec::with_capacity(3 * rank);
                for (i, &size) in shape.iter().enumerate() {
                    let (from, to) = if i == *axis { (*start, *end) } else { (0, size) };
                    ranges.extend([small(from).cast_signed(), small(to).cast_signed(), 1]);
                }
                let params = [("ranges", Param::I32s(&[rank, 3], &ranges))];
                self.emit(node, "StridedSlice", &params, &inputs)
            }
            Op::Cast => self.emit(node, "Cast", &[], &inputs),
            Op::Attention(_) => {
                let what = format!("{}: an attention that was not decomposed", node.name);
                Err(Error::new(ErrorKind::Internal, what))
            }
        }
    }

    /// A matmul of `a` `[heads, …]` with a cache of int8, head by head, so that what is dequantized fits the NPU's own
    /// memory. Its `MatMul` of int8 that is no constant takes some twenty times as long, by its compiler's estimate.
    fn cache_matmul(
        &mut self,
        node: &Node,
        params: &[(&str, Param<'_>)],
        tensors: [&Tensor; 2],
        inputs: &[TensorHandle],
    ) -> Result<()> {
        let heads = tensors[1].shape.first().copied().unwrap_or(1);
        let output = self.graph.tensor(node.output)?;
        let mut shape = output.shape.clone();
        shape.splice(..1, [1]);
        let mut parts = Vec::with_capacity(heads);
        for head in 0..heads {
            let mut both = Vec::with_capacity(2);
            for ((tensor, &input), name) in tensors.into_iter().zip(inputs).zip(["a", "b"]) {
                both.push(self.part(node, tensor, input, head, &format!("{name}{head}"))?);
            }
            let mut one = tensors[1].shape.clone();
            one.splice(..1, [1]);
            let wide = format!("wide{head}");
            both[1] = self.between(node, &one, &wide, "Dequantize", &[], &both[1..])?;
            if heads == 1 {
                return self.emit(node, "MatMul", params, &both);
            }
            parts.push(self.between(node, &shape, &format!("y{head}"), "MatMul", params, &both)?);
        }
        self.emit(node, "Concat", &[("axis", Param::U32(0))], &parts)
    }

    /// Slice of `tensor` at `index` of its first dimension.
    fn part(
        &mut self,
        node: &Node,
        tensor: &Tensor,
        input: TensorHandle,
        index: usize,
        suffix: &str,
    ) -> Result<TensorHandle> {
        let (name, mut shape) = (format!("{}.{suffix}", node.name), tensor.shape.clone());
        if shape.first() == Some(&1) {
            return Ok(input);
        }
        shape.splice(..1, [1]);
        let mut ranges = vec![small(index).cast_signed(), small(index + 1).cast_signed(), 1];
        for &size in &shape[1..] {
            ranges.extend([0, small(size).cast_signed(), 1]);
        }
        let spec = TensorSpec::native(&name, tensor.elem.qnn(), &shape);
        let part = self.composer.tensor(spec.quantized(tensor.elem.quantization()))?;
        let params = [("ranges", Param::I32s(&[shape.len(), 3], &ranges))];
        self.composer.node(&name, "StridedSlice", &params, &[input], &[part])?;
        Ok(part)
    }

    /// Between f16 and f32 nothing changes inside the graph.
    fn float_cast(&mut self, node: &Node, output: &Tensor, input: TensorHandle) -> Result<()> {
        self.set(node.output, input);
        if let Some(declared) = self.output(node.output) {
            let op = if output.elem == Elem::F32 { "Cast" } else { "Reshape" };
            self.composer.node(&node.name, op, &[], &[input], &[declared])?;
        }
        Ok(())
    }

    /// eˣ of x between [`MIN_EXPONENT`] and [`MAX_EXPONENT`].
    fn exp(&mut self, node: &Node, tensor: &Tensor, inputs: &[TensorHandle]) -> Result<()> {
        let range =
            [("min_value", Param::F32(MIN_EXPONENT)), ("max_value", Param::F32(MAX_EXPONENT))];
        let clamped = self.between(node, &tensor.shape, "clamped", "ReluMinMax", &range, inputs)?;
        self.emit(node, "ElementWiseExp", &[], &[clamped])
    }

    /// With `h = x / 2`: `σ(x) = ½ (tanh h + 1)` and `x · σ(x) = h (tanh h + 1)`.
    ///
    /// The library's own `Sigmoid` is coarse where it follows a matmul: off by up to 0.4 % instead of the
    /// 0.03 % of this form, and hardly faster as long as weights stream in.
    fn gate(
        &mut self,
        node: &Node,
        tensor: &Tensor,
        op: UnaryOp,
        inputs: &[TensorHandle],
    ) -> Result<()> {
        let &[x] = inputs else {
            return Err(Error::new(ErrorKind::Internal, format!("{tensor}: not one input")));
        };
        let half = self.scalar(0.5, tensor)?;
        let h =
            self.between(node, &tensor.shape, "half", "ElementWiseMultiply", &[], &[x, half])?;
        let factor = if op == UnaryOp::Silu { h } else { half };
        self.times_one_plus_tanh(node, tensor, factor, h)
    }

    /// `½x · (1 + tanh(x · (a + b·x²)))`. Where x² overflows, the tangent is ±1 as it should be.
    fn gelu(
        &mut self,
        node: &Node,
        tensor: &Tensor,
        [a, b]: [f32; 2],
        inputs: &[TensorHandle],
    ) -> Result<()> {
        let &[x] = inputs else {
            return Err(Error::new(ErrorKind::Internal, format!("{tensor}: not one input")));
        };
        let [a, b, half] =
            [self.scalar(a, tensor)?, self.scalar(b, tensor)?, self.scalar(0.5, tensor)?];
        let squares =
            self.between(node, &tensor.shape, "squares", "ElementWiseMultiply", &[], &[x, x])?;
        let cubic =
            self.between(node, &tensor.shape, "cubic", "ElementWiseMultiply", &[], &[squares, b])?;
        let terms =
            self.between(node, &tensor.shape, "terms", "ElementWiseAdd", &[], &[cubic, a])?;
        let argument =
            self.between(node, &tensor.shape, "argument", "ElementWiseMultiply", &[], &[x, terms])?;
        let h =
            self.between(node, &tensor.shape, "half", "ElementWiseMultiply", &[], &[x, half])?;
        self.times_one_plus_tanh(node, tensor, h, argument)
    }

    /// `factor · (1 + tanh(argument))`
    fn times_one_plus_tanh(
        &mut self,
        node: &Node,
        tensor: &Tensor,
        factor: TensorHandle,
        argument: TensorHandle,
    ) -> Result<()> {
        let one = self.scalar(1.0, tensor)?;
        let tanh = self.between(node, &tensor.shape, "tanh", "Tanh", &[], &[argument])?;
        let sum = self.between(node, &tensor.shape, "sum", "ElementWiseAdd", &[], &[tanh, one])?;
        self.emit(node, "ElementWiseMultiply", &[], &[sum, factor])
    }

    /// The library wants channels last. It cancels the transpositions between two convolutions, and between a
    /// convolution and others that the graph has, by itself.
    fn conv2d(&mut self, node: &Node, conv: &Conv2d, inputs: &[TensorHandle]) -> Result<()> {
        let shape = |id: Option<&TensorId>| {
            let tensor = id.map(|&id| self.graph.tensor(id)).transpose()?;
            match tensor.map(|t| &t.shape[..]) {
                Some(&[a, b, c, d]) => Ok([a, b, c, d]),
                _ => Err(Error::new(
                    ErrorKind::Internal,
                    format!("{}: a convolution without four dimensions", node.name),
                )),
            }
        };
        let [n, channels, rows, columns] = shape(node.inputs.first())?;
        let [_, inner, ..] = shape(node.inputs.get(1))?;
        let [_, out, out_rows, out_columns] = shape(Some(&node.output))?;
        let perm = |perm: &'static [u32; 4]| [("perm", Param::U32s(&[4], perm))];
        let Some((&x, filter)) = inputs.split_first() else { return Ok(()) };
        let last = [n, rows, columns, channels];
        let x = self.between(node, &last, "x", "Transpose", &perm(&[0, 2, 3, 1]), &[x])?;
        let pair = |[a, b]: [usize; 2]| [small(a), small(b)];
        let (stride, dilation) = (pair(conv.stride), pair(conv.dilation));
        let [[top, bottom], [left, right]] = conv.padding.map(pair);
        let padding = [top, bottom, left, right];
        let group = ("group", Param::U32(small(conv.groups)));
        let params = [
            ("stride", Param::U32s(&[2], &stride)),
            ("pad_amount", Param::U32s(&[2, 2], &padding)),
            ("dilation", Param::U32s(&[2], &dilation)),
            group,
        ];
        // With several outputs a channel and a dilation, `DepthWiseConv2d` computes wrong numbers.
        let depthwise = conv.groups > 1 && inner == 1 && out == channels;
        let (op, params) =
            if depthwise { ("DepthWiseConv2d", &params[..3]) } else { ("Conv2d", &params[..]) };
        let last = [n, out_rows, out_columns, out];
        let filtered: Vec<_> = std::iter::once(x).chain(filter.iter().copied()).collect();
        let y = self.between(node, &last, "y", op, params, &filtered)?;
        self.emit(node, "Transpose", &perm(&[0, 3, 1, 2]), &[y])
    }

    /// A step on the way to the output of `node`.
    pub(super) fn between(
        &mut self,
        node: &Node,
        shape: &[usize],
        suffix: &str,
        op: &str,
        params: &[(&str, Param<'_>)],
        inputs: &[TensorHandle],
    ) -> Result<TensorHandle> {
        let name = format!("{}.{suffix}", node.name);
        let output = self.composer.tensor(TensorSpec::native(&name, DType::F16, shape))?;
        self.composer.node(&name, op, params, inputs, &[output])?;
        Ok(output)
    }

    /// A constant with as many dimensions as `like`.
    fn scalar(&mut self, value: f32, like: &Tensor) -> Result<TensorHandle> {
        let rank = like.shape.len();
        if let Some(&scalar) = self.scalars.get(&(rank, value.to_bits())) {
            return Ok(scalar);
        }
        let (name, shape) = (format!("scalar.{value}.{rank}"), vec![1; rank]);
        let half = [f16::from_f32(value)];
        let spec = TensorSpec::constant(&name, DType::F16, &shape, bytemuck::cast_slice(&half));
        let scalar = self.composer.tensor(spec)?;
        self.scalars.insert((rank, value.to_bits()), scalar);
        Ok(scalar)
    }

    /// Adds the op that writes the output of `node`.
    pub(super) fn emit(
        &mut self,
        node: &Node,
        op: &str,
        params: &[(&str, Param<'_>)],
        inputs: &[TensorHandle],
    ) -> Result<()> {
        let (name, id) = (&node.name, node.output);
        let tensor = self.graph.tensor(id)?;
        let declared = self.output(id);
        let target = match declared {
            Some(output) if tensor.elem != Elem::F32 => output,
            _ => {
                let (dtype, quantization) = match tensor.elem {
                    Elem::Activation | Elem::F32 => (DType::F16, Quantization::None),
                    elem => (elem.qnn(), elem.quantization()),
                };
                let inner = format!("{name}.f16");
                let own = if declared.is_some() { &inner } else { name };
                let spec = TensorSpec::native(own, dtype, &tensor.shape);
                self.composer.tensor(spec.quantized(quantization))?
            }
        };
        self.composer.node(name, op, params, inputs, &[target])?;
        self.set(id, target);
        if let Some(output) = declared
            && output != target
        {
            self.composer.node(&format!("{name}.f32"), "Cast", &[], &[target], &[output])?;
        }
        Ok(())
    }

    fn value(&self, id: TensorId) -> Result<TensorHandle> {
        self.values.get(&id.index()).copied().ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                format!(
                    "graph {:?}: tensor {} is read before it is written",
                    self.graph.name(),
                    id.index()
                ),
            )
        })
    }

    fn output(&self, id: TensorId) -> Option<TensorHandle> {
        self.outputs.get(&id.index()).copied()
    }

    fn set(&mut self, id: TensorId, handle: TensorHandle) {
        self.values.insert(id.index(), handle);
    }
}

/// A filter `[out, inner, taps]` as `[taps, inner, out]`.
fn channels_last(filter: &[f16], out: usize, inner: usize, taps: usize) -> Vec<f16> {
    let mut turned = Vec::with_capacity(filter.len());
    for (tap, channel) in (0..taps).flat_map(|tap| (0..inner).map(move |channel| (tap, channel))) {
        let first = channel * taps + tap;
        turned.extend(filter.iter().skip(first).step_by(inner * taps).take(out));
    }
    turned
}

pub(super) fn f16_values(values: &[f32]) -> Result<Vec<f16>> {
    let mut half = vec![f16::ZERO; values.len()];
    to_f16(values, &mut half)?;
    Ok(half)
}

/// An axis, or an index along one. What does not fit was refused when the tensor was declared.
fn small(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

const fn binary(op: BinaryOp) -> &'static str {
    match op {
        BinaryOp::Add => "ElementWiseAdd",
        BinaryOp::Sub => "ElementWiseSubtract",
        BinaryOp::Mul => "ElementWiseMultiply",
        BinaryOp::Div => "ElementWiseDivide",
        BinaryOp::Max => "ElementWiseMaximum",
        BinaryOp::Min => "ElementWiseMinimum",
    }
}

/// The library's op; none for those that [`Lowering::exp`], [`Lowering::gate`] and [`Lowering::gelu`] put
/// together.
const fn unary(op: UnaryOp) -> Option<&'static str> {
    match op {
        UnaryOp::Abs => Some("ElementWiseAbs"),
        UnaryOp::Neg => Some("ElementWiseNeg"),
        UnaryOp::Log => Some("ElementWiseLog"),
        UnaryOp::Rsqrt => Some("ElementWiseRsqrt"),
        UnaryOp::Sin => Some("ElementWiseSin"),
        UnaryOp::Tanh => Some("Tanh"),
        UnaryOp::Relu => Some("Relu"),
        UnaryOp::Exp | UnaryOp::Sigmoid | UnaryOp::Silu | UnaryOp::Gelu | UnaryOp::GeluTanh => None,
    }
}

const fn reduce(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Sum => "ReduceSum",
        ReduceOp::Mean => "ReduceMean",
        ReduceOp::Max => "ReduceMax",
    }
}
