//! The experts of one token.

use super::ffn::Ffn;
use super::residual::{Residual, Tensor, bind};
use super::route::Choice;
use super::table::Table;
use qhx_op::{GraphId, Host, Result};

/// The graph of the experts of a token, and how it is chained with the graphs around it.
///
/// | tensor | shape | |
/// |---|---|---|
/// | `x` → `y` | `[1, hidden]` | `y` is the sum of the experts, and of `residual` where the graph takes it |
/// | `m1`, `m2`, … | one value | multipliers of the experts `a_`, `b_`, … |
#[derive(Debug)]
pub(super) struct Token {
    ffn: Ffn,
    multipliers: Vec<Tensor>,
    pub choices: Vec<Choice>,
    /// Output of the experts' sum if the graph does not add the residual itself.
    sum: Option<Tensor>,
    /// Two rows for adding it.
    rows: [Vec<f32>; 2],
}

impl Token {
    /// Finds, checks and binds everything but the experts' weights, which go in token by token. `prefixes` are
    /// those of the graph's experts.
    pub fn open(
        host: &mut Host,
        graph: GraphId,
        prefixes: &[String],
        residual: &Residual,
        table: &Table,
        step: f32,
    ) -> Result<Self> {
        let ffn = Ffn::open(host, graph, prefixes, table, step)?;
        let x = host.input(graph, "x")?;
        bind(host, graph, x, residual.z)?;
        let output = host.output(graph, "y")?;
        let sum = if host.graph(graph).input("residual").is_some() {
            let port = host.input(graph, "residual")?;
            bind(host, graph, port, residual.y)?;
            bind(host, graph, output, residual.x)?;
            None
        } else {
            let dtype = host.require_float(graph, output)?;
            let info = host.tensor(graph, output);
            if info.elements() != residual.hidden {
                let what = format!("expected {} values, a hidden state", residual.hidden);
                return Err(host.misfit(graph, output, what));
            }
            Some(Tensor { buffer: host.allocate_for(graph, output)?, dtype })
        };
        let mut multiplier = |number: usize| {
            let port = host.input(graph, &format!("m{number}"))?;
            let dtype = host.require_float(graph, port)?;
            if host.tensor(graph, port).elements() != 1 {
                return Err(host.misfit(graph, port, "expected one value"));
            }
            Ok(Tensor { buffer: host.allocate_for(graph, port)?, dtype })
        };
        let multipliers = (1..=prefixes.len()).map(&mut multiplier).collect::<Result<_>>()?;
        let row = || if sum.is_some() { vec![0.0; residual.hidden] } else { Vec::new() };
        let choices = vec![Choice::default(); prefixes.len()];
        Ok(Self { ffn, multipliers, choices, sum, rows: [row(), row()] })
    }

    /// The graph.
    pub fn graph(&self) -> GraphId {
        self.ffn.graph
    }

    /// Puts the weights of the chosen experts of a layer into the graph.
    pub fn load(&self, host: &mut Host, table: &Table, layer: usize) -> Result<()> {
        table.ask(host, layer, self.choices.iter().map(|choice| choice.expert));
        for (tensor, choice) in self.multipliers.iter().zip(&self.choices) {
            tensor.write(host, &[choice.multiplier]);
        }
        self.ffn.load(host, table, layer, self.choices.iter().map(|choice| choice.expert))
    }

    /// Computes the experts; the residual goes to where the next graph takes it.
    pub fn run(&mut self, host: &mut Host, residual: &Residual) -> Result<()> {
        host.execute(self.ffn.graph)?;
        self.add_residual(host, residual);
        Ok(())
    }

    /// The next residual where the graph gives only what the experts add.
    fn add_residual(&mut self, host: &mut Host, residual: &Residual) {
        let Some(sum) = self.sum else { return };
        let [rest, added] = &mut self.rows;
        residual.y.read(host, 0, rest);
        sum.read(host, 0, added);
        for (rest, added) in rest.iter_mut().zip(added) {
            *rest += *added;
        }
        residual.x.write(host, rest);
    }
}
