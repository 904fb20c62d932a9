//! The folders of a cache, as the hub's own tools lay them out.

use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result};

use crate::blob::BlobId;
use crate::name::{Name, is_safe_path};

/// Cache of files fetched from a hub: finds, lists, checks and removes them, without a network.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// The cache in this folder, which need not be there.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Its folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn repository(&self, name: &Name) -> Repository {
        let folder = name.cache_folder();
        Repository::new(self.root.join(".locks").join(&folder), self.root.join(folder))
    }

    /// The repositories of which something is there, sorted.
    pub(crate) fn names(&self) -> Result<Vec<Name>> {
        let mut names: Vec<_> = entries(&self.root)?
            .iter()
            .filter(|path| path.is_dir())
            .filter_map(|path| Name::of_cache_folder(path.file_name()?.to_str()?))
            .collect();
        names.sort();
        Ok(names)
    }
}

/// End of the name of a content that is not there whole.
pub(crate) const INCOMPLETE: &str = ".incomplete";

/// The folders of one repository.
#[derive(Debug, Clone)]
pub(crate) struct Repository {
    /// `models--OWNER--NAME`
    pub root: PathBuf,
    locks: PathBuf,
}

impl Repository {
    pub(crate) fn new(locks: PathBuf, root: PathBuf) -> Self {
        Self { root, locks }
    }

    pub(crate) fn blob(&self, blob: &BlobId) -> PathBuf {
        self.root.join("blobs").join(blob.as_str())
    }

    /// File with the part that is there of an incomplete blob.
    pub(crate) fn incomplete(&self, blob: &BlobId) -> PathBuf {
        self.root.join("blobs").join(format!("{}{INCOMPLETE}", blob.as_str()))
    }

    /// The blob of which a file holds what is there: `HASH`, `HASH.incomplete`, or `HASH.….incomplete` where each
    /// download has a file of its own.
    pub(crate) fn content(file: &Path) -> Option<BlobId> {
        let name = file.file_name()?.to_str()?;
        let blob = name.strip_suffix(INCOMPLETE).map_or(Some(name), |part| part.split('.').next());
        BlobId::named(blob?)
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// The file that holds the commit of a branch or tag.
    pub(crate) fn reference(&self, revision: &str) -> PathBuf {
        self.root.join("refs").join(revision)
    }

    /// Folder of qhx's notes about the repository; other tools pass it over.
    pub(crate) fn notes(&self) -> PathBuf {
        self.root.join(".qhx")
    }

    /// Held while the blob is fetched, also by other tools.
    pub(crate) fn blob_lock(&self, blob: &BlobId) -> PathBuf {
        self.locks.join(format!("{}.lock", blob.as_str()))
    }

    /// Held together while something is fetched, and alone while something is removed.
    pub(crate) fn use_lock(&self) -> PathBuf {
        self.locks.join("qhx-use.lock")
    }

    /// Held while notes are written.
    pub(crate) fn notes_lock(&self) -> PathBuf {
        self.locks.join("qhx-notes.lock")
    }

    pub(crate) fn locks(&self) -> &Path {
        &self.locks
    }

    /// The commit that a branch or tag led to when it was fetched last.
    pub(crate) fn commit_of(&self, revision: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.reference(revision)).ok()?;
        let commit = text.trim();
        crate::name::is_commit(commit).then(|| commit.to_owned())
    }
}

/// The paths in a folder, sorted. None where there is no such folder.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let fail = |e: std::io::Error| Error::io(ErrorKind::Io, folder, e);
    let found = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        found => found.map_err(fail)?,
    };
    let paths = found.map(|entry| entry.map(|entry| entry.path()).map_err(fail));
    let mut paths = paths.collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// Files below a folder, with `/` between parts of their paths. What cannot be a file of a hub is passed over.
pub(crate) fn files_below(folder: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut folders = vec![(folder.to_owned(), String::new())];
    while let Some((folder, prefix)) = folders.pop() {
        for path in entries(&folder)? {
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            let inner =
                if prefix.is_empty() { name.to_owned() } else { format!("{prefix}/{name}") };
            let is_folder = std::fs::symlink_metadata(&path).is_ok_and(|data| data.is_dir());
            if !is_safe_path(&inner) {
            } else if is_folder {
                folders.push((path, inner));
            } else {
                found.push(inner);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The path of a file of a hub below a folder.
pub(crate) fn below(folder: &Path, inner: &str) -> PathBuf {
    inner
        .split('/')
        .filter(|part| !part.is_empty())
        .fold(folder.to_owned(), |path, part| path.join(part))
}

/// Makes the folder that a file is to lie in.
pub(crate) fn make_parent(file: &Path) -> Result<()> {
    let Some(folder) = file.parent() else { return Ok(()) };
    std::fs::create_dir_all(folder).map_err(|e| {
        Error::io(ErrorKind::Io, folder, e).hint("HF_HOME names another folder for what is fetched")
    })
}
