//! Paths of the checkout, cargo and built programs, for tests and `cargo xtask`.
//!
//! All of it is asked for when a program runs. A path that was compiled in is wrong as soon as the checkout moves,
//! and where two checkouts share a target folder one of them runs what was compiled in the other.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Crates of dynamic plugins that belong beside the program.
pub const PLUGINS: [&str; 6] = [
    "qhx-ops-gemma4-plugin",
    "qhx-ops-llama-plugin",
    "qhx-ops-phimoe-plugin",
    "qhx-ops-qwen35-plugin",
    "qhx-ops-qwen3vl-plugin",
    "qhx-ops-speech-plugin",
];

/// The folder of the workspace: the one above the crate that cargo runs, or else above the current folder. `None`
/// outside of a checkout.
pub fn find_workspace() -> Option<PathBuf> {
    let of_crate = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let starts = [of_crate, std::env::current_dir().ok()];
    starts.iter().flatten().find_map(|start| above(start))
}

/// The folder of the workspace.
///
/// # Panics
///
/// Outside of a checkout.
pub fn workspace() -> &'static Path {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    FOUND.get_or_init(|| find_workspace().expect("the program runs inside a checkout of qhx"))
}

/// The first folder from `start` upwards that is the workspace's.
fn above(start: &Path) -> Option<PathBuf> {
    start.ancestors().find(|folder| folder.join("xtask/Cargo.toml").is_file()).map(Path::to_owned)
}

/// The folder of a checkpoint among the fixtures.
pub fn fixture(name: &str) -> PathBuf {
    workspace().join("tests/fixtures").join(name)
}

/// The cargo that runs this program, or else the one on the search path.
pub fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// The program `name` of the package under test.
///
/// # Panics
///
/// When this program has no path.
pub fn program(name: &str) -> PathBuf {
    if let Some(path) = std::env::var_os(format!("CARGO_BIN_EXE_{name}")) {
        return path.into();
    }
    // Cargo before 1.94 says it only while it compiles. It puts tests into `<profile>/deps`.
    let test = std::env::current_exe().expect("the test has a path");
    let profile = test.ancestors().nth(2).unwrap_or(Path::new("."));
    profile.join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_is_found_from_any_folder_in_it() {
        let root = workspace();
        assert!(root.join("Cargo.lock").is_file(), "{}", root.display());
        for inside in ["", "xtask/src", "tests/fixtures/qwen35-tied", "examples/smolvlm/op"] {
            assert_eq!(above(&root.join(inside)).as_deref(), Some(root), "{inside}");
        }
        assert_eq!(above(&std::env::temp_dir()), None);
    }

    #[test]
    fn every_folder_of_host_ops_has_its_plugin_in_the_list() {
        let entries = std::fs::read_dir(workspace()).expect("the workspace can be read");
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut found: Vec<_> = names
            .filter(|name| name.starts_with("ops-"))
            .map(|family| format!("qhx-{family}-plugin"))
            .collect();
        found.sort();
        assert_eq!(found, PLUGINS);
    }

    #[test]
    fn a_fixture_is_a_folder_of_the_checkout() {
        assert!(fixture("qwen35-tied").join("config.json").is_file());
    }
}
