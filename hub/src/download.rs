//! All files of a selection: several at once, then their names in the snapshot, then the branch.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use qhx_base::{CancelToken, Error, ErrorKind, Result, error};
use serde::Serialize;

use crate::cache::{Repository, below, make_parent};
use crate::choose::{Chosen, Selection, Want};
use crate::fetch::Fetch;
use crate::http::Client;
use crate::hub::{Hub, offline};
use crate::kind::Kind;
use crate::links;
use crate::lock::Lock;
use crate::name::Name;
use crate::progress::DownloadProgress;
use crate::record::{Noted, Pull, identity, write};
use crate::wait::interruptible;

/// Bytes that have to stay free for notes and folders.
const SPARE: u64 = 16 << 20;

/// Result of a download; the files may have been there before.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Pulled {
    /// Bundle or checkpoint.
    pub kind: Kind,
    /// The commit.
    pub commit: String,
    /// The folder or file in the repository; empty for the repository itself.
    pub folder: String,
    /// Path on this machine.
    pub path: PathBuf,
    /// Number of its files.
    pub files: usize,
    /// Bytes of its files.
    pub bytes: u64,
    /// Bytes that were fetched for it.
    pub fetched_bytes: u64,
    /// Files that are programs by their names, and were not fetched.
    pub left_out: Vec<String>,
}

impl Hub {
    /// Downloads what is not there of a selection. Files get their names in the snapshot when all of them are there and
    /// were compared with their hashes.
    ///
    /// # Errors
    /// When the hub refuses or a file of it is not what it is called, there is no room, nothing can be written, or it
    /// is cancelled. What came of files by then stays, and the next download goes on from there.
    pub fn download(
        &self,
        selection: &Selection,
        progress: &(dyn Fn(DownloadProgress<'_>) + Sync),
        cancel: &CancelToken,
    ) -> Result<Pulled> {
        let repository = self.cache().repository(&selection.name);
        let _lock = Lock::share(&repository.use_lock(), cancel)?;
        let missing = self.check_space(&repository, selection)?;
        if missing && self.options().offline {
            return Err(offline(&selection.name));
        }
        let client = Client::new(self.options())?;
        let files = distinct(selection);
        let bytes = files.iter().map(|file| file.bytes).sum();
        progress(DownloadProgress::Begin { files: selection.files.len(), bytes });
        // The first failure ends the others.
        let all = CancelToken::any(vec![cancel.clone()]);
        let fetch = Fetch {
            client: &client,
            options: self.options(),
            repository: &repository,
            id: selection.name.repository(),
            commit: &selection.commit,
            cancel: &all,
            report: progress,
        };
        // A failure cancels the others, and is what is reported then.
        let work = || Ok(each(&fetch, files, self.options().connections, &all));
        let fetched = interruptible(client.agent(), &all, work)??;
        finish(&repository, selection)?;
        Ok(Pulled {
            kind: selection.kind,
            commit: selection.commit.clone(),
            folder: selection.folder.clone(),
            path: below(&repository.snapshot(&selection.commit), &selection.folder),
            files: selection.files.len(),
            bytes: selection.bytes(),
            fetched_bytes: fetched,
            left_out: selection.left_out.clone(),
        })
    }

    /// The bundle or checkpoint of a name if it is whole in the cache, by the notes of its download. Nobody is asked:
    /// only for a commit is this what the hub has.
    ///
    /// # Errors
    /// Errors of [`Cache::find`](crate::Cache::find).
    pub fn already(
        &self,
        name: &Name,
        want: &Want,
        cancel: &CancelToken,
    ) -> Result<Option<Pulled>> {
        let Some(found) = self.cache().find(name, want, |_| false, cancel)? else {
            return Ok(None);
        };
        let repository = self.cache().repository(name);
        let record = repository.record(&found.commit).unwrap_or_default();
        let Some(pull) = record.pulls.get(&found.folder).filter(|pull| pull.whole) else {
            return Ok(None);
        };
        Ok(Some(Pulled {
            kind: found.kind,
            commit: found.commit,
            folder: found.folder,
            path: found.path,
            files: pull.files.len(),
            bytes: pull.files.values().map(|noted| noted.identity.bytes).sum(),
            fetched_bytes: 0,
            left_out: Vec::new(),
        }))
    }

    /// True when something has to be fetched, for which there is room.
    fn check_space(&self, repository: &Repository, selection: &Selection) -> Result<bool> {
        let length = |path: PathBuf| identity(&path).map_or(0, |found| found.bytes);
        let missing: Vec<u64> = distinct(selection)
            .into_iter()
            .filter(|file| identity(&repository.blob(&file.blob)).is_none())
            .map(|file| file.bytes.saturating_sub(length(repository.incomplete(&file.blob))))
            .collect();
        if missing.is_empty() {
            return Ok(false);
        }
        let folder = repository.root.join("blobs");
        make_parent(&folder.join("x"))?;
        let needed = missing.iter().try_fold(SPARE, |sum, bytes| sum.checked_add(*bytes));
        let fail = |e| Error::io(ErrorKind::Io, &folder, e);
        let free = (self.options().free_space)(&folder).map_err(fail)?;
        if needed.is_some_and(|needed| needed <= free) {
            return Ok(true);
        }
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        Err(error!(
            Io,
            "{}: {} MiB are needed, {} MiB are free",
            folder.display(),
            needed.map_or(u64::MAX, mib),
            free >> 20
        )
        .hint("make room, or set HF_HOME to a folder in a file system that has it"))
    }
}

/// One file of each content, the largest first.
fn distinct(selection: &Selection) -> Vec<&Chosen> {
    let files: BTreeMap<_, _> = selection.files.iter().map(|file| (&file.blob, file)).collect();
    let mut files: Vec<_> = files.into_values().collect();
    files.sort_by_key(|file| std::cmp::Reverse(file.bytes));
    files
}

/// Fetches files, several at once. Returns the bytes that came.
fn each(
    fetch: &Fetch<'_>,
    files: Vec<&Chosen>,
    connections: usize,
    cancel: &CancelToken,
) -> Result<u64> {
    let workers = connections.clamp(1, files.len().max(1));
    let queue = Mutex::new(files.into_iter());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        let mut fetched = 0;
        while let Some(file) = next() {
            let result = fetch.file(file);
            fetched += result.inspect_err(|_| cancel.cancel())?;
        }
        Ok(fetched)
    };
    let results: Vec<Result<u64>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let lost = || error!(Internal, "a thread that fetches files panicked");
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(lost()))).collect()
    });
    let failed = |result: &&Result<u64>| {
        result.as_ref().is_err_and(|error| error.kind() != ErrorKind::Cancelled)
    };
    if let Some(Err(error)) = results.iter().find(failed) {
        return Err(error.clone());
    }
    results.into_iter().sum()
}

/// Puts the files in their places, notes that they are whole, and lets the branch lead to them.
fn finish(repository: &Repository, selection: &Selection) -> Result<()> {
    let mut files = BTreeMap::new();
    for Chosen { path, blob, .. } in &selection.files {
        links::place(repository, &selection.commit, path, blob)?;
        let file = below(&repository.snapshot(&selection.commit), path);
        let found = identity(&file).ok_or_else(|| error!(Io, "{}: it is gone", file.display()))?;
        files.insert(path.clone(), Noted { blob: blob.as_str().to_owned(), identity: found });
    }
    let revision = selection.name.revision_or_main();
    repository.change_record(&selection.commit, |record| {
        if !selection.name.is_pinned() && !record.revisions.iter().any(|name| name == revision) {
            record.revisions.push(revision.to_owned());
        }
        let kind = selection.kind;
        let new = Pull { kind, whole: false, files: BTreeMap::new() };
        let pull = record.pulls.entry(selection.folder.clone()).or_insert(new);
        pull.kind = kind;
        pull.whole |= selection.whole;
        pull.files.extend(files);
    })?;
    if !selection.name.is_pinned() {
        write(&repository.reference(revision), selection.commit.as_bytes())?;
    }
    Ok(())
}
