//! Golden steps of a bundle that was made: see [`qhx::golden`].

use std::path::Path;

use qhx::golden::Golden;
use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::read_json;
use qhx_graph::progress::Progress;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::OpenModel;
use crate::bundle::replace_json;
use crate::names;

/// Bytes of a bundle from which on only the shortest golden step is computed.
const LARGE: u64 = 1 << 30;

/// Computes golden steps with the bundle's ONNX graphs and adds them to it. Says which one it computes.
///
/// # Errors
/// When they cannot be computed or written. The bundle stays as it is.
pub(super) fn add(
    manifest: &Path,
    bytes: u64,
    open: OpenModel<'_>,
    progress: &mut dyn Progress,
) -> Result<()> {
    write(manifest, bytes, open, progress).map_err(|error| {
        let hint = "the bundle is there, without golden steps; --no-golden makes one without them";
        let hint = error.hint_text().map_or(hint.to_owned(), |own| format!("{own}; {hint}"));
        error.context("golden steps").hint(hint)
    })
}

fn write(
    manifest: &Path,
    bytes: u64,
    open: OpenModel<'_>,
    progress: &mut dyn Progress,
) -> Result<()> {
    let mut model = open(manifest)?;
    let golden = Golden::make(&mut model, bytes > LARGE, &mut |step| {
        progress.stage(&format!("golden step {step}"), 0);
    })?;
    if golden.steps.is_empty() {
        return Ok(());
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
    let sha256 = qhx_base::hash::hex(Sha256::digest(&text));
    document["artifacts"]["golden"] = json!(name);
    document["artifacts"]["files"][&name] = json!({"bytes": text.len(), "sha256": sha256});
    replace_json(manifest, &document)
}
