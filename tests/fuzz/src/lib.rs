//! Fuzz targets: functions that take any bytes for a file of one kind and read it as the programs do.
//!
//! A target may answer with an error. It may not panic, abort, run out of memory, or take long. libFuzzer
//! (`libfuzzer/fuzz_targets`) and the runner of this crate, which needs no other compiler than the workspace's, call
//! the same functions.

pub mod mutate;
pub mod run;
mod shape;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_core::manifest::Manifest;
use qhx_core::npy::Array;
use qhx_cpu::{CpuBackend, CpuOptions};
use qhx_exec::backend::{Backend as _, ContextSource};
use qhx_graph::weight::{Storage, Weight};
use qhx_media::{AudioRules, ImageRules, Limits, Source, VideoRules};
use qhx_plugins::lock::Lock;
use qhx_text::{ChatTemplate, Message, RenderOptions};
use qhx_tools::corpus::{RowOptions, Rows};
use qhx_tools::verify::Suite;

/// Reader of one kind of file.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name of the target and of its folder of seeds.
    pub name: &'static str,
    /// Reads the bytes.
    pub read: fn(&[u8]) -> Result<()>,
}

/// All targets.
pub const TARGETS: [Target; 16] = [
    Target { name: "manifest", read: manifest },
    Target { name: "onnx", read: onnx },
    Target { name: "safetensors", read: safetensors },
    Target { name: "gguf", read: gguf },
    Target { name: "torch", read: torch },
    Target { name: "npz", read: npz },
    Target { name: "onnx_weights", read: onnx_weights },
    Target { name: "plugins_lock", read: plugins_lock },
    Target { name: "chat_template", read: chat_template },
    Target { name: "suite", read: suite },
    Target { name: "rows", read: rows },
    Target { name: "image", read: image },
    Target { name: "audio", read: audio },
    Target { name: "video", read: video },
    Target { name: "patches", read: patches },
    Target { name: "log_mel", read: log_mel },
];

/// Targets that go wrong when a file begins with `!`, each in its way: for the test of the runner.
pub const FAULTY: [Target; 4] = [
    Target { name: "faulty_panic", read: faulty_panic },
    Target { name: "faulty_recursion", read: faulty_recursion },
    Target { name: "faulty_memory", read: faulty_memory },
    Target { name: "faulty_hang", read: faulty_hang },
];

/// The target called `name`.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().chain(FAULTY).find(|target| target.name == name)
}

/// A bundle's manifest, and what is looked up in it when a model is opened.
pub fn manifest(data: &[u8]) -> Result<()> {
    let manifest = Manifest::load(&write("manifest.json", data)?)?;
    let artifacts = manifest.open_artifacts();
    manifest.host_op()?;
    // The files are not there, which is an error of another kind.
    for entry in &manifest.artifacts.contexts {
        let _ = manifest.context_source(&artifacts, &entry.key);
    }
    let _ = (manifest.tokenizer_path(&artifacts), manifest.tokenizer_config_path(&artifacts));
    Ok(())
}

/// A graph as an ONNX file: its messages, the graph within, and the CPU backend's program of it.
pub fn onnx(data: &[u8]) -> Result<()> {
    static BACKEND: OnceLock<Result<CpuBackend>> = OnceLock::new();
    let open = || CpuBackend::new(CpuOptions { threads: Some(1), ..CpuOptions::default() });
    let backend = BACKEND.get_or_init(open).as_ref().map_err(Error::clone)?;
    let model = write("graph.onnx", data)?;
    let onnx = vec![("graph".to_owned(), model)];
    let source = ContextSource { key: "context".to_owned(), onnx, ..ContextSource::default() };
    backend.open_context(&source).map(drop)
}

/// A checkpoint's weights: the header, and the tensors `a` and `b`, which the seeds have.
pub fn safetensors(data: &[u8]) -> Result<()> {
    let file = write("model.safetensors", data)?;
    let dir = folder(&file);
    let config = dir.join("config.json");
    if !config.exists() {
        std::fs::write(&config, r#"{"architectures":["LlamaForCausalLM"]}"#)
            .map_err(|e| Error::io(ErrorKind::Io, &config, e))?;
    }
    let checkpoint = Checkpoint::open(dir)?;
    checkpoint.values("a", &[2, 3])?;
    checkpoint.matrix("b", [4, 2])?.read_f32(1, &mut [0.0; 6])
}

/// A model of llama.cpp: header, metadata, table of tensors, and two matrices as floats and as they are stored.
pub fn gguf(data: &[u8]) -> Result<()> {
    // In a folder without the configuration of another target.
    let file = write("model.gguf", data)?;
    let folder = folder(&file).join("nothing");
    let checkpoint = Checkpoint::open_gguf(&file, Some(&folder))?;
    checkpoint.values("norm.weight", &[32])?;
    for name in ["layers.0.self_attn.q_proj.weight", "layers.0.self_attn.v_proj.weight"] {
        let weight = Weight::new(checkpoint.matrix(name, [8, 32])?, Storage::Float);
        weight.to_f32()?;
        if let Some(form) = weight.source().block_form() {
            weight.to_blocks(form)?;
        }
    }
    Ok(())
}

/// A file of `numpy.savez`: the archive, its headers, and the array `a`, which the seed has.
pub fn npz(data: &[u8]) -> Result<()> {
    let file = write("voices.npz", data)?;
    Checkpoint::open_npz(&file)?.values("a", &[2, 3]).map(drop)
}

/// Weights of an ONNX file of another program: nodes, initializers, and what the modules of the seeds have.
pub fn onnx_weights(data: &[u8]) -> Result<()> {
    let file = write("weights.onnx", data)?;
    let config = folder(&file).join("weights.onnx.json");
    if !config.exists() {
        std::fs::write(&config, "{}").map_err(|e| Error::io(ErrorKind::Io, &config, e))?;
    }
    let checkpoint = Checkpoint::open(&file)?.renamed(|name| vec![name.to_owned()]);
    for (name, shape) in [
        ("conv.weight", &[4, 2, 3][..]),
        ("linear.weight", &[6, 4]),
        ("lstm.weight_ih_l0_reverse", &[8, 4]),
        ("lstm.weight_hh_l0", &[8, 2]),
        ("lstm.bias_hh_l0", &[8]),
    ] {
        checkpoint.values(name, shape)?;
    }
    Ok(())
}

/// A file of `torch.save`: the archive, the pickle in it, and the tensor `a`, which the seeds have.
pub fn torch(data: &[u8]) -> Result<()> {
    // Other targets' files would count before it.
    let folder = folder(&write("model.pth", data)?).join("torch");
    let io = |e| Error::io(ErrorKind::Io, &folder, e);
    std::fs::create_dir_all(&folder).map_err(io)?;
    std::fs::write(folder.join("config.json"), r#"{"architectures":["KModel"]}"#).map_err(io)?;
    std::fs::write(folder.join("model.pth"), data).map_err(io)?;
    Checkpoint::open(&folder)?.values("a", &[2, 3]).map(drop)
}

/// The list of installed plugins.
pub fn plugins_lock(data: &[u8]) -> Result<()> {
    let file = write("plugins.lock", data)?;
    let lock = Lock::read(folder(&file))?;
    let Some(lock) = lock else {
        return Err(Error::new(ErrorKind::Internal, "the lock was not read"));
    };
    lock.plugins.iter().try_for_each(|plugin| {
        let path = plugin.path(folder(&file));
        let inside = path.parent() == Some(folder(&file)) && lock.get(&plugin.file).is_some();
        inside.then_some(()).ok_or_else(|| Error::new(ErrorKind::Internal, "a plugin elsewhere"))
    })
}

/// A model's chat template, compiled and rendered.
pub fn chat_template(data: &[u8]) -> Result<()> {
    let source = std::str::from_utf8(data)
        .map_err(|e| Error::new(ErrorKind::Artifact, format!("not UTF-8: {e}")))?;
    let template = ChatTemplate::from_jinja(source, "<s>", "</s>")?;
    let messages = [
        Message::new("system", "You are brief."),
        Message::new("user", "What is the capital of France?"),
        Message::new("assistant", "<think>easy</think>Paris."),
        Message::new("user", "And of Japan?"),
    ];
    template.render(&messages, &RenderOptions::default()).map(drop)
}

/// A suite of prompts with reference answers, or an array that it compares with.
pub fn suite(data: &[u8]) -> Result<()> {
    if data.starts_with(b"\x93NUMPY") {
        let array = Array::read(&write("array.npy", data)?, 1 << 20)?;
        assert_eq!(array.shape.iter().product::<usize>(), array.values.len());
        return Ok(());
    }
    Suite::load(&write("suite.json", data)?).map(drop)
}

/// Texts to embed, as JSON lines.
pub fn rows(data: &[u8]) -> Result<()> {
    let mut rows = Rows::open(&write("rows.jsonl", data)?, RowOptions::default())?;
    while rows.next()?.is_some() {}
    Ok(())
}

/// An image of any format.
pub fn image(data: &[u8]) -> Result<()> {
    let image = qhx_media::decode_image(&source(data), &ImageRules::default(), &limits())?;
    let expected = image.width as usize * image.height as usize * 3;
    assert!(image.rgb.len() == expected && expected > 0, "pixels are missing");
    Ok(())
}

/// Audio of any format, which is resampled unless it has 24 kHz.
pub fn audio(data: &[u8]) -> Result<()> {
    let mut rules = AudioRules::default();
    rules.rate = 24_000;
    let audio = qhx_media::decode_audio(&source(data), &rules, &limits())?;
    let finite = audio.samples.iter().all(|sample| sample.is_finite());
    assert!(finite && !audio.samples.is_empty(), "a sample is no number");
    Ok(())
}

/// An animation of any format.
pub fn video(data: &[u8]) -> Result<()> {
    let (rules, images) = (VideoRules::default(), ImageRules::default());
    let frames = qhx_media::decode_video(&source(data), &rules, &images, &limits())?;
    let size = frames.width as usize * frames.height as usize * 3;
    let rising = frames.times.is_sorted();
    assert!(rising && frames.rgb.len() == frames.times.len() * size, "frames are missing");
    Ok(())
}

fn source(data: &[u8]) -> Source {
    Source::Bytes { name: "bytes".to_owned(), bytes: data.to_vec() }
}

fn limits() -> Limits {
    let mut limits = Limits::default();
    (limits.pixels, limits.video_pixels) = (1 << 20, 1 << 20);
    (limits.frames, limits.seconds) = (1000, 100);
    limits
}

/// Runs an image through the op author's kit: sizes, patches, positions.
pub fn patches(data: &[u8]) -> Result<()> {
    shape::patches(data)
}

/// Runs an audio clip through the op author's kit: log-mel features.
pub fn log_mel(data: &[u8]) -> Result<()> {
    shape::log_mel(data)
}

fn faulty(data: &[u8], fault: impl FnOnce()) -> Result<()> {
    if data.first() == Some(&b'!') {
        fault();
    }
    Ok(())
}

fn faulty_panic(data: &[u8]) -> Result<()> {
    faulty(data, || assert!(data.is_empty(), "a planted fault"))
}

fn faulty_recursion(data: &[u8]) -> Result<()> {
    fn deeper(depth: u64) -> u64 {
        let frame = std::hint::black_box([depth; 64]);
        if frame[1] == u64::MAX { 0 } else { deeper(depth + 1).wrapping_add(frame[2]) }
    }
    faulty(data, || {
        std::hint::black_box(deeper(0));
    })
}

fn faulty_memory(data: &[u8]) -> Result<()> {
    faulty(data, || {
        std::hint::black_box(vec![1u8; 1 << 40]);
    })
}

fn faulty_hang(data: &[u8]) -> Result<()> {
    faulty(data, || {
        loop {
            std::thread::sleep(std::time::Duration::from_secs(1));
        }
    })
}

/// Puts the bytes into a file, in a folder of the process that holds only one file of this name.
fn write(name: &str, data: &[u8]) -> Result<PathBuf> {
    static FOLDER: OnceLock<std::result::Result<tempfile::TempDir, String>> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| tempfile::tempdir().map_err(|e| e.to_string()));
    let folder = folder.as_ref().map_err(|e| Error::new(ErrorKind::Io, e))?;
    let path = folder.path().join(name);
    std::fs::write(&path, data).map_err(|e| Error::io(ErrorKind::Io, &path, e))?;
    Ok(path)
}

fn folder(file: &Path) -> &Path {
    file.parent().unwrap_or(Path::new("."))
}
