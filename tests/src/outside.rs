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
use qhx_plugins::Plugins;

use crate::plugin_files::{self, library_name, workspace};
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

/// One plugin, and none that is installed.
fn only(plugin: &Path) -> Plugins {
    plugin_files::only(&[plugin.to_owned()])
}

/// Opens a bundle with one plugin, and none that is installed.
pub fn open(bundle: &Path, plugin: &Path, backend: Arc<dyn Backend>) -> Model {
    tiny::open_by(bundle, backend, &only(plugin), &CancelToken::new())
        .unwrap_or_else(|e| panic!("{}: {e}", bundle.display()))
}

/// The same, with arrays dumped into a folder.
pub fn open_dumping(bundle: &Path, plugin: &Path, backend: Arc<dyn Backend>, dump: &Path) -> Model {
    tiny::open_dumping(bundle, backend, &only(plugin), dump)
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

/// A family whose section of `docs/adding-a-family.md` was followed: its folder has the program, the plugin and the
/// bundles.
#[derive(Debug)]
pub struct Family {
    /// The place where its commands ran.
    pub place: Outside,
    /// The example's copy.
    pub folder: PathBuf,
    /// The plugin.
    pub plugin: PathBuf,
    /// Output of the block for the NPU, if its tier runs.
    pub on_npu: Option<String>,
    name: &'static str,
}

impl Family {
    /// Runs the commands under a heading, which make the example `name`.
    pub fn made(heading: &str, name: &'static str) -> Self {
        let place = Outside::new(&plugin_files::programs()[0]);
        let mut blocks = commands("adding-a-family.md", heading);
        let on_npu = blocks.iter().position(|block| block.commands.contains("--target"));
        let on_npu = on_npu.unwrap_or_else(|| panic!("{heading}: no block for the NPU"));
        if tiny::qnn_tier().is_none() {
            blocks.truncate(on_npu);
        }
        let on_npu = place.run(&blocks).get(on_npu).cloned();
        let folder = place.folder().join(name);
        let plugin = folder.join("target/release").join(library_name(&format!("{name}_op")));
        Self { place, folder, plugin, on_npu, name }
    }

    /// Runs the family's program. Its exit code, and what it printed as results and otherwise.
    pub fn forge(&self, arguments: &[&str]) -> (Option<i32>, [String; 2]) {
        let program = self.folder.join(format!("target/release/{}-forge", self.name));
        self.place.program(&program, arguments)
    }

    /// Makes a bundle in the family's folder: what the program says, and whether it made one.
    pub fn bundle(&self, checkpoint: &Path, out: &str, options: &[&str]) -> (bool, String) {
        let out = self.folder.join(out);
        let paths = [checkpoint, Path::new("--out"), &out];
        let paths = paths.map(|path| path.to_str().expect("a plain path"));
        let (code, streams) = self.forge(&[&paths[..], options].concat());
        (code == Some(0), streams.concat())
    }

    /// Opens a bundle with the family's plugin alone.
    pub fn open(&self, bundle: &Path, backend: Arc<dyn Backend>) -> Model {
        open(bundle, &self.plugin, backend)
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
