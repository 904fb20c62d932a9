//! Tensors by role, and chains of graphs.

use std::fmt::Display;

use crate::{BufferId, DType, Error, GraphId, Host, Port, Result, View};

impl Host {
    /// The input with a role; the error lists what the graph has.
    ///
    /// # Errors
    /// When the graph has no such input.
    pub fn input(&self, graph: GraphId, role: &str) -> Result<Port> {
        Ok(Port::Input(self.graph(graph).require_input(role)?))
    }

    /// The output with a role; the error lists what the graph has.
    ///
    /// # Errors
    /// When the graph has no such output.
    pub fn output(&self, graph: GraphId, role: &str) -> Result<Port> {
        Ok(Port::Output(self.graph(graph).require_output(role)?))
    }

    /// Allocates a buffer for a tensor of f16 or f32, binds it, and returns a view of all of it.
    ///
    /// # Errors
    /// When the tensor holds no floats, or there is not as much memory.
    pub fn view_for(&mut self, graph: GraphId, port: Port) -> Result<View> {
        let dtype = self.require_float(graph, port)?;
        let len = self.tensor(graph, port).elements();
        Ok(View { buffer: self.allocate_for(graph, port)?, dtype, offset: 0, len })
    }

    /// Allocates zeroed memory for `len` values of a type, and returns a view of all of it: of a vector that the
    /// host-op computes itself, say.
    ///
    /// # Errors
    /// When there is not as much memory.
    pub fn allocate_view(&mut self, dtype: DType, len: usize) -> Result<View> {
        let bytes = len.saturating_mul(dtype.size());
        Ok(View { buffer: self.allocate(bytes)?, dtype, offset: 0, len })
    }

    /// Rows of a tensor `[…, width]`, and their width.
    ///
    /// # Errors
    /// When it is empty.
    pub fn rows_of(&self, graph: GraphId, port: Port) -> Result<(usize, usize)> {
        let tensor = self.tensor(graph, port);
        match (tensor.elements(), tensor.width()) {
            (0, _) | (_, 0) => Err(self.misfit(graph, port, "it is empty")),
            (elements, width) => Ok((elements / width, width)),
        }
    }

    /// Error for a tensor of another form than `expected`, which says so.
    pub fn misfit(&self, graph: GraphId, port: Port, expected: impl Display) -> Error {
        let (graph, tensor) = (&self.graph(graph).name, self.tensor(graph, port));
        Error::graph(format!("graph {graph:?}: tensor {tensor}: {expected}"))
    }

    /// Checks that the output `y` of one graph can be the input `x` of the next.
    ///
    /// # Errors
    /// When it cannot.
    pub fn check_chain(&self, from: GraphId, to: GraphId) -> Result<(Port, Port)> {
        let (output, input) = (self.output(from, "y")?, self.input(to, "x")?);
        let (source, target) = (self.tensor(from, output), self.tensor(to, input));
        if source.dtype != target.dtype || source.elements() != target.elements() {
            return Err(Error::graph(format!(
                "graph {:?} hands on {source}, but graph {:?} takes {target}; both must have the \
                 same dtype and number of values",
                self.graph(from).name,
                self.graph(to).name
            )));
        }
        Ok((output, input))
    }

    /// Binds one new buffer as the output `y` of one graph and the input `x` of the next, so that
    /// rows pass without a copy.
    ///
    /// # Errors
    /// Errors of [`Host::check_chain`], or if there is not enough memory.
    pub fn chain(&mut self, from: GraphId, to: GraphId) -> Result<BufferId> {
        let (output, input) = self.check_chain(from, to)?;
        let buffer = self.allocate_for(from, output)?;
        self.bind(to, input, buffer, 0)?;
        Ok(buffer)
    }
}
