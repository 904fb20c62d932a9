//! `qhx rerank`: scores from the logits that the reference has, and those of a head.

use std::path::{Path, PathBuf};

use qhx_paths::fixture;
use qhx_tests::files;
use qhx_tests::tiny;
use serde_json::{Value, json};

use crate::run::{self, folder};

const TINY: &str = "qwen3-tiny";
/// Beginning of all prompts that are asked.
const QUERY: &str = "The ";

/// A bundle that is asked with what `rerank` says.
fn forge(folder: &Path, rerank: &Value) -> PathBuf {
    std::fs::write(folder.join("rerank.json"), rerank.to_string()).expect("written");
    let options = "--cpu-only --max-ctx 128 --prefill 16 --rerank=rerank.json";
    run::forge(folder, &fixture(TINY), "bundle", options)
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
        qhx!(folder, "rerank", bundle, QUERY, "--backend", "cpu")
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

    is_cut(folder.path(), &bundle, QUERY, &"crab walks ".repeat(60), "the prompt has");
}

/// A document that is too long is refused, or asked about as far as it fits: ends of it are never seen.
fn is_cut(folder: &Path, bundle: &Path, query: &str, long: &str, refusal: &str) {
    let ask = |document: &str, options: &[&str]| {
        let rerank = qhx!(folder, "rerank", bundle, query, "--backend", "cpu", "--json");
        rerank.args(options).stdin(document).run()
    };
    ask(long, &[]).fails(9, &[refusal]);
    let score = |document: &str| {
        let run = ask(document, &["--truncate"]).ok();
        run.json()["results"][0]["score"].clone()
    };
    assert_eq!(score(long), score(&format!("{long}and ends otherwise")));
    assert_ne!(score(long), score(&format!("begins otherwise {long}")));
}

/// The reference is a cross-encoder whose scores are logits. It takes pairs of texts with their types.
#[test]
fn a_cross_encoder_ranks_as_the_reference() {
    let folder = folder();
    let checkpoint = fixture("rerank-bert-tiny");
    let options = "--task score --cpu-only --prefill 0";
    let bundle = run::forge(folder.path(), &checkpoint, "bundle", options);
    let goldens: Value = files::json(&checkpoint.join("goldens.json"));
    let pairs = goldens["pairs"].as_array().expect("pairs");
    let documents: Vec<_> = pairs.iter().filter_map(|pair| pair["document"].as_str()).collect();
    let ask = |command: &str| {
        qhx!(folder, command, bundle)
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
        let verify = qhx!(folder, "verify", bundle);
        verify.args(["--backend", "cpu", "--json"]).run()
    };
    let report = verify().ok().json();
    let steps = report["golden"]["steps"].as_array().expect("steps");
    let names: Vec<_> = steps.iter().filter_map(|step| step["name"].as_str()).collect();
    assert_eq!(names, ["score-4", "score-5"]);
    assert!(steps.iter().all(|step| step["passed"] == true), "{report}");
    let name = "golden/rerank-bert-tiny.json";
    files::edit(&bundle.join(name), |golden| {
        let value = &mut golden["steps"][1]["expected"][0]["values"][0];
        *value = json!(value.as_f64().expect("a number") + 0.5);
    });
    files::edit(&bundle.join("rerank-bert-tiny.json"), |manifest| {
        manifest["artifacts"]["files"].as_object_mut().and_then(|files| files.remove(name));
    });
    let report = verify().json();
    assert_eq!(report["golden"]["steps"][0]["passed"], true, "{report}");
    assert_eq!(report["golden"]["steps"][1]["passed"], false, "{report}");

    let bench = qhx!(folder, "bench", bundle);
    let args = ["--backend", "cpu", "--prompt", "8", "--repeat", "1", "--json"];
    let report = bench.args(args).run().ok().json();
    assert_eq!(report["results"][0]["name"], "score8", "{report}");

    // The longer text of a pair that is too long is cut.
    is_cut(folder.path(), &bundle, "who?", &"bread and salt ".repeat(60), "--truncate");
}

#[test]
fn what_cannot_be_asked_is_named() {
    let folder = folder();
    let refused = |rerank: &Value, expected: &str| {
        let file = folder.path().join("bad.json");
        std::fs::write(&file, rerank.to_string()).expect("written");
        qhx!(folder, "forge", fixture(TINY), "--out", "none")
            .args([format!("--rerank={}", file.display())])
            .run()
            .fails(2, &[expected]);
    };
    refused(&json!({"prompt": "{query}", "yes": "a", "no": "b"}), "prompt has no {document}");
    refused(&json!({"prompt": "{query}{document}", "yes": "a"}), "neither both of yes and no");
    let bundle = forge(
        folder.path(),
        &json!({"prompt": "{query} {document}", "yes": "certainly so", "no": " The"}),
    );
    let ask = |bundle: &Path| qhx!(folder, "rerank", bundle, "q").stdin("d").run();
    let run = ask(&bundle);
    assert!(run.code != 0 && run.stderr.contains("expected one"), "{run:?}");
    files::edit(&bundle.join("qwen3-tiny.json"), |manifest| {
        manifest["params"].as_object_mut().and_then(|params| params.remove("rerank"));
    });
    let run = ask(&bundle);
    assert!(run.code != 0 && run.stderr.contains("qhx forge --rerank"), "{run:?}");
}
