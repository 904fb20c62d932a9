//! `qhx pull`, `list` and `rm`, and names of what was fetched in the place of a bundle.

use std::path::Path;
use std::time::Duration;

use qhx_hub_server::{Fault, Repo, Server};
use qhx_tests::plugin_files::copy_folder;

use crate::run::{Program, Run, bundle, checkpoint, copy_of_bundle, edit_manifest, folder};

const PROMPT: &str = "The capital of France is";

/// `qhx`, which asks this hub.
fn qhx(folder: &Path, server: &Server, args: &[&str]) -> Program {
    Program::qhx(folder).env("HF_ENDPOINT", server.endpoint()).args(args)
}

fn run(folder: &Path, server: &Server, args: &[&str]) -> Run {
    qhx(folder, server, args).run()
}

/// A repository with the tiny bundle, for two architectures.
fn tiny() -> Repo {
    Repo::new("o/tiny", 'a')
        .file("README.md", "tiny")
        .folder("v79", bundle())
        .folder("v81", bundle())
}

#[test]
fn a_bundle_is_fetched_and_run_by_its_name() {
    let (server, folder) = (Server::start([tiny()]), folder());
    let dir = folder.path();
    let pulled = run(dir, &server, &["pull", "o/tiny", "--arch", "v81", "--json"]).ok().json();
    assert_eq!(pulled["name"], "o/tiny/v81");
    assert_eq!((&pulled["kind"], &pulled["commit"]), (&"bundle".into(), &"a".repeat(40).into()));
    assert_eq!(pulled["fetched_bytes"], server.sent());
    let expected = dir.join(".cache/huggingface/hub/models--o--tiny/snapshots");
    let expected = expected.join("a".repeat(40)).join("v81");
    assert_eq!(pulled["path"], expected.to_str().unwrap());
    let again = run(dir, &server, &["pull", "o/tiny/v81"]).ok();
    assert_eq!(again.stdout.trim_end(), expected.to_str().unwrap());
    again.says(&["it was there"]);
    let asked = server.requests().len();

    let direct = qhx!(dir, "generate", bundle(), PROMPT).run().ok();
    for name in ["o/tiny", "o/tiny@main", "o/tiny/v81", "o/tiny/v81/tiny"] {
        let named = run(dir, &server, &["generate", name, PROMPT]).ok();
        assert_eq!(named.stdout, direct.stdout, "{name}");
    }
    let inspected = run(dir, &server, &["inspect", "o/tiny", "--json"]).ok().json();
    assert_eq!(inspected["manifest"], expected.join("tiny.json").to_str().unwrap());
    run(dir, &server, &["doctor", "o/tiny"]).prints(&["snapshots"]);
    assert_eq!(server.requests().len(), asked, "opening asks nobody");
}

#[test]
fn a_folder_of_that_name_comes_first() {
    let (server, folder) = (Server::start([tiny()]), folder());
    let dir = folder.path();
    run(dir, &server, &["pull", "o/tiny/v81"]).ok();
    copy_folder(bundle(), &dir.join("o/tiny"));
    let inspected = run(dir, &server, &["inspect", "o/tiny", "--json"]).ok().json();
    assert_eq!(inspected["manifest"], "o/tiny/tiny.json");
    run(dir, &server, &["generate", "o/absent", PROMPT])
        .fails(3, &["if it is a name, fetch it: qhx pull o/absent"]);
}

#[test]
fn which_bundle_is_a_question_with_a_list() {
    let (server, folder) = (Server::start([tiny()]), folder());
    let run = run(folder.path(), &server, &["pull", "o/tiny"]);
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    run.says(&["o/tiny: which bundle? There is v79, v81", "hint: choose one: o/tiny/v79"]);
    assert_eq!(server.sent(), 0);
}

#[test]
fn fetched_files_are_looked_at_again() {
    let folder = folder();
    let dir = folder.path();
    // Published manifests list no files: the hashes are the hub's.
    let unlisted = copy_of_bundle(dir);
    edit_manifest(&unlisted, |manifest| {
        manifest["artifacts"].as_object_mut().expect("artifacts").remove("files");
    });
    let server = Server::start([Repo::new("o/tiny", 'a').folder("v81", &unlisted)]);
    run(dir, &server, &["pull", "o/tiny/v81"]).ok();
    let verified = run(dir, &server, &["verify", "o/tiny"]).ok();
    let files = ["tiny.json", "tokenizer.json", "onnx/decode.onnx_data"];
    for line in files.map(|file| format!("ok   {file}")) {
        assert!(verified.stdout.lines().any(|found| found == line), "{}", verified.stdout);
    }
    let blobs = dir.join(".cache/huggingface/hub/models--o--tiny/snapshots").join("a".repeat(40));
    let tokenizer = blobs.join("v81/tokenizer.json");
    let mut bytes = std::fs::read(&tokenizer).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&tokenizer, bytes).unwrap();
    let damaged = run(dir, &server, &["generate", "o/tiny", PROMPT, "--json"]);
    assert_eq!(damaged.code, 4);
    let error = &damaged.json()["error"];
    assert!(error["message"].as_str().unwrap().contains("tokenizer.json: sha256 "), "{error}");
    assert_eq!(error["hint"], "fetch it again: qhx pull o/tiny/v81");
    run(dir, &server, &["pull", "o/tiny/v81"]).ok();
    run(dir, &server, &["generate", "o/tiny", PROMPT]).ok();
}

#[test]
fn what_is_there_is_listed_and_removed() {
    let (server, folder) = (Server::start([tiny()]), folder());
    let dir = folder.path();
    run(dir, &server, &["list"]).ok().says(&["qhx run NAME begins"]);
    for arch in ["79", "81"] {
        run(dir, &server, &["pull", "o/tiny", "--arch", arch]).ok();
    }
    let listed = run(dir, &server, &["list"]).ok().stdout;
    let lines: Vec<_> = listed.lines().collect();
    assert_eq!(lines.len(), 2, "{listed}");
    assert!(lines[0].starts_with("o/tiny/v79  bundle "), "{listed}");
    assert!(lines[0].ends_with("aaaaaaaaaa (main)"), "{listed}");
    let json = run(dir, &server, &["list", "--json"]).ok().json();
    assert_eq!(json["found"][1]["name"], "o/tiny/v81");
    let blobs = dir.join(".cache/huggingface/hub/models--o--tiny/blobs");
    std::fs::write(blobs.join(format!("{}.incomplete", "a".repeat(64))), [0; 9]).unwrap();
    let json = run(dir, &server, &["list", "--json"]).ok().json();
    assert_eq!(json["unfinished"][0]["bytes"], 9, "{json}");
    let listed = run(dir, &server, &["list"]).ok().stdout;
    assert!(listed.lines().last().unwrap().contains("unfinished"), "{listed}");
    let removed = run(dir, &server, &["rm", "o/tiny/v79"]).ok();
    assert!(removed.stdout.starts_with("removed o/tiny/v79: "), "{}", removed.stdout);
    run(dir, &server, &["generate", "o/tiny", PROMPT]).ok();
    let removed = run(dir, &server, &["rm", "o/tiny", "--json"]).ok().json();
    assert!(removed["bytes"].as_u64().unwrap() > 100_000, "{removed}");
    assert_eq!(run(dir, &server, &["rm", "o/tiny"]).code, 2);
}

#[test]
fn a_checkpoint_is_fetched_to_be_forged() {
    let tied = checkpoint();
    let repo = Repo::new("Some/Tied-Model", 'c').folder("", &tied);
    let (server, folder) = (Server::start([repo]), folder());
    let dir = folder.path();
    let name = "Some/Tied-Model";
    let plan = run(dir, &server, &["forge", "plan", name, "--cpu-only"]).ok();
    plan.prints(&["decode"]);
    let weights = |server: &Server| {
        let paths = server.requests().into_iter().map(|request| request.path);
        paths.filter(|path| path.ends_with(".safetensors")).count()
    };
    assert_eq!(weights(&server), 0, "a plan needs none");
    let options = ["--out", "out", "--cpu-only", "--max-ctx", "128", "--no-golden"];
    let forged = run(dir, &server, &[&["forge", name], &options[..]].concat()).ok();
    assert_eq!(forged.stdout.trim_end(), "out/tied-model.json");
    let inspected = run(dir, &server, &["inspect", "out"]).ok().stdout;
    assert!(inspected.starts_with("model      Some/Tied-Model\n"), "{inspected}");
    assert_eq!(weights(&server), 1);
    let listed = run(dir, &server, &["list"]).ok().stdout;
    assert!(listed.starts_with("Some/Tied-Model  checkpoint "), "{listed}");
    let run = run(dir, &server, &["generate", name, PROMPT]);
    run.says(&["the folder of a checkpoint, expected a bundle"]);
}

#[test]
fn failures_of_the_hub_are_errors_with_hints() {
    let gated = Repo::new("o/gated", 'b').file("m.json", "{}").lfs("a.bin", [0; 9]).gated("t");
    let (server, folder) = (Server::start([tiny(), gated]), folder());
    let dir = folder.path();
    let error = |args: &[&str], token: &str| {
        let run = qhx(dir, &server, args).env("HF_TOKEN", token).run();
        assert!(!run.stderr.contains("secret"), "{run:?}");
        (run.code, run.json()["error"]["hint"].as_str().unwrap_or_default().to_owned())
    };
    let (code, hint) = error(&["pull", "o/gated", "--json"], "secret");
    assert!(code == 11 && hint.starts_with("accept the terms"), "{code} {hint}");
    let (code, hint) = error(&["pull", "o/absent", "--json"], "");
    assert!(code == 2 && hint.contains("set HF_TOKEN"), "{code} {hint}");
    qhx(dir, &server, &["pull", "o/gated"]).env("HF_TOKEN", "t").run().ok();
    qhx(dir, &server, &["pull", "o/tiny/v81"])
        .env("HF_HUB_OFFLINE", "1")
        .run()
        .fails(11, &["nothing is fetched offline"]);
    let doctor = qhx(dir, &server, &["doctor", "--json"]).env("HF_TOKEN", "secret").run();
    assert_eq!(doctor.json()["environment"]["HF_TOKEN"], "(a secret)");
}

/// Bytes that buffers of a connection hold at most.
const UNREAD: u64 = 1 << 18;

/// A repository with one large file.
fn large() -> (Repo, Vec<u8>) {
    let mut state = 1_u64;
    let next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 56) as u8
    };
    let bytes: Vec<u8> = std::iter::repeat_with(next).take(20 << 20).collect();
    (Repo::new("o/large", 'd').file("m.json", "{}").lfs("decode.bin", bytes.clone()), bytes)
}

#[test]
fn a_download_that_is_killed_goes_on_where_it_was() {
    let (repo, bytes) = large();
    let size = repo.bytes();
    let (server, folder) = (Server::start([repo]), folder());
    server.fault("decode.bin", Fault::Slow(1 << 14, Duration::from_micros(300)), 6);
    for part in 1..=5 {
        let mut child = qhx(folder.path(), &server, &["pull", "o/large"]).start();
        while server.sent() < part * size / 6 {
            assert!(child.try_wait().unwrap().is_none(), "it ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let hub = folder.path().join(".cache/huggingface/hub/models--o--large");
        assert!(!hub.join("snapshots").exists(), "half a file has a name");
    }
    let path = run(folder.path(), &server, &["pull", "o/large"]).ok().stdout;
    assert!(std::fs::read(Path::new(path.trim_end()).join("decode.bin")).unwrap() == bytes);
    let sent = server.sent();
    // What a killed process had not read yet counts as sent.
    assert!(sent <= size + 5 * UNREAD, "{sent} bytes sent, {size} wanted");
}

#[test]
fn two_processes_that_pull_the_same_fetch_it_once() {
    let (repo, bytes) = large();
    let size = repo.bytes();
    let (server, folder) = (Server::start([repo]), folder());
    // Slow enough that the second begins while the first fetches.
    server.fault("decode.bin", Fault::Slow(1 << 14, Duration::from_micros(300)), 1);
    let mut first = qhx(folder.path(), &server, &["pull", "o/large"]).start();
    while server.sent() < size / 10 {
        assert!(first.try_wait().unwrap().is_none(), "it ended");
        std::thread::sleep(Duration::from_millis(1));
    }
    let second = run(folder.path(), &server, &["pull", "o/large"]).ok();
    assert!(first.wait().unwrap().success());
    assert!(
        std::fs::read(Path::new(second.stdout.trim_end()).join("decode.bin")).unwrap() == bytes
    );
    let sent = server.sent();
    assert!(sent * 100 <= size * 102, "{sent} bytes sent, {size} wanted");
}

#[cfg(unix)]
#[test]
fn a_full_disk_keeps_what_is_there() {
    let (repo, _) = large();
    let size = repo.bytes();
    let (server, folder) = (Server::start([repo]), folder());
    // Writing beyond a limit is an error where the signal for it is ignored.
    let line = "trap '' XFSZ; ulimit -f 20000; exec qhx pull o/large --json";
    let full = Program::shell(folder.path(), line).env("HF_ENDPOINT", server.endpoint()).run();
    assert_eq!(full.code, 11, "{full:?}");
    let hint = full.json()["error"]["hint"].as_str().unwrap().to_owned();
    assert!(hint.starts_with("make room, or set HF_HOME"), "{hint}");
    let before = server.sent();
    let pulled = run(folder.path(), &server, &["pull", "o/large", "--json"]).ok().json();
    assert!(
        pulled["fetched_bytes"].as_u64().unwrap() < size - (9 << 20),
        "{pulled} after {before}"
    );
}
