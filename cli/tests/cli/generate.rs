//! `qhx generate` on the CPU.

use std::path::Path;

use serde_json::Value;

use crate::run::{Run, bundle, folder, forge};

const PROMPT: &str = "The capital of France is";
const SENTENCE: &str = " Paris. The river Seine runs through it.\n";
const IDS: &str = "277,390,305,220,37,81,287,350,273";

/// `qhx generate` with the tiny bundle and these arguments.
fn generate(arguments: &[&str]) -> Run {
    qhx!(folder(), "generate", bundle()).args(arguments).run()
}

/// Same as [`generate`], as JSON.
fn json(arguments: &[&str]) -> Value {
    generate(&[arguments, &["--json"]].concat()).ok().json()
}

#[test]
fn text_streams_to_stdout_and_nothing_else_does() {
    let run = generate(&[PROMPT, "--max-new", "23"]).ok();
    assert_eq!(run.stdout, SENTENCE);
    run.says(&[
        "backend: cpu (no QNN libraries are given or installed)",
        "prompt 9 tokens (0 reused)",
    ]);
    assert_eq!(generate(&["--ids", IDS, "--max-new", "4"]).ok().stdout, "372,281,393,13\n");
}

/// They are rounded where weights have 4 bits.
#[test]
fn activations_of_8_bits_answer_alike_and_are_named() {
    let folder = folder();
    let checkpoint = qhx_paths::fixture("llama3-blocks");
    let options = "--cpu-only --precision w4a16 --prefill 16";
    let bundle = forge(folder.path(), &checkpoint, "w4a16", options);
    let named = [", int16 activations", ""];
    let differences = alike(&bundle, "activations", ["int16", "auto"], named);
    assert!(differences.iter().all(|difference| *difference < 0.1), "{differences:?}");
    let rounds = differences.iter().any(|difference| *difference > 1e-6);
    assert!(rounds || !has_integers(), "{differences:?}");
}

/// Asks a bundle twice, with each of two values of `--cpu-KEY`: the tokens are the same, and values are `named`.
/// Returns the differences of the tokens' log-probabilities.
fn alike(bundle: &Path, key: &str, values: [&str; 2], named: [&str; 2]) -> Vec<f64> {
    let option = format!("--cpu-{key}");
    let runs = values.map(|value| {
        let limits = ["--backend", "cpu", "--max-new", "6", "--json", "--logprobs", "1"];
        qhx!(folder(), "generate", bundle, PROMPT, option, value).args(limits).run().ok()
    });
    for (run, named) in runs.iter().zip(named) {
        let expected = format!("backend: cpu{named} (asked for)");
        run.says(&[&expected]);
    }
    let [first, second] = runs.map(|run| run.json());
    assert_eq!([&first[key], &second[key]], values);
    assert_eq!(first["tokens"], second["tokens"]);
    let logprobs = |json: &Value| -> Vec<f64> {
        let all = json["logprobs"].as_array().expect("log-probabilities");
        all.iter().map(|one| one["logprob"].as_f64().expect("a number")).collect()
    };
    let (first, second) = (logprobs(&first), logprobs(&second));
    assert_eq!((first.len(), second.len()), (6, 6));
    first.iter().zip(&second).map(|(a, b)| (a - b).abs()).collect()
}

/// The rows of a cache are rounded, in a context over the same graphs.
#[test]
fn caches_of_f16_answer_alike_and_are_named() {
    let differences = alike(bundle(), "caches", ["f32", "f16"], [", f32 caches", ""]);
    assert!(differences.iter().all(|difference| *difference < 0.01), "{differences:?}");
    assert!(differences.iter().any(|difference| *difference > 0.0), "{differences:?}");
}

/// True if the processor has instructions for integers.
fn has_integers() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("dotprod");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    false
}

#[test]
fn the_prompt_may_come_from_stdin_without_its_last_line_end() {
    for arguments in [&["-"][..], &[]] {
        let run = qhx!(folder(), "generate", bundle())
            .args(arguments)
            .args(["--max-new", "23"])
            .stdin(format!("{PROMPT}\n"))
            .run()
            .ok();
        assert_eq!(run.stdout, SENTENCE);
    }
}

#[test]
fn json_is_one_object_with_everything() {
    let run = generate(&[PROMPT, "--max-new", "4", "--json", "--backend", "cpu"]).ok();
    assert_eq!(run.stdout.lines().count(), 1);
    let mut json = run.json();
    let timings = json["timings"].as_object_mut().expect("timings");
    let spans = timings["spans_ms"].as_object_mut().expect("spans").iter_mut();
    for (name, value) in spans {
        assert!(value.as_f64().is_some_and(|v| v >= 0.0), "{name}: {value}");
        *value = "[number]".into();
    }
    for (name, value) in timings.iter_mut().filter(|(_, value)| !value.is_object()) {
        assert!(value.as_f64().is_some_and(|v| v >= 0.0), "{name}: {value}");
        *value = "[number]".into();
    }
    json["plugin"] = "[plugin]".into();
    insta::assert_json_snapshot!(json, @r#"
    {
      "text": " Paris.",
      "tokens": [
        372,
        281,
        393,
        13
      ],
      "prompt_tokens": 9,
      "reused_tokens": 0,
      "media": [],
      "finish_reason": "length",
      "timings": {
        "load_ms": "[number]",
        "prefill_ms": "[number]",
        "decode_ms": "[number]",
        "decode_tok_s": "[number]",
        "graph_ms": "[number]",
        "host_ms": "[number]",
        "sampling_ms": "[number]",
        "decode_steps": "[number]",
        "forced_tokens": "[number]",
        "drafts": {
          "verifications": 0,
          "drafted": 0,
          "accepted": 0
        },
        "slow_executions": "[number]",
        "hand_overs": {
          "count": 0,
          "bytes": 0,
          "ms": 0.0
        },
        "vision_ms": "[number]",
        "spans_ms": {
          "fill": "[number]",
          "commit": "[number]"
        }
      },
      "backend": "cpu",
      "activations": "auto",
      "caches": "f16",
      "op": "qwen3_5_generate",
      "plugin": "[plugin]"
    }
    "#);
}

#[test]
fn the_plugin_is_named_with_its_file() {
    let json = json(&[PROMPT, "--max-new", "1"]);
    let plugin = json["plugin"].as_str().expect("a string");
    if cfg!(feature = "builtin-ops") {
        assert_eq!(plugin, "builtin");
    } else {
        assert!(plugin.contains("qhx_ops_qwen35_plugin"), "{plugin}");
    }
}

#[test]
fn an_answer_ends_at_stop_texts_and_in_a_full_context() {
    let stopped = json(&[PROMPT, "--stop", "nowhere", "--stop", " runs"]);
    assert_eq!(stopped["text"], " Paris. The river Seine");
    assert_eq!(stopped["finish_reason"], "stop");
    let full = json(&[PROMPT, "--max-new", "1000", "--ignore-eos"]);
    assert_eq!(full["finish_reason"], "length");
    assert_eq!(full["tokens"].as_array().map(Vec::len), Some(192 - 9 + 1));
}

#[test]
fn a_seed_gives_the_same_tokens_again() {
    let tokens = |seed: &str| {
        json(&["It", "--max-new", "24", "--temperature", "3", "--seed", seed])["tokens"].clone()
    };
    assert_eq!(tokens("7"), tokens("7"));
    assert_ne!(tokens("7"), tokens("8"));
}

#[test]
fn speculation_changes_no_token_and_is_reported() {
    let generate =
        |arguments: &[&str]| generate(&[&[PROMPT, "--max-new", "23"], arguments].concat());
    // The bundle as its own draft is always right: three steps of eight tokens.
    let draft = bundle().to_string_lossy();
    let run = generate(&["--draft", &draft, "--speculate", "7", "--json"]).ok();
    let json = run.json();
    assert_eq!(json["text"], SENTENCE.trim_end());
    let drafts = &json["timings"]["drafts"];
    assert_eq!(drafts["drafted"], drafts["accepted"]);
    assert_eq!(
        (&drafts["verifications"], &json["timings"]["decode_steps"]),
        (&3.into(), &3.into())
    );
    let run = generate(&["--speculate", "3", "--draft", &draft]).ok();
    assert_eq!(run.stdout, SENTENCE);
    run.says(&["draft tokens accepted, "]);
    assert_eq!(generate(&["--speculate", "auto"]).ok().stdout, SENTENCE);

    generate(&["--speculate", "65"]).fails(2, &["expected auto, off, or a number from 1 to 64"]);
    generate(&["--draft", "nowhere"]).fails(3, &["option --draft: nowhere"]);
}
