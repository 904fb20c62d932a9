//! `cargo xtask release`: everything that is handed to others, and the proof that each of it installs and runs, as far
//! as the machine that makes it can start it.

mod android;
mod archive;
mod debian;
mod elf;
mod formula;
mod maven;
mod oci;
mod proof;
mod report;
mod sbom;
mod wheel;
mod windows;
mod winget;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::aarch64;
use crate::cargo::{self, PROGRAM, Result, cargo};
use crate::docs::book;
use crate::kotlinc::at;
use crate::python::PROGRAMS;
use report::Report;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Machine in the report of what is the same for all of them.
const ANY: &str = "any";

/// State of an artefact that was not started.
const NOT_STARTED: &str = "made, never started";

/// System of a machine that packages are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    Linux,
    Windows,
    Android,
}

/// A machine that packages are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Machine {
    /// Debian's name of a machine with Linux, and part of the names of packages for others.
    name: &'static str,
    target: &'static str,
    system: System,
}

const MACHINES: [Machine; 5] = [
    Machine { name: "amd64", target: "x86_64-unknown-linux-gnu", system: System::Linux },
    Machine { name: "arm64", target: aarch64::TARGET, system: System::Linux },
    Machine { name: "windows-x64", target: crate::windows::TARGET, system: System::Windows },
    Machine { name: "windows-arm64", target: windows::ARM, system: System::Windows },
    Machine { name: "android-arm64", target: crate::android::TARGET, system: System::Android },
];

impl Machine {
    /// True for the machine that this program is for.
    fn is_here(self) -> bool {
        self.system == System::Linux && self.target.starts_with(std::env::consts::ARCH)
    }

    /// The file of a program.
    fn program(self, name: &str) -> String {
        format!("{name}{}", if self.system == System::Windows { ".exe" } else { "" })
    }

    /// Description of a proof of programs for this machine, with the emulator where one ran them.
    fn started(self, what: &str) -> String {
        format!("{what}{}", if self.is_here() { "" } else { ", under qemu-aarch64" })
    }

    /// Missing requirement of the programs for this machine, with how to get it.
    fn missing(self) -> Option<String> {
        match self.system {
            System::Linux => None,
            System::Windows => windows::missing(self),
            System::Android => crate::android::missing(),
        }
    }
}

/// Build that the packages of a machine are made of.
#[derive(Debug)]
struct Built {
    machine: Machine,
    profile: String,
    /// The folder of the programs and libraries.
    folder: PathBuf,
}

impl Built {
    /// The programs.
    fn files(&self) -> Vec<PathBuf> {
        PROGRAMS.iter().map(|name| self.folder.join(self.machine.program(name))).collect()
    }

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
        let mut names = Vec::new();
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let mut value =
                || arguments.next().ok_or_else(|| format!("release: {argument} needs a value"));
            match argument.as_str() {
                "--machine" => names.push(value()?.as_str()),
                "--profile" => options.profile.clone_from(value()?),
                "--url" => options.url = value()?.trim_end_matches('/').to_owned(),
                "--no-proof" => options.prove = false,
                "--no-wheel" => options.wheel = false,
                "--no-book" => options.book = false,
                other => return Err(format!("release: unknown argument {other:?}")),
            }
        }
        let known = MACHINES.map(|machine| machine.name);
        if let Some(name) = names.iter().find(|name| !known.contains(name)) {
            return Err(format!("release: machine {name:?}: expected {}", known.join(", ")));
        }
        options.machines.retain(|machine| names.is_empty() || names.contains(&machine.name));
        Ok(options)
    }
}

/// Makes the packages, tries each, and writes their hashes and how far they were started.
pub(crate) fn run(options: &Options) -> Result<()> {
    let start = Instant::now();
    let out = cargo::target_folder()?.join("release-packages");
    // What another version left would be hashed, too.
    let _ = std::fs::remove_dir_all(&out);
    std::fs::create_dir_all(&out).map_err(at(&out))?;
    let scratch = tempfile::tempdir().map_err(at(&out))?;
    let mut release =
        Release { options, out: &out, scratch: scratch.path(), report: Report::default() };
    release.machines()?;
    release.any_machine()?;
    let table = release.report.write(&out)?;
    hashes(&out)?;
    eprint!("\n{table}\n");
    eprintln!("{}, in {:.0} min", out.display(), start.elapsed().as_secs_f64() / 60.0);
    Ok(())
}

/// A release that is being made.
#[derive(Debug)]
struct Release<'a> {
    options: &'a Options,
    /// The folder of the packages.
    out: &'a Path,
    scratch: &'a Path,
    report: Report,
}

impl Release<'_> {
    /// Builds the programs for each machine, and makes and tries their packages.
    fn machines(&mut self) -> Result<()> {
        let mut built = Vec::new();
        for machine in &self.options.machines {
            match machine.missing() {
                Some(why) => {
                    let what = match machine.system {
                        System::Linux => "Linux packages",
                        System::Windows => "Windows zip",
                        System::Android => "Android archive",
                    };
                    self.report.skipped(machine.name, what, &why);
                }
                None => built.push(build(*machine, &self.options.profile)?),
            }
        }
        let share = self.scratch.join("share");
        // The manual pages and completions are the same for all machines.
        if let Some(built) = built.iter().find(|built| built.machine.system == System::Linux) {
            archive::share(built, &share)?;
        }
        for built in &built {
            let (file, bill) = sbom::bill(built.machine, self.out)?;
            self.report.made(built.machine.name, &file, "made")?;
            let notices = sbom::notices(&bill)?;
            let content = archive::Content { built, share: &share, notices: &notices };
            match built.machine.system {
                System::Linux => self.linux(&content)?,
                System::Windows => self.windows(&content)?,
                System::Android => self.android(&content)?,
            }
        }
        Ok(())
    }

    fn linux(&mut self, content: &archive::Content<'_>) -> Result<()> {
        let (machine, out) = (content.built.machine, self.out);
        let program = archive::program(content, self.scratch, out)?;
        let library = archive::library(content, self.scratch, out)?;
        let package = debian::package(content, self.scratch, out)?;
        let wheel = self.options.wheel.then(|| wheel::wheel(content, self.scratch, out));
        let wheel = wheel.transpose()?;
        let started = if self.options.prove {
            debian::lint(&package)?;
            let root = proof::Root::of(machine)?;
            let bundle = proof::archive(&root, &program)?;
            proof::library(&root, &library, &bundle)?;
            proof::package(&root, &package)?;
            if let Some(wheel) = &wheel {
                proof::wheel(&root, wheel)?;
            }
            [
                "unpacked in a bare Debian 12, ran demo and server",
                "unpacked there, programs in C with both libraries ran",
                "installed there by dpkg, ran demo and server, purged",
                "installed there by pip, ran demo, server and module",
            ]
            .map(|what| machine.started(what))
        } else {
            [NOT_STARTED; 4].map(str::to_owned)
        };
        let made = [Some(program.clone()), Some(library), Some(package), wheel];
        for (artefact, started) in made.iter().zip(started) {
            if let Some(artefact) = artefact {
                self.report.made(machine.name, artefact, &started)?;
            }
        }
        let image = match self.options.prove {
            true => oci::proof(machine, &program, self.scratch)?,
            false => None,
        };
        match image {
            Some(image) => {
                self.report.row([machine.name, oci::DOCKERFILE, &image.size, &image.started]);
            }
            None if self.options.prove => {
                let why = "not built: buildah is not installed (apt-get install buildah)";
                self.report.row([machine.name, oci::DOCKERFILE, "", why]);
            }
            None => self.report.row([machine.name, oci::DOCKERFILE, "", "not built"]),
        }
        Ok(())
    }

    fn windows(&mut self, content: &archive::Content<'_>) -> Result<()> {
        let zip = windows::program(content, self.scratch, self.out)?;
        let started = windows::started(content.built.machine, &zip, self.options.prove)?;
        self.report.made(content.built.machine.name, &zip, &started)
    }

    fn android(&mut self, content: &archive::Content<'_>) -> Result<()> {
        let archive = android::program(content, self.scratch, self.out)?;
        let started = android::started(content)?;
        self.report.made(content.built.machine.name, &archive, &started)
    }

    /// Makes the descriptions for package managers, the Kotlin library and the book.
    fn any_machine(&mut self) -> Result<()> {
        let Options { machines, url, .. } = self.options;
        let has = |system| machines.iter().any(|machine| machine.system == system);
        let sums = hashes(self.out)?;
        if has(System::Linux) {
            match formula::homebrew(&sums, url, self.out) {
                Ok(file) => self.report.made(ANY, &file, NOT_STARTED)?,
                Err(why) => self.report.skipped(ANY, "formula for Homebrew", &why),
            }
        }
        if has(System::Windows) {
            match winget::manifest(&sums, url, self.out) {
                Ok(files) => self.report.made(ANY, &files, "its YAML was checked")?,
                Err(why) => self.report.skipped(ANY, "manifest for winget", &why),
            }
        }
        if has(System::Android) {
            match maven::repository(self.out, &self.options.profile) {
                Ok((file, started)) => self.report.made(ANY, &file, &started)?,
                Err(why) => self.report.skipped(ANY, "AAR in a Maven repository", &why),
            }
        }
        if self.options.book {
            let book = archive::pack(&book()?, &format!("qhx-book-{VERSION}"), self.out)?;
            self.report.made(ANY, &book, "its links were checked")?;
        }
        Ok(())
    }
}

/// Builds the programs for a machine, and on Linux the C library.
fn build(machine: Machine, profile: &str) -> Result<Built> {
    let mut build = match machine.system {
        System::Windows => windows::cargo(machine)?,
        System::Linux | System::Android => cargo(&["build"]),
    };
    build.args(["--package", "qhx-cli", "--lib", "--bins", "--profile", profile, "--features"]);
    build.arg(PROGRAM.split(',').map(|one| format!("qhx-cli/{one}")).collect::<Vec<_>>().join(","));
    let mut folder = cargo::target_folder()?;
    match machine.system {
        System::Linux => build.args(["--package", "qhexrt"]),
        System::Windows => &mut build,
        System::Android => crate::android::link(&mut build)?,
    };
    if !machine.is_here() {
        build.args(["--target", machine.target]);
        build.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", aarch64::LINKER);
        folder.push(machine.target);
    }
    cargo::run(&mut build)?;
    folder.push(if profile == "dev" { "debug" } else { profile });
    Ok(Built { machine, profile: profile.to_owned(), folder })
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
    let sums = cargo::output(
        Command::new("sh")
            .args(["-c", "find * -type f ! -name SHA256SUMS | LC_ALL=C sort | xargs sha256sum"])
            .current_dir(out),
    )?;
    let file = out.join("SHA256SUMS");
    std::fs::write(&file, &sums).map_err(at(&file))?;
    let pairs = sums.lines().filter_map(|line| line.split_once("  "));
    Ok(pairs.map(|(hash, name)| (name.to_owned(), hash.to_owned())).collect())
}
