//! The server, asked by the clients that people use.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo::{self, PLUGINS, Result, works};
use crate::python;

fn folder() -> PathBuf {
    qhx_paths::workspace().join("tests/clients")
}

/// An environment with the clients, which is made where it is not there; with those, too, that take minutes to install
/// where `full` asks for them.
///
/// # Errors
/// Python is not there, or the clients cannot be installed: for people.
pub(crate) fn tools(full: bool) -> Result<PathBuf> {
    for program in ["chromium", "chromedriver"] {
        if !Path::new("/usr/bin").join(program).exists() {
            return Err(
                "Chromium is not installed: apt-get install chromium chromium-driver".into()
            );
        }
    }
    javascript()?;
    let environment = python::environment("clients")?;
    let modules = "import anthropic, langchain_openai, llm, pytest, schemathesis, selenium";
    install(&environment, modules, "requirements.txt")?;
    if full {
        install(&environment, "import lm_eval, tenacity, transformers", "requirements-full.txt")?;
    }
    Ok(environment)
}

/// Installs what a file of requirements names, unless the modules are there.
fn install(environment: &Path, modules: &str, requirements: &str) -> Result<()> {
    if works(Command::new(python::within(environment, "python")).args(["-c", modules])) {
        return Ok(());
    }
    let install = ["install", "--quiet", "--no-compile", "--requirement"];
    cargo::run(python::pip(environment).args(install).arg(folder().join(requirements)))
        .map_err(|why| format!("the clients cannot be installed: {why}"))
}

/// The folder of the packages that npm installs.
fn node_modules() -> PathBuf {
    cargo::tools_folder().join("clients/node_modules")
}

/// Installs the client for JavaScript, unless it is there.
fn javascript() -> Result<()> {
    if node_modules().join("openai").exists() {
        return Ok(());
    }
    if !works(Command::new("npm").arg("--version")) {
        return Err("npm is not installed: apt-get install npm".into());
    }
    let mut install = Command::new("npm");
    install.args(["install", "--no-audit", "--no-fund", "--no-save", "--ignore-scripts"]);
    install.arg("--prefix").arg(cargo::tools_folder().join("clients")).arg("openai@7");
    cargo::run(&mut install).map_err(|why| format!("the clients cannot be installed: {why}"))
}

/// Runs the tests with the program that is built for tests, and on the NPU where its libraries are named.
///
/// With `full`, the server is sent a hundred times as many drawn requests.
pub(crate) fn test(tools: &Path, npu: Option<&(PathBuf, PathBuf)>, full: bool) -> Result<()> {
    let qhx = cargo::build(&[&["qhx-cli"][..], &PLUGINS].concat(), &[], "qhx")?;
    let mut pytest = Command::new(python::within(tools, "python"));
    pytest.args(["-B", "-m", "pytest", "--quiet", "-p", "no:cacheprovider"]);
    pytest.current_dir(folder());
    pytest.env("QHX_PROGRAM", qhx).env("QHX_NODE_MODULES", node_modules());
    if full {
        pytest.env("QHX_FULL", "1");
    }
    if let Some((htp, system)) = npu {
        pytest.env("QHX_QNN_HTP", htp).env("QHX_QNN_SYSTEM", system);
    }
    cargo::run(&mut pytest)
}
