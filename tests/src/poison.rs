//! A bundle whose embedding table has one row of NaN, and what must become of a model that meets it.

use std::fs;
use std::path::{Path, PathBuf};

use qhx_base::ErrorKind;
use qhx_core::engine::Model;
use qhx_core::op::Segment;
use serde_json::Value;

use crate::files;
use crate::plugin_files::copy_folder;

/// Copies the bundle of a manifest into `folder` and makes the embedding row of `token` NaN. Answers
/// with the manifest of the copy.
pub fn bundle(manifest: &Path, folder: &Path, token: u32) -> PathBuf {
    copy_folder(manifest.parent().expect("a manifest lies in a folder"), folder);
    let copy = folder.join(manifest.file_name().expect("a manifest is a file"));
    let value: Value = files::json(&copy);
    let embed = &value["artifacts"]["embed"];
    let (path, dtype) = match embed.as_str() {
        Some(path) => (path, "f16"),
        None => (embed["path"].as_str().expect("a path"), embed["dtype"].as_str().unwrap_or("f16")),
    };
    let nan: &[u8] =
        if dtype == "f16" { &0x7e00_u16.to_le_bytes() } else { &f32::NAN.to_le_bytes() };
    let hidden = value["params"]["hidden"].as_u64().expect("params.hidden") as usize;
    let table = folder.join(path);
    let mut bytes = fs::read(&table).expect("the table can be read");
    let row = token as usize * hidden * nan.len();
    bytes[row..row + hidden * nan.len()].copy_from_slice(&nan.repeat(hidden));
    fs::write(table, bytes).expect("the table can be written");
    copy
}

/// The poisoned token fails by name, alone and within a prompt, and nothing of it is left: the model
/// goes on from where it was, and answers after a reset as it did before.
pub fn survives(model: &mut Model, prompt: &[u32], poisoned: u32) {
    assert!(!prompt.contains(&poisoned), "the prompt has the poisoned token");
    let (&last, first) = prompt.split_last().expect("a prompt");
    let op = model.op_mut();
    let logits = |op: &mut dyn qhx_core::op::HostOp, tokens: &[u32]| {
        op.prefill(&[Segment::Tokens(tokens)]).expect("the prompt is fine");
        let logits = op.logits().expect("there are logits").to_f32();
        assert!(logits.iter().all(|value| value.is_finite()), "{logits:?}");
        logits
    };
    op.reset().expect("a reset");
    let alone = logits(op, prompt);
    op.reset().expect("a reset");
    logits(op, first);
    let stepped = logits(op, &[last]);

    op.reset().expect("a reset");
    logits(op, first);
    let error = op.decode(poisoned).expect_err("NaN in all of a hidden row");
    assert_eq!(error.kind(), ErrorKind::Execute, "{error}");
    assert!(error.message().contains("NaN"), "{error}");
    assert_eq!(op.position(), first.len(), "the step was taken");
    assert_eq!(logits(op, &[last]), stepped, "after the failed step");

    let within: Vec<u32> = first.iter().copied().chain([poisoned, last]).collect();
    op.reset().expect("a reset");
    op.prefill(&[Segment::Tokens(&within)]).expect_err("NaN within the prompt");
    op.reset().expect("a reset");
    assert_eq!(logits(op, prompt), alone, "after a reset");

    if op.info().can_truncate {
        op.prefill(&[Segment::Tokens(&within)]).expect_err("NaN within the prompt");
        op.truncate(first.len()).expect("only caches");
        assert_eq!(logits(op, &[last]), stepped, "after truncating");
    }
}
