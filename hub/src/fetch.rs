//! One file: goes on where an earlier attempt ended, and gets its name once its hash is right.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use qhx_base::{CancelToken, Error, ErrorKind, Result, error};
use tempfile::TempPath;
use ureq::Body;
use ureq::http::{HeaderMap, Response, StatusCode};

use crate::blob::Hasher;
use crate::cache::{INCOMPLETE, Repository, make_parent};
use crate::choose::Chosen;
use crate::head::{HEAD, program};
use crate::http::{Client, Failure, encoded};
use crate::lock::Lock;
use crate::options::HubOptions;
use crate::progress::DownloadProgress;
use crate::record::{fault, identity, is_same};
use crate::wait::pause;

/// Bytes that are read from a connection at a time.
const PIECE: usize = 1 << 17;

/// Longest pause between two attempts that the hub did not ask for.
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// Context that the fetches of a download share.
pub(crate) struct Fetch<'a> {
    pub client: &'a Client,
    pub options: &'a HubOptions,
    pub repository: &'a Repository,
    /// `OWNER/NAME`.
    pub id: String,
    pub commit: &'a str,
    pub cancel: &'a CancelToken,
    pub report: &'a (dyn Fn(DownloadProgress<'_>) + Sync),
}

impl Fetch<'_> {
    /// Makes sure that a file's blob is there, and is what it is called. Returns the bytes that were fetched.
    pub(crate) fn file(&self, file: &Chosen) -> Result<u64> {
        let waits = || (self.report)(DownloadProgress::Waiting { path: &file.path });
        let lock = Lock::take(&self.repository.blob_lock(&file.blob), self.cancel, waits)?;
        if self.is_there(file)? {
            (self.report)(DownloadProgress::Kept(file.bytes));
            return Ok(0);
        }
        let mut partial = Partial::open(self, file, lock.keeps_out())?;
        self.complete(file, &mut partial)?;
        if let Some(wrong) = partial.wrong() {
            // What an earlier attempt left, of whoever, is not taken twice.
            let again = partial.kept > 0;
            partial.restart()?;
            if !again {
                return Err(partial.refused(&wrong));
            }
            self.complete(file, &mut partial)?;
            if let Some(wrong) = partial.wrong() {
                partial.restart()?;
                return Err(partial.refused(&wrong));
            }
        }
        let fetched = partial.fetched;
        partial.finish()?;
        Ok(fetched)
    }

    /// True for a blob that was compared with its hash, now or earlier. One that is damaged is taken away.
    fn is_there(&self, file: &Chosen) -> Result<bool> {
        let path = self.repository.blob(&file.blob);
        let Some(found) = identity(&path) else { return Ok(false) };
        let verified = self.repository.verified();
        if verified.get(file.blob.as_str()).is_some_and(|noted| is_same(noted, &found)) {
            return Ok(true);
        }
        let wrong = match found.bytes == file.bytes {
            true => fault(&path, &file.blob, self.cancel)?,
            false => Some(format!("{} bytes, expected {}", found.bytes, file.bytes)),
        };
        let Some(wrong) = wrong else {
            self.repository.note_verified(&file.blob, &found)?;
            return Ok(true);
        };
        tracing::warn!(file = %file.path, "a damaged file is fetched again: {wrong}");
        std::fs::remove_file(&path).map_err(|e| Error::io(ErrorKind::Io, &path, e))?;
        Ok(false)
    }

    /// Fetches what is missing, in as many attempts as it takes.
    fn complete(&self, file: &Chosen, partial: &mut Partial<'_>) -> Result<()> {
        let (mut failures, mut restarts) = (0, 0);
        while partial.length < file.bytes {
            self.cancel.check()?;
            let before = partial.length;
            let (error, wait) = match self.attempt(file, partial) {
                Ok(Went::On) => continue,
                Ok(Went::Back) if restarts == 0 => {
                    restarts += 1;
                    continue;
                }
                Ok(Went::Back) => {
                    return Err(partial.refused("the hub gives other ranges than those asked for"));
                }
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Passing(error, wait)) => (error, wait),
                Err(Failure::Unreachable(error)) => (error, None),
            };
            failures = if partial.length > before { 1 } else { failures + 1 };
            if failures > self.options.attempts {
                return Err(kept(error.context(&file.path)));
            }
            let doubled = self.options.backoff.saturating_mul(1 << (failures - 1).min(10));
            let wait = wait.unwrap_or(doubled.min(MAX_BACKOFF));
            (self.report)(DownloadProgress::Retry { path: &file.path, error: &error, wait });
            pause(wait, self.cancel)?;
        }
        Ok(())
    }

    fn attempt(&self, file: &Chosen, partial: &mut Partial<'_>) -> Result<Went, Failure> {
        let parts: Vec<_> = file.path.split('/').map(encoded).collect();
        let path = format!("{}/resolve/{}/{}", self.id, self.commit, parts.join("/"));
        let from = Some(partial.length).filter(|length| *length > 0);
        let response = self.client.get(&self.client.url(&path), from)?;
        match (response.status(), from) {
            (StatusCode::RANGE_NOT_SATISFIABLE, _) => {
                partial.restart()?;
                return Ok(Went::Back);
            }
            (StatusCode::PARTIAL_CONTENT, Some(from))
                if is_range(response.headers(), from, file.bytes) => {}
            (StatusCode::PARTIAL_CONTENT, _) => {
                partial.restart()?;
                return Ok(Went::Back);
            }
            // Ranges are not known there: it comes from the first byte.
            (_, Some(_)) => partial.restart()?,
            _ => {}
        }
        self.read(file, partial, response)?;
        Ok(Went::On)
    }

    fn read(
        &self,
        file: &Chosen,
        partial: &mut Partial<'_>,
        response: Response<Body>,
    ) -> Result<(), Failure> {
        let body = response.into_body();
        let expected = file.bytes - partial.length;
        if let Some(length) = body.content_length().filter(|length| *length != expected) {
            let wrong = format!("the hub sends {length} bytes, expected {expected}");
            return Err(partial.refused(&wrong).into());
        }
        let mut reader = body.into_with_config().limit(expected.saturating_add(1)).reader();
        let mut buffer = vec![0; PIECE];
        while partial.length < file.bytes {
            self.cancel.check()?;
            let cut = |what: String| {
                let (found, bytes) = (partial.length, file.bytes);
                let error = error!(Io, "the connection ended after {found} of {bytes} bytes{what}");
                Failure::Passing(error, None)
            };
            let read = match reader.read(&mut buffer) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(cut(format!(": {}", qhx_base::files::why(&e)))),
                Ok(0) => return Err(cut(String::new())),
                Ok(read) => buffer.get(..read).unwrap_or_default(),
            };
            partial.add(read)?;
        }
        if matches!(reader.read(&mut buffer), Ok(1..)) {
            return Err(partial
                .refused(&format!("more than the {} bytes of the list", file.bytes))
                .into());
        }
        Ok(())
    }
}

/// Result of an attempt that did not fail.
enum Went {
    On,
    /// The part that was there is given up.
    Back,
}

/// `bytes 7-99/100`, from where it was asked for.
fn is_range(headers: &HeaderMap, from: u64, bytes: u64) -> bool {
    let range = headers.get("content-range").and_then(|value| value.to_str().ok());
    let parts = || {
        let (first, rest) = range?.strip_prefix("bytes ")?.split_once('-')?;
        let (_, total) = rest.split_once('/')?;
        Some(first.parse() == Ok(from) && (total == "*" || total.parse() == Ok(bytes)))
    };
    parts().unwrap_or(false)
}

/// Adds the hint that the part on disk is kept.
fn kept(error: Error) -> Error {
    if error.hint_text().is_some() {
        return error;
    }
    error.hint("what is there is kept: the same command goes on from it")
}

/// Place of the part of a file that is there.
enum Place {
    /// A file that each attempt goes on with, under the lock of the blob.
    Shared(PathBuf),
    /// In a file of this attempt's own, as there are no locks. It becomes the shared one where the attempt fails.
    Own(TempPath, PathBuf),
}

impl Place {
    /// A file that nobody else has, with what an earlier attempt left.
    fn own(shared: PathBuf) -> Result<(Self, File)> {
        let fail = |e| failed(&shared, e);
        let name = shared.with_extension("");
        let prefix = format!("{}.", name.file_name().unwrap_or_default().display());
        let mut new = tempfile::Builder::new();
        #[cfg(unix)]
        new.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        new.prefix(&prefix).suffix(INCOMPLETE);
        let own = new.tempfile_in(shared.parent().unwrap_or(Path::new("."))).map_err(fail)?;
        let own = own.into_temp_path();
        // Only one of several gets it.
        match std::fs::rename(&shared, &own) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(&shared, e)),
            _ => {}
        }
        let file = File::options().read(true).write(true).open(&own).map_err(fail)?;
        Ok((Self::Own(own, shared), file))
    }

    fn path(&self) -> &Path {
        match self {
            Self::Shared(path) => path,
            Self::Own(path, _) => path,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Self::Own(own, shared) = self {
            // Where it got its name it is gone.
            drop(std::fs::rename(own, shared));
        }
    }
}

/// A file of which a part is there.
struct Partial<'a> {
    fetch: &'a Fetch<'a>,
    chosen: &'a Chosen,
    path: Place,
    file: File,
    hash: Hasher,
    head: Vec<u8>,
    length: u64,
    /// Bytes of it that were there before.
    kept: u64,
    fetched: u64,
}

impl<'a> Partial<'a> {
    /// Opens and hashes what an earlier attempt left. Unless the blob is `locked`, others may fetch it as well.
    fn open(fetch: &'a Fetch<'a>, chosen: &'a Chosen, locked: bool) -> Result<Self> {
        let path = fetch.repository.incomplete(&chosen.blob);
        make_parent(&path)?;
        let (path, file) = if locked {
            let mut open = File::options();
            let file = open.read(true).write(true).create(true).truncate(false).open(&path);
            let file = file.map_err(|e| failed(&path, e))?;
            (Place::Shared(path), file)
        } else {
            Place::own(path)?
        };
        let hash = chosen.blob.hasher(chosen.bytes);
        let mut partial = Self {
            fetch,
            chosen,
            path,
            file,
            hash,
            head: Vec::new(),
            length: 0,
            kept: 0,
            fetched: 0,
        };
        partial.take_over()?;
        Ok(partial)
    }

    fn take_over(&mut self) -> Result<()> {
        let there = self.file.metadata().map_err(|e| self.fail(e))?.len();
        if there > self.chosen.bytes {
            return self.restart();
        }
        let mut buffer = vec![0; 1 << 20];
        loop {
            self.fetch.cancel.check()?;
            let read = self.file.read(&mut buffer).map_err(|e| self.fail(e))?;
            let Some(part @ [_, ..]) = buffer.get(..read) else { break };
            self.hash.update(part);
            self.look_at(part);
            self.length += read as u64;
        }
        self.kept = self.length;
        (self.fetch.report)(DownloadProgress::Kept(self.kept));
        Ok(())
    }

    fn look_at(&mut self, part: &[u8]) {
        let missing = HEAD - self.head.len();
        self.head.extend_from_slice(part.get(..missing).unwrap_or(part));
    }

    /// Adds what came.
    fn add(&mut self, part: &[u8]) -> Result<()> {
        if self.length + part.len() as u64 > self.chosen.bytes {
            let bytes = self.chosen.bytes;
            return Err(self.refused(&format!("more than the {bytes} bytes of the list")));
        }
        let missing = self.head.len() < HEAD;
        if missing {
            self.look_at(part);
            if let Some(program) = program(&self.head) {
                self.restart()?;
                let error = self.refused(&format!("{program}, expected data"));
                return Err(error.hint("qhx fetches no programs; tell the repository's author"));
            }
        }
        self.file.write_all(part).map_err(|e| self.fail(e))?;
        self.hash.update(part);
        self.length += part.len() as u64;
        self.fetched += part.len() as u64;
        (self.fetch.report)(DownloadProgress::Fetched(part.len() as u64));
        Ok(())
    }

    /// Gives up what is there.
    fn restart(&mut self) -> Result<()> {
        (self.fetch.report)(DownloadProgress::Lost(self.length));
        self.file.set_len(0).and_then(|()| self.file.rewind()).map_err(|e| self.fail(e))?;
        self.hash = self.chosen.blob.hasher(self.chosen.bytes);
        self.head.clear();
        (self.length, self.kept) = (0, 0);
        Ok(())
    }

    /// Description of the mismatch if the whole file has another hash.
    fn wrong(&self) -> Option<String> {
        let (found, blob) = (self.hash.clone().finish(), &self.chosen.blob);
        let wrong = || format!("{} {found}, expected {}", blob.algorithm(), blob.as_str());
        (found != blob.as_str()).then(wrong)
    }

    /// Gives it its name.
    fn finish(self) -> Result<()> {
        self.file.sync_all().map_err(|e| self.fail(e))?;
        let blob = self.fetch.repository.blob(&self.chosen.blob);
        drop(self.file);
        std::fs::rename(self.path.path(), &blob).map_err(|e| Error::io(ErrorKind::Io, &blob, e))?;
        let found = identity(&blob).ok_or_else(|| error!(Io, "{}: it is gone", blob.display()))?;
        self.fetch.repository.note_verified(&self.chosen.blob, &found)
    }

    fn refused(&self, what: &str) -> Error {
        error!(Artifact, "{}: {what}", self.chosen.path)
            .hint("try again; if it stays so, the hub or something on the way to it changes files")
    }

    /// The error of a file that cannot be written.
    fn fail(&self, error: io::Error) -> Error {
        failed(self.path.path(), error)
    }
}

fn failed(path: &Path, error: io::Error) -> Error {
    use io::ErrorKind as Io;
    let full = matches!(error.kind(), Io::StorageFull | Io::QuotaExceeded | Io::FileTooLarge);
    let error = Error::io(ErrorKind::Io, path, error);
    if !full {
        return error;
    }
    error.hint("make room, or set HF_HOME to a folder elsewhere; what is there is kept, and the same command goes on")
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc::{self, Receiver};

    use qhx_base::CancelToken;
    use qhx_hub_server::{Fault, Repo, Server};

    use crate::lock::tests::without_locks;
    use crate::{DownloadProgress, Hub, HubOptions, Pulled, Want};

    /// Fetches the bundle, and calls `then` once this number of bytes came.
    fn pull(hub: &Hub, bytes: u64, then: impl Fn() + Sync) -> Pulled {
        let (name, cancel, came) = ("o/n".parse().unwrap(), CancelToken::new(), AtomicU64::new(0));
        let report = |progress: DownloadProgress<'_>| {
            if let DownloadProgress::Fetched(more) = progress {
                let before = came.fetch_add(more, Ordering::Relaxed);
                if before < bytes && before + more >= bytes {
                    then();
                }
            }
        };
        let listing = hub.resolve(&name, &cancel).unwrap();
        let selection = Want::default().select(&listing, |name| name.ends_with(".json")).unwrap();
        hub.download(&selection, &report, &cancel).unwrap()
    }

    #[test]
    fn two_without_locks_fetch_into_files_of_their_own() {
        without_locks();
        let content: Vec<u8> = (0..1 << 20).map(|n: u32| (n % 251) as u8).collect();
        let repo = Repo::new("o/n", 'a').file("m.json", "{}").lfs("decode.bin", content.clone());
        let (server, cache) = (Server::start([repo]), tempfile::tempdir().unwrap());
        let options = HubOptions::new(cache.path()).endpoint(server.endpoint());
        // The second one begins again where the first one is.
        server.fault("decode.bin", Fault::IgnoreRange, 2);
        // Where one fails, the other waits no longer.
        let [(far, is_far), (begun, has_begun), (done, is_done)] =
            [(), (), ()].map(|()| mpsc::channel::<()>()).map(|(a, b)| (a, Mutex::new(b)));
        let wait = |for_it: &Mutex<Receiver<()>>| for_it.lock().unwrap().recv().unwrap_or(());
        std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                wait(&is_far);
                pull(&Hub::new(options.clone()), 1000, move || {
                    begun.send(()).unwrap();
                    wait(&is_done);
                })
            });
            let first = pull(&Hub::new(options.clone()), 500_000, move || {
                far.send(()).unwrap();
                wait(&has_begun);
            });
            let found = std::fs::read(first.path.join("decode.bin")).unwrap();
            drop(done);
            assert!(found == content, "what was noted as verified is another content");
            second.join().unwrap();
        });
        let blobs = crate::cache::entries(&cache.path().join("models--o--n/blobs")).unwrap();
        assert_eq!(blobs.len(), 2, "{blobs:?}");
    }
}
