//! `qhx chat` over a pipe.

use serde_json::Value;

use crate::run::{Program, bundle, folder};

fn turns(input: &str, more: &[&str]) -> Vec<Value> {
    let folder = folder();
    let run = Program::qhx(folder.path())
        .args(["chat"])
        .args([bundle()])
        .args(["--json", "--max-new", "12"])
        .args(more)
        .stdin(input)
        .run()
        .ok();
    run.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON lines")).collect()
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
fn answers_go_to_stdout_and_timings_to_stderr() {
    let folder = folder();
    let run = Program::qhx(folder.path())
        .args(["chat"])
        .args([bundle()])
        .args(["--max-new", "12", "--system-prompt", "Be brief."])
        .stdin("What colour is the sky?")
        .run()
        .ok();
    assert_eq!(run.stdout.lines().count(), 1, "{run:?}");
    assert!(!run.stdout.contains("tok/s"));
    assert!(run.stderr.contains("tok/s"));
    assert!(!run.stderr.contains("> "), "there is no prompt in a pipe");
}

#[test]
fn a_message_that_does_not_fit_is_left_out_and_the_next_one_is_answered() {
    let folder = folder();
    // The context holds 192 tokens.
    let long = "What colour is the sky? ".repeat(60);
    let input = [b"a\xffb\n", long.as_bytes(), b"\nWhat colour is the sky?\n"].concat();
    let chat = |more: &[&str]| {
        let chat = Program::qhx(folder.path()).args(["chat"]).args([bundle()]);
        chat.args(["--max-new", "12"]).args(more).stdin(&*input).run()
    };
    let run = chat(&["--json"]);
    assert_eq!(run.code, 9, "{run:?}");
    let lines: Vec<Value> =
        run.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON lines")).collect();
    assert_eq!(lines.len(), 3, "a line a message: {run:?}");
    let message = |line: &Value| line["error"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(message(&lines[0]).contains("not valid UTF-8: byte 1 is 0xff"), "{run:?}");
    assert!(message(&lines[1]).contains("the context of toy holds 192"), "{run:?}");
    let alone = turns("What colour is the sky?\n", &[]);
    assert_eq!(lines[2]["tokens"], alone[0]["tokens"]);

    let run = chat(&[]);
    assert_eq!((run.code, run.stdout.lines().count()), (9, 1), "{run:?}");
    assert!(run.stderr.contains("error:") && run.stderr.contains("holds 192"), "{run:?}");
}
