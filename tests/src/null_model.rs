//! A model of one graph that executes nothing, for tests of plugins and of the engine.

use std::path::Path;
use std::sync::Arc;

use qhx_core::engine::{Model, ModelOptions};
use qhx_core::manifest::Manifest;
use qhx_core::null::NullBackend;
use qhx_core::op::ProgressFn;
use qhx_core::{CancelToken, DType, GraphInfo, Result, TensorInfo};
use qhx_plugins::Plugins;
use serde_json::json;

/// Number of logits of the graph.
pub const VOCAB: usize = 16;

/// Opens `op` over a graph `step` with one output `logits`.
pub fn open(op: &str, plugins: &Plugins, cancel: &CancelToken) -> Result<Model> {
    open_with(op, plugins, cancel, None)
}

/// As [`open`], with a function that is told how far a prompt is.
pub fn open_with(
    op: &str,
    plugins: &Plugins,
    cancel: &CancelToken,
    progress: Option<ProgressFn>,
) -> Result<Model> {
    let manifest = json!({
        "schema_version": 1,
        "model": {"name": "null"},
        "artifacts": {"contexts": {"step": {"bin": "step.bin"}}},
        "plan": {"steps": [{"host": op}]}
    });
    let folder = std::env::temp_dir();
    std::fs::write(folder.join("step.bin"), b"").expect("the temporary folder is writable");
    let manifest =
        Manifest::from_value(&folder.join("null.json"), manifest, Some(Path::new(&folder)))?;
    let graph = GraphInfo {
        name: "step".to_owned(),
        inputs: vec![],
        outputs: vec![TensorInfo::new("logits", DType::F32, [1, VOCAB])],
    };
    Model::open(ModelOptions {
        manifest: Arc::new(manifest),
        backend: Arc::new(NullBackend::new(vec![("step".to_owned(), vec![graph])])),
        ops: plugins,
        threads: Some(1),
        cancel: cancel.clone(),
        progress,
    })
}
