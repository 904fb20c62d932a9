//! `qhx verify`: files and suites.

use std::path::Path;

use crate::run::{Run, bundle, checkpoint, copy_of_bundle, folder};

fn verify(bundle: &Path, rest: &[&str]) -> Run {
    qhx!(folder(), "verify", bundle).args(rest).run()
}

fn suite() -> String {
    checkpoint().join("suite.json").to_string_lossy().into_owned()
}

#[test]
fn an_intact_bundle() {
    let run = verify(bundle(), &[]).ok();
    assert!(run.stdout.lines().count() > 3);
    assert!(run.stdout.lines().all(|line| line.starts_with("ok ")), "{}", run.stdout);
}

#[test]
fn damaged_and_missing_files() {
    let folder = folder();
    let bundle = copy_of_bundle(folder.path());
    let tokenizer = bundle.join("tokenizer.json");
    let mut bytes = std::fs::read(&tokenizer).expect("the tokenizer");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&tokenizer, bytes).expect("the tokenizer");
    std::fs::remove_file(bundle.join("tokenizer_config.json")).expect("the file");
    let run = verify(&bundle, &[]);
    assert_eq!(run.code, 1, "{run:?}");
    run.prints(&["FAIL tokenizer.json: sha256 ", "FAIL tokenizer_config.json: missing"]);
    let json = verify(&bundle, &["--json"]).json();
    assert_eq!(json["passed"], false);
}

#[test]
fn the_tiny_model_is_greedy_exact_on_the_cpu() {
    let run = verify(bundle(), &[&suite(), "--backend", "cpu"]).ok();
    run.prints(&["passed: "]);
    assert!(run.stdout.lines().all(|l| !l.starts_with("FAIL")), "{}", run.stdout);
    let json = verify(bundle(), &[&suite(), "--json", "--gate", "greedy_tol"]).ok().json();
    assert_eq!(json["passed"], true);
    assert!(json["cases"].as_array().is_some_and(|c| c.iter().all(|c| c["exact"] == true)));
}

#[test]
fn a_wrong_answer_fails_the_suite() {
    let folder = folder();
    let path = folder.path().join("suite.json");
    let suite = r#"{"schema": "npu_suite/v1", "cases": [
        {"id": "france", "prompt": "The capital of France is", "gold": [372, 281, 393, 13]},
        {"prompt_ids": [277, 390, 305, 220, 37, 81, 287, 350, 273], "gold": [372, 281, 1, 2]}
    ]}"#;
    std::fs::write(&path, suite).expect("a file");
    let run = verify(bundle(), &[&path.to_string_lossy()]);
    assert_eq!(run.code, 1, "{run:?}");
    insta::assert_snapshot!(run.stdout, @r"
    ok   france: exact
    FAIL 2: differs from token 2 on, distance 0.500, repeats 0.00
    FAILED: 1 of 2 cases passed (greedy_exact, backend cpu)
    ");
}

#[test]
fn suites_that_are_none() {
    let folder = folder();
    let path = folder.path().join("suite.json");
    for (text, message) in [
        ("[]", "not a suite"),
        (r#"{"schema": "npu_suite/v2", "cases": []}"#, "expected \"npu_suite/v1\""),
        (r#"{"schema": "npu_suite/v1", "cases": []}"#, "has no cases"),
        (
            r#"{"schema": "npu_suite/v1", "cases": [{"gold": [1]}]}"#,
            "neither prompt nor prompt_ids",
        ),
        (r#"{"schema": "npu_suite/v1", "cases": [{"prompt": "a", "gold": []}]}"#, "gold is empty"),
    ] {
        std::fs::write(&path, text).expect("a file");
        verify(bundle(), &[&path.to_string_lossy()]).fails(4, &[message]);
    }
}

#[test]
fn a_bundle_is_compared_with_its_baseline() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let (file, summary) = (path("baseline.json"), path("summary.md"));
    verify(bundle(), &["--write-baseline", &file]).ok();
    let run = verify(bundle(), &["--baseline", &file, "--summary", &summary]).ok();
    run.prints(&["figures as in the baseline"]);

    let mut baseline: serde_json::Value = qhx_tests::files::json(Path::new(&file));
    let figures = &mut baseline["bundles"][0]["figures"];
    figures["size.bundle"] = (figures["size.bundle"].as_f64().expect("bytes") / 2.0).into();
    figures["kl.code"] = 0.1.into();
    std::fs::write(&file, baseline.to_string()).expect("a file");
    let run = verify(bundle(), &["--baseline", &file, "--summary", &summary]);
    assert_eq!(run.code, 1, "{run:?}");
    run.prints(&["FAIL size.bundle is ", "+100.0 %, and 1 % are allowed"]);
    run.prints(&["FAIL kl.code is missing, ", "leave out --no-measure"]);
    let text = std::fs::read_to_string(&summary).expect("the summary");
    assert!(text.contains(": passed\n") && text.contains(": failed\n"), "{text}");
    let run = verify(bundle(), &["--baseline", &file, "--json", "--tolerance", "size=100%"]);
    let json = run.json();
    assert_eq!(
        (run.code, &json["passed"], &json["baseline"]["passed"]),
        (1, &false.into(), &false.into())
    );
    assert_eq!(json["baseline"]["regressions"].as_array().map(Vec::len), Some(1), "{json}");
    assert!(json["figures"]["figures"]["golden.generate-3"].is_number(), "{json}");
}

#[test]
fn baselines_and_tolerances_that_make_no_sense_are_refused() {
    verify(bundle(), &["--baseline", "nowhere.json"]).fails(4, &["nowhere.json"]);
    verify(bundle(), &["--tolerance", "time=3%"]).fails(2, &["--baseline <FILE>"]);
    let wrong = ["--baseline", "b.json", "--tolerance", "speed=3%"];
    verify(bundle(), &wrong).fails(2, &["no figure \"speed\": expected one of size, kl, "]);
    verify(bundle(), &[&suite(), "--baseline", "b.json"]).fails(2, &["cannot be used with"]);
}
