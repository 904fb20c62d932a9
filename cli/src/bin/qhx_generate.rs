//! The program `qhx_generate`, with the argument order of published bundles.

use std::process::ExitCode;

fn main() -> ExitCode {
    qhx_cli::run_generate()
}
