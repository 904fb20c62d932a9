//! The switches in which Llama-like classes differ: rope types, fused projections, partial rotary, windows of some
//! layers, NoPE, multipliers, norms behind, soft caps, ropes of kinds of layers, queries that grow. Logits are those
//! of `transformers` for drawn weights.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use qhx_base::compare::Distance;
use qhx_core::op::Segment;
use qhx_exec::backend::Backend;
use qhx_forge::ForgeOptions;
use qhx_tests::forged::{self, Forged};
use qhx_tests::tiny::{self, fixture};
use qhx_tests::{backends, files};
use qhx_tiers::tier;
use serde::Deserialize;

/// A text of as many tokens as the context has, and the logits behind some of them.
#[derive(Deserialize)]
struct Run {
    ids: Vec<u32>,
    at: Vec<usize>,
    logits: Vec<Vec<f32>>,
}

fn runs(model: &str) -> Vec<Run> {
    let mut all: BTreeMap<String, Vec<Run>> = files::json(&fixture("switches/logits.json"));
    all.remove(model).expect("logits of the model")
}

/// A copy of a checkpoint or a GGUF file with a tokenizer.
fn with_tokenizer(name: &str, to: &Path) -> std::path::PathBuf {
    let from = fixture(&format!("switches/{name}"));
    let copy = |from: &Path, to: &Path| {
        std::fs::copy(from, to).expect("a copy");
    };
    copy(&fixture("quantised/tokenizer.json"), &to.join("tokenizer.json"));
    if from.is_file() {
        copy(&from, &to.join(name));
        return to.join(name);
    }
    for file in ["config.json", "model.safetensors"] {
        copy(&from.join(file), &to.join(file));
    }
    to.to_owned()
}

/// Makes a bundle for the context of each run, consumes a part of the text as a prompt and the rest token by token, at
/// most until the first `compared` logits, and returns the largest distance.
fn worst(
    name: &str,
    runs: &[Run],
    compared: usize,
    backend: &Arc<dyn Backend>,
    change: impl Fn(&mut ForgeOptions),
) -> Distance {
    let mut worst: Option<Distance> = None;
    for run in runs {
        let folder = tempfile::tempdir().expect("a folder");
        let checkpoint = with_tokenizer(name, folder.path());
        let bundle = Forged::of(&checkpoint, |options| {
            options.max_ctx = Some(run.ids.len());
            options.prefill = Some(vec![4, 6]);
            if name == "mistral3" {
                forged::set(options, &[("towers", "none")]);
            }
            change(options);
        });
        let label = format!("{name}, context of {}", run.ids.len());
        let mut model = bundle.open(Arc::clone(backend));
        let op = model.op_mut();
        let cap = op.info().softcap;
        let (prompt, rest) = run.ids.split_at(run.at[1] + 1);
        op.prefill(&[Segment::Tokens(prompt)]).unwrap_or_else(|e| panic!("{label}: {e}"));
        let last = run.at[compared.min(run.at.len() - 1)];
        for (at, token) in
            (run.at[1]..=last).zip(std::iter::once(None).chain(rest.iter().map(Some)))
        {
            if let Some(token) = token {
                op.decode(*token).unwrap_or_else(|e| panic!("{label}, {at}: {e}"));
            }
            let Some(index) = run.at.iter().position(|recorded| *recorded == at) else { continue };
            let logits = op.logits().expect("logits").capped(cap);
            let found = Distance::of(&logits, &run.logits[index]);
            let found = found.unwrap_or_else(|e| panic!("{label}, {at}: {e}"));
            worst = Some(worst.map_or(found, |worst| worst.worse(found)));
        }
    }
    let worst = worst.expect("a step with logits");
    eprintln!("{name}: logits differ by at most {:.2e}", worst.largest);
    worst
}

/// Prompts several tokens at a time; contexts longer than windows, and texts of their length.
#[test]
fn logits_of_each_class_are_those_of_transformers() {
    for name in [
        "phi3",
        "smollm3",
        "granite",
        "olmo2",
        "gemma2",
        "gemma",
        "olmo3",
        "exaone4",
        "exaone4-full",
        "ministral3",
        "mistral3",
        "ernie4_5",
        "hunyuan",
    ] {
        let found = worst(name, &runs(name), usize::MAX, &backends::cpu(), |options| {
            // A shard whose layers do not turn, and one whose layers all slide.
            options.shards = if matches!(name, "smollm3" | "exaone4" | "olmo3") { 4 } else { 1 };
        });
        assert!(found.largest <= 1e-4, "{name}: {}", found.largest);
    }
}

/// Covers the GGUF files whose metadata declares all of the rope.
#[test]
fn logits_of_gguf_files_are_those_of_the_checkpoint() {
    for (name, count) in [
        ("phi3", 2),
        ("granite", 1),
        ("olmo2", 1),
        ("gemma", 1),
        ("olmo3", 2),
        ("exaone4", 1),
        ("exaone4-full", 1),
        ("ministral3", 2),
        ("ernie4_5", 1),
        ("hunyuan", 1),
    ] {
        let found = worst(
            &format!("{name}.gguf"),
            &runs(name)[..count],
            usize::MAX,
            &backends::cpu(),
            |_| {},
        );
        assert!(found.largest <= 1e-4, "{name}: {}", found.largest);
    }
}

/// Fused projections, partial rotary, factors and amplitude of the rope, and a window in all layers; then soft caps,
/// layers of two kinds in one graph, norms on both sides.
#[tier(qnn)]
fn logits_on_the_npu_are_those_of_transformers() {
    let names = match tiny::full_matrix() {
        true => &[
            "phi3",
            "gemma2",
            "smollm3",
            "granite",
            "olmo2",
            "gemma",
            "exaone4",
            "ministral3",
            "mistral3",
            "olmo3",
            "ernie4_5",
            "hunyuan",
        ][..],
        false => &["phi3", "gemma2", "olmo3", "mistral3", "hunyuan"],
    };
    for name in names {
        let all = runs(name);
        let longest = &all[all.len() - 1..];
        for target in tiny::targets() {
            let found = worst(name, longest, 3, &backends::qnn(), |options| {
                options.prefill = Some(vec![6]);
                options.compiler = Some(backends::compiler(target));
            });
            let near = found.cosine >= 0.9999 && found.largest <= 0.05;
            assert!(near, "{name}, {target}: {found:?}");
        }
    }
}
