//! A bundle for the host-op `test_multimodal`, which takes images, audio and videos.

use std::fs;
use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result};
use qhx_forge::Silent;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph};
use qhx_graph::onnx;
use serde_json::{Value, json};

/// The tokens in order. What is red in images adds to the logit of `r`, and so on; see the op.
pub const TOKENS: [&str; 16] = [
    "a", "b", "c", "d", "<image>", "<audio>", "<video>", "<edge>", "r", "g", "u", "l", "w",
    "<frame>", "<end>", "?",
];

/// `logits = present_sum = past_sum + x`.
fn graph() -> Result<Graph> {
    let mut b = GraphBuilder::new("step");
    let shape = [1, TOKENS.len()];
    let x = b.input("x", Elem::F32, &shape)?;
    let past = b.input("past_sum", Elem::F32, &shape)?;
    let zero = b.constant("zero", Elem::F32, &shape, vec![0.0; TOKENS.len()])?;
    let sum = b.add(past, x)?;
    let logits = b.add(sum, zero)?;
    b.output("logits", logits)?;
    b.output("present_sum", sum)?;
    b.finish()
}

/// Single letters, and what stands in `<` and `>`.
fn tokenizer() -> Value {
    let special = TOKENS.iter().enumerate().filter(|(_, token)| token.starts_with('<'));
    let added = |(id, token): (usize, &&str)| {
        json!({"id": id, "content": token, "special": true, "single_word": false,
               "lstrip": false, "rstrip": false, "normalized": false})
    };
    let vocab: Value =
        TOKENS.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": special.map(added).collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": false},
        "post_processor": null,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}
    })
}

/// Each message's text and parts, and `<end>`.
const TEMPLATE: &str = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
    {% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}{{ '<' + part.type + '>' }}\
    {% endif %}{% endfor %}{% endif %}<end>{% endfor %}{% if add_generation_prompt %}b{% endif %}";

/// Writes the bundle into a folder. Returns its manifest.
pub fn write(out: &Path) -> Result<PathBuf> {
    let put = |name: &str, text: String| {
        let file = out.join(name);
        fs::write(&file, text).map_err(|e| Error::io(ErrorKind::Io, &file, e)).map(|()| file)
    };
    fs::create_dir_all(out).map_err(|e| Error::io(ErrorKind::Io, out, e))?;
    onnx::write(&graph()?, out, &mut Silent)?;
    put("tokenizer.json", tokenizer().to_string())?;
    put("tokenizer_config.json", json!({"chat_template": TEMPLATE}).to_string())?;
    let manifest = json!({
        "schema_version": 1,
        "model": {"name": "multimodal", "family": "test"},
        "params": {"vocab": TOKENS.len(), "max_ctx": 64, "eos_token_id": [14]},
        "artifacts": {"contexts": {"step": {"onnx": "step.onnx"}}, "tokenizer": "tokenizer.json"},
        "plan": {"params": {"step": "step"}, "steps": [{"host": "test_multimodal"}]}
    });
    put("multimodal.json", manifest.to_string())
}
