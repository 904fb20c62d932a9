//! The tier that runs programs for AArch64 Linux under qemu: unit tests of the core, the kit and the CPU backend, and
//! `qhx` with Qualcomm's own libraries for boards, up to the door of the DSP.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo::{self, Result, cargo, works};

/// Boards with a Hexagon NPU.
pub(crate) const TARGET: &str = "aarch64-unknown-linux-gnu";

pub(crate) const LINKER: &str = "aarch64-linux-gnu-gcc";
pub(crate) const STRIP: &str = "aarch64-linux-gnu-strip";
pub(crate) const EMULATOR: &str = "qemu-aarch64";
/// Folder of the libraries for AArch64 in Debian's and Ubuntu's packages.
pub(crate) const ROOT: &str = "/usr/aarch64-linux-gnu";

/// Packages to build: the program, one plugin, and stand-ins for parts of a board.
const BUILT: [&str; 3] = ["qhx-cli", "qhx-ops-llama-plugin", "qhx-stand-ins"];

/// Packages whose unit tests run.
const UNITS: [&str; 12] = [
    "qhx-base",
    "qhx-types",
    "qhx-exec",
    "qhx-qnn-sys",
    "qhx-qnn",
    "qhx-text",
    "qhx-core",
    "qhx-op",
    "qhx-kit",
    "qhx-cpu",
    "qhx",
    "qhx-cli",
];

/// Unit tests that take minutes under the emulator, or limit the time of what they try: text is the same everywhere, and
/// so are spans of speech.
const SLOW: [&str; 9] = [
    "every_combination_draws_from_the_reference_distribution",
    "grammar::",
    "jinja::",
    "manifest::chat::",
    "matmul_tests::",
    "stream::",
    "tokenizer::",
    "transcriber::live::",
    "transformers::",
];

/// Missing requirement of the tier on this machine, with what installs it.
pub(crate) fn missing() -> Option<&'static str> {
    if !works(Command::new(EMULATOR).arg("--version")) {
        return Some("qemu-aarch64 is not installed: apt-get install qemu-user");
    }
    if !works(Command::new(LINKER).arg("--version")) {
        return Some(
            "the cross compiler is not installed: apt-get install gcc-aarch64-linux-gnu \
             libc6-dev-arm64-cross",
        );
    }
    // It prints the bare name of a file that it does not find.
    let has = |library: &str| {
        let asked = Command::new(LINKER).arg(format!("-print-file-name={library}")).output();
        asked.is_ok_and(|output| output.stdout.contains(&b'/'))
    };
    if !has("libstdc++.so.6") || !has("libatomic.so.1") {
        return Some(
            "libraries that QNN needs are not installed: apt-get install \
             libstdc++6-arm64-cross libatomic1-arm64-cross",
        );
    }
    (!cargo::has_target(TARGET))
        .then_some("the target is not installed: rustup target add aarch64-unknown-linux-gnu")
}

/// The folder of the QNN libraries for boards, which `qhx`, the program for this machine, installs.
pub(crate) fn libraries(qhx: &Path) -> Result<PathBuf> {
    let mut install = Command::new(qhx);
    let folder = cargo::output(install.args(["libraries", "install", "--for", "linux-aarch64"]))?;
    Ok(folder.trim_end().into())
}

/// Settings of the emulator, which reach the processes that programs start, too. `root` has the libraries, and the
/// library `starter` has the emulator run those processes.
fn emulate(root: &Path, starter: &Path) -> [(&'static str, String); 3] {
    [
        ("QEMU_LD_PREFIX", root.display().to_string()),
        ("QEMU_SET_ENV", format!("LD_PRELOAD={}", starter.display())),
        ("QHX_TEST_EMULATOR", EMULATOR.into()),
    ]
}

/// Builds everything and runs the unit tests. Returns the program. `test` runs a command of tests.
pub(crate) fn units(test: impl Fn(&mut Command) -> Result<()>) -> Result<PathBuf> {
    let profile = ["--profile", "emulated", "--target", TARGET];
    // One command, so that what they share is built once.
    let mut build = cross(&["build", "--message-format", "json-render-diagnostics"]);
    for package in BUILT {
        build.args(["--package", package]);
    }
    build.args(profile).args([
        "--features",
        "qhx-cli/builtin-ops",
        "--lib",
        "--bins",
        "--examples",
    ]);
    let messages = cargo::output(&mut build)?;
    let board = cargo::executables(&messages).remove("qhx").ok_or("cargo built no qhx")?;
    let starter = board.with_file_name("examples").join("libexec.so");
    let mut units = cross(&["test", "--lib"]);
    // With the program, whose features what they share was built with.
    for package in UNITS {
        units.args(["--package", package]);
    }
    units.args(["--features", "qhx-cli/builtin-ops"]);
    units
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", EMULATOR)
        .envs(emulate(Path::new(ROOT), &starter));
    units.args(profile).arg("--");
    for slow in SLOW {
        units.args(["--skip", slow]);
    }
    test(&mut units)?;
    Ok(board)
}

/// Runs the tests of boards. `features` are those that `qhx` was tested with.
pub(crate) fn boards(
    board: &Path,
    libraries: &Path,
    features: &str,
    test: impl Fn(&mut Command) -> Result<()>,
) -> Result<()> {
    let mut boards = cargo(&["test", "--package", "qhx-cli", "--features", features]);
    boards.args(["--test", "cli", "board::"]);
    boards.env("QHX_TEST_BOARD", board).env("QHX_TEST_BOARD_LIBRARIES", libraries);
    test(&mut boards)
}

/// A cargo command for the target.
fn cross(arguments: &[&str]) -> Command {
    let mut command = cargo(arguments);
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER);
    command
}
