//! Runs cargo and other programs in the workspace.

use std::cell::Cell;
use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::Value;

/// Result of a task, whose error is a message for people.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// Features of the program beyond the default: host-ops linked in, Parquet files.
pub(crate) const PROGRAM: &str = "builtin-ops,parquet";

/// True if the only argument is this one; false if there is none.
pub(crate) fn flag(name: &str, arguments: &[String]) -> Result<bool> {
    match arguments {
        [] => Ok(false),
        [one] if one == name => Ok(true),
        other => Err(format!("unknown arguments {other:?}, expected {name} or none")),
    }
}

/// A cargo command in the workspace.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = qhx_paths::cargo();
    command.args(arguments).current_dir(qhx_paths::workspace());
    command
}

/// Set when one of two sequences of commands failed, so that the other ends.
static STOPPED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// True if this thread's commands run beside those of another.
    static ASIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs two sequences of commands at a time. The second has one processor, as the first waits for one thread most of
/// the time, and shows what a command printed when it has ended, so that the lines of both stay apart.
pub(crate) fn side_by_side<A, B: Send>(
    first: impl FnOnce() -> Result<A>,
    second: impl FnOnce() -> Result<B> + Send,
) -> Result<(A, B)> {
    let stopping = |failed: bool| STOPPED.fetch_or(failed, Ordering::Relaxed);
    let (first, second) = std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            ASIDE.set(true);
            let result = second();
            (stopping(result.is_err()), result)
        });
        let result = first();
        let first = (stopping(result.is_err()), result);
        let crashed = |_| (false, Err("a thread of cargo xtask panicked".to_owned()));
        (first, second.join().unwrap_or_else(crashed))
    });
    match (first, second) {
        ((_, Ok(first)), (_, Ok(second))) => Ok((first, second)),
        // The one that was stopped has no failure of its own.
        ((false, Err(why)), _) | (_, (_, Err(why))) | ((_, Err(why)), _) => Err(why),
    }
}

/// Runs a command to its end, and reports how long it took; anything but success is an error that names it, and repeats
/// the reports of tests that failed, which may be far above.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = begin(command)?;
    let start = Instant::now();
    let mut failures = Failures::default();
    let status = if ASIDE.get() {
        let output = command.output();
        output.map(|output| {
            let mut stdout = std::io::stdout().lock();
            let _ = (stdout.write_all(&output.stdout), stdout.flush());
            show_errors(&output);
            String::from_utf8_lossy(&output.stdout).lines().for_each(|line| failures.read(line));
            output.status
        })
    } else if command.get_args().any(|argument| argument == "test") {
        watched(command, &mut failures)
    } else {
        command.status()
    };
    eprintln!("= {:.0} s: {shown}", start.elapsed().as_secs_f64());
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{shown}: {status}{}", failures.reports)),
        Err(e) => Err(format!("{shown}: {e}")),
    }
}

/// Runs tests, whose lines are passed on and read.
fn watched(command: &mut Command, failures: &mut Failures) -> std::io::Result<ExitStatus> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    if let Some(stdout) = child.stdout.take() {
        let (mut stdout, mut line) = (BufReader::new(stdout), Vec::new());
        while stdout.read_until(b'\n', &mut line)? > 0 {
            let _ = std::io::stdout().write_all(&line);
            failures.read(String::from_utf8_lossy(&line).trim_end());
            line.clear();
        }
    }
    child.wait()
}

/// Reports of failed tests among the lines of Rust's test harness: what they printed, then their names.
#[derive(Default)]
struct Failures {
    within: bool,
    reports: String,
}

impl Failures {
    /// Characters that are kept of each end of a long line. The message of a program that failed comes last in it.
    const WIDTH: usize = 600;

    fn read(&mut self, line: &str) {
        self.within = (self.within || line == "failures:") && !line.starts_with("test result:");
        if self.within && !line.is_empty() {
            self.reports.push('\n');
            match line.char_indices().nth(2 * Self::WIDTH) {
                Some(_) => {
                    let end = line.char_indices().rev().nth(Self::WIDTH - 1);
                    self.reports.extend(line.chars().take(Self::WIDTH));
                    self.reports.push('…');
                    self.reports.push_str(end.map_or("", |(at, _)| &line[at..]));
                }
                None => self.reports.push_str(line),
            }
        }
    }
}

/// Runs a command and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = begin(command)?;
    if !ASIDE.get() {
        command.stderr(Stdio::inherit());
    }
    let output = command.output().map_err(|e| format!("{shown}: {e}"))?;
    show_errors(&output);
    if !output.status.success() {
        return Err(format!("{shown}: {}", output.status));
    }
    String::from_utf8(output.stdout).map_err(|e| format!("{shown}: {e}"))
}

/// True when a command can be run and succeeds; nothing is shown.
pub(crate) fn works(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Builds packages with more `arguments` and returns the path of the program `name`, wherever cargo was configured to
/// put it.
pub(crate) fn build(packages: &[&str], arguments: &[&str], name: &str) -> Result<PathBuf> {
    let mut build = cargo(&["build", "--message-format", "json-render-diagnostics"]);
    for package in packages {
        build.args(["--package", package]);
    }
    let messages = output(build.args(arguments))?;
    executables(&messages).remove(name).ok_or_else(|| format!("cargo built no program {name:?}"))
}

/// The programs among cargo's messages, by name.
pub(crate) fn executables(messages: &str) -> HashMap<String, PathBuf> {
    let executable = |line: &str| {
        let message: Value = serde_json::from_str(line).ok()?;
        let (name, path) = (message["target"]["name"].as_str()?, message["executable"].as_str()?);
        Some((name.to_owned(), PathBuf::from(path)))
    };
    messages.lines().filter_map(executable).collect()
}

/// True if the toolchain has a target.
pub(crate) fn has_target(target: &str) -> bool {
    let list = output(Command::new("rustup").args(["target", "list", "--installed"]));
    list.unwrap_or_default().lines().any(|line| line.trim() == target)
}

/// The folder of what is installed for the checks.
pub(crate) fn tools_folder() -> PathBuf {
    let given = std::env::var_os("QHX_TOOLS").map(PathBuf::from);
    given.unwrap_or_else(|| qhx_paths::workspace().join("target/tools"))
}

/// The program of a crate, which is built among the tools where that version of it is not there.
pub(crate) fn installed(name: &str, version: &str, arguments: &[&str]) -> Result<PathBuf> {
    let folder = tools_folder();
    let mut install = cargo(&["install", "--quiet", "--locked", "--debug", "--root"]);
    install.arg(&folder).args(arguments).args(["--version", version, name]);
    run(&mut install)?;
    Ok(folder.join("bin").join(name))
}

/// What cargo knows of the workspace.
pub(crate) fn metadata(arguments: &[&str]) -> Result<Value> {
    let text = output(cargo(&["metadata", "--format-version", "1"]).args(arguments))?;
    serde_json::from_str(&text).map_err(|e| format!("cargo metadata: {e}"))
}

/// Installs a package of npm in a folder.
pub(crate) fn npm(folder: &Path, packages: &[&str]) -> Result<()> {
    if !works(Command::new("npm").arg("--version")) {
        return Err("npm is not installed: apt-get install npm".into());
    }
    let mut install = Command::new("npm");
    install.args(["install", "--no-audit", "--no-fund", "--no-save", "--ignore-scripts"]);
    run(install.arg("--prefix").arg(folder).args(packages))
        .map_err(|why| format!("{} cannot be installed: {why}", packages.join(", ")))
}

/// The folder that cargo builds into, wherever it was configured to be.
pub(crate) fn target_folder() -> Result<PathBuf> {
    let metadata = metadata(&["--no-deps"])?;
    metadata["target_directory"].as_str().map(PathBuf::from).ok_or("cargo names no folder".into())
}

/// Says that a command runs, and how it is called.
fn begin(command: &mut Command) -> Result<String> {
    let shown = show(command);
    if STOPPED.load(Ordering::Relaxed) {
        return Err(format!("{shown}: not run, as something else failed"));
    }
    if ASIDE.get() {
        command.env("CARGO_BUILD_JOBS", "1");
    }
    eprintln!("+ {shown}");
    Ok(shown)
}

fn show_errors(output: &Output) {
    let _ = std::io::stderr().lock().write_all(&output.stderr);
}

fn show(command: &Command) -> String {
    let name = Path::new(command.get_program()).file_stem().unwrap_or(command.get_program());
    let mut shown = name.to_string_lossy().into_owned();
    for argument in command.get_args() {
        shown.push(' ');
        shown.push_str(&argument.to_string_lossy());
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_where_cargo_says() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","target":{"name":"serde"},"executable":null}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"name":"qhx"},"executable":"/a b/qhx"}"#,
            "\nnot a message\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        let expected = HashMap::from([("qhx".to_owned(), PathBuf::from("/a b/qhx"))]);
        assert_eq!(executables(messages), expected);
    }

    #[test]
    fn reports_of_failed_tests_are_repeated() {
        let printed = "running 2 tests\ntest a ... ok\ntest b ... FAILED\n\nfailures:\n\n---- b stdout ----\n\
            left: 1\n\n\nfailures:\n    b\n\ntest result: FAILED. 1 passed; 1 failed\n\n\
            running 1 test\ntest c ... ok\n\ntest result: ok. 1 passed; 0 failed\n";
        let mut failures = Failures::default();
        printed.lines().for_each(|line| failures.read(line));
        let expected = "\nfailures:\n---- b stdout ----\nleft: 1\nfailures:\n    b";
        assert_eq!(failures.reports, expected);

        let mut failures = Failures::default();
        let long = format!("{}{}{}", "a".repeat(600), "é".repeat(9), "b".repeat(600));
        ["failures:", &long].iter().for_each(|line| failures.read(line));
        let expected = format!("\nfailures:\n{}…{}", "a".repeat(600), "b".repeat(600));
        assert_eq!(failures.reports, expected);
    }
}
