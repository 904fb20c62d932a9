//! The output folder: filled beside its place under a hidden name, then renamed into it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, TryLockError};
use std::io::{BufWriter, Write};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use qhx_base::hash::{hex, sha256};
use qhx_base::{Error, ErrorKind, Result, files};
use qhx_checkpoint::{Checkpoint, MAX_JSON};
use qhx_core::manifest::{self, Manifest};
use qhx_graph::progress::Progress;
use qhx_graph::weight::{F16_OVERFLOW, RowSource, beyond_f16, stream};
use qhx_types::DType;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::kit::{table_bytes, write_rows};

/// Begins the name of a staging folder.
const STAGING: &str = ".qhx-forge-";
/// Names in a staging folder.
const ROOT: &str = "bundle";
const LOCK: &str = "lock";
const JOURNAL: &str = "finished";
const NEW_JOURNAL: &str = "finished.new";
const REPLACED: &str = "replaced";
/// Begins the names of what is made of a bundle beside it, see [`crate::prepare`].
const PREPARED: &str = "prepared/";
/// Files that a message names.
const NAMED: usize = 3;

/// A bundle in the making.
///
/// It lies in a hidden folder whose name is made of the output's name and of a hash of what it is made
/// from. What is made and finished as a whole is an *artifact*: a context binary, an ONNX graph with its
/// weights, a table. When one is finished, a line of the folder's journal says so, with the hashes of its
/// files. A process that is killed leaves the folder behind; the next one with the same name takes over the
/// artifacts whose files still have these hashes and makes the others again.
#[derive(Debug)]
pub(crate) struct Staging {
    /// Beside the output folder, so that the rename stays on one file system.
    folder: PathBuf,
    /// Inside `folder`.
    root: PathBuf,
    out: PathBuf,
    overwrite: bool,
    finished: Vec<Finished>,
    /// Held as long as this lives: two processes must not fill one folder.
    _lock: Lock,
    /// Artifacts stay for the next attempt when this is dropped.
    keep: bool,
    /// The bundle is in its place.
    published: bool,
}

/// A line of the journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Finished {
    artifact: String,
    /// Fingerprint of the inputs that the artifact is made from.
    fingerprint: String,
    files: Vec<Hashed>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Hashed {
    file: String,
    bytes: u64,
    sha256: String,
}

/// A hash under construction, of strings that cannot run into each other.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fingerprint(Sha256);

impl Fingerprint {
    /// Adds one string.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    /// The hash so far, in hexadecimal.
    pub fn hex(&self) -> String {
        hex(self.0.clone().finalize())
    }
}

impl Staging {
    /// Checks that `out` may be made or replaced, and opens the hidden folder: an earlier one of the
    /// same `fingerprint` with what is whole in it, or a new one.
    pub fn open(
        out: &Path,
        overwrite: bool,
        fingerprint: &str,
        progress: &mut dyn Progress,
    ) -> Result<Self> {
        check_place(out, overwrite)?;
        let parent = match out.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        std::fs::create_dir_all(parent).map_err(|e| Error::io(ErrorKind::Io, parent, e))?;
        let name = out.file_name().unwrap_or_default().to_string_lossy();
        let fingerprint = fingerprint.get(..16).unwrap_or(fingerprint);
        let folder = parent.join(format!("{STAGING}{name}-{fingerprint}"));
        let root = folder.join(ROOT);
        std::fs::create_dir_all(&root).map_err(|e| Error::io(ErrorKind::Io, &root, e))?;
        for folder in [&folder, &root] {
            let metadata = std::fs::symlink_metadata(folder)
                .map_err(|e| Error::io(ErrorKind::Io, folder, e))?;
            if !metadata.is_dir() {
                return Err(Error::new(
                    ErrorKind::Usage,
                    format!("{}: a link, expected a folder of the forge's own", folder.display()),
                )
                .hint("remove the link"));
            }
        }
        let lock = lock(&folder.join(LOCK))?;
        let mut staging = Self {
            folder,
            root,
            out: out.to_owned(),
            overwrite,
            finished: Vec::new(),
            _lock: lock,
            keep: true,
            published: false,
        };
        staging.recover()?;
        staging.take_over(progress)?;
        Ok(staging)
    }

    /// Puts an old bundle back, or away, whose replacement a killed process did not finish.
    fn recover(&self) -> Result<()> {
        let old = self.folder.join(REPLACED);
        if !old.exists() {
            return Ok(());
        }
        if self.out.exists() {
            return std::fs::remove_dir_all(&old).map_err(|e| Error::io(ErrorKind::Io, &old, e));
        }
        std::fs::rename(&old, &self.out).map_err(|e| Error::io(ErrorKind::Io, &old, e))?;
        check_place(&self.out, self.overwrite)
    }

    /// Reads the journal and removes every file that it does not vouch for.
    fn take_over(&mut self, progress: &mut dyn Progress) -> Result<()> {
        // Absent in a new folder. What cannot be read vouches for nothing.
        let journal = files::read(ErrorKind::Io, &self.folder.join(JOURNAL), MAX_JSON);
        let journal = journal.unwrap_or_default();
        // A line that a killed process did not finish is not JSON.
        let lines = journal
            .split(|byte| *byte == b'\n')
            .filter_map(|line| serde_json::from_slice::<Finished>(line).ok());
        let lines: Vec<_> = lines.collect();
        let total = |list: &[Finished]| {
            let bytes = list.iter().flat_map(|f| &f.files).map(|f| f.bytes);
            bytes.fold(0u64, u64::saturating_add)
        };
        if total(&lines) > 0 {
            progress.stage("verify finished artifacts", total(&lines));
        }
        let mut done = 0;
        for artifact in lines {
            let mut whole = true;
            for file in &artifact.files {
                let found = hash_file(&self.root, &file.file, &mut done, progress);
                whole &= match found {
                    Ok(found) => found == *file,
                    Err(error) if error.kind() == ErrorKind::Cancelled => return Err(error),
                    Err(_) => false,
                };
            }
            if whole {
                self.finished.push(artifact);
            }
        }
        let known: Vec<_> = self.finished.iter().flat_map(|f| &f.files).map(|f| &f.file).collect();
        for (file, _) in self.files()? {
            if !known.contains(&&file) {
                let path = self.root.join(&file);
                std::fs::remove_file(&path).map_err(|e| Error::io(ErrorKind::Io, &path, e))?;
            }
        }
        if !self.finished.is_empty() {
            progress.note(&format!(
                "{} artifacts of an earlier attempt are whole and kept, {} bytes",
                self.finished.len(),
                total(&self.finished)
            ));
        }
        self.write_journal()
    }

    /// True when `artifact` is there, made from what has this `fingerprint`.
    pub fn has(&self, artifact: &str, fingerprint: &str) -> bool {
        self.finished.iter().any(|f| f.artifact == artifact && f.fingerprint == fingerprint)
    }

    /// Bytes of a file of a finished artifact.
    pub fn bytes(&self, file: &str) -> Option<u64> {
        let files = self.finished.iter().flat_map(|f| &f.files);
        files.into_iter().find(|f| f.file == file).map(|f| f.bytes)
    }

    /// Hashes the files of an artifact and notes that it is finished.
    pub fn finish(
        &mut self,
        artifact: &str,
        fingerprint: &str,
        files: &[String],
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let mut hashed = Vec::with_capacity(files.len());
        let total = files.iter().filter_map(|f| std::fs::metadata(self.root.join(f)).ok());
        progress.stage(&format!("hash {artifact}"), total.map(|m| m.len()).sum());
        let mut done = 0;
        for file in files {
            hashed.push(hash_file(&self.root, file, &mut done, progress)?);
        }
        self.finished.push(Finished {
            artifact: artifact.to_owned(),
            fingerprint: fingerprint.to_owned(),
            files: hashed,
        });
        self.write_journal()
    }

    /// Replaces the journal at once, so that it is never half of one.
    fn write_journal(&self) -> Result<()> {
        let mut text = String::new();
        for artifact in &self.finished {
            let line = serde_json::to_string(artifact)
                .map_err(|e| Error::caused(ErrorKind::Internal, "journal", e))?;
            text.push_str(&line);
            text.push('\n');
        }
        let (path, new) = (self.folder.join(JOURNAL), self.folder.join(NEW_JOURNAL));
        std::fs::write(&new, text).map_err(|e| Error::io(ErrorKind::Io, &new, e))?;
        std::fs::rename(&new, &path).map_err(|e| Error::io(ErrorKind::Io, &path, e))
    }

    /// Removes files of an artifact that an earlier attempt made from something else.
    pub fn clear(&mut self, artifact: &str, files: &[String]) {
        self.finished.retain(|f| f.artifact != artifact);
        for file in files {
            // Absent as a rule; what cannot be removed fails when it is written.
            let _ = std::fs::remove_file(self.root.join(file));
        }
    }

    /// Says what becomes of the artifacts when the bundle is not finished: they stay, or go.
    pub fn keep(&mut self, keep: bool) {
        self.keep = keep;
    }

    /// The hidden folder, when finished artifacts stay in it.
    pub fn kept(&self) -> Option<&Path> {
        (self.keep && !self.finished.is_empty()).then_some(&self.folder)
    }

    /// The folder that becomes the bundle.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Length and hash of every file of finished artifacts, for `artifacts.files`.
    pub fn hashes(&self) -> Map<String, Value> {
        let files = self.finished.iter().flat_map(|f| &f.files);
        files.map(|f| (f.file.clone(), json!({"sha256": f.sha256, "bytes": f.bytes}))).collect()
    }

    /// For files that are no part of the bundle.
    pub fn scratch(&self) -> &Path {
        &self.folder
    }

    /// Path for a new file of the bundle. Errors when it exists.
    pub fn path(&self, file: &str) -> Result<PathBuf> {
        let path = self.root.join(file);
        if path.exists() {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("two files of the bundle are called {file}"),
            ));
        }
        Ok(path)
    }

    /// A folder inside the bundle, made if need be.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let path = self.root.join(name);
        std::fs::create_dir_all(&path).map_err(|e| Error::io(ErrorKind::Io, &path, e))?;
        Ok(path)
    }

    /// Writes bytes as a file.
    pub fn write(&self, file: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path(file)?;
        std::fs::write(&path, bytes).map_err(|e| Error::io(ErrorKind::Io, &path, e))
    }

    /// Writes JSON, indented.
    pub fn write_json(&self, file: &str, value: &Value) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(value)
            .map_err(|e| Error::caused(ErrorKind::Internal, format_args!("{file}"), e))?;
        text.push(b'\n');
        self.write(file, &text)
    }

    /// Writes a table as [`write_rows`] does. Errors when a value does not fit f16 where the table is written so, or is `for_npu`, which
    /// computes in f16.
    pub fn write_table(
        &self,
        file: &str,
        table: &Arc<dyn RowSource>,
        dtype: DType,
        for_npu: bool,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let path = self.path(file)?;
        let fail = |e: std::io::Error| Error::io(ErrorKind::Io, &path, e);
        if for_npu && dtype != DType::F16 {
            stream(&**table, |wide| match wide.iter().any(|value| value.abs() >= F16_OVERFLOW) {
                true => Err(beyond_f16(&**table)),
                false => Ok(()),
            })?;
        }
        progress.stage("embedding table", table_bytes(table.shape(), dtype));
        let mut target = BufWriter::new(File::create(&path).map_err(fail)?);
        write_rows((table, dtype), &mut target, file, &mut 0, progress)?;
        target.flush().map_err(fail)
    }

    /// Length and SHA-256 of every file so far, for `artifacts.files`.
    pub fn hash(&self, progress: &mut dyn Progress) -> Result<Value> {
        let known: BTreeMap<&str, &Hashed> = self
            .finished
            .iter()
            .flat_map(|f| &f.files)
            .map(|file| (file.file.as_str(), file))
            .collect();
        let files = self.files()?;
        let rest = files.iter().filter(|(name, _)| !known.contains_key(name.as_str()));
        progress.stage("hash", rest.map(|(_, bytes)| bytes).sum());
        let mut done = 0;
        let mut table = Map::new();
        for (name, bytes) in files {
            let digest = match known.get(name.as_str()) {
                Some(hashed) => hashed.sha256.clone(),
                None => hash_file(&self.root, &name, &mut done, progress)?.sha256,
            };
            table.insert(name, json!({"sha256": digest, "bytes": bytes}));
        }
        Ok(Value::Object(table))
    }

    /// Puts the folder in its place and returns the bytes of its files. An old bundle is removed.
    pub fn publish(mut self) -> Result<u64> {
        let bytes = self.total()?;
        let fail = |e: std::io::Error| Error::io(ErrorKind::Io, &self.out, e);
        // Again: someone may have made it meanwhile.
        check_place(&self.out, self.overwrite)?;
        let old = self.folder.join(REPLACED);
        let replaced = self.out.exists();
        if replaced {
            std::fs::rename(&self.out, &old).map_err(fail)?;
        }
        // Once more where nobody adds to it: what is removed now is the bundle and nothing else.
        let placed = if replaced { check_files(&old, &self.out) } else { Ok(()) }
            .and_then(|()| std::fs::rename(&self.root, &self.out).map_err(fail));
        if let Err(error) = placed {
            if replaced {
                // The old bundle back in its place; the error to report is the first one.
                let _ = std::fs::rename(&old, &self.out);
            }
            return Err(error);
        }
        self.keep = false;
        self.published = true;
        Ok(bytes)
    }

    /// Bytes of all files.
    pub fn total(&self) -> Result<u64> {
        Ok(self.files()?.iter().map(|(_, bytes)| bytes).sum())
    }

    /// Relative names, with `/`, and lengths of all files, sorted.
    fn files(&self) -> Result<Vec<(String, u64)>> {
        files_below(&self.root)
    }
}

/// Relative names, with `/`, and lengths of all files below a folder, sorted. A link is a file.
fn files_below(root: &Path) -> Result<Vec<(String, u64)>> {
    let mut found = Vec::new();
    let mut folders = vec![(root.to_owned(), String::new())];
    while let Some((folder, prefix)) = folders.pop() {
        let fail = |e: std::io::Error| Error::io(ErrorKind::Io, &folder, e);
        for entry in std::fs::read_dir(&folder).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let metadata = entry.metadata().map_err(fail)?;
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            if metadata.is_dir() {
                folders.push((entry.path(), format!("{name}/")));
            } else {
                found.push((name, metadata.len()));
            }
        }
    }
    found.sort();
    Ok(found)
}

impl Drop for Staging {
    fn drop(&mut self) {
        // An old bundle that could not be put back.
        let holds_old = !self.published && self.folder.join(REPLACED).exists();
        if self.kept().is_none() && !holds_old {
            // What cannot be removed is a hidden folder, and the next attempt's.
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

/// Staging folders in `parent` that no process fills, but for those of the output called `name`.
#[cfg(feature = "program")]
pub(crate) fn unfinished(parent: &Path, name: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(parent) else { return Vec::new() };
    let entries = entries.filter_map(|entry| entry.ok());
    let is_other = |entry: &std::fs::DirEntry| {
        let file = entry.file_name();
        let output = file.to_str().and_then(|file| file.strip_prefix(STAGING));
        output.is_some_and(|output| !output.starts_with(name))
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
    };
    let folders = entries.filter(is_other).map(|entry| entry.path());
    // What has no lock yet is about to be filled.
    folders
        .filter(|folder| folder.join(LOCK).is_file() && lock(&folder.join(LOCK)).is_ok())
        .collect()
}

/// The lock of a staging folder.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // A process that is being started has a copy of the file, which would hold the lock until it is closed there.
        let _ = self.0.unlock();
    }
}

/// Takes the lock of a staging folder.
fn lock(path: &Path) -> Result<Lock> {
    let fail = |e: std::io::Error| Error::io(ErrorKind::Io, path, e);
    let file = File::options().create(true).append(true).open(path).map_err(fail)?;
    match file.try_lock() {
        Ok(()) => Ok(Lock(file)),
        Err(TryLockError::WouldBlock) => Err(Error::new(
            ErrorKind::Usage,
            format!("{}: this bundle is being made by another process", path.display()),
        )
        .hint("wait for it, or name another folder")),
        Err(TryLockError::Error(e)) => Err(fail(e)),
    }
}

/// Length and hash of a file below `root`.
fn hash_file(
    root: &Path,
    name: &str,
    done: &mut u64,
    progress: &mut dyn Progress,
) -> Result<Hashed> {
    let path = root.join(name);
    let file = File::open(&path).map_err(|e| Error::io(ErrorKind::Io, &path, e))?;
    let mut bytes = 0;
    let sha256 = sha256(ErrorKind::Io, &path, file, |read| {
        progress.stop_if_cancelled()?;
        bytes += read as u64;
        *done += read as u64;
        progress.advance(*done);
        Ok(())
    })?;
    Ok(Hashed { file: name.to_owned(), bytes, sha256 })
}

/// Replaces a JSON file at once.
pub(crate) fn replace_json(file: &Path, document: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(document)
        .map_err(|e| Error::caused(ErrorKind::Internal, file.display(), e))?;
    let new = file.with_extension("json.new");
    std::fs::write(&new, text + "\n").map_err(|e| Error::io(ErrorKind::Io, &new, e))?;
    std::fs::rename(&new, file).map_err(|e| Error::io(ErrorKind::Io, file, e))
}

/// Errors unless `out` does not exist, is an empty folder, or is a bundle that may be replaced.
pub(crate) fn check_place(out: &Path, overwrite: bool) -> Result<()> {
    let usage = |what: &str| Error::new(ErrorKind::Usage, format!("{}: {what}", out.display()));
    if out.file_name().is_none() {
        return Err(usage("not the name of a new folder"));
    }
    let Ok(metadata) = std::fs::symlink_metadata(out) else { return Ok(()) };
    if !metadata.is_dir() {
        return Err(usage("exists and is not a folder").hint("name a new folder for the bundle"));
    }
    let mut entries = std::fs::read_dir(out).map_err(|e| Error::io(ErrorKind::Io, out, e))?;
    if entries.next().is_none() {
        return Ok(());
    }
    let Some(listed) = listed(out)? else {
        return Err(usage("exists and is not a bundle, so it is left alone")
            .hint("name a new folder for the bundle"));
    };
    if !overwrite {
        return Err(usage("a bundle is there already")
            .hint("ask for it to be replaced, or name another folder"));
    }
    only_listed(out, out, &listed)
}

/// Errors unless `folder`, a bundle that was at `place`, holds nothing but what its manifests list.
fn check_files(folder: &Path, place: &Path) -> Result<()> {
    only_listed(folder, place, &listed(folder)?.unwrap_or_default())
}

fn only_listed(folder: &Path, place: &Path, listed: &BTreeSet<String>) -> Result<()> {
    let mut others = files_below(folder)?;
    // What `qhx prepare` made of the bundle goes with it.
    others.retain(|(name, _)| !listed.contains(name) && !name.starts_with(PREPARED));
    if others.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = others.iter().take(NAMED).map(|(name, _)| format!("{name:?}")).collect();
    let more = if others.len() > NAMED { ", …" } else { "" };
    Err(Error::new(
        ErrorKind::Usage,
        format!(
            "{}: {} files there are not listed in the bundle's manifest, so nothing is replaced: {}{more}",
            place.display(),
            others.len(),
            names.join(", ")
        ),
    )
    .hint("move them to another folder, or name another folder for the bundle"))
}

/// Names of the files that the manifests in a folder list, and of the manifests; none when the folder holds
/// no manifest.
fn listed(folder: &Path) -> Result<Option<BTreeSet<String>>> {
    let mut names = BTreeSet::new();
    for file in manifest::candidates(folder)? {
        let Ok(manifest) = Manifest::load(&file) else { continue };
        names.extend(file.file_name().map(|name| name.to_string_lossy().into_owned()));
        let root = manifest.root.strip_prefix(folder).unwrap_or(Path::new(""));
        let table = &manifest.artifacts;
        let contexts = table.contexts.iter().flat_map(|context| {
            context.bin.iter().chain(context.onnx.iter().map(|(_, path)| path))
        });
        let paths = contexts
            .chain(table.files.keys())
            .chain(table.embed.iter().map(|embed| &embed.path))
            .chain(&table.tokenizer)
            .chain(&table.tokenizer_config)
            .chain(&table.golden);
        names.extend(paths.filter_map(|path| plain(&root.join(path))));
    }
    Ok((!names.is_empty()).then_some(names))
}

/// A relative path in the form of [`files_below`]; none when it leaves the folder.
fn plain(path: &Path) -> Option<String> {
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push(name.to_str()?),
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(names.join("/"))
}

/// Errors when the checkpoint lies in `out`, by whatever path it is reached, or when `out` holds something
/// and lies in the checkpoint: replacing `out` would remove what the bundle is made from.
pub(crate) fn check_apart(checkpoint: &Checkpoint, out: &Path) -> Result<()> {
    let Ok(place) = out.canonicalize() else { return Ok(()) };
    let dir = checkpoint.dir();
    let fail = |e: std::io::Error| Error::io(ErrorKind::Artifact, dir, e);
    let mut inputs = vec![dir.to_owned()];
    if dir.is_dir() {
        for entry in std::fs::read_dir(dir).map_err(fail)? {
            inputs.push(entry.map_err(fail)?.path());
        }
    }
    for input in &inputs {
        // A link to nothing is not read, either.
        let Ok(real) = input.canonicalize() else { continue };
        // A folder of the checkpoint that is `out` itself is judged below.
        if real.starts_with(&place) && (real != place || input == dir) {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("{}: the checkpoint's {} lies in there", out.display(), input.display()),
            )
            .hint("name a folder for the bundle that holds nothing of the checkpoint"));
        }
    }
    let used = std::fs::read_dir(&place).is_ok_and(|mut entries| entries.next().is_some());
    if checkpoint.path() != dir {
        // A GGUF file lies where it was loaded to, and a bundle beside it is no part of it.
        return Ok(());
    }
    let dir = dir.canonicalize().map_err(fail)?;
    if used && place.starts_with(&dir) {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "{}: lies in the checkpoint's folder {} and holds files, so it is left alone",
                out.display(),
                dir.display()
            ),
        )
        .hint("name a new folder for the bundle"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_graph::progress::Silent;

    const MANIFEST: &str = r#"{"schema_version": 1, "host_only": true, "artifacts": {}, "plan": {"steps": [{"host": "x"}]}}"#;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn open(out: &Path, overwrite: bool) -> Result<Staging> {
        Staging::open(out, overwrite, "0123456789abcdef0123", &mut Silent)
    }

    #[test]
    fn finished_artifacts_that_are_whole_are_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("v81");
        let make = |staging: &mut Staging, name: &str, fingerprint: &str| {
            staging.write(name, name.as_bytes()).unwrap();
            staging.finish(name, fingerprint, &[name.to_owned()], &mut Silent).unwrap();
        };
        let mut staging = open(&out, false).unwrap();
        let again = open(&out, false).unwrap_err();
        assert!(again.message().contains("another process"), "{again}");
        for name in ["a", "b", "c"] {
            make(&mut staging, name, "1");
        }
        staging.write("half", b"of an artifact").unwrap();
        let root = staging.root.clone();
        drop(staging);
        assert_eq!(names(dir.path()), [".qhx-forge-v81-0123456789abcdef"]);
        // One bit of one file.
        std::fs::write(root.join("b"), b"c").unwrap();
        let mut staging = open(&out, false).unwrap();
        assert!(staging.has("a", "1") && staging.has("c", "1"));
        assert!(!staging.has("b", "1"), "its file has changed");
        assert!(!staging.has("a", "2"), "made from something else");
        assert_eq!(names(&root), ["a", "c"]);
        assert_eq!(staging.bytes("c"), Some(1));
        make(&mut staging, "b", "1");
        assert_eq!(staging.publish().unwrap(), 3);
        assert_eq!(names(dir.path()), ["v81"]);
        assert_eq!(names(&out), ["a", "b", "c"]);
    }

    #[test]
    fn nothing_is_left_of_an_abandoned_bundle() {
        let dir = tempfile::tempdir().unwrap();
        let staging = open(&dir.path().join("v81"), false).unwrap();
        staging.write("a.bin", b"abc").unwrap();
        drop(staging);
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn a_bundle_appears_whole_with_hashes_of_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("deep/v81");
        let staging = open(&out, false).unwrap();
        staging.folder("onnx").unwrap();
        staging.write("onnx/a", b"abc").unwrap();
        let files = staging.hash(&mut Silent).unwrap();
        assert_eq!(
            files["onnx/a"]["sha256"],
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(files["onnx/a"]["bytes"], 3);
        assert!(staging.write("onnx/a", b"").unwrap_err().message().contains("two files"));
        assert_eq!(staging.publish().unwrap(), 3);
        assert_eq!(names(&dir.path().join("deep")), ["v81"]);
    }

    #[test]
    fn only_a_bundle_is_replaced_and_only_when_asked() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("v81");
        std::fs::create_dir(&out).unwrap();
        open(&out, false).unwrap().publish().unwrap();
        std::fs::write(out.join("notes.txt"), "mine").unwrap();
        for overwrite in [false, true] {
            let error = open(&out, overwrite).unwrap_err();
            assert!(error.message().contains("not a bundle"), "{error}");
        }
        std::fs::remove_file(out.join("notes.txt")).unwrap();
        std::fs::write(out.join("m.json"), MANIFEST).unwrap();
        let error = open(&out, false).unwrap_err();
        assert!(error.message().contains("already"), "{error}");
        let staging = open(&out, true).unwrap();
        staging.write("new", b"").unwrap();
        staging.publish().unwrap();
        assert_eq!(names(&out), ["new"]);
        assert_eq!(names(dir.path()), ["v81"]);
    }

    /// A bundle of a manifest, a listed file and one in a folder.
    fn bundle(out: &Path) {
        std::fs::create_dir_all(out.join("weights")).unwrap();
        let mut manifest: Value = serde_json::from_str(MANIFEST).unwrap();
        manifest["artifacts"] =
            json!({"tokenizer": "./tokenizer.json", "files": {"weights/a.bin": {}, "../b": {}}});
        std::fs::write(out.join("m.json"), manifest.to_string()).unwrap();
        std::fs::write(out.join("tokenizer.json"), "{}").unwrap();
        std::fs::write(out.join("weights/a.bin"), "a").unwrap();
    }

    #[test]
    fn a_bundle_with_other_files_in_it_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("v81");
        bundle(&out);
        open(&out, true).unwrap();
        for name in ["notes.txt", "weights/b.bin", "b", "old.json"] {
            std::fs::write(out.join(name), "mine").unwrap();
            let error = open(&out, true).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.message().contains("1 files there are not listed"), "{error}");
            assert!(error.message().contains(&format!("{name:?}")), "{error}");
            assert_eq!(std::fs::read(out.join(name)).unwrap(), b"mine");
            std::fs::remove_file(out.join(name)).unwrap();
        }
        // One that comes while the new bundle is made.
        let staging = open(&out, true).unwrap();
        staging.write("new", b"").unwrap();
        std::fs::write(out.join("notes.txt"), "mine").unwrap();
        assert!(staging.publish().unwrap_err().message().contains("\"notes.txt\""));
        assert_eq!(names(&out), ["m.json", "notes.txt", "tokenizer.json", "weights"]);
    }

    #[test]
    fn an_old_bundle_that_was_being_replaced_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("v81");
        bundle(&out);
        // Killed between the two renames.
        let folder = open(&out, true).unwrap().folder.clone();
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::rename(&out, folder.join(REPLACED)).unwrap();
        let error = open(&out, false).unwrap_err();
        assert!(error.message().contains("already"), "{error}");
        assert_eq!(names(&out), ["m.json", "tokenizer.json", "weights"]);
        let staging = open(&out, true).unwrap();
        staging.write("new", b"").unwrap();
        staging.publish().unwrap();
        assert_eq!(names(dir.path()), ["v81"]);
    }
}
