//! The machine that a model is made ready for.

use qhx::hub::that_run_on;
use qhx::libraries::Libraries;
use qhx::{BackendChoice, LibraryFiles, models, prepared};
use qhx_base::Result;
use qhx_qnn::{Platform, Target};

/// A machine: its NPU with the libraries that compile for it, or its CPU alone.
#[derive(Debug, Clone)]
pub struct Machine {
    npu: Option<(Libraries, Target)>,
    /// The libraries are an emulator.
    emulated: bool,
}

impl Machine {
    /// This machine with a choice of backend: `auto` takes an NPU that is there, `qnn` the emulator, too.
    ///
    /// # Errors
    /// When the NPU's libraries are asked for and not there, or cannot be opened.
    pub fn of(choice: BackendChoice, files: &LibraryFiles) -> Result<Self> {
        let emulated = Platform::is_emulated();
        let libraries = match choice {
            BackendChoice::Cpu => None,
            BackendChoice::Qnn => Some(files.require("backend qnn")?),
            // A token takes the emulator minutes.
            BackendChoice::Auto if emulated => None,
            BackendChoice::Auto => files.find()?,
        };
        let Some(libraries) = libraries else { return Ok(Self::cpu()) };
        let target = match (prepared::chip(&libraries)?, choice) {
            (Some(target), _) => target,
            (None, BackendChoice::Qnn) => Target::V81,
            (None, _) => return Ok(Self::cpu()),
        };
        Ok(Self { npu: Some((libraries, target)), emulated })
    }

    /// A machine without an NPU.
    pub fn cpu() -> Self {
        Self { npu: None, emulated: false }
    }

    /// Target of its NPU; none of a CPU.
    pub fn target(&self) -> Option<Target> {
        self.npu.as_ref().map(|(_, target)| *target)
    }

    /// Architecture of its NPU.
    pub fn arch(&self) -> Option<u32> {
        self.target().map(|target| target.arch)
    }

    /// Architectures of bundles that it runs, the best first.
    pub fn archs(&self) -> Vec<u32> {
        self.arch().map(that_run_on).unwrap_or_default()
    }

    /// Form of its bundles: `cpu`, or the architecture.
    pub fn form(&self) -> String {
        self.arch().map_or_else(|| models::CPU.to_owned(), |arch| format!("v{arch}"))
    }

    pub(super) fn libraries(&self) -> Option<&Libraries> {
        self.npu.as_ref().map(|(libraries, _)| libraries)
    }

    pub(super) fn is_emulated(&self) -> bool {
        self.emulated
    }

    pub(super) fn describe(&self) -> String {
        match self.arch() {
            Some(arch) => format!("this NPU is v{arch}"),
            None => "this machine has no NPU that qhx can open".to_owned(),
        }
    }
}
