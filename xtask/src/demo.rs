//! Builds the program and the plugin of a model's family, and runs the model.

use std::process::Command;

use crate::cargo::{self, Result};

/// Question for the published model.
const QUESTION: &str = "What is gravity?";

/// Runs `qhx run smollm2` with a question and `arguments`, or with `--tiny` `qhx demo`.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let targets = ["--profile", "demo", "--lib", "--bin", "qhx"];
    let tiny = arguments.iter().any(|argument| argument == "--tiny");
    let plugin = if tiny { "qhx-ops-qwen35-plugin" } else { "qhx-ops-llama-plugin" };
    let mut qhx = Command::new(cargo::build(&["qhx-cli", plugin], &targets, "qhx")?);
    match tiny {
        true => qhx.arg("demo"),
        false => qhx.args(["run", "smollm2", QUESTION]),
    };
    cargo::run(qhx.args(arguments.iter().filter(|argument| *argument != "--tiny")))
}
