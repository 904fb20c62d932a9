//! Folders for what qhx downloads and makes.

use std::path::PathBuf;

use etcetera::{BaseStrategy as _, choose_base_strategy};
use qhx_core::{Error, ErrorKind, Result};

/// The environment variable that names the folder.
pub const CACHE_DIR: &str = "QHX_CACHE_DIR";

/// `$QHX_CACHE_DIR`, or `qhx` in the user's cache folder.
///
/// # Errors
/// When the user has no cache folder.
pub fn dir() -> Result<PathBuf> {
    let named = std::env::var_os(CACHE_DIR).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(dir) = named {
        return std::path::absolute(&dir).map_err(|e| Error::io(ErrorKind::Io, &dir, e));
    }
    // A folder that is not absolute is passed over, as the XDG base directory specification demands.
    let cache = choose_base_strategy().ok().map(|user| user.cache_dir());
    cache.filter(|dir| dir.is_absolute()).map(|dir| dir.join("qhx")).ok_or_else(|| {
        Error::new(ErrorKind::Io, "there is no cache folder: HOME is not set to an absolute path")
            .hint(format!("set {} to a folder that qhx may write to", CACHE_DIR))
    })
}

/// The file that remembers which context binaries crashed a child process, in the user's cache folder.
pub fn contexts_tried() -> Option<PathBuf> {
    Some(qhx_plugins::search::memory_file()?.with_file_name("contexts-tried.json"))
}
