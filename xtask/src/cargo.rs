//! Runs cargo and other programs in the workspace.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// What went wrong, for people.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// Crates of dynamic plugins that belong beside the program.
pub(crate) const PLUGINS: [&str; 5] = [
    "qhx-ops-gemma4-plugin",
    "qhx-ops-llama-plugin",
    "qhx-ops-phimoe-plugin",
    "qhx-ops-qwen35-plugin",
    "qhx-ops-qwen3vl-plugin",
];

/// A cargo command in the workspace.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = qhx_places::cargo();
    command.args(arguments).current_dir(qhx_places::workspace());
    command
}

/// Runs a command to its end, and reports how long it took; anything but success is an error that names it.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = show(command);
    eprintln!("+ {shown}");
    let start = Instant::now();
    let status = command.status();
    eprintln!("= {:.0} s: {shown}", start.elapsed().as_secs_f64());
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{shown}: {status}")),
        Err(e) => Err(format!("{shown}: {e}")),
    }
}

/// Runs a command and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = show(command);
    eprintln!("+ {shown}");
    let output = command.stderr(Stdio::inherit()).output().map_err(|e| format!("{shown}: {e}"))?;
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
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let (name, path) = (message["target"]["name"].as_str()?, message["executable"].as_str()?);
        Some((name.to_owned(), PathBuf::from(path)))
    };
    messages.lines().filter_map(executable).collect()
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
}
