//! Fetches the QNN libraries ([`qhx::libraries`]) for a machine.
//!
//! The libraries are Qualcomm's and come from the wheels `onnxruntime-qnn` on the Python package
//! index, which pip downloads. A wheel's two folders stay side by side: the libraries look for
//! their C++ runtime in `../onnxruntime_qnn.libs`.

use std::path::{Path, PathBuf};

use qhx::libraries::{
    HTP_FILE, LIBRARY_FOLDER, Libraries, SYSTEM_FILE, folder, how_to_get, installed,
};
use qhx::machines::{Machine, REQUIREMENT, VERSION};
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_qnn::Library;

use crate::wheel::Wheels;

pub use crate::wheel::FetchStep;

/// Options of an installation.
#[derive(Debug, Clone, Default)]
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
/// let installed = install(&InstallOptions::default(), |_| {})?;
/// println!("{}", installed.folder.display());
/// # Ok::<(), qhx::Error>(())
/// ```
///
/// # Errors
/// When there are no libraries for the machine, when there is no Python, when pip fails, when the wheel is not the one
/// that is expected, when the libraries do not load, and when it is cancelled.
pub fn install(options: &InstallOptions, mut on_step: impl FnMut(FetchStep)) -> Result<Installed> {
    let Some(machine) = options.machine.or(Machine::this()) else {
        return Err(Error::new(
            ErrorKind::Runtime,
            format!(
                "{REQUIREMENT} is for {}, this is {} {}",
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
    let otherwise = "give a downloaded wheel with --wheel FILE";
    let wheels = Wheels::new("the libraries", otherwise, cancel)?;
    let files = match &options.wheel {
        Some(wheel) => vec![wheel.clone()],
        None => wheels.download(&[machine.wheel()], staging.path(), &mut on_step)?,
    };
    let unpacked = staging.path().join(VERSION);
    for file in &files {
        wheels.check(&machine.wheel(), file)?;
        on_step(FetchStep::Unpack);
        wheels.unpack(file, &unpacked)?;
    }
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
}
