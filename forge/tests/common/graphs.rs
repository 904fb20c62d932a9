//! Arbitrary weights, graphs to run on the CPU and the NPU, their ONNX reference graphs, and a decoder of them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::f16;
use qhx_base::compare::Distance;
use qhx_base::{CancelToken, Result};
use qhx_cpu::{CpuBackend, CpuOptions};
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::{BufferId, GraphId, Workspace};
use qhx_forge::Silent;
use qhx_forge::compile::Compiler;
use qhx_forge::qnn::QnnCompiler;
use qhx_forge::recipe::Recipe;
use qhx_graph::graph::{Elem, Graph};
use qhx_graph::quantize::{QuantizedForm, QuantizedMut};
use qhx_graph::weight::{RowSource, Storage, Weight, dequantize_blocks, fits_f16, held};
use qhx_qnn::{Library, QnnBackend, QnnOptions, Target};
use qhx_types::{DType, GraphInfo, MASK_VALUE, Port, TensorInfo};
use rten::{Model, ValueOrView};
use rten_tensor::Tensor;
use rten_tensor::prelude::*;
use serde_json::Value;

/// Small numbers that do not repeat, the same in every run.
pub fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f16::from_f32((state >> 8) as f32 / (1u32 << 23) as f32 - 1.0).to_f32()
    };
    (0..count).map(next).collect()
}

/// A matrix as a checkpoint may hold it, quantized by another program or not.
#[derive(Debug)]
pub struct Stored {
    pub shape: [usize; 2],
    pub form: Option<QuantizedForm>,
}

impl RowSource for Stored {
    fn name(&self) -> &str {
        "stored.weight"
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn stored_dtype(&self) -> DType {
        DType::F16
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        if self.form.is_some() {
            return dequantize_blocks(self, first, out);
        }
        out.copy_from_slice(&numbers(70 + first as u32, out.len()));
        Ok(())
    }

    fn block_form(&self) -> Option<QuantizedForm> {
        self.form
    }

    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        let (low, high) = out.form.bits.range();
        let range = usize::from(low.abs_diff(high)) + 1;
        for (index, q) in out.values.iter_mut().enumerate() {
            let place = first * self.shape[1] + index;
            *q = (i32::from(low) + (place * place % 251 * 7 % range) as i32) as i8;
        }
        let seed = first as u32;
        out.scales.copy_from_slice(&numbers(80 + seed, out.scales.len()));
        out.offsets.copy_from_slice(&numbers(90 + seed, out.offsets.len()));
        Ok(())
    }
}

/// A weight with arbitrary values.
pub fn weight(seed: u32, shape: [usize; 2], storage: Storage) -> Weight {
    // Rows of different size, so that a lost scale shows.
    let mut values = numbers(seed, shape[0] * shape[1]);
    for (r, row) in values.chunks_exact_mut(shape[1]).enumerate() {
        row.iter_mut().for_each(|v| *v *= 0.2 + r as f32 / shape[0] as f32);
    }
    Weight::new(held("fixed.weight", shape, values), storage)
}

/// Graphs compiled into one context and opened, with a buffer for every port.
pub struct Compiled {
    pub workspace: Workspace,
    pub buffers: HashMap<(u32, Port), BufferId>,
}

impl Compiled {
    pub fn new(library: &Library, target: Target, contexts: &[&[Graph]]) -> Self {
        let backend: Arc<dyn Backend> =
            Arc::new(QnnBackend::with_library(library, QnnOptions::default()).unwrap());
        let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
        let compiler = QnnCompiler::new(library.clone(), target);
        let folder = tempfile::tempdir().unwrap();
        let path = |key: &str| folder.path().join(key);
        for (index, graphs) in contexts.iter().enumerate() {
            let key = format!("c{index}");
            let bytes = compiler.compile(&key, graphs, false, &path(&key), &mut Silent).unwrap();
            assert_eq!(std::fs::metadata(path(&key)).unwrap().len(), bytes);
        }
        for index in 0..contexts.len() {
            let key = format!("c{index}");
            let path = path(&key);
            let source = ContextSource { key, binary: Some(path), ..ContextSource::default() };
            let context = backend.open_context(&source).unwrap();
            workspace.add_context(&source.key, &context).unwrap();
        }
        Self::bound(workspace)
    }

    /// The graph on the CPU backend.
    pub fn on_cpu(graph: &Graph) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let written = qhx_graph::onnx::write(graph, folder.path(), &mut Silent).unwrap();
        Self::of_onnx(graph.name(), written.model)
    }

    /// A graph of an ONNX file on the CPU backend.
    pub fn of_onnx(name: &str, path: PathBuf) -> Self {
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(CpuOptions::exact()).unwrap());
        let onnx = vec![(name.to_owned(), path)];
        let source = ContextSource { key: "c".to_owned(), onnx, ..ContextSource::default() };
        Self::bound(qhx_exec::graph_runner::open(&backend, &source).unwrap().0)
    }

    /// Buffers for every port.
    fn bound(mut workspace: Workspace) -> Self {
        let mut buffers = HashMap::new();
        for id in 0..workspace.graph_count() as u32 {
            let info = Arc::clone(workspace.graph(GraphId(id)).unwrap().1);
            let inputs = (0..info.inputs.len()).map(Port::Input);
            for port in inputs.chain((0..info.outputs.len()).map(Port::Output)) {
                let bytes = info.tensor(port).unwrap().try_byte_len().unwrap();
                let buffer = workspace.allocate(bytes).unwrap();
                workspace.bind(GraphId(id), port, buffer, 0).unwrap();
                buffers.insert((id, port), buffer);
            }
        }
        Self { workspace, buffers }
    }

    pub fn info(&self, graph: u32) -> Arc<GraphInfo> {
        Arc::clone(self.workspace.graph(GraphId(graph)).unwrap().1)
    }

    pub fn write(&mut self, graph: u32, index: usize, values: &[f32]) {
        let dtype = self.info(graph).inputs[index].dtype;
        let bytes: Vec<u8> = match dtype {
            DType::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::I32 => values.iter().flat_map(|&v| (v as i32).to_le_bytes()).collect(),
            DType::I8 | DType::SFixed8 => values.iter().map(|&v| v as i8 as u8).collect(),
            other => panic!("input of type {other}"),
        };
        let buffer = self.buffers[&(graph, Port::Input(index))];
        self.workspace.bytes_mut(buffer).unwrap().copy_from_slice(&bytes);
    }

    pub fn read(&self, graph: u32, index: usize) -> Vec<f32> {
        let dtype = self.info(graph).outputs[index].dtype;
        let bytes = self.workspace.bytes(self.buffers[&(graph, Port::Output(index))]).unwrap();
        match dtype {
            DType::F16 => bytes
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes(b.try_into().unwrap()).to_f32())
                .collect(),
            DType::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
            }
            DType::I32 => bytes
                .chunks_exact(4)
                .map(|b| i32::from_le_bytes(b.try_into().unwrap()) as f32)
                .collect(),
            other => panic!("output of type {other}"),
        }
    }

    pub fn run(&mut self, graph: u32, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
        for (index, values) in inputs.iter().enumerate() {
            self.write(graph, index, values);
        }
        self.workspace.execute(GraphId(graph)).unwrap();
        (0..self.info(graph).outputs.len()).map(|i| self.read(graph, i)).collect()
    }
}

/// The outputs of the ONNX reference graph for the same inputs.
pub fn reference(graph: &Graph, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let folder = tempfile::tempdir().unwrap();
    Onnx::new(graph, folder.path()).run(inputs)
}

/// An ONNX graph that rten runs.
pub struct Onnx {
    pub info: GraphInfo,
    model: Model,
}

impl Onnx {
    /// The reference graph of `graph`, written into a folder.
    pub fn new(graph: &Graph, folder: &Path) -> Self {
        let written = qhx_graph::onnx::write(graph, folder, &mut Silent).unwrap();
        Self::load(graph, &written.model)
    }

    /// The reference graph of `graph` in a file.
    pub fn load(graph: &Graph, path: &Path) -> Self {
        Self { info: graph.info(Elem::onnx), model: Model::load_file(path).unwrap() }
    }

    /// The outputs for inputs in the order of the graph.
    pub fn run(&self, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let id = |tensor: &TensorInfo| self.model.node_id(&tensor.name).unwrap();
        let mut values: Vec<(_, ValueOrView<'_>)> = Vec::new();
        for (tensor, data) in self.info.inputs.iter().zip(inputs) {
            let shape = &tensor.shape[..];
            let value: ValueOrView<'_> = match tensor.dtype {
                DType::I32 => {
                    Tensor::from_data(shape, data.iter().map(|&v| v as i32).collect::<Vec<_>>())
                        .into()
                }
                DType::I8 => {
                    Tensor::from_data(shape, data.iter().map(|&v| v as i8).collect::<Vec<_>>())
                        .into()
                }
                _ => Tensor::from_data(shape, data.clone()).into(),
            };
            values.push((id(tensor), value));
        }
        let ids: Vec<_> = self.info.outputs.iter().map(id).collect();
        let outputs = self.model.run(values, &ids, None).unwrap().into_iter();
        let read = |(value, tensor): (rten::Value, &TensorInfo)| -> Vec<f32> {
            if tensor.dtype == DType::I32 {
                let value: Tensor<i32> = value.try_into().unwrap();
                return value.to_vec().into_iter().map(|v| v as f32).collect();
            }
            let value: Tensor<f32> = value.try_into().unwrap();
            assert_eq!(value.shape(), tensor.shape, "{}", tensor.name);
            value.to_vec()
        };
        outputs.zip(&self.info.outputs).map(read).collect()
    }
}

/// Graphs that a step runs one after the other.
pub trait Steps {
    fn infos(&self) -> Vec<GraphInfo>;
    /// The outputs of a graph for inputs in its order.
    fn run(&mut self, graph: usize, inputs: &[Vec<f32>]) -> Vec<Vec<f32>>;
}

impl Steps for Vec<Onnx> {
    fn infos(&self) -> Vec<GraphInfo> {
        self.iter().map(|one| one.info.clone()).collect()
    }

    fn run(&mut self, graph: usize, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
        self[graph].run(inputs)
    }
}

impl Steps for Compiled {
    fn infos(&self) -> Vec<GraphInfo> {
        (0..self.workspace.graph_count() as u32).map(|id| (*self.info(id)).clone()).collect()
    }

    fn run(&mut self, graph: usize, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
        Self::run(self, graph as u32, inputs)
    }
}

/// Runs the decode and head graphs of Qwen3.5 as their host-op does.
pub struct Driver<S> {
    steps: S,
    infos: Vec<GraphInfo>,
    state: HashMap<String, Vec<f32>>,
    embed: Vec<f32>,
    hidden: usize,
    position: usize,
    max_ctx: usize,
    rotary: usize,
    theta: f64,
}

impl<S: Steps> Driver<S> {
    pub fn new(recipe: &Recipe, steps: S) -> Self {
        // The table as the bundle has it: f16, or f32 for a checkpoint whose values f16 would round.
        let table = Weight::new(recipe.embed.clone().unwrap(), Storage::Float);
        let embed = match fits_f16(&**table.source()).unwrap() {
            true => table.to_f16().unwrap().into_iter().map(f16::to_f32).collect(),
            false => table.to_f32().unwrap(),
        };
        let number = |key: &str| recipe.params[key].as_f64().unwrap();
        Self {
            infos: steps.infos(),
            steps,
            state: HashMap::new(),
            embed,
            hidden: number("hidden") as usize,
            position: 0,
            max_ctx: number("max_ctx") as usize,
            rotary: number("rotary_dim") as usize,
            theta: number("rope_theta"),
        }
    }

    /// Logits after `token`.
    fn step(&mut self, token: usize) -> Vec<f32> {
        let (position, half) = (self.position, self.rotary / 2);
        let mut x = self.embed[token * self.hidden..][..self.hidden].to_vec();
        let angle =
            |i: usize| position as f64 * self.theta.powf(-2.0 * i as f64 / self.rotary as f64);
        let table = |f: fn(f64) -> f64| (0..half).map(|i| f(angle(i)) as f32).collect::<Vec<f32>>();
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        let open = |i: usize| i < position || i == self.max_ctx;
        let mask: Vec<f32> =
            (0..=self.max_ctx).map(|i| if open(i) { 0.0 } else { MASK_VALUE }).collect();
        let mut logits = Vec::new();
        for (graph, info) in self.infos.iter().enumerate() {
            let input = |tensor: &TensorInfo| match tensor.name.as_str() {
                "x" => x.clone(),
                "cos" => cos.clone(),
                "sin" => sin.clone(),
                "cmask" => mask.clone(),
                name => match self.state.get(name) {
                    Some(value) => value.clone(),
                    None => vec![0.0; tensor.elements()],
                },
            };
            let inputs: Vec<_> = info.inputs.iter().map(input).collect();
            for (tensor, value) in info.outputs.iter().zip(self.steps.run(graph, &inputs)) {
                if let Some(role) = tensor.name.strip_prefix("present_") {
                    self.state.insert(format!("past_{role}"), value);
                } else if let Some(role) = tensor.name.strip_prefix("new_") {
                    let name = format!("past_{role}");
                    let at = info.inputs.iter().position(|t| t.name == name).unwrap();
                    let [_, rows, width] = info.inputs[at].shape[..] else {
                        panic!("a cache [heads, rows, width]")
                    };
                    let cache = self.state.entry(name).or_insert_with(|| inputs[at].clone());
                    let heads = cache.chunks_exact_mut(rows * width);
                    for (head, new) in heads.zip(value.chunks_exact(width)) {
                        head[position * width..][..width].copy_from_slice(new);
                    }
                } else if tensor.name == "logits" {
                    logits = value;
                } else {
                    x = value;
                }
            }
        }
        self.position += 1;
        logits
    }

    /// Answers a golden case from the beginning, with at most `tokens` tokens of its own answer. Returns the number of
    /// tokens that have the best logits, and the number of all. `each` gets the logits of each step.
    pub fn greedy(
        &mut self,
        case: &Value,
        tokens: usize,
        mut each: impl FnMut(usize, &[f32]),
    ) -> [usize; 2] {
        (self.state, self.position) = (HashMap::new(), 0);
        let (mut logits, mut found) = (Vec::new(), [0, 0]);
        for token in ids(&case["prompt_ids"]) {
            logits = self.step(token);
        }
        for (step, token) in ids(&case["output_ids"]).into_iter().take(tokens).enumerate() {
            each(step, &logits);
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            found[0] += usize::from(best == token);
            found[1] += 1;
            logits = self.step(token);
        }
        found
    }
}

/// A list of numbers.
pub fn ids(value: &Value) -> Vec<usize> {
    serde_json::from_value(value.clone()).unwrap()
}

/// The largest difference, relative to the largest expected value.
pub fn error(found: &[f32], expected: &[f32]) -> f64 {
    Distance::of(found, expected).unwrap().relative
}

/// The errors of a graph's outputs, compiled for a target, against those of its reference.
pub fn errors(library: &Library, target: Target, graph: &Graph, inputs: &[Vec<f32>]) -> Vec<f64> {
    let found = Compiled::new(library, target, &[std::slice::from_ref(graph)]).run(0, inputs);
    found.iter().zip(reference(graph, inputs)).map(|(a, b)| error(a, &b)).collect()
}

/// Inputs in −1..1, int8 ones in −127..127; a mask hides the first half of every row but keeps its
/// last position.
pub fn inputs(graph: &Graph) -> Vec<Vec<f32>> {
    let fill = |(seed, tensor): (u32, &TensorInfo)| {
        let count = tensor.elements();
        if tensor.dtype == DType::I8 {
            return numbers(50 + seed, count).iter().map(|v| (v * 127.0).round()).collect();
        }
        if tensor.name == "valid" {
            return vec![1.0; count];
        }
        if !tensor.name.contains("mask") {
            return numbers(50 + seed, count);
        }
        let width = *tensor.shape.last().unwrap();
        (0..count).map(|i| if i % width < width / 2 { MASK_VALUE } else { 0.0 }).collect()
    };
    (0..).zip(&graph.info(Elem::onnx).inputs).map(fill).collect()
}
