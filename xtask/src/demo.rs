//! Builds the program and a plugin and runs the demo.

use std::process::Command;

use crate::cargo::{self, Result};

/// The program, and the plugin of the demo's family.
const PACKAGES: [&str; 2] = ["qhx-cli", "qhx-ops-qwen35-plugin"];

/// Runs `qhx demo` with `arguments`.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let targets = ["--profile", "demo", "--lib", "--bin", "qhx"];
    let qhx = cargo::build(&PACKAGES, &targets, "qhx")?;
    cargo::run(Command::new(qhx).arg("demo").args(arguments))
}
