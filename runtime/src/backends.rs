//! Decides what executes a bundle's graphs, and opens it.

use std::path::Path;
use std::sync::Arc;

use qhx_base::rights::runs_with_extra_rights;
use qhx_base::{Error, Result, error, trace};
use qhx_core::Manifest;
use qhx_cpu::{CpuBackend, CpuOptions};
use qhx_exec::backend::Backend;
use qhx_exec::lru_contexts::LruContexts;
use qhx_qnn::{ProfileLevel, QnnBackend, QnnOptions};

use crate::bundle::Bundle;
use crate::cache::contexts_tried;
use crate::libraries::{self, Libraries};
use crate::prepared;
use crate::settings::{BackendChoice, Settings};

/// An open backend and the reason why it was taken.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Chosen {
    /// Backend that executes the graphs.
    pub backend: Arc<dyn Backend>,
    /// Why, for people.
    pub reason: String,
}

impl Settings {
    /// Decides what executes the graphs of a bundle, and opens it.
    ///
    /// # Errors
    /// When the backend that is asked for cannot be opened, or nothing here can execute the bundle.
    pub(crate) fn choose(&self, manifest: &Manifest) -> Result<Chosen> {
        let mut chosen = self.choose_plain(manifest)?;
        if let Some(limit) = self.max_contexts {
            chosen.backend = Arc::new(LruContexts::new(chosen.backend, limit));
        }
        Ok(chosen)
    }

    /// Architecture of the device that bundles are opened for, where there is one and it can be opened.
    pub(crate) fn device_arch(&self) -> Option<u32> {
        if self.device.arch.is_some() || self.backend == BackendChoice::Cpu || self.given.is_some()
        {
            return self.device.arch;
        }
        let libraries = self.libraries.find().ok().flatten()?;
        libraries.platform().ok().flatten()?.arch
    }

    /// The bundle that was prepared of a portable one for this machine, or the bundle itself.
    ///
    /// # Errors
    /// When the NPU is asked for and nothing is prepared, and when libraries cannot be opened.
    pub(crate) fn prepared(&self, bundle: &Bundle) -> Result<Bundle> {
        let manifest = bundle.manifest();
        let of_cpu = self.backend == BackendChoice::Cpu || self.given.is_some();
        if of_cpu || !prepared::is_portable(manifest) {
            return Ok(bundle.clone());
        }
        let libraries = match self.backend {
            BackendChoice::Qnn => Some(self.libraries.require("backend qnn")?),
            _ => self.libraries.find()?,
        };
        let found = libraries.map(|libraries| prepared::find(manifest, &libraries)).transpose()?;
        let found = found.unwrap_or_default();
        match found.bundle {
            Some(prepared) => Ok(prepared),
            None if self.backend == BackendChoice::Qnn => Err(error!(
                Runtime,
                "{}: a portable bundle, of which {}",
                manifest.path.display(),
                unprepared(&found.unfit)
            )
            .hint(prepared::how_to(manifest))),
            None => Ok(bundle.clone()),
        }
    }

    fn choose_plain(&self, manifest: &Manifest) -> Result<Chosen> {
        let _span = trace::span(self.trace.as_ref(), "open backend");
        if let Some(backend) = &self.given {
            return Ok(Chosen { backend: Arc::clone(backend), reason: "given".to_owned() });
        }
        match self.backend {
            BackendChoice::Cpu => self.cpu("asked for"),
            BackendChoice::Qnn => {
                let libraries = self.libraries.require("backend qnn")?;
                let reason = format!("asked for, {}", libraries.htp.display());
                Ok(Chosen { backend: self.qnn(&libraries)?, reason })
            }
            BackendChoice::Auto => self.auto(manifest),
        }
    }

    fn auto(&self, manifest: &Manifest) -> Result<Chosen> {
        let libraries = self.libraries.find()?;
        let (binaries, onnx) = forms(manifest)?;
        match (libraries, binaries) {
            (Some(libraries), true) => {
                let backend = self.qnn(&libraries);
                let backend = backend.map_err(|e| offer_cpu(e, &libraries, onnx))?;
                let reason = format!("{} {}", libraries.source, libraries.htp.display());
                Ok(Chosen { backend, reason })
            }
            (Some(libraries), false) if prepared::is_portable(manifest) => {
                let unfit = prepared::find(manifest, &libraries)?.unfit;
                let then = self.preparing(manifest, &libraries);
                self.cpu(&format!("{}; {then}", unprepared(&unfit)))
            }
            (Some(_), false) => self.cpu("the bundle has no context binaries"),
            (None, _) if onnx => self.cpu("no QNN libraries are given or installed"),
            (None, _) => Err(error!(
                Runtime,
                "{}: the bundle has context binaries only, and no QNN libraries are given or \
                     installed to run them",
                manifest.path.display()
            )
            .hint(libraries::how_to_get())),
        }
    }

    /// Starts the preparation of a bundle, where that is asked for. What is to be expected, for people.
    fn preparing(&self, manifest: &Manifest, libraries: &Libraries) -> String {
        let by_hand = format!("the NPU runs the bundle after `{}`", prepared::how_to(manifest));
        let Some(qhx) = &self.while_preparing else { return by_hand };
        if runs_with_extra_rights() {
            return by_hand;
        }
        match prepared::start(manifest, libraries, qhx, self.device.arch) {
            Ok(started) => format!(
                "process {} prepares it meanwhile, and reports to {}",
                started.process,
                started.log.display()
            ),
            Err(e) => format!("preparing it could not be started: {e}; {by_hand}"),
        }
    }

    fn cpu(&self, reason: &str) -> Result<Chosen> {
        Ok(Chosen { backend: self.cpu_backend()?, reason: reason.to_owned() })
    }

    /// Options of the CPU backend.
    pub(crate) fn cpu_options(&self) -> CpuOptions {
        CpuOptions {
            threads: self.threads,
            activations: self.cpu_activations,
            caches: self.cpu_caches,
        }
    }

    /// The CPU backend as it is asked for.
    pub(crate) fn cpu_backend(&self) -> Result<Arc<dyn Backend>> {
        cpu_with(self.cpu_options())
    }

    fn qnn(&self, libraries: &Libraries) -> Result<Arc<dyn Backend>> {
        let device = &self.device;
        if let Some(file) = device.cdsprpc.as_ref().filter(|_| runs_with_extra_rights()) {
            return Err(libraries::not_with_extra_rights("libcdsprpc", file));
        }
        let trace = self.trace.clone();
        let options = QnnOptions {
            htp: libraries.htp.clone(),
            system: Some(libraries.system.clone()),
            device_arch: device.arch,
            perf: device.power,
            idle_release: device.idle_release,
            memory: device.memory,
            cdsprpc: device.cdsprpc.clone(),
            tried: contexts_tried(),
            profile: trace.as_ref().map_or(ProfileLevel::Off, |_| device.profile),
            trace,
            ..QnnOptions::default()
        };
        Ok(Arc::new(QnnBackend::new(options)?))
    }
}

/// The CPU backend, with `threads` threads or one a core.
///
/// # Errors
/// When the threads cannot start.
pub fn cpu(threads: Option<usize>) -> Result<Arc<dyn Backend>> {
    cpu_with(CpuOptions { threads, ..CpuOptions::default() })
}

/// The CPU backend with all of its options.
///
/// # Errors
/// When the threads cannot start.
pub fn cpu_with(options: CpuOptions) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(CpuBackend::new(options)?))
}

/// Message for a portable bundle without a fitting prepared bundle, with the reasons.
fn unprepared(unfit: &[prepared::Unfit]) -> String {
    let list: Vec<_> = unfit.iter().map(ToString::to_string).collect();
    let others = if list.is_empty() { String::new() } else { format!(" ({})", list.join("; ")) };
    format!("nothing is prepared for this chip and these libraries{others}")
}

/// Pair of (context binaries, ONNX): each is true if all required contexts have that form.
pub(crate) fn forms(manifest: &Manifest) -> Result<(bool, bool)> {
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
