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
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    let test = std::env::current_exe().expect("the test has a path");
    let profile = test.ancestors().nth(2).expect("tests lie in <target>/<profile>/deps");
    let output = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", package, "--target-dir"])
        .arg(profile.parent().expect("a profile lies in the target folder"))
        .current_dir(root)
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "building {package} failed:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let file = profile.with_file_name("debug").join(library_name(&package.replace('-', "_")));
    assert!(file.is_file(), "{} was not built", file.display());
    file
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
