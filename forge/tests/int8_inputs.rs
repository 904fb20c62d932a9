//! Matmuls with int8 weights that are graph inputs: the compiled graph agrees with its ONNX reference graph.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use std::path::PathBuf;
use std::sync::Arc;

use half::f16;
use qhx_base::CancelToken;
use qhx_base::compare::Distance;
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::{GraphId, Workspace};
use qhx_forge::Silent;
use qhx_forge::compile::Compiler;
use qhx_forge::qnn::QnnCompiler;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, INT8_STEP};
use qhx_qnn::{Library, QnnBackend, QnnOptions, Target};
use qhx_tiers::tier;
use qhx_types::{DType, Port};
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};

/// Rows, inner size, outputs, and whether the weight is `[outputs, inner]`.
type Case = (usize, usize, usize, bool);

const CASES: [Case; 11] = [
    (1, 92, 52, true),
    (1, 52, 92, true),
    (1, 92, 52, false),
    (1, 108, 28, true),
    (1, 28, 108, true),
    (1, 1024, 448, true),
    (1, 1024, 448, false),
    (7, 92, 52, true),
    (64, 92, 52, true),
    (64, 52, 92, true),
    (1, 90, 53, true),
];

fn graph(index: usize, (rows, inner, outputs, transposed): Case) -> Graph {
    let mut b = GraphBuilder::new(format!("g{index}"));
    let x = b.input("x", Elem::Activation, &[rows, inner]).unwrap();
    let shape = if transposed { [outputs, inner] } else { [inner, outputs] };
    let w = b.input("w", Elem::Int8, &shape).unwrap();
    let scale = b.input("scale", Elem::Activation, &[1, outputs]).unwrap();
    let sums = b.matmul(x, w, transposed).unwrap();
    let y = b.mul(sums, scale).unwrap();
    b.output("y", y).unwrap();
    b.finish().unwrap()
}

fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut random = SplitMix64::seed_from_u64(seed);
    let next = |_| (random.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    (0..count).map(next).map(|v| f16::from_f32(v).to_f32()).collect()
}

fn int8_values(seed: u64, count: usize) -> Vec<u8> {
    let mut random = SplitMix64::seed_from_u64(seed);
    (0..count).map(|_| ((random.next_u64() % 255) as i16 - 127) as i8 as u8).collect()
}

/// Executes the only graph of a context with x, w and scale.
fn run(
    backend: &Arc<dyn Backend>,
    source: &ContextSource,
    index: usize,
    inputs: &[Vec<u8>; 3],
) -> Vec<f32> {
    let context = backend.open_context(source).unwrap();
    let mut workspace = Workspace::new(Arc::clone(backend), CancelToken::new());
    workspace.add_context("c", &context).unwrap();
    let id = workspace.find_graph(&format!("g{index}")).unwrap().unwrap();
    let info = Arc::clone(workspace.graph(id).unwrap().1);
    for (port, tensor) in info.inputs.iter().enumerate() {
        let bytes = &inputs[["x", "w", "scale"].iter().position(|n| *n == tensor.name).unwrap()];
        let bytes: Vec<u8> = if tensor.dtype == DType::F32 {
            let half: Vec<f16> =
                bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
            half.iter().flat_map(|v| v.to_f32().to_le_bytes()).collect()
        } else {
            bytes.clone()
        };
        // At an odd offset of a larger block, as in a mapped table.
        let offset = if tensor.name == "w" { 3 } else { 0 };
        let buffer = workspace.allocate(offset + bytes.len()).unwrap();
        workspace.bytes_mut(buffer).unwrap()[offset..].copy_from_slice(&bytes);
        workspace.bind(id, Port::Input(port), buffer, offset).unwrap();
    }
    read(&mut workspace, id, &info.outputs[0])
}

fn read(workspace: &mut Workspace, id: GraphId, tensor: &qhx_types::TensorInfo) -> Vec<f32> {
    let buffer = workspace.allocate(tensor.try_byte_len().unwrap()).unwrap();
    workspace.bind(id, Port::Output(0), buffer, 0).unwrap();
    workspace.execute(id).unwrap();
    let bytes = workspace.bytes(buffer).unwrap();
    match tensor.dtype {
        DType::F16 => {
            bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        }
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

fn half_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect()
}

#[test]
fn int8_inputs_agree_with_the_reference_graph() {
    agree(None);
}

#[tier(qnn)]
#[test]
fn int8_inputs_on_the_npu_agree_with_the_reference_graph() {
    let htp = std::env::var_os("QHX_QNN_HTP").map(PathBuf::from);
    let system = std::env::var_os("QHX_QNN_SYSTEM").map(PathBuf::from);
    let htp = htp.expect("qnn tier: QHX_QNN_HTP is not set");
    let library = Library::open(&htp, system.as_deref()).unwrap();
    let backend = QnnBackend::with_library(&library, QnnOptions::default()).unwrap();
    agree(Some((library, Arc::new(backend))));
}

/// On the CPU, and on the NPU where one is given.
#[expect(clippy::print_stderr, reason = "a test says what it measured")]
fn agree(qnn: Option<(Library, Arc<dyn Backend>)>) {
    let folder = tempfile::tempdir().unwrap();
    let cpu: Arc<dyn Backend> =
        Arc::new(qhx_cpu::CpuBackend::new(qhx_cpu::CpuOptions::default()).unwrap());
    let mut wrong = Vec::new();
    for (index, case) in CASES.into_iter().enumerate() {
        let (rows, inner, outputs, transposed) = case;
        let graph = graph(index, case);
        let (x, w) =
            (numbers(index as u64, rows * inner), int8_values(99 + index as u64, inner * outputs));
        let scale: Vec<f32> =
            numbers(7, outputs).iter().map(|v| f16::from_f32(0.1 + v * v).to_f32()).collect();
        let mut expected = vec![0f32; rows * outputs];
        for r in 0..rows {
            for o in 0..outputs {
                let weight = |k: usize| {
                    f32::from(w[if transposed { o * inner + k } else { k * outputs + o }] as i8)
                };
                let sum: f32 = (0..inner).map(|k| x[r * inner + k] * weight(k) * INT8_STEP).sum();
                expected[r * outputs + o] = sum * scale[o];
            }
        }
        let inputs = [half_bytes(&x), w, half_bytes(&scale)];
        let name = format!("g{index}");
        let written = qhx_graph::onnx::write(&graph, folder.path(), &mut Silent).unwrap();
        let source = ContextSource {
            key: "c".into(),
            onnx: vec![(name.clone(), written.model)],
            ..ContextSource::default()
        };
        let mut note = |what: &str, found: &[f32], max: f64| {
            let error = Distance::of(found, &expected).unwrap().relative;
            eprintln!("{what} {case:?}: {error:.2e}");
            if error > max {
                wrong.push(format!("{what} {case:?}: {error}"));
            }
        };
        note("cpu", &run(&cpu, &source, index, &inputs), 1e-5);
        let Some((library, backend)) = &qnn else { continue };
        for target in Target::ALL {
            let path = folder.path().join(format!("{name}-{target}.bin"));
            let compiler = QnnCompiler::new(library.clone(), target);
            compiler.compile("c", std::slice::from_ref(&graph), &path, &mut Silent).unwrap();
            let source =
                ContextSource { key: "c".into(), binary: Some(path), ..ContextSource::default() };
            let start = std::time::Instant::now();
            let found = run(backend, &source, index, &inputs);
            eprintln!("{:?}", start.elapsed());
            note(&target.to_string(), &found, 4e-3);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
