//! Builds the program and the plugin of the demo's family, and runs the demo.

use std::process::Command;

use crate::cargo::{self, Result};

/// Runs `qhx demo` with `arguments`.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let targets = ["--profile", "demo", "--lib", "--bin", "qhx"];
    let tiny = arguments.iter().any(|argument| argument == "--tiny");
    let plugin = if tiny { "qhx-ops-qwen35-plugin" } else { "qhx-ops-llama-plugin" };
    let qhx = cargo::build(&["qhx-cli", plugin], &targets, "qhx")?;
    cargo::run(Command::new(qhx).arg("demo").args(arguments))
}
