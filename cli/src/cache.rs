//! Folders for what qhx downloads and makes.

use std::path::PathBuf;

use qhx_core::{Error, ErrorKind, Result};

use crate::vars;

/// `$QHX_CACHE_DIR`, or `qhx` in the user's cache folder.
pub(crate) fn dir() -> Result<PathBuf> {
    if let Some(dir) = vars::path(vars::CACHE_DIR) {
        return std::path::absolute(&dir).map_err(|e| Error::io(ErrorKind::Io, &dir, &e));
    }
    let xdg = vars::path(vars::XDG_CACHE_HOME).filter(|dir| dir.is_absolute());
    let base = if cfg!(windows) {
        vars::path("LOCALAPPDATA")
    } else if let Some(xdg) = xdg {
        Some(xdg)
    } else if cfg!(target_os = "macos") {
        vars::path("HOME").map(|home| home.join("Library/Caches"))
    } else {
        vars::path("HOME").map(|home| home.join(".cache"))
    };
    base.map(|base| base.join("qhx")).ok_or_else(|| {
        Error::new(ErrorKind::Io, "there is no cache folder: HOME is not set")
            .hint(format!("set {} to a folder that qhx may write to", vars::CACHE_DIR))
    })
}
