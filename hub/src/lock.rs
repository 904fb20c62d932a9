//! Locks between processes: two that fetch the same file, or one that removes what another fetches.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;
use std::time::Duration;

use qhx_base::{CancelToken, Error, ErrorKind, Result};

use crate::cache::make_parent;
use crate::wait::pause;

/// How often a lock is tried.
const STEP: Duration = Duration::from_millis(100);

/// A lock that is held until this is dropped, or until the process ends.
#[derive(Debug)]
pub(crate) struct Lock(#[expect(dead_code, reason = "closing the file gives the lock back")] File);

impl Lock {
    /// Waits for the lock. `waits` is called once if another process holds it.
    pub(crate) fn take(path: &Path, cancel: &CancelToken, waits: impl FnOnce()) -> Result<Self> {
        Self::wait(path, cancel, File::try_lock, waits)
    }

    /// As [`Lock::take`], together with others who take it so.
    pub(crate) fn share(path: &Path, cancel: &CancelToken) -> Result<Self> {
        Self::wait(path, cancel, File::try_lock_shared, || {})
    }

    /// The lock, or `None` where another process holds it.
    pub(crate) fn attempt(path: &Path) -> Result<Option<Self>> {
        attempt(path, open(path)?, File::try_lock).map(Result::ok)
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
    match lock(&file) {
        Ok(()) => Ok(Ok(Lock(file))),
        Err(TryLockError::WouldBlock) => Ok(Err(file)),
        // Some file systems of networks and phones have none. What is fetched is checked all the same.
        Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => {
            tracing::warn!(path = %path.display(), "the file system has no locks: fetch one thing at a time");
            Ok(Ok(Lock(file)))
        }
        Err(TryLockError::Error(e)) => Err(Error::io(ErrorKind::Io, path, e)),
    }
}
