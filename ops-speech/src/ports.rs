//! Inputs and outputs of graphs that take clips shorter than they are.

use qhx_kit::fill::FloatInput;
use qhx_op::{Error, GraphId, Host, Result, View};

/// Place of a voice's sizes, for messages.
pub(crate) const PLACE: &str = "manifest /params/speech";

/// A float input of `len` values.
pub(crate) fn input(host: &mut Host, graph: GraphId, role: &str, len: usize) -> Result<FloatInput> {
    let input = FloatInput::require(host, graph, role)?;
    if input.len() != len {
        return Err(misshapen(host, graph, role, input.len(), len));
    }
    Ok(input)
}

/// A float output of `len` values.
pub(crate) fn output(host: &mut Host, graph: GraphId, role: &str, len: usize) -> Result<View> {
    let port = host.output(graph, role)?;
    let view = host.view_for(graph, port)?;
    if view.len != len {
        return Err(misshapen(host, graph, role, view.len, len));
    }
    Ok(view)
}

fn misshapen(host: &Host, graph: GraphId, role: &str, found: usize, expected: usize) -> Error {
    let name = &host.graph(graph).name;
    Error::graph(format!(
        "graph {name:?}: {found} values of {role}, expected {expected} as {PLACE} has it"
    ))
}

/// Values, and zeros behind them up to `len`.
pub(crate) fn padded(values: &[f32], len: usize) -> Vec<f32> {
    values.iter().copied().chain(std::iter::repeat(0.0)).take(len).collect()
}

/// 1 for what there is, 0 behind it.
pub(crate) fn kept(count: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| f32::from(u8::from(at < count))).collect()
}
