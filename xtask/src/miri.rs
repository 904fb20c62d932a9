//! Runs the op author's kit under Miri, which finds undefined behaviour in `unsafe` code.
//!
//! Miri is a component of nightly toolchains only, so that no tier of the test run is made of it.

use std::process::Command;

use crate::cargo::{self, Result, works};

/// Tests of the plugin interface and the kit that need no file and no process: those in its sources.
pub(crate) fn run() -> Result<()> {
    if !works(nightly(&["--version"]).current_dir(qhx_paths::workspace())) {
        return Err(
            "Miri is not installed: rustup toolchain install nightly --component miri,rust-src"
                .to_owned(),
        );
    }
    let mut test = nightly(&["test", "--package", "qhx-op", "--package", "qhx-kit", "--lib"]);
    cargo::run(test.current_dir(qhx_paths::workspace()))
}

/// `cargo miri` of the nightly toolchain.
fn nightly(arguments: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo", "miri"]).args(arguments);
    // Those of the running toolchain would win otherwise.
    for variable in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(variable);
    }
    command
}
