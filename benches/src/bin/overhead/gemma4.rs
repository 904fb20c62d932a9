//! Gemma 4 E4B by the forge's own graphs, the image of 768 × 768 pixels and 30 seconds of audio, and the bytes of
//! caches that the graphs of a token read.

use std::path::Path;

use qhx_benches::null::{NullModel, linked, sparse};
use qhx_checkpoint::Checkpoint;
use qhx_core::op::{HostOp, Segment};
use qhx_forge::plan::plan;
use qhx_forge::recipe::Recipe;
use qhx_forge::{ForgeOptions, Precision};
use qhx_graph::graph::Elem;
use qhx_ops_gemma4 as _;
use qhx_types::GraphInfo;
use serde_json::{Map, Value, json};

use crate::Anything;
use crate::measure::{Decoding, TURNS, best};

const CONFIG: &str = "tests/configs/gemma-4-e4b.json";
const MAX_CTX: usize = 4096;
const SIDE: u32 = 768;
const SECONDS: usize = 30;

/// The recipe with prefill graphs of these numbers of tokens, and what projects per-layer inputs.
fn recipe(prefill: Vec<usize>, ple: &str) -> Anything<Recipe> {
    let checkpoint = Checkpoint::synthetic(Path::new(CONFIG), 1)?;
    let mut options = ForgeOptions::new("bundle");
    options.precision = Precision::W8A16;
    options.max_ctx = Some(MAX_CTX);
    options.prefill = Some(prefill);
    options.recipe_options.insert("ple".to_owned(), ple.to_owned());
    Ok(plan(&checkpoint, qhx_forge::registry::recipe, &options, true)?.1)
}

fn contexts(recipe: &Recipe) -> Vec<(String, Vec<GraphInfo>)> {
    let infos = |graphs: &[qhx_graph::graph::Graph]| {
        graphs.iter().map(|graph| graph.info(Elem::qnn)).collect::<Vec<_>>()
    };
    recipe.contexts.iter().map(|context| (context.key.clone(), infos(&context.graphs))).collect()
}

/// Files of the tables' sizes, and their `artifacts`.
fn tables(folder: &Path, params: &Map<String, Value>) -> Anything<Value> {
    let params = Value::Object(params.clone());
    let of = |pointer: &str| {
        let number = params.pointer(pointer).and_then(Value::as_u64);
        number.map(|number| number as usize).ok_or_else(|| format!("no params{pointer}"))
    };
    let (hidden, vocab, ple) = (of("/hidden")?, of("/vocab")?, of("/ple/width")?);
    let all = of("/n_layers")? * ple;
    let (vision, audio) = (of("/vision/hidden")?, of("/audio/width")?);
    let pixels = 3 * of("/vision/patch_size")?.pow(2);
    let positions = 2 * of("/vision/position_embedding_size")?;
    let mut artifacts = json!({"ple": {}, "vision": {}, "audio": {}});
    for (key, field, dtype, values) in [
        ("embed", None, "f16", vocab * hidden),
        ("ple", Some("table"), "f16", vocab * all),
        ("ple", Some("proj"), "f16", all * hidden),
        ("ple", Some("norm"), "f16", ple),
        ("vision", Some("patch_embed"), "f32", vision * pixels),
        ("vision", Some("pos_table"), "f32", positions * vision),
        ("vision", Some("proj"), "f32", hidden * vision),
        ("audio", Some("proj"), "f32", hidden * audio),
    ] {
        let path = format!("{key}_{}.bin", field.unwrap_or("table"));
        sparse(folder, &[(&path, if dtype == "f16" { 2 * values } else { 4 * values })])?;
        let entry = json!({"path": path, "dtype": dtype});
        match field {
            None => artifacts[key] = entry,
            Some(field) => artifacts[key][field] = entry,
        }
    }
    Ok(artifacts)
}

fn open(folder: &Path, recipe: &Recipe, threads: usize) -> Anything<Box<dyn HostOp>> {
    let mut params = recipe.params.clone();
    params.insert("eos_token_id".to_owned(), json!(1));
    let model = NullModel {
        op: &recipe.host_op,
        params: params.into(),
        plan: recipe.plan_params.clone().into(),
        artifacts: tables(folder, &recipe.params)?,
        contexts: contexts(recipe),
        threads,
    };
    Ok(model.open(folder, &linked()?)?)
}

/// Bytes of `past_…` that the graphs of a token read: as they are, and with all caches as long as the context.
fn cache_bytes(recipe: &Recipe) -> [usize; 2] {
    let mut bytes = [0, 0];
    let decode = contexts(recipe).into_iter().filter(|(key, _)| key.starts_with("decode"));
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

pub(crate) fn run(folder: &Path) -> Anything {
    let [rings, full] = cache_bytes(&recipe(Vec::new(), "host")?);
    println!(
        "caches that the graphs of a token read at {MAX_CTX} positions: {:.1} MB with rings, {:.1} MB with all \
         positions; ratio {:.2}",
        rings as f64 / 1e6,
        full as f64 / 1e6,
        rings as f64 / full as f64
    );
    for (prefill, threads, ple) in [
        (vec![128], 1, "host"),
        (vec![128], 2, "host"),
        (Vec::new(), 2, "host"),
        (vec![128], 1, "graph"),
    ] {
        let label = format!("projection by {ple}, prefill graphs {prefill:?}, {threads} threads");
        let mut op = open(folder, &recipe(prefill, ple)?, threads)?;
        // Where the host projects, each token gives the thread pool jobs, and its queue takes a block now and then.
        let allocations = u64::from(ple == "host");
        let decoding = Decoding { tokens: 50, vocab: 262_144, prompt: (512, 1), allocations };
        decoding.run(&label, &mut *op)?;
    }
    media(folder)
}

/// An image and a clip, and the same prompt without them.
fn media(folder: &Path) -> Anything {
    let mut op = open(folder, &recipe(vec![512], "graph")?, 2)?;
    let rgb: Vec<u8> = (0..SIDE * SIDE * 3).map(|i| (i * 7 % 251) as u8).collect();
    let samples = SECONDS * 16_000;
    let samples: Vec<f32> = (0..samples).map(|i| (i * 37 % 200) as f32 / 200.0 - 0.5).collect();
    let image = Segment::Image { rgb: &rgb, width: SIDE, height: SIDE };
    let audio = Segment::Audio { samples: &samples, rate: 16_000 };
    for (name, media, count) in [("768 × 768 pixels", image, 256), ("30 s of audio", audio, 750)] {
        let tokens = vec![7; count];
        let [with, without] = [media, Segment::Tokens(&tokens)].map(|segment| {
            best(&mut *op, TURNS, |op| Ok(op.reset()?), |op| Ok(op.prefill(&[segment])?))
        });
        let (with, without) = (with?.ms(), without?.ms());
        println!(
            "{name}, 2 threads: {with:.1} ms, as many tokens of text {without:.1} ms; the host's part of the tower {:.1} ms",
            with - without
        );
    }
    Ok(())
}
