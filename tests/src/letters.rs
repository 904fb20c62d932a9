//! The tiny bundle that comes with `examples/plugin-template`: four letters, and a graph that
//! answers each with the next one and counts what it has seen. It is portable, so that it runs on the CPU and, once it
//! is prepared, on the emulator.

use std::fs;
use std::path::Path;

use qhx_base::{Error, ErrorKind, Result};
use qhx_forge::Silent;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph};
use qhx_graph::onnx;
use serde_json::{Value, json};

const LETTERS: usize = 4;

/// One where `column` is `turn` further than `row`, row-major.
fn turned(turn: usize) -> Vec<f32> {
    let one = |i: usize| (i / LETTERS + turn) % LETTERS == i % LETTERS;
    (0..LETTERS * LETTERS).map(|i| f32::from(u8::from(one(i)))).collect()
}

/// `logits = x · turn`, `present_seen = past_seen + x`.
fn graph() -> Result<Graph> {
    let mut b = GraphBuilder::new("decode");
    let x = b.input("x", Elem::F32, &[1, LETTERS])?;
    let past = b.input("past_seen", Elem::F32, &[1, LETTERS])?;
    let turn = b.constant("turn", Elem::F32, &[LETTERS, LETTERS], turned(1))?;
    let logits = b.matmul(x, turn, false)?;
    let seen = b.add(past, x)?;
    b.output("logits", logits)?;
    b.output("present_seen", seen)?;
    b.finish()
}

fn tokenizer() -> Value {
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": false
        },
        "post_processor": null,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {"a": 0, "b": 1, "c": 2, "d": 3},
            "unk_token": "a"
        }
    })
}

fn manifest() -> Value {
    json!({
        "schema_version": 1,
        "model": {"name": "letters", "family": "mine"},
        "portable": {"version": onnx::VERSION},
        "params": {"hidden": LETTERS, "vocab": LETTERS, "max_ctx": 64},
        "artifacts": {
            "contexts": {"decode": {"onnx": "decode.onnx"}},
            "embed": {"path": "embed_f32.bin", "dtype": "f32"},
            "tokenizer": "tokenizer.json"
        },
        "plan": {"params": {"decode": "decode"}, "steps": [{"host": "my_generate"}]},
        "chat": false
    })
}

/// Writes the bundle into a folder, its manifest as `edit` makes it.
pub fn write(out: &Path, edit: impl FnOnce(&mut Value)) -> Result<()> {
    let put = |name: &str, bytes: &[u8]| {
        let file = out.join(name);
        fs::write(&file, bytes).map_err(|e| Error::io(ErrorKind::Io, &file, e))
    };
    fs::create_dir_all(out).map_err(|e| Error::io(ErrorKind::Io, out, e))?;
    onnx::write(&graph()?, out, &mut Silent)?;
    let rows: Vec<u8> = turned(0).into_iter().flat_map(f32::to_le_bytes).collect();
    put("embed_f32.bin", &rows)?;
    put("tokenizer.json", format!("{:#}\n", tokenizer()).as_bytes())?;
    let mut manifest = manifest();
    for name in ["decode.onnx", "embed_f32.bin", "tokenizer.json"] {
        let file = out.join(name);
        let opened = fs::File::open(&file).map_err(|e| Error::io(ErrorKind::Io, &file, e))?;
        let sha256 = qhx_base::hash::sha256(ErrorKind::Io, &file, opened, |_| Ok(()))?;
        let bytes = fs::metadata(&file).map_err(|e| Error::io(ErrorKind::Io, &file, e))?.len();
        manifest["artifacts"]["files"][name] = json!({"bytes": bytes, "sha256": sha256});
    }
    edit(&mut manifest);
    put("letters.json", format!("{manifest:#}\n").as_bytes())
}
