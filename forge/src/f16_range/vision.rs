//! Magnitudes of a tower's hidden states: its blocks run on an image in f32 before anything is made.
//!
//! The NPU keeps hidden states in f16. A model trained in bf16 may have channels that do not fit; on the device they
//! would become infinite, and everything after them NaN.

use std::path::Path;
use std::sync::Arc;

use crate::recipe::{Probe, Scaling};
use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::graph_runner::{open, run};
use qhx_graph::onnx;
use qhx_graph::progress::Progress;
use serde::Serialize;

/// The largest magnitude of the hidden states at one point of the model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Residual {
    /// `block_5`, for instance.
    pub place: String,
    /// Over all rows and channels.
    pub largest: f32,
}

impl Residual {
    /// Rows may be as large as this. f16 ends at 65,504; what is left is for images other than the one that was
    /// looked at.
    pub const LIMIT: f32 = 30_000.0;

    /// True when f16 holds the rows, with room.
    pub fn fits(&self) -> bool {
        self.largest <= Self::LIMIT
    }
}

/// Runs a probe, which [`registry::probe`](crate::registry::probe) makes of an image, and returns the largest
/// rows at each point of the model. The graph's weights are written into a folder below `scratch`, which is removed
/// again.
///
/// # Errors
/// When rows exceed [`Residual::LIMIT`]: the message names the first point of the model where they do, and the option
/// that helps.
pub fn residuals(
    probe: &Probe,
    cpu: &Arc<dyn Backend>,
    scratch: &Path,
    progress: &mut dyn Progress,
) -> Result<Vec<Residual>> {
    let folder = tempfile::Builder::new()
        .prefix(".qhx-probe-")
        .tempdir_in(scratch)
        .map_err(|e| Error::io(ErrorKind::Io, scratch, e))?;
    let written = onnx::write(&probe.graph, folder.path(), progress)?;
    progress.stage(&format!("run {}", probe.graph.name()), 0);
    let source = ContextSource {
        key: probe.graph.name().to_owned(),
        onnx: vec![(probe.graph.name().to_owned(), written.model)],
        ..ContextSource::default()
    };
    let (mut workspace, graphs) = open(cpu, &source)?;
    let mut found = Vec::new();
    for graph in &graphs {
        for (place, values) in run(&mut workspace, graph, &probe.inputs)? {
            // NaN would be lost in `f32::max`.
            let largest = values.iter().fold(0.0, |max: f32, v| {
                if v.is_finite() { max.max(v.abs()) } else { f32::INFINITY }
            });
            found.push(Residual { place, largest });
        }
    }
    match found.iter().find(|residual| !residual.fits()) {
        Some(first) => Err(too_large(first, &found, probe.scaling)),
        None => Ok(found),
    }
}

fn too_large(first: &Residual, all: &[Residual], scaling: Option<Scaling>) -> Error {
    let max = all.iter().map(|residual| residual.largest).fold(first.largest, f32::max);
    let limit = Residual::LIMIT;
    let error = Error::new(
        ErrorKind::Artifact,
        format!(
            "hidden states exceed {limit} first at {} ({}), and reach {max}; the NPU holds them in f16, which ends at \
             65504",
            first.place, first.largest
        ),
    );
    let fix = scaling.and_then(|Scaling { option, now, max: end }| {
        let more = (max / limit).log2().ceil();
        more.is_finite().then(|| now.saturating_add(more as u32)).filter(|k| *k <= end).map(|k| {
            format!(
                "--recipe-option {option}={k} keeps them at 2^-{k} of their size throughout, which changes no result"
            )
        })
    });
    error.hint(fix.unwrap_or_else(|| {
        "no scaling brings them into range: make a bundle for the CPU only (`--cpu-only`)"
            .to_owned()
    }))
}
