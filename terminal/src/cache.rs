//! Folders for what qhx downloads and makes.

use std::path::PathBuf;

use qhx_core::{Error, ErrorKind, Result};

use crate::vars;

/// `$QHX_CACHE_DIR`, or `qhx` in the user's cache folder.
pub fn dir() -> Result<PathBuf> {
    if let Some(dir) = vars::path(vars::CACHE_DIR) {
        return std::path::absolute(&dir).map_err(|e| Error::io(ErrorKind::Io, &dir, &e));
    }
    // As the XDG base directory specification demands.
    let folder = |name| vars::path(name).filter(|dir| dir.is_absolute());
    let xdg = folder(vars::XDG_CACHE_HOME);
    let base = if cfg!(windows) {
        folder("LOCALAPPDATA")
    } else if let Some(xdg) = xdg {
        Some(xdg)
    } else if cfg!(target_os = "macos") {
        folder("HOME").map(|home| home.join("Library/Caches"))
    } else {
        folder("HOME").map(|home| home.join(".cache"))
    };
    base.map(|base| base.join("qhx")).ok_or_else(|| {
        Error::new(ErrorKind::Io, "there is no cache folder: HOME is not set to an absolute path")
            .hint(format!("set {} to a folder that qhx may write to", vars::CACHE_DIR))
    })
}
