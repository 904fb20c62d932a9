//! Names of models: `qhx run`, `pull`, `models`, `show`, `cp` and `rm`, over an index and a hub on loopback.

use std::path::Path;
use std::time::Duration;

use qhx_hub_server::{Fault, Repo, Server};
use qhx_paths::fixture;
use qhx_tests::real::package;
use serde_json::{Value, json};

use crate::run::{Program, Run, bundle, folder};

/// A checkpoint by name, a published bundle, and what cannot run here.
fn index(folder: &Path) -> String {
    let entry = |name: &str, more: Value| {
        let mut entry = json!({"name": name, "title": name, "does": ["text"], "license": "mit"});
        for (key, value) in more.as_object().into_iter().flatten() {
            entry[key] = value.clone();
        }
        entry
    };
    let checkpoint = |repository: &str| json!({"repository": repository, "precision": "fp16"});
    let npu = json!([{"repository": "o/npu", "archs": ["v79"]}]);
    let models = [
        entry("tiny", json!({"checkpoint": checkpoint("o/llama")})),
        entry(
            "closed",
            json!({"checkpoint": {"repository": "o/closed", "precision": "fp16", "terms": true}}),
        ),
        entry(
            "ranker",
            json!({"checkpoint": {"repository": "o/llama", "precision": "fp16", "task": "rerank"}}),
        ),
        entry("npu", json!({"bundles": npu})),
        entry(
            "other",
            json!({"checkpoint": checkpoint("o/llama"), "bundles": [
                {"repository": "o/npu", "archs": ["v79"], "missing": "the host-op other_generate"}
            ]}),
        ),
        entry("later", json!({"bundles": npu, "missing": "qhx has no host-op for Later"})),
        entry(
            "changed",
            json!({"checkpoint": {"repository": "o/llama", "precision": "fp16",
                "sha256": {"model.safetensors": "0".repeat(64)}}}),
        ),
    ];
    let path = folder.join("models.json");
    let text = json!({"format": 1, "date": "2026-11-30", "models": models}).to_string();
    std::fs::write(&path, text).expect("a file");
    path.display().to_string()
}

fn hub() -> Server {
    Server::start([
        Repo::new("o/llama", 'a').folder("", &fixture("llama3-tiny")),
        Repo::new("o/closed", 'b').file("config.json", "{}").gated("somebody"),
        Repo::new("o/npu", 'c').folder("v79", bundle()),
        Repo::new("o/device", 'd').file("v81/m.json", "{}").lfs("v81/decode.bin", [7; 2048]),
    ])
}

/// `qhx` with the index and the hub, on the CPU.
fn program(folder: &Path, server: &Server, args: &[&str]) -> Program {
    let program = Program::qhx(folder).env("HF_ENDPOINT", server.endpoint());
    program.env("QHX_INDEX", index(folder)).args(args)
}

fn run(folder: &Path, server: &Server, args: &[&str]) -> Run {
    program(folder, server, args).run()
}

/// First turn of the reference's conversation.
fn turn() -> (String, String) {
    let goldens: Value = qhx_tests::files::json(&fixture("llama3-tiny").join("goldens.json"));
    let turn = &goldens["chat"][0]["turns"][0];
    let text = |key: &str| turn[key].as_str().expect("a text").to_owned();
    (text("user"), text("text"))
}

#[test]
fn a_name_answers_as_the_reference() {
    let (server, folder) = (hub(), folder());
    let dir = folder.path();
    let (question, answer) = turn();
    let first = run(dir, &server, &["run", "tiny", &question]).ok();
    assert_eq!(first.stdout.trim(), answer.trim());
    first.says(&["fetching o/llama: ", "making a bundle of tiny for cpu"]);
    let asked = server.requests().len();
    let second = run(dir, &server, &["run", "Tiny", &question, "--json"]).ok();
    assert_eq!(second.json()["text"].as_str().map(str::trim), Some(answer.trim()));
    assert!(!second.stderr.contains("making a bundle"), "{second:?}");
    let talk = program(dir, &server, &["run", "tiny"]).stdin(format!("{question}\n")).run().ok();
    assert_eq!(talk.stdout.trim(), answer.trim());
    let direct = run(dir, &server, &["generate", "tiny", "--chat", &question]).ok();
    assert_eq!(direct.stdout.trim(), answer.trim());
    assert_eq!(server.requests().len(), asked, "what is here is not asked for");
}

#[test]
fn what_was_made_is_listed_copied_and_removed() {
    let (server, folder) = (hub(), folder());
    let dir = folder.path();
    run(dir, &server, &["generate", "tiny", "x"]).fails(3, &["fetch it: qhx pull tiny"]);
    let pulled = run(dir, &server, &["pull", "tiny", "--json"]).ok().json();
    assert_eq!(pulled["forms"][0]["form"], "cpu");
    run(dir, &server, &["list"]).ok().prints(&["tiny", "of o/llama@aaaa"]);
    run(dir, &server, &["models", "tin"]).ok().prints(&["here: cpu"]);
    let shown = run(dir, &server, &["show", "tiny"]).ok();
    shown.prints(&["checkpoint o/llama, forged as fp16", "here       cpu, of o/llama@"]);
    let other = run(dir, &server, &["show", "other"]).ok();
    other.prints(&["not taken: the host-op other_generate", "qhx run    fetches o/llama"]);
    run(dir, &server, &["cp", "tiny", "out/bundle"]).ok();
    run(dir, &server, &["cp", "tiny", "out/bundle"]).fails(2, &["something is there already"]);
    let copied = run(dir, &server, &["generate", "out/bundle", "The capital"]).ok();
    let named = run(dir, &server, &["generate", "tiny", "The capital"]).ok();
    assert_eq!(copied.stdout, named.stdout);
    let removed = run(dir, &server, &["rm", "tiny"]).ok();
    removed.says(&["its checkpoint stays", "qhx rm o/llama@"]);
    assert_eq!(run(dir, &server, &["list", "--json"]).ok().json()["models"], json!([]));
    run(dir, &server, &["rm", "tiny"]).fails(2, &["nothing of it is here"]);
}

#[test]
fn a_reranker_by_name_is_asked_as_its_card_says() {
    let (server, folder) = (hub(), folder());
    let pulled = run(folder.path(), &server, &["pull", "ranker"]).ok();
    let manifest = Path::new(pulled.stdout.trim_end()).join("ranker.json");
    let manifest: Value = qhx_tests::files::json(&manifest);
    let prompt = manifest["params"]["rerank"]["prompt"].as_str().expect("a prompt");
    assert!(prompt.contains("Judge whether the Document meets the requirements"), "{prompt}");
}

#[test]
fn a_repository_runs_without_an_index() {
    let (server, folder) = (hub(), folder());
    let (question, answer) = turn();
    let args = ["run", "o/llama", &question];
    let direct = run(folder.path(), &server, &args).ok();
    assert_eq!(direct.stdout.trim(), answer.trim());
    // By its second part, since one repository here has that name.
    let short = run(folder.path(), &server, &["run", "llama", &question]).ok();
    assert_eq!(short.stdout.trim(), answer.trim());
    assert!(!short.stderr.contains("making a bundle"), "{short:?}");
}

#[test]
fn a_name_of_two_repositories_is_refused() {
    let server = Server::start([
        Repo::new("o/llama", 'a').folder("", &fixture("llama3-tiny")),
        Repo::new("p/llama", 'b').folder("", &fixture("llama3-tiny")),
    ]);
    let folder = folder();
    for name in ["o/llama", "p/llama"] {
        run(folder.path(), &server, &["pull", name]).ok();
    }
    let refused = run(folder.path(), &server, &["run", "llama", "x"]);
    refused.fails(2, &["o/llama and p/llama have that name", "give OWNER/NAME"]);
}

#[test]
fn what_cannot_run_says_why_before_it_is_fetched() {
    let (server, folder) = (hub(), folder());
    let dir = folder.path();
    for (name, code, parts) in [
        ("tny", 2, vec!["no model of the index has that name", "similar names: tiny"]),
        ("zzz", 2, vec!["no model of the index has that name", "qhx models lists the names"]),
        ("npu", 2, vec!["it is published for v79 alone", "no NPU", "qhx pull o/npu --arch ARCH"]),
        ("later", 8, vec!["qhx has no host-op for Later", "qhx pull o/npu"]),
    ] {
        run(dir, &server, &["run", name, "x"]).fails(code, &parts);
    }
    assert!(server.requests().is_empty(), "{:?}", server.requests());
    let device = run(dir, &server, &["run", "o/device", "x"]);
    device.fails(2, &["its bundles are for the NPU", "qhx pull o/device --arch ARCH"]);
    let closed = run(dir, &server, &["run", "closed", "x"]);
    closed.fails(11, &["access is refused", "set HF_TOKEN", "without an account: tiny"]);
    let changed = run(dir, &server, &["run", "changed", "x"]);
    changed.fails(4, &["model.safetensors: the hub lists ", "update the index"]);
    assert_eq!(server.sent(), 0, "no file was fetched");
    // For another device a bundle is fetched all the same.
    run(dir, &server, &["pull", "npu", "--arch", "v79"]).ok();
}

#[test]
fn an_index_that_is_none_is_named() {
    let (server, folder) = (hub(), folder());
    let dir = folder.path();
    let path = dir.join("other.json");
    for (text, parts) in [
        ("<html>", ["other.json: it is no index of models", "docs/names.md"]),
        (r#"{"format": 7}"#, ["format 7, this program reads 1", "update qhx"]),
    ] {
        std::fs::write(&path, text).expect("a file");
        let args = ["models", "--index", &path.display().to_string()];
        run(dir, &server, &args).fails(4, &parts);
    }
    let args = ["run", "tiny", "x", "--index", &format!("{}/models.json", server.endpoint())];
    run(dir, &server, &args).fails(2, &["needs a signature or a hash", "--index-key"]);
}

#[test]
fn the_names_of_the_program_are_listed() {
    let folder = folder();
    let listed = qhx!(folder, "models", "--json").run().ok().json();
    let names: Vec<_> = listed["models"].as_array().expect("models").iter().collect();
    assert!(names.len() >= 30, "{}", names.len());
    let shown = qhx!(folder, "show", "smollm2").run().ok();
    shown.prints(&["SmolLM2", &package("smollm2").wheels[0].requirement, "apache-2.0"]);
}

/// Files of up to a limit fit, the next one does not; with room it goes on.
#[cfg(unix)]
#[test]
fn a_full_disk_keeps_what_came() {
    let (server, folder) = (hub(), folder());
    let dir = folder.path();
    let index = index(dir);
    // Writing beyond a limit is an error where the signal for it is ignored.
    let line = "trap '' XFSZ; ulimit -f 40; exec qhx run tiny x";
    let full = Program::shell(dir, line).env("HF_ENDPOINT", server.endpoint());
    full.env("QHX_INDEX", &index).run().fails(11, &["o/llama", "make room"]);
    assert!(!dir.join("cache/models/tiny").exists(), "nothing was made");
    let begun = server.sent();
    run(dir, &server, &["pull", "tiny"]).ok();
    let whole = Repo::new("o/llama", 'a').folder("", &fixture("llama3-tiny")).bytes();
    assert!(server.sent() - begun < whole, "what came is not fetched again");
}

/// Killed while files come and while the bundle is made; what came is not fetched again.
#[cfg(unix)]
#[test]
fn a_run_that_is_killed_goes_on() {
    let (server, folder) = (hub(), folder());
    let dir = folder.path();
    let (question, answer) = turn();
    let whole = Repo::new("o/llama", 'a').folder("", &fixture("llama3-tiny")).bytes();
    for place in 1..=10 {
        server.heal();
        server.fault("model.safetensors", Fault::Slow(1 << 12, Duration::from_millis(2)), 9);
        let mut child = program(dir, &server, &["run", "tiny", &question]).start();
        let limit = whole * place / 10;
        while server.sent() < limit && child.try_wait().expect("a child").is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().expect("a child");
        child.wait().expect("a child");
    }
    server.heal();
    let run = run(dir, &server, &["run", "tiny", &question]).ok();
    assert_eq!(run.stdout.trim(), answer.trim());
    // Small files that were under way come again, and what was on its way to the disk.
    assert!(server.sent() < 2 * whole, "{} of {whole} bytes", server.sent());
    let left = std::fs::read_dir(dir.join("cache/models/tiny")).expect("a folder").count();
    assert_eq!(left, 2, "the bundle and its record");
}

/// A published bundle is fetched by others and answers alike, also after ten kills on the way there and back.
#[cfg(unix)]
#[test]
fn a_bundle_goes_to_the_hub_and_back() {
    let (server, mine, other) = (hub(), folder(), folder());
    let dir = mine.path();
    server.writable("writer", Some(1 << 15));
    let (question, answer) = turn();
    run(dir, &server, &["pull", "tiny"]).ok();
    let publish = |dir: &Path, more: &[&str]| {
        let args = [&["publish", "tiny", "me/tiny", "--license", "mit"], more].concat();
        program(dir, &server, &args).env("HF_TOKEN", "writer")
    };
    let card = publish(dir, &["--dry-run"]).run().ok();
    card.prints(&[
        "license: \"mit\"",
        "base_model: \"o/llama\"",
        "| `cpu` | any CPU | fp16 |",
        "qhx run me/tiny",
    ]);
    let refused = run(dir, &server, &["publish", "tiny", "me/tiny", "--license", "mit"]);
    refused.fails(2, &["publishing needs a token", "HF_TOKEN"]);
    let bundle: u64 = dir_bytes(&dir.join("cache/models/tiny/cpu"));
    for place in 0..5 {
        server.heal();
        server.fault("/storage/", Fault::Slow(0, Duration::from_millis(20)), 99);
        let mut child = publish(dir, &[]).start();
        let since = std::time::Instant::now();
        let begun = server.received();
        while server.received() < begun + bundle / 8
            && child.try_wait().expect("a child").is_none()
            && since.elapsed() < Duration::from_secs(1 + place)
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().expect("a child");
        child.wait().expect("a child");
    }
    server.heal();
    let published = publish(dir, &["--json"]).run().ok().json();
    assert_eq!(published["repository"], "me/tiny");
    // Parts of a file that was under way come again.
    assert!(server.received() < 3 * bundle, "{} of {bundle} bytes", server.received());
    let there = other.path();
    for place in 1..=5 {
        server.heal();
        server.fault("/resolve/", Fault::Slow(1 << 12, Duration::from_millis(1)), 99);
        let begun = server.sent();
        let mut child = program(there, &server, &["run", "me/tiny", &question]).start();
        while server.sent() < begun + bundle * place / 12
            && child.try_wait().expect("a child").is_none()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().expect("a child");
        child.wait().expect("a child");
    }
    server.heal();
    let back = run(there, &server, &["run", "me/tiny", &question]).ok();
    assert_eq!(back.stdout.trim(), answer.trim());
    run(there, &server, &["verify", "me/tiny"]).ok();
}

fn dir_bytes(folder: &Path) -> u64 {
    let entries =
        std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry"));
    let bytes = |entry: std::fs::DirEntry| match entry.metadata().expect("a file") {
        data if data.is_dir() => dir_bytes(&entry.path()),
        data => data.len(),
    };
    entries.map(bytes).sum()
}
