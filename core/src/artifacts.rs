//! Files of a bundle, mapped read-only.

#![expect(unsafe_code, reason = "memory-maps files")]

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::{Error, ErrorKind, Result, files};

/// A mapped file. Clones share the mapping.
#[derive(Debug, Clone)]
pub struct Mapped {
    path: Arc<Path>,
    map: Option<Arc<Mmap>>,
}

impl Mapped {
    /// Maps a regular file read-only. An empty file is a mapping of no bytes.
    pub fn open(path: &Path) -> Result<Self> {
        Self::of(path, &files::open(ErrorKind::Artifact, path)?)
    }

    fn of(path: &Path, file: &File) -> Result<Self> {
        let fail = |e: std::io::Error| Error::io(ErrorKind::Artifact, path, &e);
        let map = if file.metadata().map_err(fail)?.len() == 0 {
            None
        } else {
            // SAFETY: the mapping is read-only and private. A file that another process truncates
            // meanwhile raises SIGBUS, as for every program that maps its files; `docs/security.md`
            // states that bundles must not be modified while they are open.
            Some(Arc::new(unsafe { Mmap::map(file) }.map_err(fail)?))
        };
        Ok(Self { path: Arc::from(path), map })
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        &self.path
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

/// The bundle's files: resolves manifest paths and maps each file once.
#[derive(Debug, Clone)]
pub struct Artifacts {
    root: PathBuf,
    mapped: BTreeMap<PathBuf, Mapped>,
}

impl Artifacts {
    /// Files below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), mapped: BTreeMap::new() }
    }

    /// The folder that paths resolve against.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Resolves a path of the manifest. `pointer` is the JSON pointer of the path, for messages.
    ///
    /// The path must be relative and stay below the root, symbolic links included.
    pub fn resolve(&self, pointer: &str, path: &str) -> Result<PathBuf> {
        let relative = Path::new(path);
        let leaves =
            relative.components().any(|c| !matches!(c, Component::Normal(_) | Component::CurDir));
        if leaves || path.is_empty() {
            return Err(Error::new(
                ErrorKind::Manifest,
                format!("manifest {pointer}: path {path:?} leaves the bundle's folder"),
            )
            .hint("paths in a manifest are relative to its folder, without `..`"));
        }
        let joined = self.root.join(relative);
        let fail = |e: &std::io::Error| {
            Error::new(
                ErrorKind::Artifact,
                format!("{} (manifest {pointer}): {e}", joined.display()),
            )
            .hint(
                "the download may be incomplete; compare the folder with the manifest's artifacts",
            )
        };
        let real = joined.canonicalize().map_err(|e| fail(&e))?;
        let root = self.root.canonicalize().map_err(|e| fail(&e))?;
        if !real.starts_with(&root) {
            return Err(Error::new(
                ErrorKind::Manifest,
                format!("manifest {pointer}: {path:?} is a link out of the bundle's folder"),
            ));
        }
        Ok(joined)
    }

    /// Maps the file at a path of the manifest, or answers with the mapping made before.
    pub fn open(&mut self, pointer: &str, path: &str) -> Result<Mapped> {
        let resolved = self.resolve(pointer, path)?;
        if let Some(mapped) = self.mapped.get(&resolved) {
            return Ok(mapped.clone());
        }
        let mapped = Mapped::open(&resolved)?;
        self.mapped.insert(resolved, mapped.clone());
        Ok(mapped)
    }
}
