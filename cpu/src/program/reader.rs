//! Cuts an ONNX graph at its products with stored weights.
//!
//! rten widens weights to f32 when it loads them. So the products leave the graph, and what lies between them becomes
//! models of their own. A model's nodes are those with as many products before them on the longest way from the
//! inputs; [`crate::steps`] executes them in this order. Recognised are the forms that the forge writes: `Gemm` with
//! `transB` over f32, over f16 with `Cast`, over int8 with `DequantizeLinear` and a scale for each row or, with a `Reshape`,
//! for blocks of 32 or a multiple, and `MatMulNBits` of ONNX Runtime with four bits in blocks of 32, also where the blocks' offsets
//! are a term of their own. So are products of a few rows with a cache, an input of
//! the graph, by `MatMul` with it or with its `Transpose`. Everything else stays with rten.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use qhx_core::artifacts::Mapped;
use rten_onnx::onnx::{
    DataLocation, DataType, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto,
    TypeProtoTensor, ValueInfoProto,
};

use crate::kernels::BLOCK;
use crate::weights::{Floats, Form, Stored, Weights};

/// A graph in parts, in the order of their execution.
#[derive(Default)]
pub(crate) struct Cut<'a> {
    pub(crate) steps: Vec<Step<'a>>,
    /// The model without nodes, which describes inputs and outputs.
    pub(crate) frame: ModelProto,
}

/// A model, and then products of what is known by then.
#[derive(Default)]
pub(crate) struct Step<'a> {
    /// `None` where nothing is between two products.
    pub(crate) model: Option<ModelProto>,
    pub(crate) products: Vec<Product<'a>>,
}

/// `y` is the product of `x` with a matrix.
pub(crate) struct Product<'a> {
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
    pub(crate) by: Factor<'a>,
}

/// What is multiplied with.
pub(crate) enum Factor<'a> {
    /// `x · weightsᵀ + bias`.
    Stored(Box<Weights>, Option<Floats>),
    /// `x[h] · b[h]ᵀ` for each head, where an input of the graph is `b` `[heads, n, k]`.
    Rows(&'a str),
    /// `x[h] · b[h]` for each head, where an input of the graph is `b` `[heads, k, n]`.
    Columns(&'a str),
}

/// Rows of `x` up to which a product with an input of the graph leaves it. rten brings all of the input into another
/// order first, which pays for many.
const FEW: usize = 8;
const BLOCK_I64: i64 = BLOCK as i64;

/// The parts of a model, whose external data lies in `files`, or `None` where rten has to execute all of it.
pub(crate) fn cut<'a>(model: &'a ModelProto, files: &HashMap<String, Mapped>) -> Option<Cut<'a>> {
    if cfg!(target_endian = "big") {
        return None;
    }
    let graph = model.graph.as_ref()?;
    let reader = Reader::new(graph, files)?;
    let levels = Levels::new(&reader)?;
    if levels.products.is_empty() {
        return None;
    }
    let constant = |name: &str| levels.places[reader.producers[name]] == Place::Constant;
    if graph.output.iter().filter_map(|o| o.name.as_deref()).any(constant) {
        return None;
    }
    let used = uses(graph, &levels);
    let mut steps = Vec::new();
    for level in 0..levels.count {
        let nodes: Vec<usize> = (0..graph.node.len())
            .filter(|&at| levels.places[at] == Place::Model(level) && used.live[at])
            .collect();
        let model = (!nodes.is_empty()).then(|| part(model, &reader, &levels, &used, &nodes));
        steps.push(Step { model, products: Vec::new() });
    }
    for (at, product) in levels.products {
        if let Place::Product(level) = levels.places[at]
            && used.live[at]
        {
            steps.get_mut(level)?.products.push(product);
        }
    }
    Some(Cut { steps, frame: frame(model) })
}

/// The model without nodes, which describes inputs and outputs.
pub(crate) fn frame(model: &ModelProto) -> ModelProto {
    let graph = model.graph.as_ref().map(|graph| GraphProto {
        input: graph.input.clone(),
        output: graph.output.clone(),
        ..Default::default()
    });
    around(model, graph.unwrap_or_default())
}

/// What names stand for in a graph.
pub(crate) struct Reader<'a, 'f> {
    pub(crate) graph: &'a GraphProto,
    pub(crate) initializers: HashMap<&'a str, &'a TensorProto>,
    pub(crate) producers: HashMap<&'a str, usize>,
    files: &'f HashMap<String, Mapped>,
    shapes: Shapes<'a>,
}

impl<'a, 'f> Reader<'a, 'f> {
    /// `None` for graphs with names that mean two things, or with graphs in them.
    pub(crate) fn new(graph: &'a GraphProto, files: &'f HashMap<String, Mapped>) -> Option<Self> {
        let mut reader = Self {
            graph,
            initializers: HashMap::new(),
            producers: HashMap::new(),
            files,
            shapes: Shapes::default(),
        };
        let mut names = HashSet::new();
        for input in &graph.input {
            names.insert(input.name.as_deref()?).then_some(())?;
        }
        for tensor in &graph.initializer {
            let name = tensor.name.as_deref()?;
            names.insert(name).then_some(())?;
            reader.initializers.insert(name, tensor);
        }
        for (at, node) in graph.node.iter().enumerate() {
            node.attribute.iter().all(|attribute| attribute.g.is_none()).then_some(())?;
            for output in node.output.iter().filter(|name| !name.is_empty()) {
                names.insert(output).then_some(())?;
                reader.producers.insert(output, at);
            }
        }
        reader.shapes = Shapes::new(graph, &reader.initializers);
        let produced = |name: &str| reader.producers.contains_key(name);
        graph.output.iter().all(|o| o.name.as_deref().is_some_and(produced)).then_some(reader)
    }

    pub(crate) fn product(&self, node: &'a NodeProto) -> Option<Product<'a>> {
        let [y] = node.output.as_slice() else { return None };
        let x = node.input.first()?;
        let inputs: Vec<&str> = node.input.iter().map(String::as_str).collect();
        let by = match (domain(node), node.op_type.as_deref()?, &inputs[..]) {
            ("", "Gemm", [_, w, bias @ ..]) => {
                let plain = integer(node, "transB") == Some(1)
                    && node.attribute.iter().all(|a| match a.name.as_deref() {
                        Some("transB") => true,
                        Some("transA") => a.i == Some(0),
                        Some("alpha" | "beta") => a.f == Some(1.0),
                        _ => false,
                    });
                let weights = plain.then(|| self.weights(w)).flatten()?;
                let bias = match bias {
                    [] | [""] => None,
                    [bias] => Some(self.floats(bias, &[weights.rows])?),
                    _ => return None,
                };
                Factor::Stored(Box::new(weights), bias)
            }
            ("", "Add", [product, shift]) => return self.shifted(y, product, shift),
            ("com.microsoft", "MatMulNBits", [_, w, scales]) => {
                Factor::Stored(Box::new(self.bits(node, w, scales)?), None)
            }
            ("", "MatMul", [x, b]) => {
                let [_, Some(1..=FEW), _] = *self.shapes.known.get(x)?.as_slice() else {
                    return None;
                };
                self.cache(b)?
            }
            _ => return None,
        };
        Some(Product { x, y, by })
    }

    /// The node of this kind that makes a value.
    pub(crate) fn made_by(&self, name: &str, kind: &str) -> Option<&'a NodeProto> {
        let node = self.graph.node.get(*self.producers.get(name)?)?;
        (domain(node).is_empty() && node.op_type.as_deref() == Some(kind)).then_some(node)
    }

    /// The product of four bits to which a term is added that the offsets of their blocks make: the sums of the blocks of
    /// `x` times the offsets.
    fn shifted(&self, y: &'a str, product: &str, shift: &str) -> Option<Product<'a>> {
        let product = self.graph.node.get(*self.producers.get(product)?)?;
        if (domain(product), product.op_type.as_deref()) != ("com.microsoft", Some("MatMulNBits")) {
            return None;
        }
        let Product { x, by: Factor::Stored(mut weights, None), .. } = self.product(product)?
        else {
            return None;
        };
        let [sums, offsets] = self.made_by(shift, "MatMul")?.input.as_slice() else { return None };
        let sum = self.made_by(sums, "ReduceSum")?;
        let [parts, axes] = sum.input.as_slice() else { return None };
        let [from, shape] = self.made_by(parts, "Reshape")?.input.as_slice() else { return None };
        let constant = |name: &str| integers(self.initializers.get(name)?);
        let blocks = weights.columns / BLOCK;
        let of_blocks = from == x
            && constant(axes)? == [2]
            && integer(sum, "keepdims") == Some(0)
            && matches!(*constant(shape)?, [_, n, BLOCK_I64] if usize::try_from(n) == Ok(blocks));
        of_blocks.then_some(())?;
        weights.offsets = Some(self.floats(offsets, &[blocks, weights.rows])?);
        Some(Product { x, y, by: Factor::Stored(weights, None) })
    }

    /// An input of the graph with three dimensions and elements of f32, or its transposed matrices.
    fn cache(&self, name: &'a str) -> Option<Factor<'a>> {
        let is_cache = |name: &str| {
            let float = |info: &ValueInfoProto| {
                let tensor = info.r#type.as_ref()?.tensor_type.as_ref()?;
                Some(tensor.elem_type? == DataType::FLOAT)
            };
            let mut inputs = self.graph.input.iter();
            inputs.any(|i| i.name.as_deref() == Some(name) && float(i) == Some(true))
                && self.shapes.known.get(name).is_some_and(|shape| shape.len() == 3)
        };
        if is_cache(name) {
            return Some(Factor::Columns(name));
        }
        let node = self.graph.node.get(*self.producers.get(name)?)?;
        let swaps = domain(node).is_empty()
            && node.op_type.as_deref() == Some("Transpose")
            && node
                .attribute
                .iter()
                .any(|a| a.name.as_deref() == Some("perm") && a.ints == [0, 2, 1]);
        let source = node.input.first()?;
        (swaps && is_cache(source)).then_some(Factor::Rows(source))
    }

    /// A matrix that is stored, or that a node widens.
    fn weights(&self, name: &str) -> Option<Weights> {
        if let Some(tensor) = self.initializers.get(name) {
            return self.matrix(tensor, DataType::FLOAT, 4, |_| Some(Form::F32));
        }
        if let Some(node) = self.made_by(name, "Reshape") {
            return self.blocks(node);
        }
        let node = self.graph.node.get(*self.producers.get(name)?)?;
        let source = self.initializers.get(node.input.first()?.as_str())?;
        match (domain(node), node.op_type.as_deref()?, node.input.as_slice()) {
            ("", "Cast", [_]) => {
                let float = integer(node, "to") == Some(i64::from(DataType::FLOAT.0));
                float.then(|| self.matrix(source, DataType::FLOAT16, 2, |_| Some(Form::F16)))?
            }
            ("", "DequantizeLinear", [_, scales]) => {
                let rows = integer(node, "axis") == Some(0)
                    && node.attribute.iter().all(|a| a.name.as_deref() == Some("axis"));
                let form = |rows| self.floats(scales, &[rows]).map(Form::I8);
                rows.then(|| self.matrix(source, DataType::INT8, 1, form))?
            }
            _ => None,
        }
    }

    /// int8 with a scale for each block, which a node dequantizes and another brings into the shape of a matrix.
    fn blocks(&self, node: &NodeProto) -> Option<Weights> {
        let [wide, shape] = node.input.as_slice() else { return None };
        let shape = integers(self.initializers.get(shape.as_str())?)?;
        let [rows, columns] = shape.as_slice() else { return None };
        let (rows, columns) = (positive(*rows)?, positive(*columns)?);
        self.made_by(wide, "DequantizeLinear")?;
        let Weights { rows: count, columns: block, form: Form::I8(scales), stored, .. } =
            self.weights(wide)?
        else {
            return None;
        };
        let fits = block.is_multiple_of(BLOCK)
            && columns.is_multiple_of(block)
            && (columns / block).checked_mul(rows) == Some(count);
        // Longer blocks are several with equal scales.
        let scales = match block / BLOCK {
            1 => scales,
            pieces => {
                let scales = scales.get().iter();
                Floats::Own(scales.flat_map(|scale| std::iter::repeat_n(*scale, pieces)).collect())
            }
        };
        let form = Form::I8Blocks(scales);
        fits.then_some(Weights { rows, columns, form, stored, offsets: None })
    }

    fn matrix(
        &self,
        tensor: &TensorProto,
        dtype: DataType,
        size: usize,
        form: impl FnOnce(usize) -> Option<Form>,
    ) -> Option<Weights> {
        let [rows, columns] = *tensor.dims.as_slice() else { return None };
        let (rows, columns) = (positive(rows)?, positive(columns)?);
        let bytes = rows.checked_mul(columns)?.checked_mul(size)?;
        let stored = self.stored(tensor, dtype, bytes, size)?;
        Some(Weights { rows, columns, form: form(rows)?, stored, offsets: None })
    }

    /// The weights of a `MatMulNBits`.
    fn bits(&self, node: &NodeProto, w: &str, scales: &str) -> Option<Weights> {
        let (rows, columns) = (positive(integer(node, "N")?)?, positive(integer(node, "K")?)?);
        let blocks = columns / BLOCK;
        let known = integer(node, "bits") == Some(4)
            && integer(node, "block_size") == Some(BLOCK as i64)
            && columns.is_multiple_of(BLOCK);
        let tensor = self.initializers.get(w)?;
        let dims = [rows, blocks, BLOCK / 2].map(|n| n as i64);
        if !known || tensor.dims != dims {
            return None;
        }
        let bytes = rows.checked_mul(columns)? / 2;
        let stored = self.stored(tensor, DataType::UINT8, bytes, 4)?;
        let flat = rows.checked_mul(blocks)?;
        let scales =
            self.floats(scales, &[rows, blocks]).or_else(|| self.floats(scales, &[flat]))?;
        Some(Weights { rows, columns, form: Form::I4(scales), stored, offsets: None })
    }

    /// External data of so many bytes.
    fn stored(
        &self,
        tensor: &TensorProto,
        dtype: DataType,
        bytes: usize,
        align: usize,
    ) -> Option<Stored> {
        let external = tensor.data_location == Some(DataLocation::EXTERNAL);
        if !external || tensor.data_type != Some(dtype) {
            return None;
        }
        let entry = |key: &str| {
            let entry = tensor.external_data.iter().find(|e| e.key.as_deref() == Some(key))?;
            entry.value.as_deref()
        };
        let offset = entry("offset").map_or(Some(0), |text| text.parse().ok())?;
        let length: usize = entry("length").map_or(Some(bytes), |text| text.parse().ok())?;
        let range = Range { start: offset, end: bytes.checked_add(offset)? };
        (length == bytes).then(|| Stored::new(self.files.get(entry("location")?)?, range, align))?
    }

    /// A constant of f32, stored or in the model, or one of f16 that a node widens.
    pub(crate) fn floats(&self, name: &str, shape: &[usize]) -> Option<Floats> {
        let tensor = self.initializers.get(name)?;
        let dims: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        let bytes = shape.iter().try_fold(4usize, |bytes, n| bytes.checked_mul(*n))?;
        if tensor.dims != dims || tensor.data_type != Some(DataType::FLOAT) {
            return None;
        }
        if let Some(stored) = self.stored(tensor, DataType::FLOAT, bytes, 4) {
            return Some(Floats::Stored(stored));
        }
        let raw = tensor.raw_data.as_ref()?.borrow();
        let values = raw.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        (raw.len() == bytes).then(|| Floats::Own(values.collect()))
    }
}

/// What is known of the shapes of values, as far as attention needs it. A dimension may be unknown.
#[derive(Default)]
struct Shapes<'a> {
    known: HashMap<&'a str, Vec<Option<usize>>>,
}

impl<'a> Shapes<'a> {
    fn new(graph: &'a GraphProto, initializers: &HashMap<&'a str, &'a TensorProto>) -> Self {
        let mut known = HashMap::new();
        for info in &graph.input {
            let tensor = info.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
            let Some(shape) = tensor.and_then(|t| t.shape.as_ref()) else { continue };
            let sizes = shape.dim.iter().map(|dim| dim.dim_value.and_then(positive)).collect();
            known.extend(info.name.as_deref().map(|name| (name, sizes)));
        }
        for (name, tensor) in initializers {
            known.insert(name, tensor.dims.iter().map(|&size| positive(size)).collect());
        }
        let mut shapes = Self { known };
        for node in graph.node.iter().filter(|node| domain(node).is_empty()) {
            if let (Some(shape), [name, ..]) =
                (shapes.of(node, initializers), node.output.as_slice())
            {
                shapes.known.insert(name, shape);
            }
        }
        shapes
    }

    fn of(
        &self,
        node: &NodeProto,
        initializers: &HashMap<&'a str, &'a TensorProto>,
    ) -> Option<Vec<Option<usize>>> {
        let input = |at: usize| self.known.get(node.input.get(at)?.as_str());
        let integers = |at: usize| integers(initializers.get(node.input.get(at)?.as_str())?);
        // An axis whose size is not followed.
        let without = |axis: i64| {
            let mut shape = input(0)?.clone();
            let from_end = if axis < 0 { i64::try_from(shape.len()).ok()? } else { 0 };
            *shape.get_mut(usize::try_from(axis + from_end).ok()?)? = None;
            Some(shape)
        };
        match node.op_type.as_deref()? {
            "Reshape" => Some(integers(1)?.into_iter().map(positive).collect()),
            "Softmax" => input(0).cloned(),
            "Slice" => match integers(3)?.as_slice() {
                [axis] => without(*axis),
                _ => None,
            },
            "Concat" => without(integer(node, "axis")?),
            "Add" => {
                let (a, b) = (input(0)?, input(1)?);
                let (long, short) = if a.len() < b.len() { (b, a) } else { (a, b) };
                let ones = std::iter::repeat_n(Some(1), long.len() - short.len());
                let pairs = long.iter().zip(ones.chain(short.iter().copied()));
                let size = |(a, b): (&Option<usize>, Option<usize>)| match (*a, b) {
                    (size, Some(1)) | (Some(1), size) => size,
                    (a, b) => a.filter(|_| a == b),
                };
                Some(pairs.map(size).collect())
            }
            "MatMul" => {
                let [heads, rows, _] = *input(0)?.as_slice() else { return None };
                (input(1)?.len() <= 3).then(|| vec![heads, rows, None])
            }
            "Transpose" => {
                let perm = node.attribute.iter().find(|a| a.name.as_deref() == Some("perm"))?;
                let from = input(0)?;
                perm.ints
                    .iter()
                    .map(|&axis| from.get(usize::try_from(axis).ok()?).copied())
                    .collect()
            }
            _ => None,
        }
    }
}

/// A constant of int64.
pub(crate) fn integers(tensor: &TensorProto) -> Option<Vec<i64>> {
    if tensor.data_type != Some(DataType::INT64)
        || tensor.data_location == Some(DataLocation::EXTERNAL)
    {
        return None;
    }
    let raw = tensor.raw_data.as_ref()?.borrow();
    let (whole, rest) = raw.as_chunks::<8>();
    rest.is_empty().then(|| whole.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
}

/// Where a node is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In each model that needs it: it depends on no input.
    Constant,
    Model(usize),
    Product(usize),
}

struct Levels<'a> {
    places: Vec<Place>,
    products: Vec<(usize, Product<'a>)>,
    count: usize,
}

impl<'a> Levels<'a> {
    /// `None` where a node needs what comes after it.
    fn new(reader: &Reader<'a, '_>) -> Option<Self> {
        let graph = reader.graph;
        let inputs = graph.input.iter().filter_map(|input| Some((input.name.as_deref()?, Some(0))));
        // The level of each name; none for constants.
        let mut known: HashMap<&str, Option<usize>> = inputs.collect();
        known.extend(reader.initializers.keys().map(|name| (*name, None)));
        let mut levels = Self { places: Vec::new(), products: Vec::new(), count: 1 };
        for (at, node) in graph.node.iter().enumerate() {
            let mut level = None;
            for input in node.input.iter().filter(|name| !name.is_empty()) {
                level = level.max(*known.get(input.as_str())?);
            }
            let constant = level.is_none()
                && (!node.input.is_empty() || node.op_type.as_deref() == Some("Constant"));
            let own = level.unwrap_or(0);
            let product = if level.is_some() { reader.product(node) } else { None };
            let (place, result) = match product {
                Some(product) => {
                    levels.products.push((at, product));
                    (Place::Product(own), Some(own + 1))
                }
                None if constant => (Place::Constant, None),
                None => (Place::Model(own), Some(own)),
            };
            levels.count = levels.count.max(result.unwrap_or(0) + 1);
            levels.places.push(place);
            known.extend(node.output.iter().map(|name| (name.as_str(), result)));
        }
        Some(levels)
    }
}

/// What is used by whom.
struct Uses<'a> {
    /// The nodes that a result needs.
    live: Vec<bool>,
    /// Names that are results, or inputs of products or of more than one model, or of another than makes them.
    crossing: HashSet<&'a str>,
}

fn uses<'a>(graph: &'a GraphProto, levels: &Levels<'a>) -> Uses<'a> {
    let mut needed: HashSet<&str> = graph.output.iter().filter_map(|o| o.name.as_deref()).collect();
    let mut crossing = needed.clone();
    let mut places: HashMap<&str, Place> = HashMap::new();
    for (node, place) in graph.node.iter().zip(&levels.places) {
        places.extend(node.output.iter().map(|name| (name.as_str(), *place)));
    }
    let products: HashMap<usize, &Product<'_>> =
        levels.products.iter().map(|(at, product)| (*at, product)).collect();
    let mut live = vec![false; graph.node.len()];
    for (at, node) in graph.node.iter().enumerate().rev() {
        live[at] = node.output.iter().any(|name| needed.contains(name.as_str()));
        if !live[at] {
            continue;
        }
        if let Some(product) = products.get(&at) {
            needed.insert(product.x);
            crossing.insert(product.x);
            continue;
        }
        for name in node.input.iter().map(String::as_str) {
            needed.insert(name);
            if places.get(name).is_some_and(|place| *place != levels.places[at]) {
                crossing.insert(name);
            }
        }
    }
    Uses { live, crossing }
}

/// A model of these nodes, with the constants that they need.
fn part(
    model: &ModelProto,
    reader: &Reader<'_, '_>,
    levels: &Levels<'_>,
    used: &Uses<'_>,
    nodes: &[usize],
) -> ModelProto {
    let graph = reader.graph;
    let mut members: HashSet<usize> = nodes.iter().copied().collect();
    let (mut inputs, mut constants) = (Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    let mut open: Vec<usize> = nodes.to_vec();
    while let Some(at) = open.pop() {
        for name in graph.node[at].input.iter().map(String::as_str) {
            if name.is_empty() || !seen.insert(name) {
                continue;
            }
            match (reader.initializers.get(name), reader.producers.get(name)) {
                (Some(tensor), _) => constants.push((*tensor).clone()),
                (_, Some(&from)) if levels.places[from] == Place::Constant => {
                    if members.insert(from) {
                        open.push(from);
                    }
                }
                (_, Some(from)) if members.contains(from) => {}
                _ => inputs.push(name),
            }
        }
    }
    let mut members: Vec<usize> = members.into_iter().collect();
    members.sort_unstable();
    inputs.sort_unstable();
    let outputs = nodes.iter().flat_map(|&at| &graph.node[at].output);
    let outputs = outputs.filter(|name| used.crossing.contains(name.as_str()));
    around(
        model,
        GraphProto {
            node: members.iter().map(|&at| graph.node[at].clone()).collect(),
            initializer: constants,
            input: inputs.into_iter().map(|name| value_info(reader, levels, name)).collect(),
            output: outputs.map(|name| value_info(reader, levels, name)).collect(),
            value_info: Vec::new(),
        },
    )
}

/// What is known of a value.
fn value_info(reader: &Reader<'_, '_>, levels: &Levels<'_>, name: &str) -> ValueInfoProto {
    let graph = reader.graph;
    let mut declared = graph.input.iter().chain(&graph.output).chain(&graph.value_info);
    if let Some(info) = declared.find(|info| info.name.as_deref() == Some(name)) {
        return info.clone();
    }
    let product = reader.producers.get(name).map(|&at| levels.places[at]);
    let float = matches!(product, Some(Place::Product(_))).then(|| TypeProto {
        tensor_type: Some(TypeProtoTensor {
            elem_type: Some(DataType::FLOAT),
            ..TypeProtoTensor::default()
        }),
        ..TypeProto::default()
    });
    ValueInfoProto { name: Some(name.to_owned()), r#type: float }
}

/// `graph` as a model with the versions of `model`.
fn around(model: &ModelProto, graph: GraphProto) -> ModelProto {
    ModelProto {
        ir_version: model.ir_version,
        opset_import: model.opset_import.clone(),
        graph: Some(graph),
        ..ModelProto::default()
    }
}

pub(crate) fn domain(node: &NodeProto) -> &str {
    match node.domain.as_deref() {
        None | Some("ai.onnx") => "",
        Some(domain) => domain,
    }
}

pub(crate) fn integer(node: &NodeProto, name: &str) -> Option<i64> {
    node.attribute.iter().find(|a| a.name.as_deref() == Some(name))?.i
}

fn positive(size: i64) -> Option<usize> {
    usize::try_from(size).ok().filter(|size| *size > 0)
}
