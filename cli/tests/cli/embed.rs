//! `qhx embed` and `qhx_embed`: rows, shards, resuming, prefixes.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use qhx_tests::files;
use qhx_tests::plugin_files::copy_folder;
use serde_json::Value;

use crate::run::{Program, Run, folder, forge};

/// A bundle of the tiny encoder for the CPU, for texts of at most 40 tokens, made once.
pub fn bundle() -> &'static Path {
    static BUNDLE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, bundle) = BUNDLE.get_or_init(|| {
        let folder = folder();
        let tiny = qhx_paths::fixture("embed-mistral-tiny");
        let options = "--task embed --shards 2 --max-ctx 40 --cpu-only";
        let out = forge(folder.path(), &tiny, "encoder", options);
        (folder, out)
    });
    bundle
}

/// The manifest of a copy of it.
pub fn manifest(copy: &Path) -> PathBuf {
    copy.join("embed-mistral-tiny.json")
}

pub fn embed(folder: &Path, args: &[&str]) -> Run {
    qhx!(folder, "embed", bundle(), "--backend", "cpu").args(args).run()
}

pub fn rows(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect()
}

/// Writes an input of `count` texts, strings and objects in turn.
fn input(folder: &Path, count: usize) -> PathBuf {
    let path = folder.join("in.jsonl");
    let line = |i: usize| match i % 2 {
        0 => format!("\"text {i}\"\n"),
        _ => format!("{{\"text\": \"def f{i}(n): return n\", \"role\": \"document\"}}\n"),
    };
    std::fs::write(&path, (0..count).map(line).collect::<String>()).expect("written");
    path
}

pub fn read(folder: &Path, name: &str) -> String {
    std::fs::read_to_string(folder.join(name)).expect("the output is there")
}

#[test]
fn an_interrupted_run_goes_on_where_it_ended() {
    let folder = folder();
    input(folder.path(), 30);
    // What is left of the texts does not share graphs with those that were done.
    let files = ["--input", "in.jsonl", "--output", "out.jsonl", "--no-pack"];
    let run = embed(folder.path(), &files).ok();
    let times = run.stderr.lines().find(|line| line.starts_with("load ")).unwrap_or_default();
    // What loading and executing each part took.
    qhx_tests::has(times, &["(enc_p0 ", ", enc_p1 ", "30 texts", ": enc32_p0 ", " ms, enc32_p1 "]);
    let whole = read(folder.path(), "out.jsonl");
    let found = rows(&whole);
    assert_eq!(found.len(), 30);
    for (index, row) in found.iter().enumerate() {
        assert_eq!(row["index"], index);
        assert_eq!(row["embedding"].as_array().map(Vec::len), Some(92));
    }
    embed(folder.path(), &files).fails(2, &["--resume"]);
    assert_eq!(read(folder.path(), "out.jsonl"), whole);

    let resume = [&files[..], &["--resume"]].concat();
    for cut in [0, 7, whole.len() / 2, whole.len() - 1, whole.len()] {
        std::fs::write(folder.path().join("out.jsonl"), &whole[..cut]).expect("written");
        embed(folder.path(), &resume).ok();
        assert_eq!(read(folder.path(), "out.jsonl"), whole, "cut at {cut}");
    }

    // Another input under the same output.
    std::fs::write(folder.path().join("in.jsonl"), "\"other\"\n".repeat(40)).expect("written");
    let other = embed(folder.path(), &resume);
    assert_eq!(other.code, 2);
    assert_eq!(read(folder.path(), "out.jsonl"), whole);
}

#[test]
fn shards_together_are_the_whole() {
    let folder = folder();
    input(folder.path(), 21);
    let run = |args: &[&str]| {
        let args = [&["--input", "in.jsonl", "--json"], args].concat();
        rows(&embed(folder.path(), &args).ok().stdout)
    };
    let whole = run(&["--no-pack"]);
    let mut joined = run(&["--shard", "0/2", "--no-pack"]);
    assert_eq!(joined.len(), 11);
    joined.extend(run(&["--shard", "1/2", "--no-pack"]));
    joined.sort_by_key(|row| row["index"].as_u64());
    assert_eq!(joined, whole);

    // Texts that share graphs: the same texts in the same order, with vectors that differ by rounding.
    let packed = run(&[]);
    assert_eq!(packed.len(), whole.len());
    let mut joined = run(&["--shard", "1/2"]);
    joined.extend(run(&["--shard", "0/2"]));
    joined.sort_by_key(|row| row["index"].as_u64());
    for row in packed.iter().zip(&whole).chain(joined.iter().zip(&whole)) {
        alike(row.0, row.1);
    }
}

/// Two rows of one text, whose vectors differ by no more than rounding.
fn alike(a: &Value, b: &Value) {
    assert_eq!((&a["index"], &a["text"]), (&b["index"], &b["text"]));
    let vector = |row: &Value| -> Vec<f64> {
        let values = row["embedding"].as_array().expect("a vector").iter();
        values.map(|value| value.as_f64().expect("a number")).collect()
    };
    let (a, b) = (vector(a), vector(b));
    assert_eq!(a.len(), b.len());
    let largest = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(a.iter().chain(&b).all(|value| value.is_finite()) && largest < 1e-5, "{largest:e}");
}

#[test]
fn texts_are_answered_as_they_come_and_share_graphs() {
    let folder = folder();
    let mut child = qhx!(folder, "embed", bundle(), "--backend", "cpu", "--input", "-", "--json")
        .start_with_streams();
    let mut stdin = child.stdin.take().expect("a pipe");
    let mut answers = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut answer = || -> Value {
        let line = answers.next().expect("an answer").expect("a line");
        serde_json::from_str(&line).expect("JSON")
    };
    // Whoever writes one text and waits has its vector before there is another one.
    let mut alone = Vec::new();
    for index in 0..2 {
        writeln!(stdin, "\"text {index}\"").expect("written");
        let row = answer();
        assert_eq!(row["index"], index);
        alone.push(row);
    }
    // Two at once.
    stdin.write_all(b"\"text 0\"\n\"text 1\"\n").expect("written");
    for row in &mut alone {
        row["index"] = (row["index"].as_u64().expect("a number") + 2).into();
        alike(&answer(), row);
    }
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.contains("4 texts"), "{stderr}");
}

#[test]
fn lines_of_standard_input_get_the_prefix_of_their_role() {
    let folder = folder();
    let lines = "\"add\"\n{\"text\": \"add\", \"role\": \"query\"}\n";
    let run = qhx!(folder, "embed", bundle())
        .args(["--backend", "cpu", "--input", "-", "--json", "--no-pack"])
        .stdin(lines)
        .run()
        .ok();
    let found = rows(&run.stdout);
    assert_eq!(found.len(), 2);
    assert_ne!(found[0]["embedding"], found[1]["embedding"], "the query has a prefix");
    let bare = embed(folder.path(), &["add", "--role", "query", "--prefix-query", "", "--json"]);
    assert_eq!(rows(&bare.ok().stdout)[0]["embedding"], found[0]["embedding"]);
}

#[test]
fn a_text_that_is_too_long_is_named_and_what_is_done_stays() {
    let folder = folder();
    let long = "word ".repeat(60);
    std::fs::write(folder.path().join("in.jsonl"), format!("\"a\"\n\"{long}\"\n\"b\"\n"))
        .expect("written");
    let files = ["--input", "in.jsonl", "--output", "out.jsonl"];
    let run = embed(folder.path(), &files);
    assert_ne!(run.code, 0);
    assert!(run.stderr.contains("text 1") && run.stderr.contains("40"), "{}", run.stderr);
    run.says(&["--truncate"]);
    assert_eq!(rows(&read(folder.path(), "out.jsonl")).len(), 1);
    let resume = [&files[..], &["--resume", "--truncate"]].concat();
    embed(folder.path(), &resume).ok();
    assert_eq!(rows(&read(folder.path(), "out.jsonl")).len(), 3);
}

#[test]
fn a_truncated_text_keeps_the_special_token_that_is_pooled() {
    let folder = folder();
    let copied = folder.path().join("encoder");
    copy_folder(bundle(), &copied);
    files::edit(&manifest(&copied), |manifest| {
        manifest["plan"]["params"]["pooling"] = "last".into();
    });
    files::edit(&copied.join("tokenizer.json"), |tokenizer| {
        let processor = &mut tokenizer["post_processor"];
        let end = serde_json::json!({"SpecialToken": {"id": "</s>", "type_id": 0}});
        processor["single"].as_array_mut().expect("pieces").push(end);
        processor["special_tokens"]["</s>"] =
            serde_json::json!({"id": "</s>", "ids": [2], "tokens": ["</s>"]});
    });
    let path = copied.join("tokenizer.json");
    let tokenizer = qhx_text::Tokenizer::from_file(&path).expect("a tokenizer");
    // The longest text that fits with both special tokens, and one that begins with it.
    let fits = (1..40)
        .map(|words| vec!["x"; words].join(" "))
        .rfind(|text| tokenizer.encode(text, true).expect("tokens").len() <= 40)
        .expect("some text fits");
    assert_eq!(tokenizer.encode(&fits, true).expect("tokens").len(), 40);
    let vector = |text: &str| {
        let run = qhx!(folder, "embed", copied, "--backend", "cpu", "--json", "--truncate", text)
            .run()
            .ok();
        rows(&run.stdout)[0]["embedding"].clone()
    };
    assert_eq!(vector(&vec!["x"; 300].join(" ")), vector(&fits), "both end with the same token");
}

#[test]
fn bad_lines_and_options_are_named() {
    let folder = folder();
    for (line, words) in [("{\"txt\": 1}", "line 2"), ("", "empty"), ("\"a", "line 2")] {
        std::fs::write(folder.path().join("in.jsonl"), format!("\"a\"\n{line}\n\"b\"\n"))
            .expect("written");
        let run = embed(folder.path(), &["--input", "in.jsonl"]);
        assert_ne!(run.code, 0);
        assert!(run.stderr.contains(words), "{line:?}: {}", run.stderr);
    }
    if !cfg!(feature = "parquet") {
        embed(folder.path(), &["--input", "in.parquet"]).fails(2, &["--features parquet"]);
    }
    for args in [&[][..], &["--shard", "2/2", "--input", "in.jsonl"], &["--resume", "a"]] {
        assert_eq!(embed(folder.path(), args).code, 2, "{args:?}");
    }
}

#[test]
fn qhx_embed_prints_cosines_and_follows_the_variables() {
    let folder = folder();
    let run = |args: &[&str], prefix: Option<&str>| {
        let mut program = Program::embed(folder.path())
            .args([bundle()])
            .args(["cpu", "-"])
            .args([bundle()])
            .args(args);
        if let Some(prefix) = prefix {
            program = program.env("QHX_EMB_QUERY_PREFIX", prefix).env("QHX_EMB_DOC_PREFIX", "");
        }
        program.run().ok().stdout
    };
    let text = run(&["add", "add", "SELECT 1"], None);
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert!(lines[0].starts_with("query: dimension 92  norm 1.000000  ["), "{text}");
    assert!(lines[1].starts_with("document 1: dimension 92  norm 1.000000  cosine "), "{text}");
    assert!(!lines[1].contains("cosine 1.000000"), "the query has a prefix: {text}");
    let text = run(&["add", "add", "--json"], Some(""));
    let found = rows(&text);
    assert_eq!(found[0]["embedding"], found[1]["embedding"]);
    assert!((found[1]["cosine"].as_f64().expect("a number") - 1.0).abs() < 1e-6, "{text}");
}

/// Texts and images have vectors of one space, from arguments and from lines, and an output is continued.
#[test]
fn images_become_vectors_beside_texts() {
    let folder = folder();
    let tiny = qhx_paths::fixture("siglip-fixed");
    let out = forge(folder.path(), &tiny, "siglip", "--task embed --cpu-only");
    let goldens: Value = files::json(&tiny.join("goldens.json"));
    let (text, image) = (&goldens["texts"][0], &goldens["images"][0]);
    let words = text["text"].as_str().expect("a text");
    let file = qhx_paths::fixture(image["image"].as_str().expect("a path")).display().to_string();
    let siglip = |args: &[&str]| qhx!(folder, "embed", out).args(args).run();
    let near = |found: &Value, golden: &Value| {
        let values = |list: &Value| -> Vec<f64> {
            list.as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number")).collect()
        };
        let (found, golden) = (values(&found["embedding"]), values(&golden["vector"]));
        let dot: f64 = found.iter().zip(&golden).map(|(a, b)| a * b).sum();
        assert!(dot > 0.99999, "{dot}");
    };
    let found = rows(&siglip(&[words, "--image", &file, "--json"]).ok().stdout);
    near(&found[0], text);
    near(&found[1], image);
    assert_eq!(
        (found[0]["text"].as_str(), found[1]["image"].as_str()),
        (Some(words), Some(&*file))
    );

    let lines = [serde_json::json!({"image": file}), serde_json::json!({"text": words})];
    let line = |line: &Value| format!("{line}\n");
    std::fs::write(folder.path().join("in.jsonl"), lines.iter().map(line).collect::<String>())
        .expect("written");
    let files = ["--input", "in.jsonl", "--output", "out.jsonl"];
    siglip(&files).ok();
    let whole = read(folder.path(), "out.jsonl");
    near(&rows(&whole)[0], image);
    let first = whole.find('\n').expect("a line") + 1;
    std::fs::write(folder.path().join("out.jsonl"), &whole[..first]).expect("written");
    siglip(&[&files[..], &["--resume"]].concat()).ok().says(&["resume: 1 texts"]);
    assert_eq!(read(folder.path(), "out.jsonl"), whole);

    siglip(&["--image", "none.png"]).fails(11, &["image 0: none.png"]);
    embed(folder.path(), &["--image", &file]).fails(9, &["the bundle takes no images"]);
}
