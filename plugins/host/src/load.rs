//! Loads one plugin file: symbol, `abi_stable` version, interface version, layout, descriptions.

#![expect(unsafe_code, reason = "runs code of a dynamic library after its layout was checked")]

use std::path::{Path, PathBuf};

use abi_stable::StableAbi;
use abi_stable::abi_stability::abi_checking::check_layout_compatibility;
use abi_stable::library::{LibHeader, LibraryError, RootModule, abi_header_from_path};
use qhx_core::op::OpDescription;
use qhx_op::abi::OpModuleRef;

/// Version of the plugin interface that this program speaks.
pub(crate) fn interface_version() -> &'static str {
    <OpModuleRef as RootModule>::VERSION_STRINGS.version.as_str()
}

/// Why a file cannot be used as a plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LoadErrorKind {
    /// The file cannot be read.
    Missing,
    /// The file is no dynamic library for this machine.
    NotALibrary,
    /// A dynamic library that exports no plugin.
    NotAPlugin,
    /// A plugin for another version of the interface.
    Incompatible,
    /// A plugin whose own code failed while it was loaded.
    Misbehaved,
}

/// Why a file cannot be used as a plugin, in one sentence.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}: {message}", path.display())]
pub struct LoadError {
    /// The file.
    pub path: PathBuf,
    /// What sort of failure.
    pub kind: LoadErrorKind,
    /// One sentence.
    pub message: String,
    /// Everything that is known, which can be thousands of lines.
    pub details: Option<String>,
}

/// A loaded plugin. Plugins are never unloaded.
#[derive(Clone)]
pub struct Plugin {
    /// Where it came from.
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

impl Plugin {
    /// Loads a plugin. The path is made absolute before the system loader sees it.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let fail = |kind, message: String| LoadError {
            path: path.to_owned(),
            kind,
            message,
            details: None,
        };
        let real = path
            .canonicalize()
            .map_err(|e| fail(LoadErrorKind::Missing, format!("cannot be read: {e}")))?;
        if !real.is_file() {
            return Err(fail(LoadErrorKind::NotALibrary, "not a regular file".to_owned()));
        }
        let header = open_header(&real).map_err(|(kind, message)| fail(kind, message))?;
        let found = header.version_strings().version.as_str().to_owned();
        let expected = interface_version();
        if major(&found) != major(expected) {
            return Err(fail(
                LoadErrorKind::Incompatible,
                format!(
                    "the plugin was built for interface {found}, this program speaks {expected}; \
                     rebuild the plugin against qhx-op {}.x",
                    major(expected)
                ),
            ));
        }
        check_layout(header).map_err(|details| LoadError {
            details: Some(details),
            ..fail(
                LoadErrorKind::Incompatible,
                format!(
                    "the plugin says interface {found}, but its types differ from those of this \
                     program's {expected}; rebuild it against an unmodified qhx-op"
                ),
            )
        })?;
        // SAFETY: the layouts fit, one way or the other; see `check_layout`.
        let module = unsafe { header.init_root_module_with_unchecked_layout::<OpModuleRef>() }
            .map_err(|e| fail(LoadErrorKind::Misbehaved, format!("failed while loading: {e}")))?;
        let ops = describe(module).map_err(|m| fail(LoadErrorKind::Misbehaved, m))?;
        if ops.is_empty() {
            return Err(fail(
                LoadErrorKind::Misbehaved,
                "the plugin offers no host-op; its crate must name the crate that registers them \
                 (qhx_op::export_plugin!)"
                    .to_owned(),
            ));
        }
        Ok(Self { path: real, interface: found, ops, module })
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
    for op in &ops {
        let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if op.name.is_empty() || !op.name.chars().all(valid) {
            return Err(format!(
                "host-op name {:?}: expected lower-case letters, digits and _",
                op.name
            ));
        }
    }
    Ok(ops)
}

fn major(version: &str) -> &str {
    version.split('.').next().unwrap_or(version)
}

fn open_header(path: &Path) -> Result<&'static LibHeader, (LoadErrorKind, String)> {
    let header = abi_header_from_path(path).map_err(|error| match error {
        LibraryError::GetSymbolError { .. } => (
            LoadErrorKind::NotAPlugin,
            "a dynamic library, but not a qhx plugin: it exports no plugin root".to_owned(),
        ),
        LibraryError::OpenError { err, .. } => (
            LoadErrorKind::NotALibrary,
            format!("cannot be loaded as a dynamic library: {}", one_line(&err.to_string())),
        ),
        other => (LoadErrorKind::NotAPlugin, one_line(&other.to_string())),
    })?;
    header.upgrade().map_err(|error| {
        let message = match error {
            LibraryError::InvalidAbiHeader(found) => format!(
                "the plugin uses abi_stable {}.{}, this program another; rebuild the plugin \
                 against the same qhx-op",
                found.abi_major, found.abi_minor
            ),
            other => one_line(&other.to_string()),
        };
        (LoadErrorKind::Incompatible, message)
    })
}

/// Checks that the plugin's interface fits this program's.
///
/// The check asks that every prefix type of the plugin has at least the fields of ours. That
/// refuses a plugin that is merely older, whose missing fields the program reads as absent. So the
/// reverse is asked as well: that ours has at least the plugin's. What fits neither way is a real
/// break.
fn check_layout(header: &'static LibHeader) -> Result<(), String> {
    let Err(error) = header.ensure_layout::<OpModuleRef>() else { return Ok(()) };
    let Some(theirs) = header.layout() else { return Err(error.to_string()) };
    match check_layout_compatibility(theirs, <OpModuleRef as StableAbi>::LAYOUT) {
        Ok(()) => Ok(()),
        Err(_) => Err(error.to_string()),
    }
}

pub(crate) fn one_line(text: &str) -> String {
    let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() > 300 {
        line.chars().take(299).chain(std::iter::once('…')).collect()
    } else {
        line
    }
}
