//! Stands in for `libcdsprpc.so`, up to the DSP's door.
//!
//! Behind the door is a protocol of Qualcomm's, which is not imitated: every call to the DSP fails. Before it
//! everything is as on a device. A library for the DSP is opened if it lies in a folder of `ADSP_LIBRARY_PATH`. What
//! the device can do is said by `QHX_TEST_DSP`: `signed-only` allows no unsigned process domain.

#![cfg(unix)]
#![expect(unsafe_code, reason = "has the C interface of another library")]
#![expect(clippy::missing_safety_doc, reason = "the interface is that of the vendor's library")]
#![expect(missing_docs, reason = "the interface is that of the vendor's library")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

/// The call is not for this device (`AEE_EUNSUPPORTED`).
const UNSUPPORTED: c_int = 0x14;
/// The library for the DSP was not found, or is not one that it loads.
const NO_LIBRARY: c_int = 0x8000_0406_u32 as c_int;
/// The DSP does not answer (`AEE_ECONNRESET`: it restarts).
const NO_ANSWER: c_int = 0x8000_04E2_u32 as c_int;
/// `remote_handle_control`: asks for a property of the DSP.
const DSP_INFO: u32 = 2;
/// The property: what the DSP loads may be unsigned.
const UNSIGNED: u32 = 1;
/// `remote_session_control`: asks for a process that loads unsigned libraries.
const UNSIGNED_PROCESS: u32 = 2;

/// Request and reply of `DSP_INFO`.
#[repr(C)]
#[derive(Debug)]
pub struct Property {
    domain: u32,
    attribute: u32,
    value: u32,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn remote_handle_control(request: u32, data: *mut c_void, len: u32) -> c_int {
    if request != DSP_INFO || (len as usize) < size_of::<Property>() || data.is_null() {
        return UNSUPPORTED;
    }
    // SAFETY: the caller gives this structure with this request.
    let property = unsafe { &mut *data.cast::<Property>() };
    property.value = match property.attribute {
        UNSIGNED => u32::from(!signed_only()),
        _ => return UNSUPPORTED,
    };
    0
}

fn signed_only() -> bool {
    std::env::var_os("QHX_TEST_DSP").is_some_and(|value| value == "signed-only")
}

#[unsafe(no_mangle)]
pub extern "C" fn remote_session_control(request: u32, _data: *mut c_void, _len: u32) -> c_int {
    if request == UNSIGNED_PROCESS && signed_only() { UNSUPPORTED } else { 0 }
}

/// `file:///libQnnHtpV81Skel.so?…`: the file is looked for in the folders of `ADSP_LIBRARY_PATH`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn remote_handle64_open(uri: *const c_char, handle: *mut u64) -> c_int {
    // SAFETY: the caller gives a C string and a place for the handle.
    let (uri, handle) = unsafe { (CStr::from_ptr(uri), &mut *handle) };
    let uri = uri.to_string_lossy();
    let name = uri.strip_prefix("file:///").and_then(|rest| rest.split('?').next());
    let folders = std::env::var("ADSP_LIBRARY_PATH").unwrap_or_default();
    let is_there = |name: &str| {
        folders.split([';', ':']).any(|folder| {
            std::fs::read(Path::new(folder).join(name)).is_ok_and(|b| b.starts_with(b"\x7fELF"))
        })
    };
    // Nothing that tests have is signed for a device.
    if signed_only() || !name.is_some_and(is_there) {
        return NO_LIBRARY;
    }
    *handle = 1;
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn remote_handle64_invoke(
    _handle: u64,
    _scalars: u32,
    _arguments: *mut c_void,
) -> c_int {
    NO_ANSWER
}

#[unsafe(no_mangle)]
pub extern "C" fn remote_handle64_close(_handle: u64) -> c_int {
    0
}

/// Functions of this library that answer one number, whatever they are given.
macro_rules! answers {
    ($($name:ident: $answer:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> c_int {
            $answer
        }
    )*};
}

answers! {
    remote_handle64_control: UNSUPPORTED;
    remote_system_request: UNSUPPORTED;
    remote_register_dma_handle: UNSUPPORTED;
    remote_register_buf_attr: 0;
    rpcmem_to_fd: -1;
    rpcmem_free: 0;
    fastrpc_mmap: UNSUPPORTED;
    fastrpc_munmap: UNSUPPORTED;
    dspqueue_create: UNSUPPORTED;
    dspqueue_close: UNSUPPORTED;
    dspqueue_export: UNSUPPORTED;
    dspqueue_read: UNSUPPORTED;
    dspqueue_read_noblock: UNSUPPORTED;
    dspqueue_write: UNSUPPORTED;
    dspqueue_write_noblock: UNSUPPORTED;
}

#[unsafe(no_mangle)]
pub extern "C" fn rpcmem_alloc(_heap: c_int, _flags: u32, _size: c_int) -> *mut c_void {
    std::ptr::null_mut()
}

#[unsafe(no_mangle)]
pub extern "C" fn rpcmem_alloc2(_heap: c_int, _flags: u32, _size: usize) -> *mut c_void {
    std::ptr::null_mut()
}
