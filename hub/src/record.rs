//! Notes of qhx about fetched files: which files of a commit are whole, and which blobs were compared with their
//! hashes. A file that is still the same by inode, length and time is not read again.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use qhx_base::files::{self, FileIdentity};
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::blob::BlobId;
use crate::cache::{Repository, make_parent};
use crate::kind::Kind;
use crate::lock::Lock;

/// Longest note that is read.
const MAX_BYTES: u64 = 64 << 20;

/// Result of comparing a file of a snapshot with the hash that it is called by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FileCheck {
    /// Path in the repository.
    pub path: String,
    /// Fault of the file, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Files fetched of a commit.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Branches and tags that led to it.
    pub revisions: Vec<String>,
    /// When something of it was fetched last, in seconds from 1970.
    pub time: u64,
    /// By the folder or file that they make up.
    pub pulls: BTreeMap<String, Pull>,
}

/// A bundle or checkpoint that is there whole.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Pull {
    pub kind: Kind,
    /// Nothing of it was left unwanted.
    #[serde(default)]
    pub whole: bool,
    /// By path in the repository.
    pub files: BTreeMap<String, Noted>,
}

/// A file that was compared with its hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Noted {
    pub blob: String,
    pub identity: FileIdentity,
}

/// Blobs that were compared with their hashes, and what they were then.
pub(crate) type Verified = BTreeMap<String, FileIdentity>;

/// The same file in the same state. The number of a device may change when the system starts.
pub(crate) fn is_same(a: &FileIdentity, b: &FileIdentity) -> bool {
    (a.inode, a.bytes, a.modified_ns) == (b.inode, b.bytes, b.modified_ns)
}

/// Present identity of a file, links followed.
pub(crate) fn identity(file: &Path) -> Option<FileIdentity> {
    std::fs::metadata(file)
        .ok()
        .filter(std::fs::Metadata::is_file)
        .map(|data| FileIdentity::of(&data))
}

/// Fault of a file whose content is called `blob`, if it has one. Reads all of it.
pub(crate) fn fault(file: &Path, blob: &BlobId, cancel: &CancelToken) -> Result<Option<String>> {
    let fail = |e: std::io::Error| Error::io(ErrorKind::Artifact, file, e);
    let mut open = files::open(ErrorKind::Artifact, file)?;
    let mut hash = blob.hasher(open.metadata().map_err(fail)?.len());
    let mut buffer = vec![0; 1 << 20];
    loop {
        cancel.check()?;
        match open.read(&mut buffer).map_err(fail)? {
            0 => break,
            read => hash.update(buffer.get(..read).unwrap_or_default()),
        }
    }
    let found = hash.finish();
    let (algorithm, expected) = (blob.algorithm(), blob.as_str());
    Ok((found != expected).then(|| format!("{algorithm} {found}, expected {expected}")))
}

impl Repository {
    fn record_file(&self, commit: &str) -> std::path::PathBuf {
        self.notes().join(format!("{commit}.json"))
    }

    /// Notes about a commit.
    pub(crate) fn record(&self, commit: &str) -> Option<Record> {
        read(&self.record_file(commit))
    }

    /// The commits that something was noted of, the latest first.
    pub(crate) fn records(&self) -> Result<Vec<(String, Record)>> {
        let mut found: Vec<_> = crate::cache::entries(&self.notes())?
            .iter()
            .filter_map(|path| {
                let commit =
                    path.file_stem()?.to_str().filter(|stem| crate::name::is_commit(stem))?;
                Some((commit.to_owned(), read::<Record>(path)?))
            })
            .collect();
        found.sort_by_key(|(_, record)| std::cmp::Reverse(record.time));
        Ok(found)
    }

    /// Changes what is noted of a commit. Nothing is noted where nothing is left.
    pub(crate) fn change_record(
        &self,
        commit: &str,
        change: impl FnOnce(&mut Record),
    ) -> Result<()> {
        let _lock = Lock::take(&self.notes_lock(), &CancelToken::new(), || {})?;
        let mut record = self.record(commit).unwrap_or_default();
        change(&mut record);
        let file = self.record_file(commit);
        if record.pulls.is_empty() {
            // It may not have been there.
            drop(std::fs::remove_file(&file));
            return Ok(());
        }
        record.time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        write_json(&file, &record)
    }

    pub(crate) fn verified(&self) -> Verified {
        read(&self.notes().join("verified.json")).unwrap_or_default()
    }

    /// Notes that a blob is what it is called.
    pub(crate) fn note_verified(&self, blob: &BlobId, identity: &FileIdentity) -> Result<()> {
        let _lock = Lock::take(&self.notes_lock(), &CancelToken::new(), || {})?;
        let mut verified = self.verified();
        verified.retain(|name, _| self.root.join("blobs").join(name).exists());
        verified.insert(blob.as_str().to_owned(), identity.clone());
        write_json(&self.notes().join("verified.json"), &verified)
    }
}

fn read<T: serde::de::DeserializeOwned>(file: &Path) -> Option<T> {
    // Absent as a rule.
    let bytes = files::read(ErrorKind::Io, file, MAX_BYTES).ok()?;
    let value = serde_json::from_slice(&bytes);
    value
        .inspect_err(|e| tracing::warn!(file = %file.display(), "a note that cannot be read: {e}"))
        .ok()
}

fn write_json(file: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_vec(value)
        .map_err(|e| Error::caused(ErrorKind::Internal, "a note as JSON", e))?;
    write(file, &text)
}

/// Writes a file whole, or leaves the one that is there.
pub(crate) fn write(file: &Path, bytes: &[u8]) -> Result<()> {
    let fail = |e: std::io::Error| Error::io(ErrorKind::Io, file, e);
    make_parent(file)?;
    let mut new = tempfile::Builder::new();
    #[cfg(unix)]
    new.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let folder = file.parent().unwrap_or(Path::new("."));
    let mut new = new.prefix(".qhx-").tempfile_in(folder).map_err(fail)?;
    new.write_all(bytes).and_then(|()| File::sync_all(new.as_file())).map_err(fail)?;
    new.persist(file).map_err(|e| fail(e.error)).map(drop)
}
