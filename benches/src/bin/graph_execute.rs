//! Executes one graph of a context binary many times with bound buffers and prints, as one line of
//! JSON, its tensors and the time of each execution in microseconds.
//!
//! `graph_execute libQnnHtp.so libQnnSystem.so context.bin ROUNDS`
//!
//! `benches/ort_overhead.py` runs it against ONNX Runtime on the same context.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use qhx_base::CancelToken;
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::{GraphId, Workspace};
use qhx_qnn::{QnnBackend, QnnOptions, stdout};
use qhx_types::Port;
use serde_json::json;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [htp, system, context, rounds] = &arguments[..] else {
        return Err("usage: graph_execute libQnnHtp.so libQnnSystem.so context.bin ROUNDS".into());
    };
    let rounds: usize = rounds.parse()?;
    // The libraries print to standard output, which is for the result.
    let mut results = stdout::redirect_to_stderr()?.into_file()?;
    let backend: Arc<dyn Backend> = Arc::new(QnnBackend::new(QnnOptions {
        htp: PathBuf::from(htp),
        system: Some(PathBuf::from(system)),
        ..QnnOptions::default()
    })?);
    let source = ContextSource {
        key: "context".to_owned(),
        binary: Some(PathBuf::from(context)),
        ..ContextSource::default()
    };
    let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
    workspace.add_context("context", &backend.open_context(&source)?)?;
    let graph = GraphId(0);
    let info = Arc::clone(workspace.graph(graph)?.1);
    for (ports, port) in
        [(&info.inputs, Port::Input as fn(usize) -> Port), (&info.outputs, Port::Output)]
    {
        for (index, tensor) in ports.iter().enumerate() {
            let buffer = workspace.allocate(tensor.try_byte_len()?)?;
            workspace.bind(graph, port(index), buffer, 0)?;
        }
    }
    for _ in 0..3 {
        workspace.execute(graph)?;
    }
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let start = Instant::now();
        workspace.execute(graph)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    use std::io::Write as _;
    writeln!(results, "{}", json!({"graph": &*info, "microseconds": times}))?;
    Ok(())
}
