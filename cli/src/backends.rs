//! Finds the QNN libraries and decides what executes a bundle's graphs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_core::backend::Backend;
use qhx_core::qnn::{Library, QnnBackend, QnnOptions, SystemLibrary};
use qhx_core::resident::ResidentBackend;
use qhx_core::{Error, ErrorKind, Manifest, Result};
use qhx_cpu::{CpuBackend, CpuOptions};

use crate::args::{BackendArgs, BackendChoice, LibraryArgs};
use crate::commands::runtime;

/// File name of the HTP library.
pub(crate) const HTP_FILE: &str = if cfg!(windows) { "QnnHtp.dll" } else { "libQnnHtp.so" };
/// File name of the system library.
pub(crate) const SYSTEM_FILE: &str =
    if cfg!(windows) { "QnnSystem.dll" } else { "libQnnSystem.so" };

/// Paths of the two QNN libraries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Libraries {
    pub htp: PathBuf,
    pub system: PathBuf,
    /// Where they come from, for people.
    pub source: &'static str,
}

impl Libraries {
    /// Opens both.
    pub(crate) fn open(&self) -> Result<Library> {
        Library::open(&self.htp, Some(&self.system))
    }
}

impl LibraryArgs {
    /// The libraries: those given, or else those installed, or else those beside the program.
    /// `None` when there are none.
    pub(crate) fn find(&self) -> Result<Option<Libraries>> {
        match (&self.htp, &self.system) {
            (Some(htp), system) => {
                let system = system.clone().unwrap_or_else(|| htp.with_file_name(SYSTEM_FILE));
                return Ok(Some(Libraries { htp: htp.clone(), system, source: "given" }));
            }
            (None, Some(system)) => {
                return Err(Error::new(
                    ErrorKind::Usage,
                    format!("the system library {} is given without libQnnHtp", system.display()),
                )
                .hint("give --htp FILE as well, or neither"));
            }
            (None, None) => {}
        }
        if let Some(folder) = runtime::installed() {
            return Ok(Some(in_folder(&folder, "installed runtime")));
        }
        Ok(beside_program())
    }

    /// As [`LibraryArgs::find`]; none is an error.
    pub(crate) fn require(&self, what: &str) -> Result<Libraries> {
        self.find()?.ok_or_else(|| {
            Error::new(
                ErrorKind::Runtime,
                format!(
                    "{what} needs {HTP_FILE} and {SYSTEM_FILE}: none are given and none installed"
                ),
            )
            .hint(runtime::how_to_get())
        })
    }

    /// The system library alone, which reads metadata.
    pub(crate) fn system(&self) -> Result<Option<SystemLibrary>> {
        let path = match &self.system {
            Some(system) => Some(system.clone()),
            None => self.find()?.map(|libraries| libraries.system),
        };
        path.map(|path| SystemLibrary::open(&path)).transpose()
    }
}

fn in_folder(folder: &Path, source: &'static str) -> Libraries {
    Libraries { htp: folder.join(HTP_FILE), system: folder.join(SYSTEM_FILE), source }
}

fn beside_program() -> Option<Libraries> {
    let program = std::env::current_exe().ok()?.canonicalize().ok()?;
    let libraries = in_folder(program.parent()?, "beside the program");
    (libraries.htp.is_file() && libraries.system.is_file()).then_some(libraries)
}

/// A backend and the reason for it.
pub(crate) struct Chosen {
    pub backend: Arc<dyn Backend>,
    pub reason: String,
}

impl BackendArgs {
    /// Opens the backend for a bundle.
    pub(crate) fn open(&self, manifest: &Manifest, threads: Option<usize>) -> Result<Chosen> {
        let mut chosen = self.choose(manifest, threads)?;
        if let Some(limit) = self.resident {
            chosen.backend = Arc::new(ResidentBackend::new(chosen.backend, limit.into()));
        }
        Ok(chosen)
    }

    fn choose(&self, manifest: &Manifest, threads: Option<usize>) -> Result<Chosen> {
        match self.backend {
            BackendChoice::Cpu => {
                Ok(Chosen { backend: cpu(threads)?, reason: "asked for".to_owned() })
            }
            BackendChoice::Qnn => {
                let libraries = self.libraries.require("backend qnn")?;
                let reason = format!("asked for, {}", libraries.htp.display());
                Ok(Chosen { backend: self.qnn(&libraries)?, reason })
            }
            BackendChoice::Auto => self.auto(manifest, threads),
        }
    }

    fn auto(&self, manifest: &Manifest, threads: Option<usize>) -> Result<Chosen> {
        let libraries = self.libraries.find()?;
        let (binaries, onnx) = forms(manifest)?;
        match (libraries, binaries) {
            (Some(libraries), true) => {
                let backend = self.qnn(&libraries).map_err(|e| offer_cpu(e, &libraries, onnx))?;
                let reason = format!("{} {}", libraries.source, libraries.htp.display());
                Ok(Chosen { backend, reason })
            }
            (Some(_), false) => {
                let reason = "the bundle has no context binaries".to_owned();
                Ok(Chosen { backend: cpu(threads)?, reason })
            }
            (None, _) if onnx => {
                let reason = "no QNN libraries are given or installed".to_owned();
                Ok(Chosen { backend: cpu(threads)?, reason })
            }
            (None, _) => Err(Error::new(
                ErrorKind::Runtime,
                format!(
                    "{}: the bundle has context binaries only, and no QNN libraries are given or \
                     installed to run them",
                    manifest.path.display()
                ),
            )
            .hint(runtime::how_to_get())),
        }
    }

    fn qnn(&self, libraries: &Libraries) -> Result<Arc<dyn Backend>> {
        let options = QnnOptions {
            htp: libraries.htp.clone(),
            system: Some(libraries.system.clone()),
            device_arch: self.device_arch,
            tried: contexts_tried(),
            ..QnnOptions::default()
        };
        Ok(Arc::new(QnnBackend::new(options)?))
    }
}

/// The file that remembers which context binaries crashed a child process, in the user's cache
/// folder.
pub(crate) fn contexts_tried() -> Option<PathBuf> {
    Some(qhx_plugins::search::memory_file()?.with_file_name("contexts-tried.json"))
}

/// The CPU backend.
pub(crate) fn cpu(threads: Option<usize>) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() })?))
}

/// Whether every context is there as a context binary, and as ONNX.
fn forms(manifest: &Manifest) -> Result<(bool, bool)> {
    let artifacts = manifest.open_artifacts();
    let (mut binaries, mut onnx) = (true, true);
    for entry in &manifest.artifacts.contexts {
        if entry.optional.is_some() {
            continue;
        }
        let source = manifest.context_source(&artifacts, &entry.key)?;
        binaries &= source.binary.as_deref().is_some_and(Path::is_file);
        onnx &= !source.onnx.is_empty() && source.onnx.iter().all(|(_, path)| path.is_file());
    }
    let any = !manifest.artifacts.contexts.is_empty();
    Ok((binaries && any, onnx))
}

/// Libraries that are there but do not work are not passed over in silence.
fn offer_cpu(error: Error, libraries: &Libraries, onnx: bool) -> Error {
    let error = error.context(format!("backend qnn ({})", libraries.source));
    if onnx && error.hint_text().is_none() {
        error.hint("--backend cpu runs the bundle's ONNX graphs instead")
    } else {
        error
    }
}
