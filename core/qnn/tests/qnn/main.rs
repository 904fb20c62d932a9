//! The QNN backend against the real libraries.
//!
//! `QHX_QNN_HTP` names libQnnHtp.so and `QHX_QNN_SYSTEM` libQnnSystem.so (by default the one
//! beside it). Without them the tests are ignored with that reason; `QHX_REQUIRE_TIERS=1` makes that a failure.

// What stands between, `qhx-fake-device`, is for these systems.
#![cfg(any(target_os = "linux", target_os = "android"))]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod between;
mod binaries;
mod compose;
mod execute;
mod memory;
mod opening;
mod power;
mod process;
mod tier;

use std::sync::Arc;

use qhx_base::CancelToken;
use qhx_base::compare::Distance;
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::{BufferId, GraphId, Workspace};
use qhx_qnn::compose::{Composer, GraphComposer, GraphConfig, Param, TensorSpec};
use qhx_qnn::{Library, QnnBackend, QnnOptions, Target};
use qhx_tiers::tier;
use qhx_types::{DType, Port, Quantization};
use tier::opened;

fn backend(library: &Library, options: QnnOptions) -> Arc<QnnBackend> {
    Arc::new(QnnBackend::with_library(library, options).unwrap())
}

/// Small numbers that do not repeat, the same in every run.
fn numbers(seed: u32, count: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f64::from(state >> 8) / f64::from(1u32 << 24) - 0.5
        })
        .collect()
}

/// The values as f16 bytes, and as the f16 numbers those bytes are.
fn f16s(values: &[f64]) -> (Vec<u8>, Vec<f64>) {
    let halves: Vec<half::f16> = values.iter().map(|&v| half::f16::from_f64(v)).collect();
    let bytes = halves.iter().flat_map(|h| h.to_le_bytes()).collect();
    (bytes, halves.iter().map(|h| h.to_f64()).collect())
}

fn read_f16s(bytes: &[u8]) -> Vec<f64> {
    bytes
        .chunks_exact(2)
        .map(|b| half::f16::from_le_bytes(b.try_into().unwrap()).to_f64())
        .collect()
}

/// `x[1,k] · w[n,k]ᵀ` in f64.
fn product(x: &[f64], w: &[f64]) -> Vec<f64> {
    w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
}

/// The largest difference, relative to the largest expected value.
fn error(found: &[f64], expected: &[f64]) -> f64 {
    Distance::of(found, expected).unwrap().relative
}

const K: usize = 64;
const N: usize = 48;

/// Weights of [`linear`] as bytes and as the numbers that take part in the matmul.
fn weight(seed: u32) -> (Vec<u8>, Vec<f64>) {
    f16s(&numbers(seed, N * K))
}

/// Adds `y[1,N] = x[1,K] · wᵀ` in f16 to a graph.
fn linear(graph: &mut GraphComposer<'_>, bytes: &[u8]) {
    let x = graph.tensor(TensorSpec::input("x", DType::F16, &[1, K])).unwrap();
    let w = graph.tensor(TensorSpec::constant("w", DType::F16, &[N, K], bytes)).unwrap();
    let y = graph.tensor(TensorSpec::output("y", DType::F16, &[1, N])).unwrap();
    graph.node("y", "FullyConnected", &[], &[x, w], &[y]).unwrap();
}

/// A context with one graph.
fn binary(
    library: &Library,
    target: Target,
    name: &str,
    compose: impl FnOnce(&mut GraphComposer<'_>),
) -> Vec<u8> {
    let mut context = Composer::new(library, target, &[]).unwrap();
    add(&mut context, name, &[], compose);
    context.binary().unwrap()
}

/// Adds a graph to a context.
fn add(
    context: &mut Composer,
    name: &str,
    configs: &[GraphConfig],
    compose: impl FnOnce(&mut GraphComposer<'_>),
) {
    let mut graph = context.graph(name, configs).unwrap();
    compose(&mut graph);
    graph.finalize().unwrap();
}

/// A context with one f16 graph `linear`, not yet written.
fn composed_linear(
    library: &Library,
    target: Target,
    configs: &[GraphConfig],
    seed: u32,
) -> Composer {
    let mut context = Composer::new(library, target, &[]).unwrap();
    add(&mut context, "linear", configs, |graph| linear(graph, &weight(seed).0));
    context
}

/// A context with one f16 graph `linear`.
fn linear_binary(library: &Library, target: Target, seed: u32) -> Vec<u8> {
    composed_linear(library, target, &[], seed).binary().unwrap()
}

/// A file that holds `bytes`.
fn file(bytes: &[u8]) -> (tempfile::TempDir, ContextSource) {
    let folder = tempfile::tempdir().unwrap();
    let source = file_in(folder.path(), "part", bytes);
    (folder, source)
}

/// The same in a folder, named by the context's key.
fn file_in(folder: &std::path::Path, key: &str, bytes: &[u8]) -> ContextSource {
    let path = folder.join(format!("{key}.bin"));
    std::fs::write(&path, bytes).unwrap();
    ContextSource { key: key.to_owned(), binary: Some(path), ..ContextSource::default() }
}

/// A workspace over one binary with a buffer for every port of its first graph.
struct Session {
    workspace: Workspace,
    inputs: Vec<BufferId>,
    outputs: Vec<BufferId>,
}

impl Session {
    fn open(backend: Arc<dyn Backend>, bytes: &[u8]) -> Self {
        Self::open_graph(backend, bytes, 0)
    }

    fn open_graph(backend: Arc<dyn Backend>, bytes: &[u8], graph: u32) -> Self {
        let (_folder, source) = file(bytes);
        let context = backend.open_context(&source).unwrap();
        let mut workspace = Workspace::new(backend, CancelToken::new());
        workspace.add_context("part", &context).unwrap();
        let id = GraphId(graph);
        let info = Arc::clone(workspace.graph(id).unwrap().1);
        let mut bind = |port, tensor: &qhx_types::TensorInfo| {
            let buffer = workspace.allocate(tensor.try_byte_len().unwrap()).unwrap();
            workspace.bind(id, port, buffer, 0).unwrap();
            buffer
        };
        let inputs = info.inputs.iter().enumerate().map(|(i, t)| bind(Port::Input(i), t)).collect();
        let outputs =
            info.outputs.iter().enumerate().map(|(i, t)| bind(Port::Output(i), t)).collect();
        Self { workspace, inputs, outputs }
    }

    fn run(&mut self, graph: u32, input: &[u8]) -> Vec<u8> {
        self.workspace.bytes_mut(self.inputs[0]).unwrap().copy_from_slice(input);
        self.workspace.execute(GraphId(graph)).unwrap();
        self.workspace.bytes(self.outputs[0]).unwrap().to_vec()
    }
}

/// Per-output-channel int8 weights: bytes, scales, and the numbers they stand for.
fn int8_weight(seed: u32) -> (Vec<u8>, Quantization, Vec<f64>) {
    let values = numbers(seed, N * K);
    let mut bytes = Vec::new();
    let mut scales = Vec::new();
    let mut reals = Vec::new();
    for (i, row) in values.chunks_exact(K).enumerate() {
        // Channels of different size, so that a lost scale shows.
        let gain = 1.0 + i as f64 / 8.0;
        let scale = (row.iter().fold(0.0f64, |m, v| m.max(v.abs())) * gain / 127.0) as f32;
        scales.push(scale);
        for v in row {
            let q = (v * gain / f64::from(scale)).round().clamp(-127.0, 127.0);
            bytes.push((q as i8).cast_unsigned());
            reals.push(q * f64::from(scale));
        }
    }
    (bytes, Quantization::PerAxis { axis: 0, scales, offsets: Vec::new() }, reals)
}

/// Adds an element-wise node with one input and one output.
fn unary(graph: &mut GraphComposer<'_>, op: &str, params: &[(&str, Param<'_>)], shape: &[usize]) {
    let x = graph.tensor(TensorSpec::input("x", DType::F16, shape)).unwrap();
    let y = graph.tensor(TensorSpec::output("y", DType::F16, shape)).unwrap();
    graph.node("y", op, params, &[x], &[y]).unwrap();
}

/// A subscriber that hands events on to a function.
struct Heard {
    enabled: fn(&tracing::Metadata<'_>) -> bool,
    event: fn(&tracing::Event<'_>),
}

impl tracing::Subscriber for Heard {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        (self.enabled)(metadata)
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        (self.event)(event);
    }

    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// The message of an event.
fn message(event: &tracing::Event<'_>) -> String {
    struct Text(String);
    impl tracing::field::Visit for Text {
        fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
            if field.name() == "message" {
                self.0 = format!("{value:?}");
            }
        }
    }
    let mut text = Text(String::new());
    event.record(&mut text);
    text.0
}
