//! Matmuls of a decode step, again and again: `matmuls FORM SHAPE COUNT [ROWS [ACTIVATIONS]]`.
//!
//! FORM is `f16`, `int8`, `int8-blocks` or `int4`, SHAPE `square` (4096 × 4096) or `layer` (those of a layer of
//! Llama-3.2-1B), ROWS the tokens of a step (1), and ACTIVATIONS `auto`, `int16` or `int8`. One thread executes them,
//! and prints how long each time took at least. `benches/cpu_instructions.py` counts its instructions under an
//! emulator.

use std::error::Error;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qhx_base::CancelToken;
use qhx_cpu::{Activations, CpuBackend, CpuOptions};
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::{GraphId, Workspace};
use qhx_graph::Silent;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::Elem;
use qhx_graph::onnx;
use qhx_graph::quantize::{Bits, QuantizedForm};
use qhx_graph::weight::{RowSource, Storage, Weight};
use qhx_types::{DType, Port};

const USAGE: &str =
    "usage: matmuls f16|int8|int8-blocks|int4 square|layer COUNT [ROWS [auto|int16|int8]]";

/// Outputs and inputs of a matrix.
type Shape = [usize; 2];

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

/// A matrix of numbers of few bits.
#[derive(Debug)]
struct Matrix(Shape);

impl RowSource for Matrix {
    fn name(&self) -> &str {
        "matrix"
    }

    fn shape(&self) -> Shape {
        self.0
    }

    fn stored_dtype(&self) -> DType {
        DType::F16
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> qhx_base::Result<()> {
        let start = first * self.0[1];
        out.iter_mut().enumerate().for_each(|(at, w)| *w = ((start + at) % 13) as f32 / 8.0 - 0.75);
        Ok(())
    }
}

/// A graph of a matmul with each of the matrices.
fn source(
    folder: &Path,
    form: &str,
    shapes: &[Shape],
    rows: usize,
) -> Result<ContextSource, Box<dyn Error>> {
    let storage = match form {
        "f16" => Storage::Float,
        "int8" => Storage::Int8,
        "int8-blocks" => Storage::Blocks(QuantizedForm::symmetric(Bits::Eight, 32)),
        "int4" => Storage::Blocks(QuantizedForm::symmetric(Bits::Four, 32)),
        _ => return Err(USAGE.into()),
    };
    let mut b = GraphBuilder::new("matmuls");
    let mut widths: Vec<usize> = shapes.iter().map(|[_, k]| *k).collect();
    widths.sort_unstable();
    widths.dedup();
    let mut inputs = Vec::new();
    for k in widths {
        inputs.push((k, b.input(&format!("x{k}"), Elem::Activation, &[rows, k])?));
    }
    for (at, &shape) in shapes.iter().enumerate() {
        let known = inputs.iter().find(|(k, _)| *k == shape[1]);
        let x = known.map(|(_, x)| *x).ok_or(USAGE)?;
        let y =
            b.linear(&format!("w{at}"), x, Weight::new(Arc::new(Matrix(shape)), storage), None)?;
        b.output(&format!("y{at}"), y)?;
    }
    let written = onnx::write(&b.finish()?, folder, &mut Silent)?;
    let onnx = vec![("matmuls".to_owned(), written.model)];
    Ok(ContextSource { key: "matmuls".to_owned(), onnx, ..ContextSource::default() })
}
