//! Builds the program and its plugins and runs the demo.

use std::process::Command;

use crate::cargo::{self, PLUGINS, Result};

/// Runs `qhx demo` with `arguments`.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let packages = [&["qhx-cli"][..], &PLUGINS].concat();
    let qhx = cargo::build(&packages, &["--release"], "qhx")?;
    cargo::run(Command::new(qhx).arg("demo").args(arguments))
}
