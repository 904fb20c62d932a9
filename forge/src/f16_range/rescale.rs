//! Powers of two in weights, which keep what a graph computes within f16.
//!
//! A projection whose outputs are too large for f16 has its weight times 2^−K. What is computed of them is then smaller
//! by 2^K, too, and the weight that reads it makes up for it: `gate_proj · up_proj → down_proj`. Where it is added to
//! the hidden states, they stay smaller from there on, and norms give what they gave, with an epsilon times 2^−2K. All
//! of it is exact, but for values that become subnormal.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::covers;
use qhx_graph::builder::{NodeParts, rebuild};
use qhx_graph::graph::{
    BinaryOp, Constant, Elem, Graph, Node, Op, Origin, Tensor, TensorId, UnaryOp,
};
use qhx_graph::weight::{Storage, Weight, scaled, stream};

use crate::chain::{HEAD, decoders, names};
use crate::recipe::Recipe;

/// Largest [`Fold::shift`].
pub(crate) const MAX_SHIFT: u32 = 24;
/// Beyond this an activation is the identity or 0.
const SATURATED: f32 = 64.0;
/// The least magnitude that the largest value of a weight has after it: f16 has steps of 2^−24 below 2^−14, which are
/// then 1/4096 of it at most.
const MIN_FLOAT: f32 = 1.0 / 4096.0;
/// The same of a weight in blocks, whose scales are f16.
const MIN_BLOCKS: f32 = 1.0 / 512.0;

/// Keeps the outputs of projections at 2^−shift of their size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fold {
    /// Words of the names of their weights, as in [`crate::Override::part`]: `layers.3.mlp.up_proj`.
    pub part: String,
    /// From 1 to 24.
    pub shift: u32,
}

impl fmt::Display for Fold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.part, self.shift)
    }
}

impl FromStr for Fold {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = text.split_once('=').filter(|(part, _)| !part.is_empty());
        let found = found.and_then(|(part, shift)| Some((part.to_owned(), shift.parse().ok()?)));
        match found {
            Some((part, shift)) if (1..=MAX_SHIFT).contains(&shift) => Ok(Self { part, shift }),
            _ => Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "{text:?}, expected PART=K with K from 1 to {MAX_SHIFT}, such as layers.3.mlp.up_proj=4"
                ),
            )),
        }
    }
}

/// Folds powers of two into the weights of a recipe's graphs.
///
/// Errors when a part is in no projection's name, and when a weight would become too small or too large for f16.
pub(crate) fn apply(recipe: &mut Recipe, folds: &[Fold]) -> Result<()> {
    if folds.is_empty() {
        return Ok(());
    }
    let graphs = || recipe.contexts.iter().flat_map(|context| &context.graphs);
    for one in folds {
        let one = std::slice::from_ref(one);
        let covers = |graph: &Graph| graph.nodes().iter().any(|n| shift_of(graph, n, one) > 0);
        if !graphs().any(covers) {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("fold {}: no projection of the graphs has this in its name", one[0]),
            )
            .hint("such as layers.0.mlp.up_proj=4"));
        }
    }
    let mut folded = fold_all(recipe, folds)?;
    for graph in recipe.contexts.iter_mut().flat_map(|context| &mut context.graphs) {
        if let Some(made) = folded.remove(graph.name()) {
            *graph = made.graph;
        }
    }
    Ok(())
}

/// All graphs of a recipe with powers of two in their weights, by their names.
pub(crate) fn fold_all(recipe: &Recipe, folds: &[Fold]) -> Result<HashMap<String, Folded>> {
    let graphs = || recipe.contexts.iter().flat_map(|context| &context.graphs);
    // Hidden states go from graph to graph of as many rows, and from the last one to the head.
    let mut folded: HashMap<String, Folded> = HashMap::new();
    // Prefill graphs that end before the last layers give the head nothing, and those of one token all the same.
    let mut before_head = 0;
    for list in decoders(&recipe.plan_params) {
        let mut last: HashMap<usize, i32> = HashMap::new();
        for name in names(list) {
            let Some(graph) = graphs().find(|graph| graph.name() == name) else { continue };
            let Some(x) = input(graph, "x") else { continue };
            let shift = last.entry(x.shape.first().copied().unwrap_or(0)).or_default();
            let made = fold(graph, folds, *shift, true)?;
            *shift = made.y;
            folded.insert(name.to_owned(), made);
        }
        before_head = last.get(&1).copied().unwrap_or(before_head);
    }
    for name in recipe.plan_params.get(HEAD).into_iter().flat_map(names) {
        let Some(graph) = graphs().find(|graph| graph.name() == name) else { continue };
        folded.insert(name.to_owned(), fold(graph, folds, before_head, false)?);
    }
    for graph in graphs().filter(|graph| !folded.contains_key(graph.name())).collect::<Vec<_>>() {
        folded.insert(graph.name().to_owned(), fold(graph, folds, 0, false)?);
    }
    Ok(folded)
}

fn input<'a>(graph: &'a Graph, name: &str) -> Option<&'a Tensor> {
    let mut inputs = graph.inputs().iter().filter_map(|id| graph.tensors().get(id.index()));
    inputs.find(|tensor| tensor.name == name)
}

/// Shift that the folds ask for on the outputs of a node: that of the last fold that covers its weight.
fn shift_of(graph: &Graph, node: &Node, folds: &[Fold]) -> i32 {
    let (Op::Linear, Some(weight)) = (&node.op, node.inputs.get(1)) else { return 0 };
    let Some(Tensor { origin: Origin::Weight(weight), .. }) = graph.tensors().get(weight.index())
    else {
        return 0;
    };
    let name = weight.source().name();
    let covers = |fold: &&Fold| covers(&fold.part, name);
    folds.iter().rfind(covers).and_then(|fold| i32::try_from(fold.shift).ok()).unwrap_or(0)
}

fn power(exponent: i32) -> f32 {
    2f32.powi(exponent)
}

/// A graph with powers of two in its weights.
pub(crate) struct Folded {
    pub graph: Graph,
    /// For each tensor of the graph that was: it holds 2^−shift of what it held.
    pub shifts: Vec<i32>,
    /// For each tensor: true if it is brought back to its size behind it.
    pub restored: Vec<bool>,
    /// The shift of the output `y`.
    pub y: i32,
}

/// `graph` with `folds`. Its input `x` holds 2^−x of what it held, and so may its output `y` with `chained`.
///
/// Composites whose inputs differ from what they were become the nodes that they stand for: the tensors of
/// [`Folded::shifts`] are those of `graph` where it has no composite.
fn fold(graph: &Graph, folds: &[Fold], x: i32, chained: bool) -> Result<Folded> {
    let (folded, shifted) = pass(graph, folds, x, chained)?;
    if shifted.is_empty() {
        return Ok(folded);
    }
    let graph = graph.decomposed_where(|node| shifted.contains(&node.name))?;
    Ok(pass(&graph, folds, x, chained)?.0)
}

/// The folded graph, and the names of composites that read what was folded.
fn pass(graph: &Graph, folds: &[Fold], x: i32, chained: bool) -> Result<(Folded, HashSet<String>)> {
    let count = graph.tensors().len();
    let mut pass = Pass {
        old: graph,
        shifted: HashSet::new(),
        folds,
        tensors: Vec::new(),
        nodes: Vec::new(),
        places: vec![None; count],
        shifts: vec![0; count],
        restored: vec![None; count],
        stored: HashMap::new(),
    };
    for (index, tensor) in graph.tensors().iter().enumerate() {
        match tensor.origin {
            Origin::Input => {
                pass.places[index] = Some(pass.tensors.len());
                pass.tensors.push(tensor.clone());
                if tensor.name == "x" {
                    pass.shifts[index] = x;
                }
            }
            // Added where they are read.
            Origin::Constant(_) | Origin::Weight(_) => {}
            Origin::Node(node) => {
                if let Some(node) = graph.nodes().get(node) {
                    pass.node(node)?;
                }
            }
        }
    }
    let shifted = std::mem::take(&mut pass.shifted);
    Ok((pass.finish(chained)?, shifted))
}

struct Pass<'a> {
    old: &'a Graph,
    /// Names of composites that read what was folded.
    shifted: HashSet<String>,
    folds: &'a [Fold],
    tensors: Vec<Tensor>,
    nodes: Vec<NodeParts>,
    /// New indices of the old graph's tensors.
    places: Vec<Option<usize>>,
    shifts: Vec<i32>,
    /// New indices of the tensors in their old size, if they differ.
    restored: Vec<Option<usize>>,
    /// Constants and weights by their old index and the exponent of the factor.
    stored: HashMap<(usize, i32), usize>,
}

impl Pass<'_> {
    fn node(&mut self, node: &Node) -> Result<()> {
        let at: Vec<usize> = node.inputs.iter().map(|id| id.index()).collect();
        let shift =
            |this: &Self, place: usize| at.get(place).map_or(0, |&index| this.shifts[index]);
        let first = shift(self, 0);
        let out = node.output.index();
        match (&node.op, &at[..]) {
            (Op::Linear, &[x, weight, ref bias @ ..]) => {
                let own = shift_of(self.old, node, self.folds);
                let to = if own > 0 { own } else { self.wanted(out) };
                let mut inputs = vec![self.place(x)?, self.stored(weight, first - to)?];
                for &bias in bias {
                    inputs.push(self.stored(bias, -to)?);
                }
                self.put(node, node.op.clone(), inputs, to)
            }
            (Op::RmsNorm { epsilon }, &[x, weight]) => {
                let to = self.wanted(out);
                let inputs = vec![self.place(x)?, self.stored(weight, -to)?];
                let epsilon = epsilon * power(-2 * first);
                self.put(node, Op::RmsNorm { epsilon }, inputs, to)
            }
            (Op::LayerNorm { epsilon }, &[x, weight, bias]) => {
                let to = self.wanted(out);
                let inputs =
                    vec![self.place(x)?, self.stored(weight, -to)?, self.stored(bias, -to)?];
                let epsilon = epsilon * power(-2 * first);
                self.put(node, Op::LayerNorm { epsilon }, inputs, to)
            }
            (Op::Binary(BinaryOp::Mul) | Op::MatMul { .. }, &[a, b]) => {
                let inputs = vec![self.place(a)?, self.place(b)?];
                self.put(node, node.op.clone(), inputs, first + shift(self, 1))
            }
            (Op::Binary(BinaryOp::Div), &[a, b]) => {
                let inputs = vec![self.place(a)?, self.place(b)?];
                self.put(node, node.op.clone(), inputs, first - shift(self, 1))
            }
            (Op::Binary(_), &[a, b]) => {
                let to = first.max(shift(self, 1));
                let inputs = vec![self.brought(a, to)?, self.brought(b, to)?];
                self.put(node, node.op.clone(), inputs, to)
            }
            (Op::Unary(op @ (UnaryOp::Silu | UnaryOp::Gelu | UnaryOp::GeluTanh)), &[x])
                if first != 0 =>
            {
                self.activation(node, *op, x)
            }
            (Op::Clamp { min, max }, &[x]) => {
                let op = Op::Clamp { min: min * power(-first), max: max * power(-first) };
                let inputs = vec![self.place(x)?];
                self.put(node, op, inputs, first)
            }
            (
                Op::Unary(UnaryOp::Abs | UnaryOp::Neg | UnaryOp::Relu)
                | Op::Reduce { .. }
                | Op::Reshape
                | Op::Transpose { .. }
                | Op::Slice { .. }
                | Op::Cast,
                &[x],
            ) => {
                let inputs = vec![self.place(x)?];
                self.put(node, node.op.clone(), inputs, first)
            }
            (Op::Gather, &[table, indices]) => {
                let inputs = vec![self.place(table)?, self.place(indices)?];
                self.put(node, node.op.clone(), inputs, first)
            }
            (op, _) => {
                let shifts = at.iter().any(|&index| self.shifts[index] != 0);
                if shifts && matches!(op, Op::Attention(_)) {
                    self.shifted.insert(node.name.clone());
                }
                let inputs = at.iter().map(|&index| self.brought(index, 0));
                let inputs = inputs.collect::<Result<_>>()?;
                self.put(node, node.op.clone(), inputs, 0)
            }
        }
    }

    /// The shift that a sum with this tensor has anyway; 0 where it is read in any other way.
    fn wanted(&self, index: usize) -> i32 {
        let is = |id: &TensorId| id.index() == index;
        let mut readers = self.old.nodes().iter().filter(|node| node.inputs.iter().any(is));
        match (readers.next(), readers.next()) {
            (Some(Node { op: Op::Binary(BinaryOp::Add | BinaryOp::Sub), inputs, .. }), None) => {
                let other = inputs.iter().find(|id| !is(id));
                other.map_or(0, |id| self.shifts[id.index()])
            }
            _ => 0,
        }
    }

    /// The tensor as it is.
    fn place(&mut self, index: usize) -> Result<usize> {
        match self.places.get(index).copied().flatten() {
            Some(place) => Ok(place),
            None => self.stored(index, 0),
        }
    }

    /// A constant or a weight, times 2^exponent.
    fn stored(&mut self, index: usize, exponent: i32) -> Result<usize> {
        if let Some(&place) = self.stored.get(&(index, exponent)) {
            return Ok(place);
        }
        let mut tensor = self.old.tensors()[index].clone();
        if exponent != 0 {
            let factor = power(exponent);
            tensor.name = format!("{}_fold{}", tensor.name, self.tensors.len());
            match &mut tensor.origin {
                Origin::Constant(Constant::Float(values)) => {
                    *values = values.iter().map(|value| value * factor).collect::<Arc<[f32]>>();
                }
                Origin::Weight(weight) => {
                    check(weight, factor)?;
                    let source = scaled(Arc::clone(weight.source()), factor);
                    *weight = Weight::new(source, weight.storage());
                }
                _ => return Err(misfit(self.old, &tensor)),
            }
        }
        self.tensors.push(tensor);
        self.stored.insert((index, exponent), self.tensors.len() - 1);
        Ok(self.tensors.len() - 1)
    }

    /// The tensor with this shift.
    fn brought(&mut self, index: usize, to: i32) -> Result<usize> {
        let by = self.shifts[index] - to;
        if by == 0 {
            return self.place(index);
        }
        match self.old.tensors()[index].origin {
            Origin::Constant(_) => return self.stored(index, by),
            _ if to == 0 => {
                if let Some(place) = self.restored[index] {
                    return Ok(place);
                }
            }
            _ => {}
        }
        let x = self.place(index)?;
        let made = self.times(x, power(by))?;
        if to == 0 {
            self.restored[index] = Some(made);
        }
        Ok(made)
    }

    /// Adds a node with the output of an old one.
    fn put(&mut self, node: &Node, op: Op, inputs: Vec<usize>, shift: i32) -> Result<()> {
        let out = node.output.index();
        let tensor = self.old.tensor(node.output)?.clone();
        self.places[out] = Some(self.tensors.len());
        self.shifts[out] = shift;
        self.add(node.name.clone(), op, inputs, tensor);
        Ok(())
    }

    fn add(&mut self, name: String, op: Op, inputs: Vec<usize>, mut tensor: Tensor) -> usize {
        let output = self.tensors.len();
        tensor.origin = Origin::Node(self.nodes.len());
        self.tensors.push(tensor);
        self.nodes.push(NodeParts { name, op, inputs, output });
        output
    }

    /// Adds a node whose output is like the tensor at `like`.
    fn like(&mut self, like: usize, op: Op, inputs: Vec<usize>) -> usize {
        let Tensor { name, elem, shape, origin } = self.tensors[like].clone();
        let name = format!("{name}_fold{}", self.tensors.len());
        self.add(name.clone(), op, inputs, Tensor { name, elem, shape, origin })
    }

    fn times(&mut self, x: usize, factor: f32) -> Result<usize> {
        let Tensor { elem, ref shape, .. } = self.tensors[x];
        if !matches!(elem, Elem::Activation | Elem::F32) {
            return Err(misfit(self.old, &self.tensors[x]));
        }
        let shape = vec![1; shape.len()];
        let origin = Origin::Constant(Constant::Float(Arc::from([factor])));
        let constant = self.tensors.len();
        self.tensors.push(Tensor { name: format!("fold{constant}"), elem, shape, origin });
        Ok(self.like(x, Op::Binary(BinaryOp::Mul), vec![x, constant]))
    }

    /// 2^−K · f(2^K · x) for an activation, which is the identity of large values and 0 of small ones:
    /// `relu(x) + 2^−K · (f(c) − relu(c))` with c = 2^K · x within the bounds of what is neither.
    fn activation(&mut self, node: &Node, op: UnaryOp, x: usize) -> Result<()> {
        let shift = self.shifts[x];
        let x = self.place(x)?;
        let bound = SATURATED * power(-shift);
        let bounded = self.like(x, Op::Clamp { min: -bound, max: bound }, vec![x]);
        let wide = self.times(bounded, power(shift))?;
        let made = self.like(x, Op::Unary(op), vec![wide]);
        let positive = self.like(x, Op::Unary(UnaryOp::Relu), vec![wide]);
        let rest = self.like(x, Op::Binary(BinaryOp::Sub), vec![made, positive]);
        let rest = self.times(rest, power(-shift))?;
        let positive = self.like(x, Op::Unary(UnaryOp::Relu), vec![x]);
        self.put(node, Op::Binary(BinaryOp::Add), vec![positive, rest], shift)
    }

    /// Brings the outputs back to their size, but for the `y` that a graph or the head reads.
    fn finish(mut self, chained: bool) -> Result<Folded> {
        let mut outputs = Vec::new();
        let mut y = 0;
        for id in self.old.outputs() {
            let (index, tensor) = (id.index(), self.old.tensor(*id)?);
            if tensor.name == "y" && chained {
                y = self.shifts[index];
                outputs.push(self.place(index)?);
                continue;
            }
            let place = self.brought(index, 0)?;
            if self.shifts[index] != 0 {
                let was = self.place(index)?;
                self.tensors[was].name = format!("{}_fold", tensor.name);
                self.tensors[place].name.clone_from(&tensor.name);
            }
            outputs.push(place);
        }
        let Self { old, tensors, nodes, shifts, restored, .. } = self;
        let graph = rebuild(old.name(), tensors, nodes, &outputs)?;
        Ok(Folded { graph, shifts, restored: restored.iter().map(Option::is_some).collect(), y })
    }
}

fn misfit(graph: &Graph, tensor: &Tensor) -> Error {
    let what = format!("graph {:?}: {tensor} cannot be multiplied", graph.name());
    Error::new(ErrorKind::Graph, what)
}

/// Errors when a weight times `factor` would have values that f16 does not hold, or holds in few steps.
fn check(weight: &Weight, factor: f32) -> Result<()> {
    let mut peak = 0f32;
    stream(&**weight.source(), |values| {
        peak = values.iter().fold(peak, |peak, value| peak.max(value.abs()));
        Ok(())
    })?;
    let (now, least) = match weight.storage() {
        // Its scales are f32.
        Storage::Int8 => return Ok(()),
        Storage::Float => (peak * factor, MIN_FLOAT),
        Storage::Blocks(_) => (peak * factor, MIN_BLOCKS),
    };
    let small = factor < 1.0 && peak > 0.0 && now < least;
    if !small && now < qhx_graph::weight::F16_OVERFLOW {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Usage,
        format!(
            "tensor {}: its largest value {peak} times {factor} is {now}, which f16 {}",
            weight.source().name(),
            if small { "holds in few steps" } else { "does not hold" }
        ),
    )
    .hint("fold a smaller power of two; a bundle for the CPU only needs none"))
}
