//! Opens libQnnHtp and libQnnSystem.
//!
//! A library, once opened, stays mapped until the process ends: its worker threads, its
//! thread-local destructors and the log callbacks have no moment at which they are known to be
//! through.

#![expect(unsafe_code, reason = "loads libraries and copies their function tables")]

use std::ffi::{CStr, c_char};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_qnn_sys::{self as sys, CoreTable, GetProviders, Provider, SystemProvider, SystemTable};
use serde::{Deserialize, Serialize};

use super::codes::{self, Code};
use super::format;

/// Version of one of the libraries' interfaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ApiVersion {
    /// Changes when compatibility breaks.
    pub major: u32,
    /// Grows with every addition.
    pub minor: u32,
    /// Grows with every repair.
    pub patch: u32,
}

impl fmt::Display for ApiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl From<sys::Version> for ApiVersion {
    fn from(v: sys::Version) -> Self {
        Self { major: v.major, minor: v.minor, patch: v.patch }
    }
}

impl ApiVersion {
    /// The QAIRT release that first shipped this version of the core interface, where known.
    pub fn qairt(self) -> Option<&'static str> {
        match (self.major, self.minor) {
            (2, 27) => Some("2.36"),
            (2, 28) => Some("2.37"),
            (2, 29) => Some("2.39"),
            (2, 32) => Some("2.43"),
            (2, 33) => Some("2.44"),
            (2, 34) => Some("2.45"),
            (2, 35) => Some("2.46"),
            (2, 36) => Some("2.47"),
            (2, 37) => Some("2.48"),
            (2, 38) => Some("2.49"),
            (2, 40) => Some("2.51"),
            _ => None,
        }
    }
}

/// The libraries for this machine's architecture hold an emulator instead of a driver.
pub(crate) const EMULATES: bool = cfg!(target_arch = "x86_64");

/// libQnnHtp, and libQnnSystem beside it. Clones share both.
#[derive(Debug, Clone)]
pub struct Library(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    table: CoreTable,
    provider: String,
    core: ApiVersion,
    backend: ApiVersion,
    build_id: String,
    system: SystemLibrary,
}

impl Library {
    /// Opens the two libraries. Without `system`, `libQnnSystem.so` is taken from the folder of
    /// `htp`.
    ///
    /// The libraries print to standard output when they are loaded: see [`super::stdout`].
    ///
    /// # Errors
    /// When a library does not load, or has no interface of a supported version.
    pub fn open(htp: &Path, system: Option<&Path>) -> Result<Self> {
        let beside;
        let system = match system {
            Some(system) => system,
            None => {
                beside = htp.with_file_name(SYSTEM_FILE);
                &beside
            }
        };
        let system = SystemLibrary::open(system)?;
        // SAFETY: contract: tables.
        let chosen = unsafe { choose(htp, providers(htp, sys::CORE_ENTRY)?)? };
        Ok(Self(Arc::new(Inner {
            path: htp.to_owned(),
            build_id: build_id(&chosen.table),
            table: chosen.table,
            provider: chosen.name,
            core: chosen.core.into(),
            backend: chosen.backend.into(),
            system,
        })))
    }

    /// Path that libQnnHtp was opened from.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The provider's name, `HTP_QTI_AISW`.
    pub fn provider(&self) -> &str {
        &self.0.provider
    }

    /// Version of the core interface.
    pub fn core_version(&self) -> ApiVersion {
        self.0.core
    }

    /// Version of the HTP backend's interface.
    pub fn backend_version(&self) -> ApiVersion {
        self.0.backend
    }

    /// The build, such as `v2.51.0.…`; empty when the library does not say.
    pub fn build_id(&self) -> &str {
        &self.0.build_id
    }

    /// The system library.
    pub fn system(&self) -> &SystemLibrary {
        &self.0.system
    }

    pub(crate) fn table(&self) -> &CoreTable {
        &self.0.table
    }

    /// A function of the table, or an error that names it.
    pub(crate) fn need<T>(&self, function: Option<T>, name: &str) -> Result<T> {
        function.ok_or_else(|| {
            let core = self.core_version();
            let what = format_args!("the library (core interface {core}) lacks {name}");
            unfit(self.path(), what).hint(format!("use {HTP_FILE} of QAIRT 2.36 or newer"))
        })
    }

    /// The library's own words for a code, when it has some.
    pub fn message(&self, code: Code) -> Option<String> {
        let get = self.table().error_get_message?;
        let mut message = std::ptr::null();
        // SAFETY: contract: answers.
        let status = unsafe { get(u64::from(code.0), &raw mut message) };
        // SAFETY: contract: texts.
        (status == 0 && !message.is_null()).then(|| unsafe { text(message) })
    }
}

/// Name, versions and table of the chosen provider.
struct Chosen {
    name: String,
    core: sys::Version,
    backend: sys::Version,
    table: CoreTable,
}

/// The first provider of an interface that qhx knows the layout of.
///
/// # Safety
/// Every provider of the list is NULL, or begins with its head and has the table of its version.
unsafe fn choose(htp: &Path, providers: &[*const Provider]) -> Result<Chosen> {
    let mut found = Vec::new();
    for &provider in providers.iter().filter(|provider| !provider.is_null()) {
        // SAFETY: the caller vouches for the head.
        let (name, core, backend) =
            unsafe { (text((*provider).name), (*provider).core, (*provider).backend) };
        if core.major != 2 || core.minor < sys::CORE_FLOOR {
            found.push(format!("{name} with core interface {}", ApiVersion::from(core)));
            continue;
        }
        // SAFETY: the version is one that the table is known of; the caller vouches for the rest.
        let table = unsafe { CoreTable::of(provider, core) };
        return Ok(Chosen { name, core, backend, table });
    }
    let what = format_args!(
        "qhx needs core interface 2.{} or a later 2.x, the library offers {}",
        sys::CORE_FLOOR,
        if found.is_empty() { "nothing".to_owned() } else { found.join(", ") }
    );
    Err(unfit(htp, what).hint(format!("use {HTP_FILE} of QAIRT 2.36 or newer")))
}

/// libQnnSystem, which reads the metadata of context binaries. It works without libQnnHtp.
#[derive(Debug, Clone)]
pub struct SystemLibrary(Arc<SystemInner>);

#[derive(Debug)]
struct SystemInner {
    path: PathBuf,
    table: SystemTable,
    version: ApiVersion,
}

impl SystemLibrary {
    /// Opens the library.
    ///
    /// # Errors
    /// When the library does not load, or has no interface of a supported version.
    pub fn open(path: &Path) -> Result<Self> {
        let mut found = None;
        let providers: &[*const SystemProvider] = providers(path, sys::SYSTEM_ENTRY)?;
        for &provider in providers.iter().filter(|provider| !provider.is_null()) {
            // SAFETY: contract: tables.
            let version = unsafe { (*provider).api };
            found = Some(ApiVersion::from(version));
            if version.major == 1 && version.minor >= sys::SYSTEM_FLOOR {
                // SAFETY: contract: tables; the version is one that the table is known of.
                let table = unsafe { SystemTable::of(provider) };
                return Ok(Self(Arc::new(SystemInner {
                    path: path.to_owned(),
                    table,
                    version: version.into(),
                })));
            }
        }
        let what = format_args!(
            "qhx needs system interface 1.{} or a later 1.x, the library offers {}",
            sys::SYSTEM_FLOOR,
            found.map_or("nothing".to_owned(), |version| version.to_string())
        );
        Err(unfit(path, what).hint(format!("use {SYSTEM_FILE} of QAIRT 2.36 or newer")))
    }

    /// Path that the library was opened from.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Version of the system interface.
    pub fn version(&self) -> ApiVersion {
        self.0.version
    }

    pub(crate) fn table(&self) -> &SystemTable {
        &self.0.table
    }
}

/// File name of the HTP library on this platform.
pub const HTP_FILE: &str = if cfg!(windows) { "QnnHtp.dll" } else { "libQnnHtp.so" };
/// File name of the system library on this platform.
pub const SYSTEM_FILE: &str = if cfg!(windows) { "QnnSystem.dll" } else { "libQnnSystem.so" };

/// Opens the library and looks up its one entry point.
fn entry_point<T: Copy>(path: &Path, symbol: &str) -> Result<T> {
    // A bare name is left to the dynamic loader's search path, anything else is made absolute.
    let name = if path.components().count() == 1 && !path.exists() {
        path.to_owned()
    } else {
        format::check(path).map_err(|e| match e.hint_text() {
            Some(_) => e,
            None => e.hint(format!(
                "give the path of the file {HTP_FILE} or {SYSTEM_FILE}, or run `qhx libraries install`"
            )),
        })?;
        std::path::absolute(path).map_err(|e| Error::io(ErrorKind::Runtime, path, e))?
    };
    // SAFETY: loading runs the library's initialisers; the user named this file as a QNN library.
    let library = unsafe { load(&name) }.map_err(|e| load_error(path, e))?;
    // Never unloaded, as the module says.
    let library = std::mem::ManuallyDrop::new(library);
    // SAFETY: the symbol, where it exists, has the type that the caller states: it is the
    // documented entry point of these libraries.
    let symbol = unsafe { library.get::<T>(symbol.as_bytes()) }.map_err(|_| {
        let what = format_args!("not a QNN library of the expected kind: no symbol {symbol}");
        unfit(path, what).hint(format!(
            "give {HTP_FILE} as the HTP library and {SYSTEM_FILE} as the system library"
        ))
    })?;
    Ok(*symbol)
}

/// Has the system loader open a library.
///
/// # Safety
/// Same contract as [`libloading::Library::new`].
unsafe fn load(name: &Path) -> Result<libloading::Library, libloading::Error> {
    #[cfg(windows)]
    if name.is_absolute() {
        use libloading::os::windows::{
            LOAD_LIBRARY_SEARCH_DEFAULT_DIRS, LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR, Library,
        };
        // Without these the libraries that it needs are not looked for beside it, but in the working directory.
        let flags = LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR | LOAD_LIBRARY_SEARCH_DEFAULT_DIRS;
        // SAFETY: the caller vouches for the library.
        return unsafe { Library::load_with_flags(name, flags) }.map(Into::into);
    }
    // SAFETY: the caller vouches for the library.
    unsafe { libloading::Library::new(name) }
}

/// The providers that the entry point of a library lists.
fn providers<P>(path: &Path, entry: &str) -> Result<&'static [*const P]> {
    let list: GetProviders<P> = entry_point(path, entry)?;
    let (mut providers, mut count) = (std::ptr::null(), 0);
    // SAFETY: contract: answers.
    let status = unsafe { list(&raw mut providers, &raw mut count) };
    let attempt = format_args!("{}: asking for interface providers", path.display());
    codes::check(ErrorKind::Runtime, attempt, status)?;
    if providers.is_null() || count == 0 {
        return Err(unfit(path, "the library offers no interface provider"));
    }
    // SAFETY: contract: answers, lists; the library stays.
    Ok(unsafe { std::slice::from_raw_parts(providers, count as usize) })
}

/// The error of a library that cannot be used.
fn unfit(path: &Path, what: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Runtime, format!("{}: {what}", path.display()))
}

/// Which dependency is missing, and where it comes from.
fn load_error(path: &Path, error: libloading::Error) -> Error {
    let mut text = error.to_string();
    if let Some(source) = std::error::Error::source(&error) {
        let source = source.to_string();
        if !text.contains(&source) {
            text = source;
        }
    }
    let base = unfit(path, format_args!("cannot be loaded: {text}")).with_source(error);
    if cfg!(windows) && text.contains(MODULE_NOT_FOUND) && !path.exists() {
        return base.hint(format!("give the path of the file {HTP_FILE} or {SYSTEM_FILE}"));
    }
    match missing_dependency(&text) {
        Some(hint) => base.hint(hint),
        None => base,
    }
}

/// Text by which Windows reports that a library, or one that it needs, is not there.
const MODULE_NOT_FOUND: &str = "os error 126";

fn missing_dependency(text: &str) -> Option<&'static str> {
    if text.contains("libc++_shared") {
        Some("put libc++_shared.so of the Android NDK beside it and set LD_LIBRARY_PATH")
    } else if text.contains("libc++") || text.contains("libunwind") {
        Some(
            "the libraries of the onnxruntime-qnn wheel find libc++ in the folder \
             onnxruntime_qnn.libs beside theirs: keep both, or install libc++1",
        )
    } else if text.contains("libatomic") {
        Some("install the system's libatomic1 (Debian, Ubuntu) or libatomic (Fedora)")
    } else if text.contains("GLIBC_") {
        Some("the system's C library is older than this library needs (glibc 2.35)")
    } else if text.contains(MODULE_NOT_FOUND) {
        Some(
            "a library that it needs is missing: keep the DLLs of one package in one folder, and \
             install the Microsoft Visual C++ runtime",
        )
    } else if text.contains("cdsprpc") {
        Some("the vendor's libcdsprpc.so is missing: this device offers no access to its DSP")
    } else {
        None
    }
}

/// Why the system's loader does not open a library; `None` where it does.
pub(crate) fn why_not_loaded(path: &Path) -> Option<Error> {
    // SAFETY: loading runs the library's initialisers; it lies beside a QNN library, which would have opened it.
    match unsafe { libloading::Library::new(path) } {
        Ok(library) => {
            // Never unloaded, as the module says.
            std::mem::forget(library);
            None
        }
        Err(e) => Some(load_error(path, e)),
    }
}

fn build_id(table: &CoreTable) -> String {
    let Some(get) = table.backend_get_build_id else { return String::new() };
    let mut id = std::ptr::null();
    // SAFETY: contract: answers.
    let status = unsafe { get(&raw mut id) };
    // SAFETY: contract: texts.
    if status == 0 { unsafe { text(id) } } else { String::new() }
}

/// Copies a C string; NULL is empty.
///
/// # Safety
/// A non-NULL pointer leads to a NUL-terminated string.
pub(crate) unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the caller vouches for the string.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_too_old_core_interface_is_refused_with_both_versions() {
        // As long as the head: reading any slot of the table would leave it.
        let provider = |major, minor| Provider {
            backend_id: 6,
            name: c"HTP_QTI_AISW".as_ptr(),
            core: sys::Version { major, minor, patch: 1 },
            backend: sys::Version { major: 5, minor: 1, patch: 0 },
            table: [],
        };
        let old = [provider(2, 26), provider(1, 40), provider(3, 0)];
        let list = [&raw const old[0], std::ptr::null(), &raw const old[1], &raw const old[2]];
        // SAFETY: all have heads, and none is of a version whose table is read.
        let error = unsafe { choose(Path::new("libQnnHtp.so"), &list) }.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Runtime);
        for part in ["needs core interface 2.27", "2.26.1", "1.40.1", "3.0.1", "libQnnHtp.so"] {
            assert!(error.message().contains(part), "{error}");
        }
        assert!(error.hint_text().unwrap().contains("QAIRT 2.36"), "{error}");
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = SystemLibrary::open(Path::new("/nowhere/libQnnSystem.so")).unwrap_err();
        assert!(error.message().starts_with("/nowhere/libQnnSystem.so: "), "{error}");
        assert!(error.hint_text().is_some());
    }

    #[test]
    fn a_folder_is_not_a_library() {
        let error = SystemLibrary::open(&std::env::temp_dir()).unwrap_err();
        assert!(error.message().contains("a folder"), "{error}");
    }

    #[test]
    fn missing_dependencies_have_a_fix() {
        let line = "libc++.so.1: cannot open shared object file: No such file or directory";
        assert!(missing_dependency(line).is_some_and(|h| h.contains("onnxruntime_qnn.libs")));
        assert!(
            missing_dependency("libatomic.so.1: cannot open")
                .is_some_and(|h| h.contains("libatomic1"))
        );
        assert_eq!(missing_dependency("something else"), None);
    }
}
