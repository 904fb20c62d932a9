//! From a hidden state to logits: a graph of its own, or the last shard itself.

use crate::experts::Residual;
use qhx_op::{Error, GraphId, Host, Port, Result, View};

/// Rows of hidden values, one for each token of a step.
#[derive(Debug, Clone, Copy)]
pub struct HiddenRows {
    /// A graph that has them as a tensor, for messages.
    pub graph: GraphId,
    /// The tensor.
    pub port: Port,
    /// View of the rows.
    pub view: View,
    /// Number of rows.
    pub rows: usize,
}

/// The graph from a hidden state `x` to `logits`.
#[derive(Debug)]
pub struct Head {
    graph: GraphId,
    input: Port,
    logits: View,
    sources: Vec<HiddenRows>,
    /// Source and row that it reads.
    reads: Option<(usize, usize)>,
}

impl Head {
    /// Finds the tensors and checks that it can read a row of each of `sources`.
    ///
    /// # Errors
    /// When a tensor is missing, or has another shape.
    pub fn open(host: &mut Host, graph: GraphId, sources: Vec<HiddenRows>) -> Result<Self> {
        let (input, output) = (host.input(graph, "x")?, host.output(graph, "logits")?);
        let row = host.tensor(graph, input);
        for source in &sources {
            let (dtype, len) = (source.view.dtype, source.view.len);
            if dtype != row.dtype || source.rows.checked_mul(row.elements()) != Some(len) {
                let what = format!(
                    "expected {} times the values of {row}, the row that \
                     graph {:?} (manifest {LMHEAD}) takes",
                    source.rows,
                    host.graph(graph).name
                );
                return Err(host.misfit(source.graph, source.port, what));
            }
        }
        let logits = host.view_for(graph, output)?;
        let mut head = Self { graph, input, logits, sources, reads: None };
        head.read(host, 0, 0)?;
        Ok(head)
    }

    /// View of the logits.
    pub fn logits(&self) -> View {
        self.logits
    }

    /// Binds it to a row. Nothing is copied.
    fn read(&mut self, host: &mut Host, source: usize, row: usize) -> Result<()> {
        if self.reads == Some((source, row)) {
            return Ok(());
        }
        if let Some(HiddenRows { view, rows, .. }) = self.sources.get(source) {
            let row = nth(*view, row, *rows);
            host.bind(self.graph, self.input, row.buffer, row.offset)?;
        }
        self.reads = Some((source, row));
        Ok(())
    }

    /// Logits of a row of the source with this index.
    ///
    /// # Errors
    /// When the graph cannot be executed.
    pub fn run(&mut self, host: &mut Host, source: usize, row: usize) -> Result<View> {
        self.read(host, source, row)?;
        host.execute(self.graph)?;
        Ok(self.logits)
    }
}

pub(super) const LMHEAD: &str = "/plan/params/lmhead";

/// One of the rows of a view.
fn nth(view: View, row: usize, rows: usize) -> View {
    let len = view.len / rows;
    View { offset: view.offset + row * len * view.dtype.size(), len, ..view }
}

/// Output of the last shard of a pass.
#[derive(Debug, Clone, Copy)]
pub(super) enum Tail {
    /// Rows for the head's graph.
    Hidden(HiddenRows),
    /// Logits, one row for each token.
    Logits { view: View, rows: usize },
    /// Nothing that logits could be made of.
    None,
}

impl Tail {
    /// Binds what the last shard of a pass of `rows` tokens gives.
    ///
    /// # Errors
    /// When there is not one row of logits for each token, or a tensor is not f16 or f32.
    pub fn bind(host: &mut Host, last: GraphId, rows: usize) -> Result<Self> {
        let info = host.graph(last);
        if let Some(port) = info.output("logits").map(Port::Output) {
            let (found, _) = host.rows_of(last, port)?;
            if found != rows {
                let what = format!("expected {rows} rows of logits, one for each token");
                return Err(host.misfit(last, port, what));
            }
            return Ok(Self::Logits { view: host.view_for(last, port)?, rows });
        }
        let Some(port) = info.output("y").map(Port::Output) else { return Ok(Self::None) };
        Ok(Self::Hidden(HiddenRows { graph: last, port, view: host.view_for(last, port)?, rows }))
    }

    /// The residual after the last layer of a pass with experts.
    ///
    /// # Errors
    /// When a tensor is missing.
    pub fn after(host: &Host, residual: &Residual) -> Result<Self> {
        let (graph, port, view) = residual.last(host)?;
        Ok(Self::Hidden(HiddenRows { graph, port, view, rows: residual.rows }))
    }

    /// Logits of a row, when the shards themselves give them.
    pub fn logits(self, row: usize) -> Option<View> {
        match self {
            Self::Logits { view, rows } => Some(nth(view, row, rows)),
            _ => None,
        }
    }

    /// The rows for the head of `graph`.
    ///
    /// # Errors
    /// When the rows are not those that the head takes.
    pub fn hidden(self, host: &Host, rows: usize, graph: GraphId) -> Result<HiddenRows> {
        match self {
            Self::Hidden(hidden) => Ok(hidden),
            _ => Err(Error::graph(format!(
                "the graphs that take {rows} tokens have no output y, which graph {:?} (manifest \
                 {LMHEAD}) makes logits of",
                host.graph(graph).name
            ))),
        }
    }
}
