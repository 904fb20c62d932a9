//! A decoder with experts on the host, on the backend that executes nothing.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use half::f16;
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_core::manifest::Manifest;
use qhx_core::op::{HostOp, OpProvider, OpServices};
use qhx_exec::Workspace;
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::null::NullBackend;
use qhx_plugins::Plugins;
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};
use serde_json::json;

use crate::shapes::Experts;

/// Options for opening the op.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    /// Weight inputs are int8 instead of f16.
    pub int8: bool,
    /// The prefill graphs are there.
    pub prompts: bool,
    /// Tokens go to experts at random instead of all to the first two.
    pub random: bool,
    /// Experts are asked for as a whole.
    pub read_ahead: bool,
    /// Threads of the host.
    pub threads: usize,
}

/// The name of the table of weights in the folder.
pub const TABLE: &str = "experts_i8.bin";

/// Makes the tables in `folder`, filled with numbers, unless they are there already.
///
/// # Errors
/// When a file cannot be written.
pub fn make_tables(folder: &Path, shapes: &Experts) -> Result<()> {
    let fail = |path: &Path, e: std::io::Error| Error::io(ErrorKind::Io, path, e);
    let mut random = SplitMix64::seed_from_u64(1);
    for (name, bytes) in [
        (TABLE, shapes.table_bytes()),
        ("experts_scale.f32", shapes.scale_bytes()),
        ("embed_f16.bin", shapes.vocab * shapes.hidden * 2),
    ] {
        let path = folder.join(name);
        if path.metadata().is_ok_and(|m| m.len() == bytes as u64) {
            continue;
        }
        let mut file =
            BufWriter::with_capacity(1 << 20, File::create(&path).map_err(|e| fail(&path, e))?);
        let mut left = bytes;
        while left > 0 {
            let block: Vec<u8> = match name {
                TABLE => (0..1 << 17).flat_map(|_| random.next_u64().to_le_bytes()).collect(),
                "experts_scale.f32" => [7e-4f32.to_le_bytes(); 1 << 14].concat(),
                _ => [f16::from_f32(0.01).to_le_bytes(); 1 << 14].concat(),
            };
            let block = &block[..block.len().min(left)];
            file.write_all(block).map_err(|e| fail(&path, e))?;
            left -= block.len();
        }
        let file = file.into_inner().map_err(|e| fail(&path, e.into_error()))?;
        file.sync_all().map_err(|e| fail(&path, e))?;
    }
    Ok(())
}

/// Opens `phimoe_generate` over graphs of the given shapes and the tables in `folder`.
///
/// # Errors
/// When the files, the plugin or the graphs do not fit.
pub fn open(
    folder: &Path,
    plugins: &Plugins,
    shapes: &Experts,
    way: Way,
) -> Result<Box<dyn HostOp>> {
    let layers = |name: &str, rows: usize| -> Vec<_> {
        (0..shapes.layers).map(|layer| shapes.layer(name, layer, rows)).collect()
    };
    let mut contexts = vec![
        ("a".to_owned(), layers("a", 1)),
        ("ffn2".to_owned(), vec![shapes.ffn("ffn2", &["a_", "b_"], 1, way.int8)]),
        ("lmhead_ar1".to_owned(), vec![shapes.lmhead()]),
    ];
    if way.prompts {
        contexts.push(("pf".to_owned(), layers("pf", shapes.window)));
        let ffn = shapes.ffn("ffn_pf", &[""], shapes.window, way.int8);
        contexts.push(("ffn_pf".to_owned(), vec![ffn]));
    }
    let keys: Vec<String> = contexts.iter().map(|(key, _)| key.clone()).collect();
    let bins: serde_json::Map<_, _> =
        keys.iter().map(|key| (key.clone(), json!({"bin": format!("{key}.bin")}))).collect();
    let manifest = json!({
        "schema_version": 1,
        "model": {"name": "phi-tiny-moe", "family": "phimoe", "dsp_arch": null},
        "params": {
            "hidden": shapes.hidden, "vocab": shapes.vocab, "n_layers": shapes.layers,
            "max_ctx": shapes.max_ctx, "head_dim": shapes.head_dim, "rope_theta": 1e4,
            "n_experts": shapes.experts, "eos_token_id": 0
        },
        "artifacts": {
            "contexts": bins, "embed": "embed_f16.bin",
            "experts": {"weights": TABLE, "scales": "experts_scale.f32"}
        },
        "plan": {"params": {"int8_step": 0.0078125, "read_ahead": way.read_ahead}, "steps": [{"host": "phimoe_generate"}]}
    });
    let manifest = Arc::new(Manifest::from_value(&folder.join("bench.json"), manifest, None)?);
    let mut backend = NullBackend::new(contexts);
    if way.random {
        let mut random = SplitMix64::seed_from_u64(7);
        backend = backend.with_outputs(move |info, outputs| {
            for (tensor, bytes) in info.outputs.iter().zip(outputs) {
                if tensor.name == "router" {
                    for score in bytes.as_chunks_mut::<2>().0 {
                        *score =
                            f16::from_f32((random.next_u64() >> 40) as f32 / 1e6).to_le_bytes();
                    }
                }
            }
            Ok(())
        });
    }
    let backend: Arc<dyn Backend> = Arc::new(backend);
    let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
    for key in keys {
        let source = ContextSource { key: key.clone(), ..ContextSource::default() };
        workspace.add_context(&key, &backend.open_context(&source)?)?;
    }
    let threads = rayon::ThreadPoolBuilder::new().num_threads(way.threads);
    let threads = threads.build().map_err(|e| Error::new(ErrorKind::Internal, e.to_string()))?;
    let services = OpServices {
        artifacts: manifest.open_artifacts(),
        manifest,
        workspace,
        threads: Arc::new(threads),
        progress: None,
        dump: None,
    };
    plugins.open("phimoe_generate", services)
}
