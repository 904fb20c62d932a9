//! Which graph departs from its ONNX graph while a golden step runs.
//!
//! Each graph that the device executes is executed by the reference, too, on the inputs that the device had. So an
//! error is found where it arises, not where it arrives.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use qhx_base::compare::Distance;
use qhx_base::{Error, Result};
use qhx_core::engine::Model;
use qhx_exec::Workspace;
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::graph_runner::{self, Named};
use qhx_exec::workspace::Executed;
use qhx_types::{GraphInfo, Port};
use serde::Serialize;

use super::{GoldenStep, answers};

/// Cosine of an output with the reference's from which on they agree, and part of the peak that elements may differ by.
const MIN_COSINE: f64 = 0.995;
const MAX_RELATIVE: f64 = 0.1;

/// Result of comparing graphs with their ONNX graphs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Comparison {
    /// A graph departs.
    Departs(Divergence),
    /// All graphs agree.
    Agree,
    /// The bundle has no ONNX graphs. The graph and the tensor that the logits come from, where the host-op knows it.
    NoOnnx(Option<String>),
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Departs(departure) => departure.fmt(f),
            Self::Agree => f.write_str(
                "every graph agrees with its ONNX graph on the same inputs: the golden steps are of other weights, or a \
                 table of the bundle is",
            ),
            Self::NoOnnx(origin) => {
                f.write_str("there are no ONNX graphs that would say which graph departs")?;
                origin.iter().try_for_each(|origin| write!(f, "; the logits are those of {origin}"))
            }
        }
    }
}

/// An output that is not what its ONNX graph makes of the same inputs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Divergence {
    /// Key of the context.
    pub context: String,
    /// Name of the graph.
    pub graph: String,
    /// Name of the output.
    pub tensor: String,
    /// Cosine of the two.
    pub cosine: f64,
    /// Largest difference of an element, as a part of the peak.
    pub relative: f64,
}

impl std::fmt::Display for Divergence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { context, graph, tensor, cosine, relative } = self;
        write!(
            f,
            "context {context:?}, graph {graph:?} departs first: output {tensor:?} has cosine {cosine:.6} with that of \
             its ONNX graph on the same inputs, and differs by up to {relative:.3} of its peak"
        )
    }
}

/// Runs a golden step once more, each graph beside its ONNX graph. The model is opened again for it, and afterwards as
/// it was.
///
/// # Errors
/// When the model, or the reference, fails.
pub fn compare(
    model: &mut Model,
    step: &GoldenStep,
    reference: impl FnOnce() -> Result<Arc<dyn Backend>>,
) -> Result<Comparison> {
    let sources: Vec<ContextSource> = model.context_sources().to_vec();
    let is_there = |(_, file): &(String, PathBuf)| file.is_file();
    if !sources.iter().any(|source| !source.onnx.is_empty() && source.onnx.iter().all(is_there)) {
        return Ok(Comparison::NoOnnx(model.op_mut().logits_origin()));
    }
    let state = Arc::new(Mutex::new(Search {
        reference: reference()?,
        sources,
        opened: HashMap::new(),
        found: None,
        failed: None,
    }));
    let tapped = Arc::clone(&state);
    model.reopen_with_tap(Some(Arc::new(move |executed| {
        tapped.lock().unwrap_or_else(PoisonError::into_inner).look(executed);
    })))?;
    let ran = answers(model, step);
    model.reopen_with_tap(None)?;
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    match (state.found.take(), state.failed.take()) {
        (None, Some(error)) => Err(error),
        (None, None) => ran.map(|_| Comparison::Agree),
        (Some(found), _) => Ok(Comparison::Departs(found)),
    }
}

/// The reference, and what was found so far.
struct Search {
    reference: Arc<dyn Backend>,
    sources: Vec<ContextSource>,
    opened: HashMap<String, (Workspace, Vec<Arc<GraphInfo>>)>,
    found: Option<Divergence>,
    failed: Option<Error>,
}

impl Search {
    fn look(&mut self, executed: &Executed<'_>) {
        if self.found.is_some() || self.failed.is_some() {
            return;
        }
        match self.compare(executed) {
            Ok(found) => self.found = found,
            Err(error) => self.failed = Some(error),
        }
    }

    fn compare(&mut self, executed: &Executed<'_>) -> Result<Option<Divergence>> {
        let (context, info) = (executed.context(), executed.info());
        if !self.opened.contains_key(context) {
            let source = self.sources.iter().find(|source| source.key == context);
            let Some(source) = source.filter(|source| !source.onnx.is_empty()) else {
                return Ok(None);
            };
            let opened = graph_runner::open(&self.reference, source)?;
            self.opened.insert(context.to_owned(), opened);
        }
        let Some((workspace, graphs)) = self.opened.get_mut(context) else { return Ok(None) };
        let Some(other) = graphs.iter().find(|other| other.name == info.name) else {
            return Ok(None);
        };
        let values = |tensors: &[qhx_types::TensorInfo], port: fn(usize) -> Port| {
            let named = tensors.iter().enumerate().map(|(index, tensor)| {
                let bytes = executed.bytes(port(index)).unwrap_or_default();
                Ok((tensor.name.clone(), graph_runner::decode(tensor, bytes)?))
            });
            named.collect::<Result<Vec<Named>>>()
        };
        let inputs = values(&info.inputs, Port::Input)?;
        let found = values(&info.outputs, Port::Output)?;
        let expected = graph_runner::run(workspace, other, &inputs)?;
        for (name, found) in found {
            let Some((_, expected)) = expected.iter().find(|(other, _)| *other == name) else {
                continue;
            };
            // What is not finite agrees with nothing.
            let (cosine, relative) = Distance::of(&found, expected)
                .map_or((0.0, f64::INFINITY), |distance| (distance.cosine, distance.relative));
            if cosine < MIN_COSINE || relative > MAX_RELATIVE {
                return Ok(Some(Divergence {
                    context: context.to_owned(),
                    graph: info.name.clone(),
                    tensor: name,
                    cosine,
                    relative,
                }));
            }
        }
        Ok(None)
    }
}
