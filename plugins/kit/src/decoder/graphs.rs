//! The graphs of a decoder, and whether they are complete.

use serde::Deserialize;

use super::draft_graphs::{DRAFT_HEAD, DraftGraphs, reads_alone};
use super::head::LMHEAD;
use crate::OneOrMany;
use crate::fill::Embedding;
use crate::state::StateCarrier;
use qhx_op::{Error, GraphId, Host, Result};

const DECODE: &str = "/plan/params/decode";
const PREFILL: &str = "/plan/params/prefill";
const WITHIN: &str = "/plan/params/within";

/// Declaration of a decoder in `plan.params` ([`crate::schema::decoder`]).
#[derive(Debug, Deserialize)]
struct Params {
    decode: OneOrMany,
    prefill: Option<OneOrMany>,
    #[serde(default)]
    within: Vec<OneOrMany>,
    lmhead: Option<String>,
    draft_head: Option<OneOrMany>,
}

/// State that a layer carries from token to token: the roles of its tensors without their prefix and without the
/// layer's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerState<'a> {
    /// Caches `past_X_i` → `new_X_i`, such as `["k", "v"]`.
    Caches(&'a [&'a str]),
    /// Replaced states `past_X_i` → `present_X_i`, such as `["conv"]`.
    States(&'a [&'a str]),
}

impl<'a> LayerState<'a> {
    fn roles(self) -> &'a [&'a str] {
        match self {
            Self::Caches(roles) | Self::States(roles) => roles,
        }
    }

    fn has(self, state: &StateCarrier, role: &str, layer: usize) -> bool {
        let role = format!("{role}_{layer}");
        match self {
            Self::Caches(_) => state.has_cache(&role),
            Self::States(_) => state.has_state(&role),
        }
    }

    /// `past_k_3/past_v_3`.
    fn names(self, layer: usize) -> String {
        let names: Vec<_> =
            self.roles().iter().map(|role| format!("past_{role}_{layer}")).collect();
        names.join("/")
    }
}

/// The graphs of a decoder, as `plan.params` names them: `decode` takes one token, those of `prefill`
/// take several, those of `within` do the same in smaller contexts, `lmhead` makes logits of a hidden state, and those
/// of `draft_head` take hidden states and tokens, and give hidden states of draft tokens.
#[derive(Debug)]
pub struct DecoderGraphs {
    /// Graphs of a step with their number of rows: those for one token, then those for prompts, the narrowest first,
    /// and then those for as many tokens in smaller contexts.
    pub(super) passes: Vec<(usize, Vec<GraphId>)>,
    /// Number of passes that are not of a smaller context.
    pub(super) whole: usize,
    pub(super) head: Option<GraphId>,
    /// Graphs of the drafting head.
    pub(super) draft_head: DraftGraphs,
    hidden: usize,
}

impl DecoderGraphs {
    /// Finds the graphs. Graphs of `prefill` with as many rows of `x` are the shards of one pass.
    ///
    /// # Errors
    /// When a graph is missing, or graphs do not fit each other.
    pub fn find(host: &Host) -> Result<Self> {
        let params: Params = host.params()?;
        let decode = params.decode.graphs(host, DECODE)?;
        let prefill = params.prefill.map(|graphs| graphs.graphs(host, PREFILL)).transpose()?;
        let head = params.lmhead.map(|name| host.require_graph(LMHEAD, &name)).transpose()?;
        let mut found = Self::of(host, decode, prefill.unwrap_or_default(), head)?;
        if let Some(graphs) = params.draft_head {
            let head = &mut found.draft_head;
            for graph in graphs.graphs(host, DRAFT_HEAD)? {
                let (rows, _) = host.rows_of(graph, host.input(graph, "x")?)?;
                head.graphs.push((rows, graph));
            }
            head.graphs.sort_by_key(|(rows, _)| *rows);
            head.reads = head.graphs.iter().all(|(_, graph)| reads_alone(host, *graph));
        }
        params.within.iter().enumerate().try_fold(found, |found, (index, graphs)| {
            let pointer = format!("{WITHIN}/{index}");
            let graphs = graphs.graphs(host, &pointer)?;
            found.within(host, &pointer, graphs)
        })
    }

    /// Adds the graphs of a smaller context, which `pointer` of the manifest names: for one token, and for as many as
    /// graphs of the whole context take, all of them or some. Those with as many rows of `x` are shards, in order.
    ///
    /// # Errors
    /// When a graph takes a number of tokens that none of the whole context takes.
    pub fn within(mut self, host: &Host, pointer: &str, graphs: Vec<GraphId>) -> Result<Self> {
        let first = self.passes.len();
        for graph in graphs {
            let (rows, _) = host.rows_of(graph, host.input(graph, "x")?)?;
            let whole = self.passes[..self.whole].iter().map(|(rows, _)| *rows);
            if !whole.clone().any(|have| have == rows) {
                let expected = whole.map(|rows| rows.to_string()).collect::<Vec<_>>().join(" or ");
                return Err(Error::graph(format!(
                    "graph {:?}: x has {rows} rows, expected {expected} for manifest {pointer}, as in the whole context",
                    host.graph(graph).name
                )));
            }
            match self.passes[first..].iter_mut().find(|(have, _)| *have == rows) {
                Some((_, shards)) => shards.push(graph),
                None => self.passes.push((rows, vec![graph])),
            }
        }
        Ok(self)
    }

    /// The same of graphs that an op has found by itself: those for one token in order, those for several in the order
    /// of their layers, and the head's.
    ///
    /// # Errors
    /// When there is no graph for one token, or graphs do not fit each other.
    pub fn of(
        host: &Host,
        decode: Vec<GraphId>,
        prefill: Vec<GraphId>,
        head: Option<GraphId>,
    ) -> Result<Self> {
        let Some(&first) = decode.first() else {
            return Err(Error::manifest(format!("manifest {DECODE}: no graph is named")));
        };
        let (rows, hidden) = host.rows_of(first, host.input(first, "x")?)?;
        if rows != 1 {
            return Err(Error::graph(format!(
                "graph {:?}: x has {rows} rows, expected 1 for manifest {DECODE}; name graphs that \
                 take several tokens in {PREFILL}",
                host.graph(first).name
            )));
        }
        let mut passes = vec![(1, decode)];
        for graph in prefill {
            let (rows, _) = host.rows_of(graph, host.input(graph, "x")?)?;
            match passes.iter_mut().skip(1).find(|(have, _)| *have == rows) {
                Some((_, shards)) => shards.push(graph),
                // A one-row graph among them would do what decode does.
                None if rows > 1 => passes.push((rows, vec![graph])),
                None => {}
            }
        }
        passes.sort_by_key(|(rows, _)| *rows);
        let whole = passes.len();
        Ok(Self { passes, whole, head, draft_head: DraftGraphs::default(), hidden })
    }

    /// Groups for [`StateCarrier::new`]: the number of a group is that of its pass. Behind them are those of a drafting
    /// head that reads the decoder's caches, one for each graph.
    pub fn groups(&self) -> Vec<&[GraphId]> {
        let DraftGraphs { graphs, reads } = &self.draft_head;
        let readers =
            graphs.iter().filter(|_| *reads).map(|(_, graph)| std::slice::from_ref(graph));
        self.passes.iter().map(|(_, graphs)| graphs.as_slice()).chain(readers).collect()
    }

    /// Values of a hidden state.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Opens the embedding table `artifacts.embed` for rows of [`DecoderGraphs::hidden`] values, and
    /// checks the manifest's own numbers, `params.hidden` and `params.vocab`.
    ///
    /// # Errors
    /// When the table does not fit these numbers.
    pub fn embedding(&self, host: &mut Host) -> Result<Embedding> {
        Embedding::open_for(host, self.passes[0].1[0])
    }

    /// Checks that each layer carries the state of one of `kinds`, and all of it. The manifest declares
    /// in `params.n_layers` how many layers there are; where it does not, nothing is checked.
    ///
    /// # Errors
    /// When a layer lacks a state, or has another one.
    pub fn check_layers(
        &self,
        host: &Host,
        state: &StateCarrier,
        kinds: &[LayerState<'_>],
    ) -> Result<()> {
        self.check_layers_but(host, state, kinds, &[])
    }

    /// Same as [`DecoderGraphs::check_layers`], but for the layers of `without`, which carry no state.
    ///
    /// # Errors
    /// Errors of [`DecoderGraphs::check_layers`].
    pub fn check_layers_but(
        &self,
        host: &Host,
        state: &StateCarrier,
        kinds: &[LayerState<'_>],
        without: &[usize],
    ) -> Result<()> {
        let Some(layers) = host.value::<usize>("/params/n_layers")? else { return Ok(()) };
        for layer in (0..layers).filter(|layer| !without.contains(layer)) {
            self.check_layer(host, state, kinds, layer, layers)?;
        }
        Ok(())
    }

    fn check_layer(
        &self,
        host: &Host,
        state: &StateCarrier,
        kinds: &[LayerState<'_>],
        layer: usize,
        layers: usize,
    ) -> Result<()> {
        let has = |kind: &LayerState<'_>, role: &str| kind.has(state, role, layer);
        let begun = kinds.iter().filter(|kind| kind.roles().iter().any(|role| has(kind, role)));
        let begun: Vec<_> = begun.collect();
        let what = match begun[..] {
            [] => {
                let names: Vec<_> = kinds.iter().map(|kind| kind.names(layer)).collect();
                format!(
                    "have no {}; expected that of each of the manifest's {layers} layers \
                     (params.n_layers)",
                    names.join(" and no ")
                )
            }
            [kind] => {
                let missing = kind.roles().iter().filter(|role| !has(kind, role));
                let missing: Vec<_> = missing.map(|role| format!("past_{role}_{layer}")).collect();
                if missing.is_empty() {
                    return Ok(());
                }
                format!("lack {}; the layer's other state is there", missing.join(" and "))
            }
            _ => {
                let names: Vec<_> = begun.iter().map(|kind| kind.names(layer)).collect();
                format!("have both {}; expected one of them", names.join(" and "))
            }
        };
        let names = self.passes[0].1.iter().map(|&graph| host.graph(graph).name.as_str());
        let names = names.collect::<Vec<_>>().join(", ");
        Err(Error::graph(format!("layer {layer}: the decode graphs ({names}) {what}")))
    }
}
