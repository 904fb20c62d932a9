//! Golden steps of a bundle that was made: see [`qhx::golden`].

use std::path::Path;

use qhx::golden::Golden;
use qhx_core::{Error, ErrorKind, Result};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::OpenModel;
use crate::bundle::replace_json;
use crate::checkpoint::read_json;
use crate::{names, say};

/// Bytes of a bundle from which on only the shortest golden step is computed.
const LARGE: u64 = 1 << 30;

/// Computes golden steps with the bundle's ONNX graphs and adds them to it. False where that failed, which a note says:
/// the bundle is whole without.
///
/// # Errors
/// When it is cancelled.
pub(super) fn add(manifest: &Path, bytes: u64, open: OpenModel<'_>) -> Result<bool> {
    match write(manifest, bytes, open) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::Cancelled => Err(error),
        Err(error) => {
            say!("note: the bundle has no golden steps: {error}");
            Ok(false)
        }
    }
}

fn write(manifest: &Path, bytes: u64, open: OpenModel<'_>) -> Result<()> {
    let golden = Golden::make(&mut open(manifest)?, bytes > LARGE)?;
    if golden.steps.is_empty() {
        return Err(Error::new(ErrorKind::Graph, "the context is too short for one"));
    }
    let text = serde_json::to_string(&golden)
        .map_err(|e| Error::caused(ErrorKind::Internal, "golden steps", e))?;
    let stem = manifest.file_stem().unwrap_or_default().to_string_lossy();
    let name = names::golden_file(&stem);
    let file = manifest.with_file_name(&name);
    let folder = file.parent().unwrap_or(&file);
    std::fs::create_dir_all(folder).map_err(|e| Error::io(ErrorKind::Io, folder, e))?;
    std::fs::write(&file, &text).map_err(|e| Error::io(ErrorKind::Io, &file, e))?;
    let mut document = read_json(manifest)?;
    let sha256 = qhx_core::hash::hex(Sha256::digest(&text));
    document["artifacts"]["golden"] = json!(name);
    document["artifacts"]["files"][&name] = json!({"bytes": text.len(), "sha256": sha256});
    replace_json(manifest, &document)
}
