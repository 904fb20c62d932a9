//! The QNN lowering against the real compiler: every op agrees with its ONNX twin, and the compiled
//! Qwen3.5 graphs decode the goldens of `transformers`.
//!
//! `QHX_QNN_HTP` names libQnnHtp.so and `QHX_QNN_SYSTEM` libQnnSystem.so (by default the one beside
//! it). Without them every test says that it is skipped; `QHX_REQUIRE_TIERS=1` makes that a failure.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

#[path = "../../core/tests/qnn/tier.rs"]
mod tier;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::f16;
use qhx_core::backend::{Backend, ContextSource};
use qhx_core::compare::Distance;
use qhx_core::qnn::{Library, QnnBackend, QnnOptions, Target};
use qhx_core::{
    BufferId, CancelToken, DType, ErrorKind, GraphId, GraphInfo, Port, Result, Workspace,
};
use qhx_forge::builder::GraphBuilder;
use qhx_forge::checkpoint::Checkpoint;
use qhx_forge::compile::Compiler;
use qhx_forge::estimate::{DEFAULT_CORNER, EstimateOptions, estimate};
use qhx_forge::graph::{BinaryOp, Elem, Graph, Op, ReduceOp, UnaryOp};
use qhx_forge::plan::plan;
use qhx_forge::qnn::QnnCompiler;
use qhx_forge::recipes::{Precision, Recipe, RecipeOptions, Task, recipe};
use qhx_forge::weight::{RowSource, Storage, Weight};
use qhx_forge::{ForgeOptions, Progress, Silent, forge, forge_checkpoint};
use qhx_places::fixture;
use rten::{Model, ValueOrView};
use rten_tensor::Tensor;
use rten_tensor::prelude::*;
use serde_json::Value;
use tier::tier;

/// Small numbers that do not repeat, the same in every run.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f16::from_f32((state >> 8) as f32 / (1u32 << 23) as f32 - 1.0).to_f32()
    };
    (0..count).map(next).collect()
}

/// A weight that is made up.
#[derive(Debug)]
struct Made {
    shape: [usize; 2],
    values: Vec<f32>,
}

impl RowSource for Made {
    fn name(&self) -> &str {
        "made.up.weight"
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn stored_dtype(&self) -> DType {
        DType::F32
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&self.values[first * self.shape[1]..][..out.len()]);
        Ok(())
    }
}

fn made(seed: u32, shape: [usize; 2], storage: Storage) -> Weight {
    // Rows of different size, so that a lost scale shows.
    let mut values = numbers(seed, shape[0] * shape[1]);
    for (r, row) in values.chunks_exact_mut(shape[1]).enumerate() {
        row.iter_mut().for_each(|v| *v *= 0.2 + r as f32 / shape[0] as f32);
    }
    Weight::new(Arc::new(Made { shape, values }), storage)
}

/// Graphs compiled into one context and opened, with a buffer for every port.
struct Compiled {
    workspace: Workspace,
    buffers: HashMap<(u32, Port), BufferId>,
}

impl Compiled {
    fn new(library: &Library, target: Target, contexts: &[&[Graph]]) -> Self {
        let backend: Arc<dyn Backend> =
            Arc::new(QnnBackend::with_library(library, QnnOptions::default()).unwrap());
        let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
        let compiler = QnnCompiler::new(library.clone(), target);
        let folder = tempfile::tempdir().unwrap();
        let path = |key: &str| folder.path().join(key);
        for (index, graphs) in contexts.iter().enumerate() {
            let key = format!("c{index}");
            let bytes = compiler.compile(&key, graphs, &path(&key), &mut Silent).unwrap();
            assert_eq!(std::fs::metadata(path(&key)).unwrap().len(), bytes);
        }
        for index in 0..contexts.len() {
            let key = format!("c{index}");
            let path = path(&key);
            let source = ContextSource { key, binary: Some(path), ..ContextSource::default() };
            let context = backend.open_context(&source).unwrap();
            workspace.add_context(&source.key, &context).unwrap();
        }
        let mut buffers = HashMap::new();
        for id in 0..workspace.graph_count() as u32 {
            let info = Arc::clone(workspace.graph(GraphId(id)).unwrap().1);
            let inputs = (0..info.inputs.len()).map(Port::Input);
            for port in inputs.chain((0..info.outputs.len()).map(Port::Output)) {
                let bytes = info.tensor(port).unwrap().byte_len().unwrap();
                let buffer = workspace.allocate(bytes).unwrap();
                workspace.bind(GraphId(id), port, buffer, 0).unwrap();
                buffers.insert((id, port), buffer);
            }
        }
        Self { workspace, buffers }
    }

    fn info(&self, graph: u32) -> Arc<GraphInfo> {
        Arc::clone(self.workspace.graph(GraphId(graph)).unwrap().1)
    }

    fn write(&mut self, graph: u32, index: usize, values: &[f32]) {
        let dtype = self.info(graph).inputs[index].dtype;
        let bytes: Vec<u8> = match dtype {
            DType::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::I32 => values.iter().flat_map(|&v| (v as i32).to_le_bytes()).collect(),
            DType::SFixed8 => values.iter().map(|&v| v as i8 as u8).collect(),
            other => panic!("input of type {other}"),
        };
        let buffer = self.buffers[&(graph, Port::Input(index))];
        self.workspace.bytes_mut(buffer).unwrap().copy_from_slice(&bytes);
    }

    fn read(&self, graph: u32, index: usize) -> Vec<f32> {
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

    fn run(&mut self, graph: u32, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
        for (index, values) in inputs.iter().enumerate() {
            self.write(graph, index, values);
        }
        self.workspace.execute(GraphId(graph)).unwrap();
        (0..self.info(graph).outputs.len()).map(|i| self.read(graph, i)).collect()
    }
}

/// The ONNX twin's outputs for the same inputs.
fn twin(graph: &Graph, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let folder = tempfile::tempdir().unwrap();
    let written = qhx_forge::onnx::write(graph, folder.path(), &mut Silent).unwrap();
    let model = Model::load_file(&written.model).unwrap();
    let info = graph.info(Elem::onnx);
    let mut values: Vec<(_, ValueOrView<'_>)> = Vec::new();
    for (tensor, data) in info.inputs.iter().zip(inputs) {
        let id = model.node_id(&tensor.name).unwrap();
        if tensor.dtype == DType::I32 {
            let data: Vec<i32> = data.iter().map(|&v| v as i32).collect();
            values.push((id, Tensor::from_data(&tensor.shape[..], data).into()));
        } else if tensor.dtype == DType::I8 {
            let data: Vec<i8> = data.iter().map(|&v| v as i8).collect();
            values.push((id, Tensor::from_data(&tensor.shape[..], data).into()));
        } else {
            values.push((id, Tensor::from_data(&tensor.shape[..], data.clone()).into()));
        }
    }
    let ids: Vec<_> = info.outputs.iter().map(|t| model.node_id(&t.name).unwrap()).collect();
    let outputs = model.run(values, &ids, None).unwrap();
    outputs
        .into_iter()
        .zip(&info.outputs)
        .map(|(value, tensor)| {
            if tensor.dtype == DType::I32 {
                let value: Tensor<i32> = value.try_into().unwrap();
                value.to_vec().into_iter().map(|v| v as f32).collect()
            } else {
                let value: Tensor<f32> = value.try_into().unwrap();
                value.to_vec()
            }
        })
        .collect()
}

/// The largest difference, relative to the largest expected value.
fn error(found: &[f32], expected: &[f32]) -> f64 {
    Distance::of(found, expected).unwrap().relative
}

/// Each op on inputs of its own, each result an output.
fn all_ops() -> Graph {
    let mut b = GraphBuilder::new("ops");
    let x = b.input("x", Elem::Activation, &[3, 8]).unwrap();
    let s = b.input("state", Elem::F32, &[2, 4, 8]).unwrap();
    let r = b.input("row", Elem::Activation, &[1, 8]).unwrap();
    let i = b.input("index", Elem::I32, &[1, 8]).unwrap();
    let mut outputs = Vec::new();
    let bias = Some(numbers(1, 20));
    outputs.push(b.linear("lin", x, made(2, [20, 8], Storage::Float), bias).unwrap());
    outputs.push(b.linear("plain", x, made(3, [36, 8], Storage::Float), None).unwrap());
    let bias = Some(numbers(4, 36));
    outputs.push(b.linear("int8", x, made(5, [36, 8], Storage::Int8), bias).unwrap());
    for op in [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Max] {
        outputs.push(b.binary(op, x, r).unwrap());
        outputs.push(b.binary(op, r, x).unwrap());
    }
    let magnitude = b.unary(UnaryOp::Abs, x).unwrap();
    let half = b.scalar(x, 0.5).unwrap();
    let positive = b.add(magnitude, half).unwrap();
    outputs.push(b.div(r, positive).unwrap());
    for op in [UnaryOp::Neg, UnaryOp::Exp, UnaryOp::Sigmoid, UnaryOp::Silu, UnaryOp::Tanh] {
        outputs.push(b.unary(op, x).unwrap());
    }
    outputs.push(b.unary(UnaryOp::Log, positive).unwrap());
    outputs.push(b.unary(UnaryOp::Rsqrt, positive).unwrap());
    for axis in 0..3 {
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max] {
            outputs.push(b.reduce(op, s, axis).unwrap());
        }
    }
    outputs.push(b.softmax(x).unwrap());
    outputs.push(b.softmax(s).unwrap());
    for value in [x, s] {
        let name = format!("gain_{}", value.index());
        let gain = b.constant(&name, Elem::Activation, &[8], numbers(6, 8)).unwrap();
        outputs.push(b.rms_norm(value, 1e-6, gain).unwrap());
        outputs.push(b.l2_norm(value, 1e-6, 0.7).unwrap());
    }
    outputs.push(b.reshape(s, &[8, 8]).unwrap());
    outputs.push(b.transpose(s, &[2, 0, 1]).unwrap());
    outputs.push(b.concat(&[x, r, x], 0).unwrap());
    outputs.push(b.slice(s, 1, 1, 3).unwrap());
    outputs.push(b.matmul(s, s, true).unwrap());
    let transposed = b.transpose(s, &[0, 2, 1]).unwrap();
    outputs.push(b.matmul(s, transposed, false).unwrap());
    let narrow = b.cast(s, Elem::Activation).unwrap();
    outputs.push(narrow);
    let wide = b.cast(x, Elem::F32).unwrap();
    outputs.push(wide);
    // Through f32 and back, read again by a node.
    let back = b.cast(wide, Elem::Activation).unwrap();
    outputs.push(b.add(back, r).unwrap());
    let float = b.cast(i, Elem::Activation).unwrap();
    outputs.push(b.mul(float, r).unwrap());
    let two = b.scalar(i, 2.0).unwrap();
    outputs.push(b.mul(i, two).unwrap());
    // Handed through, and one value under two names.
    outputs.push(x);
    outputs.push(s);
    outputs.push(narrow);
    for (index, id) in outputs.into_iter().enumerate() {
        b.output(&format!("out_{index}"), id).unwrap();
    }
    b.finish().unwrap()
}

#[test]
fn every_op_agrees_with_its_onnx_twin_on_every_target() {
    let Some(library) = tier() else { return };
    let graph = all_ops();
    let index: Vec<f32> = (0..8).map(|i| (i * 3 - 5) as f32).collect();
    let inputs = [numbers(10, 24), numbers(11, 64), numbers(12, 8), index];
    let expected = twin(&graph, &inputs);
    for target in Target::ALL {
        let mut compiled = Compiled::new(&library, target, &[std::slice::from_ref(&graph)]);
        assert_eq!(*compiled.info(0), graph.info(Elem::qnn));
        let found = compiled.run(0, &inputs);
        let mut wrong = Vec::new();
        for ((output, found), expected) in graph.outputs().iter().zip(&found).zip(&expected) {
            let error = error(found, expected);
            // The library's softmax is the coarsest op.
            if error > 4e-3 {
                wrong.push(format!("{:?}: {error}", graph.producer(*output).unwrap().op));
            }
        }
        assert!(wrong.is_empty(), "{target}: {wrong:#?}");
    }
}

/// The library's own exponential answers with NaN for −89, −104 and 200, and for all that overflows f16.
#[test]
fn exponentials_are_finite_and_right_for_every_argument() {
    const ARGUMENTS: [f32; 16] = [
        -60_000.0, -200.0, -104.0, -89.0, -88.0, -40.0, -17.5, -10.0, -1.0, 0.0, 1.0, 11.0, 12.0,
        40.0, 200.0, 60_000.0,
    ];
    /// The largest f16 whose exponential f16 can hold.
    const LARGEST: f64 = 11.0859375;
    /// The value, and what f16 may lose of it.
    type Function<'f> = &'f dyn Fn(f64) -> (f64, f64);
    let Some(library) = tier() else { return };
    let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    // What f16 may lose: 1 + eˣ is rounded before its logarithm is taken, and the rate multiplies that.
    let decay = |x: f64, rate: f64| {
        let expected = (-rate * softplus(x)).exp();
        (expected, rate * expected * 2f64.powi(-11))
    };
    let functions: [(&str, Function<'_>); 4] = [
        ("exp", &|x| (x.min(LARGEST).exp(), 0.0)),
        ("softplus", &|x| (softplus(x), 0.0)),
        ("decay", &|x| decay(x, 30.0)),
        // The product overflows f16.
        ("fast_decay", &|x| decay(x, 9000.0)),
    ];
    for (elem, target) in
        [Elem::Activation, Elem::F32].into_iter().flat_map(|e| Target::ALL.map(|t| (e, t)))
    {
        let mut b = GraphBuilder::new("exponentials");
        let x = b.input("x", elem, &[1, ARGUMENTS.len()]).unwrap();
        let exp = b.unary(UnaryOp::Exp, x).unwrap();
        b.output("exp", exp).unwrap();
        let softplus = b.softplus(x).unwrap();
        b.output("softplus", softplus).unwrap();
        for (name, rate) in [("decay", -30.0), ("fast_decay", -9000.0)] {
            let log = b.scale(softplus, rate).unwrap();
            let decay = b.unary(UnaryOp::Exp, log).unwrap();
            b.output(name, decay).unwrap();
        }
        let graph = b.finish().unwrap();
        let mut compiled = Compiled::new(&library, target, &[std::slice::from_ref(&graph)]);
        for (found, (name, function)) in
            compiled.run(0, &[ARGUMENTS.to_vec()]).iter().zip(functions)
        {
            for (x, found) in ARGUMENTS.into_iter().zip(found) {
                assert!(found.is_finite(), "{elem} {target}: {name}({x}) is {found}");
                let (expected, lost) = function(f64::from(x));
                let close = (f64::from(*found) - expected).abs() <= 2e-3 * expected.max(0.1) + lost;
                assert!(close, "{elem} {target}: {name}({x}) is {found}, expected {expected}");
            }
        }
    }
}

/// A state that a token wipes out: `exp(A_log) · softplus(…)` is far above 88.
#[test]
fn a_state_that_decays_at_once_stays_finite() {
    let Some(library) = tier() else { return };
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("qwen35-tied").join(file), dir.path().join(file)).unwrap();
    }
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let table: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    for layer in [0, 1, 3] {
        let tensor = &table[format!("model.layers.{layer}.linear_attn.A_log")];
        assert_eq!(tensor["dtype"], "F32");
        let start = 8 + header + tensor["data_offsets"][0].as_u64().unwrap() as usize;
        for (head, value) in [4.6f32, 4.8, 5.0, 5.2, 5.4, 9.0].into_iter().enumerate() {
            bytes[start + 4 * head..][..4].copy_from_slice(&value.to_le_bytes());
        }
    }
    std::fs::write(&path, bytes).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let options = RecipeOptions { shards: 1, max_ctx: 64, ..RecipeOptions::default() };
    let recipe = recipe(&checkpoint, &options).unwrap();
    let graph = &recipe.contexts[0].graphs[0];
    let inputs = inputs(graph);
    let expected = twin(graph, &inputs);
    for target in Target::ALL {
        let mut compiled = Compiled::new(&library, target, &[std::slice::from_ref(graph)]);
        let found = compiled.run(0, &inputs);
        for ((tensor, found), expected) in
            compiled.info(0).outputs.iter().zip(&found).zip(&expected)
        {
            let error = error(found, expected);
            assert!(error < 2e-2, "{target} {tensor}: {error}");
        }
    }
}

/// Rows of a cache that are hidden hold anything, so that their scores can be anything.
#[test]
fn hidden_scores_have_no_weight_whatever_they_are() {
    const WIDTH: usize = 65;
    let Some(library) = tier() else { return };
    let mut b = GraphBuilder::new("attend");
    let scores = b.input("scores", Elem::Activation, &[4, WIDTH]).unwrap();
    let mask = b.input("cmask", Elem::Activation, &[1, WIDTH]).unwrap();
    let sum = b.add(scores, mask).unwrap();
    let weights = b.softmax(sum).unwrap();
    b.output("weights", weights).unwrap();
    let graph = b.finish().unwrap();
    let mut compiled = Compiled::new(&library, Target::V81, &[std::slice::from_ref(&graph)]);
    let hidden = |i: usize| (10..WIDTH - 1).contains(&(i % WIDTH));
    let masks = (0..WIDTH).map(|i| if hidden(i) { qhx_op::fill::HIDDEN } else { 0.0 }).collect();
    let mut inputs = [Vec::new(), masks];
    for score in [20_000.0, 100.0, 0.0, -20.0, -100.0, -1000.0, -30_000.0] {
        inputs[0] = numbers(30, 4 * WIDTH);
        (0..4 * WIDTH).filter(|&i| hidden(i)).for_each(|i| inputs[0][i] = score);
        let found = compiled.run(0, &inputs).remove(0);
        for (row, weights) in found.chunks(WIDTH).enumerate() {
            let sum: f32 = weights.iter().sum();
            assert!((sum - 1.0).abs() < 5e-3, "hidden scores of {score}, row {row}: sum {sum}");
            let leaked = weights.iter().enumerate().filter(|(i, w)| hidden(*i) && **w != 0.0);
            assert_eq!(leaked.count(), 0, "hidden scores of {score}, row {row}");
        }
    }
}

/// The library's `Sigmoid` is off by 0.4 % where it follows a product.
#[test]
fn a_sigmoid_after_a_product_is_as_exact_as_f16() {
    let Some(library) = tier() else { return };
    let mut b = GraphBuilder::new("gates");
    let x = b.input("x", Elem::Activation, &[1, 1024]).unwrap();
    let gate = b.linear("gate", x, made(1, [1024, 1024], Storage::Float), None).unwrap();
    let sigmoid = b.unary(UnaryOp::Sigmoid, gate).unwrap();
    let gate = b.linear("swish", x, made(3, [1024, 1024], Storage::Float), None).unwrap();
    let silu = b.silu(gate).unwrap();
    b.output("sigmoid", sigmoid).unwrap();
    b.output("silu", silu).unwrap();
    let graph = b.finish().unwrap();
    let inputs = [numbers(2, 1024).iter().map(|v| v * 0.3).collect::<Vec<_>>()];
    let expected = twin(&graph, &inputs);
    for target in Target::ALL {
        let mut compiled = Compiled::new(&library, target, &[std::slice::from_ref(&graph)]);
        for (found, expected) in compiled.run(0, &inputs).iter().zip(&expected) {
            let error = error(found, expected);
            assert!(error < 1.2e-3, "{target}: {error}");
        }
    }
}

#[test]
fn norms_of_huge_tiny_and_empty_rows_are_those_of_f32() {
    let Some(library) = tier() else { return };
    let mut b = GraphBuilder::new("norms");
    let x = b.input("x", Elem::Activation, &[6, 64]).unwrap();
    let gain = b.constant("gain", Elem::Activation, &[64], vec![1.0; 64]).unwrap();
    let rms = b.rms_norm(x, 1e-6, gain).unwrap();
    b.output("rms", rms).unwrap();
    let unit = b.l2_norm(x, 1e-6, 1.0).unwrap();
    b.output("unit", unit).unwrap();
    let graph = b.finish().unwrap();
    // Squares of the first overflow f16; those of the third and fourth are lost in it.
    let scales = [6e4, 300.0, 1e-3, 1e-4, 1.0, 0.0];
    let mut rows = numbers(40, 6 * 64);
    for (row, scale) in rows.chunks_exact_mut(64).zip(scales) {
        row.iter_mut().for_each(|v| *v = f16::from_f32(*v * scale).to_f32());
    }
    let inputs = [rows];
    let expected = twin(&graph, &inputs);
    for target in Target::ALL {
        let mut compiled = Compiled::new(&library, target, &[std::slice::from_ref(&graph)]);
        for (found, expected) in compiled.run(0, &inputs).iter().zip(&expected) {
            let rows = found.chunks_exact(64).zip(expected.chunks_exact(64)).zip(scales);
            for ((found, expected), scale) in rows {
                if scale == 0.0 {
                    assert!(found.iter().all(|v| *v == 0.0), "{target}: {found:?}");
                } else {
                    let error = error(found, expected);
                    assert!(error < 2e-3, "{target}, row times {scale}: {error}");
                }
            }
        }
    }
}

#[test]
fn norms_of_every_shape_agree_with_their_twins() {
    let Some(library) = tier() else { return };
    let shapes: [&[usize]; 11] = [
        &[128],
        &[1, 4, 64, 128],
        &[2, 64, 32],
        &[64, 2, 20],
        &[64, 2, 32],
        &[64, 1, 20],
        &[20, 4, 64],
        &[8, 1, 16, 128],
        &[512, 128],
        &[130, 1000],
        &[1, 4096],
    ];
    for (index, shape) in shapes.into_iter().enumerate() {
        let mut b = GraphBuilder::new("norms");
        let x = b.input("x", Elem::Activation, shape).unwrap();
        let width = *shape.last().unwrap();
        let gain = b.row("gain", numbers(3, width)).unwrap();
        let y = b.rms_norm(x, 1e-6, gain).unwrap();
        b.output("y", y).unwrap();
        let graph = b.finish().unwrap();
        assert_eq!(graph.info(Elem::qnn).outputs[0].shape, shape);
        // The library is given rows, whatever the shape.
        let norm = graph.nodes().iter().find(|n| matches!(n.op, Op::RmsNorm { .. })).unwrap();
        assert_eq!(graph.tensor(norm.inputs[0]).unwrap().shape.len(), 2, "{shape:?}");
        let inputs = [numbers(40, shape.iter().product())];
        let target = Target::ALL[index % Target::ALL.len()];
        let mut compiled = Compiled::new(&library, target, &[std::slice::from_ref(&graph)]);
        let error = error(&compiled.run(0, &inputs)[0], &twin(&graph, &inputs)[0]);
        assert!(error < 2e-3, "{target} {shape:?}: {error}");
    }
}

#[test]
fn graphs_of_one_context_keep_their_own_weights() {
    let Some(library) = tier() else { return };
    let graph = |name: &str, rows: usize, seed: u32| {
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[rows, 16]).unwrap();
        let y = b.linear("lin", x, made(seed, [12, 16], Storage::Float), None).unwrap();
        b.output("y", y).unwrap();
        b.finish().unwrap()
    };
    let graphs = [graph("prefill", 5, 20), graph("decode", 1, 21)];
    let mut compiled = Compiled::new(&library, Target::V81, &[&graphs]);
    for (id, graph) in (0..).zip(&graphs) {
        assert_eq!(compiled.info(id).name, graph.name());
        let x = vec![numbers(22, compiled.info(id).inputs[0].elements().unwrap())];
        let error = error(&compiled.run(id, &x)[0], &twin(graph, &x)[0]);
        assert!(error < 2e-3, "{}: {error}", graph.name());
    }
}

/// The NPU computes in f16, also with the values of int8 weights.
#[test]
fn weights_beyond_f16_are_refused_in_every_form() {
    let Some(library) = tier() else { return };
    let compiler = QnnCompiler::new(library, Target::V81);
    for storage in [Storage::Float, Storage::Int8] {
        let mut values = numbers(7, 40 * 64);
        (values[130], values[2000]) = (70_000.0, -1e9);
        let weight = Weight::new(Arc::new(Made { shape: [40, 64], values }), storage);
        let mut b = GraphBuilder::new("large");
        let x = b.input("x", Elem::Activation, &[1, 64]).unwrap();
        let y = b.linear("lin", x, weight, None).unwrap();
        b.output("y", y).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("large.bin");
        let error =
            compiler.compile("large", &[b.finish().unwrap()], &out, &mut Silent).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Artifact, "{storage:?}: {error}");
        let words =
            "tensor made.up.weight: element 130 is 70000, and f16 holds at most 65504; 2 of 2560";
        assert!(error.message().contains(words), "{storage:?}: {error}");
        assert!(error.message().contains("1000000000"), "{storage:?}: {error}");
        assert!(!out.exists());
    }
}

#[test]
fn int8_weights_with_an_odd_number_of_inputs_are_refused() {
    let Some(library) = tier() else { return };
    let mut b = GraphBuilder::new("odd");
    let x = b.input("x", Elem::Activation, &[1, 66]).unwrap();
    let y = b.linear("lin", x, made(30, [40, 66], Storage::Int8), None).unwrap();
    b.output("y", y).unwrap();
    let graph = b.finish().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("odd.bin");
    let compiler = QnnCompiler::new(library, Target::V81);
    let error = compiler.compile("odd", &[graph], &out, &mut Silent).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Graph);
    assert!(error.message().contains("made.up.weight has 66 inputs"), "{error}");
    assert!(!out.exists());
}

#[derive(Default)]
struct Cancel {
    total: u64,
    done: Vec<u64>,
    after: usize,
}

impl Progress for Cancel {
    fn stage(&mut self, _what: &str, total: u64) {
        self.total = total;
    }

    fn advance(&mut self, done: u64) {
        self.done.push(done);
    }

    fn note(&mut self, _message: &str) {}

    fn cancelled(&self) -> bool {
        self.done.len() > self.after
    }
}

#[test]
fn progress_counts_weights_and_a_cancelled_compilation_leaves_nothing() {
    let Some(library) = tier() else { return };
    let compiler = QnnCompiler::new(library, Target::V81);
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("ops.bin");
    let mut progress = Cancel { after: usize::MAX, ..Cancel::default() };
    let graphs = [all_ops()];
    compiler.compile("ops", &graphs, &out, &mut progress).unwrap();
    assert_eq!(progress.done.last(), Some(&progress.total));
    assert_eq!(progress.total, graphs[0].weight_bytes());
    std::fs::remove_file(&out).unwrap();
    let mut progress = Cancel { after: 1, ..Cancel::default() };
    let error = compiler.compile("ops", &graphs, &out, &mut progress).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert_eq!(progress.done.len(), 2);
    assert!(!out.exists());
}

/// Runs the compiled graphs of a recipe as their host-op does.
struct Driver {
    compiled: Compiled,
    embed: Vec<f32>,
    hidden: usize,
    position: usize,
    max_ctx: usize,
    rotary: usize,
    theta: f64,
}

impl Driver {
    fn new(library: &Library, target: Target, recipe: &Recipe) -> Self {
        let contexts: Vec<&[Graph]> = recipe.contexts.iter().map(|c| &c.graphs[..]).collect();
        let table = Weight::new(recipe.embed.clone(), Storage::Float);
        let number = |key: &str| recipe.params[key].as_f64().unwrap();
        Self {
            compiled: Compiled::new(library, target, &contexts),
            embed: table.to_f16().unwrap().into_iter().map(f16::to_f32).collect(),
            hidden: number("hidden") as usize,
            position: 0,
            max_ctx: number("max_ctx") as usize,
            rotary: number("rotary_dim") as usize,
            theta: number("rope_theta"),
        }
    }

    fn reset(&mut self) {
        self.position = 0;
        for graph in 0..self.compiled.workspace.graph_count() as u32 {
            let info = self.compiled.info(graph);
            for (index, tensor) in info.inputs.iter().enumerate() {
                self.compiled.write(graph, index, &vec![0.0; tensor.elements().unwrap()]);
            }
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
        let mask: Vec<f32> = (0..=self.max_ctx)
            .map(|i| if i < position || i == self.max_ctx { 0.0 } else { -30_000.0 })
            .collect();
        let mut logits = Vec::new();
        for graph in 0..self.compiled.workspace.graph_count() as u32 {
            let info = self.compiled.info(graph);
            for (index, tensor) in info.inputs.iter().enumerate() {
                match tensor.name.as_str() {
                    "x" => self.compiled.write(graph, index, &x),
                    "cos" => self.compiled.write(graph, index, &cos),
                    "sin" => self.compiled.write(graph, index, &sin),
                    "cmask" => self.compiled.write(graph, index, &mask),
                    _ => {}
                }
            }
            self.compiled.workspace.execute(GraphId(graph)).unwrap();
            for (index, tensor) in info.outputs.iter().enumerate() {
                let value = self.compiled.read(graph, index);
                let past = |role: &str| {
                    let name = format!("past_{role}");
                    info.inputs.iter().position(|t| t.name == name).unwrap()
                };
                if let Some(role) = tensor.name.strip_prefix("present_") {
                    self.compiled.write(graph, past(role), &value);
                } else if let Some(role) = tensor.name.strip_prefix("new_") {
                    let input = past(role);
                    let [heads, ctx, width] = info.inputs[input].shape[..] else {
                        panic!("a cache [heads, ctx, width]")
                    };
                    let buffer = self.compiled.buffers[&(graph, Port::Input(input))];
                    let cache = self.compiled.workspace.bytes_mut(buffer).unwrap();
                    for head in 0..heads {
                        for i in 0..width {
                            let at = 2 * ((head * ctx + position) * width + i);
                            let v = f16::from_f32(value[head * width + i]);
                            cache[at..at + 2].copy_from_slice(&v.to_le_bytes());
                        }
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
}

fn argmax(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap()
}

fn ids(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect()
}

/// Greedy agreement over the first `cases` goldens, teacher-forced.
#[expect(clippy::print_stderr, reason = "a test says what it measured or why it is skipped")]
fn greedy(
    library: &Library,
    target: Target,
    (name, precision, shards, cases): (&str, Precision, usize, usize),
) -> (usize, usize) {
    let dir = fixture(name);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let options = RecipeOptions { precision, shards, max_ctx: 200, ..RecipeOptions::default() };
    let recipe = recipe(&checkpoint, &options).unwrap();
    let goldens: Value =
        serde_json::from_slice(&std::fs::read(dir.join("goldens.json")).unwrap()).unwrap();
    let mut driver = Driver::new(library, target, &recipe);
    let (mut same, mut total) = (0, 0);
    for case in goldens["cases"].as_array().unwrap().iter().take(cases) {
        driver.reset();
        let mut logits = Vec::new();
        for token in ids(&case["prompt_ids"]) {
            logits = driver.step(token);
        }
        for token in ids(&case["output_ids"]) {
            total += 1;
            same += usize::from(argmax(&logits) == token);
            logits = driver.step(token);
        }
    }
    eprintln!("{name} {precision:?} {target}: greedy {same}/{total}");
    (same, total)
}

/// Inputs in −1..1, int8 ones in −127..127; a mask hides the first half of every row but keeps its
/// last position.
fn inputs(graph: &Graph) -> Vec<Vec<f32>> {
    let fill = |(seed, tensor): (u32, &qhx_core::TensorInfo)| {
        let count = tensor.elements().unwrap();
        if tensor.dtype == DType::I8 {
            return numbers(50 + seed, count).iter().map(|v| (v * 127.0).round()).collect();
        }
        if !tensor.name.contains("mask") {
            return numbers(50 + seed, count);
        }
        let width = *tensor.shape.last().unwrap();
        (0..count).map(|i| if i % width < width / 2 { -30_000.0 } else { 0.0 }).collect()
    };
    (0..).zip(&graph.info(Elem::onnx).inputs).map(fill).collect()
}

#[test]
fn every_graph_of_every_recipe_agrees_with_its_twin() {
    let Some(library) = tier() else { return };
    let mut folders: Vec<_> = std::fs::read_dir(fixture("."))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("config.json").exists())
        // A toy for recipes outside the workspace: there is none here.
        .filter(|path| !path.ends_with("lfm2-toy"))
        .collect();
    folders.sort();
    assert!(folders.len() > 1);
    let mut wrong = Vec::new();
    for (index, folder) in folders.iter().enumerate() {
        let checkpoint = Checkpoint::open(folder).unwrap();
        let precision = [Precision::Fp16, Precision::W8A16][index % 2];
        let embeds = folder.file_name().unwrap().to_string_lossy().starts_with("embed");
        let task = if embeds { Task::Embed } else { Task::Generate };
        let options =
            RecipeOptions { precision, shards: 2, max_ctx: 64, task, ..RecipeOptions::default() };
        let recipe = recipe(&checkpoint, &options).unwrap();
        for context in &recipe.contexts {
            let target = Target::ALL[index % Target::ALL.len()];
            let mut compiled = Compiled::new(&library, target, &[&context.graphs]);
            for (id, graph) in (0..).zip(&context.graphs) {
                let inputs = inputs(graph);
                let (found, expected) = (compiled.run(id, &inputs), twin(graph, &inputs));
                for ((tensor, a), b) in compiled.info(id).outputs.iter().zip(&found).zip(&expected)
                {
                    let distance = Distance::of(a, b);
                    if !distance.as_ref().is_ok_and(|distance| distance.cosine >= 0.998) {
                        let name = folder.file_name().unwrap().display();
                        wrong.push(format!("{name} {} {tensor}: {distance:?}", graph.name()));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_tied_model_decodes_as_transformers_does() {
    let Some(library) = tier() else { return };
    let (same, total) = greedy(&library, Target::V81, ("qwen35-tied", Precision::Fp16, 1, 4));
    assert_eq!(same, total);
}

#[test]
fn the_untied_model_in_shards_decodes_as_transformers_does_on_older_targets() {
    let Some(library) = tier() else { return };
    for target in [Target::V75, Target::V79] {
        let (same, total) = greedy(&library, target, ("qwen35-untied", Precision::Fp16, 3, 2));
        assert_eq!(same, total, "{target}");
    }
}

#[test]
fn int8_weights_keep_the_greedy_tokens() {
    let Some(library) = tier() else { return };
    let (same, total) = greedy(&library, Target::V81, ("qwen35-tied", Precision::W8A16, 1, 2));
    assert!(same * 100 >= total * 95, "greedy {same}/{total}");
}

#[test]
fn a_bundle_has_context_binaries_for_its_architecture() {
    let Some(library) = tier() else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("v79");
    let mut options = ForgeOptions::new(&out);
    options.max_ctx = Some(64);
    options.onnx = false;
    options.compiler = Some(Arc::new(QnnCompiler::new(library.clone(), Target::V79)));
    let report = forge(&fixture("qwen35-tied"), &options, &mut Silent).unwrap();
    assert_eq!(report.dsp_arch.as_deref(), Some("v79"));
    let manifest: Value =
        serde_json::from_slice(&std::fs::read(&report.manifest).unwrap()).unwrap();
    let compiled_by = manifest["model"]["compiled_by"].as_str().unwrap();
    assert!(compiled_by.contains(library.build_id()), "{compiled_by}");
    let backend = QnnBackend::with_library(&library, QnnOptions::default()).unwrap();
    for context in &report.contexts {
        let entry = &manifest["artifacts"]["contexts"][&context.key];
        let path = out.join(entry["bin"].as_str().unwrap());
        assert_eq!(Some(std::fs::metadata(&path).unwrap().len()), context.binary_bytes);
        let source = ContextSource {
            key: context.key.clone(),
            binary: Some(path),
            ..ContextSource::default()
        };
        let opened = backend.open_context(&source).unwrap();
        let names: Vec<_> = opened.graphs().iter().map(|g| g.name.clone()).collect();
        assert_eq!(names, context.graphs);
    }
}

/// The configuration of a small Qwen3.5 with round sizes.
fn small_config(folder: &Path) -> PathBuf {
    let path = folder.join("small.json");
    let config = serde_json::json!({
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 1024, "vocab_size": 6000, "tie_word_embeddings": true,
    });
    std::fs::write(&path, config.to_string()).unwrap();
    path
}

#[test]
fn a_plan_says_how_large_the_binaries_become() {
    let Some(library) = tier() else { return };
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::synthetic(&small_config(folder.path()), 3).unwrap();
    for precision in [Precision::Fp16, Precision::W8A16] {
        let mut options = ForgeOptions::new(folder.path().join(precision.name()));
        options.precision = precision;
        options.max_ctx = Some(64);
        options.shards = 2;
        options.onnx = false;
        options.compiler = Some(Arc::new(QnnCompiler::new(library.clone(), Target::V81)));
        let (plan, _) = plan(&checkpoint, recipe, &options, true).unwrap();
        let report = forge_checkpoint(&checkpoint, recipe, &options, &mut Silent).unwrap();
        for (context, planned) in report.contexts.iter().zip(&plan.contexts) {
            assert_eq!(context.key, planned.key);
            let ratio = context.binary_bytes.unwrap() as f64 / planned.binary_bytes as f64;
            // Of a model as small as this, what is not weights is more than a hundredth.
            assert!((0.8..1.1).contains(&ratio), "{} {precision:?}: {ratio}", planned.key);
        }
    }
}

#[test]
fn an_estimate_counts_the_weights_and_is_no_faster_than_reading_them() {
    let Some(library) = tier() else { return };
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::synthetic(&small_config(folder.path()), 3).unwrap();
    let made = |precision| {
        let options = RecipeOptions { precision, shards: 1, max_ctx: 64, ..Default::default() };
        recipe(&checkpoint, &options).unwrap()
    };
    let traces = folder.path().join("traces");
    let wanted = |corner| EstimateOptions { corner, traces: Some(traces.clone()) };
    let compiler = QnnCompiler::new(library, Target::V81);
    let fp16 =
        estimate(&made(Precision::Fp16), &compiler, &wanted(DEFAULT_CORNER), &mut Silent).unwrap();
    assert_eq!(fp16.iter().map(|g| g.graph.as_str()).collect::<Vec<_>>(), ["decode", "lmhead"]);
    for graph in &fp16 {
        let weights = graph.weight_bytes as f64;
        assert!((1.0..1.25).contains(&(graph.dma_read_bytes as f64 / weights)), "{graph:?}");
        assert!(graph.us >= graph.floor_us && graph.floor_us > 0.0, "{graph:?}");
        assert!((1..=10).contains(&graph.most_expensive.len()), "{graph:?}");
        assert!(traces.join(format!("{}.json", graph.graph)).exists());
    }
    // A slower clock takes longer; int8 weights are half to read, and dequantised without a model.
    let slow = estimate(&made(Precision::Fp16), &compiler, &wanted(2), &mut Silent).unwrap();
    assert!(slow[0].us > fp16[0].us && slow[0].core_mhz < fp16[0].core_mhz);
    let int8 =
        estimate(&made(Precision::W8A16), &compiler, &wanted(DEFAULT_CORNER), &mut Silent).unwrap();
    assert!(int8[0].dma_read_bytes * 10 < fp16[0].dma_read_bytes * 7);
    let unmodelled: Vec<_> = int8[0].unmodelled.iter().map(|op| op.op.as_str()).collect();
    assert!(unmodelled.iter().any(|op| op.contains("quant")), "{unmodelled:?}");
}
