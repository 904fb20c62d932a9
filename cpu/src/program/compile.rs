//! From an ONNX graph to instructions.

use std::collections::{HashMap, HashSet};

use qhx_base::artifacts::Mapped;
use qhx_exec::backend::Unsupported;
use qhx_types::onnx::{ONNX, Operator, STORED_FLOATS};
use qhx_types::{DType, TensorInfo};
use rten_onnx::onnx::{DataType, ModelProto, NodeProto, ValueInfoProto};

use super::attend::MaskShape;
use super::fused::{self, Fused};
use super::kernels::Unary;
use super::reader::{Reader, operator, positive, sizes};
use super::view::{Place, View, Walk};
use super::{Dense, Elem, Instruction, Program};
use crate::options::Caches;
use crate::weights::Floats;

/// A result, or why there is none.
pub(super) type Lowered<T> = Result<T, String>;

/// A size, a number of elements or of bytes that no memory has.
pub(super) const TOO_LARGE: &str = "it is larger than memory can be";

/// The program of a graph whose external data lies in `files`.
pub(super) fn compile(
    model: &ModelProto,
    files: &HashMap<String, Mapped>,
    caches: Caches,
) -> Result<Program, Unsupported> {
    let whole = |why: String| Unsupported { why, ..Unsupported::default() };
    if cfg!(target_endian = "big") {
        return Err(whole("the processor's numbers begin with the highest byte".to_owned()));
    }
    let graph = model.graph.as_ref().ok_or_else(|| whole("the model has no graph".to_owned()))?;
    let reader = Reader::new(graph, files).map_err(whole)?;
    let mut compiler = Compiler::new(&reader);
    let mut fused = Fused::all(&reader);
    let live = live(&reader, &fused);
    let halves = match caches {
        Caches::F32 => HashSet::new(),
        Caches::F16 => only_caches(&reader, &fused, &live),
    };
    let mut inputs = Vec::with_capacity(graph.input.len());
    for (index, input) in graph.input.iter().enumerate() {
        let (name, mut elem, shape) =
            declared(input).map_err(|why| whole(format!("input {why}")))?;
        if elem == Elem::F32 && halves.contains(name) {
            elem = Elem::F16;
        }
        let view = View::whole(Place::Input(index), &shape);
        let view = view.ok_or_else(|| whole(format!("input {name:?}: {TOO_LARGE}")))?;
        compiler.values.insert(name, Value { view, elem });
        inputs.push(TensorInfo::new(name, dtype(elem), shape));
    }
    for (at, node) in graph.node.iter().enumerate().filter(|(at, _)| live[*at]) {
        let lowered = match fused.remove(&at) {
            Some(fused) => compiler.fused(node, fused),
            None => compiler.node(node),
        };
        lowered.map_err(|why| Unsupported {
            operator: node.op_type.clone().unwrap_or_default(),
            node: node_name(node).to_owned(),
            why,
        })?;
    }
    let mut results = Vec::with_capacity(graph.output.len());
    let mut outputs: Vec<TensorInfo> = Vec::with_capacity(graph.output.len());
    let mut names = HashSet::new();
    for output in &graph.output {
        let (name, elem, shape) = declared(output).map_err(|why| whole(format!("output {why}")))?;
        let fail = |why: &str| whole(format!("output {name:?}: {why}"));
        let value = compiler.value(name).map_err(|why| fail(&why))?;
        if value.view.shape() != shape || value.elem != elem || !names.insert(name) {
            return Err(fail("it is declared twice, or as something else than what is computed"));
        }
        if !matches!(elem, Elem::F32 | Elem::I32) {
            return Err(fail("it is neither f32 nor i32"));
        }
        // Outputs are written when inputs may not be read any more.
        results.push(match value.view.place {
            Place::Input(_) => {
                compiler.unary(Unary::Copy, &value.view).map_err(|why| fail(&why))?
            }
            _ => value.view,
        });
        outputs.push(TensorInfo::new(name, dtype(elem), shape));
    }
    if graph.input.iter().any(|input| input.name.as_deref().is_some_and(|n| names.contains(n))) {
        return Err(whole("an input is an output, too".to_owned()));
    }
    let program = compiler.finish(&results).ok_or_else(|| whole(TOO_LARGE.to_owned()))?;
    Ok(Program { inputs, outputs, ..program })
}

/// The name of a node, or of what it makes.
fn node_name(node: &NodeProto) -> &str {
    let name = node.name.as_deref().filter(|name| !name.is_empty());
    name.or_else(|| node.output.first().map(String::as_str)).unwrap_or_default()
}

const fn dtype(elem: Elem) -> DType {
    match elem {
        Elem::F32 => DType::F32,
        Elem::I32 => DType::I32,
        Elem::I8 => DType::I8,
        Elem::U8 => DType::U8,
        Elem::F16 => DType::F16,
    }
}

/// Name, type and shape of an input or an output.
fn declared(info: &ValueInfoProto) -> Lowered<(&str, Elem, Vec<usize>)> {
    let name = info.name.as_deref().ok_or("without a name")?;
    let tensor = info.r#type.as_ref().and_then(|info| info.tensor_type.as_ref());
    let tensor = tensor.ok_or_else(|| format!("{name:?}: it is no tensor"))?;
    let elem = match tensor.elem_type {
        Some(DataType::FLOAT) => Elem::F32,
        Some(DataType::INT32) => Elem::I32,
        Some(DataType::INT8) => Elem::I8,
        Some(DataType::UINT8) => Elem::U8,
        _ => return Err(format!("{name:?}: it is neither f32 nor i32, int8 or uint8")),
    };
    let dims = tensor.shape.as_ref().map(|shape| shape.dim.iter());
    let shape: Option<Vec<usize>> = dims.and_then(|mut dims| {
        dims.try_fold(Vec::new(), |mut shape, dim| {
            shape.push(positive(dim.dim_value?)?);
            Some(shape)
        })
    });
    Ok((name, elem, shape.ok_or_else(|| format!("{name:?}: its shape is not fixed"))?))
}

/// Which nodes an output needs. Others could be anything.
fn live(reader: &Reader<'_, '_>, fused: &HashMap<usize, Fused<'_>>) -> Vec<bool> {
    let mut live = vec![false; reader.graph.node.len()];
    let mut open: Vec<&str> =
        reader.graph.output.iter().filter_map(|o| o.name.as_deref()).collect();
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
    live
}

/// The values that are caches of attention and nothing else.
fn only_caches<'a>(
    reader: &Reader<'a, '_>,
    fused: &HashMap<usize, Fused<'a>>,
    live: &[bool],
) -> HashSet<&'a str> {
    let outputs = reader.graph.output.iter().filter_map(|output| output.name.as_deref());
    let (mut caches, mut others) = (HashSet::new(), outputs.collect::<HashSet<_>>());
    for (at, node) in reader.graph.node.iter().enumerate().filter(|(at, _)| live[*at]) {
        match fused.get(&at) {
            Some(Fused::Attention(attention)) if attention.scales.is_none() => {
                let fused::Attention { q, keys: [past_k, k], values: [past_v, v], mask, .. } =
                    *attention;
                caches.extend([past_k, past_v]);
                others.extend([q, k, v, mask]);
            }
            Some(fused) => others.extend(fused.reads()),
            None => others.extend(node.input.iter().map(String::as_str)),
        }
    }
    caches.retain(|name| !others.contains(name));
    caches
}

#[derive(Debug, Clone)]
pub(super) struct Value {
    pub(super) view: View,
    pub(super) elem: Elem,
}

/// A program in the making.
pub(super) struct Compiler<'a, 'r, 'f> {
    pub(super) reader: &'r Reader<'a, 'f>,
    pub(super) values: HashMap<&'a str, Value>,
    pub(super) instructions: Vec<Instruction>,
    pub(super) constants: Vec<Floats>,
    /// Elements of each buffer. Each is written by one instruction, or by several that fill parts of it.
    pub(super) buffers: Vec<usize>,
    /// Masks that were looked at.
    pub(super) seen: Vec<(Place, usize, MaskShape)>,
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

    /// Value of a name. Constants get their place when they are read first.
    pub(super) fn value(&mut self, name: &'a str) -> Lowered<Value> {
        if let Some(value) = self.values.get(name) {
            return Ok(value.clone());
        }
        let integers = self.reader.initializers.get(name).and_then(|tensor| {
            Some((self.reader.words(tensor, DataType::INT32)?, sizes(&tensor.dims)?))
        });
        let (elem, (values, shape)) = match integers {
            Some(found) => (Elem::I32, found),
            None => {
                let found = self.reader.constant(name);
                (Elem::F32, found.ok_or_else(|| format!("{name:?} is no value of f32 or i32"))?)
            }
        };
        let view = self.constant(values, &shape)?;
        let value = Value { view, elem };
        self.values.insert(name, value.clone());
        Ok(value)
    }

    /// A constant of its own.
    pub(super) fn constant(&mut self, values: Floats, shape: &[usize]) -> Lowered<View> {
        let view = View::whole(Place::Constant(self.constants.len()), shape).ok_or(TOO_LARGE)?;
        self.constants.push(values);
        Ok(view)
    }

    pub(super) fn floats(&mut self, name: &'a str) -> Lowered<View> {
        match self.value(name)? {
            Value { view, elem: Elem::F32 } => Ok(view),
            Value { elem, .. } => Err(format!("{name:?} is {}, not f32", dtype(elem))),
        }
    }

    /// Input `at` of a node that has it.
    pub(super) fn input(&self, node: &'a NodeProto, at: usize) -> Option<&'a str> {
        node.input.get(at).map(String::as_str).filter(|name| !name.is_empty())
    }

    pub(super) fn buffer(&mut self, shape: &[usize]) -> Lowered<(usize, View)> {
        let view = View::whole(Place::Buffer(self.buffers.len()), shape).ok_or(TOO_LARGE)?;
        // Its bytes are counted in an `isize`.
        let bytes = view.len().checked_mul(size_of::<f32>());
        bytes.filter(|bytes| isize::try_from(*bytes).is_ok()).ok_or(TOO_LARGE)?;
        self.buffers.push(view.len());
        Ok((self.buffers.len() - 1, view))
    }

    pub(super) fn unary(&mut self, op: Unary, x: &View) -> Lowered<View> {
        let walk = walk([x])?;
        let (out, view) = self.buffer(&x.shape())?;
        self.instructions.push(Instruction::Unary { op, walk, out });
        Ok(view)
    }

    /// The same elements one after the other.
    pub(super) fn dense(&mut self, x: View) -> Lowered<(Dense, View)> {
        let view = if x.is_dense() { x } else { self.unary(Unary::Copy, &x)? };
        Ok((Dense { place: view.place, start: view.start, len: view.len() }, view))
    }

    fn fused(&mut self, node: &'a NodeProto, fused: Fused<'a>) -> Lowered<()> {
        let output = only_output(node)?;
        let view = match fused {
            Fused::Stored(matmul) => self.stored(matmul)?,
            Fused::Input(matmul) => self.input_matmul(&matmul)?,
            Fused::Attention(attention) => self.attention(&attention)?,
        };
        self.values.insert(output, Value { view, elem: Elem::F32 });
        Ok(())
    }

    fn node(&mut self, node: &'a NodeProto) -> Lowered<()> {
        let output = only_output(node)?;
        let name = node.input.first().ok_or("it has no input")?.as_str();
        let operator = operator(node).ok_or_else(|| match node.domain.as_deref() {
            None | Some("" | ONNX) => "there are no instructions for it".to_owned(),
            Some(domain) => format!("an operator of {domain:?}"),
        })?;
        // Weights are dequantized by what reads them.
        let dequantizes = matches!(operator, STORED_FLOATS | Operator::DequantizeLinear);
        if dequantizes && self.reader.initializers.contains_key(name) {
            return Ok(());
        }
        let value = self.operator(node, operator, name)?;
        self.values.insert(output, value);
        Ok(())
    }
}

/// The walk over views of one shape.
pub(super) fn walk<const K: usize>(views: [&View; K]) -> Lowered<Walk<K>> {
    Ok(Walk::new(views).ok_or("it has too many dimensions")?)
}

fn only_output(node: &NodeProto) -> Lowered<&str> {
    match node.output.as_slice() {
        [output] => Ok(output),
        _ => Err("it has several outputs".to_owned()),
    }
}
