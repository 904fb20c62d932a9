//! Local content of a hub: found by name, listed, looked at again. No network is asked.

use std::path::{Path, PathBuf};

use qhx_base::{CancelToken, Result, error, snapshot};
use serde::Serialize;

use crate::blob::BlobId;
use crate::cache::{Cache, Repository, below, entries, files_below};
use crate::choose::{BundleFolder, Want, bundles, is_model, within};
use crate::kind::Kind;
use crate::links;
use crate::name::Name;
use crate::record::{FileCheck, Pull, Record, fault, identity, is_same};

/// Something that a name leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
    /// Bundle or checkpoint.
    pub kind: Kind,
    /// The commit that it is of.
    pub commit: String,
    /// Its folder or file in the repository; empty for the repository itself.
    pub folder: String,
    /// Path on this machine.
    pub path: PathBuf,
}

/// Something that is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Local {
    /// The name that leads to it.
    pub name: String,
    /// Bundle or checkpoint.
    pub kind: Kind,
    /// The commit that it is of.
    pub commit: String,
    /// Branches and tags that led to the commit when something of it was fetched.
    pub revisions: Vec<String>,
    /// Its folder or file in the repository; empty for the repository itself.
    pub folder: String,
    /// Path on this machine.
    pub path: PathBuf,
    /// Bytes of its files.
    pub bytes: u64,
    /// Its files are there with their lengths. `None` where another tool fetched it, which does not note what belongs
    /// to it.
    pub complete: Option<bool>,
}

/// Remains of unfinished downloads of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Unfinished {
    /// The repository.
    pub name: String,
    /// Bytes that came.
    pub bytes: u64,
}

impl Cache {
    /// Remains of unfinished downloads, sorted by name: contents that nothing in [`Cache::list`] has.
    ///
    /// # Errors
    /// When a folder cannot be read.
    pub fn unfinished(&self) -> Result<Vec<Unfinished>> {
        let mut found = Vec::new();
        for name in self.names()? {
            let loose = self.repository(&name).loose()?;
            if !loose.is_empty() {
                let bytes = loose.iter().map(|content| content.bytes).sum();
                found.push(Unfinished { name: name.to_string(), bytes });
            }
        }
        Ok(found)
    }

    /// The bundle or checkpoint that a name leads to. `want` decides if several bundles of a repository are there; its
    /// `folder` is that of the name. `is_manifest` is asked about files that other tools fetched.
    ///
    /// A file that is not the one any more that was compared with its hash is compared again.
    ///
    /// # Errors
    /// When several bundles are there and none is preferred; when a file of it is gone or damaged, or cannot be read.
    pub fn find(
        &self,
        name: &Name,
        want: &Want,
        is_manifest: impl Fn(&str) -> bool,
        cancel: &CancelToken,
    ) -> Result<Option<Found>> {
        let repository = self.repository(name);
        for commit in repository.commits(name)? {
            let found = match repository.record(&commit) {
                Some(record) => repository.pulled(name, want, &commit, &record, cancel)?,
                None => repository.foreign(name, want, &commit, &is_manifest)?,
            };
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// All bundles and checkpoints that are there, sorted by name.
    ///
    /// # Errors
    /// When a folder cannot be read.
    pub fn list(&self, is_manifest: impl Fn(&str) -> bool) -> Result<Vec<Local>> {
        let mut found = Vec::new();
        for name in self.names()? {
            let repository = self.repository(&name);
            for path in entries(&repository.root.join("snapshots"))? {
                let Some(commit) = path.file_name().and_then(|name| name.to_str()) else {
                    continue;
                };
                match repository.record(commit) {
                    Some(record) => found.extend(repository.list_pulled(&name, commit, &record)),
                    None => found.extend(repository.list_foreign(&name, commit, &is_manifest)?),
                }
            }
        }
        Ok(found)
    }

    /// Compares the files of a folder of a cache with the hashes that they are called by. `None` for a folder of any
    /// other place. Files that `skips` are not read; `on_file` is called with each other one as it is done.
    ///
    /// # Errors
    /// When a file cannot be read, it is cancelled, and any error of `on_file`.
    pub fn verify(
        path: &Path,
        cancel: &CancelToken,
        skips: impl Fn(&Path) -> bool,
        mut on_file: impl FnMut(&FileCheck) -> Result<()>,
    ) -> Result<Option<Vec<FileCheck>>> {
        let Some(place) = snapshot::locate(path) else { return Ok(None) };
        let repository = Repository::at(place.repository);
        let root = repository.snapshot(&place.commit);
        let folder = if path.is_dir() {
            place.inner
        } else {
            crate::choose::split(&place.inner).0.to_owned()
        };
        let noted = repository.record(&place.commit).unwrap_or_default();
        let noted = noted.pulls.values().flat_map(|pull| &pull.files);
        let mut files: std::collections::BTreeMap<String, Option<BlobId>> =
            noted.map(|(path, noted)| (path.clone(), BlobId::named(&noted.blob))).collect();
        for inner in files_below(&root)? {
            let blob = links::blob_of(&below(&root, &inner));
            files.entry(inner).or_insert(blob);
        }
        let mut checks = Vec::new();
        // What nobody knows the hash of was put there by somebody else.
        for (path, blob) in files.into_iter().filter_map(|(path, blob)| Some((path, blob?))) {
            let file = below(&root, &path);
            if within(&path, &folder).is_none() || skips(&file) {
                continue;
            }
            let message = match identity(&file) {
                None => Some("missing".to_owned()),
                Some(_) => fault(&file, &blob, cancel)?,
            };
            let check = FileCheck { path, message };
            on_file(&check)?;
            checks.push(check);
        }
        Ok(Some(checks))
    }
}

impl Repository {
    /// The repository in this folder of a cache, for reading.
    fn at(root: PathBuf) -> Self {
        let locks = root.parent().unwrap_or(&root).join(".locks");
        Self::new(locks.join(root.file_name().unwrap_or_default()), root)
    }

    /// The commits that a name may lead to, the likeliest first.
    pub(crate) fn commits(&self, name: &Name) -> Result<Vec<String>> {
        let revision = name.revision_or_main();
        if name.is_pinned() {
            return Ok(vec![revision.to_owned()]);
        }
        let mut commits: Vec<_> = self.commit_of(revision).into_iter().collect();
        // Other tools let the branch lead to a commit of which they fetched something else.
        for (commit, record) in self.records()? {
            if record.revisions.iter().any(|name| name == revision) && !commits.contains(&commit) {
                commits.push(commit);
            }
        }
        Ok(commits)
    }

    /// The bundle or checkpoint that a name leads to among those that qhx fetched.
    fn pulled(
        &self,
        name: &Name,
        want: &Want,
        commit: &str,
        record: &Record,
        cancel: &CancelToken,
    ) -> Result<Option<Found>> {
        let found = match &name.folder {
            Some(wanted) => record
                .pulls
                .iter()
                .find(|(folder, _)| within(wanted, folder).is_some() || folder.as_str() == wanted),
            None => self.preferred(name, want, record)?,
        };
        let Some((folder, pull)) = found else { return Ok(None) };
        let path = below(&self.snapshot(commit), name.folder.as_ref().unwrap_or(folder));
        // A manifest may be named without its end.
        if !path.exists() && !with_json(&path).is_file() && name.folder.as_ref() != Some(folder) {
            return Ok(None);
        }
        self.check(name, commit, folder, pull, cancel)?;
        let (commit, folder) = (commit.to_owned(), folder.clone());
        Ok(Some(Found { kind: pull.kind, commit, folder, path }))
    }

    /// The one that is wanted of several.
    fn preferred<'a>(
        &self,
        name: &Name,
        want: &Want,
        record: &'a Record,
    ) -> Result<Option<(&'a String, &'a Pull)>> {
        let folders: Vec<_> = record
            .pulls
            .iter()
            .filter(|(_, pull)| pull.kind == Kind::Bundle)
            .map(|(folder, _)| BundleFolder::of(folder))
            .collect();
        if folders.is_empty() || (record.pulls.len() == 1 && want.archs.is_empty()) {
            return Ok(record.pulls.iter().next());
        }
        let chosen = want.choose(name, &folders)?;
        Ok(record.pulls.get_key_value(&chosen.path))
    }

    /// Refuses what is not what was fetched.
    fn check(
        &self,
        name: &Name,
        commit: &str,
        folder: &str,
        pull: &Pull,
        cancel: &CancelToken,
    ) -> Result<()> {
        let root = self.snapshot(commit);
        for (path, noted) in &pull.files {
            let file = below(&root, path);
            let found = identity(&file);
            if found.as_ref().is_some_and(|found| is_same(found, &noted.identity)) {
                continue;
            }
            let wrong = match (&found, BlobId::named(&noted.blob)) {
                (None, _) => Some("missing".to_owned()),
                (Some(found), _) if found.bytes != noted.identity.bytes => {
                    Some(format!("{} bytes, expected {}", found.bytes, noted.identity.bytes))
                }
                // A cache that was copied: its files are what they were.
                (Some(_), Some(blob)) => fault(&file, &blob, cancel)?,
                (Some(_), None) => None,
            };
            if let Some(wrong) = wrong {
                let hint = format!("fetch it again: qhx pull {}", name.clone().within(folder));
                return Err(error!(Artifact, "{}: {wrong}", file.display()).hint(hint));
            }
            if let Some(found) = found {
                let noted_again = self.change_record(commit, |record| {
                    let pull = record.pulls.get_mut(folder);
                    if let Some(noted) = pull.and_then(|pull| pull.files.get_mut(path)) {
                        noted.identity = found;
                    }
                });
                // A cache that others own is read all the same.
                if let Err(e) = noted_again {
                    tracing::debug!("not noted: {e}");
                }
            }
        }
        Ok(())
    }

    /// The bundle or checkpoint that a name leads to among those that other tools fetched.
    fn foreign(
        &self,
        name: &Name,
        want: &Want,
        commit: &str,
        is_manifest: &impl Fn(&str) -> bool,
    ) -> Result<Option<Found>> {
        let root = self.snapshot(commit);
        let found = |kind, folder: &str| {
            let (commit, folder) = (commit.to_owned(), folder.to_owned());
            Some(Found { kind, commit, path: below(&root, &folder), folder })
        };
        let files = files_below(&root)?;
        let folders = bundles(files.iter().map(String::as_str), is_manifest);
        let Some(folder) = &name.folder else {
            if let [_, ..] = folders[..] {
                return Ok(found(Kind::Bundle, &want.choose(name, &folders)?.path));
            }
            return Ok(checkpoint(&files).and_then(|folder| found(Kind::Checkpoint, folder)));
        };
        let path = below(&root, folder);
        let is_there = path.exists() || with_json(&path).is_file();
        Ok(found(if is_model(folder) { Kind::Checkpoint } else { Kind::Bundle }, folder)
            .filter(|_| is_there))
    }

    fn list_pulled(&self, name: &Name, commit: &str, record: &Record) -> Vec<Local> {
        let root = self.snapshot(commit);
        let pulls = record.pulls.iter().map(|(folder, pull)| {
            let lengths = pull.files.iter().map(|(path, noted)| {
                let found = identity(&below(&root, path)).map(|found| found.bytes);
                (found.unwrap_or(0), found == Some(noted.identity.bytes))
            });
            let lengths: Vec<_> = lengths.collect();
            Local {
                revisions: record.revisions.clone(),
                bytes: lengths.iter().map(|(bytes, _)| bytes).sum(),
                complete: Some(lengths.iter().all(|(_, whole)| *whole)),
                ..self.local(name, commit, pull.kind, folder)
            }
        });
        pulls.collect()
    }

    fn list_foreign(
        &self,
        name: &Name,
        commit: &str,
        is_manifest: &impl Fn(&str) -> bool,
    ) -> Result<Vec<Local>> {
        let root = self.snapshot(commit);
        let files = files_below(&root)?;
        let mut found: Vec<_> = bundles(files.iter().map(String::as_str), is_manifest)
            .into_iter()
            .map(|bundle| (Kind::Bundle, bundle.path))
            .collect();
        if found.is_empty() {
            found.extend(checkpoint(&files).map(|folder| (Kind::Checkpoint, folder.to_owned())));
        }
        let local = |(kind, folder): (Kind, String)| {
            let inside =
                files.iter().filter(|path| *path == &folder || within(path, &folder).is_some());
            let lengths = inside.filter_map(|path| identity(&below(&root, path)));
            Local {
                bytes: lengths.map(|found| found.bytes).sum(),
                ..self.local(name, commit, kind, &folder)
            }
        };
        Ok(found.into_iter().map(local).collect())
    }

    fn local(&self, name: &Name, commit: &str, kind: Kind, folder: &str) -> Local {
        let main = self.commit_of("main").is_some_and(|main| main == commit);
        let revision = if main { None } else { Some(commit.to_owned()) };
        Local {
            name: Name { revision, ..name.clone() }.within(folder).to_string(),
            kind,
            commit: commit.to_owned(),
            revisions: Vec::new(),
            folder: folder.to_owned(),
            path: below(&self.snapshot(commit), folder),
            bytes: 0,
            complete: None,
        }
    }
}

/// The checkpoint of files: their folder, or the one file among them that is a model.
fn checkpoint(files: &[String]) -> Option<&str> {
    let top =
        |end: &'static str| files.iter().filter(move |f| !f.contains('/') && f.ends_with(end));
    if top("config.json").next().is_some() && top(".safetensors").next().is_some() {
        return Some("");
    }
    let mut models = files.iter().filter(|file| !file.contains('/') && is_model(file));
    models.next().filter(|_| models.next().is_none()).map(String::as_str)
}

fn with_json(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".json");
    path.with_file_name(name)
}
