//! Removing what was fetched. Contents that something else shares stay.

use std::collections::BTreeSet;
use std::path::PathBuf;

use qhx_base::{Error, ErrorKind, Result, error};
use serde::Serialize;

use crate::blob::BlobId;
use crate::cache::{Cache, Repository, below, entries, files_below};
use crate::choose::within;
use crate::links;
use crate::lock::Lock;
use crate::name::Name;
use crate::record::identity;

/// Result of a removal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Removed {
    /// Commits of which something was removed.
    pub commits: Vec<String>,
    /// Bytes that are free again.
    pub bytes: u64,
}

impl Cache {
    /// Removes what a name leads to: a folder of a revision, a revision, or without either all of the repository, also
    /// what other tools fetched of it. Contents that another revision shares stay. What downloads of the repository
    /// left that did not end is removed with it.
    ///
    /// # Errors
    /// When nothing of it is there, something of it is being fetched, or a file cannot be removed.
    pub fn remove(&self, name: &Name) -> Result<Removed> {
        let repository = self.repository(name);
        let absent =
            || error!(Usage, "{name}: nothing of it is there").hint("qhx list shows what is there");
        if !repository.root.is_dir() {
            return Err(absent());
        }
        let Some(_lock) = Lock::attempt(&repository.use_lock())? else {
            return Err(error!(Io, "{name}: something of it is being fetched")
                .hint("wait for it, or end it"));
        };
        if name.revision.is_none() && name.folder.is_none() {
            return repository.remove_all();
        }
        let mut commits = Vec::new();
        for commit in repository.commits(name)? {
            let removed = match &name.folder {
                None => repository.remove_commit(&commit)?,
                Some(folder) => repository.remove_folder(&commit, folder)?,
            };
            if removed {
                commits.push(commit);
            }
        }
        // Of a download that did not end there may be contents and no commit.
        let bytes = repository.sweep()?;
        if commits.is_empty() && bytes == 0 {
            return Err(absent());
        }
        Ok(Removed { commits, bytes })
    }
}

impl Repository {
    fn remove_all(&self) -> Result<Removed> {
        let commits = entries(&self.root.join("snapshots"))?;
        let commits =
            commits.iter().filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()));
        let commits = commits.collect();
        let blobs = entries(&self.root.join("blobs"))?;
        let bytes = blobs.iter().filter_map(|path| Some(identity(path)?.bytes)).sum();
        std::fs::remove_dir_all(&self.root).map_err(|e| Error::io(ErrorKind::Io, &self.root, e))?;
        // Another process may have made a lock meanwhile.
        drop(std::fs::remove_dir_all(self.locks()));
        Ok(Removed { commits, bytes })
    }

    fn remove_commit(&self, commit: &str) -> Result<bool> {
        let snapshot = self.snapshot(commit);
        if !snapshot.is_dir() {
            return Ok(false);
        }
        self.change_record(commit, |record| record.pulls.clear())?;
        std::fs::remove_dir_all(&snapshot).map_err(|e| Error::io(ErrorKind::Io, &snapshot, e))?;
        let refs = self.root.join("refs");
        for inner in files_below(&refs)? {
            if self.commit_of(&inner).is_some_and(|found| found == commit) {
                let file = below(&refs, &inner);
                std::fs::remove_file(&file).map_err(|e| Error::io(ErrorKind::Io, &file, e))?;
            }
        }
        Ok(true)
    }

    fn remove_folder(&self, commit: &str, folder: &str) -> Result<bool> {
        let root = self.snapshot(commit);
        let record = self.record(commit).unwrap_or_default();
        let others: BTreeSet<_> = record
            .pulls
            .iter()
            .filter(|(name, _)| *name != folder)
            .flat_map(|(_, pull)| pull.files.keys())
            .collect();
        let own = record.pulls.get(folder).into_iter().flat_map(|pull| pull.files.keys().cloned());
        let mut files: BTreeSet<String> = own.collect();
        files.extend(files_below(&root)?.into_iter().filter(|path| within(path, folder).is_some()));
        files.retain(|path| !others.contains(path));
        self.change_record(commit, |record| drop(record.pulls.remove(folder)))?;
        let mut removed = false;
        for path in &files {
            let file = below(&root, path);
            // A pull that lost a file is removed, too.
            removed |= std::fs::remove_file(&file).is_ok();
            for parent in file.ancestors().skip(1).take_while(|parent| *parent != root) {
                if std::fs::remove_dir(parent).is_err() {
                    break;
                }
            }
        }
        if files_below(&root)?.is_empty() && root.is_dir() {
            self.remove_commit(commit)?;
        }
        Ok(removed)
    }

    /// Removes contents that nothing has. Returns their bytes.
    fn sweep(&self) -> Result<u64> {
        let mut bytes = 0;
        for Loose { path, blob, bytes: length } in self.loose()? {
            // Another tool may fetch it now.
            let lock = Lock::attempt(&self.blob_lock(&blob))?;
            let Some(lock) = lock else { continue };
            // Without locks, what is not whole may be under way.
            if lock.keeps_out() || path == self.blob(&blob) {
                std::fs::remove_file(&path).map_err(|e| Error::io(ErrorKind::Io, &path, e))?;
                bytes += length;
            }
        }
        Ok(bytes)
    }

    /// Contents, whole or not, that no snapshot and no note has: what was removed, or what a download left that did not
    /// end.
    pub(crate) fn loose(&self) -> Result<Vec<Loose>> {
        let mut used = BTreeSet::new();
        for snapshot in entries(&self.root.join("snapshots"))? {
            let files = files_below(&snapshot)?;
            used.extend(files.iter().filter_map(|inner| links::blob_of(&below(&snapshot, inner))));
        }
        // Where files are copies, they are noted.
        let noted = self.records()?.into_iter().flat_map(|(_, record)| record.pulls.into_values());
        let noted = noted.flat_map(|pull| pull.files.into_values());
        used.extend(noted.filter_map(|noted| BlobId::named(&noted.blob)));
        let loose = |path: PathBuf| {
            let blob = Self::content(&path).filter(|blob| !used.contains(blob))?;
            let bytes = identity(&path)?.bytes;
            Some(Loose { path, blob, bytes })
        };
        Ok(entries(&self.root.join("blobs"))?.into_iter().filter_map(loose).collect())
    }
}

/// A file that holds a content, or a part of it, that nothing has.
pub(crate) struct Loose {
    pub path: PathBuf,
    pub blob: BlobId,
    pub bytes: u64,
}
