//! The program `qhx`.

use std::process::ExitCode;

fn main() -> ExitCode {
    qhx_cli::run()
}
