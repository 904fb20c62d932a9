//! Graph nodes to ONNX nodes (opset 18), and weights to the external-data file.

mod nbits;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::onnx::format::{
    ExternalData, Operator, ROW_AXIS, STORED_FLOATS, attribute, suffix, swapped,
};
use half::f16;
use half::slice::HalfFloatSliceExt;
use qhx_base::hash::hex;
use qhx_base::{Error, ErrorKind, Result};
use qhx_types::DType;
use rten_onnx::onnx::{
    AttributeProto, AttributeType, DataLocation, DataType, Dimension, GraphProto, NodeProto,
    StringStringEntryProto, TensorProto, TensorShapeProto, TypeProto, TypeProtoTensor,
    ValueInfoProto,
};
use sha2::{Digest as _, Sha256};

use super::data::DataFile;
use super::ir;
use super::model::Model;
use crate::graph::{
    BinaryOp, Constant, Elem, Graph, INT8_STEP, Node, Op, Origin, ReduceOp, Tensor, TensorId,
    UnaryOp,
};
use crate::progress::Progress;
use crate::weight::{Storage, Weight, fits_f16, stream};

/// The files of a lowered graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The ONNX file.
    pub model: PathBuf,
    /// The external-data file beside it; none when the graph has no weights.
    pub data: Option<PathBuf>,
}

/// Writes `graph` to `<dir>/<graph>.onnx`, its weights to `<dir>/<graph>.onnx_data`. See [`write_all`].
///
/// # Errors
/// Errors of [`write_all`].
pub fn write(graph: &Graph, dir: &Path, progress: &mut dyn Progress) -> Result<Written> {
    let data = write_all(&[graph], dir, progress)?;
    Ok(Written { model: model_path(graph, dir), data })
}

fn model_path(graph: &Graph, dir: &Path) -> PathBuf {
    dir.join(format!("{}.onnx", graph.name()))
}

/// Writes each graph to `<dir>/<graph>.onnx`, and the weights of all to `<dir>/<first graph>.onnx_data`, those in
/// common once. Returns the latter; without weights there is no such file.
///
/// A weight is stored as f16 where that changes nothing that matters ([`fits_f16`]), else as f32; a
/// `Cast` makes it f32, in which the graph computes. [`Storage::Int8`] becomes int8 with `DequantizeLinear` per
/// output channel, [`Storage::Blocks`] the values of `MatMulNBits` where that operator takes them.
///
/// # Errors
/// When a file cannot be written or a weight not be read, and `Cancelled` when `progress` stops it.
pub fn write_all(
    graphs: &[&Graph],
    dir: &Path,
    progress: &mut dyn Progress,
) -> Result<Option<PathBuf>> {
    let Some(first) = graphs.first() else { return Ok(None) };
    write_beside(graphs, dir, first.name(), &mut Known::default(), progress)
}

/// Same as [`write_all`], with the weights in `<dir>/<data>.onnx_data`, except for weights that `known` has in other
/// files of the folder. The weights that are written are added to `known`.
///
/// # Errors
/// Errors of [`write_all`].
pub fn write_beside(
    graphs: &[&Graph],
    dir: &Path,
    data: &str,
    known: &mut Known,
    progress: &mut dyn Progress,
) -> Result<Option<PathBuf>> {
    let mut data = DataFile::new(dir.join(format!("{data}.onnx_data")));
    for graph in graphs {
        write_model(graph, &model_path(graph, dir), &mut data, known, progress)?;
    }
    data.finish()
}

/// Weights in the files written so far: the same matrix, stored in the same way under the same name, is neither read
/// nor written again.
#[derive(Debug, Clone, Default)]
pub struct Known(HashMap<String, Lowered>);

/// Parts that a weight adds to a model.
#[derive(Debug, Clone)]
struct Lowered {
    initializers: Vec<TensorProto>,
    nodes: Vec<NodeProto>,
    /// The int64 constants that the nodes read, which have other names in another graph.
    shapes: HashMap<String, Vec<i64>>,
}

/// Identity of a weight among all others of a checkpoint. Two views of one tensor may have its name, so that values of
/// the first, the middle and the last row are a part of it.
fn identity(tensor: &Tensor, weight: &Weight) -> Result<String> {
    let (source, storage) = (weight.source(), weight.storage());
    let [rows, cols] = source.shape();
    let mut identity = format!(
        "{} {} {} {rows} {cols} {storage:?}",
        tensor.name,
        source.name(),
        source.first_row()
    );
    let mut row = vec![0f32; cols];
    for place in [0, rows / 2, rows.saturating_sub(1)] {
        source.read_f32(place, &mut row)?;
        let _ = write!(identity, " {}", hex(Sha256::digest(bytemuck::cast_slice(&row))));
    }
    Ok(identity)
}

fn write_model(
    graph: &Graph,
    path: &Path,
    data: &mut DataFile,
    known: &mut Known,
    progress: &mut dyn Progress,
) -> Result<()> {
    progress.stage(&format!("onnx {}", graph.name()), graph.weight_bytes());
    let decomposed = graph.decomposed()?;
    let mut lowering = Lowering {
        graph: &decomposed,
        out: GraphProto::default(),
        data,
        known,
        shapes: HashMap::new(),
        scalars: HashMap::new(),
        done: 0,
        progress,
    };
    lowering.run()?;
    let json = ir::json(graph)?;
    let model = Model { name: graph.name(), graph: &lowering.out, metadata: [ir::KEY, &json] };
    let bytes = model.bytes().map_err(|e| {
        Error::new(
            ErrorKind::Internal,
            format!("{}: writing the ONNX messages: {e}", path.display()),
        )
    })?;
    std::fs::write(path, bytes).map_err(|e| Error::io(ErrorKind::Io, path, e))
}

struct Lowering<'a> {
    graph: &'a Graph,
    out: GraphProto,
    data: &'a mut DataFile,
    known: &'a mut Known,
    /// Names of int64 constants by their values.
    shapes: HashMap<Vec<i64>, String>,
    /// Names of constants without dimensions by the bits of their values.
    scalars: HashMap<u32, String>,
    done: u64,
    progress: &'a mut dyn Progress,
}

impl Lowering<'_> {
    fn run(&mut self) -> Result<()> {
        let graph = self.graph;
        for tensor in graph.tensors() {
            match &tensor.origin {
                Origin::Constant(constant) => self.constant(tensor, constant),
                Origin::Weight(weight) => self.weight(tensor, weight)?,
                Origin::Input | Origin::Node(_) => {}
            }
        }
        for node in graph.nodes() {
            self.node(node)?;
        }
        for (ids, list) in
            [(graph.inputs(), &mut self.out.input), (graph.outputs(), &mut self.out.output)]
        {
            for &id in ids {
                list.push(value_info(graph.tensor(id)?));
            }
        }
        Ok(())
    }

    fn constant(&mut self, tensor: &Tensor, constant: &Constant) {
        let (data_type, raw) = match constant {
            Constant::Float(values) => (DataType::FLOAT, bytemuck::cast_slice(values)),
            Constant::Int(values) => (DataType::INT32, bytemuck::cast_slice(values)),
        };
        self.initializer(&tensor.name, data_type, &tensor.shape, raw);
    }

    fn weight(&mut self, tensor: &Tensor, weight: &Weight) -> Result<()> {
        self.progress.stop_if_cancelled()?;
        let identity = identity(tensor, weight)?;
        if let Some(lowered) = self.known.0.get(&identity) {
            let Lowered { initializers, mut nodes, shapes } = lowered.clone();
            self.out.initializer.extend(initializers);
            for input in nodes.iter_mut().flat_map(|node| &mut node.input) {
                if let Some(values) = shapes.get(input) {
                    *input = self.int64s(values.clone());
                }
            }
            self.out.node.extend(nodes);
        } else {
            let [initializers, nodes] = [self.out.initializer.len(), self.out.node.len()];
            self.store(tensor, weight)?;
            let nodes = self.out.node[nodes..].to_vec();
            let shapes = self
                .shapes
                .iter()
                .filter(|(_, name)| nodes.iter().any(|node| node.input.contains(name)));
            let shapes: HashMap<_, _> =
                shapes.map(|(values, name)| (name.clone(), values.clone())).collect();
            let mut initializers = self.out.initializer[initializers..].to_vec();
            initializers.retain(|one| !one.name.as_ref().is_some_and(|n| shapes.contains_key(n)));
            self.known.0.insert(identity, Lowered { initializers, nodes, shapes });
        }
        self.done += weight.qnn_bytes();
        self.progress.advance(self.done);
        Ok(())
    }

    /// Adds the initialisers and nodes of a weight.
    fn store(&mut self, tensor: &Tensor, weight: &Weight) -> Result<()> {
        match weight.storage() {
            Storage::Int8 => {
                let rows = weight.to_int8()?;
                let name = &tensor.name;
                let int8 = format!("{name}{}", suffix::INT8);
                let scale = format!("{name}{}", suffix::SCALE);
                self.external(&int8, DataType::INT8, &tensor.shape, |file| {
                    file.write(bytemuck::cast_slice(&rows.values))
                })?;
                let scales = bytemuck::cast_slice(&rows.scales);
                self.initializer(&scale, DataType::FLOAT, &[rows.scales.len()], scales);
                let axis = vec![int(attribute::AXIS, ROW_AXIS)];
                self.push(Operator::DequantizeLinear, vec![int8, scale], name, axis);
            }
            Storage::Blocks(form) => self.blocks(&tensor.name, weight, form)?,
            Storage::Float if fits_f16(&**weight.source())? => {
                let stored = format!("{}{}", tensor.name, suffix::FLOAT16);
                self.external(&stored, DataType::FLOAT16, &tensor.shape, |file| {
                    let mut half = Vec::new();
                    stream(&**weight.source(), |wide| {
                        half.resize(wide.len(), f16::ZERO);
                        half.convert_from_f32_slice(wide);
                        file.write(bytemuck::cast_slice(&half))
                    })
                })?;
                self.push(STORED_FLOATS, vec![stored], &tensor.name, vec![to(DataType::FLOAT)]);
            }
            Storage::Float => {
                self.external(&tensor.name, DataType::FLOAT, &tensor.shape, |file| {
                    stream(&**weight.source(), |wide| file.write(bytemuck::cast_slice(wide)))
                })?;
            }
        }
        Ok(())
    }

    /// Adds an initialiser whose bytes are part of the model.
    fn initializer(&mut self, name: &str, data_type: DataType, shape: &[usize], raw: &[u8]) {
        self.out.initializer.push(TensorProto {
            dims: dims(shape),
            data_type: Some(data_type),
            name: Some(name.to_owned()),
            raw_data: Some(raw.to_vec().into()),
            ..TensorProto::default()
        });
    }

    /// Adds what `fill` writes to the external-data file.
    fn append(&mut self, fill: impl FnOnce(&mut DataFile) -> Result<()>) -> Result<ExternalData> {
        let [offset, length] = self.data.append(fill)?;
        let location = self.data.path().file_name().unwrap_or_default().to_string_lossy().into();
        Ok(ExternalData { location, offset, length: Some(length) })
    }

    /// Adds an initialiser whose bytes `fill` appends to the external-data file.
    fn external(
        &mut self,
        name: &str,
        data_type: DataType,
        shape: &[usize],
        fill: impl FnOnce(&mut DataFile) -> Result<()>,
    ) -> Result<()> {
        let external = self.append(fill)?;
        let entry = |(key, value): (&str, String)| StringStringEntryProto {
            key: Some(key.to_owned()),
            value: Some(value),
        };
        self.out.initializer.push(TensorProto {
            dims: dims(shape),
            data_type: Some(data_type),
            name: Some(name.to_owned()),
            external_data: external.entries().map(entry).collect(),
            data_location: Some(DataLocation::EXTERNAL),
            ..TensorProto::default()
        });
        Ok(())
    }

    fn node(&mut self, node: &Node) -> Result<()> {
        let output = self.graph.tensor(node.output)?;
        let mut inputs = Vec::with_capacity(node.inputs.len() + 3);
        for &id in &node.inputs {
            inputs.push(self.name(id)?);
        }
        let name = &output.name;
        // What values between the nodes of one op are named after.
        let inner = &node.name;
        match &node.op {
            Op::Linear => {
                if !self.blocks_matmul(node, name)? {
                    self.push(Operator::Gemm, inputs, name, vec![int(attribute::TRANS_B, 1)]);
                }
            }
            Op::MatMul { transpose_b } => {
                if let Some(&b) = node.inputs.get(1)
                    && self.graph.tensor(b)?.elem.is_int8()
                    && let Some(input) = inputs.get_mut(1)
                {
                    *input = self.dequantized(input, inner);
                }
                if *transpose_b {
                    let perm = ints(attribute::PERM, swapped(output.shape.len()));
                    let transposed = format!("{inner}.bt");
                    let b = vec![inputs.swap_remove(1)];
                    self.push(Operator::Transpose, b, &transposed, vec![perm]);
                    inputs.push(transposed);
                }
                self.push(Operator::MatMul, inputs, name, vec![]);
            }
            Op::Binary(op) => self.push(binary(*op), inputs, name, vec![]),
            Op::Unary(UnaryOp::Rsqrt) => {
                let root = format!("{inner}.sqrt");
                self.push(Operator::Sqrt, inputs, &root, vec![]);
                self.push(Operator::Reciprocal, vec![root], name, vec![]);
            }
            Op::Unary(UnaryOp::Silu) => {
                let gate = format!("{inner}.sigmoid");
                self.push(Operator::Sigmoid, inputs.clone(), &gate, vec![]);
                inputs.push(gate);
                self.push(Operator::Mul, inputs, name, vec![]);
            }
            Op::Unary(op @ (UnaryOp::Gelu | UnaryOp::GeluTanh)) => {
                self.gelu(&inputs, node, name, *op);
            }
            Op::Unary(op) => self.push(unary(*op), inputs, name, vec![]),
            Op::Clamp { min, max } => {
                inputs.push(self.scalar(*min));
                inputs.push(self.scalar(*max));
                self.push(Operator::Clip, inputs, name, vec![]);
            }
            Op::Reduce { op, axis } => {
                inputs.push(self.int64s(vec![*axis as i64]));
                self.push(reduce(*op), inputs, name, vec![int(attribute::KEEP_DIMS, 1)]);
            }
            Op::Softmax => {
                self.push(Operator::Softmax, inputs, name, vec![int(attribute::AXIS, -1)])
            }
            Op::RmsNorm { epsilon } => self.rms_norm(&inputs, node, output, *epsilon),
            Op::LayerNorm { epsilon } => {
                let attributes =
                    vec![int(attribute::AXIS, -1), float(attribute::EPSILON, *epsilon)];
                self.push(Operator::LayerNormalization, inputs, name, attributes);
            }
            Op::Conv2d(conv) => {
                let [[top, bottom], [left, right]] = conv.padding;
                let attributes = vec![
                    ints(attribute::KERNEL_SHAPE, dims(&conv.kernel)),
                    ints(attribute::STRIDES, dims(&conv.stride)),
                    ints(attribute::PADS, dims(&[top, left, bottom, right])),
                    ints(attribute::DILATIONS, dims(&conv.dilation)),
                    int(attribute::GROUP, conv.groups as i64),
                ];
                self.push(Operator::Conv, inputs, name, attributes);
            }
            Op::Gather => self.push(Operator::Gather, inputs, name, vec![int(attribute::AXIS, 0)]),
            Op::Reshape => {
                inputs.push(self.int64s(dims(&output.shape)));
                self.push(Operator::Reshape, inputs, name, vec![]);
            }
            Op::Transpose { perm } => {
                let perm = ints(attribute::PERM, dims(perm));
                self.push(Operator::Transpose, inputs, name, vec![perm]);
            }
            Op::Concat { axis } => {
                self.push(Operator::Concat, inputs, name, vec![int(attribute::AXIS, *axis as i64)])
            }
            Op::Slice { axis, start, end } => {
                for value in [start, end, axis] {
                    inputs.push(self.int64s(vec![*value as i64]));
                }
                self.push(Operator::Slice, inputs, name, vec![]);
            }
            Op::Attention(_) => {
                let what = format!("{}: an attention that was not decomposed", node.name);
                return Err(Error::new(ErrorKind::Internal, what));
            }
            Op::Cast => {
                let from = node.inputs.first().map(|&id| self.graph.tensor(id)).transpose()?;
                if from.is_some_and(|from| from.elem.onnx() == output.elem.onnx()) {
                    self.push(Operator::Identity, inputs, name, vec![]);
                } else {
                    self.push(Operator::Cast, inputs, name, vec![to(data_type(output.elem))]);
                }
            }
        }
        if let Some(last) = self.out.node.last_mut() {
            last.name = Some(format!("{}_node", node.name));
        }
        Ok(())
    }

    /// The operator of that name came with opset 23, which loaders do not all know.
    fn rms_norm(&mut self, inputs: &[String], node: &Node, output: &Tensor, epsilon: f32) {
        let [x, weight] = inputs else { return };
        let inner = |suffix: &str| format!("{}.{suffix}", node.name);
        let axis = output.shape.len() as i64 - 1;
        let axes = self.int64s(vec![axis]);
        let small = self.scalar(epsilon);
        let (squares, mean, sum) = (inner("squares"), inner("mean"), inner("sum"));
        let (root, inverse, unit) = (inner("root"), inner("inverse"), inner("unit"));
        self.push(Operator::Mul, vec![x.clone(), x.clone()], &squares, vec![]);
        self.push(
            Operator::ReduceMean,
            vec![squares, axes],
            &mean,
            vec![int(attribute::KEEP_DIMS, 1)],
        );
        self.push(Operator::Add, vec![mean, small], &sum, vec![]);
        self.push(Operator::Sqrt, vec![sum], &root, vec![]);
        self.push(Operator::Reciprocal, vec![root], &inverse, vec![]);
        self.push(Operator::Mul, vec![x.clone(), inverse], &unit, vec![]);
        self.push(Operator::Mul, vec![unit, weight.clone()], &output.name, vec![]);
    }

    /// Both forms of the GELU. The operator of that name came with opset 20, which loaders do not all know.
    fn gelu(&mut self, inputs: &[String], node: &Node, name: &str, op: UnaryOp) {
        let [x] = inputs else { return };
        let inner = |suffix: &str| format!("{}.{suffix}", node.name);
        let (argument, curve, sum, half) =
            (inner("argument"), inner("curve"), inner("sum"), inner("half"));
        match op.gelu_terms() {
            Some([linear, cubic]) if op == UnaryOp::GeluTanh => {
                let (squares, inner_cubic, factor) =
                    (inner("squares"), inner("cubic"), inner("factor"));
                let (linear, cubic) = (self.scalar(linear), self.scalar(cubic));
                self.push(Operator::Mul, vec![x.clone(), x.clone()], &squares, vec![]);
                self.push(Operator::Mul, vec![squares, cubic], &inner_cubic, vec![]);
                self.push(Operator::Add, vec![inner_cubic, linear], &factor, vec![]);
                self.push(Operator::Mul, vec![x.clone(), factor], &argument, vec![]);
            }
            _ => {
                let root = self.scalar(std::f32::consts::FRAC_1_SQRT_2);
                self.push(Operator::Mul, vec![x.clone(), root], &argument, vec![]);
            }
        }
        let (one, one_half) = (self.scalar(1.0), self.scalar(0.5));
        self.push(unary(op), vec![argument], &curve, vec![]);
        self.push(Operator::Add, vec![curve, one], &sum, vec![]);
        self.push(Operator::Mul, vec![x.clone(), one_half], &half, vec![]);
        self.push(Operator::Mul, vec![half, sum], name, vec![]);
    }

    /// An int8 input as f32, for the node `name`.
    fn dequantized(&mut self, input: &str, name: &str) -> String {
        let (scale, wide) = (self.scalar(INT8_STEP), format!("{name}.b"));
        self.push(Operator::DequantizeLinear, vec![input.to_owned(), scale], &wide, vec![]);
        wide
    }

    fn name(&self, id: TensorId) -> Result<String> {
        Ok(self.graph.tensor(id)?.name.clone())
    }

    /// The name of a constant without dimensions, made once per value.
    fn scalar(&mut self, value: f32) -> String {
        if let Some(name) = self.scalars.get(&value.to_bits()) {
            return name.clone();
        }
        let name = format!("scalar.{}", self.scalars.len());
        self.initializer(&name, DataType::FLOAT, &[], &value.to_le_bytes());
        self.scalars.insert(value.to_bits(), name.clone());
        name
    }

    /// The name of an int64 constant, made once per value. It has a `.`, which no tensor of a graph has.
    fn int64s(&mut self, values: Vec<i64>) -> String {
        if let Some(name) = self.shapes.get(&values) {
            return name.clone();
        }
        let name = format!("int64.{}", self.shapes.len());
        let raw = bytemuck::cast_slice(&values);
        self.initializer(&name, DataType::INT64, &[values.len()], raw);
        self.shapes.insert(values, name.clone());
        name
    }

    fn push(
        &mut self,
        operator: Operator,
        input: Vec<String>,
        output: &str,
        attribute: Vec<AttributeProto>,
    ) {
        let domain = operator.domain();
        self.out.node.push(NodeProto {
            input,
            output: vec![output.to_owned()],
            name: Some(format!("{output}_node")),
            op_type: Some(operator.name().to_owned()),
            attribute,
            domain: (!domain.is_empty()).then(|| domain.to_owned()),
        });
    }
}

const fn binary(op: BinaryOp) -> Operator {
    match op {
        BinaryOp::Add => Operator::Add,
        BinaryOp::Sub => Operator::Sub,
        BinaryOp::Mul => Operator::Mul,
        BinaryOp::Div => Operator::Div,
        BinaryOp::Max => Operator::Max,
        BinaryOp::Min => Operator::Min,
    }
}

const fn unary(op: UnaryOp) -> Operator {
    match op {
        UnaryOp::Abs => Operator::Abs,
        UnaryOp::Neg => Operator::Neg,
        UnaryOp::Exp => Operator::Exp,
        UnaryOp::Log => Operator::Log,
        UnaryOp::Rsqrt => Operator::Reciprocal,
        UnaryOp::Sigmoid | UnaryOp::Silu => Operator::Sigmoid,
        UnaryOp::Sin => Operator::Sin,
        UnaryOp::Tanh | UnaryOp::GeluTanh => Operator::Tanh,
        UnaryOp::Relu => Operator::Relu,
        UnaryOp::Gelu => Operator::Erf,
    }
}

const fn reduce(op: ReduceOp) -> Operator {
    match op {
        ReduceOp::Sum => Operator::ReduceSum,
        ReduceOp::Mean => Operator::ReduceMean,
        ReduceOp::Max => Operator::ReduceMax,
    }
}

fn data_type(elem: Elem) -> DataType {
    match elem.onnx() {
        DType::I32 => DataType::INT32,
        DType::I8 => DataType::INT8,
        _ => DataType::FLOAT,
    }
}

fn value_info(tensor: &Tensor) -> ValueInfoProto {
    let dim = |&d: &usize| Dimension { dim_value: Some(d as i64), dim_param: None };
    ValueInfoProto {
        name: Some(tensor.name.clone()),
        r#type: Some(TypeProto {
            tensor_type: Some(TypeProtoTensor {
                elem_type: Some(data_type(tensor.elem)),
                shape: Some(TensorShapeProto { dim: tensor.shape.iter().map(dim).collect() }),
            }),
            ..TypeProto::default()
        }),
    }
}

fn dims(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|&d| d as i64).collect()
}

fn float(name: &str, value: f32) -> AttributeProto {
    AttributeProto { f: Some(value), ..named(name, AttributeType::FLOAT) }
}

fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto { i: Some(value), ..named(name, AttributeType::INT) }
}

fn ints(name: &str, values: Vec<i64>) -> AttributeProto {
    AttributeProto { ints: values, ..named(name, AttributeType::INTS) }
}

fn named(name: &str, r#type: AttributeType) -> AttributeProto {
    let (name, r#type) = (Some(name.to_owned()), Some(r#type));
    AttributeProto { name, r#type, ..AttributeProto::default() }
}

/// The type to which a `Cast` converts.
fn to(data_type: DataType) -> AttributeProto {
    int(attribute::TO, i64::from(data_type.0))
}

#[cfg(test)]
mod tests {
    use qhx_types::quantized::{Bits, QuantizedForm};

    use super::*;
    use crate::builder::GraphBuilder;
    use crate::progress::Silent;
    use crate::weight::held;

    #[test]
    fn a_weight_of_two_files_is_written_once_whatever_its_form() {
        let blocks = |bits, block| Storage::Blocks(QuantizedForm::symmetric(bits, block));
        let eight = Bits::Eight;
        for storage in [Storage::Float, Storage::Int8, blocks(Bits::Four, 32), blocks(eight, 16)] {
            let graph = |name: &str, rows: usize| {
                let mut b = GraphBuilder::new(name);
                let x = b.input("x", Elem::Activation, &[rows, 64]).unwrap();
                // Its shape comes before that of the weight.
                let x = b.reshape(x, &[rows, 64]).unwrap();
                let steps = (0u8..=255).map(f32::from).collect();
                let weight = Weight::new(held("steps", [4, 64], steps), storage);
                let y = b.linear("matmul", x, weight, None).unwrap();
                b.output("y", y).unwrap();
                b.finish().unwrap()
            };
            let folder = tempfile::tempdir().unwrap();
            let mut known = Known::default();
            let mut write = |name: &str, rows| {
                let graphs = [&graph(name, rows)];
                write_beside(&graphs, folder.path(), name, &mut known, &mut Silent).unwrap()
            };
            assert!(write("first", 1).is_some());
            assert_eq!(write("second", 3), None, "{storage}");
            crate::onnx::read(&folder.path().join("second.onnx"), folder.path()).unwrap();
        }
    }
}
