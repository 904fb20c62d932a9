//! A graph from its parts, which are checked as if a recipe had made them.

use qhx_base::Result;

use super::{GraphBuilder, elements};
use crate::graph::{AttentionInputs, Constant, Elem, Graph, Op, Origin, Tensor, TensorId};

/// A node by the indices of its tensors.
#[derive(Debug)]
pub struct NodeParts {
    /// [`crate::graph::Node::name`].
    pub name: String,
    /// Op that it computes.
    pub op: Op,
    /// Indices of the tensors that it reads.
    pub inputs: Vec<usize>,
    /// Index of the tensor that it writes.
    pub output: usize,
}

/// The graph of tensors and nodes as [`Graph::tensors`] and [`Graph::nodes`] have them, with the outputs' indices. Its
/// inputs are the tensors that are none's output, in order.
///
/// # Errors
/// When they are no graph that a [`GraphBuilder`] makes: shapes, element types, names, order, uses.
pub fn rebuild(
    name: &str,
    tensors: Vec<Tensor>,
    nodes: Vec<NodeParts>,
    outputs: &[usize],
) -> Result<Graph> {
    let mut builder = GraphBuilder::new(name);
    builder.check_name(name)?;
    let mut made = nodes.iter();
    for tensor in &tensors {
        builder.rebuild_tensor(tensor, &mut made)?;
    }
    if let Some(node) = made.next() {
        return Err(builder.bad("node", &node.name, "no tensor is its output"));
    }
    builder.rename(&tensors, &nodes)?;
    for &index in outputs {
        let output = builder.id(index)?;
        let tensor = builder.graph.tensor(output)?;
        if !matches!(tensor.origin, Origin::Node(_)) || builder.graph.outputs.contains(&output) {
            return Err(builder.bad("output", &tensor.name, "expected the output of a node, once"));
        }
        builder.graph.outputs.push(output);
    }
    builder.finish()
}

impl GraphBuilder {
    /// Goes on with a finished graph, which keeps its outputs.
    pub fn extend(graph: Graph) -> Self {
        let tensors = graph.tensors.iter().map(|tensor| tensor.name.clone());
        let names = tensors.chain(graph.nodes.iter().map(|node| node.name.clone())).collect();
        let mut builder = Self::new(graph.name());
        builder.next = graph.nodes.len();
        (builder.graph, builder.names) = (graph, names);
        builder
    }

    fn rebuild_tensor<'a>(
        &mut self,
        tensor: &Tensor,
        nodes: &mut impl Iterator<Item = &'a NodeParts>,
    ) -> Result<()> {
        let index = self.graph.tensors.len();
        // The names that the tensors have in the end are given when all are there.
        let name = format!("t{index}");
        let (elem, shape) = (tensor.elem, &tensor.shape);
        let wrong = |this: &Self, what: &str| Err(this.bad("tensor", &tensor.name, what));
        match &tensor.origin {
            Origin::Input => drop(self.input(&name, elem, shape)?),
            Origin::Constant(constant) => {
                let (fits, count) = match constant {
                    Constant::Float(values) => {
                        let finite = values.iter().all(|value| value.is_finite());
                        (finite && matches!(elem, Elem::Activation | Elem::F32), values.len())
                    }
                    Constant::Int(values) => (elem == Elem::I32, values.len()),
                };
                if !fits || elements(shape) != Some(count) {
                    return wrong(self, "values that are finite and fill its shape were expected");
                }
                self.push(name, elem, shape.clone(), Origin::Constant(constant.clone()))?;
            }
            Origin::Weight(weight) => {
                let matrix = elements(&[weight.rows(), weight.cols()]);
                if elem != Elem::Activation
                    || shape.first() != Some(&weight.rows())
                    || elements(shape) != matrix
                {
                    return wrong(self, "the weight has another shape");
                }
                self.push(name, elem, shape.clone(), Origin::Weight(weight.clone()))?;
            }
            Origin::Node(_) => {
                let Some(node) = nodes.next() else { return wrong(self, "no node writes it") };
                if node.output != index {
                    return wrong(self, "nodes and their outputs were expected in one order");
                }
                let made = self.rebuild_node(node, tensor)?;
                let whole = self.graph.tensors.len() == index + 1 && made.index() == index;
                let found = self.graph.tensor(made)?;
                if !whole || found.elem != elem || found.shape != *shape {
                    let what = format!("the node {:?} makes {found}, not {tensor}", node.name);
                    return wrong(self, &what);
                }
            }
        }
        Ok(())
    }

    fn rebuild_node(&mut self, node: &NodeParts, output: &Tensor) -> Result<TensorId> {
        let inputs = node.inputs.iter().map(|&index| self.id(index)).collect::<Result<Vec<_>>>()?;
        self.compute(&node.name, &node.op, inputs, output.elem, &output.shape)
    }

    /// The output of a node with any op, `elem` and `shape` where its inputs do not decide them.
    pub(super) fn compute(
        &mut self,
        name: &str,
        op: &Op,
        inputs: Vec<TensorId>,
        elem: Elem,
        shape: &[usize],
    ) -> Result<TensorId> {
        match (op, &inputs[..]) {
            (Op::Linear, &[x, weight, ref bias @ ..]) => {
                let &[rows, cols] = self.shape(weight)? else {
                    return Err(self.misused("linear", &inputs, "a matrix as weight"));
                };
                let made = self.linear_shape(name, x, [rows, cols])?;
                self.check_bias("linear", &inputs, bias, rows)?;
                self.node(Op::Linear, inputs, Elem::Activation, made)
            }
            (Op::Conv2d(conv), &[x, filter, ref bias @ ..]) => {
                let Origin::Weight(weight) = &self.graph.tensor(filter)?.origin else {
                    return Err(self.misused("conv2d", &inputs, "a weight as second input"));
                };
                let (filters, made) = self.conv2d_shapes(name, x, weight, *conv)?;
                if self.shape(filter)? != filters {
                    let expected = format!("filters {filters:?}");
                    return Err(self.misused("conv2d", &inputs, &expected));
                }
                self.check_bias("conv2d", &inputs, bias, filters[0])?;
                self.node(Op::Conv2d(*conv), inputs, Elem::Activation, made)
            }
            (Op::MatMul { transpose_b }, &[a, b]) => self.matmul(a, b, *transpose_b),
            (Op::Binary(op), &[a, b]) => self.binary(*op, a, b),
            (Op::Unary(op), &[x]) => self.unary(*op, x),
            (Op::Reduce { op, axis }, &[x]) => self.reduce(*op, x, *axis),
            (Op::Clamp { min, max }, &[x]) => self.clamp(x, *min, *max),
            (Op::Softmax, &[x]) => self.softmax(x),
            (Op::RmsNorm { epsilon }, &[x, weight]) => self.rms_norm(x, *epsilon, weight),
            (Op::LayerNorm { epsilon }, &[x, weight, bias]) => {
                self.layer_norm(x, *epsilon, weight, bias)
            }
            (Op::Gather, &[table, indices]) => {
                if let Origin::Weight(weight) = &self.graph.tensor(table)?.origin
                    && weight.storage() != crate::weight::Storage::Float
                {
                    return Err(self.misused("gather", &inputs, "a table of floats"));
                }
                self.gather(table, indices, 0)
            }
            (Op::Reshape, &[x]) => self.reshape(x, shape),
            (Op::Transpose { perm }, &[x]) => self.transpose(x, perm),
            (Op::Concat { axis }, _) => self.concat(&inputs, *axis),
            (Op::Slice { axis, start, end }, &[x]) => self.slice(x, *axis, *start, *end),
            (Op::Cast, &[x]) => self.cast(x, elem),
            (&Op::Attention(form), _) if let Some(all) = AttentionInputs::of(form, &inputs) => {
                self.attention(all)
            }
            (op, _) => Err(self.misused(op.name(), &inputs, "another number of inputs")),
        }
    }

    /// The bias of a layer with `rows` outputs: none, or a constant.
    fn check_bias(
        &self,
        op: &str,
        inputs: &[TensorId],
        bias: &[TensorId],
        rows: usize,
    ) -> Result<()> {
        let fits = match bias {
            [] => true,
            &[bias] => {
                let bias = self.graph.tensor(bias)?;
                let constant = matches!(bias.origin, Origin::Constant(Constant::Float(_)));
                constant && bias.elem == Elem::Activation && bias.shape == [rows]
            }
            _ => false,
        };
        if fits {
            Ok(())
        } else {
            Err(self.misused(op, inputs, &format!("a bias [{rows}] at most")))
        }
    }

    fn id(&self, index: usize) -> Result<TensorId> {
        match u32::try_from(index) {
            Ok(small) if index < self.graph.tensors.len() => {
                Ok(TensorId { graph: self.graph.identity, index: small })
            }
            _ => Err(self.fault(&format!("tensor {index} is read before it is written"))),
        }
    }

    /// Gives the node that was made last, whose output this is, another name.
    pub(super) fn rename_last(&mut self, output: TensorId, name: &str) -> Result<()> {
        self.check_name(name)?;
        let Some(node) = self.graph.nodes.last_mut().filter(|node| node.output == output) else {
            return Err(self.fault(&format!("{name}: it is no node of its own")));
        };
        self.names.remove(&node.name);
        self.names.insert(name.to_owned());
        name.clone_into(&mut node.name);
        name.clone_into(&mut self.graph.tensors[output.index()].name);
        Ok(())
    }

    /// Gives tensors and nodes their names.
    fn rename(&mut self, tensors: &[Tensor], nodes: &[NodeParts]) -> Result<()> {
        self.names.clear();
        for (index, tensor) in tensors.iter().enumerate() {
            self.check_name(&tensor.name)?;
            self.names.insert(tensor.name.clone());
            self.graph.tensors[index].name.clone_from(&tensor.name);
        }
        for (index, node) in nodes.iter().enumerate() {
            if self.graph.tensors[node.output].name != node.name {
                // The output of the graph, which has a name of its own.
                self.check_name(&node.name)?;
                self.names.insert(node.name.clone());
            }
            self.graph.nodes[index].name.clone_from(&node.name);
        }
        Ok(())
    }
}
