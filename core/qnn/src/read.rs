//! Reads what a context binary declares about itself, without loading it.

#![expect(unsafe_code, reason = "asks the system library for metadata")]

use qhx_qnn_sys as sys;

use qhx_base::{Error, ErrorKind, Result};

use super::codes;
use super::info::BinaryInfo;
use super::library::{SYSTEM_FILE, SystemLibrary};
use super::metadata::{self, Fault};

impl BinaryInfo {
    /// Reads the metadata of `bytes` in this very process, which some damaged files crash. `name` is
    /// the file's name, for messages.
    ///
    /// # Errors
    /// When `bytes` are no context binary, or their metadata make no sense.
    pub fn read(system: &SystemLibrary, name: &str, bytes: &[u8]) -> Result<Self> {
        if bytes.is_empty() {
            return Err(Error::new(
                ErrorKind::Artifact,
                format!("{name}: the file is empty, expected a QNN context binary"),
            )
            .hint("the download may be incomplete"));
        }
        let handle = SystemContext::create(system)?;
        let get = need(system, system.table().get_metadata, "systemContextGetMetaData")?;
        let mut info = std::ptr::null();
        // SAFETY: contract: handles, arguments, answers.
        let status =
            unsafe { get(handle.raw, bytes.as_ptr().cast(), bytes.len() as u64, &raw mut info) };
        if status != 0 || info.is_null() {
            return Err(not_a_binary(name, bytes, status));
        }
        // SAFETY: contract: answers; the description lives until `handle` is freed, after the copy.
        unsafe { metadata::copy(info, bytes.len() as u64) }.map_err(|e| damaged(name, e))
    }
}

/// The library read the file, but what it reports about it makes no sense.
fn damaged(name: &str, fault: Fault) -> Error {
    match fault {
        Fault::Version(version) => Error::new(
            ErrorKind::Context,
            format!("{name}: metadata of version {version}, qhx knows versions 1 to 3"),
        )
        .hint(format!(
            "update qhx, or use {SYSTEM_FILE} of the QAIRT version that made the binary"
        )),
        Fault::Content(what) => {
            Error::new(ErrorKind::Artifact, format!("{name}: the metadata is damaged: {what}"))
                .hint("download the file again and compare its size and hash with the bundle's")
        }
    }
}

fn not_a_binary(name: &str, bytes: &[u8], status: u64) -> Error {
    let what = if bytes.starts_with(b"version https://git-lfs") {
        "a Git LFS pointer"
    } else if bytes.starts_with(b"\x7fELF") {
        "a shared library"
    } else {
        "not a QNN context binary, or cut off or damaged"
    };
    codes::error(
        ErrorKind::Artifact,
        format_args!("{name} ({} bytes): {what}", bytes.len()),
        status,
    )
    .hint("download the file again and compare its size and hash with the bundle's")
}

fn need<T>(system: &SystemLibrary, function: Option<T>, name: &str) -> Result<T> {
    function.ok_or_else(|| {
        Error::new(
            ErrorKind::Runtime,
            format!(
                "{}: the library (system interface {}) lacks {name}",
                system.path().display(),
                system.version()
            ),
        )
        .hint(format!("use {SYSTEM_FILE} of QAIRT 2.36 or newer"))
    })
}

/// Owns what the description points into.
struct SystemContext<'a> {
    raw: sys::Handle,
    system: &'a SystemLibrary,
}

impl<'a> SystemContext<'a> {
    fn create(system: &'a SystemLibrary) -> Result<Self> {
        let create = need(system, system.table().context_create, "systemContextCreate")?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: contract: answers.
        let status = unsafe { create(&raw mut raw) };
        codes::check(ErrorKind::Runtime, "opening a system context", status)?;
        Ok(Self { raw, system })
    }
}

impl Drop for SystemContext<'_> {
    fn drop(&mut self) {
        if let Some(free) = self.system.table().context_free {
            // SAFETY: contract: handles; what it owns was copied.
            super::device::freed("system context", unsafe { free(self.raw) });
        }
    }
}
