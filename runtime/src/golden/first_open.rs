//! Whether a bundle gives the answers that it was made with, asked when it is opened for the first time on a device.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use qhx_core::backend::Backend;
use qhx_core::engine::Model;
use qhx_core::{Error, ErrorKind, Result, trace};

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
    let memory = cache::of_model("golden", model, &[&device]);
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
        && let Err(e) = cache::remember(&file, PASSED)
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
