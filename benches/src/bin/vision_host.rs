//! Host time of `qwen3vl_generate` at the shapes of the published Qwen3-VL-2B bundle: an image of 512 × 512 pixels from
//! its file to the rows of the prefill graph, and a decoded token.
//!
//! The graphs execute nothing, so that what remains is qhx, on one thread. Asserts that a token costs no heap
//! allocation.

#![expect(clippy::print_stdout, reason = "the report is the result")]

use std::fs::File;
use std::io::Cursor;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use image::codecs::jpeg::JpegEncoder;
use image::{DynamicImage, ImageEncoder, RgbImage};
use qhx_base::CancelToken;
use qhx_benches::allocations::{self, Counting};
use qhx_core::manifest::Manifest;
use qhx_core::op::{HostOp, OpProvider, OpServices, Segment};
use qhx_exec::Workspace;
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::null::NullBackend;
use qhx_media::{ImageRules, Limits, Source, decode_image};
use qhx_ops_qwen3vl as _;
use qhx_plugins::{PluginOptions, Plugins};
use qhx_types::{DType, GraphInfo, TensorInfo};
use serde_json::json;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

type Anything<T = ()> = Result<T, Box<dyn std::error::Error>>;

const LAYERS: usize = 28;
const HIDDEN: usize = 2048;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const VOCAB: usize = 151_936;
const MAX_CTX: usize = 512;
/// Tokens that the prefill graph takes.
const WIDTH: usize = 320;
const DEEPSTACK: usize = 3;
/// Width of the vision tower, patches and tokens of an image.
const TOWER: usize = 1024;
const PATCHES: usize = 1024;
const IMAGE_TOKENS: usize = PATCHES / 4;
/// Values of a patch of two frames, and learned positions.
const PATCH: usize = 3 * 2 * 16 * 16;
const POSITIONS: usize = 48 * 48;
const TOKENS: u32 = 200;
const TURNS: usize = 12;

fn tensor(name: &str, shape: &[usize]) -> TensorInfo {
    TensorInfo::new(name, DType::F16, shape.to_vec())
}

fn deepstack(rows: usize) -> impl Iterator<Item = TensorInfo> {
    (0..DEEPSTACK).map(move |layer| tensor(&format!("deepstack_{layer}"), &[rows, HIDDEN]))
}

fn decoder(name: &str, rows: usize) -> GraphInfo {
    let mut inputs = vec![
        tensor("x", &[rows, HIDDEN]),
        tensor("cos", &[rows, HEAD_DIM / 2]),
        tensor("sin", &[rows, HEAD_DIM / 2]),
        tensor("cmask", &[rows, MAX_CTX + rows]),
    ];
    inputs.extend(deepstack(rows));
    let mut outputs = vec![tensor("y", &[rows, HIDDEN])];
    for layer in 0..LAYERS {
        for kind in ["k", "v"] {
            let past = format!("past_{kind}_{layer}");
            inputs.push(tensor(&past, &[KV_HEADS, MAX_CTX, HEAD_DIM]));
            outputs.push(tensor(&format!("new_{kind}_{layer}"), &[KV_HEADS, rows, HEAD_DIM]));
        }
    }
    GraphInfo::new(name, inputs, outputs)
}

fn open(folder: &Path) -> Anything<Box<dyn HostOp>> {
    // Sparse files: the tables' sizes without their bytes on disk.
    for (name, bytes) in [
        ("embed_f16.bin", VOCAB * HIDDEN * 2),
        ("vis_patch_embed_f32.bin", TOWER * PATCH * 4),
        ("vis_patch_embed_bias_f32.bin", TOWER * 4),
        ("vis_pos_embed_f32.bin", POSITIONS * TOWER * 4),
    ] {
        File::create(folder.join(name))?.set_len(bytes as u64)?;
    }
    let mut features = vec![tensor("embeds", &[IMAGE_TOKENS, HIDDEN])];
    features.extend(deepstack(IMAGE_TOKENS));
    let graphs = [
        GraphInfo::new("vision", [tensor("x", &[PATCHES, TOWER])], features),
        decoder("prefill", WIDTH),
        decoder("decode", 1),
        GraphInfo::new("lmhead", [tensor("x", &[1, HIDDEN])], [tensor("logits", &[1, VOCAB])]),
    ];
    let names: Vec<_> = graphs.iter().map(|graph| graph.name.clone()).collect();
    let files: serde_json::Map<_, _> =
        names.iter().map(|name| (name.clone(), json!({"bin": format!("{name}.bin")}))).collect();
    let manifest = json!({
        "schema_version": 1,
        "model": {"name": "qwen3-vl-2b", "family": "qwen3vl", "dsp_arch": null},
        "params": {
            "hidden": HIDDEN, "vocab": VOCAB, "n_layers": LAYERS, "max_ctx": MAX_CTX,
            "head_dim": HEAD_DIM, "rope_theta": 5e6, "eos_token_id": 151_645,
            "rope_scaling": {
                "rope_type": "default", "mrope_interleaved": true, "mrope_section": [24, 20, 20]
            }
        },
        "artifacts": {
            "contexts": files, "embed": "embed_f16.bin",
            "vis_patch_embed_f32": "vis_patch_embed_f32.bin",
            "vis_patch_embed_bias_f32": "vis_patch_embed_bias_f32.bin",
            "vis_pos_embed_f32": "vis_pos_embed_f32.bin"
        },
        "plan": {
            "params": {
                "vision": "vision", "prefill": "prefill", "decode": "decode", "lmhead": "lmhead"
            },
            "steps": [{"host": "qwen3vl_generate"}]
        }
    });
    let manifest = Arc::new(Manifest::from_value(&folder.join("bench.json"), manifest, None)?);
    let contexts = graphs.into_iter().map(|graph| (graph.name.clone(), vec![graph]));
    let backend: Arc<dyn Backend> = Arc::new(NullBackend::new(contexts.collect()));
    let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
    for key in names {
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
    Ok(Plugins::discover(&options)?.open("qwen3vl_generate", services)?)
}

fn main() -> Anything {
    let folder = tempfile::tempdir()?;
    let mut op = open(folder.path())?;
    println!("Qwen3-VL-2B shapes, null backend, one thread, best of {TURNS}; ms");
    for (width, height) in [(512, 512), (1280, 960)] {
        look(&mut *op, width, height)?;
    }
    tokens(&mut *op)
}

/// A file to the prefill graph.
fn look(op: &mut dyn HostOp, width: u32, height: u32) -> Anything {
    let bytes = jpeg(width, height)?;
    let source = Source::Bytes { name: "a JPEG".to_owned(), bytes };
    let text = [7; 40];
    let mut best = [Duration::MAX; 3];
    for _ in 0..TURNS {
        let start = Instant::now();
        let decoded =
            decode_image(&source, &ImageRules::default(), &Limits::default())?.into_media()?;
        let decoding = start.elapsed();
        op.reset()?;
        let before = vision(op);
        let start = Instant::now();
        op.prefill(&[Segment::Tokens(&text[..4]), decoded.segment(), Segment::Tokens(&text)])?;
        let prompt = start.elapsed();
        let seeing = vision(op) - before;
        for (best, found) in best.iter_mut().zip([decoding, seeing, prompt - seeing]) {
            *best = found.min(*best);
        }
    }
    let [decoding, seeing, rest] = best.map(|time| time.as_secs_f64() * 1e3);
    println!("a JPEG of {width} x {height}:");
    println!("  decoded                                      {decoding:7.2}");
    println!("  resized, cut, positions, patch embedding     {seeing:7.2}");
    println!("  {} tokens of prompt with its rows           {rest:7.2}", IMAGE_TOKENS + 44);
    println!("  all                                          {:7.2}", decoding + seeing + rest);
    Ok(())
}

/// Time that the op spent on images.
fn vision(op: &mut dyn HostOp) -> Duration {
    let spans = op.span_stats();
    spans.iter().find(|span| span.name == "vision").map_or(Duration::ZERO, |span| span.busy)
}

fn tokens(op: &mut dyn HostOp) -> Anything {
    let mut best = Duration::MAX;
    let mut allocated = 0;
    for _ in 0..5 {
        op.reset()?;
        op.prefill(&[Segment::Tokens(&[7; 32])])?;
        op.decode(1)?;
        allocated = allocations::count();
        let start = Instant::now();
        for token in 0..TOKENS {
            op.decode(token * 97)?;
        }
        best = best.min(start.elapsed() / TOKENS);
        allocated = allocations::count() - allocated;
    }
    println!(
        "a token: {:.1} µs, {allocated} heap allocations in {TOKENS} of them",
        best.as_secs_f64() * 1e6
    );
    assert_eq!(allocated, 0, "a decode step allocated");
    Ok(())
}

/// Smooth colours with some noise, as photographs have.
fn jpeg(width: u32, height: u32) -> Anything<Vec<u8>> {
    let mut state = 1u32;
    let pixels = RgbImage::from_fn(width, height, |x, y| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let noise = (state >> 29) as u8;
        image::Rgb([(x / 6) as u8 ^ noise, (y / 5) as u8 ^ noise, ((x + y) / 9) as u8])
    });
    let pixels = DynamicImage::ImageRgb8(pixels);
    let mut bytes = Cursor::new(Vec::new());
    JpegEncoder::new_with_quality(&mut bytes, 90).write_image(
        pixels.as_bytes(),
        width,
        height,
        image::ExtendedColorType::Rgb8,
    )?;
    Ok(bytes.into_inner())
}
