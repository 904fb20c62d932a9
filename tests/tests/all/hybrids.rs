//! Decoders with recurrent states of Mamba-2, or of a gated delta net, against goldens that `transformers` made for
//! drawn weights.

use std::path::{Path, PathBuf};

use qhx_base::ErrorKind;
use qhx_forge::{ForgeOptions, Silent, forge};
use qhx_tests::forged::Forged;
use qhx_tests::replay::{accepted_exact, alike, greedy_exact, shortest, step_exact, within};
use qhx_tests::tiny::{self, CPU, Variant};
use qhx_tests::{backends, says};
use qhx_tiers::tier;
use serde_json::{Value, json};

const TINY_MODELS: [&str; 8] = [
    "granite-h",
    "granite-moe",
    "granite-rope",
    "falcon-h1",
    "falcon-norm",
    "nemotron-h",
    "nemotron-moe",
    "qwen3-next",
];

fn fixture(name: &str) -> PathBuf {
    tiny::fixture(&format!("hybrid/{name}"))
}

fn bundle(name: &str, variant: Variant) -> PathBuf {
    tiny::bundle(&fixture(name), variant)
}

/// Token by token, and prompts in chunks: of two sizes, and of more tokens than are computed at once.
fn equals_the_reference(name: &str, limit: f64) {
    let goldens = tiny::goldens(&fixture(name));
    for (shards, prefill) in [(1, &[][..]), (2, &[4, 72])] {
        let manifest = bundle(name, Variant { shards, prefill, ..CPU });
        let mut model = tiny::open(&manifest, backends::cpu()).unwrap();
        let label = format!("{name}, {shards} shards");
        greedy_exact(&mut model, &goldens.all(), &label);
        within(step_exact(&mut model, &goldens, &goldens.all(), &label), limit, &label);
        if !prefill.is_empty() {
            // Draft tokens go through the graphs of several rows, and the rejected ones leave nothing in a state.
            let case = shortest(&goldens, 1)[0];
            let rows = case.output_ids.len().min(4);
            let distance = accepted_exact(&mut model, case, rows, rows / 2);
            assert!(distance.largest <= limit, "{label}: {distance:?}");
        }
    }
}

#[test]
fn hybrid_decoders_equal_the_reference_on_the_cpu() {
    for name in TINY_MODELS {
        equals_the_reference(name, 1e-4);
    }
}

#[tier(qnn)]
fn hybrid_decoders_say_the_same_on_the_npu() {
    let names = match tiny::full_matrix() {
        true => &TINY_MODELS[..],
        false => &["granite-h", "falcon-h1", "nemotron-moe"],
    };
    for name in names {
        let goldens = tiny::goldens(&fixture(name));
        let case = shortest(&goldens, 2);
        for &target in tiny::targets() {
            let manifest = bundle(name, Variant { target: Some(target), prefill: &[6], ..CPU });
            let mut model = tiny::open(&manifest, backends::qnn()).unwrap();
            let label = format!("{name}, {target}");
            alike(step_exact(&mut model, &goldens, &case[1..], &label), 0.999, &label);
        }
    }
}

/// Files without a tokenizer, as llama.cpp's converter names and changes tensors.
#[test]
fn logits_of_hybrid_gguf_files_are_the_checkpoints() {
    for name in ["granite-moe", "falcon-h1", "nemotron-h", "nemotron-moe", "qwen3-next"] {
        let goldens = tiny::goldens(&fixture(name));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        std::fs::copy(tiny::fixture(&format!("hybrid/{name}.gguf")), &file).unwrap();
        let tokenizer = fixture(name).join("tokenizer.json");
        std::fs::copy(tokenizer, folder.path().join("tokenizer.json")).unwrap();
        let bundle = Forged::of(&file, |options| {
            options.max_ctx = Some(100);
            options.prefill = Some(vec![8]);
        });
        let mut model = bundle.on_cpu();
        let label = format!("{name}.gguf");
        let found = step_exact(&mut model, &goldens, &goldens.all(), &label);
        within(found, 1e-4, &label);
    }
}

/// A checkpoint as `tests/oracle/hybrids.py NAME DIR --unseen SEED` draws it.
#[tier(by_hand = "QHX_TEST_HYBRID")]
fn a_hybrid_decoder_of_the_environment_equals_its_reference() {
    let folder = std::env::var_os("QHX_TEST_HYBRID").unwrap();
    let folder = Path::new(&folder);
    let goldens = tiny::goldens(folder);
    for prefill in [&[][..], &[5, 72]] {
        let manifest = tiny::bundle(folder, Variant { prefill, ..CPU });
        let mut model = tiny::open(&manifest, backends::cpu()).unwrap();
        let label = format!("prefill {prefill:?}");
        within(step_exact(&mut model, &goldens, &goldens.all(), &label), 1e-4, &label);
    }
}

/// The checkpoint `name` in a folder of its own, with other keys in its configuration.
fn changed(name: &str, keys: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture(name)).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let path = folder.path().join("config.json");
    let mut config = qhx_checkpoint::read_json(&path).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    std::fs::write(&path, config.to_string()).unwrap();
    folder
}

#[test]
fn hybrid_checkpoints_that_do_not_fit_are_refused_by_name() {
    let cases: [(&str, Value, &[&str]); 11] = [
        ("granite-h", json!({"mamba_d_head": 24}), &["mamba_n_heads 6", "144", "96"]),
        ("granite-h", json!({"mamba_n_groups": 4}), &["6 heads and 4 groups"]),
        ("granite-h", json!({"mamba_d_conv": 1}), &["kernel of 1"]),
        ("granite-h", json!({"mamba_d_state": 16}), &["in_proj", "config.json asks for"]),
        ("granite-h", json!({"layer_types": ["mamba"]}), &["layer_types has 1 entries"]),
        ("granite-h", json!({"time_step_limit": [0.5, 0.1]}), &["time_step_limit"]),
        ("falcon-h1", json!({"ssm_multipliers": [1.0, 2.0]}), &["ssm_multipliers", "5 numbers"]),
        ("falcon-h1", json!({"mamba_use_mlp": false}), &["mamba_use_mlp is false"]),
        ("nemotron-h", json!({"hybrid_override_pattern": "M-M*"}), &["4 letters, expected 7"]),
        ("nemotron-h", json!({"hybrid_override_pattern": "M-MXM-M"}), &["letters of M"]),
        ("nemotron-moe", json!({"n_group": 2}), &["n_group is 2"]),
    ];
    for (name, keys, expected) in cases {
        let folder = changed(name, &keys);
        let out = folder.path().join("bundle");
        let mut options = ForgeOptions::new(&out);
        options.max_ctx = Some(64);
        let error = forge(folder.path(), &options, &mut Silent).unwrap_err();
        says(&error, ErrorKind::Artifact, expected);
    }
}
