//! Matmuls of a decode step, again and again: `matmuls FORM SHAPE COUNT [ROWS [ACTIVATIONS]]`.
//!
//! FORM is `f16`, `int8`, `int8-blocks` or `int4`, SHAPE `square` (4096 × 4096) or `layer` (those of a layer of
//! Llama-3.2-1B), ROWS the tokens of a step (1), and ACTIVATIONS `int16` or `int8`. One thread executes them, and
//! prints how long each time took at least. `benches/cpu_instructions.py` counts its instructions under an emulator.

use qhx_base::CancelToken;
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::{GraphId, Workspace};
use qhx_types::Port;

#[expect(dead_code, reason = "unit tests need more of it")]
#[path = "../tests/onnx/mod.rs"]
mod onnx;

use std::error::Error;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onnx::{FLOAT, FLOAT16, INT8, Model, UINT8};
use qhx_cpu::{Activations, CpuBackend, CpuOptions};

const USAGE: &str =
    "usage: matmuls f16|int8|int8-blocks|int4 square|layer COUNT [ROWS [int16|int8]]";
const FILE: &str = "weights";
const BLOCK: u64 = 32;

/// Outputs and inputs of a matrix.
type Shape = [u64; 2];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let [form, shape, count, ref rest @ ..] = arguments[..] else { return Err(USAGE.into()) };
    let (rows, activations) = match *rest {
        [] => (1, Activations::default()),
        [rows] => (rows.parse()?, Activations::default()),
        [rows, activations] => (rows.parse()?, activations.parse()?),
        _ => return Err(USAGE.into()),
    };
    let (shapes, count) = (shapes(shape)?, count.parse()?);
    let folder = tempfile::tempdir()?;
    let source = source(folder.path(), form, &shapes, rows)?;
    let options = CpuOptions { threads: Some(1), activations, ..CpuOptions::default() };
    let backend = CpuBackend::new(options)?;
    let context = backend.open_context(&source)?;
    let mut workspace = Workspace::new(Arc::new(backend), CancelToken::new());
    workspace.add_context("matmuls", &context)?;
    let graph = GraphId(0);
    let info = Arc::clone(&context.graphs()[0]);
    for (port, tensor) in info.inputs.iter().enumerate() {
        let buffer = workspace.allocate(tensor.byte_len())?;
        for (at, x) in workspace.bytes_mut(buffer)?.chunks_exact_mut(4).enumerate() {
            x.copy_from_slice(&((at % 61) as f32 / 30.0 - 1.0).to_le_bytes());
        }
        workspace.bind(graph, Port::Input(port), buffer, 0)?;
    }
    for (port, tensor) in info.outputs.iter().enumerate() {
        let buffer = workspace.allocate(tensor.byte_len())?;
        workspace.bind(graph, Port::Output(port), buffer, 0)?;
    }
    let mut least = Duration::MAX;
    for _ in 0..count {
        let start = Instant::now();
        workspace.execute(graph)?;
        least = least.min(start.elapsed());
    }
    writeln!(std::io::stdout(), "{} µs", least.as_micros())?;
    Ok(())
}

fn shapes(name: &str) -> Result<Vec<Shape>, Box<dyn Error>> {
    match name {
        "square" => Ok(vec![[4096, 4096]]),
        "layer" => Ok(vec![
            [2048, 2048],
            [512, 2048],
            [512, 2048],
            [2048, 2048],
            [8192, 2048],
            [8192, 2048],
            [2048, 8192],
        ]),
        _ => Err(USAGE.into()),
    }
}

/// A graph of a matmul with each of the matrices, whose weights are any numbers.
fn source(
    folder: &Path,
    form: &str,
    shapes: &[Shape],
    rows: u64,
) -> Result<ContextSource, Box<dyn Error>> {
    let mut model = Model::default();
    let mut widths: Vec<u64> = shapes.iter().map(|[_, k]| *k).collect();
    widths.sort_unstable();
    widths.dedup();
    for k in widths {
        model = model.input(&format!("x{k}"), FLOAT, &[rows, k]);
    }
    let mut end = 0;
    for (at, &[n, k]) in shapes.iter().enumerate() {
        let (x, y, w) = (&format!("x{k}"), &format!("y{at}"), &format!("w{at}"));
        let name = |suffix: &str| format!("{w}.{suffix}");
        let (stored, scales) = (&name("stored"), &name("scales"));
        let mut place = |bytes: u64| {
            let start = end;
            end += bytes;
            [start, bytes]
        };
        let steps = |count: u64| vec![0.01; count as usize];
        let blocks = n * k / BLOCK;
        model = match form {
            "f16" => model.external_as(stored, FLOAT16, &[n, k], FILE, place(2 * n * k)).node_with(
                "Cast",
                &[stored],
                &[w],
                &[("to", FLOAT)],
            ),
            "int8" => model
                .external_as(stored, INT8, &[n, k], FILE, place(n * k))
                .weights(scales, &[n], &steps(n))
                .node_with("DequantizeLinear", &[stored, scales], &[w], &[("axis", 0)]),
            "int8-blocks" => model
                .external_as(stored, INT8, &[blocks, BLOCK], FILE, place(n * k))
                .weights(scales, &[blocks], &steps(blocks))
                .integers(&name("shape"), &[n as i64, k as i64])
                .node_with("DequantizeLinear", &[stored, scales], &[&name("wide")], &[("axis", 0)])
                .node("Reshape", &[&name("wide"), &name("shape")], &[w]),
            "int4" => model
                .external_as(w, UINT8, &[n, k / BLOCK, BLOCK / 2], FILE, place(n * k / 2))
                .weights(scales, &[n, k / BLOCK], &steps(blocks)),
            _ => return Err(USAGE.into()),
        };
        let sizes = [("K", k), ("N", n), ("bits", 4), ("block_size", BLOCK)];
        model = match form {
            "int4" => model.node_with("MatMulNBits", &[x, w, scales], &[y], &sizes),
            _ => model.node_with("Gemm", &[x, w], &[y], &[("transB", 1)]),
        };
        model = model.output(y, FLOAT, &[rows, n]);
    }
    // As f16 they are finite.
    std::fs::write(folder.join(FILE), vec![33; end as usize])?;
    let path = folder.join("matmuls.onnx");
    std::fs::write(&path, model.build())?;
    let onnx = vec![("matmuls".to_owned(), path)];
    Ok(ContextSource { key: "matmuls".to_owned(), onnx, ..ContextSource::default() })
}
