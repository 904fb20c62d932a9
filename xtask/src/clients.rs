//! The server, asked by the clients that people use.

use std::path::{Path, PathBuf};
use std::process::Command;

use qhx_paths::PLUGINS;

use crate::cargo::{self, Result};
use crate::python;

/// Clients and frameworks of npm. Node.js 20 runs them.
const PACKAGES: [&str; 7] = [
    "openai@7",
    "ollama@0.6",
    "ai@6",
    "@ai-sdk/anthropic@3",
    "@ai-sdk/openai@3",
    "@ai-sdk/openai-compatible@2",
    "axe-core@4",
];
/// Coding agents, 1.6 GB together.
const AGENTS: [&str; 5] = [
    "@anthropic-ai/claude-code@2.1",
    "@continuedev/cli@1.5",
    "@openai/codex@0.171",
    "cline@3.0",
    "opencode-ai@1.18",
];

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
    let packages = [&PACKAGES[..], if full { &AGENTS } else { &[] }].concat();
    if !packages.iter().all(|package| is_installed(package)) {
        cargo::npm(&cargo::tools_folder().join("clients"), &packages)?;
    }
    let environment = python::environment("clients")?;
    let mut install = python::pip(&environment);
    install.args(["install", "--quiet", "--no-compile", "-r", "requirements.txt"]);
    install.args(full.then_some(["-r", "requirements-full.txt"]).into_iter().flatten());
    cargo::run(install.current_dir(folder()))
        .map_err(|why| format!("the clients cannot be installed: {why}"))?;
    Ok(environment)
}

/// The folder of the packages that npm installs.
fn node_modules() -> PathBuf {
    cargo::tools_folder().join("clients/node_modules")
}

/// True if some version of a package is there: `name@version`, where a name may begin with @, too.
fn is_installed(package: &str) -> bool {
    let name = package.rsplit_once('@').map_or(package, |(name, _)| name);
    node_modules().join(name).exists()
}

/// Runs the tests with the program that is built for tests, on the NPU where its libraries are named, and with a
/// published checkpoint where the folder of these is named.
///
/// With `full`, the server is sent a hundred times as many drawn requests.
pub(crate) fn test(
    tools: &Path,
    npu: Option<&(PathBuf, PathBuf)>,
    real: Option<&Path>,
    full: bool,
) -> Result<()> {
    let qhx = cargo::build(&[&["qhx-cli"][..], &PLUGINS].concat(), &[], "qhx")?;
    let example = ["--example", "catalog_server"];
    let catalog_server = cargo::build(&["qhx-server"], &example, "catalog_server")?;
    let mut pytest = Command::new(python::within(tools, "python"));
    pytest.args(["-B", "-m", "pytest", "--quiet", "-p", "no:cacheprovider"]);
    pytest.current_dir(folder());
    pytest.env("QHX_PROGRAM", qhx).env("QHX_NODE_MODULES", node_modules());
    pytest.env("QHX_CATALOG_SERVER", catalog_server);
    if full {
        pytest.env("QHX_FULL", "1");
    }
    if let Some(folder) = real {
        pytest.env("QHX_REAL", folder);
    }
    if let Some((htp, system)) = npu {
        pytest.env("QHX_QNN_HTP", htp).env("QHX_QNN_SYSTEM", system);
    }
    cargo::run(&mut pytest)
}
