//! Folders for what qhx downloads and makes.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use etcetera::{BaseStrategy as _, choose_base_strategy};
use qhx_base::hash::hex;
use qhx_base::{Error, ErrorKind, Result, error};
use qhx_core::engine::Model;
use sha2::{Digest as _, Sha256};

use crate::vars::{self, CACHE_DIR};

/// `$QHX_CACHE_DIR`, or `qhx` in the user's cache folder.
///
/// # Errors
/// When the user has no cache folder.
pub fn dir() -> Result<PathBuf> {
    if let Some(dir) = vars::get(CACHE_DIR) {
        return std::path::absolute(&dir).map_err(|e| Error::io(ErrorKind::Io, Path::new(&dir), e));
    }
    // A folder that is not absolute is passed over, as the XDG base directory specification demands.
    let cache = choose_base_strategy().ok().map(|user| user.cache_dir());
    cache.filter(|dir| dir.is_absolute()).map(|dir| dir.join("qhx")).ok_or_else(|| {
        error!(Io, "there is no cache folder: HOME is not set to an absolute path")
            .hint(format!("set {CACHE_DIR} to a folder that qhx may write to"))
    })
}

/// The file that remembers which context binaries crashed a child process, in the user's cache folder.
pub fn contexts_tried() -> Option<PathBuf> {
    Some(qhx_plugins::search::memory_file()?.with_file_name("contexts-tried.json"))
}

/// The file of `folder` for what is remembered of a bundle with its libraries, and with all of `depends_on`, such as
/// the device. It has the hash of these as its name. The bundle is its manifest, with the hashes there, and the lengths
/// and times of its files.
pub(crate) fn of_model(folder: &str, model: &Model, depends_on: &[&str]) -> Option<PathBuf> {
    let folder = dir().ok()?.join(folder);
    let mut hash = Sha256::new();
    let mut add = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    let manifest = model.manifest();
    let of_bundle =
        [env!("CARGO_PKG_VERSION"), &manifest.raw.to_string(), &model.backend().version];
    for text in of_bundle.iter().chain(depends_on) {
        add(text.as_bytes());
    }
    let table = &manifest.artifacts;
    let binaries = model.context_sources().iter().filter_map(|source| source.binary.clone());
    let others = table.golden.iter().chain(table.embed.iter().map(|embed| &embed.path));
    for file in binaries.chain(others.map(|path| manifest.root.join(path))) {
        let data = std::fs::metadata(&file).ok()?;
        let time = data.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        add(&data.len().to_le_bytes());
        add(&time.as_nanos().to_le_bytes());
    }
    Some(folder.join(hex(hash.finalize())))
}

/// Writes a file in one go: another process finds it whole or not at all.
pub(crate) fn remember(file: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(file);
    std::fs::create_dir_all(folder)?;
    let mut new = tempfile::NamedTempFile::new_in(folder)?;
    new.write_all(bytes)?;
    new.persist(file).map(drop).map_err(|e| e.error)
}
