//! `qhx prepare` where it is interrupted, refused or out of date.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use qhx_core::Manifest;
use qhx_tests::plugin_files::copy_folder;
use qhx_tiers::tier;

use crate::run::{Program, Run, contents, folder};

/// Longest wait for something that takes seconds.
const PATIENCE: Duration = Duration::from_secs(120);

/// A folder with a portable bundle of small contexts, `portable`.
struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let bench = Self { folder: folder() };
        let forge = bench.qhx(&["forge"]).args([qhx_paths::fixture("qwen2-tiny")]);
        let shape = ["--max-ctx", "32", "--prefill", "8", "--shards", "2"];
        forge.args(["--out", "portable", "--portable"]).args(shape).run().ok();
        bench
    }

    fn qhx(&self, arguments: &[&str]) -> Program {
        Program::npu(self.folder.path()).args(arguments)
    }

    fn prepare(&self, bundle: &str, more: &[&str]) -> Program {
        self.qhx(&["prepare", bundle, "--target", "v81"]).args(more)
    }

    fn generate(&self, more: &[&str]) -> Run {
        let words = ["generate", "portable", "1,2,3", "--max-new", "2", "--ids"];
        self.qhx(&words).args(more).run()
    }

    /// Folder of the bundles that are prepared of `bundle`.
    fn prepared(&self, bundle: &str) -> PathBuf {
        self.folder.path().join(bundle).join("prepared")
    }

    /// Waits until it is so.
    fn wait(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let since = Instant::now();
        while !is_so() {
            assert!(since.elapsed() < PATIENCE, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Names in a folder, hidden ones left out; none where it is not there.
fn visible(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    names.filter_map(|name| name.into_string().ok()).filter(|name| !name.starts_with('.')).collect()
}

/// Moment at which a preparation is killed.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// It reports this stage of its work, or the next one: a part of the line.
    Says(&'static str),
    /// This file is there.
    Wrote(&'static str),
}

/// Each attempt goes on from where the one before it was killed.
const PLACES: [Place; 7] = [
    Place::Says("verify the bundle"),
    Place::Says("compile decode_p0"),
    Place::Wrote("decode_p0.bin"),
    Place::Says("compile decode_p1"),
    Place::Wrote("decode_p1.bin"),
    Place::Says("compile lmhead"),
    Place::Wrote("lmhead.bin"),
];

/// Moments of the usual run.
const FEW: [usize; 3] = [2, 3, 6];

/// Kills the process when it is there.
fn kill_at(place: Place, mut child: Child, bench: &Bench) {
    let stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    match place {
        Place::Says(text) => {
            let mut lines = stderr.lines().map_while(Result::ok);
            assert!(lines.any(|line| line.contains(text)), "{place:?} was not reached");
        }
        Place::Wrote(name) => {
            let is_it = |path: &PathBuf| path.ends_with(name);
            let there = || contents(&bench.prepared("portable")).keys().any(is_it);
            bench.wait(&format!("{place:?} was not reached"), there);
        }
    }
    child.kill().expect("killed");
    child.wait().expect("it ends");
}

/// SIGKILL leaves nothing that would be opened, and the same command makes what it would have made at once.
#[tier(qnn)]
fn a_killed_prepare_goes_on_to_the_same_bytes() {
    let bench = Bench::new();
    copy_folder(&bench.folder.path().join("portable"), &bench.folder.path().join("whole"));
    bench.prepare("whole", &[]).run().ok();
    let full = qhx_tests::tiny::full_matrix();
    for (index, place) in PLACES.into_iter().enumerate() {
        if !full && !FEW.contains(&index) {
            continue;
        }
        kill_at(place, bench.prepare("portable", &[]).start(), &bench);
        let left = visible(&bench.prepared("portable"));
        assert_eq!(left, [""; 0], "{place:?}: nothing to open");
    }
    // Of two at once the second is refused, and the first goes on.
    let mut first = bench.prepare("portable", &[]).start();
    let mut lines = BufReader::new(first.stderr.take().expect("a pipe")).lines();
    qhx_tests::has(&lines.next().expect("a line").expect("text"), &["verify"]);
    let begun = lines.by_ref().map_while(Result::ok).find(|line| line.contains("lmhead"));
    let second = bench.prepare("portable", &[]).run();
    if first.try_wait().expect("a child").is_none() {
        second.says(&["being made by another process"]);
    }
    assert!(begun.is_some());
    let rest: Vec<_> = lines.map_while(Result::ok).collect();
    assert!(first.wait().expect("it ends").success(), "{rest:?}");
    let last = bench.prepare("portable", &["--json"]).run().ok();
    last.says(&["prepared already"]);
    assert_eq!(last.json()["unused"], serde_json::json!([]), "nothing is left of the attempts");

    let (whole, resumed) = (bench.prepared("whole"), bench.prepared("portable"));
    assert_eq!(visible(&whole), visible(&resumed));
    let (whole, resumed) = (contents(&whole), contents(&resumed));
    assert_eq!(whole.keys().collect::<Vec<_>>(), resumed.keys().collect::<Vec<_>>());
    for (name, bytes) in whole {
        assert!(bytes == resumed[&name], "{} has other bytes", name.display());
    }
}

/// A preparation by libraries of another version is named and not taken; `--prune` removes it and unfinished ones.
#[tier(qnn)]
fn prepared_by_older_libraries_is_not_used() {
    let bench = Bench::new();
    bench.prepare("portable", &[]).run().ok();
    let current = bench.prepared("portable").join(&visible(&bench.prepared("portable"))[0]);
    let old = bench.prepared("portable").join("v81-0123456789abcdef");
    std::fs::rename(&current, &old).expect("renamed");
    let manifest = Manifest::load(&old).expect("a manifest").path;
    qhx_tests::files::edit(&manifest, |m| m["prepared"]["build_id"] = "v2.1.0".into());
    // An attempt with the same libraries that was killed long ago.
    let unfinished =
        bench.prepared("portable").join(".qhx-forge-v79-0123456789abcdef-v79-0123456789ab");
    std::fs::create_dir(&unfinished).expect("a folder");
    std::fs::write(unfinished.join("lock"), "").expect("a lock");

    let cpu = bench.generate(&[]).ok();
    cpu.says(&["backend: cpu (nothing is prepared", "made by libraries of v2.1.0, these are"]);
    bench.generate(&["--backend", "qnn"]).says(&["made by libraries of v2.1.0"]);

    let again = bench.prepare("portable", &["--json"]).run().ok();
    let listed = again.json()["unused"].as_array().expect("a list").clone();
    assert_eq!(listed.len(), 2, "{again:?}");
    assert!(listed.iter().all(|one| one["removed"] == false), "{listed:?}");
    assert!(old.is_dir() && unfinished.is_dir());
    again.says(&["--prune removes it"]);
    let pruned = bench.prepare("portable", &["--prune"]).run().ok();
    pruned.says(&["prepared already"]);
    assert!(!old.exists() && !unfinished.exists(), "{}", pruned.stderr);
    let npu = bench.generate(&[]).ok();
    npu.says(&["backend: qnn"]);
    assert_eq!(npu.stdout, cpu.stdout);
}

/// Neither folder can be written; a file system takes no more: both are named, and nothing half-made is opened.
#[cfg(unix)]
#[tier(qnn)]
fn prepare_without_room_says_so() {
    let bench = Bench::new();
    let cache = bench.folder.path().join("cache");
    std::fs::write(bench.prepared("portable"), "").expect("written");
    std::fs::write(&cache, "").expect("written");
    let nowhere = bench.prepare("portable", &[]).run();
    assert_eq!(nowhere.code, 11, "{nowhere:?}");
    nowhere.says(&[
        "there is no folder for the prepared bundle: ",
        "portable/prepared: ",
        "/cache",
    ]);
    nowhere.says(&["hint: make the bundle's folder writable"]);
    std::fs::remove_file(bench.prepared("portable")).expect("removed");

    // Files end at 32 KB, as on a disk that is full: the signal that would end the process is ignored.
    let line = "trap '' XFSZ; ulimit -f 64; exec qhx prepare portable --target v81";
    let full = Program::shell(bench.folder.path(), line).with_libraries().run();
    assert_ne!(full.code, 0, "{full:?}");
    let errors: Vec<_> = full.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(errors.len() == 1 && errors[0].contains("File too large"), "{full:?}");
    assert_eq!(visible(&bench.prepared("portable")), [""; 0]);
    bench.prepare("portable", &[]).run().ok();
    assert!(bench.generate(&[]).ok().stderr.contains("backend: qnn"));
}

/// The CPU answers, another process prepares, and then the NPU answers the same.
#[tier(qnn)]
fn the_cpu_answers_while_another_process_prepares() {
    let bench = Bench::new();
    let plain = bench.generate(&[]).ok();
    plain.says(&["`qhx prepare portable --target v81`"]);
    assert_eq!(visible(&bench.prepared("portable")), [""; 0], "nothing is started unasked");
    let meanwhile = bench.generate(&["--while-preparing", "cpu"]).ok();
    let said: Vec<_> = meanwhile.stderr.lines().filter(|l| l.contains("prepares it")).collect();
    assert_eq!(said.len(), 1, "once: {}", meanwhile.stderr);
    assert!(said[0].starts_with("backend: cpu (nothing is prepared"), "{}", said[0]);
    assert!(said[0].contains("prepare.log"), "{}", said[0]);
    assert_eq!(meanwhile.stdout, plain.stdout);
    let is_there = || visible(&bench.prepared("portable")).iter().any(|n| n.starts_with("v81-"));
    bench.wait("it was not prepared", is_there);
    let after = bench.generate(&["--while-preparing", "cpu"]).ok();
    after.says(&["backend: qnn"]);
    assert_eq!(after.stdout, plain.stdout);
    let log = std::fs::read_to_string(bench.prepared("portable").join("prepare.log"));
    assert!(log.expect("the log").contains("compile lmhead for v81"));
}
