//! The two experts of one token.

use qhx_op::{Error, GraphId, Host, Result};

use crate::ffn::{Ffn, PAIR};
use crate::layers::{Layers, Tensor, bind};
use crate::table::Table;

/// The graph of the two experts of a token, and how it is chained with the layers.
#[derive(Debug)]
pub(crate) struct Pair {
    pub ffn: Ffn,
    pub multipliers: [Tensor; 2],
    /// Where the experts' sum comes out when the graph does not add the residual itself.
    sum: Option<Tensor>,
    /// Two rows for adding it.
    rows: [Vec<f32>; 2],
}

impl Pair {
    /// Finds, checks and binds everything but the experts' weights, which go in token by token.
    pub fn open(
        host: &mut Host,
        graph: GraphId,
        layers: &Layers,
        table: &Table,
        step: f32,
    ) -> Result<Self> {
        let ffn = Ffn::open(host, graph, &PAIR, table, step)?;
        let x = host.input(graph, "x")?;
        bind(host, graph, x, layers.z)?;
        let output = host.output(graph, "y")?;
        let sum = if host.graph(graph).input("residual").is_some() {
            let residual = host.input(graph, "residual")?;
            bind(host, graph, residual, layers.y)?;
            bind(host, graph, output, layers.x)?;
            None
        } else {
            let dtype = host.require_float(graph, output)?;
            let info = host.tensor(graph, output);
            if info.elements() != layers.hidden {
                return Err(Error::graph(format!(
                    "graph {:?}: tensor {info}: expected {} values, a hidden state",
                    host.graph(graph).name,
                    layers.hidden
                )));
            }
            Some(Tensor { buffer: host.allocate_for(graph, output)?, dtype })
        };
        let mut multiplier = |role: &str| {
            let port = host.input(graph, role)?;
            let dtype = host.require_float(graph, port)?;
            if host.tensor(graph, port).elements() != 1 {
                return Err(Error::graph(format!(
                    "graph {:?}: tensor {}: expected one value",
                    host.graph(graph).name,
                    host.tensor(graph, port)
                )));
            }
            Ok(Tensor { buffer: host.allocate_for(graph, port)?, dtype })
        };
        let multipliers = [multiplier("m1")?, multiplier("m2")?];
        let row = || if sum.is_some() { vec![0.0; layers.hidden] } else { Vec::new() };
        Ok(Self { ffn, multipliers, sum, rows: [row(), row()] })
    }

    /// The next residual where the graph gives only what the experts add.
    pub fn add_residual(&mut self, host: &mut Host, layers: &Layers) {
        let Some(sum) = self.sum else { return };
        let [rest, added] = &mut self.rows;
        layers.y.read(host, 0, rest);
        sum.read(host, 0, added);
        for (rest, added) in rest.iter_mut().zip(added) {
            *rest += *added;
        }
        layers.x.write(host, rest);
    }
}
