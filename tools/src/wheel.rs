//! Wheels of the Python package index, which pip downloads and Python unpacks.

use std::fs::File;
use std::io::ErrorKind as IoKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output as Finished, Stdio};
use std::time::Duration;

use qhx::machines::Wheel;
use qhx::vars::CACHE_DIR;
use qhx_base::hash::sha256;
use qhx_base::{CancelToken, Error, ErrorKind, Result, error};

/// Interval at which the progress of a download is looked at.
const STEP: Duration = Duration::from_millis(100);

/// A step of fetching that takes time.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FetchStep {
    /// Another process fetches the same, and is waited for.
    Wait,
    /// pip begins to download.
    Download {
        /// Packages with their versions, as pip takes them.
        requirements: String,
        /// Size of the download.
        megabytes: u32,
    },
    /// Bytes that pip has downloaded so far.
    Downloaded(u64),
    /// The download is unpacked.
    Unpack,
}

/// Downloads, compares and unpacks wheels.
pub(crate) struct Wheels<'a> {
    python: &'static str,
    /// Contents of the wheels, in messages.
    what: &'static str,
    /// Other way to get them, in hints.
    otherwise: &'static str,
    cancel: &'a CancelToken,
}

impl<'a> Wheels<'a> {
    /// Wheels of `what`, which can be got `otherwise`, too.
    ///
    /// # Errors
    /// When there is no Python.
    pub(crate) fn new(
        what: &'static str,
        otherwise: &'static str,
        cancel: &'a CancelToken,
    ) -> Result<Self> {
        for python in ["python3", "python"] {
            let check = ["-c", "import sys; sys.exit(sys.version_info < (3, 7))"];
            if finished(Command::new(python).args(check)).is_ok_and(|f| f.status.success()) {
                return Ok(Self { python, what, otherwise, cancel });
            }
        }
        Err(error!(Runtime, "python3 is not on the path; its pip downloads {what}")
            .hint("install it (Debian, Ubuntu: apt-get install python3 python3-pip)"))
    }

    /// Has pip download wheels into a folder, where its temporary files are, too. Returns the files.
    pub(crate) fn download(
        &self,
        wheels: &[Wheel],
        folder: &Path,
        on_step: &mut dyn FnMut(FetchStep),
    ) -> Result<Vec<PathBuf>> {
        let requirements: Vec<_> = wheels.iter().map(|wheel| &*wheel.requirement).collect();
        let megabytes = wheels.iter().map(|wheel| wheel.megabytes).sum();
        on_step(FetchStep::Download { requirements: requirements.join(" "), megabytes });
        let log = folder.join("pip.log");
        let stderr = File::create(&log).map_err(|e| Error::io(ErrorKind::Io, &log, e))?;
        let platforms = wheels.first().map(|wheel| ["--platform", &*wheel.platform]);
        let mut command = Command::new(self.python);
        command
            .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:"])
            .args(["--python-version", "3.11"])
            .args(["--disable-pip-version-check", "--progress-bar", "off", "--no-input"])
            .args(platforms.into_iter().flatten())
            .arg("--dest")
            .arg(folder)
            .args(&requirements);
        for variable in ["TMPDIR", "TEMP", "TMP"] {
            command.env(variable, folder);
        }
        let failed = |e| Error::caused(ErrorKind::Io, format_args!("{}", self.python), e);
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        let mut child = quiet.spawn().map_err(failed)?;
        let status = loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                break status;
            }
            if self.cancel.is_cancelled() {
                // It may have ended meanwhile.
                let _ = child.kill();
                let _ = child.wait();
                break self.cancelled()?;
            }
            on_step(FetchStep::Downloaded(size(folder).min(u64::from(megabytes) * 1_000_000)));
            std::thread::sleep(STEP);
        };
        self.stop_if_cancelled()?;
        if !status.success() {
            let said = std::fs::read(&log).unwrap_or_default();
            return Err(self.pip_failure(&requirements, &String::from_utf8_lossy(&said)));
        }
        let file = |wheel: &Wheel| {
            let file = folder.join(&*wheel.file);
            if file.is_file() {
                return Ok(file);
            }
            Err(error!(Runtime, "pip succeeded, but did not leave {}", wheel.file)
                .hint(self.otherwise))
        };
        wheels.iter().map(file).collect()
    }

    /// Compares a file with the hash of a wheel.
    pub(crate) fn check(&self, wheel: &Wheel, path: &Path) -> Result<()> {
        let file = File::open(path).map_err(|e| {
            let missing = e.kind() == IoKind::NotFound;
            let error = Error::io(ErrorKind::Io, path, e);
            if missing { error.hint("give the wheel's path") } else { error }
        })?;
        let found = sha256(ErrorKind::Artifact, path, file, |_| self.cancel.check())?;
        let Wheel { file: name, sha256: expected, .. } = wheel;
        if found != *expected {
            return Err(error!(Runtime, "{}: sha256 {found}, expected {expected}", path.display())
                .hint(format!("expected {name} as published, unchanged")));
        }
        Ok(())
    }

    /// Unpacks a wheel, or another zip archive.
    pub(crate) fn unpack(&self, archive: &Path, to: &Path) -> Result<()> {
        let mut command = Command::new(self.python);
        let result = finished(command.args(["-m", "zipfile", "-e"]).arg(archive).arg(to));
        self.stop_if_cancelled()?;
        let result =
            result.map_err(|e| Error::caused(ErrorKind::Io, format_args!("{}", self.python), e))?;
        if result.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&result.stderr);
        let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        Err(error!(Io, "{}: cannot be unpacked: {last}", archive.display()).hint(other_folder()))
    }

    fn stop_if_cancelled(&self) -> Result<()> {
        if self.cancel.is_cancelled() { self.cancelled() } else { Ok(()) }
    }

    fn cancelled<T>(&self) -> Result<T> {
        Err(error!(Cancelled, "cancelled; nothing is installed"))
    }

    /// Error for pip's complaint.
    fn pip_failure(&self, requirements: &[&str], stderr: &str) -> Error {
        let Self { python, what, otherwise, .. } = self;
        let has = |needles: &[&str]| needles.iter().any(|needle| stderr.contains(needle));
        let (message, hint) = if has(&["No module named pip"]) {
            let hint = "install it (Debian, Ubuntu: apt-get install python3-pip)";
            ("has no pip".to_owned(), hint.to_owned())
        } else if has(&["no such option", "Unknown option"]) {
            let hint = "upgrade it: python3 -m pip install --upgrade pip";
            ("has a pip that is too old".to_owned(), hint.to_owned())
        } else if has(&["No space left", "File too large", "Disk quota exceeded"]) {
            ("ran out of disk space".to_owned(), other_folder())
        } else if has(UNREACHABLE) {
            let hint = format!("check the network and pip's proxy settings, or {otherwise}");
            ("could not reach the package index".to_owned(), hint)
        } else if has(&["No matching distribution", "Could not find a version"]) {
            let missing = requirements.iter().find(|one| stderr.contains(**one));
            let missing = missing.copied().unwrap_or_default().replace("==", " ");
            let hint =
                format!("pip may use a mirror that lacks it: set PIP_INDEX_URL, or {otherwise}");
            (format!("found no {missing} on the package index in use"), hint)
        } else {
            (format!("could not download {what}"), (*otherwise).to_owned())
        };
        let last = stderr.lines().rev().map(str::trim).find(|line| !line.is_empty());
        let last = last.map(|last| format!(": {last}")).unwrap_or_default();
        error!(Runtime, "{python} {message}{last}").hint(hint)
    }
}

/// Parts of pip's messages about an index that does not answer, or not to the end.
const UNREACHABLE: &[&str] = &[
    "NewConnectionError",
    "ConnectTimeout",
    "ReadTimeout",
    "ProxyError",
    "SSLError",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Connection refused",
    "Network is unreachable",
    "onnection broken",
    "ncomplete",
    "timed out",
];

/// Hint for when there is no room on the disk.
pub(crate) fn other_folder() -> String {
    format!("make room, or set {CACHE_DIR} to a folder elsewhere")
}

fn finished(command: &mut Command) -> std::io::Result<Finished> {
    command.stdin(Stdio::null()).output()
}

/// Bytes of the files in a folder, which change meanwhile.
fn size(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let of = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(data) if data.is_dir() => size(&entry.path()),
        data => data.map_or(0, |data| data.len()),
    };
    entries.map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pip_complaints_are_understood() {
        let cancel = CancelToken::new();
        let wheels = Wheels {
            python: "python3",
            what: "the libraries",
            otherwise: "give a downloaded wheel with --wheel FILE",
            cancel: &cancel,
        };
        for (stderr, message) in [
            ("/usr/bin/python3: No module named pip\n", "has no pip"),
            (
                "WARNING: Retrying … NewConnectionError\nERROR: No matching distribution found\n",
                "could not reach the package index",
            ),
            (
                "error: incomplete-download\n\n× Download failed because not enough bytes were received\n",
                "could not reach the package index",
            ),
            (
                "ERROR: No matching distribution found for onnxruntime-qnn==2.7.0\n",
                "found no onnxruntime-qnn 2.7.0",
            ),
            ("OSError: [Errno 28] No space left on device\n", "ran out of disk space"),
            ("something else\n", "could not download the libraries: something else"),
        ] {
            let error = wheels.pip_failure(&["onnxruntime-qnn==2.7.0"], stderr);
            assert!(error.message().contains(message), "{error}");
            assert!(error.hint_text().is_some(), "{error}");
        }
    }
}
