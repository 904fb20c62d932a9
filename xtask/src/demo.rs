//! Builds the program and its plugins and runs the demo.

use std::process::Command;

use crate::cargo::{self, PLUGINS, Result, cargo, program};

/// Runs `qhx demo` with `arguments`.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let mut build = cargo(&["build", "--release", "--package", "qhx"]);
    for plugin in PLUGINS {
        build.args(["--package", plugin]);
    }
    cargo::run(&mut build)?;
    cargo::run(Command::new(program("release", "qhx")).arg("demo").args(arguments))
}
