//! JSON files of checkpoints.

use std::path::Path;

use qhx_base::files;
use qhx_base::{ErrorKind, Result};
use serde_json::Value;

use crate::artifact;

/// Longest JSON file that is read, the index of a very large model included.
pub const MAX_JSON: u64 = 64 << 20;

/// Reads a JSON value.
pub fn read_json_value(path: &Path) -> Result<Value> {
    files::read_json(ErrorKind::Artifact, path, MAX_JSON)
}

/// Reads a JSON object.
pub fn read_json(path: &Path) -> Result<Value> {
    let value = read_json_value(path)?;
    if !value.is_object() {
        return Err(artifact(path, "expected a JSON object"));
    }
    Ok(value)
}
