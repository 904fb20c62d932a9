//! The CPU backend over hand-made models.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_exec::backend::{Backend, Context, ContextSource};
use qhx_exec::{GraphId, Workspace};
use qhx_types::{DType, Port};

#[expect(dead_code, reason = "unit tests need more of it")]
mod onnx;

use std::path::Path;
use std::sync::Arc;

use onnx::{Dim, FLOAT, FLOAT16, INT8, INT32, INT64, Model, UINT8};
use qhx_cpu::{Activations, CpuBackend, CpuOptions};

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap()
}

fn source(dir: &Path, graphs: &[(&str, &[u8])]) -> ContextSource {
    let mut source = ContextSource { key: "decode".to_owned(), ..ContextSource::default() };
    for (name, bytes) in graphs {
        let path = dir.join(format!("{name}.onnx"));
        std::fs::write(&path, bytes).unwrap();
        source.onnx.push(((*name).to_owned(), path));
    }
    source
}

/// `y = x · w + b`, and `z = relu(y)`.
fn linear() -> Model {
    Model::default()
        .input("x", FLOAT, &[2, 3])
        .weights("w", &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        .input("b", FLOAT, &[2])
        .node("MatMul", &["x", "w"], &["xw"])
        .node("Add", &["xw", "b"], &["y"])
        .node("Relu", &["y"], &["z"])
        .output("y", FLOAT, &[2, 2])
        .output("z", FLOAT, &[2, 2])
}

fn open(dir: &Path, model: Model) -> Result<Arc<dyn Context>> {
    backend().open_context(&source(dir, &[("g", &model.build())]))
}

fn open_bytes(dir: &Path, model: &[u8]) -> Arc<dyn Context> {
    backend().open_context(&source(dir, &[("g", model)])).unwrap()
}

fn refused(dir: &Path, model: Model) -> Error {
    open(dir, model).err().expect("the model is accepted")
}

fn workspace(context: &Arc<dyn Context>) -> (Workspace, GraphId) {
    let mut workspace = Workspace::new(Arc::new(backend()), CancelToken::new());
    workspace.add_context("decode", context).unwrap();
    (workspace, GraphId(0))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn put(workspace: &mut Workspace, buffer: qhx_exec::BufferId, values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    workspace.bytes_mut(buffer).unwrap()[..bytes.len()].copy_from_slice(&bytes);
}

#[test]
fn a_model_is_described_and_computes() {
    let dir = tempfile::tempdir().unwrap();
    let context = open(dir.path(), linear()).unwrap();
    let info = &context.graphs()[0];
    let tensors: Vec<_> = info.inputs.iter().chain(&info.outputs).map(|t| t.to_string()).collect();
    assert_eq!(info.name, "g");
    assert_eq!(tensors, ["x f32[2, 3]", "b f32[2]", "y f32[2, 2]", "z f32[2, 2]"]);
    assert_eq!(context.resident_bytes(), 24);

    let (mut workspace, graph) = workspace(&context);
    let buffers = [24, 8, 16, 16].map(|bytes| workspace.allocate(bytes).unwrap());
    let ports = [Port::Input(0), Port::Input(1), Port::Output(0), Port::Output(1)];
    for (port, buffer) in ports.into_iter().zip(buffers) {
        workspace.bind(graph, port, buffer, 0).unwrap();
    }
    put(&mut workspace, buffers[0], &[1.0, 0.0, 0.0, 0.0, -1.0, 1.0]);
    put(&mut workspace, buffers[1], &[0.5, -10.0]);
    workspace.execute(graph).unwrap();
    assert_eq!(floats(workspace.bytes(buffers[2]).unwrap()), [1.5, -8.0, 2.5, -8.0]);
    assert_eq!(floats(workspace.bytes(buffers[3]).unwrap()), [1.5, 0.0, 2.5, 0.0]);

    // What is bound is read again at each execution, and binding again moves an input.
    put(&mut workspace, buffers[1], &[0.0, 0.0]);
    workspace.execute(graph).unwrap();
    assert_eq!(floats(workspace.bytes(buffers[2]).unwrap()), [1.0, 2.0, 2.0, 2.0]);
    let other = workspace.allocate(64).unwrap();
    put(&mut workspace, other, &[9.0, 9.0, 100.0, 200.0]);
    workspace.bind(graph, Port::Input(1), other, 8).unwrap();
    workspace.execute(graph).unwrap();
    assert_eq!(floats(workspace.bytes(buffers[2]).unwrap()), [101.0, 202.0, 102.0, 202.0]);
}

#[test]
fn an_output_may_lie_where_an_input_is() {
    let dir = tempfile::tempdir().unwrap();
    let model = Model::default()
        .input("s", FLOAT, &[4])
        .input("d", FLOAT, &[4])
        .node("Add", &["s", "d"], &["t"])
        .output("t", FLOAT, &[4]);
    let (mut workspace, graph) = workspace(&open(dir.path(), model).unwrap());
    let state = workspace.allocate(16).unwrap();
    let delta = workspace.allocate(16).unwrap();
    put(&mut workspace, delta, &[1.0, 2.0, 3.0, 4.0]);
    workspace.bind(graph, Port::Input(0), state, 0).unwrap();
    workspace.bind(graph, Port::Input(1), delta, 0).unwrap();
    workspace.bind(graph, Port::Output(0), state, 0).unwrap();
    for _ in 0..3 {
        workspace.execute(graph).unwrap();
    }
    assert_eq!(floats(workspace.bytes(state).unwrap()), [3.0, 6.0, 9.0, 12.0]);
}

#[test]
fn types_and_a_result_that_is_not_contiguous() {
    let dir = tempfile::tempdir().unwrap();
    let model = Model::default()
        .input("i", INT32, &[2])
        .input("q", INT8, &[3])
        .input("u", UINT8, &[2])
        .input("l", INT64, &[2])
        .input("h", FLOAT16, &[2, 3])
        .node("Identity", &["q"], &["q2"])
        .node("Identity", &["u"], &["u2"])
        .node("Add", &["i", "l"], &["sum"])
        .node("Transpose", &["h"], &["ht"])
        .output("q2", INT8, &[3])
        .output("u2", UINT8, &[2])
        .output("sum", INT32, &[2])
        .output("ht", FLOAT, &[3, 2]);
    let context = open(dir.path(), model).unwrap();
    let info = Arc::clone(&context.graphs()[0]);
    let dtypes: Vec<_> = info.inputs.iter().map(|t| t.dtype).collect();
    assert_eq!(dtypes, [DType::I32, DType::I8, DType::U8, DType::I32, DType::F32]);
    let (mut workspace, graph) = workspace(&context);
    let all = workspace.allocate(1024).unwrap();
    let ports = (0..5).map(Port::Input).chain((0..4).map(Port::Output));
    for (slot, port) in ports.enumerate() {
        workspace.bind(graph, port, all, 64 * slot).unwrap();
    }
    let bytes = workspace.bytes_mut(all).unwrap();
    bytes[..8].copy_from_slice(&[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    bytes[64..67].copy_from_slice(&[1, 0xff, 0x80]);
    bytes[128..130].copy_from_slice(&[200, 3]);
    bytes[192..200].copy_from_slice(&[5, 0, 0, 0, 7, 0, 0, 0]);
    for (i, value) in [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0].iter().enumerate() {
        bytes[256 + 4 * i..260 + 4 * i].copy_from_slice(&value.to_le_bytes());
    }
    workspace.execute(graph).unwrap();
    let bytes = workspace.bytes(all).unwrap();
    assert_eq!(bytes[320..323], [1, 0xff, 0x80]);
    assert_eq!(bytes[384..386], [200, 3]);
    assert_eq!(bytes[448..456], [6, 0, 0, 0, 6, 0, 0, 0]);
    assert_eq!(floats(&bytes[512..536]), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
}

fn external() -> Model {
    Model::default()
        .input("x", FLOAT, &[1, 2])
        .external("w", &[2, 2], "g.onnx.data", 64)
        .node("MatMul", &["x", "w"], &["y"])
        .output("y", FLOAT, &[1, 2])
}

#[test]
fn weights_in_a_file_beside_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let mut data = vec![0; 64];
    data.extend([1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()));
    std::fs::write(dir.path().join("g.onnx.data"), &data).unwrap();
    for prepack in [false, true] {
        let options = CpuOptions { prepack, ..CpuOptions::default() };
        let backend = CpuBackend::new(options).unwrap();
        let source = source(dir.path(), &[("g", &external().build())]);
        let (mut workspace, graph) = workspace(&backend.open_context(&source).unwrap());
        let buffer = workspace.allocate(16).unwrap();
        put(&mut workspace, buffer, &[10.0, 1.0]);
        workspace.bind(graph, Port::Input(0), buffer, 0).unwrap();
        workspace.bind(graph, Port::Output(0), buffer, 8).unwrap();
        workspace.execute(graph).unwrap();
        assert_eq!(floats(&workspace.bytes(buffer).unwrap()[8..]), [13.0, 24.0]);
    }

    // Contexts that are opened together share the file's mapping, and with it what is resident.
    #[cfg(target_os = "linux")]
    {
        let backend = CpuBackend::new(CpuOptions::default()).unwrap();
        let source = source(dir.path(), &[("g", &external().build())]);
        let both = backend.open_contexts(&[source.clone(), source]).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = dir.path().join("g.onnx.data").display().to_string();
        assert_eq!(maps.lines().filter(|line| line.ends_with(&path)).count(), 1, "{maps}");
        assert_eq!(both.len(), 2);
    }

    std::fs::write(dir.path().join("g.onnx.data"), &data[..70]).unwrap();
    let error = refused(dir.path(), external());
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.message().contains("g.onnx.data"), "{error}");
    assert!(error.message().contains("too short"), "{error}");

    std::fs::remove_file(dir.path().join("g.onnx.data")).unwrap();
    let error = refused(dir.path(), external());
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.message().contains("g.onnx.data"), "{error}");
    assert!(error.hint_text().unwrap().contains("beside the model"), "{error}");
}

/// Two layers whose weights are stored in `form`, with the bytes of the file. What is computed between the matmuls
/// depends on what is before them, and on the input.
fn layers(form: u64, by_rten: bool) -> (Model, Vec<u8>) {
    let (rows, columns) = (64u64, 64u64);
    let count = (rows * columns) as usize;
    let wide: Vec<f32> = (0..count).map(|at| ((at * 37 % 101) as f32 - 50.0) / 64.0).collect();
    let mut model = Model::default().input("x", FLOAT, &[2, columns]);
    let mut data = Vec::new();
    for w in ["a", "b"] {
        let at = data.len() as u64;
        let stored = format!("{w}.stored");
        let put = |data: &mut Vec<u8>, bytes: Vec<u8>| data.extend(bytes);
        model = match form {
            FLOAT => {
                put(&mut data, wide.iter().flat_map(|v| v.to_le_bytes()).collect());
                model.external(w, &[rows, columns], "w.data", at)
            }
            FLOAT16 => {
                // The upper half of an f32 of these few bits, with the exponent of an f16.
                let half = |v: &f32| {
                    let bits = v.to_bits();
                    let exponent = ((bits >> 23 & 0xff) as i32 - 112).max(0) as u32;
                    let sign = (bits >> 16) & 0x8000;
                    if *v == 0.0 { 0 } else { (sign | exponent << 10 | bits >> 13 & 0x3ff) as u16 }
                };
                put(&mut data, wide.iter().flat_map(|v| half(v).to_le_bytes()).collect());
                let place = [at, 2 * count as u64];
                model.external_as(&stored, FLOAT16, &[rows, columns], "w.data", place).node_with(
                    "Cast",
                    &[&stored],
                    &[w],
                    &[("to", FLOAT)],
                )
            }
            _ => {
                put(&mut data, wide.iter().map(|v| (v * 64.0) as i8 as u8).collect());
                let scales = format!("{w}.scales");
                model
                    .external_as(&stored, INT8, &[rows, columns], "w.data", [at, count as u64])
                    .weights(&scales, &[rows], &[1.0 / 64.0; 64])
                    .node_with("DequantizeLinear", &[&stored, &scales], &[w], &[("axis", 0)])
            }
        };
    }
    let model = model
        .weights("bias", &[rows], &[0.25; 64])
        .node_with("Gemm", &["x", "a", "bias"], &["h"], &[("transB", 1)])
        .node("Relu", &["h"], &["positive"])
        // Both leave it as it is, and only one is known to rten alone.
        .node(if by_rten { "Flatten" } else { "Identity" }, &["positive"], &["r"])
        .node("Add", &["r", "x"], &["s"])
        .node_with("Gemm", &["s", "b"], &["p"], &[("transB", 1)])
        .node("Mul", &["p", "r"], &["y"])
        .output("y", FLOAT, &[2, rows])
        .output("h", FLOAT, &[2, rows]);
    (model, data)
}

/// Outputs of a model with the input `x`, all in one buffer.
fn outputs(context: &Arc<dyn Context>, x: &[f32]) -> Vec<f32> {
    let (mut workspace, graph) = workspace(context);
    let input = workspace.allocate(4 * x.len()).unwrap();
    put(&mut workspace, input, x);
    workspace.bind(graph, Port::Input(0), input, 0).unwrap();
    let count = workspace.graph(graph).unwrap().1.outputs.len();
    let buffer = workspace.allocate(512 * count).unwrap();
    for port in 0..count {
        workspace.bind(graph, Port::Output(port), buffer, 512 * port).unwrap();
    }
    workspace.execute(graph).unwrap();
    floats(workspace.bytes(buffer).unwrap())
}

#[test]
fn stored_weights_multiply_like_those_of_f32() {
    let x: Vec<f32> = (0..128).map(|at| ((at * 29 % 83) as f32 - 41.0) / 41.0).collect();
    let dir = tempfile::tempdir().unwrap();
    let mut expected: Option<Vec<f32>> = None;
    let forms = [(FLOAT, 4), (FLOAT16, 2), (INT8, 1)];
    for ((form, size), by_rten) in forms.iter().flat_map(|&form| [(form, false), (form, true)]) {
        let (model, data) = layers(form, by_rten);
        std::fs::write(dir.path().join("w.data"), &data).unwrap();
        let model = model.build();
        let source = source(dir.path(), &[("g", &model), ("again", &model)]);
        let context = backend().open_context(&source).unwrap();
        let info: Vec<_> = context.graphs()[0].outputs.iter().map(|t| t.to_string()).collect();
        assert_eq!(info, ["y f32[2, 64]", "h f32[2, 64]"]);
        // Both graphs read the same file, whose weights stay as they are; scales and bias are the models' own. rten has
        // weights of f32 for each.
        let (weights, resident) = (2 * 64 * 64 * size, context.resident_bytes());
        let fits = match by_rten {
            true => resident >= 2 * 64 * 64 * 2 * 4,
            false => (weights..weights + 2048).contains(&resident),
        };
        assert!(fits, "{form}, by rten {by_rten}: {resident}");
        let executors: Vec<_> = context.executors().iter().map(|by| by.to_string()).collect();
        let expected_executor = match by_rten {
            true => "rten: operator Flatten at node r: there are no instructions for it",
            false => "instructions",
        };
        assert_eq!(executors, [expected_executor; 2]);
        let found = outputs(&context, &x);
        assert!(found.iter().all(|y| y.is_finite()) && found.iter().any(|y| y.abs() > 1.0));
        let expected = expected.get_or_insert_with(|| {
            let wide: Vec<_> =
                data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            let (w, rows) = (&wide[..64 * 64], 0..128usize);
            let product = |x: &[f32], bias: f32| -> Vec<f32> {
                let row = |at: usize| x[at / 64 * 64..][..64].iter().zip(&w[at % 64 * 64..]);
                rows.clone().map(|at| row(at).map(|(x, w)| x * w).sum::<f32>() + bias).collect()
            };
            let h = product(&x, 0.25);
            let r: Vec<f32> = h.iter().map(|h| h.max(0.0)).collect();
            let s: Vec<f32> = r.iter().zip(&x).map(|(r, x)| r + x).collect();
            let y = product(&s, 0.0).into_iter().zip(&r).map(|(p, r)| p * r);
            y.chain(h.iter().copied()).collect()
        });
        for (found, expected) in found.iter().zip(&*expected) {
            assert!(
                // With int8 the other factor is rounded to 16 bits.
                (found - expected).abs() <= 4e-4 * expected.abs().max(1.0),
                "{form}: {found}, {expected}"
            );
        }
    }
}

/// Attention of `rows` rows of `heads` heads over a cache of `shared` heads, 21 positions and 10 numbers. An operator
/// that only rten knows sends it there.
fn attention(heads: u64, rows: u64, shared: u64, by_rten: bool) -> Model {
    let all = heads.max(shared);
    let same = if by_rten { "Expand" } else { "Reshape" };
    Model::default()
        .integers("shape", &[all, rows, 10].map(|n| n as i64))
        .input("q", FLOAT, &[heads, rows, 10])
        .input("p", FLOAT, &[heads, rows, 21])
        .input("cache", FLOAT, &[shared, 21, 10])
        .external("zero", &[1], "w.data", 0)
        .transpose("cache", "t", &[0, 2, 1])
        .node("MatMul", &["q", "t"], &["scores"])
        .node("MatMul", &["p", "cache"], &["mixed"])
        .node("Add", &["scores", "zero"], &["s"])
        .node("Add", &["mixed", "zero"], &["sum"])
        .node(same, &["sum", "shape"], &["o"])
        .output("s", FLOAT, &[all, rows, 21])
        .output("o", FLOAT, &[all, rows, 10])
}

#[test]
fn a_few_rows_read_a_cache_where_it_lies() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("w.data"), [0; 4]).unwrap();
    let shapes = [(2, 1, 2), (3, 2, 3), (1, 3, 4), (4, 4, 1), (2, 8, 2), (2, 9, 2)];
    let cases = shapes.iter().flat_map(|&shape| [(shape, false), (shape, true)]);
    for ((heads, rows, shared), by_rten) in cases {
        let all = heads.max(shared);
        let number = |at: usize, by: usize| ((at * by % 97) as f32 - 48.0) / 48.0;
        let q: Vec<f32> = (0..heads * rows * 10).map(|at| number(at, 29)).collect();
        let mut p: Vec<f32> = (0..heads * rows * 21).map(|at| number(at, 31)).collect();
        let mut cache: Vec<f32> = (0..shared * 21 * 10).map(|at| number(at, 37)).collect();
        // Nobody attends to the position 20, which holds anything. Not so where rten multiplies.
        let masked = !by_rten;
        if masked {
            p.chunks_exact_mut(21).for_each(|row| row[20] = 0.0);
            cache.chunks_exact_mut(210).for_each(|head| head[200..].fill(f32::NAN));
        }
        let model = attention(heads as u64, rows as u64, shared as u64, by_rten).build();
        let context = backend().open_context(&source(dir.path(), &[("g", &model)])).unwrap();
        let (mut workspace, graph) = workspace(&context);
        for (port, values) in [&q, &p, &cache].into_iter().enumerate() {
            let buffer = workspace.allocate(4 * values.len()).unwrap();
            put(&mut workspace, buffer, values);
            workspace.bind(graph, Port::Input(port), buffer, 0).unwrap();
        }
        let results = [21, 10].map(|width| workspace.allocate(4 * all * rows * width).unwrap());
        for (port, buffer) in results.into_iter().enumerate() {
            workspace.bind(graph, Port::Output(port), buffer, 0).unwrap();
        }
        workspace.execute(graph).unwrap();
        let [scores, mixed] = results.map(|buffer| floats(workspace.bytes(buffer).unwrap()));
        for head in 0..all {
            let cache = &cache[head % shared * 210..][..210];
            for row in 0..rows {
                let q = &q[(head % heads * rows + row) * 10..][..10];
                let p = &p[(head % heads * rows + row) * 21..][..21];
                let at = head * rows + row;
                let case = format!("{heads} × {rows}, {shared} heads: {head}, {row}");
                for n in 0..if masked { 20 } else { 21 } {
                    let sum: f32 = q.iter().zip(&cache[n * 10..]).map(|(q, k)| q * k).sum();
                    assert!((scores[at * 21 + n] - sum).abs() < 1e-5, "{case}");
                }
                assert_eq!(scores[at * 21 + 20].is_nan(), masked, "{case}");
                for n in 0..10 {
                    let rows = cache.chunks_exact(10).zip(p).filter(|(_, p)| **p != 0.0);
                    let sum: f32 = rows.map(|(v, p)| p * v[n]).sum();
                    assert!((mixed[at * 10 + n] - sum).abs() < 1e-5, "{case}");
                }
            }
        }
    }
}

#[test]
fn weights_of_four_bits_stay_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    // One row of 64 times 0.5 and -1, one times 2 and 0.
    let nibbles = |row: usize, k: usize| ((k * 5 + row * 3) % 16) as f32 - 8.0;
    let scales = [0.5, -1.0, 2.0, 0.0];
    let mut data: Vec<u8> = Vec::new();
    for row in 0..2 {
        for pair in 0..32 {
            let four = |k: usize| (nibbles(row, k) + 8.0) as u8;
            data.push(four(2 * pair) | four(2 * pair + 1) << 4);
        }
    }
    std::fs::write(dir.path().join("w.data"), &data).unwrap();
    let attributes = [("K", 64), ("N", 2), ("bits", 4), ("block_size", 32)];
    let model = Model::default()
        .input("x", FLOAT, &[1, 64])
        .external_as("w", UINT8, &[2, 2, 16], "w.data", [0, 64])
        .weights("scales", &[2, 2], &scales)
        .node_with("MatMulNBits", &["x", "w", "scales"], &["y"], &attributes)
        .output("y", FLOAT, &[1, 2]);
    let x: Vec<f32> = (0..64).map(|k| (k % 7) as f32 - 3.0).collect();
    let terms = |row: usize| {
        let x = x.clone();
        (0..64).map(move |k| (nibbles(row, k) * scales[2 * row + k / 32], x[k]))
    };
    let source = source(dir.path(), &[("g", &model.build())]);
    // The other factor is up to 3, and rounded to 16 bits or to 8.
    for (activations, step) in
        [(Activations::Int16, 3.0 / 32639.0), (Activations::Int8, 3.0 / 127.0)]
    {
        let backend = CpuBackend::new(CpuOptions { activations, ..CpuOptions::default() }).unwrap();
        assert_eq!(backend.info().activations(), Some(activations.name()));
        let context = backend.open_context(&source).unwrap();
        assert_eq!(context.resident_bytes(), 64 + 16);
        for (row, found) in outputs(&context, &x)[..2].iter().enumerate() {
            let expected: f32 = terms(row).map(|(w, x)| w * x).sum();
            let size: f32 = terms(row).map(|(w, _)| w.abs()).sum();
            let off = (found - expected).abs();
            assert!(off <= 0.5 * step * size + 1e-4, "{activations:?}, {row}: {found}, {expected}");
        }
    }
}

/// The warnings of a thread while it does something.
fn warnings(work: impl FnOnce()) -> Vec<String> {
    use std::fmt::{Debug, Write as _};
    use std::sync::Mutex;

    use tracing::field::{Field, Visit};
    use tracing::{Event, Level, Metadata, Subscriber, span};

    #[derive(Default, Clone)]
    struct Log(Arc<Mutex<Vec<String>>>);
    struct Line(String);
    impl Visit for Line {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            write!(self.0, "{}={value:?} ", field.name()).unwrap();
        }
    }
    impl Subscriber for Log {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            *metadata.level() == Level::WARN
        }
        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }
        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn event(&self, event: &Event<'_>) {
            let mut line = Line(String::new());
            event.record(&mut line);
            self.0.lock().unwrap().push(line.0);
        }
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }
    let log = Log::default();
    // Where there is one subscriber only, a thread that has none may turn a warning off for all.
    let _second = tracing::Dispatch::new(log.clone());
    tracing::subscriber::with_default(log.clone(), work);
    log.0.lock().unwrap().clone()
}

#[test]
fn one_warning_names_what_sends_a_graph_to_rten() {
    let dir = tempfile::tempdir().unwrap();
    let open = |by_rten: bool| {
        let (model, data) = layers(FLOAT16, by_rten);
        std::fs::write(dir.path().join("w.data"), data).unwrap();
        let model = model.build();
        warnings(|| {
            let context = open_bytes(dir.path(), &model);
            outputs(&context, &[0.5; 128]);
        })
    };
    assert_eq!(open(false), Vec::<String>::new());
    let lines = open(true);
    let [line] = lines.as_slice() else { panic!("{lines:#?}") };
    // Two matrices of 64 x 64, and a bias of f32.
    for part in [
        "graph=\"g\"",
        "operator Flatten at node r: there are no instructions for it",
        "take 33024 bytes as f32, stored they are 16640",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
}

#[cfg(unix)]
#[test]
fn weights_that_a_link_leads_out_of_the_bundle_for_are_refused() {
    let outside = tempfile::tempdir().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    std::fs::write(&secret, [0; 80]).unwrap();
    let link = dir.path().join("g.onnx.data");
    std::os::unix::fs::symlink(&secret, &link).unwrap();
    let mut source = source(dir.path(), &[("g", &external().build())]);
    source.within = Some(dir.path().to_owned());
    let error = backend().open_context(&source).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Manifest);
    assert!(error.message().contains("g.onnx.data: a link out of"), "{error}");
    // Within the bundle, links are followed.
    std::fs::write(dir.path().join("weights"), [0; 80]).unwrap();
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("weights", &link).unwrap();
    backend().open_context(&source).unwrap();
    // The model itself as a link.
    let model = source.onnx[0].1.clone();
    std::fs::rename(&model, outside.path().join("g.onnx")).unwrap();
    std::os::unix::fs::symlink(outside.path().join("g.onnx"), &model).unwrap();
    let error = backend().open_context(&source).err().unwrap();
    assert!(error.message().contains("g.onnx: a link out of"), "{error}");
    source.within = None;
    backend().open_context(&source).unwrap();
}

#[test]
fn models_that_cannot_run_say_why() {
    let dir = tempfile::tempdir().unwrap();
    let base = || Model::default().output("y", FLOAT, &[2]);
    let cases = [
        (
            base().dynamic_input("x", FLOAT, &[Dim::Named("batch"), Dim::Fixed(2)]).node(
                "Relu",
                &["x"],
                &["y"],
            ),
            ErrorKind::Graph,
            "input \"x\": axis 0 is dynamic (batch)",
        ),
        (
            base().input("x", FLOAT, &[2]).node("Frobnicate", &["x"], &["y"]),
            ErrorKind::Context,
            "Frobnicate",
        ),
        (
            base().input("x", 16, &[2]).node("Relu", &["x"], &["y"]),
            ErrorKind::Graph,
            "input \"x\": expected float, int32, int8 or uint8",
        ),
        (
            base().input("x", FLOAT, &[1 << 40, 1 << 40]).node("Relu", &["x"], &["y"]),
            ErrorKind::Graph,
            "larger than memory can be",
        ),
    ];
    for (model, kind, expected) in cases {
        let error = refused(dir.path(), model);
        assert!(error.message().contains(expected), "{expected}: {error}");
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains("g.onnx"), "{error}");
        assert!(error.message().starts_with("context \"decode\": "), "{error}");
    }
}

#[test]
fn damaged_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let whole = linear().build();
    let mut cases = vec![Vec::new(), b"version https://git-lfs.github.com/spec/v1".to_vec()];
    cases.push(vec![0xff; 1000]);
    // Every truncation is refused or, where only the opset at the end is cut off, still a model.
    cases.extend((0..whole.len() - 10).step_by(7).map(|cut| whole[..cut].to_vec()));
    for bytes in cases {
        let error = backend().open_context(&source(dir.path(), &[("g", &bytes)])).err();
        let error = error.unwrap_or_else(|| panic!("{} bytes are accepted", bytes.len()));
        assert!(error.message().contains("g.onnx"), "{error}");
    }
    let mut missing = source(dir.path(), &[]);
    missing.onnx.push(("g".to_owned(), dir.path().join("absent.onnx")));
    let error = backend().open_context(&missing).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.message().contains("absent.onnx"), "{error}");
}

#[test]
fn a_flipped_byte_never_panics() {
    let dir = tempfile::tempdir().unwrap();
    let whole = linear().build();
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x55;
        let source = source(dir.path(), &[("g", &bytes)]);
        let Ok(context) = backend().open_context(&source) else { continue };
        let (mut workspace, graph) = workspace(&context);
        let (_, info) = workspace.graph(graph).unwrap();
        let info = Arc::clone(info);
        let sizes = info.inputs.iter().chain(&info.outputs).map(|t| t.try_byte_len().unwrap());
        if sizes.max().unwrap_or(0) > 1 << 20 {
            continue;
        }
        let inputs = (0..info.inputs.len()).map(Port::Input);
        for port in inputs.chain((0..info.outputs.len()).map(Port::Output)) {
            let bytes = info.tensor(port).unwrap().try_byte_len().unwrap();
            let buffer = workspace.allocate(bytes).unwrap();
            workspace.bind(graph, port, buffer, 0).unwrap();
        }
        if let Err(error) = workspace.execute(graph) {
            assert_eq!(error.kind(), ErrorKind::Execute, "byte {at}: {error}");
        }
    }
}

#[test]
fn contexts_without_onnx_and_options_out_of_range() {
    let none = ContextSource { key: "vision".to_owned(), ..ContextSource::default() };
    assert!(!backend().accepts(&none));
    let error = backend().open_context(&none).err().unwrap();
    assert!(error.message().contains("context \"vision\" has no ONNX files"), "{error}");
    let error =
        CpuBackend::new(CpuOptions { threads: Some(0), ..CpuOptions::default() }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    let dir = tempfile::tempdir().unwrap();
    let model = linear().build();
    let mut two = source(dir.path(), &[("g", &model), ("h", &model)]);
    assert_eq!(backend().open_context(&two).unwrap().graphs().len(), 2);
    two.onnx[1].0 = "g".to_owned();
    let error = backend().open_context(&two).err().unwrap();
    assert!(error.message().contains("names the graph \"g\" twice"), "{error}");
}
