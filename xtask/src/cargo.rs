//! Runs cargo and other programs in the workspace.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What went wrong, for people.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// Crates of dynamic plugins that belong beside the program.
pub(crate) const PLUGINS: [&str; 3] =
    ["qhx-ops-llama-plugin", "qhx-ops-phimoe-plugin", "qhx-ops-qwen35-plugin"];

/// The workspace's folder.
pub(crate) fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

/// A cargo command in the workspace.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(arguments).current_dir(root());
    command
}

/// Runs a command to its end; anything but success is an error that names it.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = show(command);
    eprintln!("+ {shown}");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{shown}: {status}")),
        Err(e) => Err(format!("{shown}: {e}")),
    }
}

/// Runs a command and answers with its standard output.
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

/// The folder of built files for a profile: beside that of this program's own profile, wherever
/// cargo was told to build.
fn target(profile: &str) -> PathBuf {
    let here = std::env::current_exe().unwrap_or_else(|_| root().join("target/debug/xtask"));
    here.ancestors().nth(2).unwrap_or(root()).join(profile)
}

/// The built program.
pub(crate) fn program(profile: &str, name: &str) -> PathBuf {
    target(profile).join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
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
