//! Host-ops over graphs that execute nothing, so that what remains is qhx.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_core::manifest::Manifest;
use qhx_core::op::{HostOp, OpProvider, OpServices};
use qhx_exec::Workspace;
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::null::NullBackend;
use qhx_plugins::{PluginOptions, Plugins};
use qhx_types::GraphInfo;
use serde_json::{Map, Value, json};

/// Manifest of a model, and its contexts.
#[derive(Debug)]
pub struct NullModel<'a> {
    /// Name of the host-op.
    pub op: &'a str,
    /// `params` of the manifest.
    pub params: Value,
    /// `plan.params` of the manifest.
    pub plan: Value,
    /// `artifacts` of the manifest, without the contexts.
    pub artifacts: Value,
    /// Contexts by key.
    pub contexts: Vec<(String, Vec<GraphInfo>)>,
    /// Threads of the host.
    pub threads: usize,
}

impl NullModel<'_> {
    /// Opens the host-op over the files in `folder`.
    ///
    /// # Errors
    /// When the files, the plugin or the graphs do not fit.
    pub fn open(self, folder: &Path, plugins: &Plugins) -> Result<Box<dyn HostOp>> {
        self.open_with(folder, plugins, |backend| backend)
    }

    /// Same as [`NullModel::open`], with graphs that do what `script` adds.
    ///
    /// # Errors
    /// When the files, the plugin or the graphs do not fit.
    pub fn open_with(
        self,
        folder: &Path,
        plugins: &Plugins,
        script: impl FnOnce(NullBackend) -> NullBackend,
    ) -> Result<Box<dyn HostOp>> {
        let Self { op, params, plan, mut artifacts, contexts, threads } = self;
        let keys: Vec<String> = contexts.iter().map(|(key, _)| key.clone()).collect();
        let bins: Map<_, _> =
            keys.iter().map(|key| (key.clone(), json!({"bin": format!("{key}.bin")}))).collect();
        artifacts["contexts"] = bins.into();
        let manifest = json!({
            "schema_version": 1,
            "model": {"name": "bench", "family": op, "dsp_arch": null},
            "params": params,
            "artifacts": artifacts,
            "plan": {"params": plan, "steps": [{"host": op}]}
        });
        let manifest = Arc::new(Manifest::from_value(&folder.join("bench.json"), manifest, None)?);
        let backend: Arc<dyn Backend> = Arc::new(script(NullBackend::new(contexts)));
        let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
        for key in keys {
            let source = ContextSource { key: key.clone(), ..ContextSource::default() };
            workspace.add_context(&key, &backend.open_context(&source)?)?;
        }
        let threads = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let services = OpServices {
            artifacts: manifest.open_artifacts(),
            manifest,
            workspace,
            threads: Arc::new(threads.map_err(|e| Error::new(ErrorKind::Internal, e.to_string()))?),
            progress: None,
            dump: None,
        };
        plugins.open(op, services)
    }
}

/// The host-ops that are linked in.
///
/// # Errors
/// When two of them have one name.
pub fn linked() -> Result<Plugins> {
    Plugins::discover(&PluginOptions::default().only_named(true))
}

/// Makes files of these sizes, without their bytes on disk, unless they are there.
///
/// # Errors
/// When a file cannot be made.
pub fn sparse(folder: &Path, files: &[(&str, usize)]) -> Result<()> {
    for (name, bytes) in files {
        let path = folder.join(name);
        if path.metadata().is_ok_and(|found| found.len() == *bytes as u64) {
            continue;
        }
        File::create(&path)
            .and_then(|file| file.set_len(*bytes as u64))
            .map_err(|e| Error::io(ErrorKind::Io, &path, e))?;
    }
    Ok(())
}
