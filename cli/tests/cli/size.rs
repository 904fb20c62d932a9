//! Models of the published shapes: planned, made from random weights, made in several attempts.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use qhx_tiers::tier;
use serde_json::{Value, json};

use crate::run::{Program, children, contents, folder, signal};

fn configs() -> Vec<PathBuf> {
    let folder = qhx_paths::workspace().join("tests/configs");
    let mut found: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "json"))
        .collect();
    found.sort();
    assert!(found.len() >= 8);
    found
}

/// A model that takes a second or two to make.
fn config(dir: &Path, layers: usize) -> PathBuf {
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "vocab_size": 6000,
        // With the table as its head, so shallow a model repeats its last token.
        "tie_word_embeddings": false,
    });
    let path = dir.join("small-llama.json");
    std::fs::write(&path, config.to_string()).unwrap();
    path
}

#[test]
fn every_published_model_is_planned_so_that_devices_can_load_it() {
    let dir = folder();
    for config in configs() {
        let name = config.file_stem().unwrap().to_string_lossy().into_owned();
        for precision in ["fp16", "w8a16"] {
            let plan = qhx!(dir, "forge", "plan", config, "--precision", precision, "--json")
                .run()
                .ok()
                .json();
            let number = |value: &Value| value.as_u64().unwrap();
            let contexts = plan["contexts"].as_array().unwrap();
            for context in contexts {
                assert!(number(&context["device_bytes"]) <= 3_300_000_000, "{name}: {context}");
                assert!(
                    number(&context["binary_bytes"]) >= number(&context["weight_bytes"]),
                    "{context}"
                );
            }
            let shards = number(&plan["shards"]);
            let expected = match (name.as_str(), precision) {
                ("nv-embedcode-7b", _) => 8,
                ("mistral-7b-v0.3", _) | ("qwen3.5-4b", "fp16") => 7,
                ("gemma-4-e4b", "fp16") => 6,
                ("qwen3-1.7b" | "qwen3-vl-2b" | "qwen3.5-35b-a3b", "fp16") => 4,
                ("qwen3.5-4b", _) => 4,
                ("gemma-4-e4b" | "gemma-4-e2b", _) => 3,
                ("llama-3.2-1b" | "qwen3-30b-a3b", "fp16") => 2,
                ("qwen3-1.7b" | "qwen3-vl-2b" | "qwen3.5-35b-a3b", _) => 2,
                _ => 1,
            };
            assert_eq!(shards, expected, "{name} {precision}");
            let warning = plan["warning"].as_str().unwrap_or_default();
            assert_eq!(warning.is_empty(), contexts.len() <= 8, "{name}: {warning}");
            assert!(!warning.contains("  "), "{warning}");
            if name == "phi-tiny-moe" {
                // 32 layers of 16 experts, whose int8 values and scales are the largest file.
                let experts = 512 * (3 * 448 * 4096 + 4 * (2 * 448 + 4096));
                assert_eq!(plan["tables"], json!([{"key": "experts", "bytes": experts}]));
                assert!(number(&plan["bytes"]) > 640_000_000 + experts, "{plan}");
            }
        }
    }
}

/// 489 MB in the published int8 bundle.
#[test]
fn four_bit_layers_of_the_smallest_qwen35_fit_330_megabytes() {
    let dir = folder();
    let config = configs().into_iter().find(|c| c.ends_with("qwen3.5-0.8b.json")).unwrap();
    let plan = qhx!(dir, "forge", "plan", config)
        .args(["--precision", "w4a16", "--prefill", "0", "--json"])
        .run()
        .ok()
        .json();
    let contexts = plan["contexts"].as_array().unwrap();
    let decode = contexts.iter().find(|context| context["key"] == "decode").unwrap();
    assert!(decode["binary_bytes"].as_u64().unwrap() <= 330_000_000, "{decode}");
    let head = contexts.iter().find(|context| context["key"] == "lmhead").unwrap();
    assert_eq!(head["precision"], "w8a16", "{head}");
}

#[test]
fn a_context_that_no_device_loads_is_refused() {
    let dir = folder();
    let config = configs().into_iter().find(|c| c.ends_with("mistral-7b-v0.3.json")).unwrap();
    let plan = |options: &[&str]| {
        let words = [Path::new("forge"), Path::new("plan"), &config];
        Program::qhx(dir.path()).args(words).args(options).run()
    };
    let refused = plan(&["--shards", "2"]);
    refused.fails(2, &["context \"", "with 2 shards", "3300000000", "over 6 shards"]);
    // One layer is larger, however many shards there are.
    plan(&["--context-budget", "300000000"]).fails(2, &["cannot be split further"]);
    let parts = ["layers in 7 shards", "decode_p6", "lmhead", "embedding", "memory about"];
    plan(&[]).ok().prints(&parts);
}

#[test]
fn a_synthetic_bundle_talks_in_numbers() {
    let dir = folder();
    let config = config(dir.path(), 2);
    let make = |out: &str, seed: &str| {
        qhx!(dir, "forge", "--synthetic", config)
            .args(["--out", out, "--seed", seed, "--cpu-only", "--max-ctx", "64", "--prefill", "0"])
            .run()
            .ok();
        let generate =
            qhx!(dir, "generate", out, "17 4 5999", "--max-new", "6", "--backend", "cpu")
                .run()
                .ok();
        let text = generate.stdout.trim().to_owned();
        let tokens: Vec<u32> = text.split_whitespace().map(|t| t.parse().unwrap()).collect();
        assert_eq!(tokens.len(), 6, "{text}");
        assert!(tokens.iter().all(|t| *t < 6000), "{text}");
        text
    };
    let first = make("a", "1");
    assert_eq!(make("b", "1"), first, "the same seed, the same model");
    assert_ne!(make("c", "2"), first, "another seed, another model");
}

/// Bytes of the files below hidden folders in `dir`.
fn staged(dir: &Path) -> u64 {
    fn below(dir: &Path) -> u64 {
        let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
        entries
            .flatten()
            .map(|entry| match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => below(&entry.path()),
                Ok(metadata) => metadata.len(),
                Err(_) => 0,
            })
            .sum()
    }
    hidden(dir).iter().map(|folder| below(folder)).sum()
}

fn hidden(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|p| p.file_name().unwrap().to_string_lossy().starts_with(".qhx")).collect()
}

/// Kills a forge three times and lets the fourth attempt finish.
fn is_whole_after_three_kills(dir: &Path, forge: impl Fn(&str) -> Program) {
    forge("whole").run().ok();
    let whole = contents(&dir.join("whole"));
    let total: u64 = whole.values().map(|bytes| bytes.len() as u64).sum();
    for percent in [35, 50, 65] {
        let mut child = forge("parts").start();
        let begun = Instant::now();
        while staged(dir) < total * percent / 100 {
            assert!(child.try_wait().unwrap().is_none(), "it ended before {percent} %");
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing is written");
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!dir.join("parts").exists(), "killed at {percent} %");
        assert_eq!(hidden(dir).len(), 1);
    }
    forge("parts").run().ok().says(&["artifacts of an earlier attempt"]);
    let parts = contents(&dir.join("parts"));
    assert!(parts.keys().eq(whole.keys()), "{:?}", parts.keys());
    for ((name, made), (_, expected)) in parts.iter().zip(&whole) {
        let others = made.iter().zip(expected).filter(|(a, b)| a != b).count();
        assert!(made == expected, "{}: {others} bytes differ", name.display());
    }
    assert!(hidden(dir).is_empty());
}

#[test]
fn a_forge_that_is_killed_three_times_makes_the_same_bundle() {
    let dir = folder();
    let config = config(dir.path(), 8);
    is_whole_after_three_kills(dir.path(), |out| {
        let program = qhx!(dir, "forge", "--synthetic", config);
        program.args(["--out", out, "--cpu-only", "--shards", "4", "--prefill", "0"])
    });
}

#[tier(qnn)]
fn a_forge_killed_three_times_makes_the_same_binaries() {
    let dir = folder();
    let config = config(dir.path(), 8);
    is_whole_after_three_kills(dir.path(), |out| {
        Program::npu(dir.path())
            .args(["forge", "--synthetic"])
            .arg(&config)
            // The library makes one of several binaries of weights in blocks, now and then.
            .args(["--out", out, "--no-golden", "--for-emulator", "--shards", "4"])
            .args(["--max-ctx", "64", "--prefill", "32"])
    });
}

/// A compiler that the system ends for its memory must not take the finished contexts with it, and one
/// whose forge is gone must not go on.
#[tier(qnn)]
fn a_killed_compiler_is_reported_and_ends_with_its_forge() {
    let dir = folder();
    let config = config(dir.path(), 8);
    let forge = || {
        Program::npu(dir.path())
            .args(["forge", "--out", "parts", "--no-golden", "--shards", "4", "--prefill", "0"])
            .args(["--json", "--synthetic"])
            .arg(&config)
    };
    let compiling = |child: &mut Child, part: &str| {
        let begun = Instant::now();
        let file = |staged: &Path| staged.join(format!("bundle/small-llama_{part}_f16.bin"));
        while !hidden(dir.path()).iter().any(|folder| file(folder).exists()) {
            assert!(child.try_wait().unwrap().is_none(), "it ended before {part}");
            assert!(begun.elapsed() < Duration::from_secs(60), "{part} is not written");
            std::thread::sleep(Duration::from_millis(1));
        }
        loop {
            if let [compiler] = children(child.id())[..] {
                return compiler;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let mut child = forge().start();
    signal("-KILL", compiling(&mut child, "decode_p1"));
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(5), "{output:?}");
    let error: Value = serde_json::from_slice(&output.stdout).unwrap();
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("context \"decode_p") && message.contains("signal: 9"), "{message}");
    assert!(error["error"]["hint"].as_str().unwrap().contains("--shards"), "{error}");

    let mut child = forge().start();
    let compiler = compiling(&mut child, "decode_p1");
    signal("-KILL", child.id());
    child.wait().unwrap();
    let begun = Instant::now();
    while Path::new(&format!("/proc/{compiler}/exe")).exists() {
        assert!(begun.elapsed() < Duration::from_secs(20), "the compiler goes on");
        std::thread::sleep(Duration::from_millis(20));
    }
    forge().run().ok().says(&["artifacts of an earlier attempt"]);
}
