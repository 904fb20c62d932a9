//! The seeds, and that the runner finds what it is there to find.

use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use qhx_fuzz::run::{self, Options};
use qhx_fuzz::{FAULTY, TARGETS};

fn options(folder: &tempfile::TempDir) -> Options {
    Options {
        time: Duration::from_secs(20),
        patience: Duration::from_secs(3),
        seed: 1,
        seeds: folder.path().join("seeds"),
        found: folder.path().join("found"),
    }
}

fn program() -> PathBuf {
    qhx_paths::program("qhx-fuzz")
}

/// For `QHX_FUZZ_SECONDS` a target, which `cargo xtask test` sets, or one second.
#[test]
fn every_target_answers_damaged_files() {
    let seconds = std::env::var("QHX_FUZZ_SECONDS").map_or(1, |text| text.parse().unwrap());
    let [seeds, found] = run::folders();
    let (time, patience) = (Duration::from_secs(seconds), Duration::from_secs(30));
    let options = Options { time, patience, seed: 1, seeds, found };
    let faults = Mutex::new(Vec::new());
    run::run_all(&program(), &TARGETS.map(|target| target.name), &options, |target, result| {
        let report = run::describe(target, result);
        eprintln!("{report}");
        if result.is_err() {
            faults.lock().unwrap().push(report);
        }
    });
    let faults = faults.into_inner().unwrap();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Seeds must be valid before they are damaged, otherwise only the first check of a reader is tested.
#[test]
fn every_target_accepts_its_seeds() {
    for target in TARGETS {
        let folder = qhx_paths::workspace().join("tests/fuzz/seeds").join(target.name);
        let seeds = run::seeds(&folder).unwrap();
        for (index, seed) in seeds.iter().enumerate() {
            let answer = (target.read)(seed);
            assert!(answer.is_ok(), "{}, file {index}: {}", target.name, answer.unwrap_err());
        }
    }
}

#[test]
fn a_panic_an_abort_and_a_hang_name_their_file() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(&folder);
    for target in FAULTY {
        let seeds = options.seeds.join(target.name);
        fs::create_dir_all(&seeds).unwrap();
        fs::write(seeds.join("a"), " !!!!!!!!").unwrap();
        let fault = run::run(&program(), target.name, &options).unwrap_err();
        let file = fs::read(&fault.file).unwrap();
        assert_eq!(file.first(), Some(&b'!'), "{}: {fault:?}", target.name);
        let says = match target.name {
            "faulty_panic" => fault.said.contains("a planted fault"),
            "faulty_hang" => fault.end.contains("no answer within 3 s"),
            "faulty_recursion" => fault.said.contains("overflowed its stack"),
            _ => fault.said.contains("memory allocation"),
        };
        assert!(says, "{}: {fault:?}", target.name);
    }
}

#[test]
fn a_target_that_answers_every_file_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { time: Duration::from_millis(300), ..options(&folder) };
    let seeds = options.seeds.join("rows");
    fs::create_dir_all(&seeds).unwrap();
    fs::write(seeds.join("a"), "\"a text\"\n{\"text\": \"b\", \"role\": \"query\"}\n").unwrap();
    let counts = run::run(&program(), "rows", &options).unwrap();
    assert!(counts.accepted >= 1 && counts.files > counts.accepted && counts.answers > 2);
    assert_eq!(fs::read_dir(&options.found).unwrap().count(), 0, "nothing is left");
}
