//! Rotary tables in the inputs of graphs.

use std::ops::Range;

use super::input::FloatInput;
use super::rope::Rope;
use qhx_op::{Error, GraphId, Host, Port, Result};

impl Rope {
    /// Binds the tables of a graph that takes one position; `None` when it has neither.
    ///
    /// # Errors
    /// When an input has another shape or element type, or the rope has no dimension.
    pub fn bind(&self, host: &mut Host, graph: GraphId) -> Result<Option<RopeSlot>> {
        self.bind_rows(host, graph, 1)
    }

    /// Binds the tables of a graph that takes `rows` positions, one row each; `None` when it has
    /// neither.
    ///
    /// # Errors
    /// Errors of [`Rope::bind`].
    pub fn bind_rows(
        &self,
        host: &mut Host,
        graph: GraphId,
        rows: usize,
    ) -> Result<Option<RopeSlot>> {
        if !self.check(host, graph, rows)? {
            return Ok(None);
        }
        let cos = FloatInput::require(host, graph, self.cos_role)?;
        let sin = FloatInput::require(host, graph, self.sin_role)?;
        Ok(Some(RopeSlot { cos, sin, rows, roles: [self.cos_role, self.sin_role] }))
    }

    /// Binds the tables of graphs that take `rows` positions in one step. Graphs whose tables are
    /// alike read the same buffers; a graph with neither input needs none.
    ///
    /// # Errors
    /// Errors of [`Rope::bind`].
    pub fn bind_all(&self, host: &mut Host, graphs: &[GraphId], rows: usize) -> Result<RopeTables> {
        for &graph in graphs {
            self.check(host, graph, rows)?;
        }
        let cos = FloatInput::bind_all(host, graphs, self.cos_role)?;
        let sin = FloatInput::bind_all(host, graphs, self.sin_role)?;
        let positions = vec![usize::MAX; if cos.is_empty() { 0 } else { rows }];
        Ok(RopeTables { cos, sin, rows, positions })
    }

    /// True when a graph has both inputs, false when it has neither. Errors when it has one, or when
    /// one is not `rows` rows of a width that the rope has.
    fn check(&self, host: &Host, graph: GraphId, rows: usize) -> Result<bool> {
        let info = host.graph(graph);
        let roles = [self.cos_role, self.sin_role];
        if roles.iter().all(|role| info.input(role).is_none()) {
            return Ok(false);
        }
        let (pairs, turning) = (self.pairs(), self.turning());
        if pairs == 0 {
            return Err(Error::manifest(format!(
                "manifest: rotary_dim or head_dim is missing where the rope is described, usually \
                 /params; the rotary tables {} of graph {:?} are made for it",
                roles.join(" and "),
                info.name
            )));
        }
        for role in roles {
            let port = info.require_input(role)?;
            host.require_float(graph, Port::Input(port))?;
            let tensor = &info.inputs[port];
            let fits = |width| rows.checked_mul(width) == Some(tensor.elements());
            if ![pairs, 2 * pairs, turning].into_iter().any(fits) {
                let part = if turning == pairs {
                    String::new()
                } else {
                    format!(" or {turning} (the pairs that turn)")
                };
                return Err(Error::graph(format!(
                    "graph {:?}: tensor {tensor}: expected {rows} rows of {pairs} values (half a \
                     rotary table) or {} (both halves){part}",
                    info.name,
                    2 * pairs
                )));
            }
        }
        Ok(true)
    }
}

/// Writes the tables that a rope has computed into a row of the inputs.
fn write_row(host: &mut Host, input: &FloatInput, rows: usize, row: usize, table: &[f32]) {
    let width = input.len() / rows;
    input.put(host, row * width, &table[..width]);
}

/// The bound rotary tables of one graph.
#[derive(Debug, Clone, Copy)]
pub struct RopeSlot {
    cos: FloatInput,
    sin: FloatInput,
    rows: usize,
    roles: [&'static str; 2],
}

impl RopeSlot {
    /// Binds the same tables to the inputs of another graph, so that one fill serves both.
    ///
    /// # Errors
    /// When they differ in size or element type.
    pub fn bind_also(&self, host: &mut Host, graph: GraphId) -> Result<()> {
        for (role, input) in self.roles.into_iter().zip([self.cos, self.sin]) {
            let info = host.graph(graph);
            let port = info.require_input(role)?;
            if !input.fits(host, graph, port) {
                return Err(Error::graph(format!(
                    "graph {:?}: tensor {}: expected {} with {} rows of {} values, as in the \
                     graphs before it",
                    info.name,
                    info.inputs[port],
                    input.dtype(),
                    self.rows,
                    input.len() / self.rows.max(1)
                )));
            }
            host.bind(graph, Port::Input(port), input.buffer(), 0)?;
        }
        Ok(())
    }

    /// Writes the tables that [`Rope::compute`] made.
    pub fn write(&self, host: &mut Host, rope: &Rope) {
        self.write_row(host, rope, 0);
    }

    /// Fills all rows with the tables of the positions from `first` on.
    pub fn fill(&self, host: &mut Host, rope: &mut Rope, first: usize) {
        for row in 0..self.rows {
            rope.compute(first + row);
            self.write_row(host, rope, row);
        }
    }

    fn write_row(&self, host: &mut Host, rope: &Rope, row: usize) {
        write_row(host, &self.cos, self.rows, row, &rope.cos);
        write_row(host, &self.sin, self.rows, row, &rope.sin);
    }
}

/// The rotary tables of all graphs of a step, which [`Rope::bind_all`] makes.
#[derive(Debug)]
pub struct RopeTables {
    /// One for each size and element type among the graphs.
    cos: Vec<FloatInput>,
    sin: Vec<FloatInput>,
    rows: usize,
    /// The position of each row; `usize::MAX` where it is another one, or has three components.
    positions: Vec<usize>,
}

impl RopeTables {
    /// Fills all rows with the tables of the positions from `first` on. Each position is computed
    /// once; rows that have their position already stay as they are.
    pub fn fill(&mut self, host: &mut Host, rope: &mut Rope, first: usize) {
        self.fill_rows(host, rope, 0..self.rows, first);
    }

    /// Fills the first rows for texts of these numbers of tokens that stand one behind the other: the positions of each
    /// begin at 0. Rows after them, and rows that have their position already, stay as they are.
    pub fn fill_texts(&mut self, host: &mut Host, rope: &mut Rope, lengths: &[usize]) {
        let mut row = 0_usize;
        for &length in lengths {
            let end = self.rows.min(row.saturating_add(length));
            self.fill_rows(host, rope, row..end, 0);
            row = end;
        }
    }

    fn fill_rows(&mut self, host: &mut Host, rope: &mut Rope, rows: Range<usize>, first: usize) {
        if self.is_empty() {
            return;
        }
        for (row, position) in rows.zip(first..) {
            if self.positions[row] != position {
                rope.compute(position);
                self.write_row(host, rope, row);
                self.positions[row] = position;
            }
        }
    }

    /// Fills the first rows with the tables of positions in time, height and width, one a row. Rows
    /// after them stay as they are.
    ///
    /// # Errors
    /// When there are more positions than rows.
    pub fn fill_at(
        &mut self,
        host: &mut Host,
        rope: &mut Rope,
        positions: &[[usize; 3]],
    ) -> Result<()> {
        if positions.len() > self.rows {
            return Err(Error::prompt(format!(
                "{} positions do not fit into rotary tables of {} rows",
                positions.len(),
                self.rows
            )));
        }
        if self.is_empty() {
            return Ok(());
        }
        for (row, &position) in positions.iter().enumerate() {
            self.positions[row] = usize::MAX;
            rope.compute_at(position);
            self.write_row(host, rope, row);
        }
        Ok(())
    }

    /// True when no graph has such tables.
    pub fn is_empty(&self) -> bool {
        self.cos.is_empty()
    }

    fn write_row(&self, host: &mut Host, rope: &Rope, row: usize) {
        for input in &self.cos {
            write_row(host, input, self.rows, row, &rope.cos);
        }
        for input in &self.sin {
            write_row(host, input, self.rows, row, &rope.sin);
        }
    }
}
