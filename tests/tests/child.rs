//! Tasks in processes of their own: whatever the child does, the parent gets one clear answer in time.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use qhx_base::CancelToken;
use qhx_base::ErrorKind;
use qhx_base::child::{ChildFailure, ChildProgram, Limits};

const LIMITS: Limits =
    Limits { memory: Some(256 << 20), time: Duration::from_secs(20), output: 64 << 20 };

fn helper() -> ChildProgram {
    ChildProgram { program: env!("CARGO_BIN_EXE_helper").into(), arguments: Vec::new() }
}

fn fail(task: &str, input: &[u8], limits: Limits) -> ChildFailure {
    helper().ask(task, input.to_vec(), limits).expect_err(task)
}

#[test]
fn an_answer_comes_back_however_long_it_is() {
    for len in [0, 1, 100, 5 << 20] {
        let input: Vec<u8> = (0..len).map(|i: u32| i as u8).collect();
        let expected: Vec<u8> = input.iter().rev().copied().collect();
        let answer = helper().ask("reverse", input, LIMITS).expect("an answer");
        assert!(answer == expected, "{len} bytes differ");
    }
}

#[test]
fn what_a_task_prints_is_no_part_of_its_answer() {
    assert_eq!(helper().ask("chatter", Vec::new(), LIMITS).expect("an answer"), b"the answer");
}

#[test]
fn an_error_of_the_task_keeps_kind_message_and_hint() {
    let error = fail("refuse", b"", LIMITS).into_error(ErrorKind::Internal, "unused");
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert_eq!(error.report().to_string(), "x.bin: empty\n  hint: copy it again");
    for (task, expected) in [("panic", "task panicked"), ("unheard-of", "no task \"unheard-of\"")] {
        let error = fail(task, b"", LIMITS).into_error(ErrorKind::Artifact, "unused");
        qhx_tests::says(&error, ErrorKind::Internal, &[expected]);
    }
}

#[test]
fn a_crash_is_told_with_its_signal_or_exit_code() {
    let error = fail("exit", b"", LIMITS).into_error(ErrorKind::Context, "model.bin");
    assert_eq!(error.kind(), ErrorKind::Context);
    assert_eq!(error.message(), "model.bin: the process that tried it ended with exit code 3");
    #[cfg(unix)]
    assert!(fail("abort", b"", LIMITS).to_string().ends_with("signal 6"));
    // It dies before it has read an input that no pipe holds.
    let failure = fail("exit", &vec![0; 8 << 20], LIMITS);
    assert!(matches!(failure, ChildFailure::Crashed(_)), "{failure}");
}

#[cfg(unix)]
#[test]
fn memory_is_limited() {
    let failure = fail("hoard", b"", LIMITS);
    assert!(matches!(failure, ChildFailure::OutOfMemory(_)), "{failure:?}");
    assert_eq!(failure.to_string(), "it needs more than 256 MiB of memory");
}

#[test]
fn a_helper_does_its_task_for_one_input_after_the_other() {
    let mut helper = helper().start("reverse", LIMITS).expect("it starts");
    for input in ["abc", "", "x y"] {
        let expected: Vec<u8> = input.bytes().rev().collect();
        assert_eq!(helper.ask(input.into(), &CancelToken::new()).expect("an answer"), expected);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_replaced_program_is_its_own_helper() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("helper");
    // By another process: a file that this one writes stays open in what other tests start meanwhile (ETXTBSY).
    let copied = std::process::Command::new("cp").arg(helper().program).arg(&program).status();
    assert!(copied.expect("cp starts").success());
    let copy = ChildProgram { program, arguments: Vec::new() };
    assert_eq!(copy.ask("replaced", Vec::new(), LIMITS).expect("an answer"), b"cba");
}

/// A helper that says this first.
#[cfg(unix)]
fn says(line: &str) -> ChildProgram {
    let arguments = ["-c".into(), format!("printf '{line}'; cat > /dev/null").into()].to_vec();
    ChildProgram { program: "/bin/sh".into(), arguments }
}

#[cfg(unix)]
#[test]
fn a_helper_of_another_version_is_refused_by_name() {
    for (line, found) in [("qhxH\\0030.0", "qhx 0.0"), ("qhxA0123456789", "another program")] {
        let failure = says(line).ask("reverse", Vec::new(), LIMITS).expect_err(line);
        assert!(matches!(failure, ChildFailure::Foreign { .. }), "{line}: {failure:?}");
        let error = failure.into_error(ErrorKind::Prompt, "chat template");
        qhx_tests::says(&error, ErrorKind::Internal, &[found]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn all_renderings_of_a_template_take_one_process() {
    use qhx_text::{Message, RenderOptions};

    let folder = tempfile::tempdir().expect("a folder");
    let (started, bundle) = (folder.path().join("started"), folder.path().join("bundle"));
    std::fs::create_dir(&bundle).expect("a folder");
    let line = format!(
        "echo $$ >> '{}'; exec '{}' \"$@\"",
        started.display(),
        env!("CARGO_BIN_EXE_helper")
    );
    let arguments = ["-c".into(), line.into(), "sh".into()].to_vec();
    ChildProgram { program: "/bin/sh".into(), arguments }.install();
    let template = "{{ messages[0].content }}{{ add_generation_prompt }}";
    std::fs::write(bundle.join("chat_template.jinja"), template).expect("a template");
    std::fs::write(bundle.join("tokenizer.json"), "{}").expect("a tokenizer");
    let manifest = serde_json::json!({
        "schema_version": 1,
        "artifacts": {"contexts": {"d": {"bin": "d.bin"}}, "tokenizer": "tokenizer.json"},
    });
    let manifest = qhx_core::Manifest::from_value(&bundle.join("m.json"), manifest, None);
    let manifest = manifest.expect("a manifest");
    let template = manifest.chat_template(&manifest.open_artifacts(), None);
    let template = template.expect("it compiles").expect("there is one");
    let render = |content: &str| {
        let text = template.render(&[Message::new("user", content)], &RenderOptions::default());
        assert_eq!(text.expect(content), format!("{content}True"));
    };
    let pids = || std::fs::read_to_string(&started).expect("it was started");
    ["a", "b", "c"].into_iter().for_each(render);
    assert_eq!(pids().lines().count(), 1, "{}", pids());
    // One that the system ended is started again.
    let killed = std::process::Command::new("kill").args(["-9", pids().trim()]).status();
    assert!(killed.expect("kill runs").success());
    ["d", "e"].into_iter().for_each(render);
    assert_eq!(pids().lines().count(), 2, "{}", pids());
}

#[test]
fn an_answer_that_is_too_long_is_refused() {
    let failure = fail("reverse", &[7; 101], Limits { output: 100, ..LIMITS });
    assert!(matches!(failure, ChildFailure::TooMuchOutput(100)), "{failure:?}");
}

#[cfg(target_os = "linux")]
fn is_running(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

/// Waits until the hanging task has written its process id.
#[cfg(target_os = "linux")]
fn pid_in(file: &std::path::Path) -> String {
    for _ in 0..2000 {
        match std::fs::read_to_string(file) {
            Ok(pid) if !pid.is_empty() => return pid,
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    std::fs::read_to_string(file).expect("the helper started")
}

#[cfg(target_os = "linux")]
fn ends_soon(pid: &str) -> bool {
    (0..2000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        !is_running(pid)
    })
}

#[cfg(target_os = "linux")]
#[test]
fn a_task_that_never_ends_is_ended() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("pid");
    let start = std::time::Instant::now();
    let limits = Limits { time: Duration::from_secs(3), ..LIMITS };
    let failure = fail("hang", file.to_str().expect("a path").as_bytes(), limits);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    assert_eq!(failure.to_string(), "it had not ended after 3 s");
    assert!(ends_soon(&pid_in(&file)), "the helper outlives the question");
}

#[cfg(target_os = "linux")]
#[test]
fn cancelling_ends_the_child() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("pid");
    let (cancel, input) = (CancelToken::new(), file.to_str().expect("a path").as_bytes().to_vec());
    let stopper = cancel.clone();
    let started = file.clone();
    let thread = std::thread::spawn(move || {
        pid_in(&started);
        stopper.cancel();
    });
    let limits = Limits { time: Duration::from_secs(600), ..LIMITS };
    let failure = helper().ask_until("hang", input, limits, &cancel).expect_err("cancelled");
    thread.join().expect("the child was started");
    assert_eq!(failure.into_error(ErrorKind::Prompt, "it").kind(), ErrorKind::Cancelled);
    assert!(ends_soon(&pid_in(&file)), "the child outlives the cancel");
}

#[cfg(target_os = "linux")]
#[test]
fn a_child_ends_with_its_parent() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("pid");
    let mut parent = std::process::Command::new(env!("CARGO_BIN_EXE_helper"))
        .args(["orphan", "0"])
        .env("QHX_TEST_ORPHAN", &file)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("the helper starts");
    std::io::Write::write_all(parent.stdin.as_mut().expect("a pipe"), &[0; 8]).expect("an input");
    let pid = pid_in(&file);
    assert!(is_running(&pid));
    parent.kill().expect("the parent ends");
    parent.wait().expect("the parent ended");
    assert!(ends_soon(&pid), "the child outlives its parent");
}

#[test]
fn a_program_that_is_no_helper_is_told() {
    let absent = ChildProgram { program: PathBuf::from("/no/such/program"), arguments: Vec::new() };
    let failure = absent.ask("reverse", Vec::new(), LIMITS).expect_err("there is none");
    assert!(failure.to_string().starts_with("/no/such/program: cannot be started"), "{failure}");
    let arguments = ["one", "argument", "too many"].map(OsString::from).to_vec();
    let other = ChildProgram { arguments, ..helper() };
    let failure = other.ask("reverse", vec![0; 1 << 20], LIMITS).expect_err("it is no helper");
    assert!(matches!(failure, ChildFailure::Start { .. }), "{failure:?}");
}
