//! Stands in for the device's kernel where a program starts another: the emulator hands the call to the kernel of the
//! host, which does not know programs for the device's processor. This library, preloaded, starts the emulator instead.
//!
//! The emulator finds its settings in `QEMU_LD_PREFIX` and `QEMU_SET_ENV`, which are passed on.

#![cfg(unix)]
#![expect(unsafe_code, reason = "takes the place of a function of the C library")]
#![expect(clippy::missing_safety_doc, reason = "the interface is that of the C library")]
#![expect(missing_docs, reason = "the interface is that of the C library")]

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;

type Spawn = unsafe extern "C" fn(
    *mut c_int,
    *const c_char,
    *const c_void,
    *const c_void,
    *const *const c_char,
    *const *const c_char,
) -> c_int;

/// Settings of the loader that the host's loader must not follow. The emulator sets them again.
const LOADER: [&[u8]; 2] = [b"LD_PRELOAD=", b"LD_LIBRARY_PATH="];

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawnp(
    pid: *mut c_int,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    // SAFETY: the next function of this name is the C library's.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, c"posix_spawnp".as_ptr()) };
    if next.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: it has the type that the C library documents.
    let next = unsafe { std::mem::transmute::<*mut c_void, Spawn>(next) };
    // SAFETY: the caller gives a C string.
    let program = unsafe { CStr::from_ptr(file) };
    if let Some(error) = cannot_be_opened(program) {
        return error;
    }
    let emulator = std::env::var_os("QHX_TEST_EMULATOR")
        .filter(|_| is_for_this_processor(program))
        .and_then(|path| CString::new(path.as_bytes()).ok());
    let Some(emulator) = emulator else {
        // SAFETY: the arguments are the caller's.
        return unsafe { next(pid, file, actions, attributes, arguments, environment) };
    };
    // SAFETY: both are lists of C strings that end with NULL.
    let (given, variables) = unsafe { (list(arguments), list(environment)) };
    let mut line = vec![emulator.as_ptr(), file];
    line.extend(given.iter().skip(1).map(|argument| argument.as_ptr()));
    line.push(std::ptr::null());
    let mut kept: Vec<_> = variables
        .iter()
        .filter(|variable| !LOADER.iter().any(|name| variable.to_bytes().starts_with(name)))
        .map(|variable| variable.as_ptr())
        .collect();
    kept.push(std::ptr::null());
    // SAFETY: as the caller's, and the lists live during the call.
    unsafe { next(pid, emulator.as_ptr(), actions, attributes, line.as_ptr(), kept.as_ptr()) }
}

/// The C strings of a list that ends with NULL.
///
/// # Safety
/// It is NULL or such a list, which lives as long as the answer is used.
unsafe fn list<'a>(mut pointers: *const *const c_char) -> Vec<&'a CStr> {
    let mut texts = Vec::new();
    // SAFETY: the caller vouches for the list.
    while let Some(&text) = unsafe { pointers.as_ref() }.filter(|text| !text.is_null()) {
        // SAFETY: the caller vouches for its texts.
        texts.push(unsafe { CStr::from_ptr(text) });
        pointers = pointers.wrapping_add(1);
    }
    texts
}

/// The system's number of the error where a path leads to no file: under the emulator the function itself reports no
/// failure to start a program.
fn cannot_be_opened(program: &CStr) -> Option<c_int> {
    let path = std::path::Path::new(OsStr::from_bytes(program.to_bytes()));
    // A bare name is looked for in the folders of PATH.
    let named = path.components().count() > 1;
    named.then(|| std::fs::metadata(path).err()?.raw_os_error())?
}

fn is_for_this_processor(program: &CStr) -> bool {
    const AARCH64: [u8; 2] = 183_u16.to_le_bytes();
    let mut head = [0; 20];
    let file = std::fs::File::open(OsStr::from_bytes(program.to_bytes()));
    let read = file.and_then(|mut file| file.read_exact(&mut head));
    read.is_ok() && head.starts_with(b"\x7fELF") && head[18..] == AARCH64
}
