//! Makes bundles of Gemma 3: `qhx forge` with one recipe more.

use gemma3_forge as _;

fn main() -> std::process::ExitCode {
    qhx_forge::main()
}
