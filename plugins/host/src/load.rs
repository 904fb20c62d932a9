//! Loads one plugin file: trust, hash, header ([`crate::header`]), descriptions.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use qhx_core::op::OpDescription;
use qhx_op::abi::{LibHeader, OpModuleRef};

use crate::header::{self, Fault, Refusal};
use crate::lock::check_op_name;
use crate::trust::{self, Pinned};

/// Why a file cannot be used as a plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LoadErrorKind {
    /// The file cannot be read.
    Missing,
    /// Somebody else could change the file.
    Untrusted,
    /// The file is not the one that was installed.
    Changed,
    /// The folder loads installed plugins only, and this one is not.
    NotInstalled,
    /// The file is no dynamic library for this machine.
    NotALibrary,
    /// A dynamic library that exports no plugin.
    NotAPlugin,
    /// A plugin for another version of the interface.
    Incompatible,
    /// A plugin whose own code failed while it was loaded.
    Misbehaved,
    /// A plugin whose own code ended the process that loaded it, or never returned.
    Crashed,
}

/// Why a file cannot be used as a plugin, in one sentence.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}: {message}", path.display())]
pub struct LoadError {
    /// The file.
    pub path: PathBuf,
    /// Kind of failure.
    pub kind: LoadErrorKind,
    /// One sentence.
    pub message: String,
    /// Everything that is known, which can be thousands of lines.
    pub details: Option<String>,
}

impl LoadError {
    pub(crate) fn new(path: &Path, kind: LoadErrorKind, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), kind, message: message.into(), details: None }
    }
}

impl From<Fault> for LoadErrorKind {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::NotALibrary => Self::NotALibrary,
            Fault::NotAPlugin => Self::NotAPlugin,
            Fault::Incompatible => Self::Incompatible,
            Fault::Misbehaved => Self::Misbehaved,
        }
    }
}

/// A loaded plugin. Plugins are never unloaded.
#[derive(Clone)]
pub struct Plugin {
    /// Path that it was loaded from.
    pub path: PathBuf,
    /// The interface version that it was built against.
    pub interface: String,
    /// Its ops.
    pub ops: Vec<OpDescription>,
    pub(crate) module: OpModuleRef,
}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plugin")
            .field("path", &self.path)
            .field("interface", &self.interface)
            .field("ops", &self.ops.iter().map(|op| &op.name).collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

/// Checks of a file before its code runs.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Demands<'a> {
    /// The folder that it was found in, when that may be another than the real file's.
    pub(crate) found_in: Option<&'a Path>,
    /// Do not ask who could change it.
    pub(crate) allow_untrusted: bool,
    /// SHA-256 of the file that was installed.
    pub(crate) sha256: Option<&'a str>,
}

/// Opens a plugin file and checks who could have changed it and, when it was installed, its hash.
pub(crate) fn pin(path: &Path, demands: &Demands<'_>) -> Result<Pinned, LoadError> {
    let fail = |kind, message: String| LoadError::new(path, kind, message);
    let pinned = Pinned::open(path).map_err(|e| {
        let kind = match path.canonicalize() {
            Ok(real) if !real.is_file() => LoadErrorKind::NotALibrary,
            _ => LoadErrorKind::Missing,
        };
        fail(kind, format!("cannot be read: {e}"))
    })?;
    if !demands.allow_untrusted {
        trust::check(&pinned, demands.found_in).map_err(|why| {
            fail(
                LoadErrorKind::Untrusted,
                format!(
                    "not loaded, because somebody else could change it, and a plugin has all your \
                     rights: {why}; take the right away (chmod go-w), or accept it with \
                     --allow-untrusted-plugins"
                ),
            )
        })?;
    }
    if let Some(expected) = demands.sha256 {
        let found = pinned
            .sha256()
            .map_err(|why| fail(LoadErrorKind::Missing, format!("cannot be read: {why}")))?;
        if found != expected {
            return Err(fail(
                LoadErrorKind::Changed,
                format!(
                    "changed since it was installed (sha256 {found}, plugins.lock says \
                     {expected}); if the change is yours, run qhx plugins install with the new file"
                ),
            ));
        }
    }
    Ok(pinned)
}

/// Plugins that this process has loaded. The files stay open: see [`Pinned::load_path`].
static LOADED: Mutex<Vec<(Pinned, Plugin)>> = Mutex::new(Vec::new());

impl Plugin {
    /// Loads a plugin that only the user or the administrator could have changed. The path is made
    /// absolute before the system loader sees it.
    ///
    /// # Errors
    /// When others could have changed the file, or it is no plugin of a supported version.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        Self::load_checked(path, &Demands::default())
    }

    pub(crate) fn load_checked(path: &Path, demands: &Demands<'_>) -> Result<Self, LoadError> {
        let pinned = pin(path, demands)?;
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |known: &Pinned| {
            let numbered = pinned.identity.inode != 0;
            trust::same_file(&known.identity, &pinned.identity)
                || (!numbered && known.path == pinned.path)
        };
        if let Some((known, plugin)) = loaded.iter().find(|(known, _)| same(known)) {
            if known.identity == pinned.identity {
                return Ok(Self { path: pinned.path, ..plugin.clone() });
            }
            return Err(LoadError::new(
                path,
                LoadErrorKind::Changed,
                "changed since this program loaded it; start the program again",
            ));
        }
        let (plugin, pinned) = Self::load_pinned(path, pinned)?;
        loaded.push((pinned, plugin.clone()));
        Ok(plugin)
    }

    fn load_pinned(path: &Path, pinned: Pinned) -> Result<(Self, Pinned), LoadError> {
        let fail = |kind, message: String| LoadError::new(path, kind, message);
        let load_path = pinned.load_path();
        let header = match header::open(&load_path) {
            Ok(header) => header,
            Err(Refusal { fault, message, .. }) => {
                let message = message
                    .replace(&load_path.display().to_string(), &pinned.path.display().to_string());
                if fault != Fault::NotALibrary {
                    // It may stay loaded, so its path must not come to mean another file.
                    std::mem::forget(pinned);
                }
                return Err(fail(fault.into(), message));
            }
        };
        if load_path == pinned.path && !pinned.still_there() {
            return Err(fail(
                LoadErrorKind::Changed,
                "was exchanged while it was loaded; try again".to_owned(),
            ));
        }
        let result = Self::from_header(header, &pinned.path, &fail);
        match result {
            Ok(plugin) => Ok((plugin, pinned)),
            Err(error) => {
                // The library stays loaded, so its path must not come to mean another file.
                std::mem::forget(pinned);
                Err(error)
            }
        }
    }

    fn from_header(
        header: &'static LibHeader,
        real: &Path,
        fail: &dyn Fn(LoadErrorKind, String) -> LoadError,
    ) -> Result<Self, LoadError> {
        let (interface, module) = header::module(header).map_err(|refusal| LoadError {
            details: refusal.details,
            ..fail(refusal.fault.into(), refusal.message)
        })?;
        let ops = describe(module).map_err(|m| fail(LoadErrorKind::Misbehaved, m))?;
        if ops.is_empty() {
            return Err(fail(
                LoadErrorKind::Misbehaved,
                "the plugin offers no host-op; its crate must name the crate that registers them \
                 (qhx_op::export_plugin!)"
                    .to_owned(),
            ));
        }
        Ok(Self { path: real.to_owned(), interface, ops, module })
    }
}

/// The ops that a module describes.
pub(crate) fn describe(module: OpModuleRef) -> Result<Vec<OpDescription>, String> {
    let text = module.describe()();
    if text.is_empty() {
        return Err("the plugin panicked while describing its host-ops".to_owned());
    }
    let ops: Vec<OpDescription> = serde_json::from_str(&text)
        .map_err(|e| format!("the plugin's description of its host-ops is not valid: {e}"))?;
    for (index, op) in ops.iter().enumerate() {
        check_op_name(&op.name)?;
        if ops[..index].iter().any(|other| other.name == op.name) {
            return Err(format!(
                "the plugin offers two host-ops named {:?}; expected one of each name",
                op.name
            ));
        }
    }
    Ok(ops)
}
