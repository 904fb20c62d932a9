//! A console of Windows: it reads bytes as its code page says, which seldom is UTF-8. Text goes to it as UTF-16.

#![cfg(windows)]
#![expect(unsafe_code, reason = "calls the system")]

use std::fs::File;
use std::io;
use std::os::windows::io::AsRawHandle as _;

use windows_sys::Win32::System::Console::{GetConsoleMode, WriteConsoleW};

/// Most UTF-16 units that are written at once: older versions of Windows refuse more than 64 KiB.
const MOST_UNITS: usize = 1 << 13;

/// True where `file` leads to a console.
pub(crate) fn is_console(file: &File) -> bool {
    let mut mode = 0;
    // SAFETY: the handle is open, and the number lives through the call.
    unsafe { GetConsoleMode(file.as_raw_handle(), &raw mut mode) != 0 }
}

/// Writes text to the console that `file` leads to.
pub(crate) fn write(file: &File, text: &str) -> io::Result<()> {
    let units: Vec<u16> = text.encode_utf16().collect();
    let mut rest = units.as_slice();
    while !rest.is_empty() {
        let count = rest.len().min(MOST_UNITS);
        let mut written = 0;
        // SAFETY: the handle is open; that number of units lies there, and the number lives through the call.
        let done = unsafe {
            WriteConsoleW(
                file.as_raw_handle(),
                rest.as_ptr(),
                count as u32,
                &raw mut written,
                std::ptr::null(),
            )
        };
        if done == 0 {
            return Err(io::Error::last_os_error());
        }
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        rest = rest.get(written as usize..).unwrap_or_default();
    }
    Ok(())
}
