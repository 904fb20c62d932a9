//! Streams that nobody reads or that are full.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;

use crate::run::{
    Program, Run, bundle, checkpoint, fixture, folder,
};

/// A pipe whose reader has left.
fn broken_pipe() -> Stdio {
    let (_, writer) = std::io::pipe().expect("a pipe");
    writer.into()
}

/// A device on which there is no space.
fn full() -> Stdio {
    File::options().write(true).open("/dev/full").expect("the device is there").into()
}

/// Runs a command as always, with a standard error that is full, and with one that nobody reads.
fn same_without_listener(make: impl Fn(&Path) -> Program) -> Run {
    let run = |stderr: Stdio| {
        let folder = folder();
        let run = make(folder.path()).run_with(Stdio::piped(), stderr);
        let stdout = run.stdout.replace(&*folder.path().to_string_lossy(), "[folder]");
        Run { stdout, ..run }
    };
    let usual = run(Stdio::piped());
    for (name, stderr) in [("full", full()), ("left", broken_pipe())] {
        let found = run(stderr);
        assert_eq!((found.code, &found.stdout), (usual.code, &usual.stdout), "{name}: {usual:?}");
    }
    usual
}

#[test]
fn commands_do_their_work_when_nobody_takes_what_they_say() {
    let generate = same_without_listener(|folder| {
        let args = ["The capital of France is", "-n", "4", "-vvv"];
        Program::qhx(folder).args(["generate"]).args([bundle()]).args(args)
    })
    .ok();
    assert!(generate.stdout.starts_with(" Paris"), "{generate:?}");
    let chat = same_without_listener(|folder| {
        let args = ["chat", "--max-new", "4"];
        let lines = "Hello!\n/help\n/reset\n/bogus\n/system Be brief.\nAnd again.\n";
        Program::qhx(folder).args(args).args([bundle()]).stdin(lines)
    })
    .ok();
    assert_eq!(chat.stdout.lines().count(), 2, "{chat:?}");
    let forge = same_without_listener(|folder| {
        let args = ["--out", "out", "--max-ctx", "64", "--cpu-only"];
        Program::qhx(folder).args([Path::new("forge"), &checkpoint()]).args(args)
    })
    .ok();
    assert!(forge.stdout.ends_with(".json\n"), "{forge:?}");
    let verify =
        same_without_listener(|folder| Program::qhx(folder).args(["verify"]).args([bundle()])).ok();
    assert!(verify.stdout.starts_with("ok "), "{verify:?}");
    let inspect =
        same_without_listener(|folder| Program::qhx(folder).args(["inspect"]).args([bundle()]));
    assert!(inspect.stdout.starts_with("model "), "{inspect:?}");
    same_without_listener(|folder| Program::qhx(folder).args(["plugins", "list"])).ok();
    let demo =
        same_without_listener(|folder| Program::qhx(folder).args(["demo", "--backend", "cpu"]))
            .ok();
    assert!(demo.stdout.starts_with("The capital of France is Paris"), "{demo:?}");
}

#[test]
fn texts_are_embedded_when_nobody_takes_what_is_said() {
    let run = same_without_listener(|folder| {
        let toy = fixture("embed-mistral-toy");
        Program::qhx(folder)
            .args([Path::new("forge"), &toy])
            .args(["--task", "embed", "--max-ctx", "40", "--cpu-only", "--out", "encoder"])
            .run()
            .ok();
        Program::qhx(folder).args(["embed", "encoder", "a", "b", "--json", "-vvv"])
    })
    .ok();
    assert_eq!(run.stdout.lines().count(), 2, "{run:?}");
}

#[test]
fn failures_keep_their_codes_when_nobody_takes_what_is_said() {
    for (args, code) in [
        (&["generate", "nowhere", "a", "--json"][..], 3),
        (&["generate", "--bogus", "--json"], 2),
        (&["generate", "nowhere", "a", "--log", "=="], 2),
        (&["forge", "nowhere", "--out", "x", "--cpu-only", "--json"], 4),
    ] {
        let run = same_without_listener(|folder| Program::qhx(folder).args(args));
        assert_eq!(run.code, code, "{args:?}: {run:?}");
    }
    let doctor = same_without_listener(|folder| Program::qhx(folder).args(["doctor"]));
    assert!(doctor.stdout.starts_with("qhx "), "{doctor:?}");
}

#[test]
fn a_reader_of_results_that_left_ends_the_command_quietly() {
    let folder = folder();
    for args in [&["completions", "bash"][..], &["doctor"], &["--help"], &["forge", "--help"]] {
        let run = Program::qhx(folder.path()).args(args).run_with(broken_pipe(), Stdio::piped());
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{args:?}");
    }
    let generate = || {
        Program::qhx(folder.path()).args(["generate"]).args([bundle()]).args(["Once", "-n", "4"])
    };
    let run = generate().run_with(broken_pipe(), Stdio::piped());
    assert_eq!(run.code, 0, "{run:?}");
    assert!(!run.stderr.contains("error"), "{run:?}");
    // A disk that is full is another matter: the results are lost.
    let run = generate().run_with(full(), Stdio::piped());
    assert_eq!(run.code, 11, "{run:?}");
    assert!(run.stderr.contains("error: standard output: "), "{run:?}");
}

#[test]
fn closed_streams_are_no_failure() {
    let folder = folder();
    let program = env!("CARGO_BIN_EXE_qhx");
    for (redirect, stdout) in [("2>&-", true), (">&- 2>&-", false), ("<&- >&- 2>&-", false)] {
        let script = format!("\"$0\" generate \"$1\" Once -n 4 -vvv {redirect}");
        let output = std::process::Command::new("sh")
            .args(["-c", &script, program])
            .arg(bundle())
            .current_dir(folder.path())
            .output()
            .expect("a shell");
        assert_eq!(output.status.code(), Some(0), "{redirect}");
        assert_eq!(output.stdout.is_empty(), !stdout, "{redirect}");
    }
}
