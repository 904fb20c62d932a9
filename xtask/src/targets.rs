//! Type-checks the runtime for the machines it is made for.

use crate::aarch64;
use qhx_paths::PLUGINS;

use crate::cargo::{self, Result, cargo};

/// Phones, boards and laptops with a Hexagon NPU.
const TARGETS: [&str; 3] = ["aarch64-linux-android", aarch64::TARGET, "aarch64-pc-windows-msvc"];

/// What runs on them: the program, the libraries, and plugins, with all that they are made of.
const PACKAGES: [&str; 3] = ["qhexrt", "qhx-jni", "qhx-cli"];

/// Checks every installed target, and fails if one is not installed where all are required.
pub(crate) fn check(arguments: &[String]) -> Result<()> {
    let require_all = cargo::flag("--require-all", arguments)?;
    let missing = run(&[])?;
    if require_all && !missing.is_empty() {
        return Err(format!("targets that are not installed: {}", missing.join(", ")));
    }
    Ok(())
}

/// Checks every installed target but those that were `built`, and returns those that are not installed.
pub(crate) fn run(built: &[&str]) -> Result<Vec<&'static str>> {
    let mut missing = Vec::new();
    for target in TARGETS.into_iter().filter(|target| !built.contains(target)) {
        if !cargo::has_target(target) {
            eprintln!("skipped: target {target} (install it: rustup target add {target})");
            missing.push(target);
            continue;
        }
        // As what runs under emulators: macros and build scripts are built once for all of them.
        let mut check = cargo(&["check", "--profile", "emulated", "--target", target]);
        for package in PACKAGES.iter().chain(&PLUGINS) {
            check.args(["--package", package]);
        }
        check.args(["--features", "qhx-cli/builtin-ops"]);
        cargo::run(&mut check)?;
    }
    Ok(missing)
}
