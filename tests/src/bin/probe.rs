//! Loads the plugin it is asked for and says what it has: the child that tries plugins in tests.

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    qhx_base::child::serve(&arguments, &[qhx_plugins::probe::TASK])
}
