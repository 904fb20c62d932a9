//! Windows: the program and plugins are built for x86-64 Windows with MinGW, and `tests/windows` runs them under Wine.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo::{self, Result, cargo, works};

pub(crate) const TARGET: &str = "x86_64-pc-windows-gnu";

/// MinGW's compiler, which links, too.
pub(crate) const GCC: &str = "x86_64-w64-mingw32-gcc";

/// Debian's folder of Wine's programs: without the package `wine`, they are not on the search path.
const WINE_FOLDER: &str = "/usr/lib/wine";

/// Wine for 64-bit programs, and its server.
fn wine() -> Option<(PathBuf, PathBuf)> {
    let found = |names: &[&str]| {
        let candidates =
            names.iter().flat_map(|name| [Path::new(WINE_FOLDER).join(name), name.into()]);
        candidates.into_iter().find(|program| works(Command::new(program).arg("--version")))
    };
    Some((found(&["wine64", "wine"])?, found(&["wineserver64", "wineserver"])?))
}

/// Missing requirement of this tier, with how to get it; `None` if the tier can run.
pub(crate) fn missing() -> Option<String> {
    if wine().is_none() {
        return Some("Wine is not installed: apt-get install wine64".to_owned());
    }
    if let Some(why) = no_compiler() {
        return Some(why);
    }
    (!cargo::has_target(TARGET)).then(|| format!("rustup target add {TARGET}"))
}

/// How to get MinGW where it is not installed.
pub(crate) fn no_compiler() -> Option<String> {
    let there = works(Command::new(GCC).arg("--version"));
    (!there).then(|| "MinGW is not installed: apt-get install gcc-mingw-w64-x86-64".to_owned())
}

/// Runs the demo and a server with the programs of a package, which lie in a folder.
///
/// # Errors
/// Wine is not there, or gives another answer: for people.
pub(crate) fn package(folder: &Path) -> Result<()> {
    if let Some(why) = missing() {
        return Err(why);
    }
    let mut tests = python()?;
    cargo::run(tests.arg("package.py").arg(folder))
}

/// Python in the folder of the tests, which knows where Wine is.
fn python() -> Result<Command> {
    let (wine, server) = wine().ok_or("Wine is not installed")?;
    let mut python = Command::new("python3");
    python.arg("-B");
    python.current_dir(qhx_paths::workspace().join("tests/windows"));
    python.env("WINELOADER", wine).env("WINESERVER", server);
    Ok(python)
}

/// Builds and runs everything; `qhx` is the program of this machine.
pub(crate) fn run(qhx: &Path) -> Result<()> {
    let mut tests = python()?;
    tests.args(["-m", "unittest", "--verbose"]).env("QHX", qhx).env("BUILT", build()?);
    cargo::run(&mut tests)
}

/// The profile of programs for other machines, whose vector code is not what is compared here.
const PROFILE: [&str; 4] =
    ["--profile", "emulated", "--config", "profile.emulated.package.qhx-kit.opt-level=0"];

/// Builds the program, a plugin, and plugins that misbehave; returns the folder they are in.
fn build() -> Result<PathBuf> {
    let mut build =
        cargo(&["build", "--target", TARGET, "--message-format", "json-render-diagnostics"]);
    build.args(PROFILE).args(["--package", "qhx-cli", "--package", "qhx-ops-llama-plugin"]);
    build.args(["--package", "qhx-test-malformed-plugins", "--lib", "--bin", "qhx"]);
    build.args(["--example", "crash_on_load"]);
    let messages = cargo::output(&mut build)?;
    let program = cargo::executables(&messages).remove("qhx").ok_or("cargo built no qhx.exe")?;
    Ok(program.parent().ok_or("qhx.exe lies in no folder")?.to_owned())
}
