//! Graphs of a context that do for several sequences what another one of it does for one.
//!
//! The forge makes them (`qhx forge --batch`): `decode_x4` has the tensors of `decode` with the rows of four sequences, or
//! four times, that of the first sequence with `_s0` behind its name. Names and shapes are all that says so; a graph that
//! has not exactly these tensors is one like any other.

#![expect(unsafe_code, reason = "executes graphs over bound memory")]

use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::Memory;
use qhx_exec::backend::{Batch, BoundPorts, Graph};
use qhx_types::{GraphInfo, Port, TensorInfo};

use super::graph::QnnGraph;
use super::registered::DeviceMemory;

/// Place of a port of the graph for one sequence in a graph for several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// A tensor with the rows of all sequences, one behind the other.
    Joint(Port),
    /// A tensor for each sequence.
    Each(Vec<Port>),
}

/// Places of the inputs of the graph for one sequence, and then of its outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Places {
    pub(crate) sequences: usize,
    inputs: usize,
    all: Vec<Place>,
}

/// Index of the graph of one sequence among `graphs` that `info` does the work of, and where its ports are.
pub(crate) fn batched(info: &GraphInfo, graphs: &[Arc<GraphInfo>]) -> Option<(usize, Places)> {
    let (name, count) = info.name.rsplit_once("_x")?;
    let sequences: usize =
        count.parse().ok().filter(|count| (2..=MAX_SEQUENCES).contains(count))?;
    let index = graphs.iter().position(|graph| graph.name == name)?;
    let one = &graphs[index];
    let places = |all: &[TensorInfo], each: &[TensorInfo], port: fn(usize) -> Port| {
        let found = each.iter().map(|tensor| place(all, tensor, sequences, port));
        let found = found.collect::<Option<Vec<_>>>()?;
        let count = |place: &Place| match place {
            Place::Joint(_) => 1,
            Place::Each(ports) => ports.len(),
        };
        // All of them, and none besides.
        (found.iter().map(count).sum::<usize>() == all.len()).then_some(found)
    };
    let mut all = places(&info.inputs, &one.inputs, Port::Input)?;
    all.extend(places(&info.outputs, &one.outputs, Port::Output)?);
    Some((index, Places { sequences, inputs: one.inputs.len(), all }))
}

/// Sequences that a graph can be for.
const MAX_SEQUENCES: usize = 64;

fn place(
    all: &[TensorInfo],
    tensor: &TensorInfo,
    sequences: usize,
    port: fn(usize) -> Port,
) -> Option<Place> {
    let find = |name: &str, rows: usize| {
        let found = all.iter().position(|other| other.name == name)?;
        let other = &all[found];
        let (first, rest) = tensor.shape.split_first()?;
        let (other_first, other_rest) = other.shape.split_first()?;
        let same = first.checked_mul(rows) == Some(*other_first)
            && (rest, tensor.dtype, &tensor.quantization)
                == (other_rest, other.dtype, &other.quantization);
        same.then(|| port(found))
    };
    if let Some(joint) = find(&tensor.name, sequences) {
        return Some(Place::Joint(joint));
    }
    let each = (0..sequences).map(|sequence| find(&format!("{}_s{sequence}", tensor.name), 1));
    Some(Place::Each(each.collect::<Option<_>>()?))
}

/// A graph for one sequence, by those that do its work for several.
pub(crate) struct QnnBatch {
    /// The narrowest first.
    graphs: Vec<(QnnGraph, Places)>,
    /// Bytes of each port of the graph for one sequence.
    bytes: Vec<usize>,
    memory: Arc<DeviceMemory>,
    /// For each port memory for the rows of all sequences, or for the output of one that is not there.
    own: Vec<Option<Memory>>,
}

impl QnnBatch {
    pub(crate) fn new(
        mut graphs: Vec<(QnnGraph, Places)>,
        one: &GraphInfo,
        memory: Arc<DeviceMemory>,
    ) -> Result<Self> {
        graphs.sort_by_key(|(_, places)| places.sequences);
        let tensors = one.inputs.iter().chain(&one.outputs);
        let bytes = tensors.map(TensorInfo::try_byte_len);
        let bytes = bytes.collect::<std::result::Result<Vec<_>, _>>().map_err(Error::size)?;
        let own = vec![None; bytes.len()];
        Ok(Self { graphs, bytes, memory, own })
    }

    /// Memory of a port for the rows of as many sequences as there can be.
    fn own(&mut self, index: usize) -> Result<Memory> {
        let (max, bytes) = (self.max(), self.bytes[index]);
        if self.own[index].is_none() {
            let all = bytes.checked_mul(max).ok_or_else(|| {
                let message =
                    format!("{max} sequences of {bytes} bytes are more than memory can be");
                Error::new(ErrorKind::Graph, message)
            })?;
            self.own[index] = Some(self.memory.allocate(all)?.into_memory());
        }
        let missing = || Error::new(ErrorKind::Internal, "memory of a batch is missing");
        self.own[index].clone().ok_or_else(missing)
    }
}

impl Batch for QnnBatch {
    fn max(&self) -> usize {
        self.graphs.last().map_or(0, |(_, places)| places.sequences)
    }

    unsafe fn execute(&mut self, sequences: &[&BoundPorts]) -> Result<()> {
        let fits = |(_, places): &(QnnGraph, Places)| places.sequences >= sequences.len();
        let (Some(chosen), Some(first)) = (self.graphs.iter().position(fits), sequences.first())
        else {
            let message = format!("no graph for {} sequences", sequences.len());
            return Err(Error::new(ErrorKind::Internal, message));
        };
        let Places { sequences: room, inputs, all } = self.graphs[chosen].1.clone();
        for (index, place) in all.iter().enumerate() {
            let bytes = self.bytes[index];
            match place {
                Place::Joint(port) => {
                    let own = self.own(index)?;
                    if index < inputs {
                        for (row, ports) in sequences.iter().enumerate() {
                            // SAFETY: contract of [`qhx_exec::backend`]: exclusive, of the sequence's memory; the other is
                            // this batch's own.
                            let [from, to] =
                                unsafe { [bound(ports, index, bytes)?, rows(&own, row, bytes)?] };
                            to.copy_from_slice(from);
                        }
                    }
                    self.graphs[chosen].0.bind(*port, &own, 0)?;
                }
                Place::Each(each) => {
                    for (sequence, port) in each.iter().enumerate().take(room) {
                        // Sequences that are not there read what the first one does, and write what nobody reads.
                        let ports = match sequences.get(sequence) {
                            None if index >= inputs => {
                                let own = self.own(index)?;
                                self.graphs[chosen].0.bind(*port, &own, 0)?;
                                continue;
                            }
                            here => here.unwrap_or(first),
                        };
                        if let Some(Some((memory, offset))) = ports.get(index) {
                            self.graphs[chosen].0.bind(*port, memory, *offset)?;
                        }
                    }
                }
            }
        }
        // SAFETY: contract of [`qhx_exec::backend`], which the caller keeps for each sequence; the rest is memory of this
        // batch's own. What several sequences that are not there write, nobody reads.
        unsafe { self.graphs[chosen].0.execute()? };
        for (index, place) in all.iter().enumerate().skip(inputs) {
            if let Place::Joint(_) = place {
                let (own, bytes) = (self.own(index)?, self.bytes[index]);
                for (row, ports) in sequences.iter().enumerate() {
                    // SAFETY: as above.
                    let [to, from] =
                        unsafe { [bound(ports, index, bytes)?, rows(&own, row, bytes)?] };
                    to.copy_from_slice(from);
                }
            }
        }
        Ok(())
    }
}

/// The bytes that a sequence has bound to a port.
///
/// # Safety
/// Nothing else reads or writes them while the slice lives.
#[expect(clippy::mut_from_ref, reason = "exclusive access is the caller's contract")]
unsafe fn bound(ports: &BoundPorts, index: usize, bytes: usize) -> Result<&mut [u8]> {
    let missing = || Error::new(ErrorKind::Internal, format!("nothing is bound to port {index}"));
    let (memory, offset) = ports.get(index).and_then(Option::as_ref).ok_or_else(missing)?;
    let fits = offset.checked_add(bytes).is_some_and(|end| end <= memory.len());
    if !fits {
        return Err(Error::new(
            ErrorKind::Internal,
            format!("port {index}: {bytes} bytes do not fit"),
        ));
    }
    // SAFETY: the range lies in the memory, which the handle keeps alive; the caller excludes all other access.
    Ok(unsafe { std::slice::from_raw_parts_mut(memory.as_ptr().add(*offset), bytes) })
}

/// The row of a sequence in memory for all.
///
/// # Safety
/// Same as [`bound`].
#[expect(clippy::mut_from_ref, reason = "exclusive access is the caller's contract")]
unsafe fn rows(own: &Memory, row: usize, bytes: usize) -> Result<&mut [u8]> {
    let start = row.checked_mul(bytes);
    let end = start.and_then(|start| start.checked_add(bytes)).filter(|end| *end <= own.len());
    let (Some(start), Some(_)) = (start, end) else {
        return Err(Error::new(
            ErrorKind::Internal,
            format!("row {row} of {bytes} bytes does not fit"),
        ));
    };
    // SAFETY: as in `bound`.
    Ok(unsafe { std::slice::from_raw_parts_mut(own.as_ptr().add(start), bytes) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_types::DType;

    fn graph(name: &str, inputs: &[(&str, usize)], outputs: &[(&str, usize)]) -> GraphInfo {
        let list = |all: &[(&str, usize)]| {
            all.iter()
                .map(|(name, n)| TensorInfo::new(*name, DType::F16, vec![*n, 8]))
                .collect::<Vec<_>>()
        };
        GraphInfo::new(name, list(inputs), list(outputs))
    }

    #[test]
    fn graphs_of_several_sequences_are_found_by_their_tensors() {
        let one = Arc::new(graph("decode", &[("x", 1), ("past", 4)], &[("y", 1)]));
        let graphs = [Arc::new(graph("other", &[], &[])), one];
        let inputs = [("past_s1", 4), ("x", 2), ("past_s0", 4)];
        let outputs = [("y_s0", 1), ("y_s1", 1)];
        let (index, places) = batched(&graph("decode_x2", &inputs, &outputs), &graphs).unwrap();
        assert_eq!((index, places.sequences, places.inputs), (1, 2, 2));
        let (input, output) = (Port::Input, Port::Output);
        let expected = [
            Place::Joint(input(1)),
            Place::Each(vec![input(2), input(0)]),
            Place::Each(vec![output(0), output(1)]),
        ];
        assert_eq!(places.all, expected);
        let more = [("past_s1", 4), ("x", 2), ("past_s0", 4), ("z", 1)];
        for (name, inputs) in [
            ("decode_x3", &inputs[..]),
            ("decode_x1", &inputs),
            ("decode_x99999999999999999999", &inputs),
            ("decode_x9223372036854775807", &inputs),
            ("encode_x2", &inputs),
            ("decode_x2", &more),
            ("decode_x2", &[("past_s1", 4), ("x", 3), ("past_s0", 4)]),
            ("decode_x2", &[("past_s1", 4), ("x", 2), ("past_s2", 4)]),
        ] {
            assert!(batched(&graph(name, inputs, &outputs), &graphs).is_none(), "{name}");
        }
    }
}
