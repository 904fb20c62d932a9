//! Loads the plugin it is given and prints what it has: the child that tries plugins in tests.

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let file = std::env::args_os().nth(1).map(PathBuf::from).unwrap_or_default();
    qhx_plugins::probe::serve(&file, &mut std::io::stdout())
}
