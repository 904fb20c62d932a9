//! Windows: the program and plugins are built for x86-64 Windows with MinGW, and `tests/windows` runs them under Wine.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo::{self, Result, cargo, works};

const TARGET: &str = "x86_64-pc-windows-gnu";

/// MinGW's compiler, which links, too.
const GCC: &str = "x86_64-w64-mingw32-gcc";

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
    if !works(Command::new(GCC).arg("--version")) {
        return Some("MinGW is not installed: apt-get install gcc-mingw-w64-x86-64".to_owned());
    }
    (!cargo::has_target(TARGET)).then(|| format!("rustup target add {TARGET}"))
}

/// Builds and runs everything; `qhx` is the program of this machine.
pub(crate) fn run(qhx: &Path) -> Result<()> {
    let (wine, server) = wine().ok_or("Wine is not installed")?;
    let mut tests = Command::new("python3");
    tests.args(["-B", "-m", "unittest", "--verbose"]);
    tests.current_dir(qhx_paths::workspace().join("tests/windows"));
    tests.env("QHX", qhx).env("BUILT", build()?).env("WINELOADER", wine).env("WINESERVER", server);
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
