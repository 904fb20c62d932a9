//! Ctrl-C keeps what there is.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use qhx_tests::plugin_files::copy_folder;
use wait_timeout::ChildExt as _;

use crate::run::{Program, bundle, checkpoint, copy_of_bundle, edit_manifest, folder, signal};

/// A step that the NPU does not come back from: the first Ctrl-C asks and says what is up, the second ends the program,
/// although the library waits for the NPU while the program exits. While the bundle is opened, the first one does.
#[cfg(target_os = "linux")]
pub fn of_an_npu_that_hangs(qhx: impl Fn() -> Program, fake: &Path, folder: &Path) {
    let report = folder.join("report.json");
    for (call, times) in [("graphExecute", 2), ("contextCreateFromBinary", 1)] {
        let plan = serde_json::json!({"rules": [{"call": call, "nth": times, "then": "hang"}]});
        std::fs::write(folder.join("plan.json"), plan.to_string()).expect("written");
        let _ = std::fs::remove_file(&report);
        let mut child = qhx()
            .args(["generate", "tiny", "The capital of France is", "--max-new", "4"])
            .env("QHX_QNN_HTP", fake)
            .env("QHX_FAKE_PLAN", folder.join("plan.json"))
            .env("QHX_FAKE_REPORT", &report)
            .start();
        let since = std::time::Instant::now();
        while !report.is_file() && since.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(report.is_file(), "{call} was not reached");
        for _ in 1..times {
            interrupt(child.id());
            let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
            let message =
                lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("Ctrl-C again")));
            assert!(message.is_some(), "{call}: no message");
            assert!(child.try_wait().expect("a child").is_none(), "{call}: it ended by itself");
        }
        interrupt(child.id());
        assert_eq!(code(child), Some(130), "{call}");
    }
}

fn interrupt(id: u32) {
    signal("-INT", id);
}

/// The exit code, within ten seconds.
pub fn code(mut child: Child) -> Option<i32> {
    if let Some(status) = child.wait_timeout(Duration::from_secs(10)).expect("a child") {
        return status.code();
    }
    child.kill().expect("killed");
    child.wait().expect("it ends");
    None
}

#[test]
fn the_first_signal_ends_a_check_of_files() {
    let folder = folder();
    let bundle = copy_of_bundle(folder.path());
    // A file that takes minutes to hash, and takes no space.
    let large = std::fs::File::create(bundle.join("large.bin")).expect("created");
    large.set_len(1 << 38).expect("a sparse file");
    edit_manifest(&bundle, |m| {
        m["artifacts"]["files"]["a.bin"] = serde_json::json!({"sha256": "0".repeat(64)});
        m["artifacts"]["files"]["large.bin"] = serde_json::json!({"sha256": "0".repeat(64)});
    });
    std::fs::write(bundle.join("a.bin"), "a").expect("written");
    for name in ["-TERM", "-INT"] {
        let mut child = qhx!(folder, "verify", bundle).start();
        let mut stdout = child.stdout.take().expect("a pipe");
        stdout.read_exact(&mut [0; 4]).expect("the first file is checked");
        signal(name, child.id());
        assert_eq!(code(child), Some(130), "{name}");
    }
}

#[test]
fn the_first_signal_ends_a_suite() {
    let folder = folder();
    let case = r#"{"prompt": "The capital of France is", "gold": [372, 281], "max_new": 150}"#;
    let cases = vec![case; 3000].join(", ");
    let suite = format!("{{\"schema\": \"npu_suite/v1\", \"cases\": [{cases}]}}");
    std::fs::write(folder.path().join("suite.json"), suite).expect("written");
    for name in ["-TERM", "-INT"] {
        let mut child = qhx!(folder, "verify", bundle(), "suite.json").start();
        let mut stdout = child.stdout.take().expect("a pipe");
        stdout.read_exact(&mut [0; 4]).expect("the first case is done");
        signal(name, child.id());
        assert_eq!(code(child), Some(130), "{name}");
    }
}

#[test]
fn the_first_ctrl_c_ends_the_answer_and_keeps_it() {
    let folder = folder();
    let copied = folder.path().join("checkpoint");
    copy_folder(&checkpoint(), &copied);
    let config = std::fs::read_to_string(copied.join("config.json")).expect("the config");
    let longer =
        config.replace("\"max_position_embeddings\": 256", "\"max_position_embeddings\": 60000");
    assert_ne!(config, longer);
    std::fs::write(copied.join("config.json"), longer).expect("the config");
    qhx!(folder, "forge", copied, "--out", "long", "--max-ctx", "60000", "--cpu-only").run().ok();
    let mut child =
        qhx!(folder, "generate", "long", "The capital of France is", "--max-new", "50000")
            .args(["--ignore-eos"])
            .start();
    let mut stdout = child.stdout.take().expect("a pipe");
    let mut text = vec![0; 6];
    stdout.read_exact(&mut text).expect("the answer begins");
    interrupt(child.id());
    stdout.read_to_end(&mut text).expect("the answer ends");
    let output = child.wait_with_output().expect("the program ends");
    let text = String::from_utf8(text).expect("text is UTF-8");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(text.starts_with(" Paris") && text.ends_with('\n'), "{text:?}");
    assert!(stderr.contains("finish: cancelled"), "{stderr}");
}
