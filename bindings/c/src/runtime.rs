//! What is behind a runtime's handle.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx::libraries::{HTP_FILE, Libraries, SYSTEM_FILE};
use qhx::{BackendChoice, DeviceOptions, LibraryFiles, PluginOptions, vars};

use crate::callbacks;
use crate::fault::{Fault, Result};
use crate::input::RuntimeQuestion;
use crate::model::Model;

/// A runtime.
pub(crate) struct Runtime {
    runtime: qhx::Runtime,
    backend: BackendChoice,
    libraries: LibraryFiles,
    arch: Option<u32>,
}

/// What the device is.
#[derive(Debug, Default)]
pub(crate) struct Device {
    /// Hexagon architecture: 81 for v81.
    pub arch: Option<u32>,
    /// Number of the chip.
    pub soc: Option<u32>,
}

/// A text of an option, or else of a variable.
fn setting(given: Option<String>, variable: &str) -> Result<Option<(String, String)>> {
    let not_utf8 =
        |value: OsString| Fault::usage(format!("{variable}: {} is not UTF-8", value.display()));
    match given {
        Some(text) => Ok(Some((text, "options".to_owned()))),
        None => vars::get(variable)
            .map(|value| value.into_string().map_err(not_utf8))
            .transpose()
            .map(|text| text.map(|text| (text, variable.to_owned()))),
    }
}

fn architecture(text: &str, place: &str) -> Result<u32> {
    let digits = text.strip_prefix('v').unwrap_or(text);
    digits.parse().ok().filter(|_| digits.bytes().all(|b| b.is_ascii_digit())).ok_or_else(|| {
        Fault::usage(format!("{place}: {text:?}, expected an architecture such as v81"))
    })
}

impl Runtime {
    /// Opens nothing but the libraries that are named, to see that they are such.
    pub(crate) fn new(question: RuntimeQuestion) -> Result<Self> {
        #[cfg(feature = "builtin-ops")]
        crate::builtin::link();
        let backend = match setting(question.backend, vars::BACKEND)? {
            Some((text, place)) => {
                text.parse().map_err(|e| Fault::usage(format!("{place}: backend {text:?}: {e}")))?
            }
            None => BackendChoice::Auto,
        };
        let arch = setting(question.device_arch, vars::DEVICE_ARCH)?;
        let arch = arch.map(|(text, place)| architecture(&text, &place)).transpose()?;
        let libraries = libraries(question.htp, question.system, backend)?;
        let mut plugins = PluginOptions::default();
        plugins.dirs.extend(question.plugins);
        let mut builder = qhx::Runtime::builder()
            .backend(backend)
            .libraries(libraries.clone())
            .device(
                DeviceOptions::default()
                    .arch(arch)
                    .cdsprpc(vars::get(vars::CDSPRPC).map(PathBuf::from)),
            )
            .plugins(plugins)
            .progress(Arc::new(|_, _| callbacks::ask_within()));
        if question.threads > 0 {
            builder = builder.threads(question.threads);
        }
        Ok(Self { runtime: builder.build(), backend, libraries, arch })
    }

    /// The device that bundles are opened on.
    pub(crate) fn device(&self) -> Result<Device> {
        let mut device = Device { arch: self.arch, soc: None };
        if self.backend == BackendChoice::Cpu {
            return Ok(device);
        }
        let Some(libraries) = self.libraries.find()? else { return Ok(device) };
        if let Some(platform) = libraries.platform()? {
            device.arch = device.arch.or(platform.arch);
            device.soc = platform.soc;
        }
        Ok(device)
    }

    /// Opens a bundle.
    pub(crate) fn load(&self, manifest: &Path, root: Option<&Path>) -> Result<Model> {
        let bundle = self.runtime.bundle(manifest, root)?;
        Model::new(self.runtime.load(&bundle)?)
    }
}

/// The QNN libraries: those given, or else those of the environment, or else those that are found.
fn libraries(
    htp: Option<PathBuf>,
    system: Option<PathBuf>,
    backend: BackendChoice,
) -> Result<LibraryFiles> {
    let path = |name| vars::get(name).map(PathBuf::from);
    let files = match (htp, system) {
        (None, None) => {
            LibraryFiles::default().with_htp(path(vars::HTP)).with_system(path(vars::SYSTEM))
        }
        (htp, system) => LibraryFiles::default().with_htp(htp).with_system(system),
    };
    if backend == BackendChoice::Cpu {
        return Ok(files);
    }
    match files.find()? {
        // NULL now, and not when the first model is loaded.
        Some(libraries) => {
            libraries.open()?;
            Ok(files)
        }
        // An app's libraries lie where the dynamic loader looks.
        None if Libraries::new(HTP_FILE, SYSTEM_FILE).open().is_ok() => Ok(LibraryFiles::default()
            .with_htp(PathBuf::from(HTP_FILE))
            .with_system(PathBuf::from(SYSTEM_FILE))),
        None => Ok(files),
    }
}
