//! Objects behind a runtime's handle.

use std::path::Path;
use std::sync::Arc;

use qhx::{BackendChoice, CallerOptions, PluginOptions, ResolvedOptions};

use crate::callbacks;
use crate::fault::Result;
use crate::input::RuntimeQuestion;
use crate::model::Model;

/// A runtime.
pub(crate) struct Runtime {
    runtime: qhx::Runtime,
    decided: ResolvedOptions,
}

/// Properties of the device.
#[derive(Debug, Default)]
pub(crate) struct Device {
    /// Hexagon architecture: 81 for v81.
    pub arch: Option<u32>,
    /// Number of the chip.
    pub soc: Option<u32>,
}

impl Runtime {
    /// Opens nothing but the libraries that are named, to see that they are such.
    pub(crate) fn new(question: RuntimeQuestion) -> Result<Self> {
        crate::builtin::link();
        let decided = CallerOptions {
            backend: question.backend,
            device_arch: question.device_arch,
            htp: question.htp,
            system: question.system,
            decode_on: question.decode_on,
            cpu_activations: question.cpu_activations,
            cpu_caches: question.cpu_caches,
        }
        .decide()?;
        let mut plugins = PluginOptions::default();
        plugins.dirs.extend(question.plugins);
        let mut builder =
            decided.builder().plugins(plugins).progress(Arc::new(|_, _| callbacks::ask_within()));
        if question.threads > 0 {
            builder = builder.threads(question.threads);
        }
        Ok(Self { runtime: builder.build(), decided })
    }

    /// The device that bundles are opened on.
    pub(crate) fn device(&self) -> Result<Device> {
        let ResolvedOptions { backend, arch, libraries, .. } = &self.decided;
        let mut device = Device { arch: *arch, soc: None };
        if *backend == BackendChoice::Cpu {
            return Ok(device);
        }
        let Some(libraries) = libraries.find()? else { return Ok(device) };
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
