//! `qhx chat` over a pipe.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;

use qhx_tests::plugin_files::copy_folder;
use serde_json::{Value, json};

use crate::run::{bundle, copy_of_bundle, edit_manifest, folder};

fn turns(input: &str, more: &[&str]) -> Vec<Value> {
    let run = qhx!(folder(), "chat", bundle(), "--json", "--max-new", "12")
        .args(more)
        .stdin(input)
        .run()
        .ok();
    run.json_lines()
}

#[test]
fn a_second_turn_consumes_only_what_is_new() {
    let turns = turns("What colour is the sky?\nAnd at night?\n", &[]);
    assert_eq!(turns.len(), 2);
    let count = |turn: &Value, key: &str| turn[key].as_u64().expect("a number");
    assert_eq!(count(&turns[0], "reused_tokens"), 0);
    let first = count(&turns[0], "prompt_tokens");
    let reused = count(&turns[1], "reused_tokens");
    assert!(reused + 8 >= first, "{reused} of at least {first} tokens are reused");
    assert!(reused < count(&turns[1], "prompt_tokens"));
}

#[test]
fn commands_are_not_messages() {
    let turns = turns("Hello\n/reset\nHello\n/system Be brief.\n/nonsense\n\n/exit\nHello\n", &[]);
    assert_eq!(turns.len(), 2, "what follows /exit is not read");
    assert_eq!(turns[0]["tokens"], turns[1]["tokens"]);
    assert_eq!(turns[0]["prompt_tokens"], turns[1]["prompt_tokens"]);
}

#[test]
fn a_conversation_is_sampled_as_the_bundle_has_it() {
    let folder = folder();
    let own = copy_of_bundle(folder.path());
    edit_manifest(&own, |m| m["params"]["sampling"] = json!({"temperature": 3.0, "top_k": 40}));
    let said = |bundle: &Path, command: &str, more: &[&str]| {
        let run = qhx!(folder, command, bundle).args(more);
        let run = run.args(["--json", "--max-new", "12", "--seed", "5"]);
        let run = if command == "chat" { run.stdin("Hello\n") } else { run.args(["Hello"]) };
        let run = run.run().ok();
        (run.json()["tokens"].clone(), run.stderr)
    };
    let (own_tokens, stderr) = said(&own, "chat", &[]);
    assert!(stderr.contains("sampling: temperature 3, top-k 40, the model's own"), "{stderr}");
    let asked = said(bundle(), "chat", &["--temperature", "3", "--top-k", "40"]);
    let greedy = said(bundle(), "chat", &[]);
    assert!(!greedy.1.contains("sampling: "), "{}", greedy.1);
    assert_eq!(own_tokens, asked.0);
    assert_ne!(own_tokens, greedy.0);
    // What is asked for counts, option by option.
    assert_eq!(said(&own, "chat", &["--temperature", "0"]).0, greedy.0);
    assert_eq!(said(&own, "chat", &["--top-k", "1"]).0, greedy.0);
    assert_eq!(said(&own, "generate", &[]).0, said(bundle(), "generate", &[]).0);
}

#[test]
fn answers_go_to_stdout_and_timings_to_stderr() {
    let run = qhx!(folder(), "chat", bundle(), "--max-new", "12", "--system-prompt", "Be brief.")
        .stdin("What colour is the sky?")
        .run()
        .ok();
    assert_eq!(run.stdout.lines().count(), 1, "{run:?}");
    assert!(!run.stdout.contains("tok/s"));
    assert!(run.stderr.contains("tok/s"));
    assert!(!run.stderr.contains("> "), "there is no prompt in a pipe");
}

#[test]
fn a_message_that_does_not_fit_is_left_out() {
    let folder = folder();
    // The context holds 192 tokens.
    let long = "What colour is the sky? ".repeat(60);
    let input = [b"a\xffb\n", long.as_bytes(), b"\nWhat colour is the sky?\n"].concat();
    let chat = |more: &[&str]| {
        let chat = qhx!(folder, "chat", bundle());
        chat.args(["--max-new", "12"]).args(more).stdin(&*input).run()
    };
    let run = chat(&["--json"]);
    assert_eq!(run.code, 9, "{run:?}");
    let lines: Vec<Value> = run.json_lines();
    assert_eq!(lines.len(), 3, "a line a message: {run:?}");
    let message = |line: &Value| line["error"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(message(&lines[0]).contains("not valid UTF-8: byte 1 is 0xff"), "{run:?}");
    assert!(message(&lines[1]).contains("the context of tiny holds 192"), "{run:?}");
    let alone = turns("What colour is the sky?\n", &[]);
    assert_eq!(lines[2]["tokens"], alone[0]["tokens"]);

    let run = chat(&[]);
    assert_eq!((run.code, run.stdout.lines().count()), (9, 1), "{run:?}");
    assert!(run.stderr.contains("error:") && run.stderr.contains("holds 192"), "{run:?}");
}

/// Starts a chat over a copy of the bundle with one context in memory at a time, replaces files after its first answer
/// and returns the exit code and what the program said then.
fn replaced_while_it_chats(replace: impl FnOnce(&Path, &Path)) -> (Option<i32>, String) {
    let folder = folder();
    let (live, other) = (folder.path().join("live"), folder.path().join("other"));
    copy_folder(bundle(), &live);
    copy_folder(bundle(), &other);
    let mut chat = qhx!(folder, "chat", "live", "--max-contexts", "1", "--json", "--max-new", "4")
        .start_with_streams();
    let (mut input, output) =
        (chat.stdin.take().expect("a pipe"), chat.stdout.take().expect("a pipe"));
    let mut answers = BufReader::new(output).lines();
    let mut ask = || {
        // A program that has ended does not read.
        let _ = input.write_all(b"What colour is the sky?\n");
        answers.next().and_then(Result::ok).unwrap_or_default()
    };
    qhx_tests::has(&ask(), &["\"tokens\""]);
    replace(&live, &other);
    let second = ask();
    assert!(!second.contains("\"tokens\""), "tokens of another model: {second}");
    drop(input);
    let ended = chat.wait_with_output().expect("the program ends");
    (ended.status.code(), second + &String::from_utf8_lossy(&ended.stderr))
}

#[test]
fn a_bundle_renamed_into_place_is_refused_by_a_running_chat() {
    let (code, said) = replaced_while_it_chats(|live, other| {
        std::fs::rename(live, live.with_file_name("old")).expect("renamed");
        std::fs::rename(other, live).expect("renamed");
    });
    assert_eq!(code, Some(4), "{said}");
    assert!(said.contains(".onnx: replaced or changed since the bundle was opened"), "{said}");
    assert!(said.contains("open the bundle again"), "{said}");
}

#[test]
fn external_weights_renamed_into_place_are_refused() {
    let weights = |bundle: &Path| {
        let files = std::fs::read_dir(bundle.join("onnx")).expect("a folder").map(|entry| {
            let entry = entry.expect("an entry");
            (entry.metadata().expect("metadata").len(), entry.path())
        });
        files.max().expect("a file").1
    };
    let (code, said) = replaced_while_it_chats(|live, other| {
        std::fs::rename(weights(other), weights(live)).expect("renamed");
    });
    assert_eq!(code, Some(4), "{said}");
    assert!(said.contains("replaced or changed") && !said.contains(".onnx: replaced"), "{said}");
}
