//! Float inputs of graphs, with a check of what is written into them.

use std::ops::Range;

use half::f16;

use crate::kernels::f32_to_f16;
use qhx_op::{BufferId, DType, Error, GraphId, Host, Port, Result};

/// An f16 or f32 input of a graph, with a buffer. Other graphs may read the same buffer.
#[derive(Debug, Clone, Copy)]
pub struct FloatInput {
    graph: GraphId,
    port: Port,
    buffer: BufferId,
    dtype: DType,
    len: usize,
}

impl FloatInput {
    /// Allocates and binds the input `role` of a graph.
    ///
    /// # Errors
    /// When the graph has no such input, or it is not f16 or f32.
    pub fn require(host: &mut Host, graph: GraphId, role: &str) -> Result<Self> {
        let port = Port::Input(host.graph(graph).require_input(role)?);
        let dtype = host.require_float(graph, port)?;
        let len = host.tensor(graph, port).elements();
        let buffer = host.allocate_for(graph, port)?;
        Ok(Self { graph, port, buffer, dtype, len })
    }

    /// Allocates and binds the input `role` of all graphs that have one. Graphs whose inputs are
    /// alike in size and element type read the same buffer: one for each form is in the list.
    ///
    /// # Errors
    /// When an input is not f16 or f32.
    pub fn bind_all(host: &mut Host, graphs: &[GraphId], role: &str) -> Result<Vec<Self>> {
        let mut inputs: Vec<Self> = Vec::new();
        for &graph in graphs {
            let Some(index) = host.graph(graph).input(role) else { continue };
            match inputs.iter().find(|input| input.fits(host, graph, index)) {
                Some(alike) => host.bind(graph, Port::Input(index), alike.buffer, 0)?,
                None => inputs.push(Self::require(host, graph, role)?),
            }
        }
        Ok(inputs)
    }

    /// True when another graph's input can read this buffer.
    fn fits(&self, host: &Host, graph: GraphId, input: usize) -> bool {
        let tensor = host.tensor(graph, Port::Input(input));
        (tensor.dtype, tensor.elements()) == (self.dtype, self.len)
    }

    /// The buffer.
    pub fn buffer(&self) -> BufferId {
        self.buffer
    }

    /// f16 or f32.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    #[expect(clippy::len_without_is_empty, reason = "a tensor, not a collection")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Writes all elements.
    ///
    /// # Errors
    /// When there are more or fewer values.
    pub fn write(&self, host: &mut Host, values: &[f32]) -> Result<()> {
        if values.len() != self.len {
            let found = format!("{} values, expected {}", values.len(), self.len);
            return Err(self.misfit(host, &found));
        }
        self.put(host, 0, values);
        Ok(())
    }

    /// Writes the elements from `first` on, such as one row.
    ///
    /// # Errors
    /// When they do not fit.
    pub fn write_at(&self, host: &mut Host, first: usize, values: &[f32]) -> Result<()> {
        if first.checked_add(values.len()).is_none_or(|end| end > self.len) {
            let found = format!(
                "{} values from element {first} on, expected at most {} in all",
                values.len(),
                self.len
            );
            return Err(self.misfit(host, &found));
        }
        self.put(host, first, values);
        Ok(())
    }

    /// Writes one value into all elements.
    pub fn fill(&self, host: &mut Host, value: f32) {
        self.set(host, 0..self.len, value);
    }

    /// Rows of the tensor, and the values of each.
    pub(crate) fn matrix(&self, host: &Host) -> Result<(usize, usize)> {
        host.rows_of(self.graph, self.port)
    }

    /// Error about a tensor that has an unexpected form.
    pub(crate) fn misfit(&self, host: &Host, found: &str) -> Error {
        host.misfit(self.graph, self.port, format_args!("found {found}"))
    }

    /// Writes values whose place has been checked.
    pub(super) fn put(&self, host: &mut Host, first: usize, values: &[f32]) {
        let range = first..first + values.len();
        match self.dtype {
            DType::F16 => f32_to_f16(values, &mut host.f16s_mut(self.buffer)[range]),
            _ => host.f32s_mut(self.buffer)[range].copy_from_slice(values),
        }
    }

    /// Writes one value into a range that has been checked.
    pub(super) fn set(&self, host: &mut Host, range: Range<usize>, value: f32) {
        match self.dtype {
            DType::F16 => host.f16s_mut(self.buffer)[range].fill(f16::from_f32(value)),
            _ => host.f32s_mut(self.buffer)[range].fill(value),
        }
    }
}
