//! Golden steps on first open: checks that a bundle gives the answers that it was made with on this device.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qhx_base::{Error, Result, error, trace};
use qhx_core::engine::Model;
use qhx_exec::backend::Backend;

use super::{Golden, StepReport, compare};
use crate::cache;

/// Content of a cache file, which records that the golden steps passed.
const PASSED: &[u8] = b"passed\n";

/// Golden steps behind the shortest begin within this time, on a device.
const BUDGET: Duration = Duration::from_secs(1);

/// Runs golden steps, unless they passed before with the same bundle, libraries and device: the shortest one, and on a
/// device, where prompts of several chunks take tenths of a second, further ones as long as time is left. Models of
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
    let start = Instant::now();
    let trace = model.trace().cloned();
    for (index, step) in golden.by_worth().into_iter().enumerate() {
        if index > 0 && (model.is_emulated() || start.elapsed() > BUDGET) {
            break;
        }
        let began = Instant::now();
        let report = {
            let _span = trace::span(trace.as_ref(), "golden step");
            golden.check(model, step)?
        };
        if !report.passed {
            let graphs = match compare(model, step, reference) {
                Ok(comparison) => comparison.to_string(),
                Err(e) => format!("which graph departs is not known: {e}"),
            };
            return Err(wrong(model, &golden, &report, &graphs));
        }
        tracing::info!(
            "golden step {:?} passed in {:.0} ms (cosine {:.6}); it is not run again with this bundle, library and device",
            report.name,
            began.elapsed().as_secs_f64() * 1e3,
            report.cosine
        );
    }
    model.forget_counts();
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
    error!(Context, "{bundle}: wrong answers on this device: {found}; {graphs}").hint(
        "`qhx verify` compares files and all golden steps; --backend cpu runs the ONNX graphs; --unverified opens the \
         bundle all the same",
    )
}
