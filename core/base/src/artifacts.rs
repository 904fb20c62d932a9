//! Files of a bundle, mapped read-only.

#![expect(unsafe_code, reason = "memory-maps files")]

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::Mmap;

use crate::files::{self, FileIdentity};
use crate::{Error, ErrorKind, Result, error};

/// A mapped file. Clones share the mapping.
#[derive(Debug, Clone)]
pub struct Mapped {
    path: Arc<Path>,
    identity: Arc<FileIdentity>,
    map: Option<Arc<Mmap>>,
}

impl Mapped {
    /// Maps a regular file read-only. An empty file is a mapping of no bytes.
    ///
    /// # Errors
    /// When the file is missing, is not a regular file, or cannot be mapped.
    pub fn open(path: &Path) -> Result<Self> {
        Self::of(path, &files::open(ErrorKind::Artifact, path)?)
    }

    /// Same as [`Mapped::open`], for a file that must be below `folder` with links resolved.
    ///
    /// # Errors
    /// Errors of [`Mapped::open`], or if the file is outside `folder`.
    pub fn open_within(path: &Path, folder: &Path) -> Result<Self> {
        Self::of(path, &files::open_within(ErrorKind::Artifact, path, folder)?)
    }

    fn of(path: &Path, file: &File) -> Result<Self> {
        let fail = |e: std::io::Error| Error::io(ErrorKind::Artifact, path, e);
        let identity = FileIdentity::of(&file.metadata().map_err(fail)?);
        let map = if identity.bytes == 0 {
            None
        } else {
            // SAFETY: the mapping is read-only and private. A file that another process truncates
            // meanwhile raises SIGBUS, as for every program that maps its files; `docs/security.md`
            // states that bundles must not be modified while they are open.
            Some(Arc::new(unsafe { Mmap::map(file) }.map_err(fail)?))
        };
        Ok(Self { path: Arc::from(path), identity: Arc::new(identity), map })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file that was opened, and its state then.
    pub fn identity(&self) -> &FileIdentity {
        &self.identity
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().map_or(&[], |map| &map[..])
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    /// True for an empty file.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.bytes().as_ptr()
    }
}

/// The identity that each file of a bundle had when it was opened first. Clones share the list.
///
/// Contexts are opened again by path, long after the bundle was: a file that was renamed into place meanwhile belongs
/// to another model.
#[derive(Debug, Clone, Default)]
pub struct FirstSeen(Arc<Mutex<BTreeMap<PathBuf, FileIdentity>>>);

impl FirstSeen {
    /// Bytes of all files that were opened.
    pub fn bytes(&self) -> u64 {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.values().map(|file| file.bytes).sum()
    }

    /// Returns the file if it is the one that was opened first by its path.
    ///
    /// # Errors
    /// When another file, or another state of it, was opened first.
    pub fn check(&self, file: Mapped) -> Result<Mapped> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (path, found) = (file.path(), file.identity());
        let first = match seen.get(path) {
            None => {
                seen.insert(path.to_owned(), found.clone());
                return Ok(file);
            }
            Some(first) if first == found => return Ok(file),
            Some(first) => first,
        };
        Err(error!(
            Artifact,
            "{}: replaced or changed since the bundle was opened: found {found}, expected {first}",
            path.display()
        )
        .hint("open the bundle again to use the files that are there now"))
    }
}

/// The bundle's files: resolves manifest paths and maps each file once.
#[derive(Debug, Clone)]
pub struct Artifacts {
    root: PathBuf,
    bounds: PathBuf,
    seen: FirstSeen,
    mapped: BTreeMap<PathBuf, Mapped>,
}

impl Artifacts {
    /// Files below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        Self::within(root.clone(), root)
    }

    /// Files below `root`, none of which may lie outside of `bounds`, links resolved.
    pub fn within(root: impl Into<PathBuf>, bounds: impl Into<PathBuf>) -> Self {
        let (root, bounds) = (root.into(), bounds.into());
        Self { root, bounds, seen: FirstSeen::default(), mapped: BTreeMap::new() }
    }

    /// The folder that paths resolve against.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder that no file may lie outside of, links resolved.
    pub fn bounds(&self) -> &Path {
        &self.bounds
    }

    /// State of the files when they were first opened.
    pub fn seen(&self) -> &FirstSeen {
        &self.seen
    }

    /// Resolves a path of the manifest. `pointer` is the JSON pointer of the path, for messages.
    ///
    /// The path must be relative and stay below [`Artifacts::bounds`], symbolic links included. A
    /// file that is opened by the answer may be another one by then: [`Artifacts::open`] and
    /// [`Artifacts::open_file`] check the file that they open.
    ///
    /// # Errors
    /// When the path is absolute, leaves the bounds, or does not exist.
    pub fn resolve(&self, pointer: &str, path: &str) -> Result<PathBuf> {
        let relative = Path::new(path);
        let leaves =
            relative.components().any(|c| !matches!(c, Component::Normal(_) | Component::CurDir));
        if leaves || path.is_empty() {
            return Err(error!(
                Manifest,
                "manifest {pointer}: path {path:?} leaves the bundle's folder"
            )
            .hint("paths in a manifest are relative to its folder, without `..`"));
        }
        let joined = self.root.join(relative);
        let fail = |e: std::io::Error| {
            Error::caused(
                ErrorKind::Artifact,
                format_args!("{} (manifest {pointer})", joined.display()),
                e,
            )
            .hint(
                "the download may be incomplete; compare the folder with the manifest's artifacts",
            )
        };
        let real = joined.canonicalize().map_err(fail)?;
        let bounds = self.bounds.canonicalize().map_err(fail)?;
        if !real.starts_with(&bounds) {
            return Err(files::leaves(&joined, &bounds).context(format_args!("manifest {pointer}")));
        }
        Ok(joined)
    }

    /// Opens the file at a path of the manifest.
    ///
    /// # Errors
    /// Errors of [`Artifacts::resolve`], or if the file cannot be opened or was exchanged meanwhile.
    pub fn open_file(&self, pointer: &str, path: &str) -> Result<File> {
        let resolved = self.resolve(pointer, path)?;
        files::open_within(ErrorKind::Artifact, &resolved, &self.bounds)
            .map_err(|e| e.context(format_args!("manifest {pointer}")))
    }

    /// Maps the file at a path of the manifest, or returns the mapping made before.
    ///
    /// # Errors
    /// Errors of [`Artifacts::open_file`], or if the file cannot be mapped.
    pub fn open(&mut self, pointer: &str, path: &str) -> Result<Mapped> {
        let resolved = self.resolve(pointer, path)?;
        if let Some(mapped) = self.mapped.get(&resolved) {
            return Ok(mapped.clone());
        }
        let mapped = Mapped::open_within(&resolved, &self.bounds)
            .and_then(|mapped| self.seen.check(mapped))
            .map_err(|e| e.context(format_args!("manifest {pointer}")))?;
        self.mapped.insert(resolved, mapped.clone());
        Ok(mapped)
    }
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_links_within_the_bundle_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (root, secret) = (dir.path().join("bundle"), dir.path().join("secret"));
        std::fs::create_dir_all(root.join("files")).unwrap();
        std::fs::create_dir(&secret).unwrap();
        std::fs::write(secret.join("decode.bin"), b"secret").unwrap();
        std::fs::write(root.join("files/decode.bin"), b"public").unwrap();
        symlink("decode.bin", root.join("files/inner.bin")).unwrap();
        symlink(secret.join("decode.bin"), root.join("files/outer.bin")).unwrap();
        symlink(&secret, root.join("files/folder")).unwrap();
        let mut artifacts = Artifacts::within(root.join("files"), &root);
        assert_eq!(artifacts.open("/p", "inner.bin").unwrap().bytes(), b"public");
        for path in ["outer.bin", "folder/decode.bin"] {
            for error in [
                artifacts.resolve("/p", path).unwrap_err(),
                artifacts.open("/p", path).unwrap_err(),
                artifacts.open_file("/p", path).unwrap_err(),
            ] {
                assert_eq!(error.kind(), ErrorKind::Manifest, "{error}");
                assert!(error.message().contains("a link out of"), "{error}");
            }
        }
    }
}
