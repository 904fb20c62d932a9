//! The CPU backend over graphs in files.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use std::path::Path;
use std::sync::Arc;

use qhx_base::{CancelToken, Error, ErrorKind};
use qhx_cpu::{Activations, CpuBackend, CpuOptions};
use qhx_exec::backend::{Backend, Context, ContextSource};
use qhx_exec::{GraphId, Workspace};
use qhx_graph::Silent;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph};
use qhx_graph::onnx;
use qhx_graph::quantize::{Bits, Quantized, QuantizedForm};
use qhx_graph::weight::{Storage, Weight, held, held_blocks};
use qhx_types::{DType, Port};

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap()
}

/// A context of these graphs, in files of the folder that hold their weights together.
fn source(dir: &Path, graphs: &[&Graph]) -> ContextSource {
    onnx::write_all(graphs, dir, &mut Silent).unwrap();
    let mut source = ContextSource { key: "decode".to_owned(), ..ContextSource::default() };
    for graph in graphs {
        let path = dir.join(format!("{}.onnx", graph.name()));
        source.onnx.push((graph.name().to_owned(), path));
    }
    source
}

fn open(dir: &Path, graph: &Graph) -> Arc<dyn Context> {
    backend().open_context(&source(dir, &[graph])).unwrap()
}

/// A weight with the value of each place.
fn weight(shape: [usize; 2], value: fn(usize) -> f32, storage: Storage) -> Weight {
    let values = (0..shape[0] * shape[1]).map(value).collect();
    Weight::new(held("matrix", shape, values), storage)
}

/// `y = x · w + b`, and `z = relu(y)`.
fn linear() -> Graph {
    let mut g = GraphBuilder::new("g");
    let x = g.input("x", Elem::Activation, &[2, 3]).unwrap();
    let b = g.input("b", Elem::Activation, &[1, 2]).unwrap();
    let w = |at| [1.0, 3.0, 5.0, 2.0, 4.0, 6.0][at];
    let w = weight([2, 3], w, Storage::Float);
    let y = g.linear("w", x, w, None).unwrap();
    let y = g.add(y, b).unwrap();
    let z = g.relu(y).unwrap();
    g.output("y", y).unwrap();
    g.output("z", z).unwrap();
    g.finish().unwrap()
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

/// Outputs of a model with these inputs.
fn outputs(context: &Arc<dyn Context>, inputs: &[&[f32]]) -> Vec<Vec<f32>> {
    let (mut workspace, graph) = workspace(context);
    for (port, values) in inputs.iter().enumerate() {
        let buffer = workspace.allocate(4 * values.len()).unwrap();
        put(&mut workspace, buffer, values);
        workspace.bind(graph, Port::Input(port), buffer, 0).unwrap();
    }
    let mut results = Vec::new();
    for (port, tensor) in context.graphs()[0].outputs.iter().enumerate() {
        results.push(workspace.allocate(tensor.byte_len()).unwrap());
        workspace.bind(graph, Port::Output(port), results[port], 0).unwrap();
    }
    workspace.execute(graph).unwrap();
    results.iter().map(|buffer| floats(workspace.bytes(*buffer).unwrap())).collect()
}

#[test]
fn a_model_is_described_and_computes() {
    let dir = tempfile::tempdir().unwrap();
    let context = open(dir.path(), &linear());
    let info = &context.graphs()[0];
    let tensors: Vec<_> = info.inputs.iter().chain(&info.outputs).map(|t| t.to_string()).collect();
    assert_eq!(info.name, "g");
    assert_eq!(tensors, ["x f32[2, 3]", "b f32[1, 2]", "y f32[2, 2]", "z f32[2, 2]"]);
    assert_eq!(context.resident_bytes(), 12);

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
    let mut g = GraphBuilder::new("g");
    let [s, d] = ["s", "d"].map(|name| g.input(name, Elem::Activation, &[4]).unwrap());
    let t = g.add(s, d).unwrap();
    g.output("t", t).unwrap();
    let graph = g.finish().unwrap();
    let (mut workspace, graph) = workspace(&open(dir.path(), &graph));
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
    let mut g = GraphBuilder::new("g");
    let i = g.input("i", Elem::I32, &[2]).unwrap();
    let q = g.input("q", Elem::Int8, &[1, 3]).unwrap();
    let h = g.input("h", Elem::F32, &[2, 3]).unwrap();
    let x = g.input("x", Elem::Activation, &[1, 3]).unwrap();
    let sum = g.add(i, i).unwrap();
    let turned = g.transpose(h, &[1, 0]).unwrap();
    let y = g.matmul(x, q, true).unwrap();
    for (name, id) in [("sum", sum), ("turned", turned), ("y", y)] {
        g.output(name, id).unwrap();
    }
    let context = open(dir.path(), &g.finish().unwrap());
    let info = Arc::clone(&context.graphs()[0]);
    let dtypes: Vec<_> = info.inputs.iter().map(|t| t.dtype).collect();
    assert_eq!(dtypes, [DType::I32, DType::I8, DType::F32, DType::F32]);
    let (mut workspace, graph) = workspace(&context);
    let all = workspace.allocate(1024).unwrap();
    let ports = (0..4).map(Port::Input).chain((0..3).map(Port::Output));
    for (slot, port) in ports.enumerate() {
        workspace.bind(graph, port, all, 64 * slot).unwrap();
    }
    let bytes = workspace.bytes_mut(all).unwrap();
    bytes[..8].copy_from_slice(&[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    bytes[64..67].copy_from_slice(&[1, 0xff, 0x80]);
    for (slot, values) in [(128, &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0][..]), (192, &[2.0, 4.0, 8.0])] {
        for (i, value) in values.iter().enumerate() {
            bytes[slot + 4 * i..][..4].copy_from_slice(&value.to_le_bytes());
        }
    }
    workspace.execute(graph).unwrap();
    let bytes = workspace.bytes(all).unwrap();
    assert_eq!(bytes[256..264], [2, 0, 0, 0, 0xfe, 0xff, 0xff, 0xff]);
    assert_eq!(floats(&bytes[320..344]), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    // A step of int8 is 1/128.
    assert_eq!(floats(&bytes[384..388]), [(2.0 - 4.0 - 8.0 * 128.0) / 128.0]);
}

/// `y = x · w`, with the weights in a file of their own.
fn external() -> Graph {
    let mut g = GraphBuilder::new("g");
    let x = g.input("x", Elem::Activation, &[1, 2]).unwrap();
    let w = weight([2, 2], |at| [1.0, 3.0, 2.0, 4.0][at], Storage::Float);
    let y = g.linear("w", x, w, None).unwrap();
    g.output("y", y).unwrap();
    g.finish().unwrap()
}

#[test]
fn weights_in_a_file_beside_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(dir.path(), &[&external()]);
    let context = backend().open_context(&source).unwrap();
    assert_eq!(outputs(&context, &[&[10.0, 1.0]]), [[13.0, 24.0]]);
    drop(context);

    let data = dir.path().join("g.onnx_data");
    // Contexts that are opened together share the file's mapping, and with it what is resident.
    #[cfg(target_os = "linux")]
    {
        let both = backend().open_contexts(&[source.clone(), source.clone()]).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = data.display().to_string();
        assert_eq!(maps.lines().filter(|line| line.ends_with(&path)).count(), 1, "{maps}");
        assert_eq!(both.len(), 2);
    }

    let bytes = std::fs::read(&data).unwrap();
    std::fs::write(&data, &bytes[..5]).unwrap();
    let error = refused(&source);
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.message().contains("8 bytes at 0 of \"g.onnx_data\", which has 5"), "{error}");

    std::fs::remove_file(&data).unwrap();
    let error = refused(&source);
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.message().contains("g.onnx_data"), "{error}");
    assert!(error.hint_text().unwrap().contains("beside the model"), "{error}");
}

/// The same context over files as they are now.
fn fresh(source: &ContextSource) -> ContextSource {
    let ContextSource { key, onnx, within, .. } = source.clone();
    ContextSource { key, onnx, within, ..ContextSource::default() }
}

fn refused(source: &ContextSource) -> Error {
    backend().open_context(&fresh(source)).err().expect("the graph is accepted")
}

/// The weights of [`layers`].
fn wide(at: usize) -> f32 {
    // The first of each row makes 1/64 the scale of a row of int8.
    if at.is_multiple_of(64) { 127.0 / 64.0 } else { ((at * 37 % 101) as f32 - 50.0) / 64.0 }
}

/// Two layers with these weights. What is computed between the matmuls depends on what is before them, and on the
/// input.
fn layers(name: &str, weight: &Weight) -> Graph {
    let mut g = GraphBuilder::new(name);
    let x = g.input("x", Elem::Activation, &[2, 64]).unwrap();
    let h = g.linear("a", x, weight.clone(), Some(vec![0.25; 64])).unwrap();
    let r = g.relu(h).unwrap();
    let s = g.add(r, x).unwrap();
    let p = g.linear("b", s, weight.clone(), None).unwrap();
    let y = g.mul(p, r).unwrap();
    g.output("y", y).unwrap();
    g.output("h", h).unwrap();
    g.finish().unwrap()
}

#[test]
fn stored_weights_multiply_like_those_of_f32() {
    let x: Vec<f32> = (0..128).map(|at| ((at * 29 % 83) as f32 - 41.0) / 41.0).collect();
    let product = |x: &[f32], bias: f32| -> Vec<f32> {
        let sum = |row: usize, n: usize| -> f32 {
            (0..64).map(|k| x[row * 64 + k] * wide(n * 64 + k)).sum::<f32>() + bias
        };
        (0..128).map(|at| sum(at / 64, at % 64)).collect()
    };
    let h = product(&x, 0.25);
    let r: Vec<f32> = h.iter().map(|h| h.max(0.0)).collect();
    let s: Vec<f32> = r.iter().zip(&x).map(|(r, x)| r + x).collect();
    let y = product(&s, 0.0).into_iter().zip(&r).map(|(p, r)| p * r);
    let expected: Vec<f32> = y.chain(h.iter().copied()).collect();
    // The first is no value of f16, and too small to be seen.
    let fine = |at: usize| if at == 1 { wide(1) + 1e-4 } else { wide(at) };
    for (value, storage, size) in [
        (fine as fn(usize) -> f32, Storage::Float, 4),
        (wide, Storage::Float, 2),
        (wide, Storage::Int8, 1),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let weight = weight([64, 64], value, storage);
        let (first, second) = (layers("g", &weight), layers("again", &weight));
        let source = source(dir.path(), &[&first, &second]);
        let context = backend().open_context(&source).unwrap();
        let info: Vec<_> = context.graphs()[0].outputs.iter().map(|t| t.to_string()).collect();
        assert_eq!(info, ["y f32[2, 64]", "h f32[2, 64]"]);
        // Both layers of both graphs read the same numbers, which stay as they are; biases are the graphs' own.
        let (weights, resident) = (64 * 64 * size, context.resident_bytes());
        assert!((weights..weights + 2048).contains(&resident), "{size}: {resident}");
        let found = outputs(&context, &[&x]).concat();
        assert!(found.iter().all(|y| y.is_finite()) && found.iter().any(|y| y.abs() > 1.0));
        for (found, expected) in found.iter().zip(&expected) {
            // With int8 the other factor is rounded to 16 bits.
            let most = 4e-4 * expected.abs().max(1.0);
            assert!((found - expected).abs() <= most, "{size}: {found}, {expected}");
        }
    }
}

/// Attention matmuls of `rows` rows of heads over a cache of 21 positions and 10 numbers.
fn attention(heads: usize, rows: usize) -> Graph {
    let mut g = GraphBuilder::new("g");
    let q = g.input("q", Elem::Activation, &[heads, rows, 10]).unwrap();
    let p = g.input("p", Elem::Activation, &[heads, rows, 21]).unwrap();
    let cache = g.input("cache", Elem::Activation, &[heads, 21, 10]).unwrap();
    let scores = g.matmul(q, cache, true).unwrap();
    let mixed = g.matmul(p, cache, false).unwrap();
    g.output("s", scores).unwrap();
    g.output("o", mixed).unwrap();
    g.finish().unwrap()
}

#[test]
fn a_few_rows_read_a_cache_where_it_lies() {
    for (heads, rows) in [(2, 1), (3, 2), (1, 3), (4, 4), (2, 8), (2, 9)] {
        let dir = tempfile::tempdir().unwrap();
        let number = |at: usize, by: usize| ((at * by % 97) as f32 - 48.0) / 48.0;
        let q: Vec<f32> = (0..heads * rows * 10).map(|at| number(at, 29)).collect();
        let mut p: Vec<f32> = (0..heads * rows * 21).map(|at| number(at, 31)).collect();
        let mut cache: Vec<f32> = (0..heads * 21 * 10).map(|at| number(at, 37)).collect();
        // Nobody attends to the position 20, which holds anything.
        p.chunks_exact_mut(21).for_each(|row| row[20] = 0.0);
        cache.chunks_exact_mut(210).for_each(|head| head[200..].fill(f32::NAN));
        let context = open(dir.path(), &attention(heads, rows));
        let [scores, mixed] = &outputs(&context, &[&q, &p, &cache])[..] else { unreachable!() };
        for (head, row) in (0..heads).flat_map(|head| (0..rows).map(move |row| (head, row))) {
            let (cache, at) = (&cache[head * 210..][..210], head * rows + row);
            let (q, p) = (&q[at * 10..][..10], &p[at * 21..][..21]);
            let case = format!("{heads} × {rows}: {head}, {row}");
            for n in 0..20 {
                let sum: f32 = q.iter().zip(&cache[n * 10..]).map(|(q, k)| q * k).sum();
                assert!((scores[at * 21 + n] - sum).abs() < 1e-5, "{case}");
            }
            assert!(scores[at * 21 + 20].is_nan(), "{case}");
            for n in 0..10 {
                let rows = cache.chunks_exact(10).zip(p).filter(|(_, p)| **p != 0.0);
                let sum: f32 = rows.map(|(v, p)| p * v[n]).sum();
                assert!((mixed[at * 10 + n] - sum).abs() < 1e-5, "{case}");
            }
        }
    }
}

#[test]
fn weights_of_four_bits_stay_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let integer = |at: usize| ((at % 64 * 5 + at / 64 * 3) % 16) as f32 - 8.0;
    let scales = [0.5, -1.0, 2.0, 0.0];
    let form = QuantizedForm::symmetric(Bits::Four, 32);
    let values = (0..128).map(|at| integer(at) as i8).collect();
    let blocks = Quantized { form, values, scales: scales.to_vec(), offsets: Vec::new() };
    let mut g = GraphBuilder::new("g");
    let x = g.input("x", Elem::Activation, &[1, 64]).unwrap();
    let weight = Weight::new(held_blocks("matrix", [2, 64], blocks), Storage::Blocks(form));
    let y = g.linear("w", x, weight, None).unwrap();
    g.output("y", y).unwrap();
    let source = source(dir.path(), &[&g.finish().unwrap()]);
    let x: Vec<f32> = (0..64).map(|k| (k % 7) as f32 - 3.0).collect();
    let terms = |row: usize| {
        let x = x.clone();
        (0..64).map(move |k| (integer(row * 64 + k) * scales[2 * row + k / 32], x[k]))
    };
    // The other factor is up to 3, and rounded to 16 bits or to 8.
    for (activations, step) in
        [(Activations::Int16, 3.0 / 32639.0), (Activations::Int8, 3.0 / 127.0)]
    {
        let backend = CpuBackend::new(CpuOptions { activations, ..CpuOptions::default() }).unwrap();
        assert_eq!(backend.info().activations(), Some(activations.name()));
        let context = backend.open_context(&source).unwrap();
        // Two integers a byte, and scales of f16.
        assert_eq!(context.resident_bytes(), 64 + 8);
        for (row, found) in outputs(&context, &[&x])[0].iter().enumerate() {
            let expected: f32 = terms(row).map(|(w, x)| w * x).sum();
            let size: f32 = terms(row).map(|(w, _)| w.abs()).sum();
            let off = (found - expected).abs();
            assert!(off <= 0.5 * step * size + 1e-4, "{activations:?}, {row}: {found}, {expected}");
        }
    }
}

#[cfg(unix)]
#[test]
fn weights_that_a_link_leads_out_of_the_bundle_for_are_refused() {
    let outside = tempfile::tempdir().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut source = source(dir.path(), &[&external()]);
    source.within = Some(dir.path().to_owned());
    let link = dir.path().join("g.onnx_data");
    let secret = outside.path().join("secret");
    std::fs::copy(&link, &secret).unwrap();
    std::fs::rename(&link, dir.path().join("weights")).unwrap();
    std::os::unix::fs::symlink(&secret, &link).unwrap();
    let error = refused(&source);
    assert_eq!(error.kind(), ErrorKind::Manifest);
    assert!(error.message().contains("g.onnx_data: a link out of"), "{error}");
    // Within the bundle, links are followed.
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("weights", &link).unwrap();
    backend().open_context(&fresh(&source)).unwrap();
    // The model itself as a link.
    let model = source.onnx[0].1.clone();
    std::fs::rename(&model, outside.path().join("g.onnx")).unwrap();
    std::os::unix::fs::symlink(outside.path().join("g.onnx"), &model).unwrap();
    let error = refused(&source);
    assert!(error.message().contains("g.onnx: a link out of"), "{error}");
    source.within = None;
    backend().open_context(&fresh(&source)).unwrap();
}

#[test]
fn onnx_of_another_program_is_refused_with_a_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(dir.path(), &[&linear()]);
    let path = &source.onnx[0].1;
    let bytes = std::fs::read(path).unwrap();
    let at = bytes.windows(9).position(|part| part == b"qhx.graph").unwrap();
    let mut foreign = bytes.clone();
    foreign[at..at + 9].copy_from_slice(b"its.graph");
    std::fs::write(path, &foreign).unwrap();
    let error = refused(&source);
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.message().starts_with("context \"decode\": "), "{error}");
    assert!(error.message().contains("g.onnx: an ONNX file without a graph of qhx"), "{error}");
    assert!(error.hint_text().unwrap().contains("qhx forge"), "{error}");
    let version = bytes.windows(11).position(|part| part == b"\"version\":2").unwrap();
    let mut newer = bytes;
    newer[version + 10] = b'9';
    std::fs::write(path, newer).unwrap();
    let error = refused(&source);
    assert!(error.message().contains("has version 9, expected 2"), "{error}");
}

#[test]
fn damaged_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(dir.path(), &[&linear()]);
    let path = &source.onnx[0].1;
    let whole = std::fs::read(path).unwrap();
    let mut cases = vec![Vec::new(), b"version https://git-lfs.github.com/spec/v1".to_vec()];
    cases.push(vec![0xff; 1000]);
    cases.extend((0..whole.len()).step_by(7).map(|cut| whole[..cut].to_vec()));
    for bytes in cases {
        std::fs::write(path, &bytes).unwrap();
        let error = refused(&source);
        assert!(error.message().contains("g.onnx"), "{error}");
    }
    let mut missing = source.clone();
    missing.onnx[0].1 = dir.path().join("absent.onnx");
    let error = refused(&missing);
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.message().contains("absent.onnx"), "{error}");
}

#[test]
fn a_flipped_byte_never_panics() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(dir.path(), &[&linear()]);
    let path = &source.onnx[0].1;
    let whole = std::fs::read(path).unwrap();
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x55;
        std::fs::write(path, &bytes).unwrap();
        let Ok(context) = backend().open_context(&fresh(&source)) else { continue };
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
    let weight = weight([64, 64], wide, Storage::Float);
    let mut two = source(dir.path(), &[&layers("g", &weight), &layers("h", &weight)]);
    assert_eq!(backend().open_context(&two).unwrap().graphs().len(), 2);
    two.onnx[1].0 = "g".to_owned();
    let error = backend().open_context(&two).err().unwrap();
    assert!(error.message().contains("names the graph \"g\" twice"), "{error}");
}
