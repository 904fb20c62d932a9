//! The program `qhx_generate`, with the argument order of published bundles.

use std::process::ExitCode;

fn main() -> ExitCode {
    qhx::run_generate()
}
