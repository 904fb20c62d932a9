//! Objects behind a runtime's handle.

use std::path::Path;
use std::sync::Arc;

use qhx::{BackendChoice, CallerOptions, ResolvedOptions};

use crate::callbacks;
use crate::fault::Result;
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
    pub(crate) fn new(options: CallerOptions) -> Result<Self> {
        crate::builtin::link();
        let decided = options.decide()?;
        let builder = decided.builder().progress(Arc::new(|_, _| callbacks::ask_within()));
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
