//! Detects a program that has more rights than the user who started it.

#![cfg_attr(
    any(target_os = "linux", target_os = "android"),
    expect(unsafe_code, reason = "asks the C library how the program was started")
)]

/// True when the program runs with more rights than the user who started it: set-user-id, set-group-id or file
/// capabilities. Environment and arguments are then untrusted input.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub fn runs_with_extra_rights() -> bool {
    // SAFETY: takes and returns plain numbers.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// True when the program runs with more rights than the user who started it.
#[cfg(all(unix, not(any(target_os = "linux", target_os = "android"))))]
pub fn runs_with_extra_rights() -> bool {
    use rustix::process::{getegid, geteuid, getgid, getuid};
    geteuid() != getuid() || getegid() != getgid()
}

/// True when the program runs with more rights than the user who started it.
#[cfg(not(unix))]
pub fn runs_with_extra_rights() -> bool {
    false
}
