//! Folders for what qhx downloads and makes.

use std::path::PathBuf;

use etcetera::{BaseStrategy as _, choose_base_strategy};
use qhx_core::{Error, ErrorKind, Result};

use crate::vars;

/// `$QHX_CACHE_DIR`, or `qhx` in the user's cache folder.
pub fn dir() -> Result<PathBuf> {
    if let Some(dir) = vars::path(vars::CACHE_DIR) {
        return std::path::absolute(&dir).map_err(|e| Error::io(ErrorKind::Io, &dir, e));
    }
    // A folder that is not absolute is passed over, as the XDG base directory specification demands.
    let cache = choose_base_strategy().ok().map(|user| user.cache_dir());
    cache.filter(|dir| dir.is_absolute()).map(|dir| dir.join("qhx")).ok_or_else(|| {
        Error::new(ErrorKind::Io, "there is no cache folder: HOME is not set to an absolute path")
            .hint(format!("set {} to a folder that qhx may write to", vars::CACHE_DIR))
    })
}
