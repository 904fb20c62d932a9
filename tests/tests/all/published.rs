//! Manifests as published bundles have them: keys that are public, and names of host-ops and tensors that are not ours.

use qhx_tests::forged::Forged;
use qhx_tests::replay::{greedy_exact, shortest};
use qhx_tests::tiny;
use serde_json::{Value, json};

/// Public keys of `params`, from the model cards of published bundles.
const PUBLIC: [&str; 9] = [
    "hidden",
    "vocab",
    "n_layers",
    "max_ctx",
    "kv_dim",
    "head_dim",
    "rope_theta",
    "eos_token_id",
    "bos_token_id",
];

/// A bundle under a published host-op whose manifest has public keys alone.
fn published(checkpoint: &str, host_op: &str, shards: usize) -> Forged {
    let bundle = Forged::of(&tiny::fixture(checkpoint), |options| {
        options.max_ctx = Some(128);
        options.prefill = Some(vec![8]);
        options.shards = shards;
    });
    bundle.edit(|manifest| {
        let params = manifest["params"].as_object_mut().unwrap();
        params.retain(|key, _| PUBLIC.contains(&key.as_str()));
        manifest["plan"]["steps"] = json!([{"host": host_op}]);
        manifest["artifacts"].as_object_mut().unwrap().retain(|key, _| key != "golden");
    });
    bundle
}

#[test]
fn decoders_run_under_published_names_with_public_keys() {
    for (checkpoint, host_op, shards) in [
        ("qwen3-tiny", "qwen3_generate", 1),
        ("lfm2-tiny", "lfm_generate", 1),
        ("qwen3-tiny", "split_generate", 2),
    ] {
        let goldens = tiny::goldens(&tiny::fixture(checkpoint)).brief();
        let mut model = published(checkpoint, host_op, shards).on_cpu();
        greedy_exact(&mut model, &shortest(&goldens, 2), host_op);
    }
}

/// Names of tensors are declared, those of caches with a `*` for the layer, and one that no graph has is named.
#[test]
fn a_manifest_declares_the_names_that_its_tensors_have() {
    let bundle = published("lfm2-tiny", "lfm_generate", 1);
    let tensors = |value: Value| {
        bundle.edit(|manifest| manifest["plan"]["params"]["tensors"] = value);
    };
    tensors(json!({"past_k_*": "past_key_*"}));
    let error = bundle.refusal().report().to_string();
    assert!(error.contains("past_key_"), "{error}");
}
