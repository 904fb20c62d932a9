//! The published Qwen3-VL-2B bundle on one thread: images from their files to the rows of the prefill graph, and text.

use std::io::Cursor;
use std::path::Path;
use std::time::{Duration, Instant};

use image::codecs::jpeg::JpegEncoder;
use image::{DynamicImage, ImageEncoder, RgbImage};
use qhx_benches::null::{NullModel, linked, sparse};
use qhx_benches::shapes::{Decoder, EMBED, tensor};
use qhx_core::op::{HostOp, Segment};
use qhx_media::{ImageRules, Limits, Source, decode_image};
use qhx_ops_qwen3vl as _;
use qhx_types::{GraphInfo, TensorInfo};
use serde_json::json;

use crate::Anything;
use crate::measure::{Decoding, TURNS, best};

const SHAPES: Decoder = Decoder {
    hidden: 2048,
    layers: 28,
    max_ctx: 512,
    kv_heads: 8,
    head_dim: 128,
    rotary: 128,
    vocab: 151_936,
};
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

fn deepstack(rows: usize) -> impl Iterator<Item = TensorInfo> {
    (0..DEEPSTACK).map(move |layer| tensor(format!("deepstack_{layer}"), [rows, SHAPES.hidden]))
}

fn decoder(name: &str, rows: usize) -> GraphInfo {
    let mut graph = SHAPES.graph(name, rows, 0..SHAPES.layers);
    graph.inputs.extend(deepstack(rows));
    graph
}

fn open(folder: &Path) -> Anything<Box<dyn HostOp>> {
    let tables = [
        (EMBED, SHAPES.embed_bytes()),
        ("vis_patch_embed_f32.bin", TOWER * PATCH * 4),
        ("vis_patch_embed_bias_f32.bin", TOWER * 4),
        ("vis_pos_embed_f32.bin", POSITIONS * TOWER * 4),
    ];
    sparse(folder, &tables)?;
    let mut features = vec![tensor("embeds", [IMAGE_TOKENS, SHAPES.hidden])];
    features.extend(deepstack(IMAGE_TOKENS));
    let graphs = [
        GraphInfo::new("vision", [tensor("x", [PATCHES, TOWER])], features),
        decoder("prefill", WIDTH),
        decoder("decode", 1),
        SHAPES.head("lmhead"),
    ];
    let mut params = SHAPES.params(5e6);
    params["rope_scaling"] =
        json!({"rope_type": "default", "mrope_interleaved": true, "mrope_section": [24, 20, 20]});
    let mut artifacts = json!({"embed": EMBED});
    for (file, _) in &tables[1..] {
        artifacts[file.trim_end_matches(".bin")] = json!(file);
    }
    let model = NullModel {
        op: "qwen3vl_generate",
        params,
        plan: json!({"vision": "vision", "prefill": "prefill", "decode": "decode", "lmhead": "lmhead"}),
        artifacts,
        contexts: graphs.into_iter().map(|graph| (graph.name.clone(), vec![graph])).collect(),
        threads: 1,
    };
    Ok(model.open(folder, &linked()?)?)
}

pub(crate) fn run(folder: &Path) -> Anything {
    let mut op = open(folder)?;
    for (width, height) in [(512, 512), (1280, 960)] {
        look(&mut *op, width, height)?;
    }
    let decoding =
        Decoding { tokens: 200, vocab: SHAPES.vocab, prompt: (256, TURNS), allocations: 0 };
    decoding.run("text", &mut *op)?;
    Ok(())
}

/// A file to the prefill graph.
fn look(op: &mut dyn HostOp, width: u32, height: u32) -> Anything {
    let source = Source::Bytes { name: "a JPEG".to_owned(), bytes: jpeg(width, height)? };
    let decode = || decode_image(&source, &ImageRules::default(), &Limits::default());
    let mut decoding = Duration::MAX;
    for _ in 0..TURNS {
        let start = Instant::now();
        decode()?.into_media()?;
        decoding = decoding.min(start.elapsed());
    }
    let decoded = decode()?.into_media()?;
    let text = [7; 40];
    let prompt = best(
        op,
        TURNS,
        |op| Ok(op.reset()?),
        |op| {
            Ok(op.prefill(&[
                Segment::Tokens(&text[..4]),
                decoded.segment(),
                Segment::Tokens(&text),
            ])?)
        },
    )?;
    let vision = prompt.spans.iter().find(|(name, _)| name == "vision");
    let [decoding, vision] = [decoding, vision.map_or(Duration::ZERO, |(_, time)| *time)]
        .map(|time| time.as_secs_f64() * 1e3);
    println!("a JPEG of {width} x {height}, ms: {:.2}", decoding + prompt.ms());
    println!("  decoded                                      {decoding:7.2}");
    println!("  resized, cut, positions, patch embedding     {vision:7.2}");
    println!(
        "  {} tokens of prompt with its rows           {:7.2}",
        IMAGE_TOKENS + 44,
        prompt.ms() - vision
    );
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
