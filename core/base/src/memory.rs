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
    purge();
}

/// Purges pages that bionic's allocator does not use. Android has the function since version 8, the option since 9.
#[cfg(target_os = "android")]
fn purge() {
    /// The constant of `malloc.h` in bionic.
    const M_PURGE: libc::c_int = -101;
    type Mallopt = unsafe extern "C" fn(libc::c_int, libc::c_int) -> libc::c_int;
    // SAFETY: the name ends with a zero.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"mallopt".as_ptr()) };
    if !found.is_null() {
        // SAFETY: bionic's function of this name has this signature, and ignores options that it does not know.
        unsafe { std::mem::transmute::<*mut libc::c_void, Mallopt>(found)(M_PURGE, 0) };
    }
}
