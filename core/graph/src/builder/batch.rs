//! A graph for several sequences at once, of the graph for one.
//!
//! What works on rows, linear layers above all, works on the rows of all sequences, one behind the other along the first
//! axis, so that weights are read once. Everything else, such as attention over a cache of its own, is there once for
//! each sequence. So some inputs and outputs are those of all sequences, and others there are one of for each: to cut
//! the logits of four sequences apart takes the NPU half as long as to compute them.

use std::collections::HashMap;

use qhx_base::Result;

use super::GraphBuilder;
use crate::graph::{Graph, Node, Op, Origin, Tensor, TensorId};

/// Elements of a sequence's tensor from which on it is not brought together with those of others: states are large, and
/// what is computed of them reads no weights.
const LARGE: usize = 1 << 15;

/// A tensor of the graph for one sequence in the graph for several.
#[derive(Debug, Clone)]
enum Value {
    /// A constant or a weight, the same for all.
    Shared(TensorId),
    /// That of all sequences, joined along the first axis.
    Joint(TensorId),
    /// One for each sequence.
    Each(Vec<TensorId>),
}

/// Name of a sequence's input or output in the graph for several sequences, of those that there are one of for each.
pub fn sequence_port(name: &str, sequence: usize) -> String {
    format!("{name}_s{sequence}")
}

/// The graph `name` that computes for `sequences` what `graph` computes for one. An input or output of `graph` is there
/// for all sequences, with its own name and their rows along the first axis, or once for each, called as
/// [`sequence_port`] says.
///
/// # Errors
/// When a name of the graph is one that those would have, or there is no sequence.
pub fn batched(graph: &Graph, sequences: usize, name: &str) -> Result<Graph> {
    let mut batch = Batch {
        builder: GraphBuilder::new(name),
        graph,
        sequences,
        values: vec![None; graph.tensors().len()],
        joined: HashMap::new(),
        parts: HashMap::new(),
    };
    batch.builder.check_name(name)?;
    // Nodes get the names of those that they stand for; until then they have names that no other has.
    batch.builder.scope("batched");
    if sequences == 0 {
        return Err(batch.builder.fault("no sequences"));
    }
    batch.inputs()?;
    for node in graph.nodes() {
        batch.node(node)?;
    }
    batch.outputs()?;
    batch.builder.finish()
}

struct Batch<'g> {
    builder: GraphBuilder,
    graph: &'g Graph,
    sequences: usize,
    /// By the indices of the tensors of `graph`.
    values: Vec<Option<Value>>,
    /// Tensors of each sequence that were joined, by the index of the tensor.
    joined: HashMap<usize, TensorId>,
    /// Tensors of all sequences that were cut apart, by the index of the tensor.
    parts: HashMap<usize, Vec<TensorId>>,
}

impl Batch<'_> {
    fn inputs(&mut self) -> Result<()> {
        for &id in self.graph.inputs() {
            let tensor = self.graph.tensor(id)?;
            let mut readers = self.graph.nodes().iter().filter(|node| node.inputs.contains(&id));
            let small = tensor.elements() <= LARGE;
            let joint = small
                && readers.try_fold(true, |all, node| Ok(all && self.works_on_rows(node)?))?;
            let value = if joint {
                let mut shape = tensor.shape.clone();
                shape[0] *= self.sequences;
                Value::Joint(self.builder.input(&tensor.name, tensor.elem, &shape)?)
            } else {
                let each = (0..self.sequences).map(|sequence| {
                    let name = sequence_port(&tensor.name, sequence);
                    self.builder.input(&name, tensor.elem, &tensor.shape)
                });
                Value::Each(each.collect::<Result<_>>()?)
            };
            self.values[id.index()] = Some(value);
        }
        Ok(())
    }

    fn outputs(&mut self) -> Result<()> {
        for &id in self.graph.outputs() {
            let name = &self.graph.tensor(id)?.name;
            if let Value::Joint(joint) = self.value(id)? {
                self.builder.output(name, joint)?;
                continue;
            }
            for (sequence, made) in self.each(id)?.into_iter().enumerate() {
                self.builder.output(&sequence_port(name, sequence), made)?;
            }
        }
        Ok(())
    }

    fn node(&mut self, node: &Node) -> Result<()> {
        let output = self.graph.tensor(node.output)?;
        let value = if self.is_joint(node)? {
            let inputs = node.inputs.iter().map(|&id| self.joint(id)).collect::<Result<_>>()?;
            let mut shape = output.shape.clone();
            shape[0] *= self.sequences;
            Value::Joint(self.compute(&node.name, node, inputs, output, &shape)?)
        } else {
            let inputs = node.inputs.iter().map(|&id| self.each(id)).collect::<Result<Vec<_>>>()?;
            let made = (0..self.sequences).map(|sequence| {
                let inputs = inputs.iter().map(|each| each[sequence]).collect();
                let name = sequence_port(&node.name, sequence);
                self.compute(&name, node, inputs, output, &output.shape)
            });
            Value::Each(made.collect::<Result<_>>()?)
        };
        self.values[node.output.index()] = Some(value);
        Ok(())
    }

    /// A node with the op of `node`.
    fn compute(
        &mut self,
        name: &str,
        node: &Node,
        inputs: Vec<TensorId>,
        output: &Tensor,
        shape: &[usize],
    ) -> Result<TensorId> {
        let made = self.builder.compute(name, &node.op, inputs, output.elem, shape)?;
        self.builder.rename_last(made, name)?;
        Ok(made)
    }

    /// True if a node works on the rows of all sequences.
    fn is_joint(&self, node: &Node) -> Result<bool> {
        for &id in &node.inputs {
            let apart = matches!(self.values[id.index()], Some(Value::Each(_)));
            if apart && self.graph.tensor(id)?.elements() > LARGE {
                return Ok(false);
            }
        }
        self.works_on_rows(node)
    }

    /// True if the op works on each row, so that it may work on the rows of all sequences.
    fn works_on_rows(&self, node: &Node) -> Result<bool> {
        let mut data = Vec::with_capacity(node.inputs.len());
        let mut constants = Vec::new();
        for &id in &node.inputs {
            let tensor = self.graph.tensor(id)?;
            match tensor.origin {
                Origin::Input | Origin::Node(_) => data.push((id, tensor)),
                Origin::Constant(_) | Origin::Weight(_) => constants.push(tensor),
            }
        }
        let Some((_, first)) = data.first() else { return Ok(false) };
        let rank = first.shape.len();
        Ok(match &node.op {
            Op::Linear
            | Op::Conv2d(_)
            | Op::Unary(_)
            | Op::Clamp { .. }
            | Op::Reshape
            | Op::Cast => true,
            Op::Softmax | Op::RmsNorm { .. } | Op::LayerNorm { .. } => rank > 1,
            Op::Reduce { axis, .. } | Op::Concat { axis } | Op::Slice { axis, .. } => {
                *axis != 0 && constants.is_empty()
            }
            Op::Transpose { perm } => perm.first() == Some(&0),
            Op::Gather => data.len() == 1 && data[0].0 == node.inputs[1],
            Op::MatMul { .. } => rank > 2 && constants.is_empty(),
            Op::Binary(_) => {
                let rows = data[0].1.shape[0];
                let alike = data.iter().all(|(_, tensor)| tensor.shape[0] == rows);
                alike && constants.iter().all(|tensor| tensor.shape[0] == 1)
            }
            Op::Attention(_) => false,
        })
    }

    fn value(&mut self, id: TensorId) -> Result<Value> {
        let tensor = self.graph.tensor(id)?;
        if self.values[id.index()].is_none() {
            let Tensor { name, elem, shape, origin } = tensor.clone();
            let made = self.builder.push(name, elem, shape, origin)?;
            self.values[id.index()] = Some(Value::Shared(made));
        }
        let missing = || self.builder.fault(&format!("{tensor} is read before it is written"));
        self.values[id.index()].clone().ok_or_else(missing)
    }

    /// The tensor of all sequences.
    fn joint(&mut self, id: TensorId) -> Result<TensorId> {
        match self.value(id)? {
            Value::Shared(made) | Value::Joint(made) => Ok(made),
            Value::Each(each) => {
                if let Some(&made) = self.joined.get(&id.index()) {
                    return Ok(made);
                }
                let made = self.builder.concat(&each, 0)?;
                if self.sequences > 1 {
                    let name = format!("{}_joined", self.graph.tensor(id)?.name);
                    self.builder.rename_last(made, &name)?;
                }
                self.joined.insert(id.index(), made);
                Ok(made)
            }
        }
    }

    /// The tensor of each sequence.
    fn each(&mut self, id: TensorId) -> Result<Vec<TensorId>> {
        match self.value(id)? {
            Value::Shared(made) => Ok(vec![made; self.sequences]),
            Value::Each(each) => Ok(each),
            Value::Joint(joint) => {
                if let Some(each) = self.parts.get(&id.index()) {
                    return Ok(each.clone());
                }
                let tensor = self.graph.tensor(id)?;
                let (rows, name) = (tensor.shape[0], tensor.name.clone());
                let slices = (0..self.sequences).map(|sequence| {
                    let first = sequence * rows;
                    let made = self.builder.slice(joint, 0, first, first + rows)?;
                    if self.sequences > 1 {
                        let name = format!("{name}_of_s{sequence}");
                        self.builder.rename_last(made, &name)?;
                    }
                    Ok(made)
                });
                let each = slices.collect::<Result<Vec<_>>>()?;
                self.parts.insert(id.index(), each.clone());
                Ok(each)
            }
        }
    }
}
