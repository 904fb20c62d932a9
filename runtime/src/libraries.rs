//! The QNN libraries on this machine: what their files are called, where they are installed, which of them is taken.

use std::path::{Path, PathBuf};

use qhx_base::rights::runs_with_extra_rights;
use qhx_base::{Error, Result, error, setters};
use qhx_qnn::{Device, Library, LogLevel, Platform, SystemLibrary};
use serde::Serialize;

use crate::cache;
use crate::machines::Machine;

pub use qhx_qnn::{HTP_FILE, SYSTEM_FILE};

/// The folder of the wheels that holds the libraries.
pub const LIBRARY_FOLDER: &str = "onnxruntime_qnn";

/// Folder that a machine's libraries are installed to.
///
/// # Errors
/// When the user has no cache folder.
pub fn folder(machine: Machine) -> Result<PathBuf> {
    Ok(cache::dir()?.join("qnn").join(machine.folder()))
}

/// The folder of the installed libraries of a machine.
pub fn installed(machine: Machine) -> Option<PathBuf> {
    let folder = folder(machine).ok()?.join(LIBRARY_FOLDER);
    machine.libraries().iter().all(|file| folder.join(file).is_file()).then_some(folder)
}

/// Hint for missing libraries.
pub fn how_to_get() -> &'static str {
    if Machine::this().is_some() {
        "run `qhx libraries install`, or give --htp FILE --qnn-system FILE"
    } else {
        "give --htp FILE --qnn-system FILE with the libraries of the QAIRT SDK for this platform"
    }
}

/// Paths of the two QNN libraries.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Libraries {
    /// libQnnHtp.
    pub htp: PathBuf,
    /// libQnnSystem.
    pub system: PathBuf,
    /// Origin of the libraries, for people.
    pub source: &'static str,
}

impl Libraries {
    /// These two files, which the caller names.
    pub fn new(htp: impl Into<PathBuf>, system: impl Into<PathBuf>) -> Self {
        Self { htp: htp.into(), system: system.into(), source: "given" }
    }

    /// Opens both.
    ///
    /// # Errors
    /// When one of them is missing, or is no such library.
    pub fn open(&self) -> Result<Library> {
        Library::open(&self.htp, Some(&self.system))
    }

    /// Device of this machine, as the libraries report it. `None` on an emulator, which has no chip of its own.
    ///
    /// # Errors
    /// Errors of [`Libraries::open`], and when the device cannot be opened.
    pub fn platform(&self) -> Result<Option<Platform>> {
        if Platform::is_emulated() {
            return Ok(None);
        }
        Device::open(&self.open()?, LogLevel::Error, None)?.platform().map(Some)
    }

    /// Opens both, and asks them for their versions and builds.
    ///
    /// # Errors
    /// Errors of [`Libraries::open`].
    pub fn info(&self) -> Result<LibraryInfo> {
        let library = self.open()?;
        Ok(LibraryInfo {
            htp: self.htp.clone(),
            system: self.system.clone(),
            source: self.source,
            provider: library.provider().to_owned(),
            build_id: library.build_id().to_owned(),
            qairt: library.core_version().qairt(),
            core_api: library.core_version().to_string(),
            htp_api: library.backend_version().to_string(),
            system_api: library.system().version().to_string(),
            emulated: Platform::is_emulated(),
        })
    }
}

/// Versions and builds that the QNN libraries report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LibraryInfo {
    /// libQnnHtp.
    pub htp: PathBuf,
    /// libQnnSystem.
    pub system: PathBuf,
    /// Origin of the libraries, for people.
    pub source: &'static str,
    /// Name of the interface's provider.
    pub provider: String,
    /// Their build.
    pub build_id: String,
    /// Release of QAIRT, where it is known.
    pub qairt: Option<&'static str>,
    /// Version of the QNN interface.
    pub core_api: String,
    /// Version of libQnnHtp's own interface.
    pub htp_api: String,
    /// Version of libQnnSystem's interface.
    pub system_api: String,
    /// They emulate the NPU.
    pub emulated: bool,
}

/// The QNN libraries that a caller names, if any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LibraryFiles {
    /// libQnnHtp; the installed one, or the one beside the program, if it is not named.
    pub htp: Option<PathBuf>,
    /// libQnnSystem; the one beside libQnnHtp if it is not named.
    pub system: Option<PathBuf>,
}

impl LibraryFiles {
    setters! {
        /// libQnnHtp; the installed one, or the one beside the program, by default.
        with_htp(htp: impl Into<Option<PathBuf>>) => htp = htp.into(),
        /// libQnnSystem; the one beside libQnnHtp by default.
        with_system(system: impl Into<Option<PathBuf>>) => system = system.into(),
    }

    /// The libraries: those given, or else those installed, or else those beside the program.
    /// `None` when there are none.
    ///
    /// # Errors
    /// When the system library alone is given, and when a program with more rights than its user is given any: it
    /// takes those beside itself.
    pub fn find(&self) -> Result<Option<Libraries>> {
        self.find_for(runs_with_extra_rights())
    }

    fn find_for(&self, extra_rights: bool) -> Result<Option<Libraries>> {
        if extra_rights {
            return self.none_given().map(|()| beside_program());
        }
        match (&self.htp, &self.system) {
            (Some(htp), system) => {
                let system = system.clone().unwrap_or_else(|| htp.with_file_name(SYSTEM_FILE));
                return Ok(Some(Libraries { htp: htp.clone(), system, source: "given" }));
            }
            (None, Some(system)) => {
                return Err(error!(
                    Usage,
                    "the system library {} is given without libQnnHtp",
                    system.display()
                )
                .hint("give --htp FILE as well, or neither"));
            }
            (None, None) => {}
        }
        if let Some(folder) = Machine::this().and_then(installed) {
            return Ok(Some(in_folder(&folder, "installed libraries")));
        }
        Ok(beside_program())
    }

    /// Errors when a library is given: what the user names would run with the rights of the program's owner.
    fn none_given(&self) -> Result<()> {
        match self.htp.as_ref().or(self.system.as_ref()) {
            None => Ok(()),
            Some(given) => Err(not_with_extra_rights("a QNN library", given)
                .hint(format!("put {HTP_FILE} and {SYSTEM_FILE} beside the program"))),
        }
    }

    /// Same as [`LibraryFiles::find`], with an error that names `what` if there are no libraries.
    ///
    /// # Errors
    /// Errors of [`LibraryFiles::find`], and when there are no libraries.
    pub fn require(&self, what: &str) -> Result<Libraries> {
        self.find()?.ok_or_else(|| {
            error!(
                Runtime,
                "{what} needs {HTP_FILE} and {SYSTEM_FILE}: none are given and none installed"
            )
            .hint(how_to_get())
        })
    }

    /// The system library alone, which reads metadata.
    ///
    /// # Errors
    /// When it is named or found, and cannot be opened.
    pub fn system(&self) -> Result<Option<SystemLibrary>> {
        let path = match &self.system {
            Some(system) if !runs_with_extra_rights() => Some(system.clone()),
            _ => self.find()?.map(|libraries| libraries.system),
        };
        path.map(|path| SystemLibrary::open(&path)).transpose()
    }
}

/// An error: a program with more rights than its user was given `file`, by an option or the environment.
pub fn not_with_extra_rights(what: &str, file: &Path) -> Error {
    error!(
        Usage,
        "{}: this program runs with more rights than its user (set-user-id) and opens no file that the user \
             names as {what}",
        file.display()
    )
}

fn in_folder(folder: &Path, source: &'static str) -> Libraries {
    Libraries { htp: folder.join(HTP_FILE), system: folder.join(SYSTEM_FILE), source }
}

fn beside_program() -> Option<Libraries> {
    let program = dunce::canonicalize(std::env::current_exe().ok()?).ok()?;
    let libraries = in_folder(program.parent()?, "beside the program");
    (libraries.htp.is_file() && libraries.system.is_file()).then_some(libraries)
}

#[cfg(test)]
mod tests {
    use qhx_base::ErrorKind;

    use super::*;

    #[test]
    fn with_more_rights_than_the_user_no_given_library_is_opened() {
        let given = |htp: Option<&str>, system: Option<&str>| LibraryFiles {
            htp: htp.map(PathBuf::from),
            system: system.map(PathBuf::from),
        };
        for args in [given(Some("/x/evil.so"), None), given(None, Some("/x/evil.so"))] {
            let error = args.find_for(true).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(
                error.message().contains("/x/evil.so: this program runs with more rights"),
                "{error}"
            );
        }
        // Installed ones lie in the user's cache folder.
        let found = given(None, None).find_for(true).unwrap();
        assert!(found.is_none_or(|libraries| libraries.source == "beside the program"));
        assert_eq!(given(Some("a"), Some("b")).find_for(false).unwrap().unwrap().source, "given");
    }
}
