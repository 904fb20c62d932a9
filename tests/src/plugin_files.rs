//! Plugin libraries for tests: built on demand, found where cargo puts them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use qhx_paths::PLUGINS;
pub use qhx_paths::workspace;
use qhx_plugins::{PluginOptions, Plugins};

/// The file name of a plugin library.
pub fn library_name(library: &str) -> String {
    format!("{}{library}{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX)
}

/// A plugin is built together with the program: alone, it would have the kit and all that it needs compiled once more,
/// with its features only.
const PROGRAM: [&str; 2] = ["--package", "qhx-cli"];

/// Builds the plugin crate `package` of this workspace and returns its library.
pub fn build(package: &str) -> PathBuf {
    let what = [&["--lib", "--package", package], &PROGRAM[..]].concat();
    let file = run(&what).join(library_name(&package.replace('-', "_")));
    assert!(file.is_file(), "{} was not built", file.display());
    file
}

/// Builds the program of the crate `package` of this workspace.
pub fn build_program(package: &str) -> PathBuf {
    let what = [&["--package", package], &PROGRAM[..]].concat();
    run(&what).join(format!("{package}{}", std::env::consts::EXE_SUFFIX))
}

/// Builds the library that is the example `name` of `package`.
pub fn build_example(package: &str, name: &str) -> PathBuf {
    let what = [&["--package", package, "--example", name], &PROGRAM[..]].concat();
    let folder = run(&what).join("examples");
    let file = folder.join(library_name(name));
    assert!(file.is_file(), "{} was not built", file.display());
    file
}

/// The program and the project's plugins, built as `cargo xtask` builds them: files in one folder.
///
/// In one command: alone, each plugin would have the kit compiled once more, with its features only.
pub fn programs() -> Vec<PathBuf> {
    let mut packages = PROGRAM.to_vec();
    let mut names = vec![format!("qhx{}", std::env::consts::EXE_SUFFIX)];
    for package in PLUGINS {
        names.push(library_name(&package.replace('-', "_")));
        packages.extend(["--package", package]);
    }
    let folder = run(&packages);
    names.into_iter().map(|name| folder.join(name)).collect()
}

/// Runs `cargo build`, into the target folder that this test was built into, and returns the folder of what it builds.
fn run(what: &[&str]) -> PathBuf {
    let _guard = ONE_AT_A_TIME.lock();
    let mut command = qhx_paths::cargo();
    cargo_build(&mut command, what);
    profile_folder().with_file_name("debug")
}

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The folder `<target>/<profile>` that this test was built into.
fn profile_folder() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    test.ancestors().nth(2).expect("tests lie in <target>/<profile>/deps").to_owned()
}

fn cargo_build(command: &mut Command, what: &[&str]) {
    let profile = profile_folder();
    let output = command
        .args(["build", "--quiet"])
        .args(what)
        .arg("--target-dir")
        .arg(profile.parent().expect("a profile lies in the target folder"))
        .current_dir(workspace())
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "building {what:?} failed:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A folder for what tests build otherwise, beside that of the profile.
pub fn beside(name: &str) -> PathBuf {
    profile_folder().with_file_name(name)
}

/// These plugins, and none that is installed.
pub fn only(files: &[PathBuf]) -> Plugins {
    let options = PluginOptions::default().files(files.to_vec()).only_named(true);
    Plugins::discover(&options).unwrap_or_else(|e| panic!("{e}"))
}

/// Copies a folder, without build output.
pub fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("the copy can be made");
    for entry in std::fs::read_dir(from).expect("the folder is there") {
        let entry = entry.expect("the folder can be read");
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if !source.is_dir() {
            std::fs::copy(source, target).expect("the copy can be made");
        } else if entry.file_name() != "target" {
            copy_folder(&source, &target);
        }
    }
}
