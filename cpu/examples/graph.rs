//! Executions of one graph with zeros, again and again: `graph FILE.onnx SECONDS [THREADS]`.
//!
//! Prints, as one line of JSON, how long they took at least and on average, in milliseconds.
//! `benches/ort_cpu_compare.py --graphs` runs it beside ONNX Runtime.

use std::error::Error;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qhx_base::CancelToken;
use qhx_cpu::{CpuBackend, CpuOptions};
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::{GraphId, Workspace};
use qhx_types::Port;

const USAGE: &str = "usage: graph FILE.onnx SECONDS [THREADS]";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [file, seconds, threads @ ..] = &arguments[..] else { return Err(USAGE.into()) };
    let (file, most) = (Path::new(file), Duration::from_secs_f64(seconds.parse()?));
    let threads = threads.first().map(|threads| threads.parse()).transpose()?;
    let onnx = vec![("graph".to_owned(), file.to_owned())];
    let source = ContextSource { key: "graph".to_owned(), onnx, ..ContextSource::default() };
    let backend = CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() })?;
    let context = backend.open_context(&source)?;
    let mut workspace = Workspace::new(Arc::new(backend), CancelToken::new());
    workspace.add_context("graph", &context)?;
    let (graph, info) = (GraphId(0), Arc::clone(&context.graphs()[0]));
    for (ports, port) in
        [(&info.inputs, Port::Input as fn(usize) -> Port), (&info.outputs, Port::Output)]
    {
        for (index, tensor) in ports.iter().enumerate() {
            let buffer = workspace.allocate(tensor.try_byte_len()?)?;
            workspace.bind(graph, port(index), buffer, 0)?;
        }
    }
    let (mut least, mut all, mut count) = (Duration::MAX, Duration::ZERO, 0);
    // The first reads weights from the disk.
    workspace.execute(graph)?;
    while all < most {
        let start = Instant::now();
        workspace.execute(graph)?;
        let time = start.elapsed();
        (least, all, count) = (least.min(time), all + time, count + 1);
    }
    let [least, mean] = [least, all / count].map(|time| time.as_secs_f64() * 1e3);
    writeln!(std::io::stdout(), "{{\"least_ms\": {least:.3}, \"mean_ms\": {mean:.3}}}")?;
    Ok(())
}
