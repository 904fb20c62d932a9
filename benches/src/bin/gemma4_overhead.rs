//! Host time of `gemma4_split_generate` at Gemma 4 E4B's shapes: per decoded token, per prompt of 512 tokens, per image
//! of 768 × 768 pixels and per 30 seconds of audio; and the bytes of caches that the graphs of a token read.
//!
//! The graphs are the forge's own and execute nothing, so that what remains is qhx. Asserts that a token costs no heap
//! allocation but those of the thread pool's queue.

#![expect(clippy::print_stdout, reason = "the report is the result")]

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qhx_base::CancelToken;
use qhx_benches::allocations::{self, Counting};
use qhx_checkpoint::Checkpoint;
use qhx_core::manifest::Manifest;
use qhx_core::op::{HostOp, OpProvider, OpServices, Segment};
use qhx_exec::Workspace;
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::null::NullBackend;
use qhx_forge::plan::plan;
use qhx_forge::recipe::Recipe;
use qhx_forge::{ForgeOptions, Precision};
use qhx_graph::graph::Elem;
use qhx_ops_gemma4 as _;
use qhx_plugins::{PluginOptions, Plugins};
use qhx_types::GraphInfo;
use serde_json::{Map, Value, json};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

type AnyError = Box<dyn std::error::Error>;

const CONFIG: &str = "tests/configs/gemma-4-e4b.json";
const MAX_CTX: usize = 4096;
const PROMPT: usize = 512;
const TOKENS: u32 = 50;
const SIDE: u32 = 768;
const SECONDS: usize = 30;

/// The recipe with prefill graphs of these numbers of tokens, and what projects per-layer inputs.
fn recipe(prefill: Vec<usize>, ple: &str) -> Result<Recipe, AnyError> {
    let checkpoint = Checkpoint::synthetic(Path::new(CONFIG), 1)?;
    let mut options = ForgeOptions::new("bundle");
    options.precision = Precision::W8A16;
    options.max_ctx = Some(MAX_CTX);
    options.prefill = Some(prefill);
    options.recipe_options.insert("ple".to_owned(), ple.to_owned());
    Ok(plan(&checkpoint, qhx_forge::registry::recipe, &options, true)?.1)
}

fn graphs(recipe: &Recipe) -> Vec<(String, Vec<GraphInfo>)> {
    let infos = |graphs: &[qhx_graph::graph::Graph]| {
        graphs.iter().map(|graph| graph.info(Elem::qnn)).collect::<Vec<_>>()
    };
    recipe.contexts.iter().map(|context| (context.key.clone(), infos(&context.graphs))).collect()
}

fn number(params: &Map<String, Value>, pointer: &[&str]) -> Result<usize, AnyError> {
    let mut value = params.get(pointer[0]);
    for key in &pointer[1..] {
        value = value.and_then(|value| value.get(key));
    }
    let number = value.and_then(Value::as_u64).ok_or_else(|| format!("no params {pointer:?}"))?;
    Ok(usize::try_from(number)?)
}

/// Sparse files of the tables' sizes, and what `artifacts` says of them.
fn tables(folder: &Path, params: &Map<String, Value>) -> Result<Map<String, Value>, AnyError> {
    let of = |pointer: &[&str]| number(params, pointer);
    let (hidden, vocab) = (of(&["hidden"])?, of(&["vocab"])?);
    let all = of(&["n_layers"])? * of(&["ple", "width"])?;
    let (vision, audio) = (of(&["vision", "hidden"])?, of(&["audio", "width"])?);
    let pixels = 3 * of(&["vision", "patch_size"])?.pow(2);
    let positions = 2 * of(&["vision", "position_embedding_size"])?;
    let mut artifacts = Map::new();
    for (key, field, dtype, values) in [
        ("embed", None, "f16", vocab * hidden),
        ("ple", Some("table"), "f16", vocab * all),
        ("ple", Some("proj"), "f16", all * hidden),
        ("ple", Some("norm"), "f16", of(&["ple", "width"])?),
        ("vision", Some("patch_embed"), "f32", vision * pixels),
        ("vision", Some("pos_table"), "f32", positions * vision),
        ("vision", Some("proj"), "f32", hidden * vision),
        ("audio", Some("proj"), "f32", hidden * audio),
    ] {
        let path = format!("{key}_{}.bin", field.unwrap_or("table"));
        let bytes = if dtype == "f16" { 2 } else { 4 };
        File::create(folder.join(&path))?.set_len((bytes * values) as u64)?;
        let entry = json!({"path": path, "dtype": dtype});
        match field {
            None => artifacts.insert(key.to_owned(), entry),
            Some(field) => {
                let table = artifacts.entry(key).or_insert_with(|| json!({}));
                table[field] = entry;
                None
            }
        };
    }
    Ok(artifacts)
}

fn open(folder: &Path, recipe: &Recipe, threads: usize) -> Result<Box<dyn HostOp>, AnyError> {
    let contexts = graphs(recipe);
    let mut artifacts = tables(folder, &recipe.params)?;
    let bins: Map<_, _> = contexts
        .iter()
        .map(|(key, _)| (key.clone(), json!({"bin": format!("{key}.bin")})))
        .collect();
    artifacts.insert("contexts".to_owned(), bins.into());
    let mut params = recipe.params.clone();
    params.insert("eos_token_id".to_owned(), json!(1));
    let manifest = json!({
        "schema_version": 1,
        "model": {"name": "gemma-4-e4b", "family": recipe.family, "dsp_arch": null},
        "params": params,
        "artifacts": artifacts,
        "plan": {"params": recipe.plan_params, "steps": [{"host": recipe.host_op}]}
    });
    let manifest = Arc::new(Manifest::from_value(&folder.join("bench.json"), manifest, None)?);
    let keys: Vec<_> = contexts.iter().map(|(key, _)| key.clone()).collect();
    let backend: Arc<dyn Backend> = Arc::new(NullBackend::new(contexts));
    let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
    for key in keys {
        let source = ContextSource { key: key.clone(), ..ContextSource::default() };
        workspace.add_context(&key, &backend.open_context(&source)?)?;
    }
    let services = OpServices {
        artifacts: manifest.open_artifacts(),
        manifest,
        workspace,
        threads: Arc::new(rayon::ThreadPoolBuilder::new().num_threads(threads).build()?),
        progress: None,
        dump: None,
    };
    let options = PluginOptions::default().only_named(true);
    Ok(Plugins::discover(&options)?.open(&recipe.host_op, services)?)
}

/// The best of some turns in milliseconds, and heap allocations of the last.
fn best(
    turns: usize,
    mut body: impl FnMut() -> Result<(), AnyError>,
) -> Result<(f64, u64), AnyError> {
    let (mut best, mut allocated) = (Duration::MAX, 0);
    body()?;
    for _ in 0..turns {
        let count = allocations::count();
        let start = Instant::now();
        body()?;
        best = best.min(start.elapsed());
        allocated = allocations::count() - count;
    }
    Ok((best.as_secs_f64() * 1e3, allocated))
}

/// Executions of graphs of the layers with caches of their own, and of those without, in a prompt.
fn executions(op: &dyn HostOp) -> [u64; 2] {
    let mut counts = [0, 0];
    for stats in op.graph_stats() {
        match stats.graph.as_str() {
            "decode_p2" => counts[1] += stats.executions,
            name if name.starts_with("decode") || name.starts_with("prefill") => {
                counts[0] += stats.executions;
            }
            _ => {}
        }
    }
    counts
}

/// Bytes of `past_…` that the graphs of a token read: as they are, and with all caches as long as the context.
fn cache_bytes(recipe: &Recipe) -> [usize; 2] {
    let mut bytes = [0, 0];
    let decode = graphs(recipe).into_iter().filter(|(key, _)| key.starts_with("decode"));
    for input in decode.flat_map(|(_, graphs)| graphs).flat_map(|graph| graph.inputs) {
        let (true, &[heads, rows, dim]) = (input.name.starts_with("past_"), &*input.shape) else {
            continue;
        };
        for (bytes, rows) in bytes.iter_mut().zip([rows, MAX_CTX]) {
            *bytes += heads * rows * dim * input.dtype.size();
        }
    }
    bytes
}

fn main() -> Result<(), AnyError> {
    let folder = tempfile::tempdir()?;
    println!("{CONFIG}, null backend, linked in; host time");
    let [rings, full] = cache_bytes(&recipe(Vec::new(), "host")?);
    println!(
        "caches that the graphs of a token read at {MAX_CTX} positions: {:.1} MB with rings, {:.1} MB with all \
         positions; ratio {:.2}",
        rings as f64 / 1e6,
        full as f64 / 1e6,
        rings as f64 / full as f64
    );
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| 1000 + i * 61).collect();
    for (prefill, threads, ple) in [
        (vec![128], 1, "host"),
        (vec![128], 2, "host"),
        (Vec::new(), 2, "host"),
        (vec![128], 1, "graph"),
    ] {
        let made = recipe(prefill.clone(), ple)?;
        let mut op = open(folder.path(), &made, threads)?;
        let (decode, allocated) = best(5, || {
            op.reset()?;
            for token in 0..TOKENS {
                op.decode(1000 + token * 97)?;
            }
            Ok(())
        })?;
        // Where the host projects, each token gives the thread pool jobs, and its queue takes a block now and then.
        let max = if ple == "host" { u64::from(TOKENS / 32) } else { 0 };
        assert!(allocated <= max, "{TOKENS} decode steps allocated {allocated} times");
        let before = executions(&*op);
        let (prompted, _) = best(1, || {
            op.reset()?;
            op.prefill(&[Segment::Tokens(&prompt)])?;
            Ok(())
        })?;
        let after = executions(&*op);
        let [own, shared] = [0, 1].map(|i| (after[i] - before[i]) / 2);
        println!(
            "projection by {ple}, prefill graphs of {prefill:?} tokens, {threads} threads: {:.3} ms a token, {allocated} allocations in \
             {TOKENS}; prompt of {PROMPT}: {prompted:.1} ms, {own} executions of parts with caches, {shared} of the others",
            decode / f64::from(TOKENS)
        );
    }
    media(folder.path())
}

/// An image and a clip, and the same prompt without them.
fn media(folder: &Path) -> Result<(), AnyError> {
    let mut op = open(folder, &recipe(vec![512], "graph")?, 2)?;
    let rgb: Vec<u8> = (0..SIDE * SIDE * 3).map(|i| (i * 7 % 251) as u8).collect();
    let samples = SECONDS * 16_000;
    let samples: Vec<f32> = (0..samples).map(|i| (i * 37 % 200) as f32 / 200.0 - 0.5).collect();
    let image = Segment::Image { rgb: &rgb, width: SIDE, height: SIDE };
    let audio = Segment::Audio { samples: &samples, rate: 16_000 };
    for (name, media, count) in [("768 × 768 pixels", image, 256), ("30 s of audio", audio, 750)] {
        let tokens = vec![7; count];
        let mut time = |segment: Segment<'_>| {
            best(5, || {
                op.reset()?;
                op.prefill(&[segment])?;
                Ok(())
            })
        };
        let (with, _) = time(media)?;
        let (without, _) = time(Segment::Tokens(&tokens))?;
        println!(
            "{name}, 2 threads: {with:.1} ms, as many tokens of text {without:.1} ms; the host's part of the tower {:.1} ms",
            with - without
        );
    }
    Ok(())
}
