//! A model of one graph that executes nothing, for tests of plugins and of the engine.

use std::path::Path;
use std::sync::Arc;

use qhx_base::{CancelToken, Error, Result};
use qhx_core::dump::Dump;
use qhx_core::engine::{Model, ModelOptions};
use qhx_core::manifest::Manifest;
use qhx_core::op::ProgressFn;
use qhx_exec::null::NullBackend;
use qhx_plugins::Plugins;
use qhx_types::{DType, GraphInfo, TensorInfo};
use serde_json::json;

/// Number of logits of the graph.
pub const VOCAB: usize = 16;

/// Settings of a model besides its op.
#[derive(Default)]
pub struct Setup {
    /// Stops it.
    pub cancel: CancelToken,
    /// Called with the progress of a prompt.
    pub progress: Option<ProgressFn>,
    /// Destination of arrays.
    pub dump: Option<Arc<Dump>>,
    /// Error of executing the graph.
    pub failure: Option<Error>,
}

impl std::fmt::Debug for Setup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Setup")
            .field("dump", &self.dump)
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}

/// Opens `op` over a graph `step` with one output `logits`.
pub fn open(op: &str, plugins: &Plugins, cancel: &CancelToken) -> Result<Model> {
    open_with(op, plugins, Setup { cancel: cancel.clone(), ..Setup::default() })
}

/// Same as [`open`], with all settings that a model can have.
pub fn open_with(op: &str, plugins: &Plugins, setup: Setup) -> Result<Model> {
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
    let graph = GraphInfo::new("step", [], [TensorInfo::new("logits", DType::F32, [1, VOCAB])]);
    let mut backend = NullBackend::new(vec![("step".to_owned(), vec![graph])]);
    if let Some(error) = setup.failure {
        backend = backend.with_outputs(move |_, _| Err(error.clone()));
    }
    Model::open(
        ModelOptions::new(manifest, Arc::new(backend), plugins)
            .threads(1)
            .cancelled_by(setup.cancel)
            .progress(setup.progress)
            .dump(setup.dump),
    )
}
