//! `qhx rerank`: scores from the logits that the reference has, and those of a head.

use std::path::{Path, PathBuf};

use qhx_paths::fixture;
use qhx_tests::tiny;
use serde_json::{Value, json};

use crate::run::{Program, edit_json, folder};

const TINY: &str = "qwen3-tiny";
/// Beginning of all prompts that are asked.
const QUERY: &str = "The ";

/// A bundle that is asked with what `rerank` says.
fn forge(folder: &Path, rerank: &Value) -> PathBuf {
    let (file, out) = (folder.join("rerank.json"), folder.join("bundle"));
    std::fs::write(&file, rerank.to_string()).expect("written");
    Program::qhx(folder)
        .args([Path::new("forge"), &fixture(TINY), Path::new("--out"), &out])
        .args(["--cpu-only", "--max-ctx", "128", "--prefill", "16"])
        .args([format!("--rerank={}", file.display())])
        .run()
        .ok();
    out
}

#[test]
fn scores_are_those_of_the_reference_and_the_best_comes_first() {
    let folder = folder();
    let rerank = json!({"prompt": "{query}{document}", "yes": " P", "no": " The"});
    let bundle = forge(folder.path(), &rerank);
    let goldens = tiny::goldens(&fixture(TINY));
    let cases = goldens.cases.iter().filter(|case| case.prompt.starts_with(QUERY));
    let cases: Vec<_> = cases.filter(|case| !case.prompt.contains('\n')).collect();
    assert!(cases.len() > 4, "{}", cases.len());
    let tokenizer =
        qhx_text::Tokenizer::from_file(&fixture(TINY).join("tokenizer.json")).expect("a tokenizer");
    let id = |text: &str| tokenizer.encode(text, false).expect("encoded")[0] as usize;
    let (yes, no) = (id(" P"), id(" The"));
    let mut expected: Vec<_> = cases
        .iter()
        .enumerate()
        .map(|(index, case)| {
            let logits = &goldens.logits(case)[0];
            let score = 1.0 / (1.0 + f64::from(logits[no] - logits[yes]).exp());
            (index, score)
        })
        .collect();
    expected.sort_by(|a, b| b.1.total_cmp(&a.1));
    let documents: Vec<_> = cases.iter().map(|case| &case.prompt[QUERY.len()..]).collect();
    let ask = |options: &[&str]| {
        Program::qhx(folder.path())
            .args(["rerank"])
            .args([&bundle])
            .args([QUERY, "--backend", "cpu"])
            .args(options)
            .stdin(documents.join("\n"))
            .run()
            .ok()
    };
    let run = ask(&["--json"]).json();
    let results = run["results"].as_array().expect("a list");
    assert_eq!(results.len(), expected.len());
    for (found, (index, score)) in results.iter().zip(&expected) {
        assert_eq!(found["index"], json!(index), "{results:?}");
        assert_eq!(found["document"], json!(documents[*index]));
        let off = (found["score"].as_f64().expect("a number") - score).abs();
        assert!(off < 1e-3, "{found}, expected {score}");
    }
    let best = ask(&["--top", "1"]).stdout;
    let (index, score) = expected[0];
    assert_eq!(best, format!("{score:.4}  {}\n", documents[index]));

    // What is too long is refused, or asked about as far as it fits: ends of it are never seen.
    let long = "crab walks ".repeat(60);
    let ask = |document: &str, options: &[&str]| {
        let rerank = Program::qhx(folder.path()).args(["rerank"]).args([&bundle]);
        rerank.args([QUERY, "--backend", "cpu", "--json"]).args(options).stdin(document).run()
    };
    assert_eq!(ask(&long, &[]).code, 9);
    let score = |document: &str| {
        let run = ask(document, &["--truncate"]).ok();
        run.json()["results"][0]["score"].clone()
    };
    assert_eq!(score(&long), score(&format!("{long}and ends otherwise")));
    assert_ne!(score(&long), score(&format!("begins otherwise {long}")));
}

/// The reference is a cross-encoder whose scores are logits. It takes pairs of texts with their types.
#[test]
fn a_cross_encoder_ranks_as_the_reference() {
    let folder = folder();
    let (checkpoint, bundle) = (fixture("rerank-bert-tiny"), folder.path().join("bundle"));
    Program::qhx(folder.path())
        .args([Path::new("forge"), &checkpoint, Path::new("--out"), &bundle])
        .args(["--task", "score", "--cpu-only", "--prefill", "0"])
        .run()
        .ok();
    let goldens = std::fs::read(checkpoint.join("goldens.json")).expect("goldens");
    let goldens: Value = serde_json::from_slice(&goldens).expect("JSON");
    let pairs = goldens["pairs"].as_array().expect("pairs");
    let documents: Vec<_> = pairs.iter().filter_map(|pair| pair["document"].as_str()).collect();
    let ask = |command: &str| {
        Program::qhx(folder.path())
            .args([command])
            .args([&bundle])
            .args([goldens["query"].as_str().expect("a query"), "--backend", "cpu", "--json"])
            .stdin(documents.join("\n"))
            .run()
    };
    let run = ask("rerank").ok().json();
    let results = run["results"].as_array().expect("a list");
    assert_eq!(results.len(), pairs.len());
    for found in results {
        let index = found["index"].as_u64().expect("an index") as usize;
        let score = pairs[index]["score"].as_f64().expect("a score");
        let off = (found["score"].as_f64().expect("a number") - score).abs();
        assert!(off < 1e-3, "{found}, expected {score}");
    }
    let scores: Vec<_> = results.iter().filter_map(|found| found["score"].as_f64()).collect();
    assert!(scores.is_sorted_by(|a, b| a >= b) && scores[0] > scores[1] + 0.01, "{scores:?}");
    let run = ask("embed");
    assert!(run.code != 0 && run.stderr.contains("gives no vectors"), "{run:?}");

    // Its golden steps are scores of a text and of a pair, and damage to an expected one is found.
    let verify = || {
        let verify = Program::qhx(folder.path()).args(["verify"]).args([&bundle]);
        verify.args(["--backend", "cpu", "--json"]).run()
    };
    let report = verify().ok().json();
    let steps = report["golden"]["steps"].as_array().expect("steps");
    let names: Vec<_> = steps.iter().filter_map(|step| step["name"].as_str()).collect();
    assert_eq!(names, ["score-4", "score-5"]);
    assert!(steps.iter().all(|step| step["passed"] == true), "{report}");
    let name = "golden/rerank-bert-tiny.json";
    let text = std::fs::read(bundle.join(name)).expect("golden steps");
    let mut golden: Value = serde_json::from_slice(&text).expect("JSON");
    let value = &mut golden["steps"][1]["expected"][0]["values"][0];
    *value = json!(value.as_f64().expect("a number") + 0.5);
    std::fs::write(bundle.join(name), golden.to_string()).expect("written");
    edit_json(&bundle.join("rerank-bert-tiny.json"), |manifest| {
        manifest["artifacts"]["files"].as_object_mut().and_then(|files| files.remove(name));
    });
    let report = verify().json();
    assert_eq!(report["golden"]["steps"][0]["passed"], true, "{report}");
    assert_eq!(report["golden"]["steps"][1]["passed"], false, "{report}");

    let bench = Program::qhx(folder.path()).args(["bench"]).args([&bundle]);
    let args = ["--backend", "cpu", "--prompt", "8", "--repeat", "1", "--json"];
    let report = bench.args(args).run().ok().json();
    assert_eq!(report["results"][0]["name"], "score8", "{report}");

    // The longer text of a pair that is too long is cut.
    let ask = |document: &str, options: &[&str]| {
        let rerank = Program::qhx(folder.path()).args(["rerank"]).args([&bundle]);
        rerank.args(["who?", "--backend", "cpu", "--json"]).args(options).stdin(document).run()
    };
    let long = "bread and salt ".repeat(60);
    let refused = ask(&long, &[]);
    assert!(refused.code == 9 && refused.stderr.contains("--truncate"), "{refused:?}");
    let score = |document: &str| {
        let run = ask(document, &["--truncate"]).ok();
        run.json()["results"][0]["score"].clone()
    };
    assert_eq!(score(&long), score(&format!("{long}and ends otherwise")));
    assert_ne!(score(&long), score(&format!("begins otherwise {long}")));
}

#[test]
fn what_cannot_be_asked_is_named() {
    let folder = folder();
    let refused = |rerank: &Value, expected: &str| {
        let file = folder.path().join("bad.json");
        std::fs::write(&file, rerank.to_string()).expect("written");
        let run = Program::qhx(folder.path())
            .args([Path::new("forge"), &fixture(TINY), Path::new("--out"), Path::new("none")])
            .args([format!("--rerank={}", file.display())])
            .run();
        assert_eq!(run.code, 2, "{run:?}");
        assert!(run.stderr.contains(expected), "{run:?}");
    };
    refused(&json!({"prompt": "{query}", "yes": "a", "no": "b"}), "prompt has no {document}");
    refused(&json!({"prompt": "{query}{document}", "yes": "a"}), "neither both of yes and no");
    let bundle = forge(
        folder.path(),
        &json!({"prompt": "{query} {document}", "yes": "certainly so", "no": " The"}),
    );
    let ask = |bundle: &Path| {
        Program::qhx(folder.path()).args(["rerank"]).args([bundle]).args(["q"]).stdin("d").run()
    };
    let run = ask(&bundle);
    assert!(run.code != 0 && run.stderr.contains("expected one"), "{run:?}");
    let manifest = bundle.join("qwen3-tiny.json");
    let text = std::fs::read_to_string(&manifest).expect("a manifest");
    let mut plain: Value = serde_json::from_str(&text).expect("JSON");
    plain["params"].as_object_mut().and_then(|params| params.remove("rerank"));
    std::fs::write(&manifest, plain.to_string()).expect("written");
    let run = ask(&bundle);
    assert!(run.code != 0 && run.stderr.contains("qhx forge --rerank"), "{run:?}");
}
