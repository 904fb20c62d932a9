//! Host time of `llama_generate` at Llama-3.2-1B shapes: per decoded token, per prompt through graphs
//! of 128 tokens against the same prompt through the decode graph, and per snapshot; with the layers
//! in one graph and in four.
//!
//! The graphs execute nothing, so that what remains is qhx. Asserts that a token costs no heap
//! allocation.

#![expect(clippy::print_stdout, reason = "the report is the result")]

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qhx_base::CancelToken;
use qhx_benches::allocations::{self, Counting};
use qhx_core::manifest::Manifest;
use qhx_core::op::{HostOp, OpProvider, OpServices, Segment};
use qhx_exec::Workspace;
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::null::NullBackend;
use qhx_ops_llama as _;
use qhx_plugins::{PluginOptions, Plugins};
use qhx_types::{DType, GraphInfo, TensorInfo};
use serde_json::json;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

type AnyError = Box<dyn std::error::Error>;

const LAYERS: usize = 16;
const HIDDEN: usize = 2048;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const VOCAB: usize = 128_256;
const MAX_CTX: usize = 2048;
const WIDTH: usize = 128;
const PROMPT: usize = 512;
const TOKENS: u32 = 1000;

fn tensor(name: &str, shape: &[usize]) -> TensorInfo {
    TensorInfo::new(name, DType::F16, shape.to_vec())
}

/// Graphs over the caches that take `rows` tokens, one for each shard of the layers.
fn decoder(name: &str, rows: usize, shards: usize) -> Vec<GraphInfo> {
    let each = LAYERS / shards;
    (0..shards).map(|i| shard(&format!("{name}{i}"), rows, i * each..(i + 1) * each)).collect()
}

fn shard(name: &str, rows: usize, layers: Range<usize>) -> GraphInfo {
    let mut inputs = vec![
        tensor("x", &[rows, HIDDEN]),
        tensor("cos", &[rows, HEAD_DIM / 2]),
        tensor("sin", &[rows, HEAD_DIM / 2]),
        tensor("cmask", &[rows, MAX_CTX + rows]),
    ];
    let mut outputs = vec![tensor("y", &[rows, HIDDEN])];
    for layer in layers {
        for kind in ["k", "v"] {
            let past = format!("past_{kind}_{layer}");
            inputs.push(tensor(&past, &[KV_HEADS, MAX_CTX, HEAD_DIM]));
            outputs.push(tensor(&format!("new_{kind}_{layer}"), &[KV_HEADS, rows, HEAD_DIM]));
        }
    }
    GraphInfo::new(name, inputs, outputs)
}

fn open(folder: &Path, prefill: bool, shards: usize) -> Result<Box<dyn HostOp>, AnyError> {
    // A sparse file: the table's size without its bytes on disk.
    let embed = File::create(folder.join("embed_f16.bin"))?;
    embed.set_len((VOCAB * HIDDEN * 2) as u64)?;
    let names = |graphs: &[GraphInfo]| graphs.iter().map(|g| g.name.clone()).collect::<Vec<_>>();
    let lmhead =
        GraphInfo::new("lmhead", [tensor("x", &[1, HIDDEN])], [tensor("logits", &[1, VOCAB])]);
    let decode = decoder("decode", 1, shards);
    let mut params = json!({"decode": names(&decode), "lmhead": "lmhead"});
    let mut contexts = vec![("decode", decode), ("lmhead", vec![lmhead])];
    if prefill {
        let graphs = decoder("prefill", WIDTH, shards);
        params["prefill"] = names(&graphs).into();
        contexts.push(("prefill", graphs));
    }
    let files: serde_json::Map<_, _> = contexts
        .iter()
        .map(|(key, _)| ((*key).to_owned(), json!({"bin": format!("{key}.bin")})))
        .collect();
    let manifest = json!({
        "schema_version": 1,
        "model": {"name": "llama-3.2-1b", "family": "llama", "dsp_arch": null},
        "params": {
            "hidden": HIDDEN, "vocab": VOCAB, "n_layers": LAYERS, "max_ctx": MAX_CTX,
            "head_dim": HEAD_DIM, "rope_theta": 5e5, "eos_token_id": 0
        },
        "artifacts": {"contexts": files, "embed": "embed_f16.bin"},
        "plan": {"params": params, "steps": [{"host": "llama_generate"}]}
    });
    let path = folder.join("bench.json");
    let manifest = Arc::new(Manifest::from_value(&path, manifest, None)?);
    let keys: Vec<_> = contexts.iter().map(|(key, _)| (*key).to_owned()).collect();
    let contexts = contexts.into_iter().map(|(key, graphs)| (key.to_owned(), graphs));
    let backend: Arc<dyn Backend> = Arc::new(NullBackend::new(contexts.collect()));
    let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
    for key in keys {
        let source = ContextSource { key: key.clone(), ..ContextSource::default() };
        workspace.add_context(&key, &backend.open_context(&source)?)?;
    }
    let services = OpServices {
        artifacts: manifest.open_artifacts(),
        manifest,
        workspace,
        threads: Arc::new(rayon::ThreadPoolBuilder::new().num_threads(1).build()?),
        progress: None,
        dump: None,
    };
    let options = PluginOptions::default().only_named(true);
    Ok(Plugins::discover(&options)?.open("llama_generate", services)?)
}

/// The best of five, and heap allocations of the last.
fn best(mut body: impl FnMut() -> Result<(), AnyError>) -> Result<(Duration, u64), AnyError> {
    let (mut best, mut allocated) = (Duration::MAX, 0);
    body()?;
    for _ in 0..5 {
        let count = allocations::count();
        let start = Instant::now();
        body()?;
        best = best.min(start.elapsed());
        allocated = allocations::count() - count;
    }
    Ok((best, allocated))
}

fn executions(op: &dyn HostOp) -> u64 {
    op.graph_stats().iter().map(|graph| graph.executions).sum()
}

fn main() -> Result<(), AnyError> {
    let folder = tempfile::tempdir()?;
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| i * 61 % VOCAB as u32).collect();
    println!("Llama-3.2-1B shapes, null backend, linked in; host time, best of 5");
    let mut first = None;
    for (prefill, shards) in [(true, 1), (true, 4), (false, 1)] {
        let mut op = open(folder.path(), prefill, shards)?;
        let (decode, allocated) = best(|| {
            op.reset()?;
            for token in 0..TOKENS {
                op.decode(token * 97 % VOCAB as u32)?;
            }
            Ok(())
        })?;
        assert_eq!(allocated, 0, "a decode step allocated");
        let before = executions(&*op);
        let (prompt_time, _) = best(|| {
            op.reset()?;
            op.prefill(&[Segment::Tokens(&prompt)])?;
            Ok(())
        })?;
        let each = (executions(&*op) - before) / 6;
        let how = if prefill { "prefill graph of 128" } else { "decode graph only" };
        // The prompt is consumed: the state holds its rows.
        let (save, _) = best(|| {
            let id = op.snapshot()?;
            op.drop_snapshot(id);
            Ok(())
        })?;
        let id = op.snapshot()?;
        let (restore, _) = best(|| Ok(op.restore(id)?))?;
        println!(
            "{how}, {shards} shards: snapshot of {PROMPT} positions {:.2} ms, restore {:.2} ms",
            save.as_secs_f64() * 1e3,
            restore.as_secs_f64() * 1e3
        );
        println!(
            "{how}, {shards} shards: {:.1} µs a token, 0 allocations; prompt of {PROMPT}: {:.2} ms, {each} graph \
             executions",
            decode.as_secs_f64() * 1e6 / f64::from(TOKENS),
            prompt_time.as_secs_f64() * 1e3
        );
        match first {
            None => first = Some(prompt_time),
            Some(_) if prefill => {}
            Some(wide) => println!(
                "host time of the prompt, decode graph only / prefill graph: {:.2}",
                prompt_time.as_secs_f64() / wide.as_secs_f64()
            ),
        }
    }
    Ok(())
}
