//! One way through the decoder: the shards that take `rows` tokens at once.

use qhx_op::fill::{ChunkMask, Embedding, Mask, Rope, RopeTables};
use qhx_op::{BufferId, DType, Error, GraphId, Host, Port, Result, View};

use crate::common::{check_chain, rows_of};

/// The causal mask of a graph.
#[derive(Debug)]
enum StepMask {
    /// For one token: the last slot, or the one at its position, is its own.
    One(Mask),
    /// For several.
    Chunk(ChunkMask),
}

/// One graph with the inputs that the host fills.
#[derive(Debug)]
struct Shard {
    graph: GraphId,
    mask: Option<StepMask>,
}

/// What comes out of the last shard.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Tail {
    /// Normalised rows for the head: buffer, bytes of one row.
    Hidden(BufferId, usize),
    /// Logits, one row of `len` for each token.
    Logits { buffer: BufferId, dtype: DType, len: usize },
    /// Nothing that logits could be made of.
    None,
}

/// Shards that take `rows` tokens in one step.
#[derive(Debug)]
pub(crate) struct Pass {
    /// Group of the state carrier.
    pub group: usize,
    /// Tokens of a step.
    pub rows: usize,
    /// What the last shard gives.
    pub tail: Tail,
    shards: Vec<Shard>,
    tables: RopeTables,
    x: BufferId,
    x_dtype: DType,
}

impl Pass {
    /// Binds the hidden rows, the tables and the masks of `graphs` over caches of `capacity` rows.
    /// The state carrier has bound the caches.
    pub fn open(
        host: &mut Host,
        group: usize,
        graphs: &[GraphId],
        embedding: &Embedding,
        rope: &Rope,
        capacity: usize,
    ) -> Result<Self> {
        let (Some(&first), Some(&last)) = (graphs.first(), graphs.last()) else {
            return Err(Error::manifest("manifest /plan/params: a step without graphs"));
        };
        let (rows, _) = rows_of(host, first)?;
        let port = Port::Input(host.graph(first).require_input("x")?);
        embedding.check_rows(host, first, port, rows)?;
        let x_dtype = host.require_float(first, port)?;
        let x = host.allocate_for(first, port)?;
        for pair in graphs.windows(2) {
            let (output, input) = check_chain(host, pair[0], pair[1])?;
            let buffer = host.allocate_for(pair[0], output)?;
            host.bind(pair[1], input, buffer, 0)?;
        }
        let tail = tail(host, last, rows)?;
        let shards = graphs
            .iter()
            .map(|&graph| {
                let mask = if rows == 1 {
                    Mask::bind(host, graph, capacity)?.map(StepMask::One)
                } else {
                    ChunkMask::bind(host, graph, capacity, rows)?.map(StepMask::Chunk)
                };
                Ok(Shard { graph, mask })
            })
            .collect::<Result<_>>()?;
        let tables = rope.bind_all(host, graphs, rows)?;
        Ok(Self { group, rows, tail, shards, tables, x, x_dtype })
    }

    /// Fills the inputs for `tokens`, at most [`Pass::rows`], the first of them at `position`.
    pub fn fill(
        &mut self,
        host: &mut Host,
        embedding: &Embedding,
        rope: &mut Rope,
        tokens: &[u32],
        position: usize,
    ) -> Result<()> {
        embedding.gather_rows(host, tokens, self.x, self.x_dtype)?;
        self.tables.fill(host, rope, position);
        for shard in &mut self.shards {
            match &mut shard.mask {
                Some(StepMask::One(mask)) => mask.fill(host, position),
                Some(StepMask::Chunk(mask)) => mask.fill(host, position),
                None => {}
            }
        }
        Ok(())
    }

    /// Executes the shards in order.
    pub fn execute(&self, host: &mut Host) -> Result<()> {
        self.shards.iter().try_for_each(|shard| host.execute(shard.graph))
    }

    /// Where the logits of row `row` lie when the graphs themselves give them.
    pub fn logits(&self, row: usize) -> Option<View> {
        match self.tail {
            Tail::Logits { buffer, dtype, len } => {
                Some(View { buffer, dtype, offset: row * len * dtype.size(), len })
            }
            _ => None,
        }
    }
}

fn tail(host: &mut Host, last: GraphId, rows: usize) -> Result<Tail> {
    let info = host.graph(last);
    if let Some(port) = info.output("logits").map(Port::Output) {
        let dtype = host.require_float(last, port)?;
        let tensor = host.tensor(last, port);
        let len = tensor.width();
        if tensor.elements() != rows * len {
            return Err(Error::graph(format!(
                "graph {:?}: tensor {tensor}: expected {rows} rows of logits, one for each token",
                host.graph(last).name
            )));
        }
        let buffer = host.allocate_for(last, port)?;
        return Ok(Tail::Logits { buffer, dtype, len });
    }
    let Some(port) = info.output("y").map(Port::Output) else { return Ok(Tail::None) };
    let bytes = host.tensor(last, port).byte_len();
    let buffer = host.allocate_for(last, port)?;
    Ok(Tail::Hidden(buffer, bytes / rows))
}
