//! The graphs of attention and router, one a layer, and the buffers that all layers share.

use qhx_op::decoder::HiddenRows;
use qhx_op::fill::{Rope, RopeTables};
use qhx_op::kernels::{f16_to_f32, f32_to_f16};
use qhx_op::{BufferId, DType, Error, ErrorCode, GraphId, Host, LogLevel, Port, Result, View};

use crate::route::{Choice, sparsemixer};

/// A buffer of floats.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensor {
    pub buffer: BufferId,
    pub dtype: DType,
}

impl Tensor {
    /// Copies `out.len()` values from element `first` on.
    pub fn read(self, host: &Host, first: usize, out: &mut [f32]) {
        let range = first..first + out.len();
        match self.dtype {
            DType::F16 => f16_to_f32(&host.f16s(self.buffer)[range], out),
            _ => out.copy_from_slice(&host.f32s(self.buffer)[range]),
        }
    }

    /// Writes values from the first element on.
    pub fn write(self, host: &mut Host, values: &[f32]) {
        match self.dtype {
            DType::F16 => f32_to_f16(values, &mut host.f16s_mut(self.buffer)[..values.len()]),
            _ => host.f32s_mut(self.buffer)[..values.len()].copy_from_slice(values),
        }
    }
}

/// Binds a buffer that is there already to a port, which must be of its size and type.
pub(crate) fn bind(host: &mut Host, graph: GraphId, port: Port, tensor: Tensor) -> Result<()> {
    let info = host.tensor(graph, port);
    if info.dtype != tensor.dtype || info.byte_len() != host.len(tensor.buffer) {
        return Err(Error::graph(format!(
            "graph {:?}: tensor {info}: expected {} with {} values, as the graphs it is chained with",
            host.graph(graph).name,
            tensor.dtype,
            host.len(tensor.buffer) / tensor.dtype.size()
        )));
    }
    host.bind(graph, port, tensor.buffer, 0)
}

/// Finds a port of a graph by its role: [`Host::input`] or [`Host::output`].
type Find = fn(&Host, GraphId, &str) -> Result<Port>;

/// Binds one new buffer to the port of that role in all graphs.
fn share(host: &mut Host, graphs: &[GraphId], find: Find, role: &str) -> Result<Tensor> {
    let first = find(host, graphs[0], role)?;
    let View { buffer, dtype, .. } = host.view_for(graphs[0], first)?;
    let tensor = Tensor { buffer, dtype };
    for &graph in &graphs[1..] {
        let port = find(host, graph, role)?;
        bind(host, graph, port, tensor)?;
    }
    Ok(tensor)
}

/// The layers of a step of `rows` tokens. Only one layer runs at a time, so that all of them read and
/// write the same buffers.
#[derive(Debug)]
pub(crate) struct Layers {
    pub graphs: Vec<GraphId>,
    /// Tokens of a step.
    pub rows: usize,
    pub hidden: usize,
    /// Scores of a token.
    pub experts: usize,
    /// Residual in, `[rows, hidden]`.
    pub x: Tensor,
    /// Residual after attention, `[rows, hidden]`.
    pub y: Tensor,
    /// What the experts take, `[rows, hidden]`.
    pub z: Tensor,
    /// Scores, `[rows, experts]`.
    router: Tensor,
    tables: RopeTables,
}

impl Layers {
    /// Binds everything but caches and masks.
    pub fn open(host: &mut Host, graphs: Vec<GraphId>, rope: &Rope) -> Result<Self> {
        let Some(&first) = graphs.first() else {
            return Err(Error::manifest("manifest /plan/params: a step without graphs"));
        };
        let (rows, hidden) = host.rows_of(first, host.input(first, "x")?)?;
        let router = host.output(first, "router")?;
        let info = host.tensor(first, router);
        let experts = info.elements() / rows;
        if experts < 2 || info.elements() != rows * experts {
            return Err(Error::graph(format!(
                "graph {:?}: tensor {info}: expected {rows} rows of scores of at least 2 experts",
                host.graph(first).name
            )));
        }
        let tables = rope.bind_all(host, &graphs, rows)?;
        let layers = Self {
            rows,
            hidden,
            experts,
            x: share(host, &graphs, Host::input, "x")?,
            y: share(host, &graphs, Host::output, "y")?,
            z: share(host, &graphs, Host::output, "z")?,
            router: share(host, &graphs, Host::output, "router")?,
            tables,
            graphs,
        };
        for tensor in [layers.y, layers.z] {
            if host.len(tensor.buffer) != rows * hidden * tensor.dtype.size() {
                return Err(Error::graph(format!(
                    "graph {:?}: y and z must have as many values as x, {}",
                    host.graph(first).name,
                    rows * hidden
                )));
            }
        }
        Ok(layers)
    }

    /// Rows of the residual, for the head.
    pub fn residual(&self, host: &Host) -> Result<HiddenRows> {
        let (graph, Tensor { buffer, dtype }) = (self.graphs[0], self.x);
        let view = View { buffer, dtype, offset: 0, len: self.rows * self.hidden };
        Ok(HiddenRows { graph, port: host.input(graph, "x")?, view, rows: self.rows })
    }

    /// Fills the rotary tables for tokens from `position` on.
    pub fn fill_rope(&mut self, host: &mut Host, rope: &mut Rope, position: usize) {
        self.tables.fill(host, rope, position);
    }
}

/// Chooses experts by the scores that a layer's graph gives.
#[derive(Debug)]
pub(crate) struct Router {
    jitter: f32,
    trace: bool,
    scores: Vec<f32>,
}

impl Router {
    /// A router over `experts` scores.
    pub fn new(experts: usize, jitter: f32, trace: bool) -> Self {
        Self { jitter, trace, scores: vec![0.0; experts] }
    }

    /// The choice for the token in `row`, which is at `position` of the text.
    pub fn choose(
        &mut self,
        host: &Host,
        layers: &Layers,
        layer: usize,
        row: usize,
        position: usize,
    ) -> Result<[Choice; 2]> {
        layers.router.read(host, row * layers.experts, &mut self.scores);
        let choices = sparsemixer(&self.scores, self.jitter).ok_or_else(|| {
            let message = format!(
                "graph {:?}: the router's scores at position {position} are NaN or infinite; the \
                 hidden state has overflowed, or the weights or the embedding table are damaged",
                host.graph(layers.graphs[layer]).name
            );
            Error::new(ErrorCode::EXECUTE, message)
        })?;
        if self.trace {
            let [a, b] = choices;
            host.log(
                LogLevel::Debug,
                &format!(
                    "routing: position {position} layer {layer}: expert {} x {}, expert {} x {}",
                    a.expert, a.multiplier, b.expert, b.multiplier
                ),
            );
        }
        Ok(choices)
    }
}
