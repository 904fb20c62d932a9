//! Writes the tiny bundle that comes with `examples/plugin-template`: four letters, and a graph that
//! answers each with the next one and counts what it has seen.

use std::path::{Path, PathBuf};

use qhx_core::{Error, ErrorKind, Result};
use qhx_forge::builder::GraphBuilder;
use qhx_forge::graph::Elem;
use qhx_forge::{Silent, onnx};
use serde_json::json;

fn write(out: &Path) -> Result<()> {
    let io = |path: &Path, result: std::io::Result<()>| {
        result.map_err(|e| Error::io(ErrorKind::Io, path, &e))
    };
    io(out, std::fs::create_dir_all(out))?;

    const LETTERS: usize = 4;
    let mut b = GraphBuilder::new("decode");
    let x = b.input("x", Elem::F32, &[1, LETTERS])?;
    let past = b.input("past_seen", Elem::F32, &[1, LETTERS])?;
    let turn = (0..LETTERS * LETTERS)
        .map(|i| if (i / LETTERS + 1) % LETTERS == i % LETTERS { 1.0 } else { 0.0 })
        .collect();
    let turn = b.constant("turn", Elem::F32, &[LETTERS, LETTERS], turn)?;
    let logits = b.matmul(x, turn, false)?;
    let seen = b.add(past, x)?;
    b.output("logits", logits)?;
    b.output("present_seen", seen)?;
    onnx::write(&b.finish()?, out, &mut Silent)?;

    let rows: Vec<u8> = (0..LETTERS * LETTERS)
        .map(|i| if i / LETTERS == i % LETTERS { 1.0f32 } else { 0.0 })
        .flat_map(f32::to_le_bytes)
        .collect();
    let file = out.join("embed_f32.bin");
    io(&file, std::fs::write(&file, rows))?;

    let vocab = json!({"a": 0, "b": 1, "c": 2, "d": 3});
    let tokenizer = json!({
        "version": "1.0",
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
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    });
    let manifest = json!({
        "schema_version": 1,
        "model": {"name": "letters", "family": "mine"},
        "params": {"hidden": LETTERS, "vocab": LETTERS, "max_ctx": 64},
        "artifacts": {
            "contexts": {"decode": {"onnx": "decode.onnx"}},
            "embed": {"path": "embed_f32.bin", "dtype": "f32"},
            "tokenizer": "tokenizer.json"
        },
        "plan": {"params": {"decode": "decode"}, "steps": [{"host": "my_generate"}]},
        "chat": false
    });
    for (name, value) in [("tokenizer.json", tokenizer), ("letters.json", manifest)] {
        let file = out.join(name);
        let text = serde_json::to_string_pretty(&value)
            .map_err(|e| Error::new(ErrorKind::Internal, e.to_string()))?;
        io(&file, std::fs::write(&file, text + "\n"))?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let out = std::env::args_os().nth(1).map(PathBuf::from);
    write(&out.unwrap_or_else(|| PathBuf::from("examples/plugin-template/bundle")))
}
