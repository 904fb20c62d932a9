//! Type-checks the runtime for the machines it is made for.

use std::process::Command;

use crate::aarch64;
use crate::cargo::{self, Result, cargo};

/// Phones, boards and laptops with a Hexagon NPU.
const TARGETS: [&str; 3] = ["aarch64-linux-android", aarch64::TARGET, "aarch64-pc-windows-msvc"];

/// Packages that run on them.
const PACKAGES: [&str; 30] = [
    "qhx-base",
    "qhx-types",
    "qhx-exec",
    "qhx-qnn-sys",
    "qhx-qnn",
    "qhx-text",
    "qhx-grammar",
    "qhx-core",
    "qhx-op",
    "qhx-kit",
    "qhx-plugins",
    "qhx-cpu",
    "qhx-hub",
    "qhx-ops-gemma4",
    "qhx-ops-gemma4-plugin",
    "qhx-ops-llama",
    "qhx-ops-llama-plugin",
    "qhx-ops-phimoe",
    "qhx-ops-phimoe-plugin",
    "qhx-ops-qwen35",
    "qhx-ops-qwen35-plugin",
    "qhx-ops-qwen3vl",
    "qhx-ops-qwen3vl-plugin",
    "qhx-ops-speech",
    "qhx-ops-speech-plugin",
    "qhx",
    "qhexrt",
    "qhx-bindings",
    "qhx-jni",
    "qhx-cli",
];

/// Reads the arguments: whether a target that is not installed is a failure.
pub(crate) fn parse(arguments: &[String]) -> Result<bool> {
    match arguments {
        [] => Ok(false),
        [one] if one == "--require-all" => Ok(true),
        other => Err(format!("check-targets: unknown arguments {other:?}")),
    }
}

/// Checks every installed target, and fails if one is not installed where all are required.
pub(crate) fn check(require_all: bool) -> Result<()> {
    let missing = run(&[])?;
    if require_all && !missing.is_empty() {
        return Err(format!("targets that are not installed: {}", missing.join(", ")));
    }
    Ok(())
}

/// Checks every installed target but those that were `built`, and returns those that are not installed.
pub(crate) fn run(built: &[&str]) -> Result<Vec<&'static str>> {
    let installed = cargo::output(Command::new("rustup").args(["target", "list", "--installed"]));
    let installed = installed.unwrap_or_default();
    let mut missing = Vec::new();
    for target in TARGETS.into_iter().filter(|target| !built.contains(target)) {
        if !installed.lines().any(|line| line.trim() == target) {
            eprintln!("skipped: target {target} (install it: rustup target add {target})");
            missing.push(target);
            continue;
        }
        // As what runs under emulators: macros and build scripts are built once for all of them.
        let mut check = cargo(&["check", "--profile", "emulated", "--target", target]);
        for package in PACKAGES {
            check.args(["--package", package]);
        }
        check.args(["--features", "qhx-cli/builtin-ops"]);
        cargo::run(&mut check)?;
    }
    Ok(missing)
}
