//! Graphs of a context that do for several sequences what another one of it does for one.
//!
//! The forge makes them (`qhx forge --batch`): `decode_x4` has the tensors of `decode` four times, those of the first
//! sequence with `_s0` behind their names. Names and shapes are all that says so; a graph that has not exactly these
//! tensors is one like any other.

#![expect(unsafe_code, reason = "executes graphs over bound memory")]

use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::Memory;
use qhx_exec::backend::{Batch, BoundPorts, Graph};
use qhx_types::{GraphInfo, Port, TensorInfo};

use super::graph::QnnGraph;
use super::registered::DeviceMemory;

/// Ports of a graph for several sequences: for each sequence those of the graph for one.
pub(crate) type SequencePorts = Vec<Vec<Port>>;

/// Index of the graph of one sequence among `graphs` that `info` does the work of, and where the ports of each sequence
/// are.
pub(crate) fn batched(
    info: &GraphInfo,
    graphs: &[Arc<GraphInfo>],
) -> Option<(usize, SequencePorts)> {
    let (name, count) = info.name.rsplit_once("_x")?;
    let sequences: usize = count.parse().ok()?;
    let index = graphs.iter().position(|graph| graph.name == name)?;
    let one = &graphs[index];
    let whole = |all: &[TensorInfo], each: &[TensorInfo]| {
        sequences > 1 && sequences.checked_mul(each.len()) == Some(all.len())
    };
    if !whole(&info.inputs, &one.inputs) || !whole(&info.outputs, &one.outputs) {
        return None;
    }
    let place = |all: &[TensorInfo], tensor: &TensorInfo, sequence: usize| {
        let name = format!("{}_s{sequence}", tensor.name);
        let found = all.iter().position(|other| other.name == name)?;
        let same = |other: &TensorInfo| {
            (other.dtype, &other.shape, &other.quantization)
                == (tensor.dtype, &tensor.shape, &tensor.quantization)
        };
        all.get(found).filter(|other| same(other)).map(|_| found)
    };
    let ports = (0..sequences).map(|sequence| {
        let inputs = one.inputs.iter().map(|t| place(&info.inputs, t, sequence).map(Port::Input));
        let outputs =
            one.outputs.iter().map(|t| place(&info.outputs, t, sequence).map(Port::Output));
        inputs.chain(outputs).collect::<Option<Vec<_>>>()
    });
    Some((index, ports.collect::<Option<_>>()?))
}

/// A graph for one sequence, by those that do its work for several.
pub(crate) struct QnnBatch {
    /// The narrowest first.
    graphs: Vec<(QnnGraph, SequencePorts)>,
    /// Bytes of each output of the graph for one sequence.
    outputs: Vec<usize>,
    inputs: usize,
    memory: Arc<DeviceMemory>,
    /// Memory for the outputs of sequences that are not there.
    spare: Vec<Memory>,
}

impl QnnBatch {
    pub(crate) fn new(
        mut graphs: Vec<(QnnGraph, SequencePorts)>,
        one: &GraphInfo,
        memory: Arc<DeviceMemory>,
    ) -> Result<Self> {
        graphs.sort_by_key(|(_, ports)| ports.len());
        let outputs = one.outputs.iter().map(TensorInfo::try_byte_len);
        let outputs = outputs.collect::<std::result::Result<_, _>>().map_err(Error::size)?;
        Ok(Self { graphs, outputs, inputs: one.inputs.len(), memory, spare: Vec::new() })
    }
}

impl Batch for QnnBatch {
    fn max(&self) -> usize {
        self.graphs.last().map_or(0, |(_, ports)| ports.len())
    }

    unsafe fn execute(&mut self, sequences: &[&BoundPorts]) -> Result<()> {
        let Self { graphs, outputs, inputs, memory, spare } = self;
        let fits = |(_, ports): &&mut (QnnGraph, SequencePorts)| ports.len() >= sequences.len();
        let (Some((graph, ports)), Some(first)) = (graphs.iter_mut().find(fits), sequences.first())
        else {
            let message = format!("no graph for {} sequences", sequences.len());
            return Err(Error::new(ErrorKind::Internal, message));
        };
        if ports.len() > sequences.len() && spare.is_empty() {
            for bytes in outputs.iter() {
                spare.push(memory.allocate(*bytes)?.into_memory());
            }
        }
        for (sequence, ports) in ports.iter().enumerate() {
            // Sequences that are not there read what the first one does.
            let bound = sequences.get(sequence).unwrap_or(first);
            for (index, (port, bound)) in ports.iter().zip(*bound).enumerate() {
                let to_spare = sequence >= sequences.len();
                match index.checked_sub(*inputs).filter(|_| to_spare).and_then(|o| spare.get(o)) {
                    Some(memory) => graph.bind(*port, memory, 0)?,
                    None => {
                        if let Some((memory, offset)) = bound {
                            graph.bind(*port, memory, *offset)?;
                        }
                    }
                }
            }
        }
        // SAFETY: contract of [`qhx_exec::backend`], which the caller keeps for each sequence; the outputs of those that
        // are not there are of this batch's own, which are written one over the other.
        unsafe { graph.execute() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_types::DType;

    fn graph(name: &str, inputs: &[(&str, usize)], outputs: &[(&str, usize)]) -> GraphInfo {
        let list = |all: &[(&str, usize)]| {
            all.iter()
                .map(|(name, n)| TensorInfo::new(*name, DType::F16, vec![1, *n]))
                .collect::<Vec<_>>()
        };
        GraphInfo::new(name, list(inputs), list(outputs))
    }

    #[test]
    fn graphs_of_several_sequences_are_found_by_their_tensors() {
        let one = Arc::new(graph("decode", &[("x", 8), ("past", 4)], &[("y", 8)]));
        let graphs = [Arc::new(graph("other", &[], &[])), one];
        let inputs = [("past_s1", 4), ("x_s0", 8), ("x_s1", 8), ("past_s0", 4)];
        let outputs = [("y_s0", 8), ("y_s1", 8)];
        let (index, ports) = batched(&graph("decode_x2", &inputs, &outputs), &graphs).unwrap();
        assert_eq!(index, 1);
        let (input, output) = (Port::Input, Port::Output);
        assert_eq!(ports, [[input(1), input(3), output(0)], [input(2), input(0), output(1)]]);
        for (name, inputs) in [
            ("decode_x3", inputs),
            ("decode_x1", inputs),
            ("decode_x99999999999999999999", inputs),
            ("decode_x9223372036854775807", inputs),
            ("encode_x2", inputs),
            ("decode_x2", [("past_s1", 4), ("x_s0", 8), ("x_s1", 9), ("past_s0", 4)]),
            ("decode_x2", [("past_s1", 4), ("x_s0", 8), ("x_s2", 8), ("past_s0", 4)]),
        ] {
            assert!(batched(&graph(name, &inputs, &outputs), &graphs).is_none(), "{name}");
        }
    }
}
