//! Keeps standard output for results.
//!
//! Libraries of a device print to the process's standard output when they are loaded and later. A
//! program whose output is read by another one moves descriptor 1 away before it opens them, to standard error or
//! ([`redirect_to_log`]) to the log:
//!
//! ```no_run
//! use std::io::Write as _;
//! let mut results = qhx_base::stdout::redirect_to_stderr()?.into_file()?;
//! // … open libraries; whatever they print goes to standard error …
//! writeln!(results, "the result")?;
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Nothing in qhx does this on its own: descriptors belong to the program, not to a library.

#![expect(unsafe_code, reason = "duplicates file descriptors")]

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Write};

use crate::escape::shown;

/// The real standard output, while descriptor 1 leads to standard error. Dropping it puts
/// descriptor 1 back.
#[derive(Debug)]
pub struct StdoutGuard(File);

/// Makes descriptor 1 lead to standard error and returns the former standard output.
///
/// Call it before the first library is opened. `println!` writes to standard error from then on.
///
/// # Errors
/// When the system cannot duplicate the descriptors.
pub fn redirect_to_stderr() -> io::Result<StdoutGuard> {
    io::stdout().flush()?;
    let real = platform::standard_output()?;
    platform::replace(2, 1)?;
    Ok(StdoutGuard(real))
}

/// Same as [`redirect_to_stderr`], but text printed to descriptor 1 goes to the log line by line: `tracing` with target
/// `qnn` and level debug.
///
/// # Errors
/// There is no pipe or thread to be had, or descriptor 1 cannot be replaced.
pub fn redirect_to_log() -> io::Result<StdoutGuard> {
    let (reader, writer) = io::pipe()?;
    let log = move || {
        let mut lines = BufReader::new(reader);
        let mut line = Vec::new();
        // A printer without line ends is no reason to keep everything.
        while lines.by_ref().take(MAX_LINE).read_until(b'\n', &mut line).is_ok_and(|read| read > 0)
        {
            tracing::debug!(target: "qnn", "{}", shown(String::from_utf8_lossy(&line).trim_end()));
            line.clear();
        }
    };
    std::thread::Builder::new().name("qhx-stdout".to_owned()).spawn(log)?;
    io::stdout().flush()?;
    let real = platform::standard_output()?;
    platform::restore(&platform::file(writer), 1)?;
    Ok(StdoutGuard(real))
}

/// Bytes of a printed line that go into one record of the log.
const MAX_LINE: u64 = 4096;

impl StdoutGuard {
    /// The former standard output as another file.
    ///
    /// # Errors
    /// When the system cannot duplicate the descriptor.
    pub fn file(&self) -> io::Result<File> {
        self.0.try_clone()
    }

    /// The former standard output; descriptor 1 stays redirected until the process ends. The right
    /// choice for a program's `main`: the libraries may print while the process exits.
    ///
    /// # Errors
    /// When the system cannot duplicate the descriptor.
    pub fn into_file(self) -> io::Result<File> {
        let file = self.0.try_clone()?;
        std::mem::forget(self);
        Ok(file)
    }
}

impl Write for StdoutGuard {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Drop for StdoutGuard {
    fn drop(&mut self) {
        // Nothing can be done about a failure here: the descriptor then stays redirected.
        let _ = io::stdout().flush();
        // What the libraries have printed may still lie in the C library's buffer.
        // SAFETY: NULL stands for every open stream of the C library, which locks each.
        unsafe { libc::fflush(std::ptr::null_mut()) };
        let _ = platform::restore(&self.0, 1);
    }
}

#[cfg(unix)]
mod platform {
    use std::fs::File;
    use std::io;
    use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

    pub(super) fn file(writer: io::PipeWriter) -> File {
        File::from(OwnedFd::from(writer))
    }

    pub(super) fn standard_output() -> io::Result<File> {
        // SAFETY: takes and returns plain numbers.
        let copy = unsafe { libc::fcntl(1, libc::F_DUPFD_CLOEXEC, 3) };
        if copy < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and nothing else owns it.
        Ok(unsafe { File::from_raw_fd(copy) })
    }

    pub(super) fn replace(from: i32, to: i32) -> io::Result<()> {
        // SAFETY: takes and returns plain numbers.
        if unsafe { libc::dup2(from, to) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    pub(super) fn restore(file: &File, to: i32) -> io::Result<()> {
        replace(file.as_raw_fd(), to)
    }
}

#[cfg(windows)]
mod platform {
    use std::fs::File;
    use std::io;
    use std::os::windows::io::{AsHandle as _, AsRawHandle as _, OwnedHandle};

    pub(super) fn file(writer: io::PipeWriter) -> File {
        File::from(OwnedHandle::from(writer))
    }

    /// A program may have been started without a standard output. What it writes then goes nowhere, as on Unix, where
    /// Rust's runtime opens `/dev/null`.
    pub(super) fn standard_output() -> io::Result<File> {
        let copy = File::from(io::stdout().as_handle().try_clone_to_owned()?);
        if copy.as_raw_handle().is_null() {
            return File::options().write(true).open("NUL");
        }
        Ok(copy)
    }

    pub(super) fn replace(from: i32, to: i32) -> io::Result<()> {
        // SAFETY: takes and returns plain numbers.
        if unsafe { libc::dup2(from, to) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    pub(super) fn restore(file: &File, to: i32) -> io::Result<()> {
        let copy = file.try_clone()?;
        // SAFETY: the C runtime takes over the handle, which `copy` gives up below.
        let fd = unsafe { libc::open_osfhandle(copy.as_raw_handle() as isize, 0) };
        std::mem::forget(copy);
        replace(fd, to)
    }
}
