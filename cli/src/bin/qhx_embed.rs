//! The program `qhx_embed`, with the argument order of published bundles.

use std::process::ExitCode;

fn main() -> ExitCode {
    qhx_cli::run_embed()
}
