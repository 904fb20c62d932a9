//! ONNX files of other programs, as PyTorch exports them: their weights, under the names that the modules had.
//!
//! The exporter renames weights that it computed, such as those with weight norm, to `onnx::Conv_8168`, and one that
//! stands in the place of an input to that input's name. A weight without a module's name gets the one of the bias that
//! stands beside it or is added next, or of its node: `/flow/flows.0/post/Conv` is `flow.flows.0.post`. Numbers that it
//! computed for other nodes are called as these: `dp.flows.0.Exp`. Weights that several modules have alike are in the
//! file once. Linear layers are stored with inputs first, and have outputs first here; LSTMs are called as their
//! parameters ([`laid`]). Weights that onnxruntime quantized to 8 bits (`NAME_quantized`) have their names, and the
//! values that they stand for.
//!
//! The sizes of a model that no weight shows are reported with them: strides and dilations of convolutions; how often a
//! linear layer is used, and what its outputs are reshaped to.

mod laid;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use qhx_base::artifacts::Mapped;
use qhx_graph::onnx::{Field, Message};
use safetensors::tensor::Dtype;
use serde_json::{Map, Value, json};

use super::torch::Found;
pub(crate) use laid::Laid;

/// Initializers, and nodes, that a file may have.
const MAX_COUNT: usize = 1 << 18;
/// Dimensions of a tensor.
const MAX_RANK: usize = 8;
/// Elements of a constant that is a shape, at most.
const MAX_SHAPE: usize = 16;
/// Nodes that are looked at among those that take a tensor.
const MAX_TAKERS: usize = 64;
/// Data types of ONNX that are read.
const TYPES: [(u64, Dtype, usize); 6] = [
    (1, Dtype::F32, 4),
    (10, Dtype::F16, 2),
    (16, Dtype::BF16, 2),
    (2, Dtype::U8, 1),
    (3, Dtype::I8, 1),
    (7, Dtype::I64, 8),
];
/// Those of weights as a module has them.
const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];
/// Node types whose second input is a module's weight.
const CONVOLUTIONS: [&str; 3] = ["Conv", "ConvTranspose", "ConvInteger"];
const LINEAR: [&str; 3] = ["MatMul", "MatMulInteger", "Gemm"];
const LSTMS: [&str; 2] = ["LSTM", "DynamicQuantizeLSTM"];
/// Nodes between the product of quantized values and the bias.
const SCALING: [&str; 2] = ["Cast", "Mul"];
const WEIGHT: &str = ".weight";
const BIAS: &str = ".bias";
/// Beginning of the names of what the exporter computed.
const COMPUTED: &str = "onnx::";
/// End of the names of what onnxruntime quantized.
const QUANTIZED: &str = "_quantized";

type Read<T> = std::result::Result<T, String>;

/// Contents of a file.
#[derive(Debug, Default)]
pub(crate) struct Model {
    pub(crate) tensors: Vec<Found>,
    pub(crate) laid: Vec<(String, Laid)>,
    /// Strides, dilations, pads and groups of convolutions by the names of their modules.
    pub(crate) convolutions: Map<String, Value>,
    /// Linear layers: `uses`, and `reshaped`, the last sizes that outputs are reshaped to; -1 for the rest.
    pub(crate) linears: Map<String, Value>,
}

/// The parts of a node.
#[derive(Debug, Default)]
struct Node {
    kind: String,
    name: String,
    inputs: Vec<String>,
    output: String,
    numbers: Map<String, Value>,
    /// Integers that a node `Constant` has.
    constant: Vec<i64>,
}

/// A tensor of the file.
#[derive(Debug, Clone)]
struct Initial {
    found: Found,
    /// Values of small integers that are not bytes of their own.
    integers: Vec<u64>,
}

/// The nodes and tensors of a file.
#[derive(Debug, Default)]
struct Graph {
    nodes: Vec<Node>,
    initials: BTreeMap<String, Initial>,
    /// Names of tensors that are the same as an initializer.
    same: HashMap<String, String>,
}

/// Reads the weights of a file.
pub(crate) fn read(file: &Mapped) -> Read<Model> {
    let graph = Graph::read(file)?;
    let mut model = Model::default();
    let mut names = HashMap::new();
    for node in &graph.nodes {
        for input in node.inputs.iter().filter(|input| input.starts_with(COMPUTED)) {
            names.extend(node.path().map(|path| (input.clone(), format!("{path}.{}", node.kind))));
        }
        let Some((input, module)) = node.weight() else { continue };
        if !graph.initials.contains_key(input) {
            continue;
        }
        if CONVOLUTIONS.contains(&node.kind.as_str()) {
            model.convolutions.insert(module.clone(), Value::Object(node.numbers.clone()));
        }
        if !is_named(input) {
            names.insert(input.to_owned(), format!("{module}{WEIGHT}"));
        }
    }
    let mut laid = BTreeMap::new();
    let mut given = graph.linears(file, &mut laid, &mut model.linears)?;
    given.extend(graph.lstms(file, &mut laid)?);
    for (name, initial) in &graph.initials {
        let Found { dtype, shape, .. } = &initial.found;
        if given.contains(name.as_str()) {
            continue;
        }
        match name.strip_suffix(QUANTIZED) {
            Some(base) => {
                let strides = [shape.iter().skip(1).product(), 1];
                let one = graph.laid(file, name, shape.clone(), strides, 0)?;
                laid.insert(base.to_owned(), one);
            }
            None if FLOATS.contains(dtype) && !shape.is_empty() => {
                let own = names.get(name).filter(|own| !graph.initials.contains_key(*own));
                let name = own.unwrap_or(name).clone();
                model.tensors.push(Found { name, ..initial.found.clone() });
            }
            None => {}
        }
    }
    // What several modules have alike.
    for (name, initial) in graph.same.iter().filter(|(name, _)| is_named(name)) {
        let found = graph.initials.get(initial).map(|initial| &initial.found);
        let float = found.filter(|one| FLOATS.contains(&one.dtype) && !one.shape.is_empty());
        model.tensors.extend(float.map(|one| Found { name: name.clone(), ..one.clone() }));
    }
    model.laid = laid.into_iter().collect();
    Ok(model)
}

impl Graph {
    fn read(file: &Mapped) -> Read<Self> {
        let mut message = Message::new(file.clone());
        let mut found = Self::default();
        let mut is_model = false;
        while let Some(field) = message.next_field()? {
            if field.number != 7 {
                continue;
            }
            is_model = true;
            let mut graph = message.within(field.bytes);
            while let Some(Field { number, bytes, .. }) = graph.next_field()? {
                match number {
                    1 => found.nodes.push(node(graph.within(bytes))?),
                    5 => {
                        if let Some(tensor) = tensor(graph.within(bytes))? {
                            found.initials.insert(tensor.found.name.clone(), tensor);
                        }
                    }
                    _ => {}
                }
                if found.nodes.len().max(found.initials.len()) > MAX_COUNT {
                    return Err(format!("more than {MAX_COUNT} nodes or initializers"));
                }
            }
        }
        let same = found.nodes.iter().filter(|node| node.kind == "Identity").filter_map(|node| {
            let input = node.inputs.first()?;
            found.initials.contains_key(input).then(|| (node.output.clone(), input.clone()))
        });
        found.same = same.collect();
        if is_model { Ok(found) } else { Err("no graph, expected an ONNX model".to_owned()) }
    }

    /// The initializer that a name stands for, and its name.
    fn initial(&self, name: &str) -> Option<(&str, &Initial)> {
        let name = self.same.get(name).map_or(name, String::as_str);
        self.initials.get_key_value(name).map(|(name, initial)| (name.as_str(), initial))
    }

    /// Adds the weights of linear layers to `all`; returns their names in the file.
    fn linears(
        &self,
        file: &Mapped,
        all: &mut BTreeMap<String, Laid>,
        report: &mut Map<String, Value>,
    ) -> Read<HashSet<&str>> {
        let mut takers: HashMap<&str, Vec<&Node>> = HashMap::new();
        for node in &self.nodes {
            for input in &node.inputs {
                let takers = takers.entry(input).or_default();
                if takers.len() < MAX_TAKERS {
                    takers.push(node);
                }
            }
        }
        let makers: HashMap<&str, &Node> =
            self.nodes.iter().map(|node| (node.output.as_str(), node)).collect();
        let next = |output: &str| match takers.get(output).map(Vec::as_slice) {
            Some(&[taker]) => Some(taker),
            _ => None,
        };
        let mut given = HashSet::new();
        for node in &self.nodes {
            let kind = node.kind.as_str();
            let Some((input, initial)) = node.inputs.get(1).and_then(|name| self.initial(name))
            else {
                continue;
            };
            let (true, &[inputs, outputs]) = (LINEAR.contains(&kind), &initial.found.shape[..])
            else {
                continue;
            };
            let mut behind = next(&node.output);
            for scaling in SCALING {
                let scaled = behind.filter(|node| kind == "MatMulInteger" && node.kind == scaling);
                behind = scaled.map_or(behind, |node| next(&node.output));
            }
            let added = behind.filter(|node| node.kind == "Add");
            let biases =
                node.inputs.iter().skip(2).chain(added.iter().flat_map(|node| &node.inputs));
            let mut biases = biases.filter(|name| self.initial(name).is_some());
            let Some(module) = biases.find_map(|name| name.strip_suffix(BIAS)) else { continue };
            let entry = report.entry(module).or_insert_with(|| json!({"uses": 0}));
            entry["uses"] = json!(entry["uses"].as_u64().unwrap_or(0) + 1);
            let made = added.map_or(&node.output, |node| &node.output);
            let reshape =
                takers.get(made.as_str()).into_iter().flatten().find(|node| node.kind == "Reshape");
            let sizes = reshape.and_then(|node| makers.get(node.inputs.get(1)?.as_str()));
            let sizes = sizes.filter(|node| node.kind == "Concat").map(|node| {
                let number = |name: &String| match &makers.get(name.as_str())?.constant[..] {
                    &[number] => Some(number),
                    _ => None,
                };
                let mut last: Vec<_> = node.inputs.iter().rev().map_while(number).collect();
                last.reverse();
                last
            });
            if let Some(sizes) = sizes {
                entry["reshaped"] = json!(sizes);
            }
            if kind == "Gemm" && node.numbers.get("transB").is_some_and(|of| *of == json!(1)) {
                continue;
            }
            // A layer that is used several times may be there as often.
            given.insert(input);
            let one = self.laid(file, input, vec![outputs, inputs], [1, outputs], 0)?;
            all.entry(format!("{module}{WEIGHT}")).or_insert(one);
        }
        Ok(given)
    }

    /// Adds the parameters of LSTMs to `all`; returns their names in the file.
    fn lstms(&self, file: &Mapped, all: &mut BTreeMap<String, Laid>) -> Read<HashSet<&str>> {
        let mut given = HashSet::new();
        for node in self.nodes.iter().filter(|node| LSTMS.contains(&node.kind.as_str())) {
            let Some(path) = node.path() else { continue };
            for (at, parts) in
                [(1, &["weight_ih"][..]), (2, &["weight_hh"]), (3, &["bias_ih", "bias_hh"])]
            {
                let named = node.inputs.get(at).and_then(|name| self.initial(name));
                let Some((name, initial)) = named else { continue };
                let bad = || {
                    format!("tensor {name:?} of an LSTM has the shape {:?}", initial.found.shape)
                };
                // Rows of gates and columns; of quantized weights columns first.
                let turned = name.ends_with(QUANTIZED);
                let (ends, rows, cols) = match initial.found.shape[..] {
                    [ends, rows, cols] if at < 3 && !turned => (ends, rows, cols),
                    [ends, cols, rows] if at < 3 => (ends, rows, cols),
                    [ends, both] if at == 3 => (ends, both / 2, 1),
                    _ => return Err(bad()),
                };
                if !(1..=2).contains(&ends) || !rows.is_multiple_of(4) {
                    return Err(bad());
                }
                let strides = if turned { [1, rows] } else { [cols, 1] };
                for (end, ending) in ["", "_reverse"].iter().enumerate().take(ends) {
                    for (part, kind) in parts.iter().enumerate() {
                        let shape = if at == 3 { vec![rows] } else { vec![rows, cols] };
                        let mut one =
                            self.laid(file, name, shape, strides, end * parts.len() + part)?;
                        one.gates = true;
                        all.insert(format!("{path}.{kind}_l0{ending}"), one);
                    }
                }
                given.insert(name);
            }
        }
        Ok(given)
    }

    /// An initializer, or the `part` of that shape in it, as a module has it.
    fn laid(
        &self,
        file: &Mapped,
        name: &str,
        shape: Vec<usize>,
        strides: [usize; 2],
        part: usize,
    ) -> Read<Laid> {
        let missing = |name: &str| format!("no tensor {name:?}");
        let Found { dtype, bytes, shape: whole, .. } =
            &self.initials.get(name).ok_or_else(|| missing(name))?.found;
        let elements: usize = shape.iter().product();
        let parts = whole.iter().product::<usize>().checked_div(elements).unwrap_or(1).max(1);
        let length = bytes.len() / parts;
        let start = bytes.start + part * length;
        let mut scales = Vec::new();
        if let Some(base) = name.strip_suffix(QUANTIZED) {
            let values = |end: &str| {
                let name = format!("{base}{end}");
                self.initials.get(&name).map(|one| one.values(file)).ok_or_else(|| missing(&name))
            };
            let (factors, zeros) = (values("_scale")?, values("_zero_point")?);
            let rows = shape.first().copied().unwrap_or(1);
            // One for all, one for each part, or one for each row of each part.
            let of_part = match factors.len() {
                1 => 0..1,
                found if found == parts && parts > 1 => part..part + 1,
                found if found == parts * rows => part * rows..(part + 1) * rows,
                found => {
                    return Err(format!(
                        "tensor {name:?} has {found} scales, expected 1 or {}",
                        parts * rows
                    ));
                }
            };
            if zeros.len() != factors.len() {
                return Err(format!(
                    "tensor {name:?} has {} scales and {} zero points",
                    factors.len(),
                    zeros.len()
                ));
            }
            scales = of_part.map(|at| [factors[at], zeros[at]]).collect();
        }
        Ok(Laid {
            file: file.clone(),
            dtype: *dtype,
            bytes: start..start + length,
            shape,
            strides,
            gates: false,
            scales,
        })
    }
}

impl Initial {
    /// Values of a small tensor.
    fn values(&self, file: &Mapped) -> Vec<f32> {
        let bytes = file.bytes().get(self.found.bytes.clone()).unwrap_or_default();
        match self.found.dtype {
            Dtype::F32 => {
                bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
            }
            Dtype::I8 if self.integers.is_empty() => {
                bytes.iter().map(|byte| f32::from(byte.cast_signed())).collect()
            }
            Dtype::U8 if self.integers.is_empty() => {
                bytes.iter().map(|byte| f32::from(*byte)).collect()
            }
            _ => self.integers.iter().map(|value| value.cast_signed() as f32).collect(),
        }
    }
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
        let named = |end: &str, at: usize| {
            let name = self.inputs.get(at)?;
            let name = name.strip_suffix(QUANTIZED).unwrap_or(name);
            name.strip_suffix(end).map(str::to_owned)
        };
        // A name that is no weight's is a buffer's.
        let buffer = || {
            let name = input.strip_suffix(QUANTIZED).unwrap_or(input);
            Some(name.to_owned()).filter(|name| is_named(name))
        };
        let module = named(WEIGHT, at)
            .or_else(|| named(BIAS, 2).filter(|_| at == 1))
            .or_else(buffer)
            .or_else(|| self.path())?;
        Some((input, module))
    }

    /// Name of the module that the node belongs to.
    fn path(&self) -> Option<String> {
        let (path, _) = self.name.strip_prefix('/')?.rsplit_once('/')?;
        Some(path.replace('/', "."))
    }
}

/// True for a name that a module gave, and neither the exporter nor the whole's inputs.
fn is_named(initial: &str) -> bool {
    initial.contains('.') && !initial.starts_with(COMPUTED)
}

// Field numbers of <https://github.com/onnx/onnx/blob/main/onnx/onnx.proto>.

fn node(mut message: Message) -> Read<Node> {
    let mut node = Node::default();
    while let Some(field) = message.next_field()? {
        match field.number {
            1 => node.inputs.push(message.text(field.bytes)?.to_owned()),
            2 if node.output.is_empty() => message.text(field.bytes)?.clone_into(&mut node.output),
            3 => message.text(field.bytes)?.clone_into(&mut node.name),
            4 => message.text(field.bytes)?.clone_into(&mut node.kind),
            5 => {
                if let Some((name, value)) =
                    attribute(message.within(field.bytes), &mut node.constant)?
                {
                    node.numbers.insert(name, value);
                }
            }
            _ => {}
        }
    }
    Ok(node)
}

/// Name and value of an attribute that is an integer or several. One that is a tensor of few integers goes to
/// `constant`.
fn attribute(mut message: Message, constant: &mut Vec<i64>) -> Read<Option<(String, Value)>> {
    let (mut name, mut one, mut several) = (String::new(), None, Vec::new());
    while let Some(field) = message.next_field()? {
        match field.number {
            1 => message.text(field.bytes)?.clone_into(&mut name),
            3 => one = Some(field.integer),
            5 => {
                let whole = message.within(field.bytes);
                let few = tensor(whole)?.filter(|tensor| tensor.found.dtype == Dtype::I64);
                *constant = few.map_or_else(Vec::new, |few| {
                    few.integers.iter().map(|n| n.cast_signed()).collect()
                });
            }
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

/// A tensor of a type that is read.
fn tensor(mut message: Message) -> Read<Option<Initial>> {
    let (mut name, mut shape, mut kind) = (String::new(), Vec::new(), 0);
    let (mut bytes, mut integers, mut external) = (None::<Range<usize>>, Vec::new(), false);
    while let Some(field) = message.next_field()? {
        match field.number {
            1 => shape.extend(message.integers(&field)?),
            2 => kind = field.integer,
            8 => message.text(field.bytes)?.clone_into(&mut name),
            // Raw data, and packed floats, whose bytes are the same.
            4 | 9 => bytes = Some(field.bytes),
            5 | 7 => integers.extend(message.integers(&field)?),
            14 => external = field.integer == 1,
            _ => {}
        }
    }
    let Some((_, dtype, size)) = TYPES.into_iter().find(|(known, ..)| *known == kind) else {
        return Ok(None);
    };
    if external {
        return Err(format!(
            "tensor {name:?} lies in another file, expected weights in the file itself"
        ));
    }
    let shape: Option<Vec<usize>> = shape.into_iter().map(|n| usize::try_from(n).ok()).collect();
    let shape = shape.filter(|shape| shape.len() <= MAX_RANK);
    let elements =
        shape.as_ref().and_then(|shape| shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)));
    let expected = elements.and_then(|elements| elements.checked_mul(size));
    let of_integers = bytes.is_none() && !FLOATS.contains(&dtype);
    let bytes = bytes.unwrap_or_default();
    let whole =
        if of_integers { elements == Some(integers.len()) } else { expected == Some(bytes.len()) };
    let (Some(shape), true) = (shape, whole) else {
        return Err(format!("tensor {name:?} has {} bytes, expected {expected:?}", bytes.len()));
    };
    if dtype == Dtype::I64 && elements.is_some_and(|count| count <= MAX_SHAPE) && !of_integers {
        let raw = message.bytes(bytes.clone()).as_chunks().0;
        integers = raw.iter().map(|value| u64::from_le_bytes(*value)).collect();
    }
    Ok(Some(Initial { found: Found { name, dtype, shape, bytes }, integers }))
}
