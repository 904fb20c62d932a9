//! The output folder: filled beside its place under a hidden name, then renamed into it.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use half::f16;
use qhx_core::{Error, ErrorKind, Result, manifest};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::progress::Progress;
use crate::weight::{RowSource, narrow, stream};

/// Bytes that are read at a time when files are hashed.
const CHUNK: usize = 1 << 20;

/// A bundle in the making. Dropped before [`Staging::publish`], it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Staging {
    /// Beside the output folder, so that the rename stays on one file system.
    temp: TempDir,
    /// Inside `temp`, with ordinary permissions.
    root: PathBuf,
    out: PathBuf,
    overwrite: bool,
}

impl Staging {
    /// Checks that `out` may be made or replaced, and makes the hidden folder.
    pub fn new(out: &Path, overwrite: bool) -> Result<Self> {
        check_place(out, overwrite)?;
        let parent = match out.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let fail = |e: &std::io::Error| Error::io(ErrorKind::Io, parent, e);
        std::fs::create_dir_all(parent).map_err(|e| fail(&e))?;
        let temp = tempfile::Builder::new()
            .prefix(".qhx-forge-")
            .tempdir_in(parent)
            .map_err(|e| fail(&e))?;
        let root = temp.path().join("bundle");
        std::fs::create_dir(&root).map_err(|e| Error::io(ErrorKind::Io, &root, &e))?;
        Ok(Self { temp, root, out: out.to_owned(), overwrite })
    }

    /// Where a new file of the bundle is to be written. Errors when it exists.
    pub fn path(&self, file: &str) -> Result<PathBuf> {
        let path = self.root.join(file);
        if path.exists() {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("two parts of the bundle are called {file}"),
            ));
        }
        Ok(path)
    }

    /// A folder inside the bundle, made if need be.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let path = self.root.join(name);
        std::fs::create_dir_all(&path).map_err(|e| Error::io(ErrorKind::Io, &path, &e))?;
        Ok(path)
    }

    /// Writes bytes as a file.
    pub fn write(&self, file: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path(file)?;
        std::fs::write(&path, bytes).map_err(|e| Error::io(ErrorKind::Io, &path, &e))
    }

    /// Writes JSON, indented.
    pub fn write_json(&self, file: &str, value: &Value) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(value)
            .map_err(|e| Error::new(ErrorKind::Internal, format!("{file}: {e}")))?;
        text.push(b'\n');
        self.write(file, &text)
    }

    /// Copies a file of the checkpoint.
    pub fn copy(&self, from: &Path, file: &str) -> Result<()> {
        let path = self.path(file)?;
        let mut source = File::open(from).map_err(|e| Error::io(ErrorKind::Artifact, from, &e))?;
        let fail = |e: std::io::Error| Error::io(ErrorKind::Io, &path, &e);
        let mut target = File::create(&path).map_err(fail)?;
        std::io::copy(&mut source, &mut target).map_err(fail)?;
        Ok(())
    }

    /// Writes a table's rows as raw little-endian f16 or f32.
    pub fn write_table(
        &self,
        file: &str,
        table: &dyn RowSource,
        as_f16: bool,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let path = self.path(file)?;
        let fail = |e: &std::io::Error| Error::io(ErrorKind::Io, &path, e);
        let size = if as_f16 { 2 } else { 4 };
        let [rows, cols] = table.shape();
        progress.stage("embedding table", (rows as u64).saturating_mul(cols as u64 * size));
        let mut target = BufWriter::new(File::create(&path).map_err(|e| fail(&e))?);
        let mut half = Vec::new();
        let mut done = 0;
        stream(table, |wide| {
            if progress.cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
            }
            if as_f16 {
                half.resize(wide.len(), f16::ZERO);
                narrow(wide, &mut half).map_err(|e| e.context(table.name()))?;
                target.write_all(bytemuck::cast_slice(&half)).map_err(|e| fail(&e))?;
            } else {
                target.write_all(bytemuck::cast_slice(wide)).map_err(|e| fail(&e))?;
            }
            done += wide.len() as u64 * size;
            progress.advance(done);
            Ok(())
        })?;
        target.flush().map_err(|e| fail(&e))
    }

    /// Length and SHA-256 of every file so far, for `artifacts.files`.
    pub fn hash(&self, progress: &mut dyn Progress) -> Result<Value> {
        let files = self.files()?;
        progress.stage("hash", files.iter().map(|(_, bytes)| bytes).sum());
        let mut buffer = vec![0u8; CHUNK];
        let mut done = 0;
        let mut table = Map::new();
        for (name, bytes) in files {
            let path = self.root.join(&name);
            let fail = |e: std::io::Error| Error::io(ErrorKind::Io, &path, &e);
            let mut file = File::open(&path).map_err(fail)?;
            let mut hash = Sha256::new();
            loop {
                let read = file.read(&mut buffer).map_err(fail)?;
                let Some(part) = buffer.get(..read).filter(|p| !p.is_empty()) else { break };
                if progress.cancelled() {
                    return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
                }
                hash.update(part);
                done += read as u64;
                progress.advance(done);
            }
            let digest: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
            table.insert(name, json!({"sha256": digest, "bytes": bytes}));
        }
        Ok(Value::Object(table))
    }

    /// Puts the folder in its place and returns the bytes of its files.
    pub fn publish(self) -> Result<u64> {
        let bytes = self.files()?.iter().map(|(_, bytes)| bytes).sum();
        let fail = |e: &std::io::Error| Error::io(ErrorKind::Io, &self.out, e);
        // Again: someone may have made it meanwhile.
        check_place(&self.out, self.overwrite)?;
        let old = self.temp.path().join("replaced");
        let replaced = self.out.exists();
        if replaced {
            std::fs::rename(&self.out, &old).map_err(|e| fail(&e))?;
        }
        if let Err(e) = std::fs::rename(&self.root, &self.out) {
            if replaced {
                // The old bundle back in its place; the error to report is the first one.
                let _ = std::fs::rename(&old, &self.out);
            }
            return Err(fail(&e));
        }
        Ok(bytes)
    }

    /// Relative names, with `/`, and lengths of all files, sorted.
    fn files(&self) -> Result<Vec<(String, u64)>> {
        let mut found = Vec::new();
        let mut folders = vec![(self.root.clone(), String::new())];
        while let Some((folder, prefix)) = folders.pop() {
            let fail = |e: std::io::Error| Error::io(ErrorKind::Io, &folder, &e);
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
}

/// Errors unless `out` does not exist, is an empty folder, or is a bundle that may be replaced.
fn check_place(out: &Path, overwrite: bool) -> Result<()> {
    let usage = |what: &str| Error::new(ErrorKind::Usage, format!("{}: {what}", out.display()));
    if out.file_name().is_none() {
        return Err(usage("not the name of a new folder"));
    }
    let Ok(metadata) = std::fs::symlink_metadata(out) else { return Ok(()) };
    if !metadata.is_dir() {
        return Err(usage("exists and is not a folder").hint("name a new folder for the bundle"));
    }
    let mut entries = std::fs::read_dir(out).map_err(|e| Error::io(ErrorKind::Io, out, &e))?;
    if entries.next().is_none() {
        return Ok(());
    }
    if !is_bundle(out) {
        return Err(usage("exists and is not a bundle, so it is left alone")
            .hint("name a new folder for the bundle"));
    }
    if !overwrite {
        return Err(usage("a bundle is there already")
            .hint("ask for it to be replaced, or name another folder"));
    }
    Ok(())
}

/// True when some top-level JSON file of the folder is a manifest.
fn is_bundle(folder: &Path) -> bool {
    manifest::candidates(folder)
        .unwrap_or_default()
        .iter()
        .any(|file| manifest::Manifest::load(file).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    const MANIFEST: &str = r#"{"schema_version": 1, "host_only": true, "artifacts": {}, "plan": {"steps": [{"host": "x"}]}}"#;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn nothing_is_left_of_an_abandoned_bundle() {
        let dir = tempfile::tempdir().unwrap();
        let staging = Staging::new(&dir.path().join("v81"), false).unwrap();
        staging.write("a.bin", b"abc").unwrap();
        drop(staging);
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn a_bundle_appears_whole_with_hashes_of_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("deep/v81");
        let staging = Staging::new(&out, false).unwrap();
        staging.folder("onnx").unwrap();
        staging.write("onnx/a", b"abc").unwrap();
        let files = staging.hash(&mut Silent).unwrap();
        assert_eq!(
            files["onnx/a"]["sha256"],
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(files["onnx/a"]["bytes"], 3);
        assert!(staging.write("onnx/a", b"").unwrap_err().message().contains("two parts"));
        assert_eq!(staging.publish().unwrap(), 3);
        assert_eq!(names(&dir.path().join("deep")), ["v81"]);
    }

    #[test]
    fn only_a_bundle_is_replaced_and_only_when_asked() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("v81");
        std::fs::create_dir(&out).unwrap();
        Staging::new(&out, false).unwrap().publish().unwrap();
        std::fs::write(out.join("notes.txt"), "mine").unwrap();
        for overwrite in [false, true] {
            let error = Staging::new(&out, overwrite).unwrap_err();
            assert!(error.message().contains("not a bundle"), "{error}");
        }
        std::fs::write(out.join("m.json"), MANIFEST).unwrap();
        let error = Staging::new(&out, false).unwrap_err();
        assert!(error.message().contains("already"), "{error}");
        let staging = Staging::new(&out, true).unwrap();
        staging.write("new", b"").unwrap();
        staging.publish().unwrap();
        assert_eq!(names(&out), ["new"]);
        assert_eq!(names(dir.path()), ["v81"]);
    }
}
