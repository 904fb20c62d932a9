//! Fetches the QNN libraries ([`qhx::libraries`]) for a machine.
//!
//! The libraries are Qualcomm's and come from the wheels `onnxruntime-qnn` on the Python package
//! index, which pip downloads. A wheel's two folders stay side by side: the libraries look for
//! their C++ runtime in `../onnxruntime_qnn.libs`.

use std::fs::File;
use std::io::ErrorKind as IoKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output as Finished};

use qhx::libraries::{
    HTP_FILE, LIBRARY_FOLDER, Libraries, SYSTEM_FILE, folder, how_to_get, installed,
};
use qhx::machines::{Machine, VERSION, Wheel};
use qhx::vars::CACHE_DIR;
use qhx_base::hash::sha256;
use qhx_base::{CancelToken, Error, ErrorKind, Result, setters};
use qhx_qnn::Library;

/// The wheel's name on the package index.
pub const PACKAGE: &str = "onnxruntime-qnn";

/// Options of an installation.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct InstallOptions {
    /// The machine that the libraries are for; this one if it is `None`.
    pub machine: Option<Machine>,
    /// Install again what is installed already.
    pub force: bool,
    /// Take this copy of the wheel and download nothing.
    pub wheel: Option<PathBuf>,
    /// Stops it between two steps.
    pub cancel: CancelToken,
}

impl InstallOptions {
    /// For this machine.
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// For another machine, or `None` for this one.
        machine: Option<Machine>,
        /// True to install again libraries that are installed already.
        force: bool,
        /// A copy of the wheel, so that nothing is downloaded.
        wheel: Option<PathBuf>,
        /// Token that cancels the installation.
        cancelled_by(cancel: CancelToken) => cancel = cancel,
    }
}

/// A step of installing that takes time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InstallStep {
    /// pip downloads this wheel.
    Download(Wheel),
    /// The wheel is unpacked.
    Unpack,
}

/// Libraries that are installed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Installed {
    /// The machine that they are for.
    pub machine: Machine,
    /// Their folder.
    pub folder: PathBuf,
    /// They were installed already, and nothing was done.
    pub already: bool,
    /// Versions that they report; `None` if nothing was done, and for those of another machine.
    pub version: Option<InstalledVersion>,
}

impl Installed {
    /// Hexagon architectures that there are a stub and a skel for, ascending: 73 for v73. Empty of an emulator.
    pub fn architectures(&self) -> Vec<u32> {
        let Ok(entries) = std::fs::read_dir(&self.folder) else { return Vec::new() };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let names: Vec<_> = names.collect();
        let [start, end] = match self.machine {
            Machine::WindowsArm64 => ["QnnHtpV", "Stub.dll"],
            Machine::LinuxAarch64 | Machine::LinuxX86 => ["libQnnHtpV", "Stub.so"],
        };
        let stubs = names.iter().filter_map(|name| {
            let arch: u32 = name.strip_prefix(start)?.strip_suffix(end)?.parse().ok()?;
            let skel = format!("libQnnHtpV{arch}Skel.so");
            names.contains(&skel).then_some(arch)
        });
        let mut found: Vec<_> = stubs.collect();
        found.sort_unstable();
        found
    }

    /// Why the NPU of this machine does not work with them, such as that they have no stub for its chip; none where it
    /// does, and for an emulator or another machine.
    pub fn refusal(&self) -> Option<Error> {
        if Machine::this() != Some(self.machine) {
            return None;
        }
        let [htp, system] = self.machine.libraries().map(|name| self.folder.join(name));
        match Libraries::new(htp, system).platform() {
            Ok(platform) => no_stub(platform?.arch?, &self.architectures()),
            Err(error) => Some(error),
        }
    }
}

/// The error of a chip that there is no stub for.
fn no_stub(arch: u32, there: &[u32]) -> Option<Error> {
    if there.contains(&arch) {
        return None;
    }
    let list: Vec<_> = there.iter().map(|arch| format!("v{arch}")).collect();
    let message = format!("this chip is v{arch}, and the wheel has stubs for {}", list.join(", "));
    let hint = "take the libraries of the QAIRT SDK or of the vendor: --htp FILE --qnn-system FILE";
    Some(Error::new(ErrorKind::Runtime, message).hint(hint))
}

/// Versions that libraries report.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct InstalledVersion {
    /// Release of QAIRT, where it is known.
    pub qairt: Option<&'static str>,
    /// Their build.
    pub build: String,
}

/// Downloads and unpacks the libraries of a machine into the cache folder, with Python and pip. `on_step` is called
/// before each step that takes time.
///
/// ```no_run
/// use qhx_tools::install::{InstallOptions, install};
///
/// let installed = install(&InstallOptions::new(), |_| {})?;
/// println!("{}", installed.folder.display());
/// # Ok::<(), qhx::Error>(())
/// ```
///
/// # Errors
/// When there are no libraries for the machine, when there is no Python, when pip fails, when the wheel is not the one
/// that is expected, when the libraries do not load, and when it is cancelled.
pub fn install(
    options: &InstallOptions,
    mut on_step: impl FnMut(InstallStep),
) -> Result<Installed> {
    let Some(machine) = options.machine.or(Machine::this()) else {
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
    if let Some(folder) = installed(machine).filter(|_| !options.force) {
        return Ok(Installed { machine, folder, already: true, version: None });
    }
    let cancel = &options.cancel;
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
    let wheel = match &options.wheel {
        Some(wheel) => wheel.clone(),
        None => {
            on_step(InstallStep::Download(machine.wheel()));
            download(python, machine, staging.path(), cancel)?
        }
    };
    check_wheel(machine, &wheel, cancel)?;
    let unpacked = staging.path().join(VERSION);
    on_step(InstallStep::Unpack);
    unpack(python, &wheel, &unpacked, cancel)?;
    // Those of another machine do not load here.
    let version = match Machine::this() {
        Some(this) if this == machine => {
            let library = load(&unpacked.join(LIBRARY_FOLDER))?;
            let (qairt, build) = (library.core_version().qairt(), library.build_id().to_owned());
            Some(InstalledVersion { qairt, build })
        }
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
    Ok(Installed { machine, folder: place.join(LIBRARY_FOLDER), already: false, version })
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
    let Wheel { platform, file, .. } = machine.wheel();
    let requirement = format!("{PACKAGE}=={VERSION}");
    let result = finished(
        Command::new(python)
            .args(["-m", "pip", "download", &requirement, "--no-deps", "--only-binary=:all:"])
            .args(["--platform", platform, "--python-version", "3.11"])
            .args(["--disable-pip-version-check", "--progress-bar", "off", "--no-input"])
            .arg("--dest")
            .arg(folder),
    );
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

/// Hint for when there is no room on the disk.
fn other_folder() -> String {
    format!("{} names another folder for the libraries", CACHE_DIR)
}

/// Error for pip's complaint.
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
    let result = finished(Command::new(python).args(["-m", "zipfile", "-e"]).arg(wheel).arg(to));
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
    fn a_chip_without_a_stub_is_named_with_what_there_is() {
        assert!(no_stub(73, &[68, 73, 81]).is_none());
        let error = no_stub(75, &[68, 73, 81]).unwrap();
        assert_eq!(error.message(), "this chip is v75, and the wheel has stubs for v68, v73, v81");
        assert!(error.hint_text().unwrap().contains("QAIRT SDK"), "{error}");
    }

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
