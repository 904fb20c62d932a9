//! Whether a bundle gives the answers that it was made with, asked when it is opened for the first time on a device.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Instant, UNIX_EPOCH};

use qhx_core::backend::Backend;
use qhx_core::engine::Model;
use qhx_core::hash::hex;
use qhx_core::{Error, ErrorKind, Result, trace};
use sha2::{Digest as _, Sha256};

use super::{Golden, StepReport, compare};
use crate::cache;

/// What a file of the cache holds.
const PASSED: &[u8] = b"passed\n";

/// Runs the shortest golden step, unless it passed before: with the same bundle, libraries and device. Models of
/// backends without a device are not asked.
///
/// # Errors
/// When the answers are wrong, the golden steps are damaged, or the model fails.
pub(crate) fn first_open(
    model: &mut Model,
    reference: impl FnOnce() -> Result<Arc<dyn Backend>>,
) -> Result<()> {
    let Some(device) = model.device() else { return Ok(()) };
    if model.manifest().artifacts.golden.is_none() {
        return Ok(());
    }
    let memory = memory(model, &device);
    let is_known = |file: &PathBuf| std::fs::read(file).is_ok_and(|bytes| bytes == PASSED);
    if memory.as_ref().is_some_and(is_known) {
        return Ok(());
    }
    let Some(golden) = Golden::load(model.manifest())? else { return Ok(()) };
    let Some(step) = golden.shortest() else { return Ok(()) };
    let start = Instant::now();
    let report = {
        let trace = model.trace().cloned();
        let _span = trace::span(trace.as_ref(), "golden step");
        golden.check(model, step)?
    };
    let time = start.elapsed();
    if !report.passed {
        let graphs = match compare(model, step, reference) {
            Ok(comparison) => comparison.to_string(),
            Err(e) => format!("which graph departs is not known: {e}"),
        };
        return Err(wrong(model, &golden, &report, &graphs));
    }
    model.forget_counts();
    tracing::info!(
        "golden step {:?} passed in {:.0} ms (cosine {:.6}); it is not run again with this bundle, library and device",
        report.name,
        time.as_secs_f64() * 1e3,
        report.cosine
    );
    if let Some(file) = memory
        && let Err(e) = remember(&file)
    {
        tracing::debug!("{}: not remembered: {e}", file.display());
    }
    Ok(())
}

fn wrong(model: &Model, golden: &Golden, report: &StepReport, graphs: &str) -> Error {
    let StepReport { name, cosine, relative, message, .. } = report;
    let found = match message {
        Some(message) => message.clone(),
        None => format!(
            "golden step {name:?} has cosine {cosine:.6} and a largest difference of {relative:.3} of the peak, \
             expected at least {} and at most {}",
            golden.tolerance.cosine, golden.tolerance.difference
        ),
    };
    let bundle = model.manifest().path.display();
    let message = format!("{bundle}: wrong answers on this device: {found}; {graphs}");
    Error::new(ErrorKind::Context, message).hint(
        "`qhx verify` compares files and all golden steps; --backend cpu runs the ONNX graphs; --unverified opens the \
         bundle all the same",
    )
}

/// The file that is there once the golden step has passed. It has the hash of the bundle, the libraries and the device
/// as its name. The bundle is its manifest, with the hashes there, and the lengths and times of its files.
fn memory(model: &Model, device: &str) -> Option<PathBuf> {
    let folder = cache::dir().ok()?.join("golden");
    let mut hash = Sha256::new();
    let mut add = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    let manifest = model.manifest();
    for text in
        [env!("CARGO_PKG_VERSION"), &manifest.raw.to_string(), &model.backend().version, device]
    {
        add(text.as_bytes());
    }
    let table = &manifest.artifacts;
    let binaries = model.context_sources().iter().filter_map(|source| source.binary.clone());
    let others = table.golden.iter().chain(table.embed.iter().map(|embed| &embed.path));
    for file in binaries.chain(others.map(|path| manifest.root.join(path))) {
        let data = std::fs::metadata(&file).ok()?;
        let time = data.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        add(&data.len().to_le_bytes());
        add(&time.as_nanos().to_le_bytes());
    }
    Some(folder.join(hex(hash.finalize())))
}

/// Writes the file in one go: another process finds it whole or not at all.
fn remember(file: &std::path::Path) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(file);
    std::fs::create_dir_all(folder)?;
    let mut new = tempfile::NamedTempFile::new_in(folder)?;
    new.write_all(PASSED)?;
    new.persist(file).map(drop).map_err(|e| e.error)
}
