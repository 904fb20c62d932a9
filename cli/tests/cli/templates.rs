//! Chat templates of untrusted origin: whatever one does, there is one clear error that names it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::run::{Run, children, copy_of_bundle, folder, signal};

pub(crate) fn with_template(folder: &Path, template: &str) -> PathBuf {
    let bundle = copy_of_bundle(folder);
    std::fs::write(bundle.join("chat_template.jinja"), template).expect("a template");
    bundle
}

fn chat(folder: &Path, bundle: &Path, more: &[&str]) -> Run {
    let bundle = bundle.to_str().expect("a plain path");
    qhx!(folder, "generate", bundle, "Hi", "--chat", "-n", "1").args(more).run()
}

/// One error, with the code of what cannot be compiled (4) or rendered (9).
fn assert_refused(run: &Run, code: i32, what: &str) {
    assert_eq!(run.code, code, "{what}: {run:?}");
    assert_eq!(run.stdout, "", "{what}");
    let errors: Vec<_> = run.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{what}: {run:?}");
    assert!(errors[0].contains("chat_template.jinja: chat template: "), "{what}: {run:?}");
    assert!(run.stderr.len() < 4000, "{what}: {} bytes", run.stderr.len());
}

#[test]
fn a_template_that_nests_too_deep_does_not_abort() {
    for (what, template) in [
        ("not", format!("{{{{ {}1 }}}}", "not ".repeat(6000))),
        ("attributes", format!("{{{{ a{} }}}}", ".a".repeat(12_000))),
        ("filters", format!("{{{{ 1{} }}}}", "|string".repeat(4000))),
        ("brackets", format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000))),
    ] {
        let folder = folder();
        let bundle = with_template(folder.path(), &template);
        assert_refused(&chat(folder.path(), &bundle, &[]), 4, what);
        // Even where nobody chats, opening the bundle is an error and no abort.
        let inspect = qhx!(folder, "inspect", bundle).run();
        assert_eq!(inspect.code, 0, "{what}: {inspect:?}");
        let talk = qhx!(folder, "chat", bundle).stdin("Hi\n").run();
        assert_refused(&talk, 4, what);
    }
}

#[test]
fn a_template_that_grows_without_end_is_stopped() {
    let variables: String =
        (0..60).map(|i| format!("{{% set v{i} = messages[0].content * 8000000 %}}")).collect();
    for (what, template, reason) in [
        (
            "namespace",
            "{% set n = namespace() %}{% set n.a = n %}{{ n }}".to_owned(),
            "a namespace cannot be kept",
        ),
        (
            "nested",
            "{% set n = namespace(x=[]) %}{% for i in range(90000) %}{% set n.x = [n.x] %}{% endfor %}"
                .to_owned(),
            "nested deeper than",
        ),
        ("batch", "{{ [1]|batch(1000000000, 'x') }}".to_owned(), "1000000000 is more than"),
        (
            "doubled",
            format!("{{% set s = 'x' %}}{}", "{% set s = s + s %}".repeat(60)),
            "a text grows beyond",
        ),
        ("memory", variables, "it needs more than 512 MiB of memory"),
    ] {
        let folder = folder();
        let bundle = with_template(folder.path(), &template);
        let run = chat(folder.path(), &bundle, &[]);
        assert_refused(&run, 9, what);
        assert!(run.stderr.contains(reason), "{what}: {run:?}");
    }
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let folder = folder();
    // The engine counts what it does itself, not what a filter compares.
    let template = "{% set s = 'x' * 1000000 %}{% for i in range(99999) %}\
                    {% set t = [s, s]|unique|list|length %}{% endfor %}";
    let bundle = with_template(folder.path(), template);
    let start = Instant::now();
    let run = chat(folder.path(), &bundle, &[]);
    assert_refused(&run, 9, "endless");
    run.says(&["it had not ended after 10 s"]);
    assert!(start.elapsed() < Duration::from_secs(120), "{:?}", start.elapsed());
}

#[test]
fn what_a_template_says_cannot_write_to_the_terminal() {
    let folder = folder();
    let template = format!("{{{{ raise_exception('\\x1b[2Jerror: {}') }}}}", "long ".repeat(5000));
    let bundle = with_template(folder.path(), &template);
    let run = chat(folder.path(), &bundle, &[]);
    assert_refused(&run, 9, "escape");
    assert!(!run.stderr.contains('\u{1b}'), "{run:?}");
}

#[test]
fn template_arguments_reach_the_template() {
    let folder = folder();
    let template = "{{ raise_exception(effort ~ '|' ~ (number + 1) ~ '|' ~ list ~ '|' ~ text) }}";
    let bundle = with_template(folder.path(), template);
    let args = ["effort=high", "number=41", "list=[true]", "text=a=b c"];
    let args: Vec<_> = args.iter().flat_map(|arg| ["--template-arg", arg]).collect();
    let run = chat(folder.path(), &bundle, &args);
    assert_refused(&run, 9, "arguments");
    run.says(&["high|42|[True]|a=b c"]);
    let talk = qhx!(folder, "chat", bundle).args(&args);
    assert!(talk.stdin("Hi\n").run().stderr.contains("high|42|[True]|a=b c"));
    chat(folder.path(), &bundle, &["--template-arg", "no value"]).fails(2, &["expected KEY=VALUE"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_chat_goes_on_after_its_helper_was_killed() {
    let folder = folder();
    let bundle = copy_of_bundle(folder.path());
    let mut chat = qhx!(folder, "chat", "--max-new", "2", "--json", bundle).start_with_streams();
    let (mut input, output) =
        (chat.stdin.take().expect("a pipe"), chat.stdout.take().expect("a pipe"));
    let mut answers = BufReader::new(output).lines();
    let mut ask = || {
        input.write_all(b"What colour is the sky?\n").expect("the program reads");
        answers.next().and_then(Result::ok).unwrap_or_default()
    };
    qhx_tests::has(&ask(), &["\"tokens\""]);
    let helpers = children(chat.id());
    let [helper] = helpers.as_slice() else { panic!("one helper, not {helpers:?}") };
    signal("-KILL", *helper);
    qhx_tests::has(&ask(), &["\"tokens\""]);
    drop(input);
    assert!(chat.wait().expect("it ends").success());
}

#[cfg(target_os = "linux")]
#[test]
fn a_plugin_whose_helper_was_killed_is_tried_again() {
    let folder = folder();
    let plugin =
        qhx_tests::plugin_files::build_example("qhx-test-malformed-plugins", "hang_while_file");
    let hangs = folder.path().join("hangs");
    std::fs::write(&hangs, "").expect("a file");
    let info = || {
        let info = qhx!(folder, "plugins", "info", "test_hang_while_file");
        info.args(["--allow-untrusted-plugins", "--plugin"])
            .arg(&plugin)
            .env("QHX_TEST_HANG", &hangs)
    };
    let killed = info().start();
    let started = Instant::now();
    let helper = loop {
        if let [helper] = children(killed.id()).as_slice() {
            break *helper;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "no helper was started");
        std::thread::sleep(Duration::from_millis(5));
    };
    // It says which version it is before it loads anything.
    std::thread::sleep(Duration::from_millis(200));
    signal("-KILL", helper);
    let killed = killed.wait_with_output().expect("it ends");
    let stderr = String::from_utf8_lossy(&killed.stderr);
    assert_eq!(killed.status.code(), Some(8), "{stderr}");
    assert!(stderr.contains("the system or a user ended the process"), "{stderr}");
    std::fs::remove_file(&hangs).expect("the file goes");
    info().run().ok().prints(&["test_hang_while_file"]);
}
