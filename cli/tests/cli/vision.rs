//! `docs/vision.md`, `docs/audio.md` and `docs/speech.md` and `docs/voice.md` as they stand: their commands, and what
//! they print.

use std::os::unix::fs::symlink;

use qhx_paths::workspace;

use crate::run::{Program, folder};

/// The commands of a page's `console` blocks, each with what it prints.
fn commands(page: &str) -> Vec<(&str, String)> {
    let mut commands: Vec<(&str, String)> = Vec::new();
    let blocks = page.split("```console\n").skip(1);
    for line in blocks.flat_map(|block| block.split("```").next().unwrap_or_default().lines()) {
        match line.strip_prefix("$ ") {
            Some(command) => commands.push((command, String::new())),
            None => {
                let (_, printed) = commands.last_mut().expect("a command stands before its output");
                printed.push_str(line);
                printed.push('\n');
            }
        }
    }
    commands
}

#[test]
fn the_page_s_commands_print_what_it_says() {
    walk("vision.md", 11);
}

#[test]
fn the_commands_of_the_page_of_audio_print_what_it_says() {
    walk("audio.md", 4);
}

#[test]
fn the_commands_of_the_page_of_speech_print_what_it_says() {
    walk("speech.md", 4);
}

#[test]
fn the_commands_of_the_page_of_a_voice_print_what_it_says() {
    walk("voice.md", 3);
}

/// Runs the commands of a page, of which there are at least `count`.
fn walk(page: &str, count: usize) {
    let page = std::fs::read_to_string(workspace().join("docs").join(page)).expect("the page");
    let commands = commands(&page);
    assert!(commands.len() >= count, "{commands:?}");
    let place = folder();
    symlink(workspace().join("tests"), place.path().join("tests")).expect("a link");
    for (command, printed) in commands {
        let run = Program::shell(place.path(), command).run();
        assert_eq!(run.stdout, printed, "{command}: {run:?}");
        let refused = command.ends_with("2>&1");
        assert_eq!(run.code, if refused { 9 } else { 0 }, "{command}: {run:?}");
    }
}
