//! Graph inputs and outputs of golden steps whose host-op steps by itself: a recogniser returns tokens, and a voice
//! returns samples. Both follow from choices and sums that a device may well make otherwise.
//!
//! The first two executions of each graph count: a state is empty in the first. Outputs are compared if the inputs are
//! the expected ones, which they are for the first graph of all. Inputs that follow from the number of frames of a
//! phoneme, or from the phase of a sine, may differ on a device whose graphs are right.

use std::sync::{Arc, Mutex, PoisonError};

use qhx_base::compare::Distance;
use qhx_base::{Result, error};
use qhx_core::engine::Model;
use qhx_exec::graph_runner;
use qhx_exec::workspace::Executed;
use qhx_types::{Port, TensorInfo};
use serde::{Deserialize, Serialize};

use super::{Expected, GoldenStep, PROJECTIONS, StepReport, WRONG, answers, projections};

/// Part of the peak that projections of inputs may differ by. Steps before them differ by 0.012 in f16.
const SAME: f64 = 0.05;

/// Executions of a graph that are noted.
const COUNT: usize = 2;
/// Rows of an output that are compared one by one are as many at most: curves of several kinds have scales of their
/// own.
const ROWS: usize = 8;

/// An execution of a graph in a golden step, its first or second one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Execution {
    /// Key of the context.
    pub context: String,
    /// Name of the graph.
    pub graph: String,
    /// [`Expected::projections`] of each input.
    pub inputs: Vec<Vec<f32>>,
    /// Each output, or each of its rows where it has 2 to 8.
    pub outputs: Vec<Expected>,
}

impl Execution {
    pub(super) fn of(seen: &Seen) -> Result<Self> {
        let Seen { context, graph, inputs, outputs } = seen;
        let of = |values: &Vec<f32>| {
            Expected::of(values).map_err(|e| e.context(format_args!("graph {graph:?}")))
        };
        Ok(Self {
            context: context.clone(),
            graph: graph.clone(),
            inputs: inputs.clone(),
            outputs: outputs.iter().map(of).collect::<Result<_>>()?,
        })
    }

    pub(super) fn validate(&self) -> std::result::Result<(), String> {
        let whole = |sums: &Vec<f32>| {
            sums.len() == PROJECTIONS && sums.iter().all(|value| value.is_finite())
        };
        if !self.inputs.iter().all(whole) || self.outputs.is_empty() {
            return Err(format!(
                "graph {:?}: expected {PROJECTIONS} finite projections of each input, and an output",
                self.graph
            ));
        }
        self.outputs.iter().try_for_each(Expected::validate)
    }
}

/// Inputs and outputs of a graph in one execution.
#[derive(Debug)]
pub(super) struct Seen {
    context: String,
    graph: String,
    /// Projections.
    inputs: Vec<Vec<f32>>,
    outputs: Vec<Vec<f32>>,
}

impl Seen {
    fn of(executed: &Executed<'_>) -> Result<Self> {
        let info = executed.info();
        let values = |tensors: &[TensorInfo], port: fn(usize) -> Port| {
            let all = tensors.iter().enumerate().map(|(index, tensor)| {
                graph_runner::decode(tensor, executed.bytes(port(index)).unwrap_or_default())
            });
            all.collect::<Result<Vec<_>>>()
        };
        let inputs = values(&info.inputs, Port::Input)?;
        let mut outputs = Vec::new();
        for (tensor, values) in info.outputs.iter().zip(values(&info.outputs, Port::Output)?) {
            let rows = tensor.shape.iter().copied().find(|size| *size > 1).unwrap_or(1);
            let rows = if rows <= ROWS { rows } else { 1 };
            let width = values.len() / rows;
            // Numbers alone, as those of one frame, have no direction.
            if rows == 1 || width < 2 {
                outputs.push(values);
            } else {
                outputs.extend(values.chunks(width).map(<[f32]>::to_vec));
            }
        }
        Ok(Self {
            context: executed.context().to_owned(),
            graph: info.name.clone(),
            inputs: inputs.iter().map(|values| projections(values)).collect(),
            outputs,
        })
    }

    fn is_of(&self, context: &str, graph: &str) -> bool {
        self.context == context && self.graph == graph
    }
}

/// Runs a step and notes the first executions of each graph. The model is opened again for it, and afterwards as it
/// was, with its tap.
///
/// # Errors
/// When the model fails, or a tensor cannot be read.
pub(super) fn seen(model: &mut Model, step: &GoldenStep) -> Result<Vec<Seen>> {
    let noted: Arc<Mutex<Result<Vec<Seen>>>> = Arc::new(Mutex::new(Ok(Vec::new())));
    let tapped = Arc::clone(&noted);
    let former = model.tap();
    let first = former.clone();
    model.reopen_with_tap(Some(Arc::new(move |executed| {
        if let Some(tap) = &first {
            tap(executed);
        }
        let mut noted = tapped.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(all) = &mut *noted else { return };
        let (context, graph) = (executed.context(), &executed.info().name);
        if all.iter().filter(|seen| seen.is_of(context, graph)).count() == COUNT {
            return;
        }
        match Seen::of(executed) {
            Ok(seen) => all.push(seen),
            Err(error) => *noted = Err(error),
        }
    })))?;
    let ran = answers(model, step);
    model.reopen_with_tap(former)?;
    ran?;
    let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
    std::mem::replace(&mut *noted, Ok(Vec::new()))
}

/// Notes in `report` how far executions are from those that a step expects. Where the first of them had other inputs,
/// nothing is compared, and that is wrong.
///
/// # Errors
/// When outputs have other sizes.
pub(super) fn compare(step: &GoldenStep, seen: &[Seen], report: &mut StepReport) -> Result<()> {
    for (index, expected) in step.graphs.iter().enumerate() {
        let Execution { context, graph, inputs, outputs } = expected;
        let before = step.graphs[..index].iter();
        let before = before.filter(|other| other.context == *context && other.graph == *graph);
        let found = seen.iter().filter(|seen| seen.is_of(context, graph)).nth(before.count());
        let same = |found: &&Seen| {
            let mut pairs = found.inputs.iter().zip(inputs);
            let near = |(found, expected): (&Vec<f32>, &Vec<f32>)| {
                Distance::of(found, expected).is_ok_and(|distance| distance.relative <= SAME)
            };
            found.inputs.len() == inputs.len() && pairs.all(near)
        };
        let Some(found) = found.filter(same) else {
            if index == 0 {
                report.note(WRONG);
                report.message = Some(format!(
                    "golden step {:?}: graph {graph:?} is given other inputs than those that are expected, before any \
                     graph gave something: a table of the bundle is of other weights",
                    step.name
                ));
                return Ok(());
            }
            tracing::info!(
                "golden step {:?}: graph {graph:?} has other inputs here, and is not compared",
                step.name
            );
            continue;
        };
        let there: Vec<usize> = found.outputs.iter().map(Vec::len).collect();
        let wanted: Vec<usize> = outputs.iter().map(|output| output.size).collect();
        if there != wanted {
            return Err(error!(
                Artifact,
                "golden step {:?}: graph {graph:?} gives {there:?} numbers, expected {wanted:?}",
                step.name
            )
            .hint("the golden steps are of another model: forge the bundle again"));
        }
        for (found, expected) in found.outputs.iter().zip(outputs) {
            report.note(expected.distance(found));
        }
    }
    Ok(())
}
