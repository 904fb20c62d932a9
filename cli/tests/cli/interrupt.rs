//! Ctrl-C keeps what there is.

use std::io::Read as _;
use std::process::Command;

use crate::run::{Program, checkpoint, copy, folder};

fn interrupt(id: u32) {
    let status = Command::new("kill").args(["-INT", &id.to_string()]).status();
    assert!(status.expect("kill runs").success());
}

#[test]
fn the_first_ctrl_c_ends_the_answer_and_keeps_it() {
    let folder = folder();
    let copied = folder.path().join("checkpoint");
    copy(&checkpoint(), &copied);
    let config = std::fs::read_to_string(copied.join("config.json")).expect("the config");
    let longer =
        config.replace("\"max_position_embeddings\": 256", "\"max_position_embeddings\": 60000");
    assert_ne!(config, longer);
    std::fs::write(copied.join("config.json"), longer).expect("the config");
    Program::qhx(folder.path())
        .args(["forge"])
        .args([&copied])
        .args(["--out", "long", "--max-ctx", "60000", "--cpu-only"])
        .run()
        .ok();
    let mut child = Program::qhx(folder.path())
        .args(["generate", "long", "The capital of France is", "--max-new", "50000"])
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
