//! `--trace`: what was done when, and files that cannot hold it.

use std::path::Path;

use serde_json::Value;

use crate::embed;
use crate::run::{Program, bundle, folder};

const PROMPT: &str = "The capital of France is";

/// The events of a trace; each has to be whole.
pub fn events(path: &Path) -> Vec<Value> {
    qhx_tests::files::json(path)
}

/// The spans of a name.
pub fn spans<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|e| e["ph"] == "X" && e["name"] == name).collect()
}

/// Beginning and end in microseconds.
fn times(span: &Value) -> (f64, f64) {
    let number = |key: &str| span[key].as_f64().expect("a number");
    (number("ts"), number("ts") + number("dur"))
}

/// Asserts that each span of `inner` lies within one of `outer`, on the same thread.
pub fn nested(events: &[Value], inner: &str, outer: &str) {
    let around: Vec<_> = spans(events, outer);
    for span in spans(events, inner) {
        let (start, end) = times(span);
        let holds = |outer: &&Value| {
            let (from, until) = times(outer);
            outer["tid"] == span["tid"] && from <= start + 1e-3 && end <= until + 1e-3
        };
        assert!(around.iter().any(holds), "{span} lies in no {outer}");
    }
}

#[test]
fn a_generation_is_traced_step_by_step() {
    let folder = folder();
    let run = qhx!(folder, "generate", bundle())
        .args([PROMPT, "--max-new", "12", "--json", "--trace", "t.json"])
        .run()
        .ok();
    let tokens = run.json()["tokens"].as_array().expect("tokens").len();
    let events = events(&folder.path().join("t.json"));
    let count = |name: &str| spans(&events, name).len();
    assert_eq!(count("sample"), tokens);
    // The last token is not consumed.
    assert_eq!(count("decode"), tokens - 1);
    for name in [
        "open",
        "open backend",
        "read tokenizer",
        "open contexts",
        "open host-op",
        "generate",
        "prompt",
    ] {
        assert_eq!(count(name), 1, "{name}");
    }
    assert!(count("tokenize") == 1 && count("detokenize") >= 11);
    let opened = spans(&events, "open contexts")[0];
    let contexts = opened["args"].as_object().expect("a time for each context");
    assert!(contexts.len() >= 2 && contexts.keys().all(|key| key.ends_with(" [ms]")), "{opened}");
    for (inner, outer) in [
        ("open contexts", "open"),
        ("tokenize", "generate"),
        ("prompt", "generate"),
        ("sample", "generate"),
        ("decode", "generate"),
        // What the host-op names itself.
        ("commit", "generate"),
    ] {
        assert!(count(inner) > 0, "{inner}");
        nested(&events, inner, outer);
    }
    let graphs: Vec<_> = events.iter().filter(|e| e["cat"] == "graph").collect();
    assert!(graphs.iter().all(|e| e["name"].as_str().is_some_and(|n| n.starts_with("graph "))));
    assert!(graphs.len() >= 2 * (tokens - 1), "{} graphs", graphs.len());
    let total = |spans: &[&Value]| spans.iter().map(|s| s["dur"].as_f64().unwrap()).sum::<f64>();
    let generate = total(&spans(&events, "generate"));
    let parts = ["tokenize", "prompt", "sample", "decode", "detokenize", "output"];
    let sum: f64 = parts.iter().map(|name| total(&spans(&events, name))).sum();
    assert!(sum <= generate && sum >= 0.5 * generate, "{sum} of {generate} us");
    assert!(total(&graphs) <= generate);
    let named: Vec<_> =
        events.iter().filter(|e| e["ph"] == "M").map(|e| &e["args"]["name"]).collect();
    assert!(
        named.contains(&&Value::from("qhx")) && named.contains(&&Value::from("main")),
        "{named:?}"
    );
    let prompt = spans(&events, "prompt")[0];
    assert_eq!(prompt["args"]["positions"], run.json()["prompt_tokens"]);
}

#[test]
fn every_turn_of_a_conversation_is_traced() {
    let folder = folder();
    qhx!(folder, "chat", bundle(), "--max-new", "3", "--trace", "t.json")
        .stdin("Hello\nAgain\n")
        .run()
        .ok();
    let events = events(&folder.path().join("t.json"));
    assert_eq!(spans(&events, "generate").len(), 2);
    nested(&events, "decode", "generate");
}

#[test]
fn each_text_that_is_embedded_is_traced() {
    let folder = folder();
    // Texts that share a graph are one span.
    for (args, embedded) in [(&[][..], 1), (&["--no-pack"][..], 2)] {
        let args = [&["One text", "and another", "--trace", "t.json"], args].concat();
        embed::embed(folder.path(), &args).ok();
        let events = events(&folder.path().join("t.json"));
        let count = |name: &str| spans(&events, name).len();
        assert_eq!((count("tokenize"), count("embed")), (2, embedded));
    }
}

#[cfg(unix)]
#[test]
fn a_trace_that_cannot_be_written_loses_no_text() {
    let folder = folder();
    let fifo = folder.path().join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo runs");
    assert!(made.success());
    for (file, what) in [("fifo", "a FIFO"), (".", "a folder"), ("no/t.json", "no/t.json")] {
        let run =
            qhx!(folder, "generate", bundle(), PROMPT, "--max-new", "2", "--trace", file).run();
        assert_eq!((run.code, run.stdout.as_str()), (11, ""), "{run:?}");
        assert!(run.stderr.contains(what) && run.stderr.matches("error: ").count() == 1, "{run:?}");
    }
    // A disk without room for more than some kilobytes.
    let usual =
        qhx!(folder, "generate", bundle(), PROMPT, "--max-new", "60", "--ignore-eos").run().ok();
    let line = "trap '' XFSZ; ulimit -f 8; \
                exec qhx generate \"$BUNDLE\" \"$PROMPT\" --max-new 60 --ignore-eos --trace t.json";
    let run =
        Program::shell(folder.path(), line).env("BUNDLE", bundle()).env("PROMPT", PROMPT).run();
    assert_eq!(run.code, 11, "{run:?}");
    assert_eq!(run.stdout, usual.stdout);
    run.says(&["error: the trace is not complete: t.json: "]);
    assert_eq!(run.stderr.matches("error: ").count(), 1, "{run:?}");
}
