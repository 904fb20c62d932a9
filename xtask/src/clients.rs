//! The server, asked by the clients that people use.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo::{self, PLUGINS, Result, works};
use crate::python;

fn folder() -> PathBuf {
    qhx_paths::workspace().join("tests/clients")
}

/// An environment with the clients, which is made where it is not there.
///
/// # Errors
/// Python is not there, or the clients cannot be installed: for people.
pub(crate) fn tools() -> Result<PathBuf> {
    for program in ["chromium", "chromedriver"] {
        if !Path::new("/usr/bin").join(program).exists() {
            return Err(
                "Chromium is not installed: apt-get install chromium chromium-driver".into()
            );
        }
    }
    let environment = python::environment("clients")?;
    let python = python::within(&environment, "python");
    let modules = "import anthropic, openai, pytest, selenium";
    if !works(Command::new(&python).args(["-c", modules])) {
        let requirements = folder().join("requirements.txt");
        let install = ["install", "--quiet", "--no-compile", "--requirement"];
        cargo::run(python::pip(&environment).args(install).arg(requirements))
            .map_err(|why| format!("the clients cannot be installed: {why}"))?;
    }
    Ok(environment)
}

/// Runs the tests with the program that is built for tests.
pub(crate) fn test(tools: &Path) -> Result<()> {
    let qhx = cargo::build(&[&["qhx-cli"][..], &PLUGINS].concat(), &[], "qhx")?;
    let mut pytest = Command::new(python::within(tools, "python"));
    pytest.args(["-B", "-m", "pytest", "--quiet", "-p", "no:cacheprovider"]);
    cargo::run(pytest.current_dir(folder()).env("QHX_PROGRAM", qhx))
}
