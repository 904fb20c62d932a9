//! Makes bundles of LFM2 and LFM2.5: `qhx forge` with one recipe more.

use lfm2_forge as _;

fn main() -> std::process::ExitCode {
    qhx_forge::main()
}
