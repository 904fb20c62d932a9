//! Ends the process at once.

#![expect(unsafe_code, reason = "calls _exit, which the standard library does not offer")]

/// Ends the process with this exit code, whatever other threads are doing.
///
/// `std::process::exit` runs what libraries want to do last. One whose thread waits for the DSP waits with it,
/// and where that hangs, so would the program that is to be ended. Nothing of ours is lost: results are written
/// at once.
pub(crate) fn now(code: i32) -> ! {
    // SAFETY: takes a number and does not return.
    unsafe { libc::_exit(code) }
}
