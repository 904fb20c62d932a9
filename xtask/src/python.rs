//! The wheel of the Python package, and its tests in an environment of their own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::cargo::{self, PROGRAM, Result, works};
use crate::files::copy;

/// The programs of the wheel: all of `qhx-cli`.
pub(crate) const PROGRAMS: [&str; 3] = ["qhx", "qhx_embed", "qhx_generate"];

/// Purpose of the wheel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// To be installed here: as the tests are built, and not compressed.
    Tested,
    /// For others.
    Release,
}

/// `cargo xtask wheel`: a wheel for others, or with `--dev` one as it is tested.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let kind = if cargo::flag("--dev", arguments)? { Kind::Tested } else { Kind::Release };
    let wheel = wheel(kind, &tools()?)?;
    eprintln!("{}", wheel.display());
    Ok(())
}

fn folder() -> PathBuf {
    qhx_paths::workspace().join("bindings/python")
}

/// A program of an environment.
pub(crate) fn within(environment: &Path, name: &str) -> PathBuf {
    let folder = if cfg!(windows) { "Scripts" } else { "bin" };
    environment.join(folder).join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
}

/// An environment with pip among the tools, which is made where it is not there.
///
/// # Errors
/// Python is not there, or cannot install anything: for people.
pub(crate) fn environment(name: &str) -> Result<PathBuf> {
    let environment = cargo::tools_folder().join(name);
    let python = within(&environment, "python");
    if !works(Command::new(&python).args(["-m", "pip", "--version"])) {
        if !works(Command::new("python3").args(["-m", "ensurepip", "--version"])) {
            return Err("Python 3 with venv is not installed: apt-get install python3-venv".into());
        }
        cargo::run(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    }
    Ok(environment)
}

/// An environment with pip and maturin, which is made where it is not there.
///
/// # Errors
/// Python is not there, or cannot install anything: for people.
pub(crate) fn tools() -> Result<PathBuf> {
    program("maturin>=1.9,<2", "maturin")?;
    environment("python")
}

/// The program of a package of PyPI, which is installed among the tools where it is not there.
///
/// # Errors
/// Python is not there, or cannot install anything: for people.
pub(crate) fn program(package: &str, name: &str) -> Result<PathBuf> {
    /// Tests ask for their programs at a time.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let environment = environment("python")?;
    cargo::run(pip(&environment).args(["install", "--quiet", "--no-compile", package]))
        .map_err(|why| format!("{name} cannot be installed: {why}"))?;
    Ok(within(&environment, name))
}

/// True where a test has to do without a program, and may.
#[cfg(test)]
pub(crate) fn lacks(package: &str, name: &str) -> bool {
    let required = std::env::var("QHX_REQUIRE_TIERS").is_ok_and(|value| value == "1");
    program(package, name).inspect_err(|why| eprintln!("skipped: {why}")).is_err() && !required
}

/// The command that installs into an environment.
pub(crate) fn pip(environment: &Path) -> Command {
    let mut pip = Command::new(within(environment, "python"));
    pip.args(["-m", "pip", "--disable-pip-version-check"]);
    pip
}

/// Builds the programs and the wheel around them.
pub(crate) fn wheel(kind: Kind, tools: &Path) -> Result<PathBuf> {
    let mut build = vec!["--features", PROGRAM];
    if kind == Kind::Release {
        build.push("--release");
    }
    let qhx = cargo::build(&["qhx-cli"], &build, "qhx")?;
    let programs = qhx.parent().unwrap_or(&qhx);
    let mut maturin = maturin(tools, programs)?;
    match kind {
        // What cargo built for the tests serves here as well.
        Kind::Tested => maturin.args(["--compression-method", "stored", "--auditwheel", "skip"]),
        Kind::Release => maturin.arg("--release"),
    };
    made(&mut maturin, &qhx.with_file_name("wheels"))
}

/// A command of maturin that makes a wheel around the programs of a folder.
pub(crate) fn maturin(tools: &Path, programs: &Path) -> Result<Command> {
    let scripts = folder().join("data/scripts");
    for program in PROGRAMS {
        let name = format!("{program}{}", std::env::consts::EXE_SUFFIX);
        copy(&programs.join(&name), &scripts.join(name))?;
    }
    let mut maturin = Command::new(within(tools, "maturin"));
    maturin.args(["build", "--locked"]).current_dir(folder());
    Ok(maturin)
}

/// Has a command of maturin make its wheel in a folder, and returns it.
pub(crate) fn made(maturin: &mut Command, out: &Path) -> Result<PathBuf> {
    // One of another version would be found, too.
    let _ = std::fs::remove_dir_all(out);
    cargo::run(maturin.arg("--out").arg(out))?;
    let wheels = std::fs::read_dir(out).map_err(|e| format!("{}: {e}", out.display()))?;
    let wheel = wheels.filter_map(|entry| Some(entry.ok()?.path())).next();
    wheel.ok_or_else(|| format!("{}: maturin made no wheel", out.display()))
}

/// Installs the wheel in a fresh environment, and runs the tests there.
pub(crate) fn test(tools: &Path) -> Result<()> {
    let wheel = wheel(Kind::Tested, tools)?;
    let environment = wheel.with_file_name("environment");
    // Its pip is that of the tools: installing another one takes five seconds.
    cargo::run(
        Command::new("python3").args(["-m", "venv", "--clear", "--without-pip"]).arg(&environment),
    )?;
    cargo::run(
        pip(tools)
            .arg("--python")
            .arg(within(&environment, "python"))
            .args(["install", "--quiet", "--no-compile"])
            .arg(format!("{}[test]", wheel.display())),
    )?;
    let mut pytest = Command::new(within(&environment, "python"));
    pytest.args(["-B", "-m", "pytest", "--quiet"]).current_dir(folder());
    cargo::run(&mut pytest)
}
