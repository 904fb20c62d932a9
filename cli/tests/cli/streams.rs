//! Streams that nobody reads or that are full, and files whose names and contents want to steer the terminal.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;

use crate::run::{Program, Run, bundle, checkpoint, copy_of_bundle, edit_manifest, folder, forge};

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
        qhx!(folder, "generate", bundle()).args(args)
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
        qhx!(folder, "forge", checkpoint()).args(args)
    })
    .ok();
    assert!(forge.stdout.ends_with(".json\n"), "{forge:?}");
    let verify = same_without_listener(|folder| qhx!(folder, "verify", bundle())).ok();
    assert!(verify.stdout.starts_with("ok "), "{verify:?}");
    let inspect = same_without_listener(|folder| qhx!(folder, "inspect", bundle()));
    assert!(inspect.stdout.starts_with("model "), "{inspect:?}");
    same_without_listener(|folder| qhx!(folder, "plugins", "list")).ok();
    let demo = same_without_listener(|folder| qhx!(folder, "demo", "--backend", "cpu")).ok();
    assert!(demo.stdout.starts_with("The capital of France is Paris"), "{demo:?}");
}

#[test]
fn texts_are_embedded_when_nobody_takes_what_is_said() {
    let run = same_without_listener(|folder| {
        let tiny = qhx_paths::fixture("embed-mistral-tiny");
        forge(folder, &tiny, "encoder", "--task embed --max-ctx 40 --cpu-only");
        qhx!(folder, "embed", "encoder", "a", "b", "--json", "-vvv")
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
    let doctor = same_without_listener(|folder| qhx!(folder, "doctor"));
    assert!(doctor.stdout.starts_with("qhx "), "{doctor:?}");
}

#[test]
fn a_reader_of_results_that_left_ends_the_command_quietly() {
    let folder = folder();
    for args in [&["completions", "bash"][..], &["doctor"], &["--help"], &["forge", "--help"]] {
        let run = Program::qhx(folder.path()).args(args).run_with(broken_pipe(), Stdio::piped());
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{args:?}");
    }
    let generate = || qhx!(folder, "generate", bundle(), "Once", "-n", "4");
    let run = generate().run_with(broken_pipe(), Stdio::piped());
    assert_eq!(run.code, 0, "{run:?}");
    assert!(!run.stderr.contains("error"), "{run:?}");
    // A disk that is full is another matter: the results are lost.
    generate().run_with(full(), Stdio::piped()).fails(11, &["error: standard output: "]);
}

#[test]
fn closed_streams_are_no_failure() {
    let folder = folder();
    let program = qhx_paths::program("qhx");
    for (redirect, stdout) in [("2>&-", true), (">&- 2>&-", false), ("<&- >&- 2>&-", false)] {
        let script = format!("\"$0\" generate \"$1\" Once -n 4 -vvv {redirect}");
        let output = std::process::Command::new("sh")
            .args(["-c", &script])
            .arg(&program)
            .arg(bundle())
            .current_dir(folder.path())
            .output()
            .expect("a shell");
        assert_eq!(output.status.code(), Some(0), "{redirect}");
        assert_eq!(output.stdout.is_empty(), !stdout, "{redirect}");
    }
}

/// Clears the screen, goes back to the first column and claims something else.
const HOSTILE: &str = "\u{1b}[2J\u{9b}2J\rx\nerror: all is lost\u{202e}\u{2028}";

fn is_harmless(run: &Run, what: &str) {
    for text in [&run.stderr, &run.stdout] {
        assert!(
            !text.contains(['\u{1b}', '\u{9b}', '\r', '\u{202e}', '\u{2028}']),
            "{what}: {run:?}"
        );
        assert!(!text.lines().any(|l| l.starts_with("error: all is lost")), "{what}: {run:?}");
    }
    assert!(run.stderr.len() < 10_000, "{what}: {} bytes", run.stderr.len());
}

#[test]
fn names_in_files_do_not_steer_the_terminal() {
    let folder = folder();
    let tiny = copy_of_bundle(folder.path());
    let run = |args: &[&str]| {
        Program::qhx(folder.path()).args(&args[..1]).args([&tiny]).args(&args[1..]).run()
    };
    let long = format!("{HOSTILE}{}", "y".repeat(1 << 20));
    for name in [HOSTILE, &long] {
        edit_manifest(&tiny, |m| m["plan"]["steps"][0]["host"] = name.into());
        let found = run(&["generate", "a", "--json"]);
        assert_ne!(found.code, 0);
        is_harmless(&found, "host-op");
        let message = found.json()["error"]["message"].as_str().expect("a message").to_owned();
        assert!(message.len() < 4_000, "{} bytes", message.len());
    }
    edit_manifest(&tiny, |m| m["plan"]["steps"][0]["host"] = "qwen3_5_generate".into());
    edit_manifest(&tiny, |m| m["model"]["name"] = HOSTILE.into());
    let inspect = run(&["inspect"]).ok();
    assert!(inspect.stdout.starts_with("model      \\u{1b}[2J"), "{inspect:?}");
    is_harmless(&inspect, "inspect");
    // A file's name, in a message and in a note.
    let odd = format!("{HOSTILE}.json");
    std::fs::write(folder.path().join(&odd), "{").expect("written");
    is_harmless(&qhx!(folder, "generate", odd, "a").run(), "file");
    is_harmless(&qhx!(folder, "generate", "x", HOSTILE, HOSTILE).run(), "usage");
    std::fs::create_dir(folder.path().join("plugins")).expect("made");
    std::fs::write(folder.path().join("plugins").join(format!("{HOSTILE}.so")), "x")
        .expect("written");
    let list = ["plugins", "list", "--plugin-dir", "plugins"];
    let list = Program::qhx(folder.path()).args(list).run();
    list.prints(&["\\u{1b}[2J"]);
    is_harmless(&list, "plugins");
}

#[test]
fn what_the_log_quotes_does_not_steer_the_terminal() {
    let folder = folder();
    let tiny = copy_of_bundle(folder.path());
    let odd = folder.path().join(HOSTILE);
    std::fs::rename(&tiny, &odd).expect("renamed");
    let run = qhx!(folder, "generate", odd, "a", "-n", "1", "-vvv");
    let run = run.run().ok();
    run.says(&["DEBUG"]);
    assert!(!run.stderr.contains(['\u{1b}', '\u{9b}', '\r', '\u{202e}']), "{}", run.stderr);
    assert!(!run.stderr.contains("\nerror: "), "{}", run.stderr);
}
