//! A hybrid decoder on the backend that executes nothing.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_core::manifest::Manifest;
use qhx_core::op::{HostOp, OpProvider, OpServices};
use qhx_exec::Workspace;
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::null::NullBackend;
use qhx_plugins::Plugins;
use serde_json::json;

use crate::shapes::Hybrid;

/// Opens `qwen3_5_generate` over graphs of the given shapes. The embedding table in `folder` is
/// made, as a file without contents, unless it is there already.
///
/// # Errors
/// When the files, the plugin or the graphs do not fit.
pub fn open(folder: &Path, plugins: &Plugins, shapes: &Hybrid) -> Result<Box<dyn HostOp>> {
    let embed = folder.join("embed_f16.bin");
    if !embed.exists() {
        // A sparse file: the table's size without its bytes on disk.
        File::create(&embed)
            .and_then(|file| file.set_len((shapes.vocab * shapes.hidden * 2) as u64))
            .map_err(|e| Error::io(ErrorKind::Io, &embed, e))?;
    }
    let manifest = json!({
        "schema_version": 1,
        "model": {"name": "qwen3.5-0.8b", "family": "qwen3_5", "dsp_arch": null},
        "params": {
            "hidden": shapes.hidden, "vocab": shapes.vocab, "n_layers": shapes.layers,
            "max_ctx": shapes.max_ctx, "head_dim": shapes.head_dim,
            "rotary_dim": shapes.rotary_dim, "rope_theta": 1e7, "eos_token_id": 0
        },
        "artifacts": {
            "contexts": {"decode": {"bin": "decode.bin"}, "lmhead": {"bin": "lmhead.bin"}},
            "embed": "embed_f16.bin"
        },
        "plan": {
            "params": {"decode": "decode", "lmhead": "lmhead"},
            "steps": [{"host": "qwen3_5_generate"}]
        }
    });
    let manifest = Arc::new(Manifest::from_value(&folder.join("bench.json"), manifest, None)?);
    let backend: Arc<dyn Backend> = Arc::new(NullBackend::new(vec![
        ("decode".to_owned(), vec![shapes.decode()]),
        ("lmhead".to_owned(), vec![shapes.lmhead()]),
    ]));
    let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
    for key in ["decode", "lmhead"] {
        let source = ContextSource { key: key.to_owned(), ..ContextSource::default() };
        workspace.add_context(key, &backend.open_context(&source)?)?;
    }
    let services = OpServices {
        artifacts: manifest.open_artifacts(),
        manifest,
        workspace,
        threads: Arc::new(rayon::ThreadPoolBuilder::new().num_threads(1).build().map_err(pool)?),
        progress: None,
        dump: None,
    };
    plugins.open("qwen3_5_generate", services)
}

fn pool(error: rayon::ThreadPoolBuildError) -> Error {
    Error::new(ErrorKind::Internal, error.to_string())
}
