//! `qhx forge --calibrate`: what low-bit weights cost.

use std::path::Path;

use crate::run::{Run, checkpoint, folder};

fn forge(folder: &Path, options: &[&str]) -> Run {
    qhx!(folder, "forge", checkpoint(), "--out", "out")
        .args(["--name", "tiny", "--max-ctx", "64", "--prefill", "0", "--cpu-only"])
        .args(options)
        .run()
}

#[test]
fn precisions_and_layers_are_measured_on_texts() {
    let folder = folder();
    let text = "{\"text\": \"The capital of France is\"}\n";
    std::fs::write(folder.path().join("texts.jsonl"), text).expect("a file");
    let options = ["--precision", "w8a16", "--calibrate", "texts.jsonl", "--calibrate-tokens", "4"];
    let run = forge(folder.path(), &[&options[..], &["--target-kl", "100", "--json"]].concat());
    let found = &run.ok().json()["calibration"];
    assert_eq!(found["tokens"], 4);
    let whole = &found["precisions"]["w8a16"];
    assert!(whole["perplexity"].as_f64().is_some_and(|p| p >= 1.0), "{found:#}");
    for layer in 0..5 {
        let layer = &found["layers"][format!("layers.{layer}")];
        assert!(layer["kl"].as_f64().is_some_and(|kl| kl < 1.0), "{found:#}");
    }
    assert!(found["groups"]["down_proj"]["perplexity"].is_number(), "{found:#}");
    // The whole model meets such a target as it is.
    assert_eq!((&found["chosen"], found["reached"].as_bool()), (whole, Some(true)));
    assert_eq!(found["kept"], serde_json::json!({}));
}

#[test]
fn calibrations_that_say_nothing_are_refused() {
    let folder = folder();
    std::fs::write(folder.path().join("texts.txt"), "a b c\n").expect("a file");
    std::fs::write(folder.path().join("none.txt"), "\n").expect("a file");
    for (options, message) in [
        (&["--calibrate", "texts.txt", "--target-kl", "0.1"][..], "a target for f16 weights"),
        (&["--calibrate", "none.txt"], "0 texts, none of which has two tokens"),
        (&["--weights", "layers.1=w8a16"], "lower than fp16, the bundle's precision"),
        (
            &["--precision", "w8a16", "--weights", "layers.99=fp16"],
            "layers.99=fp16: no weight that w8a16 quantizes has this in its name",
        ),
    ] {
        let run = forge(folder.path(), options);
        assert_ne!(run.code, 0, "{run:?}");
        assert!(run.stderr.contains(message), "{}\n  does not say {message:?}", run.stderr);
    }
}
