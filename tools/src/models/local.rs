//! Models that are on this machine: listed, copied out, removed.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use qhx::hub::{HubOptions, Name};
use qhx::models::{self, Record};
use qhx_base::{CancelToken, Error, ErrorKind, Result, error};
use qhx_hub::Lock;
use serde::Serialize;

use super::Models;

/// Bytes that are copied at a time.
const PIECE: usize = 1 << 20;

/// A model that is here in one form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Here {
    /// Its name.
    pub name: String,
    /// `cpu`, or the architecture.
    pub form: String,
    /// Origin of its bundle.
    pub origin: Origin,
    /// Repository or package, with commit or version.
    pub source: String,
    /// Path of the bundle, or its name in the hub's cache.
    pub path: PathBuf,
    /// Bytes of its files; 0 of one in the hub's cache, which lists it.
    pub bytes: u64,
    /// True if its files are there as they were.
    pub whole: bool,
}

/// Origin of a bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Origin {
    /// Made of a checkpoint on this machine.
    Made,
    /// Fetched from a hub.
    Fetched,
}

/// Result of a removal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Removal {
    /// Bytes that are free again.
    pub bytes: u64,
    /// Parts that stay, such as the checkpoint in the cache that other programs share.
    pub stays: Vec<String>,
}

/// Result of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Copied {
    /// Folder of the copy.
    pub path: PathBuf,
    /// Bytes of its files.
    pub bytes: u64,
}

impl Models {
    /// Models that are here, by name and form.
    pub fn list(&self) -> Vec<Here> {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        names.iter().flat_map(|name| self.forms(name)).collect()
    }

    /// Forms of a model that are here.
    pub fn forms(&self, name: &str) -> Vec<Here> {
        let folder = self.folder_of(name);
        let here = |record: Record| {
            let (origin, path, whole) = match &record.repository {
                Some(repository) => {
                    let found = qhx::hub::resolve(Path::new(&repository.to_string()));
                    let found = found.ok().filter(|path| path.exists());
                    let whole = found.is_some();
                    (Origin::Fetched, found.unwrap_or_else(|| repository.to_string().into()), whole)
                }
                None => (Origin::Made, record.made(&folder), record.is_whole(&folder)),
            };
            let bytes = record.bytes();
            Here {
                name: name.to_owned(),
                form: record.form,
                origin,
                source: record.source,
                path,
                bytes,
                whole,
            }
        };
        models::records(&folder).into_iter().map(here).collect()
    }

    /// Removes all forms of a model of the index: bundles, and the checkpoint of a package. A checkpoint in the hub's
    /// cache stays, since other programs share it. `None` if nothing of that name is here.
    ///
    /// # Errors
    /// When another process makes it ready, or a file cannot be removed.
    pub fn remove(&self, name: &str) -> Result<Option<Removal>> {
        let name = &name.to_ascii_lowercase();
        let folder = self.folder_of(name);
        let is_name = qhx_hub::index::is_model_name(name);
        let checkpoint = self.index.package(name).map(crate::package::place).transpose()?;
        let checkpoint = checkpoint.filter(|path| path.exists());
        if !is_name || (!folder.is_dir() && checkpoint.is_none()) {
            return Ok(None);
        }
        let Some(_lock) = Lock::attempt(&self.folder.join(format!(".{name}.lock")))? else {
            return Err(
                error!(Io, "{name}: another process makes it ready").hint("wait for it, or end it")
            );
        };
        let mut removal = Removal::default();
        for record in models::records(&folder) {
            match &record.repository {
                Some(repository) => removal.bytes += self.forget(repository)?,
                None => {
                    if record.source.contains('@') {
                        removal.stays.push(record.source.clone());
                    }
                }
            }
            record.remove(&folder)?;
        }
        for path in checkpoint.into_iter().chain(Some(folder)) {
            removal.bytes += size(&path);
            let removed = if path.is_dir() {
                std::fs::remove_dir_all(&path)
            } else {
                std::fs::remove_file(&path)
            };
            match removed {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::io(ErrorKind::Io, &path, e));
                }
                _ => {}
            }
        }
        Ok(Some(removal))
    }

    fn forget(&self, repository: &Name) -> Result<u64> {
        match self.hub.cache().remove(repository) {
            Ok(removed) => Ok(removed.bytes),
            // Removed by other means.
            Err(e) if e.kind() == ErrorKind::Usage => Ok(0),
            Err(e) => Err(e),
        }
    }
}

/// Copies a bundle's folder out, with its files instead of links, for another machine. The copy gets its name once it
/// is whole.
///
/// # Errors
/// When something is there already, there is no room, a file cannot be read or written, and when it is cancelled.
pub fn copy(bundle: &Path, to: &Path, cancel: &CancelToken) -> Result<Copied> {
    if to.exists() {
        return Err(error!(Usage, "{}: something is there already", to.display())
            .hint("give another folder"));
    }
    let parent =
        to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let io = |e| Error::io(ErrorKind::Io, parent, e);
    std::fs::create_dir_all(parent).map_err(io)?;
    let bytes = size(bundle);
    let free = (HubOptions::new("").free_space)(parent).map_err(io)?;
    if free < bytes {
        return Err(error!(Io, "{}: {free} bytes are free, {bytes} are needed", parent.display())
            .hint("make room, or give a folder of another disk"));
    }
    let scratch = tempfile::Builder::new().prefix(".copy-").tempdir_in(parent).map_err(io)?;
    let inner = scratch.path().join("bundle");
    copy_folder(bundle, &inner, cancel)?;
    std::fs::rename(&inner, to).map_err(|e| Error::io(ErrorKind::Io, to, e))?;
    Ok(Copied { path: to.to_owned(), bytes })
}

fn copy_folder(from: &Path, to: &Path, cancel: &CancelToken) -> Result<()> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |e| Error::io(ErrorKind::Io, &path, e)
    };
    std::fs::create_dir_all(to).map_err(io(to))?;
    for entry in std::fs::read_dir(from).map_err(io(from))? {
        let path = entry.map_err(io(from))?.path();
        let copy = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            copy_folder(&path, &copy, cancel)?;
            continue;
        }
        let mut source = std::fs::File::open(&path).map_err(io(&path))?;
        let mut target = std::fs::File::create_new(&copy).map_err(io(&copy))?;
        let mut buffer = vec![0; PIECE];
        loop {
            cancel.check()?;
            let read = source.read(&mut buffer).map_err(io(&path))?;
            let Some(part @ [_, ..]) = buffer.get(..read) else { break };
            target.write_all(part).map_err(io(&copy))?;
        }
    }
    Ok(())
}

/// Bytes of the files at a path, links followed.
fn size(path: &Path) -> u64 {
    if !path.is_dir() {
        return std::fs::metadata(path).map_or(0, |data| data.len());
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| size(&entry.path())).sum()
}

/// Name of a repository among the models of this machine.
pub(super) fn own_name(name: &Name) -> String {
    let part = |text: &str| text.to_ascii_lowercase().replace('_', "-");
    let own = format!("{}--{}", part(&name.owner), part(&name.name));
    let own: String = own.chars().take(64).collect();
    own.trim_end_matches(['.', '-']).to_owned()
}
