//! Graph nodes to ONNX nodes (opset 18), and weights to the external-data file.

mod nbits;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use half::f16;
use half::slice::HalfFloatSliceExt;
use prost::Message;
use qhx_core::{DType, Error, ErrorKind, Result};

use super::data::DataFile;
use super::proto::{
    ATTRIBUTE_FLOAT, ATTRIBUTE_INT, ATTRIBUTE_INTS, AttributeProto, DimensionProto, EXTERNAL,
    FLOAT, FLOAT16, GraphProto, INT8, INT32, INT64, ModelProto, NodeProto, OperatorSetIdProto,
    StringStringEntryProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use crate::graph::{
    BinaryOp, Constant, Elem, Graph, INT8_STEP, Node, Op, Origin, ReduceOp, Tensor, TensorId,
    UnaryOp,
};
use crate::progress::Progress;
use crate::weight::{Storage, Weight, fits_f16, stream};

/// Reductions over `axes` as an input of every reduction begin with this version.
const OPSET: i64 = 18;
/// The IR version that goes with opset 18.
const IR_VERSION: i64 = 8;

/// The files of a lowered graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The ONNX file.
    pub model: PathBuf,
    /// The external-data file beside it; none when the graph has no weights.
    pub data: Option<PathBuf>,
}

/// Writes `graph` to `<dir>/<graph>.onnx`, its weights to `<dir>/<graph>.onnx_data`. As [`write_all`].
///
/// # Errors
/// As [`write_all`].
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
    let mut data = DataFile::new(dir.join(format!("{}.onnx_data", first.name())));
    for graph in graphs {
        write_model(graph, &model_path(graph, dir), &mut data, progress)?;
    }
    data.finish()
}

fn write_model(
    graph: &Graph,
    path: &Path,
    data: &mut DataFile,
    progress: &mut dyn Progress,
) -> Result<()> {
    progress.stage(&format!("onnx {}", graph.name()), graph.weight_bytes());
    let mut lowering = Lowering {
        graph,
        out: GraphProto { name: graph.name().to_owned(), ..GraphProto::default() },
        data,
        shapes: HashMap::new(),
        scalars: HashMap::new(),
        packs: false,
        done: 0,
        progress,
    };
    lowering.run()?;
    let opset =
        |domain: &str, version| OperatorSetIdProto { domain: Some(domain.to_owned()), version };
    let contrib = lowering.packs.then(|| opset(nbits::DOMAIN, 1));
    let model = ModelProto {
        ir_version: IR_VERSION,
        producer_name: "qhx".to_owned(),
        graph: Some(lowering.out),
        opset_import: [opset("", OPSET)].into_iter().chain(contrib).collect(),
    };
    std::fs::write(path, model.encode_to_vec()).map_err(|e| Error::io(ErrorKind::Io, path, e))
}

struct Lowering<'a> {
    graph: &'a Graph,
    out: GraphProto,
    data: &'a mut DataFile,
    /// Names of int64 constants by their values.
    shapes: HashMap<Vec<i64>, String>,
    /// Names of constants without dimensions by the bits of their values.
    scalars: HashMap<u32, String>,
    /// A weight is one of `MatMulNBits`.
    packs: bool,
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
            Constant::Float(values) => (FLOAT, bytemuck::cast_slice(values).to_vec()),
            Constant::Int(values) => (INT32, bytemuck::cast_slice(values).to_vec()),
        };
        self.out.initializer.push(TensorProto {
            dims: dims(&tensor.shape),
            data_type,
            name: tensor.name.clone(),
            raw_data: Some(raw),
            ..TensorProto::default()
        });
    }

    fn weight(&mut self, tensor: &Tensor, weight: &Weight) -> Result<()> {
        if self.progress.cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
        }
        match weight.storage() {
            Storage::Int8 => {
                let rows = weight.to_int8()?;
                let name = &tensor.name;
                self.external(&format!("{name}.int8"), INT8, &tensor.shape, |file| {
                    file.write(bytemuck::cast_slice(&rows.values))
                })?;
                self.out.initializer.push(TensorProto {
                    dims: dims(&[rows.scales.len()]),
                    data_type: FLOAT,
                    name: format!("{name}.scale"),
                    raw_data: Some(bytemuck::cast_slice(&rows.scales).to_vec()),
                    ..TensorProto::default()
                });
                let inputs = vec![format!("{name}.int8"), format!("{name}.scale")];
                self.push("DequantizeLinear", inputs, name, vec![int("axis", 0)]);
            }
            Storage::Blocks(form) => self.blocks(&tensor.name, weight, form)?,
            Storage::Float if fits_f16(&**weight.source())? => {
                let stored = format!("{}.f16", tensor.name);
                self.external(&stored, FLOAT16, &tensor.shape, |file| {
                    let mut half = Vec::new();
                    stream(&**weight.source(), |wide| {
                        half.resize(wide.len(), f16::ZERO);
                        half.convert_from_f32_slice(wide);
                        file.write(bytemuck::cast_slice(&half))
                    })
                })?;
                // Loaders that convert f16 to f32 themselves take this for a no-op.
                self.push("Cast", vec![stored], &tensor.name, vec![int("to", i64::from(FLOAT))]);
            }
            Storage::Float => {
                self.external(&tensor.name, FLOAT, &tensor.shape, |file| {
                    stream(&**weight.source(), |wide| file.write(bytemuck::cast_slice(wide)))
                })?;
            }
        }
        self.done += weight.qnn_bytes();
        self.progress.advance(self.done);
        Ok(())
    }

    /// Adds an initialiser whose bytes `fill` appends to the external-data file.
    fn external(
        &mut self,
        name: &str,
        data_type: i32,
        shape: &[usize],
        fill: impl FnOnce(&mut DataFile) -> Result<()>,
    ) -> Result<()> {
        let [offset, length] = self.data.append(fill)?;
        let location = self.data.path().file_name().unwrap_or_default().to_string_lossy().into();
        let entry =
            |key: &str, value: String| StringStringEntryProto { key: key.to_owned(), value };
        self.out.initializer.push(TensorProto {
            dims: dims(shape),
            data_type,
            name: name.to_owned(),
            raw_data: None,
            external_data: vec![
                entry("location", location),
                entry("offset", offset.to_string()),
                entry("length", length.to_string()),
            ],
            data_location: Some(EXTERNAL),
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
                    self.push("Gemm", inputs, name, vec![int("transB", 1)]);
                }
            }
            Op::MatMul { transpose_b } => {
                if let Some(&b) = node.inputs.get(1)
                    && self.graph.tensor(b)?.elem == Elem::Int8
                    && let Some(input) = inputs.get_mut(1)
                {
                    *input = self.dequantized(input, inner);
                }
                if *transpose_b {
                    let rank = output.shape.len() as i64;
                    let mut perm: Vec<i64> = (0..rank).collect();
                    perm.swap(rank as usize - 1, rank as usize - 2);
                    let transposed = format!("{inner}.bt");
                    let b = vec![inputs.swap_remove(1)];
                    self.push("Transpose", b, &transposed, vec![ints("perm", perm)]);
                    inputs.push(transposed);
                }
                self.push("MatMul", inputs, name, vec![]);
            }
            Op::Binary(op) => self.push(binary(*op), inputs, name, vec![]),
            Op::Unary(UnaryOp::Rsqrt) => {
                let root = format!("{inner}.sqrt");
                self.push("Sqrt", inputs, &root, vec![]);
                self.push("Reciprocal", vec![root], name, vec![]);
            }
            Op::Unary(UnaryOp::Silu) => {
                let gate = format!("{inner}.sigmoid");
                self.push("Sigmoid", inputs.clone(), &gate, vec![]);
                inputs.push(gate);
                self.push("Mul", inputs, name, vec![]);
            }
            Op::Unary(op @ (UnaryOp::Gelu | UnaryOp::GeluTanh)) => {
                self.gelu(&inputs, node, name, *op);
            }
            Op::Unary(op) => self.push(unary(*op), inputs, name, vec![]),
            Op::Clamp { min, max } => {
                inputs.push(self.scalar(*min));
                inputs.push(self.scalar(*max));
                self.push("Clip", inputs, name, vec![]);
            }
            Op::Reduce { op, axis } => {
                inputs.push(self.int64s(vec![*axis as i64]));
                self.push(reduce(*op), inputs, name, vec![int("keepdims", 1)]);
            }
            Op::Softmax => self.push("Softmax", inputs, name, vec![int("axis", -1)]),
            Op::RmsNorm { epsilon } => self.rms_norm(&inputs, node, output, *epsilon),
            Op::LayerNorm { epsilon } => {
                let attributes = vec![int("axis", -1), float("epsilon", *epsilon)];
                self.push("LayerNormalization", inputs, name, attributes);
            }
            Op::Conv2d(conv) => {
                let [[top, bottom], [left, right]] = conv.padding;
                let attributes = vec![
                    ints("kernel_shape", dims(&conv.kernel)),
                    ints("strides", dims(&conv.stride)),
                    ints("pads", dims(&[top, left, bottom, right])),
                    ints("dilations", dims(&conv.dilation)),
                    int("group", conv.groups as i64),
                ];
                self.push("Conv", inputs, name, attributes);
            }
            Op::Gather => self.push("Gather", inputs, name, vec![int("axis", 0)]),
            Op::Reshape => {
                inputs.push(self.int64s(dims(&output.shape)));
                self.push("Reshape", inputs, name, vec![]);
            }
            Op::Transpose { perm } => {
                let perm = ints("perm", dims(perm));
                self.push("Transpose", inputs, name, vec![perm]);
            }
            Op::Concat { axis } => {
                self.push("Concat", inputs, name, vec![int("axis", *axis as i64)])
            }
            Op::Slice { axis, start, end } => {
                for value in [start, end, axis] {
                    inputs.push(self.int64s(vec![*value as i64]));
                }
                self.push("Slice", inputs, name, vec![]);
            }
            Op::Cast => {
                let from = node.inputs.first().map(|&id| self.graph.tensor(id)).transpose()?;
                if from.is_some_and(|from| from.elem.onnx() == output.elem.onnx()) {
                    self.push("Identity", inputs, name, vec![]);
                } else {
                    let to = int("to", i64::from(data_type(output.elem)));
                    self.push("Cast", inputs, name, vec![to]);
                }
            }
        }
        if let Some(last) = self.out.node.last_mut() {
            last.name = format!("{}_node", node.name);
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
        self.push("Mul", vec![x.clone(), x.clone()], &squares, vec![]);
        self.push("ReduceMean", vec![squares, axes], &mean, vec![int("keepdims", 1)]);
        self.push("Add", vec![mean, small], &sum, vec![]);
        self.push("Sqrt", vec![sum], &root, vec![]);
        self.push("Reciprocal", vec![root], &inverse, vec![]);
        self.push("Mul", vec![x.clone(), inverse], &unit, vec![]);
        self.push("Mul", vec![unit, weight.clone()], &output.name, vec![]);
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
                self.push("Mul", vec![x.clone(), x.clone()], &squares, vec![]);
                self.push("Mul", vec![squares, cubic], &inner_cubic, vec![]);
                self.push("Add", vec![inner_cubic, linear], &factor, vec![]);
                self.push("Mul", vec![x.clone(), factor], &argument, vec![]);
            }
            _ => {
                let root = self.scalar(std::f32::consts::FRAC_1_SQRT_2);
                self.push("Mul", vec![x.clone(), root], &argument, vec![]);
            }
        }
        let (one, one_half) = (self.scalar(1.0), self.scalar(0.5));
        self.push(unary(op), vec![argument], &curve, vec![]);
        self.push("Add", vec![curve, one], &sum, vec![]);
        self.push("Mul", vec![x.clone(), one_half], &half, vec![]);
        self.push("Mul", vec![half, sum], name, vec![]);
    }

    /// An int8 input as f32, for the node `name`.
    fn dequantized(&mut self, input: &str, name: &str) -> String {
        let (scale, wide) = (self.scalar(INT8_STEP), format!("{name}.b"));
        self.push("DequantizeLinear", vec![input.to_owned(), scale], &wide, vec![]);
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
        self.out.initializer.push(TensorProto {
            dims: vec![],
            data_type: FLOAT,
            name: name.clone(),
            raw_data: Some(value.to_le_bytes().to_vec()),
            ..TensorProto::default()
        });
        self.scalars.insert(value.to_bits(), name.clone());
        name
    }

    /// The name of an int64 constant, made once per value. It has a `.`, which no tensor of a graph has.
    fn int64s(&mut self, values: Vec<i64>) -> String {
        if let Some(name) = self.shapes.get(&values) {
            return name.clone();
        }
        let name = format!("int64.{}", self.shapes.len());
        self.out.initializer.push(TensorProto {
            dims: dims(&[values.len()]),
            data_type: INT64,
            name: name.clone(),
            raw_data: Some(bytemuck::cast_slice(&values).to_vec()),
            ..TensorProto::default()
        });
        self.shapes.insert(values, name.clone());
        name
    }

    fn push(&mut self, op: &str, input: Vec<String>, output: &str, attribute: Vec<AttributeProto>) {
        self.out.node.push(NodeProto {
            input,
            output: vec![output.to_owned()],
            name: format!("{output}_node"),
            op_type: op.to_owned(),
            attribute,
            domain: String::new(),
        });
    }
}

const fn binary(op: BinaryOp) -> &'static str {
    match op {
        BinaryOp::Add => "Add",
        BinaryOp::Sub => "Sub",
        BinaryOp::Mul => "Mul",
        BinaryOp::Div => "Div",
        BinaryOp::Max => "Max",
        BinaryOp::Min => "Min",
    }
}

const fn unary(op: UnaryOp) -> &'static str {
    match op {
        UnaryOp::Abs => "Abs",
        UnaryOp::Neg => "Neg",
        UnaryOp::Exp => "Exp",
        UnaryOp::Log => "Log",
        UnaryOp::Rsqrt => "Reciprocal",
        UnaryOp::Sigmoid | UnaryOp::Silu => "Sigmoid",
        UnaryOp::Tanh | UnaryOp::GeluTanh => "Tanh",
        UnaryOp::Relu => "Relu",
        UnaryOp::Gelu => "Erf",
    }
}

const fn reduce(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Sum => "ReduceSum",
        ReduceOp::Mean => "ReduceMean",
        ReduceOp::Max => "ReduceMax",
    }
}

fn data_type(elem: Elem) -> i32 {
    match elem.onnx() {
        DType::I32 => INT32,
        DType::I8 => INT8,
        _ => FLOAT,
    }
}

fn value_info(tensor: &Tensor) -> ValueInfoProto {
    let dim = |&d: &usize| DimensionProto { dim_value: Some(d as i64) };
    ValueInfoProto {
        name: tensor.name.clone(),
        r#type: Some(TypeProto {
            tensor_type: Some(TensorTypeProto {
                elem_type: data_type(tensor.elem),
                shape: Some(TensorShapeProto { dim: tensor.shape.iter().map(dim).collect() }),
            }),
        }),
    }
}

fn dims(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|&d| d as i64).collect()
}

fn float(name: &str, value: f32) -> AttributeProto {
    let kind = ATTRIBUTE_FLOAT;
    AttributeProto { name: name.to_owned(), f: Some(value), kind, ..AttributeProto::default() }
}

fn int(name: &str, value: i64) -> AttributeProto {
    let kind = ATTRIBUTE_INT;
    AttributeProto { name: name.to_owned(), i: Some(value), kind, ..AttributeProto::default() }
}

fn ints(name: &str, values: Vec<i64>) -> AttributeProto {
    let kind = ATTRIBUTE_INTS;
    AttributeProto { name: name.to_owned(), ints: values, kind, ..AttributeProto::default() }
}
