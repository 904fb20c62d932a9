//! From a graph to instructions.

use std::collections::HashSet;

use qhx_graph::graph::{AttentionForm, Constant, Graph, Node, Op, Origin, TensorId};
use qhx_types::{DType, TensorInfo};

use super::attend::MaskShape;
use super::kernels::Unary;
use super::view::{Place, View, Walk};
use super::{Dense, Elem, Instruction, Program};
use crate::options::Caches;
use crate::weights::Floats;

/// A result, or why there is none.
pub(super) type Lowered<T> = Result<T, String>;

/// A size, a number of elements or of bytes that no memory has.
pub(super) const TOO_LARGE: &str = "it is larger than memory can be";

/// The program of a graph.
pub(super) fn compile(graph: &Graph, caches: Caches) -> Lowered<Program> {
    if cfg!(target_endian = "big") {
        return Err("the processor's numbers begin with the highest byte".to_owned());
    }
    let graph = &*graph.decomposed_where(|node| !attends(node)).map_err(|e| e.to_string())?;
    let mut compiler = Compiler::new(graph);
    let halves = match caches {
        Caches::F32 => HashSet::new(),
        Caches::F16 => only_caches(graph),
    };
    let mut inputs = Vec::with_capacity(graph.inputs().len());
    for (index, &id) in graph.inputs().iter().enumerate() {
        let (name, mut elem, shape) = compiler.declared(id)?;
        if elem == Elem::F32 && halves.contains(&id) {
            elem = Elem::F16;
        }
        let view = View::whole(Place::Input(index), &shape);
        let view = view.ok_or_else(|| format!("input {name:?}: {TOO_LARGE}"))?;
        compiler.set(id, Value { view, elem });
        inputs.push(TensorInfo::new(name, dtype(elem), shape));
    }
    for node in graph.nodes() {
        let value = compiler.node(node).map_err(|why| format!("node {}: {why}", node.name))?;
        compiler.set(node.output, value);
    }
    let mut results = Vec::with_capacity(graph.outputs().len());
    let mut outputs: Vec<TensorInfo> = Vec::with_capacity(graph.outputs().len());
    for &id in graph.outputs() {
        let (name, elem, shape) = compiler.declared(id)?;
        let fail = |why: &str| format!("output {name:?}: {why}");
        let value = compiler.value(id).map_err(|why| fail(&why))?;
        if value.view.shape() != shape || value.elem != elem {
            return Err(fail("it is declared as something else than what is computed"));
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
    let program = compiler.finish(&results).ok_or_else(|| TOO_LARGE.to_owned())?;
    Ok(Program { inputs, outputs, ..program })
}

/// True for an attention that is one instruction: over a cache, of which it reads what the mask shows.
const fn attends(node: &Node) -> bool {
    let Op::Attention(form) = node.op else { return false };
    matches!(form, AttentionForm { past: true, mask: true, cap: false, sinks: false, .. })
}

pub(super) const fn dtype(elem: Elem) -> DType {
    match elem {
        Elem::F32 => DType::F32,
        Elem::I32 => DType::I32,
        Elem::I8 => DType::I8,
        Elem::F16 => DType::F16,
    }
}

/// The inputs that are caches of attention and nothing else.
fn only_caches(graph: &Graph) -> HashSet<TensorId> {
    let (mut caches, mut others) = (HashSet::new(), HashSet::new());
    for node in graph.nodes() {
        let past = match node.op {
            Op::Attention(AttentionForm { scales: false, .. }) => 3..5,
            _ => 0..0,
        };
        for (index, &id) in node.inputs.iter().enumerate() {
            if past.contains(&index) { &mut caches } else { &mut others }.insert(id);
        }
    }
    caches.retain(|id| !others.contains(id));
    caches
}

#[derive(Debug, Clone)]
pub(super) struct Value {
    pub(super) view: View,
    pub(super) elem: Elem,
}

/// A program in the making.
pub(super) struct Compiler<'g> {
    pub(super) graph: &'g Graph,
    /// Values by the indices of their tensors.
    values: Vec<Option<Value>>,
    pub(super) instructions: Vec<Instruction>,
    pub(super) constants: Vec<Floats>,
    /// Elements of each buffer. Each is written by one instruction, or by several that fill parts of it.
    pub(super) buffers: Vec<usize>,
    /// Masks that were looked at.
    pub(super) seen: Vec<(Place, usize, MaskShape)>,
}

impl<'g> Compiler<'g> {
    fn new(graph: &'g Graph) -> Self {
        Self {
            graph,
            values: vec![None; graph.tensors().len()],
            instructions: Vec::new(),
            constants: Vec::new(),
            buffers: Vec::new(),
            seen: Vec::new(),
        }
    }

    /// Name, type and shape of a tensor.
    pub(super) fn declared(&self, id: TensorId) -> Lowered<(&'g str, Elem, Vec<usize>)> {
        let tensor = self.graph.tensor(id).map_err(|e| e.to_string())?;
        let elem = match tensor.elem.onnx() {
            DType::I32 => Elem::I32,
            DType::I8 => Elem::I8,
            _ => Elem::F32,
        };
        Ok((&tensor.name, elem, tensor.shape.clone()))
    }

    fn set(&mut self, id: TensorId, value: Value) {
        if let Some(slot) = self.values.get_mut(id.index()) {
            *slot = Some(value);
        }
    }

    /// Value of a tensor. Constants get their place when they are read first.
    pub(super) fn value(&mut self, id: TensorId) -> Lowered<Value> {
        if let Some(Some(value)) = self.values.get(id.index()) {
            return Ok(value.clone());
        }
        let (name, elem, shape) = self.declared(id)?;
        let tensor = self.graph.tensors().get(id.index());
        let values = match tensor.map(|tensor| &tensor.origin) {
            Some(Origin::Constant(Constant::Float(values))) => values.to_vec(),
            Some(Origin::Constant(Constant::Int(values))) => {
                values.iter().map(|n| f32::from_bits(n.cast_unsigned())).collect()
            }
            _ => return Err(format!("{name:?} is no value of f32 or i32")),
        };
        let view = self.constant(Floats::Own(values), &shape)?;
        let value = Value { view, elem };
        self.set(id, value.clone());
        Ok(value)
    }

    /// A constant of its own.
    pub(super) fn constant(&mut self, values: Floats, shape: &[usize]) -> Lowered<View> {
        let view = View::whole(Place::Constant(self.constants.len()), shape).ok_or(TOO_LARGE)?;
        self.constants.push(values);
        Ok(view)
    }

    pub(super) fn floats(&mut self, id: TensorId) -> Lowered<View> {
        match self.value(id)? {
            Value { view, elem: Elem::F32 } => Ok(view),
            Value { elem, .. } => Err(format!("it reads {}, expected f32", dtype(elem))),
        }
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
}

/// The walk over views of one shape.
pub(super) fn walk<const K: usize>(views: [&View; K]) -> Lowered<Walk<K>> {
    Ok(Walk::new(views).ok_or("it has too many dimensions")?)
}
