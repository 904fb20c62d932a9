//! Feeds damaged files to all targets or to those named, for a time each.

#![expect(
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a tool of developers, whose report is what it prints"
)]

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use qhx_fuzz::run::{self, Options};
use qhx_fuzz::{TARGETS, target};

const HELP: &str = "\
Usage: qhx-fuzz [--seconds N] [--seed N] [TARGET…]
       qhx-fuzz read TARGET FILE

Feeds damaged copies of the files in tests/fuzz/seeds/TARGET to each target for N seconds (20, if not given). A file that a
target does not answer with a result or an error is kept in tests/fuzz/found; `read` gives a target that one file.
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["help" | "--help" | "-h"] => {
            println!("{HELP}");
            Ok(())
        }
        ["feed", name, millis, seed, seeds, current] => feed([name, millis, seed], seeds, current),
        ["read", name, file] => read(name, Path::new(file)),
        _ => all(&words),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn feed([name, millis, seed]: [&str; 3], seeds: &str, current: &str) -> Result<(), String> {
    let target = target(name).ok_or_else(|| unknown(name))?;
    let time = Duration::from_millis(number(millis)?);
    let (seeds, found) = (seeds.into(), Path::new(current).into());
    let options = Options { time, patience: time, seed: number(seed)?, seeds, found };
    let counts = run::feed(target, &options, Path::new(current)).map_err(|e| e.to_string())?;
    println!("{}", counts.line());
    Ok(())
}

fn read(name: &str, file: &Path) -> Result<(), String> {
    let target = target(name).ok_or_else(|| unknown(name))?;
    let data = std::fs::read(file).map_err(|e| format!("{}: {e}", file.display()))?;
    match (target.read)(&data) {
        Ok(()) => println!("accepted"),
        Err(error) => println!("refused: {}", error.report()),
    }
    Ok(())
}

fn all(words: &[&str]) -> Result<(), String> {
    let (mut names, mut seconds, mut seed) = (Vec::new(), 20, 1);
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        let mut value = || number(rest.next().copied().unwrap_or_default());
        match *word {
            "--seconds" => seconds = value()?,
            "--seed" => seed = value()?,
            name => names.push(target(name).ok_or_else(|| unknown(name))?.name),
        }
    }
    if names.is_empty() {
        names.extend(TARGETS.map(|target| target.name));
    }
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let [seeds, found] = run::folders();
    let time = Duration::from_secs(seconds);
    let options = Options { time, patience: Duration::from_secs(30), seed, seeds, found };
    let failed = AtomicBool::new(false);
    run::run_all(&program, &names, &options, |target, result| {
        println!("{}", run::describe(target, result));
        failed.fetch_or(result.is_err(), Ordering::Relaxed);
    });
    if failed.into_inner() { Err("a target did not answer".to_owned()) } else { Ok(()) }
}

fn number(word: &str) -> Result<u64, String> {
    word.parse().map_err(|_| format!("{word:?} is no number\n\n{HELP}"))
}

fn unknown(name: &str) -> String {
    format!("no target {name:?}, expected one of {}\n\n{HELP}", TARGETS.map(|t| t.name).join(", "))
}
