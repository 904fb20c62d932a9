//! `cargo xtask release`: everything that is handed to others, and the proof that each of it installs and runs.

mod archive;
mod debian;
mod formula;
mod proof;
mod sbom;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::aarch64;
use crate::cargo::{self, PROGRAM, Result, cargo};
use crate::docs::book;
use crate::kotlinc::at;
use crate::python::{self, Kind};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A machine that packages are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Machine {
    target: &'static str,
    /// Debian's name for it.
    debian: &'static str,
    strip: &'static str,
}

const MACHINES: [Machine; 2] = [
    Machine { target: "x86_64-unknown-linux-gnu", debian: "amd64", strip: "strip" },
    Machine { target: aarch64::TARGET, debian: "arm64", strip: "aarch64-linux-gnu-strip" },
];

impl Machine {
    /// True for the machine that this program is for.
    fn is_here(self) -> bool {
        self.target.starts_with(std::env::consts::ARCH)
    }
}

/// Build that the packages of a machine are made of.
#[derive(Debug)]
struct Built {
    machine: Machine,
    /// The folder of the programs and libraries.
    folder: PathBuf,
}

impl Built {
    /// A command of one of the programs, emulated where it is for another machine.
    fn command(&self, program: &str) -> Command {
        let program = self.folder.join(program);
        if self.machine.is_here() {
            return Command::new(program);
        }
        let mut command = Command::new(aarch64::EMULATOR);
        command.args(["-L", aarch64::ROOT]).arg(program);
        command
    }
}

/// Options of a release.
#[derive(Debug)]
pub(crate) struct Options {
    machines: Vec<Machine>,
    profile: String,
    url: String,
    prove: bool,
    wheel: bool,
    book: bool,
}

impl Options {
    /// Reads the arguments.
    ///
    /// # Errors
    /// One of them is not known, or lacks its value.
    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self {
            machines: MACHINES.to_vec(),
            profile: "release".into(),
            url: "https://example.org/qhx".into(),
            prove: true,
            wheel: true,
            book: true,
        };
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let mut value =
                || arguments.next().ok_or_else(|| format!("release: {argument} needs a value"));
            match argument.as_str() {
                "--machine" => {
                    let name = value()?;
                    options.machines.retain(|machine| machine.debian == name);
                    if options.machines.is_empty() {
                        return Err(format!("release: machine {name:?}: expected amd64 or arm64"));
                    }
                }
                "--profile" => options.profile.clone_from(value()?),
                "--url" => options.url = value()?.trim_end_matches('/').to_owned(),
                "--no-proof" => options.prove = false,
                "--no-wheel" => options.wheel = false,
                "--no-book" => options.book = false,
                other => return Err(format!("release: unknown argument {other:?}")),
            }
        }
        Ok(options)
    }
}

/// Makes the packages, tries each, and writes their hashes.
pub(crate) fn run(options: &Options) -> Result<()> {
    let start = Instant::now();
    let out = cargo::target_folder()?.join("release-packages");
    // What another version left would be hashed, too.
    let _ = std::fs::remove_dir_all(&out);
    std::fs::create_dir_all(&out).map_err(at(&out))?;
    let scratch = tempfile::tempdir().map_err(at(&out))?;
    let built = options.machines.iter().map(|machine| build(*machine, &options.profile));
    let built = built.collect::<Result<Vec<_>>>()?;
    // The manual pages and completions are the same for all machines.
    let share = scratch.path().join("share");
    archive::share(&built[0], &share)?;
    let notices = sbom::notices(&sbom::bill(&out)?)?;
    for built in &built {
        let content = archive::Content { built, share: &share, notices: &notices };
        let program = archive::program(&content, scratch.path(), &out)?;
        let library = archive::library(&content, scratch.path(), &out)?;
        let package = debian::package(&content, scratch.path(), &out)?;
        if options.prove {
            debian::lint(&package)?;
            let root = proof::Root::of(built.machine)?;
            let bundle = proof::archive(&root, &program)?;
            proof::library(&root, &library, &bundle)?;
            proof::package(&root, &package)?;
        }
    }
    if options.wheel {
        let kind = if options.profile == "release" { Kind::Release } else { Kind::Tested };
        let wheel = python::wheel(kind, &python::tools()?)?;
        let copy = out.join(wheel.file_name().unwrap_or_default());
        std::fs::copy(&wheel, &copy).map_err(at(&wheel))?;
        if options.prove {
            proof::wheel(&proof::Root::of(MACHINES[0])?, &copy)?;
        }
    }
    if options.book {
        archive::pack(&book()?, &format!("qhx-book-{VERSION}"), &out)?;
    }
    let sums = hashes(&out)?;
    if built.len() == MACHINES.len() {
        formula::homebrew(&sums, &options.url, &out)?;
    }
    for (name, _) in &sums {
        let size = std::fs::metadata(out.join(name)).map_err(at(&out))?.len();
        eprintln!("{:8.2} MiB  {name}", size as f64 / f64::from(1 << 20));
    }
    eprintln!("{}, in {:.0} min", out.display(), start.elapsed().as_secs_f64() / 60.0);
    Ok(())
}

/// Builds the programs and the C library for a machine.
fn build(machine: Machine, profile: &str) -> Result<Built> {
    let mut build = cargo(&["build", "--package", "qhx-cli", "--package", "qhexrt"]);
    build.args(["--lib", "--bins", "--profile", profile, "--features"]);
    build.arg(PROGRAM.split(',').map(|one| format!("qhx-cli/{one}")).collect::<Vec<_>>().join(","));
    let mut folder = cargo::target_folder()?;
    if !machine.is_here() {
        build.args(["--target", machine.target]);
        build.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", aarch64::LINKER);
        folder.push(machine.target);
    }
    cargo::run(&mut build)?;
    folder.push(if profile == "dev" { "debug" } else { profile });
    Ok(Built { machine, folder })
}

/// The time that files of packages have, so that they can be made again: `SOURCE_DATE_EPOCH`, or that of the last
/// commit.
fn epoch() -> Result<String> {
    if let Some(epoch) = std::env::var("SOURCE_DATE_EPOCH").ok().filter(|epoch| !epoch.is_empty()) {
        return Ok(epoch);
    }
    let mut log = Command::new("git");
    log.args(["log", "-1", "--format=%ct"]).current_dir(qhx_paths::workspace());
    Ok(cargo::output(&mut log)?.trim().to_owned())
}

/// Writes `SHA256SUMS` for the files of a folder. Returns their names and hashes.
fn hashes(out: &Path) -> Result<Vec<(String, String)>> {
    let sums = cargo::output(Command::new("sh").args(["-c", "sha256sum *"]).current_dir(out))?;
    let file = out.join("SHA256SUMS");
    std::fs::write(&file, &sums).map_err(at(&file))?;
    let pairs = sums.lines().filter_map(|line| line.split_once("  "));
    Ok(pairs.map(|(hash, name)| (name.to_owned(), hash.to_owned())).collect())
}
