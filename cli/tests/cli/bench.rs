//! `qhx bench`: what is measured, and what a run is compared with.

use std::path::Path;

use serde_json::Value;

use crate::embed;
use crate::run::{Run, bundle, folder};
use crate::{speak, trace, transcribe};

fn bench(folder: &Path, bundle: &Path, rest: &[&str]) -> Run {
    qhx!(folder, "bench", bundle, "--backend", "cpu").args(rest).run()
}

fn names(report: &Value) -> Vec<&str> {
    let results = report["results"].as_array().expect("results");
    results.iter().map(|result| result["name"].as_str().expect("a name")).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().filter(|n| n.is_finite()).expect("a number")
}

/// The tiny model has prompt graphs of 16 tokens: 20 tokens are two executions of it, 5 one.
#[test]
fn prompts_and_tokens_are_counted_graph_by_graph() {
    let folder = folder();
    let args = ["--prompt", "20,5", "--tokens", "6", "--repeat", "3"];
    let report = bench(folder.path(), bundle(), &[&args[..], &["--json"]].concat()).ok().json();
    assert_eq!(names(&report), ["pp20", "pp5", "tg6"]);
    assert_eq!(report["backend"]["name"], "cpu");
    for result in report["results"].as_array().expect("results") {
        let (ms, rate) =
            (number(&result["ms"]["mean"]), number(&result["tokens_per_second"]["mean"]));
        assert!(ms > 0.0 && number(&result["ms"]["sd"]) >= 0.0, "{result}");
        // A mean of rates is at least the rate of the mean time.
        assert!(rate >= number(&result["tokens"]) / ms * 999.0, "{result}");
        assert!(result.get("ratio").is_none(), "{result}");
    }
    let executions = |graph: &str| {
        let graphs = report["graphs"].as_array().expect("graphs");
        graphs.iter().find(|g| g["graph"] == graph).map(|g| g["executions"].as_u64())
    };
    // In each of three turns, without the one before them. One token stands in front of the six.
    assert_eq!(executions("prefill16"), Some(Some(3 * (2 + 1))));
    assert_eq!(executions("decode"), Some(Some(3 * 7)));
    assert_eq!(executions("lmhead"), Some(Some(3 * (1 + 1 + 7))));

    let traced = bench(folder.path(), bundle(), &[&args[..], &["--trace", "t.json"]].concat());
    let text = traced.ok().stdout;
    let events = trace::events(&folder.path().join("t.json"));
    assert_eq!(trace::spans(&events, "pp20").len(), 1 + 3, "each turn, and one before them");
    for part in ["pp20 ", "tg6 ", " tokens/s", " ms a token", "  graph prefill16: 9 executions of "]
    {
        assert!(text.contains(part), "{part:?} in {text}");
    }
}

#[test]
fn runs_are_compared() {
    let folder = folder();
    let args = ["--prompt", "8", "--tokens", "2", "--repeat", "1"];
    let report = bench(folder.path(), bundle(), &[&args[..], &["--json"]].concat()).ok();
    let mut other = report.json();
    // A run that was twice as fast with tokens, and did not measure such prompts.
    let rate = number(&other["results"][1]["tokens_per_second"]["mean"]);
    other["results"].as_array_mut().expect("results").remove(0);
    other["results"][0]["tokens_per_second"]["mean"] = (1e6 * rate).into();
    std::fs::write(folder.path().join("other.json"), other.to_string()).expect("a file");
    let compared = [&args[..], &["--compare", "other.json"]].concat();
    let json = bench(folder.path(), bundle(), &[&compared[..], &["--json"]].concat()).ok().json();
    assert!(json["results"][0].get("ratio").is_none(), "{json}");
    let ratio = number(&json["results"][1]["ratio"]);
    assert!(ratio > 0.0 && ratio < 1e-3, "{json}");
    let text = bench(folder.path(), bundle(), &compared).ok().stdout;
    let line = text.lines().find(|line| line.starts_with("tg2")).expect("a line");
    assert!(line.ends_with("  0.00 times as fast"), "{line}");

    std::fs::write(folder.path().join("text.json"), "fast").expect("a file");
    let run = bench(folder.path(), bundle(), &["--compare", "text.json"]);
    assert!(run.code != 0 && run.stderr.contains("text.json: expected ident"), "{run:?}");
    run.says(&["what `qhx bench --json` printed"]);
}

/// The same answers token by token and with draft tokens. The bundle as its own draft model is right about a greedy
/// answer.
#[test]
fn draft_tokens_are_measured_beside_plain_decoding() {
    let folder = folder();
    let draft = bundle().to_string_lossy();
    let args = ["--prompt", "5", "--tokens", "12", "--repeat", "2", "--draft", &draft];
    let args = [&args[..], &["--speculate", "3"]].concat();
    let report = bench(folder.path(), bundle(), &[&args[..], &["--json"]].concat()).ok().json();
    assert_eq!(names(&report), ["pp5", "tg12", "repeats12", "varies12"]);
    let repeats = &report["results"][2];
    assert!(number(&repeats["tokens_per_second"]["mean"]) > 0.0, "{repeats}");
    let drafts = &repeats["drafts"];
    // Three steps of four tokens, in each of two turns.
    assert_eq!((&drafts["drafted"], &drafts["accepted"]), (&18.into(), &18.into()), "{drafts}");
    assert_eq!((&drafts["tokens_per_step"], &drafts["acceptance"]), (&4.0.into(), &1.0.into()));
    let (times, least) = (number(&drafts["times_plain"]), number(&drafts["least_times_plain"]));
    assert!(number(&drafts["plain_tokens_per_second"]["mean"]) > 0.0 && times >= least);
    assert!(report["results"][1].get("drafts").is_none(), "{report}");
    let run = bench(folder.path(), bundle(), &args).ok();
    let line = run.stdout.lines().find(|line| line.starts_with("repeats12")).expect("a line");
    let accepted = "4.00 tokens a step, 18 of 18 draft tokens accepted";
    qhx_tests::has(line, &[" ms a token, ", " times plain decoding (", accepted]);

    bench(folder.path(), embed::bundle(), &["--speculate", "auto"])
        .fails(2, &["does not generate"]);
}

#[test]
fn lengths_that_do_not_fit_are_named() {
    let folder = folder();
    for (args, words) in [
        (["--prompt", "193"], "--prompt 193: expected at most 192 tokens, the context"),
        (["--prompt", "0"], "--prompt 0: expected lengths of at least one token"),
        (["--repeat", "0"], "invalid value '0' for '--repeat <N>'"),
    ] {
        bench(folder.path(), bundle(), &args).fails(2, &[words]);
    }
    // Without lengths those that fit are taken.
    let args = ["--tokens", "0", "--repeat", "1", "--json"];
    assert_eq!(names(&bench(folder.path(), bundle(), &args).ok().json()), ["pp128"]);
}

#[test]
fn texts_are_embedded() {
    let folder = folder();
    let args = ["--prompt", "4,9", "--repeat", "2", "--json"];
    let report = bench(folder.path(), embed::bundle(), &args).ok().json();
    assert_eq!(names(&report), ["embed4", "embed9"]);
    let executions = report["graphs"].as_array().expect("graphs").iter();
    assert!(executions.clone().all(|g| g["executions"] == 4), "{report}");
    assert!(executions.count() > 0);
}

/// The recogniser takes two seconds at once: 30 s are 15 windows, each of which its encoder hears once.
#[test]
fn audio_is_measured_in_times_of_real_time() {
    let folder = folder();
    let args = ["--tokens", "3", "--repeat", "1"];
    let whisper = transcribe::whisper(folder.path());
    let json = |bundle: &Path| {
        bench(folder.path(), bundle, &[&args[..], &["--json"]].concat()).ok().json()
    };
    let report = json(&whisper);
    assert_eq!(names(&report), ["audio30"]);
    let result = &report["results"][0];
    let audio = &result["audio"];
    assert!(number(&audio["seconds"]) == 30.0, "{result}");
    let rate = number(&audio["times_real_time"]["mean"]);
    assert!((rate * number(&result["ms"]["mean"]) / 30_000.0 - 1.0).abs() < 1e-6, "{result}");
    let tokens = number(&result["tokens"]);
    assert!(tokens > 0.0 && tokens <= 45.0, "{result}");
    let graphs = report["graphs"].as_array().expect("graphs");
    let encoder = graphs.iter().find(|graph| graph["graph"] == "encoder").expect("an encoder");
    assert!(encoder["executions"].as_u64().is_some_and(|count| count >= 15), "{encoder}");

    let voice = speak::forge(folder.path(), &[]);
    let report = json(&voice);
    assert_eq!(names(&report), ["speak"]);
    assert!(number(&report["results"][0]["audio"]["seconds"]) > 0.1, "{report}");
    std::fs::write(folder.path().join("old.json"), report.to_string()).expect("written");
    let text =
        bench(folder.path(), &voice, &["--repeat", "1", "--compare", "old.json"]).ok().stdout;
    qhx_tests::has(&text, &["speak ", " times real time  ", " s of audio in ", " times as fast"]);
}
