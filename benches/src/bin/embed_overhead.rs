//! Host time per text at the published NV-EmbedCode-7B shapes, by part: an encoder in four chained
//! contexts, hidden width 4096, 512 tokens.
//!
//! The graphs execute nothing, so that what remains is qhx: embedding rows, masks, binding,
//! pooling. The hidden states between parts are one buffer bound at both ends, which is checked:
//! each part finds what the one before has written, and the time of the parts is that of no copy.

#![expect(clippy::print_stdout, reason = "the report is the result")]

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
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

const PARTS: usize = 4;
const HIDDEN: usize = 4096;
const LENGTH: usize = 512;
const HEAD_DIM: usize = 128;
const VOCAB: usize = 32_000;
const TEXTS: u32 = 50;

fn part(index: usize) -> GraphInfo {
    let f16 = |name: &str, shape: [usize; 2]| TensorInfo::new(name, DType::F16, shape);
    GraphInfo::new(
        format!("enc_p{index}"),
        [
            f16("x", [LENGTH, HIDDEN]),
            f16("cos", [LENGTH, HEAD_DIM / 2]),
            f16("sin", [LENGTH, HEAD_DIM / 2]),
            f16("cmask", [1, LENGTH]),
        ],
        [f16("y", [LENGTH, HIDDEN])],
    )
}

fn open(backend: NullBackend) -> Result<(tempfile::TempDir, Box<dyn HostOp>), AnyError> {
    let folder = tempfile::tempdir()?;
    // A sparse file: the table's size without its bytes on disk.
    let embed = File::create(folder.path().join("embed_f16.bin"))?;
    embed.set_len((VOCAB * HIDDEN * 2) as u64)?;
    let names: Vec<_> = (0..PARTS).map(|i| format!("enc_p{i}")).collect();
    let contexts: serde_json::Map<_, _> =
        names.iter().map(|name| (name.clone(), json!({"bin": format!("{name}.bin")}))).collect();
    let manifest = json!({
        "schema_version": 1,
        "model": {"name": "nv-embedcode-7b", "family": "mistral", "dsp_arch": null},
        "params": {
            "hidden": HIDDEN, "vocab": VOCAB, "n_layers": 32, "max_ctx": LENGTH,
            "head_dim": HEAD_DIM, "rope_theta": 1e4
        },
        "artifacts": {"contexts": contexts, "embed": "embed_f16.bin"},
        "plan": {
            "params": {"parts": names, "pooling": "mean", "normalize": true},
            "steps": [{"host": "llama_embed_sharded"}]
        }
    });
    let path = folder.path().join("bench.json");
    let manifest = Arc::new(Manifest::from_value(&path, manifest, None)?);
    let backend: Arc<dyn Backend> = Arc::new(backend);
    let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
    for key in &names {
        let source = ContextSource { key: key.clone(), ..ContextSource::default() };
        workspace.add_context(key, &backend.open_context(&source)?)?;
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
    let op = Plugins::discover(&options)?.open("llama_embed_sharded", services)?;
    Ok((folder, op))
}

fn null() -> NullBackend {
    NullBackend::new((0..PARTS).map(|i| (format!("enc_p{i}"), vec![part(i)])).collect())
}

/// Each part must find the counter of the one before in its input.
fn check_hand_over() -> Result<(), AnyError> {
    static COUNTER: AtomicU8 = AtomicU8::new(0);
    let backend = null().with_script(|info, inputs, outputs| {
        let before = COUNTER.load(Ordering::Relaxed);
        assert_eq!(inputs[0][0], before, "{}: not what the part before wrote", info.name);
        COUNTER.store(before + 1, Ordering::Relaxed);
        outputs[0].fill(before + 1);
        Ok(())
    });
    let (_folder, mut op) = open(backend)?;
    op.embed(&[Segment::Tokens(&[1])])?;
    assert_eq!(usize::from(COUNTER.load(Ordering::Relaxed)), PARTS);
    Ok(())
}

fn main() -> Result<(), AnyError> {
    check_hand_over()?;
    let (_folder, mut op) = open(null())?;
    let tokens: Vec<u32> = (0..LENGTH as u32).map(|i| i * 61 % VOCAB as u32).collect();
    println!(
        "NV-EmbedCode-7B shapes, null backend: {PARTS} parts, hidden {HIDDEN}; µs per text, best \
         of 5 x {TEXTS}"
    );
    for real in [LENGTH, LENGTH / 8] {
        let text = [Segment::Tokens(&tokens[..real])];
        op.embed(&text)?;
        let mut best = Duration::MAX;
        let mut spans = Vec::new();
        let mut allocated = 0;
        for _ in 0..5 {
            let before = op.span_stats();
            let count = allocations::count();
            let start = Instant::now();
            for _ in 0..TEXTS {
                op.embed(&text)?;
            }
            let time = start.elapsed();
            if time < best {
                best = time;
                allocated = allocations::count() - count;
                let after = op.span_stats();
                let earlier = before.iter().map(|s| s.busy);
                spans =
                    after.iter().zip(earlier).map(|(s, b)| (s.name.clone(), s.busy - b)).collect();
            }
        }
        let each = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(TEXTS);
        println!(
            "{real} tokens: {:8.1}   allocations per text: {} (the list of segments at the plugin \
             boundary), bytes copied between parts: 0",
            each(best),
            allocated / u64::from(TEXTS)
        );
        for (name, time) in spans {
            println!("  {name:<8} {:8.1}", each(time));
        }
    }
    Ok(())
}
