//! `cargo xtask`: the commands that developers and CI run.

#![expect(clippy::print_stderr, reason = "a developer's tool, whose report is what it prints")]

mod aarch64;
mod android;
mod android_app;
mod cargo;
mod check;
mod clients;
mod demo;
mod docs;
mod files;
mod kotlin;
mod kotlinc;
mod miri;
mod performance;
mod python;
mod release;
mod targets;
mod test;
mod windows;

use std::process::ExitCode;

const HELP: &str = "\
Usage: cargo xtask COMMAND

  demo [ARGS…]      build the program and a plugin in a hurry, then run `qhx run smollm2`, or with --tiny `qhx demo`
  check [--base REVISION]
                    format, lint and test the crates that were changed since the last commit
  test [OPTIONS]    run every check and test
      --require-all   a tier that cannot run is a failure (as does QHX_REQUIRE_TIERS=1)
      --fast          tests only: no formatting, lints, documentation, licences and targets
      --full          every tiny model with every architecture, precision and number of shards
                      on the emulator, a minute of fuzzing a target instead of five seconds,
                      more families with their ops linked in
  fuzz [ARGS…]      feed damaged files to what reads files; --help says more
  miri              run the tests of the op author's kit under Miri (needs a nightly toolchain)
  check-targets     type-check the runtime for phones and laptops
      --require-all   a target that is not installed is a failure
  aarch64           build programs for boards and run them under qemu
  python            build the wheel, install it in a fresh environment and run its tests
  clients           ask `qhx serve` with the official packages of its interfaces
      --full          ask with lm-eval, too, and with many more drawn requests
  performance [SECTION…]
                    run the commands of docs/performance.md again
  wheel [--dev]     build the wheel of the Python package, with the programs in it
  book              check the links of all pages, and make a book of docs/ with mdBook
  kotlin            compile the Kotlin library, lay its archive out and run its tests on a Java virtual machine
  aar               lay the Kotlin library out for Android, with the native part where ANDROID_NDK_HOME is set
  android-app       build the sample application for Android as far as that goes without Android's SDK
  release [OPTIONS] make all packages, start each as far as this machine can, and list how far that was
      --machine NAME  those of one machine, and of further ones where it is given again: amd64, arm64,
                      windows-x64, windows-arm64, android-arm64
      --profile NAME  built by another profile of cargo than release, to try the packages
      --url BASE      where the archives will be, for Homebrew and winget
      --no-proof, --no-wheel, --no-book
                      without the bare systems, the Python packages, the book
  windows           build the program for Windows and run it under Wine
";

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next();
    let rest: Vec<String> = arguments.collect();
    if qhx_paths::find_workspace().is_none() {
        eprintln!("error: this is no checkout of qhx: run `cargo xtask` inside of one");
        return ExitCode::FAILURE;
    }
    let result = match command.as_deref() {
        Some("demo") => demo::run(&rest),
        Some("test") => test::Options::parse(&rest).and_then(|options| test::run(&options)),
        Some("check") => check::run(&rest),
        Some("fuzz") => {
            cargo::run(cargo::cargo(&["run", "--package", "qhx-fuzz", "--"]).args(&rest))
        }
        Some("miri") => miri::run(),
        Some("check-targets") => targets::check(&rest),
        Some("aarch64") => aarch64_tier(),
        Some("performance") => performance::run(&rest),
        Some("python") => python::tools().and_then(|tools| python::test(&tools)),
        Some("clients") => clients(&rest),
        Some("wheel") => python::run(&rest),
        Some("book") => docs::run(&rest),
        Some("kotlin") => kotlin::tier(),
        Some("aar") => android::run(),
        Some("android-app") => android_app::run(),
        Some("release") => release::Options::parse(&rest).and_then(|it| release::run(&it)),
        Some("windows") => windows_tier(),
        Some("help" | "--help" | "-h") => {
            eprint!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Some(other) => Err(format!("unknown command {other:?}\n\n{HELP}")),
        None => Err(HELP.to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn clients(arguments: &[String]) -> cargo::Result<()> {
    let full = cargo::flag("--full", arguments)?;
    let real = test::real(&mut test::Skipped::default());
    clients::test(&clients::tools(full)?, None, real.as_deref(), full)
}

fn aarch64_tier() -> cargo::Result<()> {
    if let Some(why) = aarch64::missing() {
        return Err(why.to_owned());
    }
    let qhx = cargo::build(&["qhx-cli"], &[], "qhx")?;
    let libraries = aarch64::libraries(&qhx)?;
    aarch64::boards(&aarch64::units(cargo::run)?, &libraries, cargo::PROGRAM, cargo::run)
}

fn windows_tier() -> cargo::Result<()> {
    if let Some(why) = windows::missing() {
        return Err(why);
    }
    let qhx = cargo::build(&["qhx-cli", "qhx-ops-llama-plugin"], &[], "qhx")?;
    windows::run(&qhx)
}
