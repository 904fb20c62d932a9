//! The memory bound to the ports of one graph, for backends that execute on the host.

#![expect(unsafe_code, reason = "views bound memory under the contract of graphs")]

use qhx_base::{Error, ErrorKind, Result};
use qhx_types::{GraphInfo, Port, TensorInfo};

use crate::Memory;

/// Memory for every input and output of a graph.
#[derive(Debug)]
pub struct Bindings {
    graph: String,
    inputs: Vec<Slot>,
    outputs: Vec<Slot>,
}

#[derive(Debug)]
struct Slot {
    tensor: String,
    bytes: usize,
    align: usize,
    bound: Option<(Memory, usize)>,
    /// Previous binding. The two buffers of a state take turns for every token: one that comes back was checked when it
    /// was bound first, and its handle is still there.
    former: Option<(Memory, usize)>,
}

impl Slot {
    fn new(tensor: &TensorInfo) -> Result<Self> {
        Ok(Self {
            tensor: tensor.name.clone(),
            bytes: tensor.try_byte_len().map_err(Error::size)?,
            align: tensor.dtype.size(),
            bound: None,
            former: None,
        })
    }
}

impl Bindings {
    /// Nothing bound yet.
    ///
    /// # Errors
    /// When a tensor's size does not fit in memory.
    pub fn new(info: &GraphInfo) -> Result<Self> {
        Ok(Self {
            graph: info.name.clone(),
            inputs: info.inputs.iter().map(Slot::new).collect::<Result<_>>()?,
            outputs: info.outputs.iter().map(Slot::new).collect::<Result<_>>()?,
        })
    }

    /// Keeps a handle of `memory` for a port.
    ///
    /// # Errors
    /// When the tensor does not fit behind `offset`, would be misaligned, or is an output in memory that cannot be
    /// written.
    pub fn bind(&mut self, port: Port, memory: &Memory, offset: usize) -> Result<()> {
        let (slots, index, writes) = match port {
            Port::Input(i) => (&mut self.inputs, i, false),
            Port::Output(i) => (&mut self.outputs, i, true),
        };
        let fail = |tensor: &str, why: String| {
            let graph = &self.graph;
            Error::new(ErrorKind::Graph, format!("graph {graph:?}: tensor {tensor:?}: {why}"))
        };
        let Some(slot) = slots.get_mut(index) else {
            return Err(fail("?", format!("there is no {port:?}")));
        };
        let is_it = |(m, o): &(Memory, usize)| *o == offset && m.is_same(memory);
        if slot.bound.as_ref().is_some_and(is_it) {
            return Ok(());
        }
        if slot.former.as_ref().is_some_and(is_it) {
            std::mem::swap(&mut slot.bound, &mut slot.former);
            return Ok(());
        }
        let have = memory.len().saturating_sub(offset);
        if have < slot.bytes || offset > memory.len() {
            let need = slot.bytes;
            return Err(fail(&slot.tensor, format!("needs {need} bytes, the buffer has {have}")));
        }
        if !(memory.as_ptr().addr().wrapping_add(offset)).is_multiple_of(slot.align) {
            return Err(fail(&slot.tensor, format!("misaligned at byte {offset}")));
        }
        if writes && !memory.is_writable() {
            return Err(fail(&slot.tensor, "an output bound to a read-only buffer".to_owned()));
        }
        slot.former = slot.bound.replace((memory.clone(), offset));
        Ok(())
    }

    /// The bytes bound to an input.
    ///
    /// # Errors
    /// When nothing is bound to the input.
    ///
    /// # Safety
    /// Nothing writes the memory while the slice lives, other than through it.
    pub unsafe fn input(&self, index: usize) -> Result<&[u8]> {
        let (slot, memory, offset) = self.bound(self.inputs.get(index))?;
        // SAFETY: the caller excludes writers (exclusive).
        let all = unsafe { memory.bytes() };
        Ok(all.get(offset..offset + slot.bytes).unwrap_or_default())
    }

    /// The bytes bound to an output.
    ///
    /// # Errors
    /// When nothing is bound to the output.
    ///
    /// # Safety
    /// Nothing else reads or writes the output's part of the memory while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "exclusive access is the caller's contract")]
    pub unsafe fn output(&self, index: usize) -> Result<&mut [u8]> {
        let (slot, memory, offset) = self.bound(self.outputs.get(index))?;
        // SAFETY: sized: `bind` checked that the range lies in writable memory, which `memory` keeps
        // alive; the caller excludes all other access to it (exclusive).
        Ok(unsafe { std::slice::from_raw_parts_mut(memory.as_ptr().add(offset), slot.bytes) })
    }

    /// Address and length of what is bound to a port, to find overlaps.
    ///
    /// # Errors
    /// When nothing is bound to the port.
    pub fn range(&self, port: Port) -> Result<std::ops::Range<usize>> {
        let (slot, memory, offset) = match port {
            Port::Input(i) => self.bound(self.inputs.get(i))?,
            Port::Output(i) => self.bound(self.outputs.get(i))?,
        };
        let start = memory.as_ptr().addr() + offset;
        Ok(start..start + slot.bytes)
    }

    fn bound<'a>(&'a self, slot: Option<&'a Slot>) -> Result<(&'a Slot, &'a Memory, usize)> {
        let graph = &self.graph;
        let Some(slot) = slot else {
            return Err(Error::new(ErrorKind::Internal, format!("graph {graph:?}: no such port")));
        };
        let Some((memory, offset)) = &slot.bound else {
            let tensor = &slot.tensor;
            let message = format!("graph {graph:?}: nothing is bound to {tensor:?}");
            return Err(Error::new(ErrorKind::Graph, message));
        };
        Ok((slot, memory, *offset))
    }
}

#[cfg(test)]
mod tests {
    #![expect(unsafe_code, reason = "views bound memory")]

    use super::*;
    use crate::Buffer;
    use qhx_types::DType;

    #[test]
    fn a_port_reads_what_was_bound_last() {
        let input = TensorInfo::new("x", DType::F16, vec![2]);
        let info = GraphInfo::new("g", [input], []);
        let mut bindings = Bindings::new(&info).unwrap();
        let buffers: Vec<_> = (0..2)
            .map(|index| {
                let mut buffer = Buffer::zeroed(8).unwrap();
                buffer.bytes_mut().fill(index);
                buffer.bytes_mut()[4..].fill(10 + index);
                buffer
            })
            .collect();
        for (buffer, offset, expected) in [
            (0, 0, 0),
            (1, 0, 1),
            (0, 0, 0),
            (1, 0, 1),
            (0, 4, 10),
            (1, 0, 1),
            (0, 0, 0),
            (0, 4, 10),
        ] {
            bindings.bind(Port::Input(0), buffers[buffer].memory(), offset).unwrap();
            // SAFETY: nothing writes the buffers.
            assert_eq!(unsafe { bindings.input(0) }.unwrap(), [expected; 4]);
        }
        bindings.bind(Port::Input(0), buffers[0].memory(), 6).unwrap_err();
        // SAFETY: as above.
        assert_eq!(unsafe { bindings.input(0) }.unwrap(), [10; 4], "a refused buffer was bound");
    }
}
