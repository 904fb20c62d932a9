//! Makes bundles of SmolVLM: `qhx forge` with one recipe more.

use smolvlm_forge as _;

fn main() -> std::process::ExitCode {
    qhx_forge::main()
}
