//! Memory of the process.

#![cfg_attr(
    any(all(target_os = "linux", target_env = "gnu"), target_os = "android"),
    expect(unsafe_code, reason = "asks the allocator to give memory back")
)]

/// Gives memory that was freed back to the system, as far as the allocator can. glibc keeps what lies below a live
/// block, which after requests of many small pieces is most of it: a server that had taken 1.2 GB kept all of it with
/// 8 MB live. It takes some ten milliseconds a gigabyte, and is for times without work.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes no pointer and may be called from any thread at any time.
    unsafe {
        libc::malloc_trim(0);
    }
    #[cfg(target_os = "android")]
    // SAFETY: as above; an allocator that does not know the option ignores it.
    unsafe {
        /// Of `malloc.h` in bionic: purges pages that are not used.
        const M_PURGE: libc::c_int = -101;
        libc::mallopt(M_PURGE, 0);
    }
}
