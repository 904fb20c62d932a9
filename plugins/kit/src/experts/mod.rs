//! Layers whose feed-forward part is a few of many experts (Shazeer et al. 2017, arXiv 1701.06538), of which the graphs
//! hold no weights.
//!
//! Per layer: a graph of attention and router, the choice of experts on the host by a [`Rule`], a graph that runs them
//! with their weights as inputs. The weights of all experts stay in a mapped file; only those of chosen experts are
//! touched. One token goes through a graph of all of its experts; of several tokens each expert takes those that chose
//! it.
//!
//! A [`crate::decoder::Decoder`] does all that by itself where its graphs have an output `router`. An op with steps of
//! its own calls [`Experts::add`] between its graphs.

mod ffn;
mod grouped;
mod residual;
mod route;
mod spans;
mod table;
mod token;

use serde::Deserialize;

pub(crate) use residual::ROUTER;
pub use residual::{Residual, Tensor};
pub use route::{Choice, Rule, sparsemixer};

use crate::GraphCosts;
use grouped::Grouped;
use qhx_op::{Error, ErrorCode, GraphId, Host, LogLevel, Result};
use spans::Spans;
use table::{Sizes, Table};
use token::Token;

/// Declaration of experts in `plan.params`. The defaults are the names of the published bundles.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct ExpertParams {
    /// Graph of the experts of one token.
    pub ffn: String,
    /// Graph of one expert for several tokens.
    pub ffn_prefill: String,
    /// Value of one step of int8 weight inputs inside the graphs.
    pub int8_step: f32,
    /// Ask the system for experts as a whole before their first use.
    pub read_ahead: bool,
    /// Log every routing decision.
    pub trace_routing: bool,
}

impl Default for ExpertParams {
    fn default() -> Self {
        Self {
            ffn: "ffn2".to_owned(),
            ffn_prefill: "ffn_pf".to_owned(),
            int8_step: 1.0,
            read_ahead: true,
            trace_routing: false,
        }
    }
}

/// Roles of the tensors of experts' graphs, and of those that graphs have for them.
pub const ROLES: [&str; 22] = [
    "z",
    ROUTER,
    "residual",
    "m*",
    "gate",
    "gate_scale",
    "up",
    "up_scale",
    "down",
    "down_scale",
    "*_gate",
    "*_gate_scale",
    "*_up",
    "*_up_scale",
    "*_down",
    "*_down_scale",
    "gate_bias",
    "up_bias",
    "down_bias",
    "*_gate_bias",
    "*_up_bias",
    "*_down_bias",
];

/// The experts of all layers, over bound graphs.
#[derive(Debug)]
pub struct Experts {
    table: Table,
    rule: Rule,
    trace: bool,
    scores: Vec<f32>,
    token: Token,
    grouped: Option<Grouped>,
    spans: Spans,
}

impl Experts {
    /// Maps the tables `artifacts.experts` of the manifest and binds the experts' graphs.
    ///
    /// `step` is what they stand between for one token; `widest` the same for the most tokens at once, where there
    /// are graphs for several.
    ///
    /// # Errors
    /// When a graph, a tensor or a table is missing, or they do not fit each other.
    pub fn open(
        host: &mut Host,
        params: &ExpertParams,
        rule: Rule,
        step: &Residual,
        widest: Option<&Residual>,
    ) -> Result<Self> {
        let ffn = host.require_graph("/plan/params/ffn", &params.ffn)?;
        let prefixes = ffn::prefixes(host, ffn);
        let Some(first) = prefixes.first() else {
            // Names the tensor that is missing.
            host.input(ffn, "a_up")?;
            return Err(Error::graph(format!("graph {:?}: no experts", host.graph(ffn).name)));
        };
        let sizes = Sizes {
            layers: step.layers,
            experts: step.experts,
            hidden: step.hidden,
            width: ffn::width(host, ffn, first)?,
            gated: ffn::gated(host, ffn, first),
        };
        if prefixes.len() > sizes.experts {
            return Err(Error::graph(format!(
                "graph {:?}: weights of {} experts, expected at most {}, as many as the router scores",
                host.graph(ffn).name,
                prefixes.len(),
                sizes.experts
            )));
        }
        if let Some(declared) = host.value::<usize>("/params/n_experts")?
            && declared != sizes.experts
        {
            return Err(Error::graph(format!(
                "the number of experts that the router scores is {}, but the manifest's params.n_experts is {declared}",
                sizes.experts
            )));
        }
        let table = Table::open(host, sizes, params.read_ahead)?;
        let token = Token::open(host, ffn, &prefixes, step, &table, params.int8_step)?;
        let grouped = match widest {
            None => None,
            Some(widest) => {
                let ffn = host.require_graph("/plan/params/ffn_prefill", &params.ffn_prefill)?;
                let same = |r: &Residual| (r.hidden, r.experts, r.layers, r.x.dtype);
                if same(widest) != same(step) {
                    return Err(Error::graph(format!(
                        "graph {:?}: hidden {}, {} experts, {}; expected {}, {} and {}, as the \
                         graphs for one token, and as many graphs",
                        host.graph(widest.graphs[0]).name,
                        widest.hidden,
                        widest.experts,
                        widest.x.dtype,
                        step.hidden,
                        step.experts,
                        step.x.dtype
                    )));
                }
                let step = params.int8_step;
                Some(Grouped::open(host, widest, prefixes.len(), ffn, &table, step)?)
            }
        };
        Ok(Self {
            rule,
            trace: params.trace_routing,
            scores: vec![0.0; sizes.experts],
            token,
            grouped,
            table,
            spans: Spans::new(host),
        })
    }

    /// The graphs that run experts.
    pub(crate) fn graphs(&self) -> impl Iterator<Item = GraphId> {
        self.grouped.iter().map(Grouped::graph).chain([self.token.graph()])
    }

    /// Cost of a layer's experts for a step of `rows` tokens that choose evenly. If the bundle declares nothing, the
    /// experts of one token cost as much as a graph for one token.
    pub(crate) fn cost(&self, host: &Host, costs: GraphCosts, rows: usize) -> f64 {
        match &self.grouped {
            Some(grouped) if rows > 1 => {
                let (all, a_token) = (self.table.sizes.experts as f64, grouped.a_token as f64);
                let chosen = all * (1.0 - (1.0 - a_token / all).powf(rows as f64));
                let one = costs.sum(host, &[grouped.graph()], grouped.ffn_rows);
                chosen * if costs.are_declared() { one } else { one / a_token }
            }
            _ => costs.sum(host, &[self.token.graph()], 1),
        }
    }

    /// Adds the output of a layer's experts to the first `count` rows of a step whose graph has just run: the residual
    /// goes to the input `x` of the next graph. `position` is that of the first row in the text.
    ///
    /// # Errors
    /// When a score is not a finite number, or a graph fails.
    pub fn add(
        &mut self,
        host: &mut Host,
        residual: &Residual,
        layer: usize,
        count: usize,
        position: usize,
    ) -> Result<()> {
        let Self { table, rule, trace, scores, token, grouped, spans } = self;
        let mut router = Router { table, rule: *rule, trace: *trace, scores };
        match grouped {
            Some(grouped) if residual.rows > 1 => {
                spans.time(host, spans.route, |host| {
                    for row in 0..count {
                        let choices = grouped.choices(row);
                        router.choose(host, residual, layer, row, position + row, choices)?;
                    }
                    grouped.ask(host, count, table, layer);
                    Ok(())
                })?;
                grouped.run(host, residual, count, table, layer, spans)
            }
            _ => {
                spans.time(host, spans.route, |host| {
                    router.choose(host, residual, layer, 0, position, &mut token.choices)
                })?;
                spans.time(host, spans.experts, |host| token.load(host, table, layer))?;
                token.run(host, residual)
            }
        }
    }
}

/// Chooses experts by the scores that a layer's graph gives.
#[derive(Debug)]
struct Router<'a> {
    table: &'a Table,
    rule: Rule,
    trace: bool,
    scores: &'a mut Vec<f32>,
}

impl Router<'_> {
    /// The choices for the token in `row`, which is at `position` of the text.
    fn choose(
        &mut self,
        host: &Host,
        residual: &Residual,
        layer: usize,
        row: usize,
        position: usize,
        choices: &mut [Choice],
    ) -> Result<()> {
        residual.router.read(host, row * residual.experts, self.scores);
        if !self.rule.choose(self.scores, self.table.bias(host, layer), choices) {
            let graph = &host.graph(residual.graphs[layer]).name;
            let message = match self.scores.iter().all(|score| score.is_finite()) {
                true => format!(
                    "graph {graph:?}: {:?} does not choose {} of {} experts, as many as the graph \
                     manifest /plan/params/ffn names has weights of",
                    self.rule,
                    choices.len(),
                    residual.experts
                ),
                false => format!(
                    "graph {graph:?}: the router's scores at position {position} are NaN or infinite; the \
                     hidden state has overflowed, or the weights or the embedding table are damaged"
                ),
            };
            return Err(Error::new(ErrorCode::EXECUTE, message));
        }
        if self.trace {
            let parts: Vec<_> = choices
                .iter()
                .map(|choice| format!("expert {} x {}", choice.expert, choice.multiplier))
                .collect();
            let line = format!("routing: position {position} layer {layer}: {}", parts.join(", "));
            host.log(LogLevel::Debug, &line);
        }
        Ok(())
    }
}
