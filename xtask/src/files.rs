//! Files: read, written and copied, with errors that name them.

use std::path::Path;

use crate::cargo::Result;
use crate::kotlinc::at;

/// Reads a text.
pub(crate) fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(at(path))
}

/// Writes a file, with the folders above it.
pub(crate) fn write(path: &Path, content: &str) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    std::fs::create_dir_all(folder).map_err(at(folder))?;
    std::fs::write(path, content).map_err(at(path))
}

/// Copies a file, with the folders above it.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    let folder = to.parent().unwrap_or(Path::new(""));
    std::fs::create_dir_all(folder).map_err(at(folder))?;
    std::fs::copy(from, to).map(|_| ()).map_err(at(from))
}
