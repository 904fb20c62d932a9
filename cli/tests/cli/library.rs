//! The programs of `examples/library`, which link the library alone: they say what `qhx` says.

use std::path::Path;

use qhx_paths::{fixture, workspace};
use serde_json::Value;

use crate::run::{Program, bundle, copy_of_bundle, edit_manifest, folder, forge};
use crate::{embed, transcribe};

fn library(folder: &Path, name: &str, words: &[&str]) -> Program {
    Program::library(folder, name).args(words)
}

fn path(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn ten_lines_complete_a_text_as_the_program_does() {
    let folder = folder();
    let prompt = "The capital of France is";
    let run = library(folder.path(), "complete", &[path(bundle()), prompt]).run().ok();
    let qhx = qhx!(folder, "generate", bundle(), prompt);
    assert_eq!(run.stdout, qhx.args(["--max-new", "1024"]).run().ok().stdout);
    assert!(run.stdout.len() > 10, "{run:?}");
    assert_eq!(run.stderr, "", "a library prints nothing");
    shown_by_the_page("complete");
}

fn shown_by_the_page(program: &str) {
    let page = std::fs::read_to_string(workspace().join("docs/library.md")).expect("the page");
    let source = workspace().join(format!("examples/library/src/bin/{program}.rs"));
    let source = std::fs::read_to_string(source).expect("the source");
    let (_, code) = source.split_once("\n\n").expect("a comment, and then the code");
    assert!(page.contains(code.trim_end()), "docs/library.md shows another program");
}

#[test]
fn messages_of_an_app_are_answered_as_those_of_a_chat() {
    let folder = folder();
    let [first, second] = ["What colour is the sky?", "And at night?"];
    let run = library(folder.path(), "messages", &[path(bundle()), first, second]).run().ok();
    let qhx = qhx!(folder, "chat", bundle(), "--max-new", "64", "--temperature", "0");
    let qhx = qhx.args(["--system-prompt", "Answer in one sentence."]);
    assert_eq!(run.stdout, qhx.stdin(format!("{first}\n{second}\n")).run().ok().stdout);
    assert_eq!(run.stdout.lines().count(), 2, "{run:?}");
    shown_by_the_page("messages");
}

/// A bundle whose manifest has only what an answer begins with, as published ones do, and no template beside it.
fn without_template(folder: &Path) -> std::path::PathBuf {
    let copy = copy_of_bundle(folder);
    let _ = std::fs::remove_file(copy.join("tokenizer_config.json"));
    let _ = std::fs::remove_file(copy.join("chat_template.jinja"));
    edit_manifest(&copy, |manifest| {
        manifest["chat"] =
            serde_json::json!({"assistant": {"gen_prefill": "<|im_start|>assistant\n"}});
        if let Some(artifacts) = manifest["artifacts"].as_object_mut() {
            artifacts.remove("tokenizer_config");
            artifacts.remove("files");
        }
    });
    copy
}

#[test]
fn a_chat_is_the_same_also_without_a_template_of_its_own() {
    let folder = folder();
    let published = without_template(folder.path());
    let messages = "What colour is the sky?\nAnd at night?\n";
    for bundle in [bundle(), &published] {
        let run = library(folder.path(), "chat", &[path(bundle)]).stdin(messages).run().ok();
        let qhx = qhx!(folder, "chat", bundle);
        let qhx = qhx.args(["--max-new", "64"]).stdin(messages).run().ok();
        assert_eq!(run.stdout, qhx.stdout);
        assert_eq!(run.stdout.lines().count(), 2, "{run:?}");
        let reused = |line: &str| line.split(' ').next().and_then(|n| n.parse::<usize>().ok());
        let reused: Vec<_> = run.stderr.lines().filter_map(reused).collect();
        assert!(reused.len() == 2 && reused[0] == 0 && reused[1] > 0, "{run:?}");
    }
}

#[test]
fn vectors_are_those_of_the_program_with_its_prefixes() {
    let folder = folder();
    let words = [path(embed::bundle()), "fibonacci", "def fib(n): return n", "SELECT 1"];
    let run = library(folder.path(), "embed", &words).run().ok();
    let vector = |text: &str, role: &str| {
        let run = embed::embed(folder.path(), &[text, "--role", role, "--json"]).ok();
        let row: Value = serde_json::from_str(&run.stdout).expect("JSON");
        let values = row["embedding"].as_array().expect("a vector").clone();
        values.iter().map(|v| v.as_f64().expect("a number") as f32).collect::<Vec<f32>>()
    };
    let query = vector("fibonacci", "query");
    assert_ne!(
        query,
        vector("fibonacci", "document"),
        "the tiny model's query prefix changes a vector"
    );
    let lines: Vec<_> = run.stdout.lines().collect();
    assert_eq!(lines.len(), 2);
    for (line, text) in lines.iter().zip(&words[2..]) {
        let cosine: f32 = query.iter().zip(vector(text, "document")).map(|(a, b)| a * b).sum();
        let (found, document) = line.split_once(' ').expect("a number and a document");
        assert_eq!(document, *text);
        let found: f32 = found.parse().expect("a number");
        assert!((found - cosine).abs() < 2e-5, "{text}: {found}, expected {cosine}");
    }
}

#[test]
fn audio_is_transcribed_by_the_library() {
    let folder = folder();
    let checkpoint = transcribe::base(folder.path());
    let bundle = transcribe::forge(folder.path(), &checkpoint, &["--cpu-only"]);
    let words = [path(&bundle), &transcribe::sentence("noon")];
    let run = library(folder.path(), "transcribe", &words).run().ok();
    assert_eq!(run.stdout, "the boat leaves at noon\n");
    run.says(&["0.0 s to 1.7 s: the boat leaves at noon"]);
}

#[test]
fn an_image_is_described_by_the_library() {
    let folder = folder();
    let tiny = fixture("qwen3vl-tiny");
    let options = "--image-patches 24,48 --max-ctx 200 --prefill 16 --cpu-only";
    let out = forge(folder.path(), &tiny, "seen", options);
    let boat = tiny.join("images/boat.png");
    let words = [path(&out), path(&boat), "Describe this image."];
    let run = library(folder.path(), "image", &words).run().ok();
    assert_eq!(run.stdout, "A red boat on a blue sea.\n");
}

#[test]
fn a_worker_cancels_one_request_and_counts_meanwhile() {
    let folder = folder();
    let prompts = ["The capital of France is", "What colour is", "The capital of"];
    let words = [&[path(bundle())][..], &prompts].concat();
    let run = library(folder.path(), "worker", &words).run().ok();
    let reasons: Vec<_> = run.stdout.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(reasons.len(), 3, "{run:?}");
    assert!(reasons[..2].iter().all(|reason| *reason != "cancelled"), "{run:?}");
    assert_eq!(reasons[2], "cancelled", "{run:?}");
    assert_eq!(run.stderr.lines().filter(|line| line.contains(" tokens: ")).count(), 3);
}
