//! Checks of a library before any of its functions is called: it exports a plugin root, and its interface fits.
//!
//! Knows the interface crate and nothing else of the runtime, so that tests can build it against
//! an older and a newer one.

#![expect(unsafe_code, reason = "initialises a root module after its layout was checked")]

use std::path::Path;

use abi_stable::StableAbi;
use abi_stable::abi_stability::abi_checking::check_layout_compatibility;
use abi_stable::library::{LibHeader, LibraryError, RootModule, abi_header_from_path};
use qhx_op::abi::OpModuleRef;

/// Why a library is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// No dynamic library for this machine.
    NotALibrary,
    /// Exports no plugin root.
    NotAPlugin,
    /// Built for another version of the interface.
    Incompatible,
    /// Its own code failed.
    Misbehaved,
}

/// Why a library is not used, in one sentence.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub fault: Fault,
    pub message: String,
    /// Everything that is known, which can be thousands of lines.
    pub details: Option<String>,
}

impl Refusal {
    fn new(fault: Fault, message: impl Into<String>) -> Self {
        Self { fault, message: message.into(), details: None }
    }
}

/// Version of the plugin interface that this program speaks.
pub(crate) fn interface_version() -> &'static str {
    <OpModuleRef as RootModule>::VERSION_STRINGS.version.as_str()
}

/// Checks that a plugin built for interface `found` can be meant for this program.
pub(crate) fn check_interface(found: &str) -> Result<(), String> {
    let expected = interface_version();
    if major(found) == major(expected) {
        return Ok(());
    }
    Err(format!(
        "the plugin was built for interface {found}, this program speaks {expected}; rebuild the \
         plugin against qhx-op {}.x",
        major(expected)
    ))
}

fn major(version: &str) -> &str {
    version.split('.').next().unwrap_or(version)
}

/// Opens a library and finds its root. The library is never unloaded.
pub(crate) fn open(path: &Path) -> Result<&'static LibHeader, Refusal> {
    let header = abi_header_from_path(path).map_err(|error| match error {
        LibraryError::GetSymbolError { .. } => Refusal::new(
            Fault::NotAPlugin,
            "a dynamic library, but not a qhx plugin: it exports no plugin root",
        ),
        LibraryError::OpenError { err, .. } => Refusal::new(
            Fault::NotALibrary,
            format!("cannot be loaded as a dynamic library: {}", one_line(&err.to_string())),
        ),
        other => Refusal::new(Fault::NotAPlugin, one_line(&other.to_string())),
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
        Refusal::new(Fault::Incompatible, message)
    })
}

/// Checks the interface that a library was built against and returns its version and root.
pub(crate) fn module(header: &'static LibHeader) -> Result<(String, OpModuleRef), Refusal> {
    let found = header.version_strings().version.as_str().to_owned();
    check_interface(&found).map_err(|why| Refusal::new(Fault::Incompatible, why))?;
    check_layout(header).map_err(|details| Refusal {
        fault: Fault::Incompatible,
        message: format!(
            "the plugin says interface {found}, but its types differ from those of this program's \
             {}; rebuild it against an unmodified qhx-op",
            interface_version()
        ),
        details: Some(details),
    })?;
    // SAFETY: the layouts fit, one way or the other; see `check_layout`.
    let module = unsafe { header.init_root_module_with_unchecked_layout::<OpModuleRef>() }
        .map_err(|e| Refusal::new(Fault::Misbehaved, format!("failed while loading: {e}")))?;
    Ok((found, module))
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

/// A message without line ends, cut where it gets long.
pub(crate) fn one_line(text: &str) -> String {
    let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() > 300 {
        line.chars().take(299).chain(std::iter::once('…')).collect()
    } else {
        line
    }
}
