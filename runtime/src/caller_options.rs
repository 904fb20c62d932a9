//! Options of a runtime by name, for callers without a command line, and the variables that decide the rest.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;

use qhx_base::{Error, ErrorKind, Result};
use qhx_cpu::{Activations, Caches};
use qhx_plugins::PluginOptions;
use serde::Deserialize;

use crate::libraries::{HTP_FILE, Libraries, LibraryFiles, SYSTEM_FILE};
use crate::runtime::{Runtime, RuntimeBuilder};
use crate::settings::{BackendChoice, DecodeOn, DeviceOptions};
use crate::vars;

/// Options of a runtime as an app names them, in words: all of them may be left out.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CallerOptions {
    /// `auto`, `cpu` or `qnn`; [`vars::BACKEND`] otherwise.
    pub backend: Option<String>,
    /// Architecture of the device, such as `v81`; [`vars::DEVICE_ARCH`] otherwise.
    pub device_arch: Option<String>,
    /// libQnnHtp; where neither library is named [`vars::HTP`], or what is found.
    pub htp: Option<PathBuf>,
    /// libQnnSystem; where neither library is named [`vars::SYSTEM`], or the one beside libQnnHtp.
    pub system: Option<PathBuf>,
    /// Folders that are searched for plugins first.
    pub plugins: Vec<PathBuf>,
    /// Threads of the CPU; one a core otherwise.
    pub threads: Option<usize>,
    /// `auto`, `cpu` or `npu`, see [`RuntimeBuilder::decode_on`]; one backend consumes prompts and tokens otherwise.
    pub decode_on: Option<String>,
    /// `auto`, `int16` or `int8`, see [`RuntimeBuilder::cpu_activations`].
    pub cpu_activations: Option<String>,
    /// `f16` or `f32`, see [`RuntimeBuilder::cpu_caches`].
    pub cpu_caches: Option<String>,
}

/// Settings that follow from [`CallerOptions`] and the variables.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ResolvedOptions {
    /// Backend that executes graphs.
    pub backend: BackendChoice,
    /// Hexagon architecture that bundles are chosen for: 81 for v81.
    pub arch: Option<u32>,
    /// The QNN libraries.
    pub libraries: LibraryFiles,
    /// Folders that are searched for plugins first.
    pub plugins: Vec<PathBuf>,
    /// Threads of the CPU, if a number was given.
    pub threads: Option<usize>,
    /// Backend that decodes, if it was named.
    pub decode_on: Option<DecodeOn>,
    /// Precision that the CPU backend rounds activations to.
    pub cpu_activations: Activations,
    /// Format of the CPU backend's KV caches.
    pub cpu_caches: Caches,
}

impl CallerOptions {
    /// Decides. The libraries are opened, to see that they are such, unless the CPU is asked for.
    ///
    /// # Errors
    /// When a word is none of those that are expected, and when libraries that are named or found cannot be opened.
    pub fn decide(self) -> Result<ResolvedOptions> {
        let backend = match setting(self.backend, vars::BACKEND)? {
            Some((text, place)) => {
                text.parse().map_err(|e| usage(format!("{place}: backend {text:?}: {e}")))?
            }
            None => BackendChoice::Auto,
        };
        let arch = setting(self.device_arch, vars::DEVICE_ARCH)?;
        let arch = arch.map(|(text, place)| architecture(&text, &place)).transpose()?;
        let decode_on = option("decode_on", self.decode_on)?;
        let cpu_activations = option("cpu_activations", self.cpu_activations)?.unwrap_or_default();
        let cpu_caches = option("cpu_caches", self.cpu_caches)?.unwrap_or_default();
        let libraries = libraries(self.htp, self.system, backend)?;
        let Self { plugins, threads, .. } = self;
        Ok(ResolvedOptions {
            backend,
            arch,
            libraries,
            plugins,
            threads,
            decode_on,
            cpu_activations,
            cpu_caches,
        })
    }
}

impl ResolvedOptions {
    /// Begins a runtime with it, and with [`vars::CDSPRPC`].
    pub fn builder(&self) -> RuntimeBuilder {
        let cdsprpc = vars::get(vars::CDSPRPC).map(PathBuf::from);
        let mut builder = Runtime::builder()
            .plugins(PluginOptions::default().dirs(self.plugins.clone()))
            .backend(self.backend)
            .libraries(self.libraries.clone())
            .device(DeviceOptions::default().arch(self.arch).cdsprpc(cdsprpc))
            .cpu_activations(self.cpu_activations)
            .cpu_caches(self.cpu_caches);
        if let Some(threads) = self.threads {
            builder = builder.threads(threads);
        }
        match self.decode_on {
            Some(on) => builder.decode_on(on),
            None => builder,
        }
    }
}

fn usage(message: String) -> Error {
    Error::new(ErrorKind::Usage, message)
}

/// Parses the text of an option.
fn option<T: FromStr<Err = String>>(name: &str, text: Option<String>) -> Result<Option<T>> {
    let parse =
        |text: String| text.parse().map_err(|e| usage(format!("options: {name} {text:?}: {e}")));
    text.map(parse).transpose()
}

/// A text of an option, or else of a variable, and which of them.
fn setting(given: Option<String>, variable: &str) -> Result<Option<(String, String)>> {
    let not_utf8 = |value: OsString| usage(format!("{variable}: {} is not UTF-8", value.display()));
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
    digits
        .parse()
        .ok()
        .filter(|_| digits.bytes().all(|b| b.is_ascii_digit()))
        .ok_or_else(|| usage(format!("{place}: {text:?}, expected an architecture such as v81")))
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
        // An error now, and not when the first model is loaded.
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
