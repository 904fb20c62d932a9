//! Memory that host and DSP share, of the vendor's libcdsprpc.
//!
//! The library belongs to the device, not to QAIRT. It is opened at run time, where there is one, and
//! never unloaded.

#![expect(unsafe_code, reason = "opens libcdsprpc and owns memory of it")]

use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use libloading::Library;
use qhx_base::{Error, ErrorKind, Result};

/// Names of the library, in the order in which they are tried.
const NAMES: &[&str] = if cfg!(windows) {
    &["libcdsprpc.dll"]
} else if cfg!(target_os = "android") {
    // The second for programs whose search path leaves the vendor's folder out.
    &["libcdsprpc.so", "/vendor/lib64/libcdsprpc.so"]
} else {
    &["libcdsprpc.so", "libcdsprpc.so.1"]
};

/// The heap of the system's memory, which the DSP reaches through its memory management unit.
const HEAP_SYSTEM: c_int = 25;
/// The host caches it, and the driver keeps caches and DSP in step.
const FLAGS_CACHED: u32 = 1;

/// Granularity of the DSP's mappings.
const PAGE: usize = 4096;

/// An opened libcdsprpc.
#[derive(Clone, Copy)]
struct Functions {
    allocate: Allocate,
    to_fd: unsafe extern "C" fn(*mut c_void) -> c_int,
    free: unsafe extern "C" fn(*mut c_void),
}

#[derive(Clone, Copy)]
enum Allocate {
    /// `rpcmem_alloc2`, of newer libraries.
    Wide(unsafe extern "C" fn(c_int, u32, usize) -> *mut c_void),
    /// `rpcmem_alloc`, for less than 2 GiB.
    Narrow(unsafe extern "C" fn(c_int, u32, c_int) -> *mut c_void),
}

/// Allocates memory that host and DSP share.
pub(crate) struct Rpcmem {
    path: PathBuf,
    functions: Functions,
}

impl Rpcmem {
    /// Opens the library at `path`, or else the device's.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self> {
        let names = match path {
            Some(path) => vec![path],
            None => NAMES.iter().map(Path::new).collect(),
        };
        let mut first = None;
        for name in names {
            match Self::load(name) {
                Ok(library) => return Ok(library),
                Err(error) => first = first.or(Some(error)),
            }
        }
        Err(first.unwrap_or_else(|| Error::new(ErrorKind::Internal, "no name of libcdsprpc")))
    }

    fn load(path: &Path) -> Result<Self> {
        let fail = |why: &dyn fmt::Display| {
            Error::new(ErrorKind::Runtime, format!("{}: {why}", path.display())).hint(
                "libcdsprpc comes with the device's drivers, and the program's user needs access to \
                 the DSP; --memory raw does without",
            )
        };
        // SAFETY: loading runs the library's initialisers; it is the vendor's, found where the system
        // looks for libraries, or the one that the user named.
        let library = unsafe { Library::new(path) }
            .map_err(|e| fail(&format_args!("cannot be loaded: {e}")))?;
        // Never unloaded: buffers are freed by it.
        let library = ManuallyDrop::new(library);
        // SAFETY: the symbols, where they exist, have the types of the library's documentation.
        let functions = unsafe {
            let wide = library.get(b"rpcmem_alloc2").map(|f| Allocate::Wide(*f));
            let allocate =
                wide.or_else(|_| library.get(b"rpcmem_alloc").map(|f| Allocate::Narrow(*f)));
            let to_fd = library.get(b"rpcmem_to_fd").map(|f| *f);
            let free = library.get(b"rpcmem_free").map(|f| *f);
            match (allocate, to_fd, free) {
                (Ok(allocate), Ok(to_fd), Ok(free)) => Functions { allocate, to_fd, free },
                (allocate, to_fd, free) => {
                    let missing = [
                        ("rpcmem_alloc", allocate.is_err()),
                        ("rpcmem_to_fd", to_fd.is_err()),
                        ("rpcmem_free", free.is_err()),
                    ];
                    let missing: Vec<_> =
                        missing.iter().filter(|(_, m)| *m).map(|(name, _)| *name).collect();
                    return Err(fail(&format_args!("no symbol {}", missing.join(", "))));
                }
            }
        };
        Ok(Self { path: path.to_owned(), functions })
    }

    /// The library's file, or the name that the system found it by.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// `bytes` of zeroed memory, rounded up to whole pages.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Arc<Allocation>> {
        let fail = |why: &str| {
            let path = self.path.display();
            let message = format!("{path}: a shared buffer of {bytes} bytes: {why}");
            Error::new(ErrorKind::Graph, message).hint(
                "the model needs more memory than there is, or more open files (ulimit -n); --memory \
                 raw does without shared buffers",
            )
        };
        let size = bytes.max(1).checked_next_multiple_of(PAGE);
        let Some(size) = size.filter(|&size| size <= isize::MAX as usize) else {
            return Err(fail("it is larger than memory can be"));
        };
        let Functions { allocate, to_fd, free } = self.functions;
        let pointer = match allocate {
            // SAFETY: any number may be asked for; NULL says that there is no such memory.
            Allocate::Wide(allocate) => unsafe { allocate(HEAP_SYSTEM, FLAGS_CACHED, size) },
            Allocate::Narrow(allocate) => match c_int::try_from(size) {
                // SAFETY: as above.
                Ok(size) => unsafe { allocate(HEAP_SYSTEM, FLAGS_CACHED, size) },
                Err(_) => return Err(fail("rpcmem_alloc gives less than 2 GiB")),
            },
        };
        let Some(pointer) = NonNull::new(pointer.cast::<u8>()) else {
            return Err(fail("there is none"));
        };
        // SAFETY: the library gave the pointer.
        let fd = unsafe { to_fd(pointer.as_ptr().cast()) };
        let allocation = Allocation { pointer, size, fd, free };
        if fd < 0 {
            return Err(fail("it has no file descriptor"));
        }
        // SAFETY: the library gave that many bytes, and nobody else has them.
        unsafe { pointer.write_bytes(0, size) };
        Ok(Arc::new(allocation))
    }
}

impl fmt::Debug for Rpcmem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rpcmem").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Memory that host and DSP share. Dropping it frees it, wherever it is still registered.
pub(crate) struct Allocation {
    pointer: NonNull<u8>,
    size: usize,
    fd: c_int,
    free: unsafe extern "C" fn(*mut c_void),
}

// SAFETY: plain bytes and a number, without ties to a thread.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Allocation {
    /// The first byte; aligned to a page.
    pub(crate) fn pointer(&self) -> NonNull<u8> {
        self.pointer
    }

    /// Bytes, in whole pages.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// File descriptor that the DSP knows the memory by.
    pub(crate) fn fd(&self) -> c_int {
        self.fd
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: the library gave the pointer, and nothing leads to it any more.
        unsafe { (self.free)(self.pointer.as_ptr().cast()) };
    }
}
