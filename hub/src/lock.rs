//! Locks between processes: two that fetch the same file, or one that removes what another fetches.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;
use std::time::Duration;

use qhx_base::{CancelToken, Error, ErrorKind, Result};

use crate::cache::make_parent;
use crate::wait::pause;

/// Interval at which a lock is tried.
const STEP: Duration = Duration::from_millis(100);

/// A lock that is held until this is dropped, or until the process ends.
#[derive(Debug)]
pub struct Lock {
    #[expect(dead_code, reason = "closing the file gives the lock back")]
    file: File,
    keeps_out: bool,
}

/// Numbers of the system for "no locks here" that have no kind of their own: `ENOLCK` of NFS without its lock daemon,
/// and of Windows what shares of other systems answer.
const NO_LOCKS: &[i32] = if cfg!(windows) {
    &[1, 50]
} else if cfg!(any(target_os = "linux", target_os = "android")) {
    &[37, 95]
} else {
    &[77, 45, 102]
};

impl Lock {
    /// Waits for the lock. `waits` is called once if another process holds it.
    ///
    /// # Errors
    /// When the file cannot be made, and when it is cancelled.
    pub fn take(path: &Path, cancel: &CancelToken, waits: impl FnOnce()) -> Result<Self> {
        Self::wait(path, cancel, File::try_lock, waits)
    }

    /// Same as [`Lock::take`], but shared with others who take it so.
    pub(crate) fn share(path: &Path, cancel: &CancelToken) -> Result<Self> {
        Self::wait(path, cancel, File::try_lock_shared, || {})
    }

    /// The lock, or `None` where another process holds it.
    ///
    /// # Errors
    /// When the file of the lock cannot be made.
    pub fn attempt(path: &Path) -> Result<Option<Self>> {
        attempt(path, open(path)?, File::try_lock).map(Result::ok)
    }

    /// False on a file system without locks, where others are not kept out.
    pub fn keeps_out(&self) -> bool {
        self.keeps_out
    }

    fn wait(
        path: &Path,
        cancel: &CancelToken,
        lock: fn(&File) -> Result<(), TryLockError>,
        waits: impl FnOnce(),
    ) -> Result<Self> {
        let mut file = open(path)?;
        let mut waits = Some(waits);
        loop {
            file = match attempt(path, file, lock)? {
                Ok(lock) => return Ok(lock),
                Err(file) => file,
            };
            if let Some(waits) = waits.take() {
                waits();
            }
            pause(STEP, cancel)?;
        }
    }
}

fn open(path: &Path) -> Result<File> {
    make_parent(path)?;
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
    file.map_err(|e| Error::io(ErrorKind::Io, path, e))
}

/// The lock, or the file where another process holds it.
fn attempt(
    path: &Path,
    file: File,
    lock: fn(&File) -> Result<(), TryLockError>,
) -> Result<Result<Lock, File>> {
    #[cfg(test)]
    let lock = if tests::absent() { tests::refused } else { lock };
    match lock(&file) {
        Ok(()) => Ok(Ok(Lock { file, keeps_out: true })),
        Err(TryLockError::WouldBlock) => Ok(Err(file)),
        // Some file systems of networks and phones have none.
        Err(TryLockError::Error(e)) if is_absent(&e) => {
            tracing::debug!(path = %path.display(), "the file system has no locks: {e}");
            Ok(Ok(Lock { file, keeps_out: false }))
        }
        Err(TryLockError::Error(e)) => Err(Error::io(ErrorKind::Io, path, e)),
    }
}

fn is_absent(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
        || error.raw_os_error().is_some_and(|number| NO_LOCKS.contains(&number))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::{File, TryLockError};
    use std::io;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::NO_LOCKS;

    /// The file system of all tests of this crate's own has no locks.
    static ABSENT: AtomicBool = AtomicBool::new(false);

    pub(crate) fn without_locks() {
        ABSENT.store(true, Ordering::Relaxed);
    }

    pub(super) fn absent() -> bool {
        ABSENT.load(Ordering::Relaxed)
    }

    pub(super) fn refused(_: &File) -> Result<(), TryLockError> {
        Err(TryLockError::Error(io::Error::from_raw_os_error(NO_LOCKS[0])))
    }
}
