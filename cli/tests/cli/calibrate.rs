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

/// The cost of weights is measured by default, noted in the manifest, and bound to the bundle's files.
#[test]
fn low_bit_bundles_have_a_receipt() {
    let folder = folder();
    let run = forge(folder.path(), &["--precision", "w4a16", "--receipt", "--json"]);
    run.says(&["headroom in f16: "]);
    let receipt = &run.ok().json()["receipt"];
    let texts = receipt["texts"].as_array().expect("texts");
    let kinds: Vec<_> = texts.iter().map(|text| text["kind"].as_str().expect("a kind")).collect();
    assert_eq!(kinds, ["prose", "code", "chat", "german"]);
    for text in texts {
        let figure = |key: &str| text[key].as_f64().expect("a number");
        assert!(figure("kl") > 0.0 && figure("kl") < 1.0, "{text}");
        assert!(figure("agreement") > 0.5 && figure("perplexity") > 1.0, "{text}");
    }
    assert!(receipt["headroom"]["factor"].as_f64().is_some_and(|factor| factor > 1.0), "{receipt}");
    let manifest = folder.path().join("out/tiny.json");
    let text = std::fs::read_to_string(&manifest).expect("a manifest");
    let document: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(document["model"]["receipt"]["kl"], receipt["kl"]);
    qhx!(folder, "inspect", "out").run().ok().prints(&["receipt    KL ", "headroom   "]);

    // Beside other weights it says nothing.
    let files = document["model"]["receipt"]["files"].as_str().expect("a hash");
    std::fs::write(&manifest, text.replace(files, &"0".repeat(64))).expect("a file");
    let other = qhx!(folder, "inspect", "out").run().ok();
    other.says(&["/model/receipt: measured with files", "it belongs to other weights"]);
    assert!(!other.stdout.contains("receipt"), "{}", other.stdout);

    std::fs::write(folder.path().join("texts.txt"), "The capital of France is Paris.\n")
        .expect("a file");
    let options = ["--precision", "w4a16", "--overwrite", "--receipt=texts.txt"];
    forge(folder.path(), &options).ok().prints(&["text 1  KL ", "weights "]);
    let options = ["--precision", "w4a16", "--overwrite", "--no-measure"];
    let run = forge(folder.path(), &options).ok();
    assert!(!run.stderr.contains("headroom"), "{}", run.stderr);
    let text = std::fs::read_to_string(&manifest).expect("a manifest");
    assert!(!text.contains("receipt"), "{text}");
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
