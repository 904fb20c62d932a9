//! The frozen plugin and the smallest host, built against one or another interface and in one or
//! another way.
//!
//! Every variant is a workspace of its own with crates of names of its own, so that none picks up
//! what another made, although all share what is built of their dependencies.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::plugin_files::{self, library_name, workspace};

/// Changes a source file, which is given by its path in the folder of the frozen interface.
pub type Edit = fn(&str, String) -> String;

/// The frozen interface with changes, under a name for what is built against it.
#[derive(Debug, Clone, Copy)]
pub struct Variant {
    /// Part of the names of its crates.
    pub name: &'static str,
    /// Changes to the interface and the plugin.
    pub edit: Edit,
    /// Build a host as well, with these features of its crate.
    pub host: Option<&'static [&'static str]>,
}

/// Result of a build.
#[derive(Debug, Clone)]
pub struct Built {
    /// The plugin.
    pub plugin: PathBuf,
    /// The host program, where one was asked for.
    pub host: PathBuf,
}

/// Build options.
#[derive(Debug, Clone, Copy, Default)]
pub struct Way<'a> {
    /// Part of the name of the folder.
    pub name: &'static str,
    /// More arguments for cargo.
    pub args: &'a [&'a str],
    /// In the profile `release`.
    pub release: bool,
    /// Another toolchain than the workspace's.
    pub toolchain: Option<&'a str>,
}

/// No change.
pub fn unchanged(_path: &str, text: String) -> String {
    text
}

/// File that is added to the copied ones.
const ADDED: &str = "header.rs";

/// Copies the text files of `from`, changed by `edit`. Unchanged files stay untouched, so that nothing is built twice;
/// files that an earlier run copied and that are no longer in `from` go.
fn copy(from: &Path, to: &Path, under: &str, edit: &dyn Fn(&str, String) -> String) {
    for entry in fs::read_dir(to).into_iter().flatten().map(|e| e.expect("an entry")) {
        let (name, path) = (entry.file_name(), entry.path());
        if from.join(&name).exists() || name == ADDED {
            continue;
        }
        let gone = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        gone.expect("the target folder is writable");
    }
    for entry in fs::read_dir(from).expect("a folder of sources").map(|e| e.expect("an entry")) {
        let name = entry.file_name().into_string().expect("a name in ASCII");
        let (path, inside) = (entry.path(), format!("{under}{name}"));
        if path.is_dir() {
            copy(&path, &to.join(&name), &format!("{inside}/"), edit);
        } else {
            write(&to.join(&name), &edit(&inside, fs::read_to_string(&path).expect("a text")));
        }
    }
}

fn write(file: &Path, text: &str) {
    if fs::read_to_string(file).ok().as_deref() != Some(text) {
        fs::create_dir_all(file.parent().expect("a file lies in a folder")).expect("a folder");
        fs::write(file, text).expect("the target folder is writable");
    }
}

/// The manifest of a workspace with the dependencies of ours, and `qhx-op` at `op`.
fn manifest(members: &[String], op: &str) -> String {
    let ours =
        fs::read_to_string(workspace().join("Cargo.toml")).expect("the workspace's manifest");
    let dependencies = ours.split("[workspace.dependencies]\n").nth(1).expect("dependencies");
    let dependencies: String = dependencies
        .lines()
        .take_while(|line| !line.starts_with('['))
        .filter(|line| !line.starts_with("qhx-"))
        .map(|line| format!("{line}\n"))
        .collect();
    format!(
        "[workspace]\nresolver = \"3\"\nmembers = {members:?}\n\n\
         [workspace.package]\nedition = \"2024\"\nrust-version = \"1.92\"\n\
         license = \"MIT OR Apache-2.0\"\npublish = false\n\n\
         [workspace.lints.rust]\n\n\
         [workspace.dependencies]\nqhx-op = {{ path = {op:?} }}\n{dependencies}\n\
         [profile.release]\nlto = true\ncodegen-units = 1\n"
    )
}

impl Variant {
    fn package(&self, what: &str) -> String {
        format!("qhx-test-{}-{what}", self.name)
    }

    /// Writes the workspace and returns its folder.
    fn lay_out(&self) -> PathBuf {
        let root = plugin_files::beside("outside").join("variants").join(self.name);
        let fixtures = workspace().join("tests/plugins");
        let frozen = fixtures.join("frozen-1.0");
        // Cargo tells crates apart by their folders' places in their workspaces.
        let (op, plugin, host) = (
            format!("op-{}", self.name),
            format!("plugin-{}", self.name),
            format!("host-{}", self.name),
        );
        copy(&frozen.join("op"), &root.join(&op), "op/", &|path, text| (self.edit)(path, text));
        let rename = |from: &'static str, what: &str| {
            let to = self.package(what);
            move |text: String| text.replace(from, &to)
        };
        let renamed = rename("qhx-test-frozen-plugin", "plugin");
        copy(&frozen.join("plugin"), &root.join(&plugin), "plugin/", &|path, text| match path {
            "plugin/Cargo.toml" => renamed(text),
            _ => (self.edit)(path, text),
        });
        let mut members = vec![op.clone(), plugin];
        if self.host.is_some() {
            let from = fixtures.join("compat-host");
            let renamed = rename("qhx-test-compat-host", "host");
            copy(&from, &root.join(&host), "", &|path, text| match path {
                "Cargo.toml" => renamed(text),
                _ => text,
            });
            let header = workspace().join("plugins/host/src/header.rs");
            let header = fs::read_to_string(header).expect("the check of headers");
            write(&root.join(&host).join("src").join(ADDED), &header);
            members.push(host);
        }
        write(&root.join("Cargo.toml"), &manifest(&members, &op));
        let lock = root.join("Cargo.lock");
        if !lock.exists() {
            fs::copy(workspace().join("Cargo.lock"), lock).expect("the workspace has a lock");
        }
        root
    }

    /// Builds the plugin, and the host where there is one, once a process.
    pub fn build(&self, way: Way<'_>) -> Built {
        static BUILT: Mutex<Option<HashMap<(&str, &str), Built>>> = Mutex::new(None);
        let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
        let built = built.get_or_insert_with(HashMap::new);
        built.entry((self.name, way.name)).or_insert_with(|| self.build_now(way)).clone()
    }

    fn build_now(&self, way: Way<'_>) -> Built {
        let root = self.lay_out();
        let target = root.join(format!("target{}", way.name));
        let mut command = match way.toolchain {
            None => qhx_paths::cargo(),
            Some(toolchain) => {
                let mut command = Command::new("rustup");
                command.args(["run", toolchain, "cargo"]);
                // Those of the running toolchain would win otherwise.
                for variable in ["RUSTC", "CARGO", "RUSTUP_TOOLCHAIN", "RUSTDOC"] {
                    command.env_remove(variable);
                }
                command
            }
        };
        let plugin = self.package("plugin");
        command.args(["build", "--quiet", "--package", &plugin]);
        if let Some(features) = self.host {
            let host = self.package("host");
            command.args(["--package", &host]);
            for feature in features {
                command.args(["--features", &format!("{host}/{feature}")]);
            }
        }
        if way.release {
            command.arg("--release");
        }
        command
            .args(way.args)
            .current_dir(&root)
            .env("CARGO_TARGET_DIR", &target)
            .env("CARGO_BUILD_BUILD_DIR", plugin_files::beside("outside"));
        let output = command.output().expect("cargo runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{} {}:\n{errors}", self.name, way.name);
        let folder = target.join(if way.release { "release" } else { "debug" });
        Built {
            plugin: folder.join(library_name(&plugin.replace('-', "_"))),
            host: folder.join(format!("{}{}", self.package("host"), std::env::consts::EXE_SUFFIX)),
        }
    }
}
