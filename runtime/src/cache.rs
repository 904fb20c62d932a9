//! Folders for what qhx downloads and makes.

use std::path::{Path, PathBuf};

use etcetera::{BaseStrategy as _, choose_base_strategy};
use qhx_core::{Error, ErrorKind, Result};

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
        Error::new(ErrorKind::Io, "there is no cache folder: HOME is not set to an absolute path")
            .hint(format!("set {CACHE_DIR} to a folder that qhx may write to"))
    })
}

/// The file that remembers which context binaries crashed a child process, in the user's cache folder.
pub fn contexts_tried() -> Option<PathBuf> {
    Some(qhx_plugins::search::memory_file()?.with_file_name("contexts-tried.json"))
}
