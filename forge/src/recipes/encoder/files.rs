//! Files of `sentence-transformers`: reading one that may be missing, and the error about one that asks for what is not
//! done.

use std::path::Path;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::read_json_value;
use serde_json::Value;

/// A JSON file, if it is there.
pub(super) fn read(path: &Path) -> Result<Option<Value>> {
    if !path.exists() {
        return Ok(None);
    }
    read_json_value(path).map(Some)
}

pub(super) fn unsupported(path: &Path, what: &str) -> Error {
    Error::new(ErrorKind::Artifact, format!("{}: {what}", path.display()))
        .hint("vectors would be others than those of sentence-transformers")
}
