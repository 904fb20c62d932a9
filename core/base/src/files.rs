//! Opens files that came from somebody else: regular files only, and, where that matters, only
//! below a folder.
//!
//! A FIFO, a device or a socket in the place of a file would block for ever or never end. The file
//! is therefore opened without waiting for anybody, and what was opened is looked at before it is
//! read. The same goes for links: where the opened file lies is asked of the system, so that the
//! file that is judged is the file that is read.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

pub use crate::error::why;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Result, error};

/// Metadata that distinguishes a file and its state from others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// 0 on systems other than Unix.
    pub device: u64,
    /// 0 on systems other than Unix.
    pub inode: u64,
    /// Length.
    pub bytes: u64,
    /// Nanoseconds from 1970 to the last change of the contents.
    pub modified_ns: i64,
}

impl FileIdentity {
    /// Identity of the file with this metadata.
    pub fn of(data: &std::fs::Metadata) -> Self {
        let modified = data.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        let modified_ns = modified.and_then(|d| i64::try_from(d.as_nanos()).ok()).unwrap_or(0);
        #[cfg(unix)]
        let (device, inode) = {
            use std::os::unix::fs::MetadataExt as _;
            (data.dev(), data.ino())
        };
        #[cfg(not(unix))]
        let (device, inode) = (0, 0);
        Self { device, inode, bytes: data.len(), modified_ns }
    }
}

impl std::fmt::Display for FileIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes, changed {} ns after 1970", self.bytes, self.modified_ns)?;
        match self.inode {
            0 => Ok(()),
            inode => write!(f, ", inode {inode} of device {}", self.device),
        }
    }
}

/// Opens a regular file for reading.
///
/// # Errors
/// Errors of kind `kind`: the file cannot be opened, or is not a regular file.
pub fn open(kind: ErrorKind, path: &Path) -> Result<File> {
    let file = without_waiting().read(true).open(path).map_err(|e| refused(kind, path, e))?;
    let found = file.metadata().map_err(|e| Error::io(kind, path, e))?;
    if found.is_file() { Ok(file) } else { Err(wrong(kind, path, found.file_type())) }
}

/// Same as [`open`], for a file that must be below `folder` with links resolved.
///
/// On Linux and Android the system reports where the open file lies. On other systems the path is
/// resolved after the file was opened, and on Unix the file found there must be the opened one.
///
/// # Errors
/// Errors of [`open`], or if the file is outside `folder`.
pub fn open_within(kind: ErrorKind, path: &Path, folder: &Path) -> Result<File> {
    let file = open(kind, path)?;
    let real = place(&file, path).map_err(|e| Error::io(kind, path, e))?;
    let folder = folder.canonicalize().map_err(|e| Error::io(kind, folder, e))?;
    if real.starts_with(&folder) { Ok(file) } else { Err(leaves(path, &folder)) }
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// Errors of [`open`], or if the file cannot be read or is longer than `limit`.
pub fn read(kind: ErrorKind, path: &Path, limit: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = open(kind, path)?;
    file.take(limit.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|e| Error::io(kind, path, e))?;
    if bytes.len() as u64 > limit {
        let limit = match limit >> 20 {
            0 => format!("{limit} bytes"),
            mebibytes => format!("{mebibytes} MiB"),
        };
        return Err(Error::new(kind, format!("{}: larger than {limit}", path.display()))
            .hint("is this the file that was meant?"));
    }
    Ok(bytes)
}

/// Reads a regular file of at most `limit` bytes of UTF-8.
///
/// # Errors
/// Errors of [`read`], or if the file is not UTF-8.
pub fn read_text(kind: ErrorKind, path: &Path, limit: u64) -> Result<String> {
    String::from_utf8(read(kind, path, limit)?)
        .map_err(|e| Error::caused(kind, format_args!("{}: not UTF-8", path.display()), e))
}

/// Reads a regular JSON file of at most `limit` bytes.
///
/// # Errors
/// The errors of [`read`], and when the file is no such JSON; a byte order mark before it is named.
pub fn read_json<T: DeserializeOwned>(kind: ErrorKind, path: &Path, limit: u64) -> Result<T> {
    let bytes = read(kind, path, limit)?;
    if let Some(what) = byte_order_mark(&bytes) {
        let what = format!("{}: begins with {what}, expected JSON", path.display());
        return Err(Error::new(kind, what).hint(WITHOUT_MARK));
    }
    serde_json::from_slice(&bytes)
        .map_err(|e| Error::caused(kind, format_args!("{}: not JSON", path.display()), e))
}

/// The hint for a file that begins with a byte order mark.
pub const WITHOUT_MARK: &str =
    "save it as UTF-8 without a byte order mark: \"UTF-8\" of editors, and not \"UTF-8 with BOM\"";

/// The byte order mark (BOM) that a text begins with, if it does.
pub fn byte_order_mark(text: &[u8]) -> Option<&'static str> {
    match text {
        [0xef, 0xbb, 0xbf, ..] => Some("a byte order mark (BOM) of UTF-8"),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => Some("a byte order mark (BOM) of UTF-16"),
        _ => None,
    }
}

/// Opens a file for writing, which is made or emptied, without waiting for anybody. A device is taken as it is; what
/// else is not a regular file is named.
///
/// # Errors
/// When the file cannot be made, or is neither a regular file nor a device.
pub fn create(kind: ErrorKind, path: &Path) -> Result<File> {
    let file = without_waiting().write(true).create(true).truncate(false).open(path);
    let file = file.map_err(|e| refused(kind, path, e))?;
    let found = file.metadata().map_err(|e| Error::io(kind, path, e))?;
    if found.is_file() {
        file.set_len(0).map_err(|e| Error::io(kind, path, e))?;
    } else if name(found.file_type()) != DEVICE {
        return Err(wrong(kind, path, found.file_type()));
    }
    Ok(file)
}

/// The error for a file that cannot be opened. A socket cannot, nor a folder for writing, nor a FIFO that nobody reads.
fn refused(kind: ErrorKind, path: &Path, error: io::Error) -> Error {
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => wrong(kind, path, found.file_type()),
        _ => Error::io(kind, path, error),
    }
}

/// The error for what is not a regular file.
fn wrong(kind: ErrorKind, path: &Path, what: FileType) -> Error {
    let found = name(what);
    Error::new(kind, format!("{}: {found}, expected a regular file", path.display()))
}

/// The error for a file that links lead out of `folder`.
pub fn leaves(path: &Path, folder: &Path) -> Error {
    error!(
        Manifest,
        "{}: a link out of the bundle's folder {}",
        path.display(),
        dunce::simplified(folder).display()
    )
    .hint("copy the file into the bundle")
}

#[cfg_attr(not(unix), expect(unused_mut, reason = "only Unix has files that keep one waiting"))]
fn without_waiting() -> OpenOptions {
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        // Nothing changes for regular files.
        options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    }
    options
}

const DEVICE: &str = "a device";

fn name(found: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt as _;
        if found.is_fifo() {
            return "a FIFO";
        }
        if found.is_socket() {
            return "a socket";
        }
        if found.is_char_device() || found.is_block_device() {
            return DEVICE;
        }
    }
    if found.is_dir() { "a folder" } else { "not a file" }
}

/// Path of an open file with links resolved.
fn place(file: &File, path: &Path) -> io::Result<PathBuf> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        use std::os::fd::AsRawFd as _;
        if let Ok(real) = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())) {
            return Ok(real);
        }
    }
    let real = path.canonicalize()?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        let (opened, found) = (file.metadata()?, std::fs::symlink_metadata(&real)?);
        if (opened.dev(), opened.ino()) != (found.dev(), found.ino()) {
            return Err(io::Error::other("the file was exchanged while it was opened"));
        }
    }
    #[cfg(not(unix))]
    let _ = file;
    Ok(real)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn what_is_not_a_regular_file_is_named_at_once() {
        use std::sync::mpsc;
        use std::time::Duration;

        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let socket = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let cases = [
            (fifo, "a FIFO"),
            (socket, "a socket"),
            (PathBuf::from("/dev/zero"), "a device"),
            (dir.path().to_owned(), "a folder"),
        ];
        type Call = fn(&Path) -> Error;
        let calls: [Call; 2] = [
            |path| read(ErrorKind::Artifact, path, 1 << 20).unwrap_err(),
            |path| open_within(ErrorKind::Artifact, path, Path::new("/")).unwrap_err(),
        ];
        for (path, name) in cases {
            for call in calls {
                let (send, receive) = mpsc::channel();
                let given = path.clone();
                std::thread::spawn(move || send.send(call(&given)));
                let error = receive.recv_timeout(Duration::from_secs(20)).expect(name);
                let expected = format!("{}: {name}, expected a regular file", path.display());
                assert_eq!(error.message(), expected);
                assert_eq!(error.kind(), ErrorKind::Artifact);
            }
        }
    }

    #[test]
    fn reading_stops_at_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, [b'x'; 9]).unwrap();
        assert_eq!(read_text(ErrorKind::Artifact, &path, 9).unwrap(), "xxxxxxxxx");
        let error = read(ErrorKind::Artifact, &path, 8).unwrap_err();
        assert!(error.message().ends_with("larger than 8 bytes"), "{error}");
        std::fs::write(&path, [0xff]).unwrap();
        let error = read_text(ErrorKind::Artifact, &path, 9).unwrap_err();
        assert!(error.message().contains("not UTF-8"), "{error}");
    }
}
