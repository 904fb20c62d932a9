//! A bundle with experts on the host and optional contexts: forge, generate, verify.

use std::path::{Path, PathBuf};

use qhx_paths::fixture;
use serde_json::Value;

use crate::run::{self, Program, folder};

/// A bundle with prompt graphs of 64 tokens.
fn forge(folder: &Path, experts: &str) -> PathBuf {
    let options = "--name tiny --max-ctx 128 --prefill 64 --shards 2 --cpu-only --experts";
    run::forge(folder, &fixture("phimoe-6"), "phimoe", &format!("{options} {experts}"))
}

/// The golden case with a prompt of thirty tokens.
fn case() -> (String, String) {
    let goldens: Value = qhx_tests::files::json(&fixture("phimoe-6").join("goldens.json"));
    let cases = goldens["cases"].as_array().expect("cases");
    let case = cases.iter().find(|case| case["id"] == "thirty").expect("the case");
    let ids = |key: &str| -> Vec<String> {
        let list = case[key].as_array().expect("ids");
        list.iter().map(ToString::to_string).collect()
    };
    (ids("prompt_ids").join(","), ids("output_ids")[..5].join(","))
}

#[test]
fn prompts_go_through_experts_together_and_need_their_graph() {
    let folder = folder();
    let bundle = forge(folder.path(), "fp16");
    let (prompt, answer) = case();
    let arguments = ["--ids", &prompt, "--max-new", "5", "--json"];
    let json = qhx!(folder, "generate", bundle).args(arguments).run().ok().json();
    let tokens = json["tokens"].as_array().expect("tokens").iter().map(ToString::to_string);
    assert_eq!(tokens.collect::<Vec<_>>().join(","), answer);
    assert!(json["timings"]["spans_ms"]["gather and scatter"].is_number(), "{json}");
    qhx!(folder, "verify", bundle).run().ok();
    std::fs::remove_file(bundle.join("onnx/ffn_pf.onnx")).expect("a graph");
    let run = qhx!(folder, "generate", bundle, "a").run();
    assert_ne!(run.code, 0);
    run.says(&["onnx/ffn_pf.onnx"]);
    assert_eq!(qhx!(folder, "verify", bundle).run().code, 1);
}

#[test]
fn a_list_of_ids_and_a_text_for_the_classic_program() {
    let folder = folder();
    let bundle = forge(folder.path(), "w8a16");
    let classic = |prompt: &str| {
        let run = Program::classic(folder.path())
            .args([&bundle.join("tiny.json")])
            .args(["cpu", "-"])
            .args([&bundle])
            .args(["5", prompt])
            .run()
            .ok();
        run.says(&["prompt "]);
        run.stdout
    };
    assert!(!classic(&case().0).trim().is_empty());
    assert!(classic("The capital of France is").contains("Paris"));
}
