//! Files of a snapshot: links to blobs, or copies where the system allows no links.

use std::io;
use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result};

use crate::blob::BlobId;
use crate::cache::{Repository, below, make_parent};

/// Puts the file `inner` of a commit in its place.
pub(crate) fn place(
    repository: &Repository,
    commit: &str,
    inner: &str,
    blob: &BlobId,
) -> Result<()> {
    let file = below(&repository.snapshot(commit), inner);
    let target = target(inner, blob);
    if std::fs::read_link(&file).is_ok_and(|found| found == target) {
        return Ok(());
    }
    make_parent(&file)?;
    let folder = file.parent().unwrap_or(Path::new("."));
    // Nobody sees a file that is half there.
    let made = tempfile::Builder::new().prefix(".qhx-").make_in(folder, |path| {
        symlink(&target, path).or_else(|e| {
            if e.kind() == io::ErrorKind::AlreadyExists {
                return Err(e);
            }
            let blob = repository.blob(blob);
            std::fs::hard_link(&blob, path).or_else(|_| std::fs::copy(&blob, path).map(drop))
        })
    });
    let made = made.map_err(|e| Error::io(ErrorKind::Io, &file, e))?;
    made.into_temp_path().persist(&file).map_err(|e| Error::io(ErrorKind::Io, &file, e.error))
}

/// The way from the file to its blob.
fn target(inner: &str, blob: &BlobId) -> PathBuf {
    let ups = inner.matches('/').count() + 2;
    let mut target: PathBuf = std::iter::repeat_n("..", ups).collect();
    target.extend(["blobs", blob.as_str()]);
    target
}

/// The blob that a file of a snapshot is a link to.
pub(crate) fn blob_of(file: &Path) -> Option<BlobId> {
    let target = std::fs::read_link(file).ok()?;
    let folder = target.parent()?.file_name()?;
    BlobId::named(target.file_name()?.to_str()?).filter(|_| folder == "blobs")
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target, link)
}

#[cfg(not(any(unix, windows)))]
fn symlink(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
