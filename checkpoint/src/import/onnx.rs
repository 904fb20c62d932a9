//! ONNX files of other programs, as PyTorch exports them: their weights, under the names that the modules had.
//!
//! The exporter renames weights that it computed, such as those with weight norm, to `onnx::Conv_8168`, and one that
//! stands in the place of an input to that input's name. A weight without a module's name gets the one of the bias that
//! stands beside it, or of its node: `/flow/flows.0/post/Conv` is `flow.flows.0.post`. Numbers that it computed for
//! other nodes are called as these: `dp.flows.0.Exp`. What a convolution does beside its weights, its strides and
//! dilations, is no weight and is reported with them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use qhx_base::artifacts::Mapped;
use qhx_graph::onnx::{Field, Message};
use safetensors::tensor::Dtype;
use serde_json::{Map, Value, json};

use super::torch::Found;

/// Initializers, and nodes, that a file may have.
const MAX_COUNT: usize = 1 << 18;
/// Dimensions of a tensor.
const MAX_RANK: usize = 8;
/// Data types of ONNX that are read.
const TYPES: [(u64, Dtype, usize); 3] =
    [(1, Dtype::F32, 4), (10, Dtype::F16, 2), (16, Dtype::BF16, 2)];
/// Node types whose second input is a module's weight.
const CONVOLUTIONS: [&str; 2] = ["Conv", "ConvTranspose"];
const WEIGHT: &str = ".weight";
const BIAS: &str = ".bias";
/// Beginning of the names of what the exporter computed.
const COMPUTED: &str = "onnx::";

type Read<T> = std::result::Result<T, String>;

/// Contents of a file.
#[derive(Debug, Default)]
pub(crate) struct Model {
    pub(crate) tensors: Vec<Found>,
    /// Strides, dilations, pads and groups of convolutions by the names of their modules.
    pub(crate) convolutions: Map<String, Value>,
}

/// The parts of a node.
#[derive(Debug, Default)]
struct Node {
    kind: String,
    name: String,
    inputs: Vec<String>,
    numbers: Map<String, Value>,
}

/// Reads the weights of a file.
pub(crate) fn read(file: &Mapped) -> Read<Model> {
    let mut message = Message::new(file.clone());
    let (mut nodes, mut found) = (Vec::new(), BTreeMap::new());
    let mut is_model = false;
    while let Some(field) = message.next_field()? {
        if field.number == 7 {
            is_model = true;
            let mut graph = message.within(field.bytes);
            while let Some(Field { number, bytes, .. }) = graph.next_field()? {
                match number {
                    1 => nodes.push(node(graph.within(bytes))?),
                    5 => {
                        if let Some(tensor) = initializer(graph.within(bytes))? {
                            found.insert(tensor.name.clone(), tensor);
                        }
                    }
                    _ => {}
                }
                if nodes.len().max(found.len()) > MAX_COUNT {
                    return Err(format!("more than {MAX_COUNT} nodes or initializers"));
                }
            }
        }
    }
    if !is_model {
        return Err("no graph, expected an ONNX model".to_owned());
    }
    let mut model = Model::default();
    let mut names = HashMap::new();
    for node in &nodes {
        for input in node.inputs.iter().filter(|input| input.starts_with(COMPUTED)) {
            names.extend(node.path().map(|path| (input.clone(), format!("{path}.{}", node.kind))));
        }
        let Some((input, module)) = node.weight() else { continue };
        if !found.contains_key(input) {
            continue;
        }
        if CONVOLUTIONS.contains(&node.kind.as_str()) {
            model.convolutions.insert(module.clone(), Value::Object(node.numbers.clone()));
        }
        names.insert(input.to_owned(), format!("{module}{WEIGHT}"));
    }
    for (name, tensor) in &found {
        let own = names.get(name).filter(|own| !found.contains_key(*own));
        model.tensors.push(Found { name: own.unwrap_or(name).clone(), ..tensor.clone() });
    }
    Ok(model)
}

impl Node {
    /// The input that is a module's weight, and the name of the module.
    fn weight(&self) -> Option<(&str, String)> {
        let at = match self.kind.as_str() {
            kind if CONVOLUTIONS.contains(&kind) => 1,
            "Gather" => 0,
            _ => return None,
        };
        let input = self.inputs.get(at)?;
        let named =
            |end: &str, at: usize| self.inputs.get(at)?.strip_suffix(end).map(str::to_owned);
        let module = named(WEIGHT, at)
            .or_else(|| named(BIAS, 2).filter(|_| at == 1))
            .or_else(|| self.path())?;
        Some((input, module))
    }

    /// Name of the module that the node belongs to.
    fn path(&self) -> Option<String> {
        let (path, _) = self.name.strip_prefix('/')?.rsplit_once('/')?;
        Some(path.replace('/', "."))
    }
}

// Field numbers of <https://github.com/onnx/onnx/blob/main/onnx/onnx.proto>.

fn node(mut message: Message) -> Read<Node> {
    let mut node = Node::default();
    while let Some(field) = message.next_field()? {
        match field.number {
            1 => node.inputs.push(message.text(field.bytes)?.to_owned()),
            3 => message.text(field.bytes)?.clone_into(&mut node.name),
            4 => message.text(field.bytes)?.clone_into(&mut node.kind),
            5 => {
                if let Some((name, value)) = attribute(message.within(field.bytes))? {
                    node.numbers.insert(name, value);
                }
            }
            _ => {}
        }
    }
    Ok(node)
}

/// Name and value of an attribute that is an integer or several.
fn attribute(mut message: Message) -> Read<Option<(String, Value)>> {
    let (mut name, mut one, mut several) = (String::new(), None, Vec::new());
    while let Some(field) = message.next_field()? {
        match field.number {
            1 => message.text(field.bytes)?.clone_into(&mut name),
            3 => one = Some(field.integer),
            8 => several.extend(message.integers(&field)?),
            _ => {}
        }
    }
    let value = match (one, several.is_empty()) {
        (_, false) => Some(json!(several)),
        (Some(one), true) => Some(json!(one)),
        (None, true) => None,
    };
    Ok(value.map(|value| (name, value)))
}

/// A tensor of floats with one dimension at least; none for other ones, which are no weights.
fn initializer(mut message: Message) -> Read<Option<Found>> {
    let (mut name, mut shape, mut kind) = (String::new(), Vec::new(), 0);
    let (mut bytes, mut external) = (None::<Range<usize>>, false);
    while let Some(field) = message.next_field()? {
        match field.number {
            1 => shape.extend(message.integers(&field)?),
            2 => kind = field.integer,
            8 => message.text(field.bytes)?.clone_into(&mut name),
            // Raw data, and packed floats, whose bytes are the same.
            4 | 9 => bytes = Some(field.bytes),
            14 => external = field.integer == 1,
            _ => {}
        }
    }
    let Some((_, dtype, size)) = TYPES.into_iter().find(|(known, ..)| *known == kind) else {
        return Ok(None);
    };
    if shape.is_empty() {
        return Ok(None);
    }
    if external {
        return Err(format!(
            "tensor {name:?} lies in another file, expected weights in the file itself"
        ));
    }
    let shape: Option<Vec<usize>> = shape.into_iter().map(|n| usize::try_from(n).ok()).collect();
    let shape = shape.filter(|shape| shape.len() <= MAX_RANK);
    let expected =
        shape.as_ref().and_then(|shape| shape.iter().try_fold(size, |n, d| n.checked_mul(*d)));
    let bytes = bytes.unwrap_or_default();
    let (Some(shape), true) = (shape, expected == Some(bytes.len())) else {
        return Err(format!("tensor {name:?} has {} bytes, expected {expected:?}", bytes.len()));
    };
    Ok(Some(Found { name, dtype, shape, bytes }))
}
