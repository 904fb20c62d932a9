//! The place of somebody who has the program and a clone, and builds a family of their own: an
//! empty folder outside the repository, and the commands of a page of the documentation.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use qhx_base::hash::sha256;
use qhx_base::{CancelToken, ErrorKind};
use qhx_core::engine::Model;
use qhx_exec::backend::Backend;

use crate::plugin_files::{self, workspace};
use crate::tiny;

/// A code block of a page with commands for a shell.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    /// The commands.
    pub commands: String,
    /// Output of the last command as the page gives it: "It prints `…`."
    pub prints: Option<String>,
}

/// The blocks of commands (` ```sh `) under a heading of a page in `docs`.
pub fn commands(page: &str, heading: &str) -> Vec<Block> {
    let path = workspace().join("docs").join(page);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let start = text.find(&format!("\n## {heading}\n"));
    let start = start.unwrap_or_else(|| panic!("{page} has no section {heading:?}")) + 1;
    let section = &text[start..];
    let end = section[3..].find("\n## ").map_or(section.len(), |end| end + 3);
    let mut blocks: Vec<Block> = Vec::new();
    let mut lines = section[..end].lines();
    while let Some(line) = lines.next() {
        if line.trim() == "```sh" {
            let body: Vec<_> =
                lines.by_ref().map(str::trim).take_while(|line| *line != "```").collect();
            blocks.push(Block { commands: body.join("\n"), prints: None });
        } else if let Some(rest) = line.trim().strip_prefix("It prints `") {
            let text = rest.split('`').next().unwrap_or_default();
            if let Some(block) = blocks.last_mut() {
                block.prints = Some(text.to_owned());
            }
        }
    }
    assert!(!blocks.is_empty(), "{page}, section {heading:?}: no commands");
    blocks
}

/// SHA-256 of each file.
pub fn hashes(files: &[PathBuf]) -> Vec<(PathBuf, String)> {
    let hash = |file: &PathBuf| {
        let opened = fs::File::open(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let hash = sha256(ErrorKind::Artifact, file, opened, |_| Ok(()));
        (file.clone(), hash.unwrap_or_else(|e| panic!("{e}")))
    };
    files.iter().map(hash).collect()
}

/// Opens a bundle with one plugin, and none that is installed.
pub fn open(bundle: &Path, plugin: &Path, backend: Arc<dyn Backend>) -> Model {
    let plugins = plugin_files::only(&[plugin.to_owned()]);
    tiny::open_by(bundle, backend, &plugins, &CancelToken::new())
        .unwrap_or_else(|e| panic!("{}: {e}", bundle.display()))
}

/// An empty folder outside the repository, with `qhx` on the search path and nothing beside it.
#[derive(Debug)]
pub struct Outside {
    root: tempfile::TempDir,
}

impl Outside {
    /// Makes the folder and copies the program `qhx` to a place of its own.
    pub fn new(qhx: &Path) -> Self {
        let root = tempfile::tempdir().expect("a temporary folder");
        for folder in ["bin", "work"] {
            fs::create_dir(root.path().join(folder)).expect("a folder in it");
        }
        let name = qhx.file_name().expect("a program has a name");
        fs::copy(qhx, root.path().join("bin").join(name)).expect("the program can be copied");
        Self { root }
    }

    /// The folder in which commands start.
    pub fn folder(&self) -> PathBuf {
        self.root.path().join("work")
    }

    /// Runs blocks of commands one after the other in one shell that stops at the first failure.
    /// Returns what each printed, which is what the page says it prints.
    pub fn run(&self, blocks: &[Block]) -> Vec<String> {
        let mut script = "set -euo pipefail\n".to_owned();
        let output = |index: usize| self.root.path().join(format!("block-{index}"));
        for (index, block) in blocks.iter().enumerate() {
            script += &format!("exec >'{}'\n{}\n", output(index).display(), block.commands);
        }
        let mut shell = Command::new("bash");
        shell.args(["-c", &script]).current_dir(self.folder());
        self.environment(&mut shell);
        let done = shell.output().expect("bash runs");
        let errors = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{script}\n{errors}");
        let printed = |(index, block): (usize, &Block)| {
            let printed = fs::read_to_string(output(index)).expect("a block's output is text");
            if let Some(expected) = &block.prints {
                let last = printed.trim_end_matches('\n');
                assert!(last.ends_with(expected), "{}\nprints {last:?}", block.commands);
            }
            printed
        };
        blocks.iter().enumerate().map(printed).collect()
    }

    /// Runs `qhx` and returns its success and with what it printed on both streams.
    pub fn qhx(&self, arguments: &[&str]) -> (bool, String) {
        let (code, streams) = self.program(&self.root.path().join("bin/qhx"), arguments);
        (code == Some(0), streams.concat())
    }

    /// Runs any program. Its exit code, and what it printed as results and otherwise.
    pub fn program(&self, file: &Path, arguments: &[&str]) -> (Option<i32>, [String; 2]) {
        let mut command = Command::new(file);
        command.args(arguments).current_dir(self.folder());
        self.environment(&mut command);
        let output = command.output().unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), [text(&output.stdout), text(&output.stderr)])
    }

    fn environment(&self, command: &mut Command) {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dirs =
            std::iter::once(self.root.path().join("bin")).chain(std::env::split_paths(&path));
        let path = std::env::join_paths(dirs).expect("a search path");
        command
            .env("PATH", path)
            .env("QHX", workspace())
            .env("XDG_DATA_HOME", self.root.path().join("data"))
            .env("XDG_CACHE_HOME", self.root.path().join("cache"))
            .env_remove("QHX_PLUGIN_PATH")
            // What cargo makes lies in the folder, as it would for anybody; what it needs on the
            // way is kept for the next time.
            .env_remove("CARGO_TARGET_DIR");
        build_once(command);
    }
}

/// Runs the tests of an example that is a workspace of its own, and returns what they print.
pub fn test_example(name: &str) -> String {
    let target = tempfile::tempdir().expect("a temporary folder");
    let mut command = qhx_paths::cargo();
    command
        .args(["test", "--release", "--manifest-path"])
        .arg(workspace().join("examples").join(name).join("Cargo.toml"))
        .env("CARGO_TARGET_DIR", target.path());
    build_once(&mut command);
    let output = command.output().expect("cargo runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Keeps what cargo needs on the way, for all that is built outside.
fn build_once(command: &mut Command) {
    command
        .env("CARGO_BUILD_BUILD_DIR", plugin_files::beside("outside"))
        // The page builds for use, the test for an answer.
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
}
