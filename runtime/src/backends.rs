//! Decides what executes a bundle's graphs, and opens it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_core::backend::Backend;
use qhx_core::qnn::{ProfileLevel, QnnBackend, QnnOptions};
use qhx_core::resident::ResidentBackend;
use qhx_core::rights::runs_with_extra_rights;
use qhx_core::{Error, ErrorKind, Manifest, Result, trace};
use qhx_cpu::{CpuBackend, CpuOptions};

use crate::args::{BackendArgs, BackendChoice};
use crate::runtime::{self, Libraries};
use crate::trace::Tracing;

/// A backend and the reason for it.
pub(crate) struct Chosen {
    pub backend: Arc<dyn Backend>,
    pub reason: String,
}

impl BackendArgs {
    /// Opens the backend for a bundle.
    pub(crate) fn open(
        &self,
        manifest: &Manifest,
        threads: Option<usize>,
        tracing: Option<&Tracing>,
    ) -> Result<Chosen> {
        let mut chosen = self.choose(manifest, threads, tracing)?;
        if let Some(limit) = self.resident {
            chosen.backend = Arc::new(ResidentBackend::new(chosen.backend, limit.into()));
        }
        Ok(chosen)
    }

    fn choose(
        &self,
        manifest: &Manifest,
        threads: Option<usize>,
        tracing: Option<&Tracing>,
    ) -> Result<Chosen> {
        let trace = tracing.map(|tracing| &tracing.trace);
        let _span = trace::span(trace, "open backend");
        match self.backend {
            BackendChoice::Cpu => {
                Ok(Chosen { backend: cpu(threads)?, reason: "asked for".to_owned() })
            }
            BackendChoice::Qnn => {
                let libraries = self.libraries.require("backend qnn")?;
                let reason = format!("asked for, {}", libraries.htp.display());
                Ok(Chosen { backend: self.qnn(&libraries, tracing)?, reason })
            }
            BackendChoice::Auto => self.auto(manifest, threads, tracing),
        }
    }

    fn auto(
        &self,
        manifest: &Manifest,
        threads: Option<usize>,
        tracing: Option<&Tracing>,
    ) -> Result<Chosen> {
        let libraries = self.libraries.find()?;
        let (binaries, onnx) = forms(manifest)?;
        match (libraries, binaries) {
            (Some(libraries), true) => {
                let backend = self.qnn(&libraries, tracing);
                let backend = backend.map_err(|e| offer_cpu(e, &libraries, onnx))?;
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

    fn qnn(&self, libraries: &Libraries, tracing: Option<&Tracing>) -> Result<Arc<dyn Backend>> {
        let cdsprpc = &self.device.memory.cdsprpc;
        if let Some(file) = cdsprpc.as_ref().filter(|_| runs_with_extra_rights()) {
            return Err(runtime::not_with_extra_rights("libcdsprpc", file));
        }
        let options = QnnOptions {
            htp: libraries.htp.clone(),
            system: Some(libraries.system.clone()),
            device_arch: self.device.device_arch,
            perf: self.device.perf,
            idle_release: self.idle_release,
            memory: self.device.memory.memory,
            cdsprpc: cdsprpc.clone(),
            tried: contexts_tried(),
            profile: tracing.map_or(ProfileLevel::Off, |tracing| tracing.level),
            trace: tracing.map(|tracing| Arc::clone(&tracing.trace)),
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
