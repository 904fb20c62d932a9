//! Limits of a child process, which it sets itself before it reads anything.

#![cfg_attr(windows, expect(unsafe_code, reason = "calls the system"))]

use std::io;

/// Limits this process to `memory` bytes (0 for no limit) and has it leave no core file.
#[cfg(unix)]
pub(super) fn set(memory: u64) -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let at_most = |limit| Rlimit { current: Some(limit), maximum: Some(limit) };
    setrlimit(Resource::Core, at_most(0))?;
    // The address space also counts what is only reserved: libraries' files, stacks, arenas.
    let resource = if cfg!(any(target_os = "linux", target_os = "android")) {
        Resource::Data
    } else {
        Resource::As
    };
    if memory > 0 {
        setrlimit(resource, at_most(memory))?;
    }
    Ok(())
}

/// Limits this process to `memory` bytes (0 for no limit). A crash is reported to nobody but the parent: no window
/// waits for an answer, and no report is written.
#[cfg(windows)]
pub(super) fn set(memory: u64) -> io::Result<()> {
    use std::ptr::null;

    use windows_sys::Win32::System::Diagnostics::Debug::{
        SEM_FAILCRITICALERRORS, SEM_NOGPFAULTERRORBOX, SetErrorMode,
    };
    use windows_sys::Win32::System::JobObjects::{
        AssignProcessToJobObject, CreateJobObjectW, JOB_OBJECT_LIMIT_PROCESS_MEMORY,
        JOBOBJECT_EXTENDED_LIMIT_INFORMATION, JobObjectExtendedLimitInformation,
        SetInformationJobObject,
    };
    use windows_sys::Win32::System::Threading::GetCurrentProcess;

    // SAFETY: takes and returns plain numbers.
    unsafe { SetErrorMode(SEM_FAILCRITICALERRORS | SEM_NOGPFAULTERRORBOX) };
    if memory == 0 {
        return Ok(());
    }
    let mut limit = JOBOBJECT_EXTENDED_LIMIT_INFORMATION::default();
    limit.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_PROCESS_MEMORY;
    limit.ProcessMemoryLimit = usize::try_from(memory).unwrap_or(usize::MAX);
    let check = |answer| if answer == 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // The handle stays open: the job is there as long as the process.
    // SAFETY: NULL stands for default rights and for no name.
    let job = unsafe { CreateJobObjectW(null(), null()) };
    if job.is_null() {
        return Err(io::Error::last_os_error());
    }
    let bytes = size_of_val(&limit) as u32;
    // SAFETY: the class goes with the struct, which lives through the call and has the given length.
    check(unsafe {
        SetInformationJobObject(
            job,
            JobObjectExtendedLimitInformation,
            (&raw const limit).cast(),
            bytes,
        )
    })?;
    // SAFETY: both handles are of this process and open.
    check(unsafe { AssignProcessToJobObject(job, GetCurrentProcess()) })
}

/// This system has no limits that qhx knows.
#[cfg(not(any(unix, windows)))]
pub(super) fn set(_memory: u64) -> io::Result<()> {
    Ok(())
}
