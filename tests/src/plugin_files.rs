//! Plugin libraries for tests: built on demand, found where cargo puts them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// The folder of the workspace.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// The file name of a plugin library.
pub fn library_name(library: &str) -> String {
    format!("{}{library}{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX)
}

/// Builds the plugin crate `package` of this workspace and answers with its library.
pub fn build(package: &str) -> PathBuf {
    build_in(workspace(), package)
}

/// Builds the plugin crate `package` of the workspace at `root`, into the target folder that this
/// test was built into, so that dependencies are built once. A copy of a workspace must give its
/// plugins other names.
pub fn build_in(root: &Path, package: &str) -> PathBuf {
    let file = run(root, &["--package", package]).join(library_name(&package.replace('-', "_")));
    assert!(file.is_file(), "{} was not built", file.display());
    file
}

/// Builds the library that is the example `name` of `package`.
pub fn build_example(package: &str, name: &str) -> PathBuf {
    let folder = run(workspace(), &["--package", package, "--example", name]).join("examples");
    let file = folder.join(library_name(name));
    assert!(file.is_file(), "{} was not built", file.display());
    file
}

/// Runs `cargo build` and answers with the folder of what it builds.
fn run(root: &Path, what: &[&str]) -> PathBuf {
    let _guard = ONE_AT_A_TIME.lock();
    let mut command = Command::new(env!("CARGO"));
    cargo_build(&mut command, root, what);
    profile_folder().with_file_name("debug")
}

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The folder `<target>/<profile>` that this test was built into.
fn profile_folder() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    test.ancestors().nth(2).expect("tests lie in <target>/<profile>/deps").to_owned()
}

fn cargo_build(command: &mut Command, root: &Path, what: &[&str]) {
    let profile = profile_folder();
    let output = command
        .args(["build", "--quiet"])
        .args(what)
        .arg("--target-dir")
        .arg(profile.parent().expect("a profile lies in the target folder"))
        .current_dir(root)
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "building {what:?} in {} failed:\n{}",
        root.display(),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A folder for a copy of a workspace, in the target folder.
pub fn scratch(name: &str) -> PathBuf {
    profile_folder().with_file_name("test-workspaces").join(name)
}

/// A build of a package in a way of its own. What it makes is copied to a place of its own.
#[derive(Debug, Clone)]
pub struct Build {
    root: PathBuf,
    package: String,
    args: Vec<String>,
    toolchain: Option<String>,
}

impl Build {
    /// Builds `package` of the workspace at `root`, as cargo does when nothing is said.
    pub fn new(root: &Path, package: &str) -> Self {
        let (root, package) = (root.to_owned(), package.to_owned());
        Self { root, package, args: Vec::new(), toolchain: None }
    }

    /// Gives cargo more arguments.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&arg| arg.to_owned()));
        self
    }

    /// Builds with another toolchain.
    #[must_use]
    pub fn toolchain(mut self, name: &str) -> Self {
        self.toolchain = Some(name.to_owned());
        self
    }

    /// The dynamic library.
    pub fn library(&self) -> PathBuf {
        self.build(&library_name(&self.package.replace('-', "_")))
    }

    /// The program.
    pub fn program(&self) -> PathBuf {
        self.build(&format!("{}{}", self.package, std::env::consts::EXE_SUFFIX))
    }

    fn build(&self, file: &str) -> PathBuf {
        let _guard = ONE_AT_A_TIME.lock();
        let mut command = match &self.toolchain {
            None => Command::new(env!("CARGO")),
            Some(toolchain) => {
                let mut command = Command::new("rustup");
                command.args(["run", toolchain, "cargo"]);
                // Those of the running toolchain would win otherwise.
                command.env_remove("RUSTC").env_remove("CARGO").env_remove("RUSTUP_TOOLCHAIN");
                command
            }
        };
        let mut what = vec!["--package", self.package.as_str()];
        what.extend(self.args.iter().map(String::as_str));
        cargo_build(&mut command, &self.root, &what);
        let release = self.args.iter().any(|arg| arg == "--release");
        let profile = if release { "release" } else { "debug" };
        let made = profile_folder().with_file_name(profile).join(file);

        let variant: String = self.args.concat() + self.toolchain.as_deref().unwrap_or_default();
        let variant = variant.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
        let folder = scratch("built").join(if variant.is_empty() { "plain" } else { &variant });
        std::fs::create_dir_all(&folder).expect("the target folder is writable");
        let copy = folder.join(file);
        let bytes = std::fs::read(&made).expect("cargo built it");
        // A file that is loaded already must not be written.
        if std::fs::read(&copy).ok().as_ref() != Some(&bytes) {
            let _ = std::fs::remove_file(&copy);
            std::fs::copy(&made, &copy).expect("the target folder is writable");
        }
        copy
    }
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
