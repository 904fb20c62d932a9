//! The graphs between which experts are computed, and the buffers that all of them share.

use crate::kernels::{f16_to_f32, f32_to_f16};
use qhx_op::{BufferId, DType, Error, GraphId, Host, Port, Result, View};

/// The output of a graph after which experts are computed.
pub(crate) const ROUTER: &str = "router";

/// A buffer of floats.
#[derive(Debug, Clone, Copy)]
pub struct Tensor {
    /// Buffer that holds them, from its first byte on.
    pub buffer: BufferId,
    /// f16 or f32.
    pub dtype: DType,
}

impl Tensor {
    /// Copies `out.len()` values from element `first` on.
    pub(super) fn read(self, host: &Host, first: usize, out: &mut [f32]) {
        let range = first..first + out.len();
        match self.dtype {
            DType::F16 => f16_to_f32(&host.f16s(self.buffer)[range], out),
            _ => out.copy_from_slice(&host.f32s(self.buffer)[range]),
        }
    }

    /// Writes values from the first element on.
    pub(super) fn write(self, host: &mut Host, values: &[f32]) {
        match self.dtype {
            DType::F16 => f32_to_f16(values, &mut host.f16s_mut(self.buffer)[..values.len()]),
            _ => host.f32s_mut(self.buffer)[..values.len()].copy_from_slice(values),
        }
    }
}

/// Binds a buffer that is there already to a port, which must be of its size and type.
pub(super) fn bind(host: &mut Host, graph: GraphId, port: Port, tensor: Tensor) -> Result<()> {
    let info = host.tensor(graph, port);
    if info.dtype != tensor.dtype || info.byte_len() != host.len(tensor.buffer) {
        let what = format!(
            "expected {} with {} values, as the graphs it is chained with",
            tensor.dtype,
            host.len(tensor.buffer) / tensor.dtype.size()
        );
        return Err(host.misfit(graph, port, what));
    }
    host.bind(graph, port, tensor.buffer, 0)
}

/// Finds a port of a graph by its role: [`Host::input`] or [`Host::output`].
type Find = fn(&Host, GraphId, &str) -> Result<Port>;

/// Binds one buffer, a new one where none is given, to the port of that role in all graphs.
fn share(
    host: &mut Host,
    graphs: &[GraphId],
    find: Find,
    role: &str,
    there: Option<Tensor>,
) -> Result<Tensor> {
    let first = find(host, graphs[0], role)?;
    let tensor = match there {
        Some(tensor) => tensor,
        None => {
            let View { buffer, dtype, .. } = host.view_for(graphs[0], first)?;
            Tensor { buffer, dtype }
        }
    };
    for &graph in &graphs[1..] {
        let port = find(host, graph, role)?;
        bind(host, graph, port, tensor)?;
    }
    Ok(tensor)
}

/// The graphs of a step of `rows` tokens, each of which ends where a layer's experts begin; only the last may end with
/// a layer that has none. One graph runs at a time, so that all of them read and write the same buffers.
///
/// | tensor | shape | |
/// |---|---|---|
/// | `x` → `y` | `[rows, hidden]` | residual in; residual that the experts add to |
/// | → `z` | `[rows, hidden]` | what the experts take |
/// | → `router` | `[rows, experts]` | scores |
#[derive(Debug)]
pub struct Residual {
    /// The graphs, in order.
    pub graphs: Vec<GraphId>,
    /// Number of graphs that experts follow: all, or all but the last.
    pub layers: usize,
    /// Tokens of a step.
    pub rows: usize,
    /// Values of a row.
    pub hidden: usize,
    /// Scores of a token.
    pub experts: usize,
    /// Residual in, `[rows, hidden]`.
    pub x: Tensor,
    /// Residual that the experts add to, `[rows, hidden]`.
    pub y: Tensor,
    /// Input of the experts, `[rows, hidden]`.
    pub z: Tensor,
    /// Scores, `[rows, experts]`.
    pub(super) router: Tensor,
}

impl Residual {
    /// True when experts follow on one of the graphs.
    pub fn is_among(host: &Host, graphs: &[GraphId]) -> bool {
        graphs.iter().any(|&graph| host.graph(graph).output(ROUTER).is_some())
    }

    /// Binds the tensors of the table above. `x` is the buffer that the first graph's `x` is bound to already, if it
    /// is.
    ///
    /// # Errors
    /// When a tensor is missing or has another size or type than in the first graph.
    pub fn open(host: &mut Host, graphs: Vec<GraphId>, x: Option<Tensor>) -> Result<Self> {
        let Some(&first) = graphs.first() else {
            return Err(Error::manifest("manifest /plan/params: a step without graphs"));
        };
        let (rows, hidden) = host.rows_of(first, host.input(first, "x")?)?;
        let router = host.output(first, ROUTER)?;
        let info = host.tensor(first, router);
        let experts = info.elements() / rows;
        if experts < 2 || info.elements() != rows * experts {
            let what = format!("expected {rows} rows of scores of at least 2 experts");
            return Err(host.misfit(first, router, what));
        }
        let ends = graphs.len() > 1 && !Self::is_among(host, &graphs[graphs.len() - 1..]);
        let layers = graphs.len() - usize::from(ends);
        let routed = &graphs[..layers];
        let residual = Self {
            rows,
            hidden,
            experts,
            layers,
            x: share(host, &graphs, Host::input, "x", x)?,
            y: share(host, &graphs, Host::output, "y", None)?,
            z: share(host, routed, Host::output, "z", None)?,
            router: share(host, routed, Host::output, ROUTER, None)?,
            graphs,
        };
        for tensor in [residual.y, residual.z] {
            if host.len(tensor.buffer) != rows * hidden * tensor.dtype.size() {
                return Err(Error::graph(format!(
                    "graph {:?}: y and z must have as many values as x, {}",
                    host.graph(first).name,
                    rows * hidden
                )));
            }
        }
        Ok(residual)
    }

    /// The same graphs for a smaller context, over the buffers of `whole`, which the experts' graphs read and write;
    /// the `x` of the first graph is bound to its own already.
    ///
    /// # Errors
    /// When there are not as many graphs, or a tensor is missing or has another size or type.
    pub fn beside(host: &mut Host, graphs: Vec<GraphId>, whole: &Self) -> Result<Self> {
        if graphs.len() != whole.graphs.len() {
            return Err(Error::graph(format!(
                "{} graphs from {:?} on, expected {}, as many as from {:?} on, which take as many tokens",
                graphs.len(),
                host.graph(graphs[0]).name,
                whole.graphs.len(),
                host.graph(whole.graphs[0]).name
            )));
        }
        for (layer, &graph) in graphs.iter().enumerate() {
            if layer > 0 {
                let x = host.input(graph, "x")?;
                bind(host, graph, x, whole.x)?;
            }
            let routed = layer < whole.layers;
            let outputs = [("y", whole.y), ("z", whole.z), (ROUTER, whole.router)];
            for (role, tensor) in outputs.into_iter().take(if routed { 3 } else { 1 }) {
                let port = host.output(graph, role)?;
                bind(host, graph, port, tensor)?;
            }
        }
        Ok(Self { graphs, ..*whole })
    }

    /// Residual after the last layer, `[rows, hidden]`: a graph and its tensor there, and the values.
    ///
    /// # Errors
    /// When a tensor is missing.
    pub fn last(&self, host: &Host) -> Result<(GraphId, Port, View)> {
        let ends = self.layers < self.graphs.len();
        let graph = self.graphs[self.graphs.len() - 1];
        let (Tensor { buffer, dtype }, port) = match ends {
            true => (self.y, host.output(graph, "y")?),
            false => (self.x, host.input(graph, "x")?),
        };
        let len = self.rows * self.hidden;
        Ok((graph, port, View { buffer, dtype, offset: 0, len }))
    }
}
