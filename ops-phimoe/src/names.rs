//! The graphs that `plan.params` names.

use qhx_kit::OneOrMany;
use qhx_kit::decoder::DecoderGraphs;
use qhx_kit::experts::ExpertParams;
use qhx_op::{Error, GraphId, Host, Result};
use serde::Deserialize;

const DECODE: &str = "/plan/params/decode";
const PREFILL: &str = "/plan/params/prefill";
const WITHIN: &str = "/plan/params/within";

/// `plan.params`. The defaults are the names of the published bundles.
#[derive(Debug, Deserialize)]
#[serde(default)]
pub(crate) struct Params {
    /// Graphs of attention and router for one token, one a layer.
    decode: OneOrMany,
    /// Same as `decode`, for several tokens.
    prefill: OneOrMany,
    /// For each smaller context, graphs as those of `decode` and `prefill`.
    within: Vec<OneOrMany>,
    /// Graph from hidden state to logits.
    lmhead: String,
    #[serde(flatten)]
    experts: ExpertParams,
}

impl Default for Params {
    fn default() -> Self {
        let one = |name: &str| OneOrMany::One(name.to_owned());
        let experts = ExpertParams::default();
        Self {
            decode: one("a*"),
            prefill: one("pf*"),
            within: Vec::new(),
            lmhead: "lmhead_ar1".to_owned(),
            experts,
        }
    }
}

impl Params {
    /// The graphs of these names. Those for prompts are all there, or none of them.
    pub fn graphs(&self, host: &Host) -> Result<DecoderGraphs> {
        let declared = host.value::<usize>("/params/n_layers")?;
        let every = names(host, DECODE, &self.decode, declared)?;
        let layers = every.len();
        if let Some(declared) = declared.filter(|declared| *declared != layers) {
            return Err(Error::manifest(format!(
                "manifest {DECODE}: {layers} graphs, expected {declared}, one for each layer (params.n_layers), or a name \
                 with one * for the layer's number; the bundle has {} graphs in all",
                host.graphs().len()
            )));
        }
        let decode = layer_graphs(host, DECODE, &every, layers)?;
        let prefill = self.prefill(host, layers)?;
        let head = host.require_graph("/plan/params/lmhead", &self.lmhead)?;
        let found = DecoderGraphs::of(host, decode, prefill, Some(head))?;
        self.within.iter().enumerate().try_fold(found, |found, (index, graphs)| {
            let pointer = format!("{WITHIN}/{index}");
            let names = names(host, &pointer, graphs, Some(layers))?;
            found.within(host, &pointer, layer_graphs(host, &pointer, &names, layers)?)
        })
    }

    fn prefill(&self, host: &Host, layers: usize) -> Result<Vec<GraphId>> {
        let names = names(host, PREFILL, &self.prefill, Some(layers))?;
        let all = names.iter().chain([&self.experts.ffn_prefill]);
        let (here, missing): (Vec<_>, Vec<_>) =
            all.partition(|name| host.find_graph(name).is_some());
        if here.is_empty() {
            return Ok(Vec::new());
        }
        if !missing.is_empty() {
            return Err(Error::graph(format!(
                "prefill graphs are there in part: {} are, {} are missing; the contexts that hold them belong together, \
                 complete them, or remove them all",
                listed(&here),
                listed(&missing)
            )));
        }
        layer_graphs(host, PREFILL, &names, layers)
    }
}

/// Names with one `*` stand for one graph a layer; `None` counts the layers whose graphs are there.
fn names(
    host: &Host,
    pointer: &str,
    names: &OneOrMany,
    layers: Option<usize>,
) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for name in names.names() {
        let Some((head, tail)) = name.split_once('*') else {
            all.push(name.clone());
            continue;
        };
        let name = |layer: usize| format!("{head}{layer}{tail}");
        let here = |layer: &usize| host.find_graph(&name(*layer)).is_some();
        // No more layers than the bundle has graphs can be there.
        let count = (0..host.graphs().len()).take_while(here).count();
        all.extend((0..layers.unwrap_or(count).min(host.graphs().len() + 1)).map(name));
    }
    match all.is_empty() {
        true => Err(Error::manifest(format!("manifest {pointer}: no graph is named or there"))),
        false => Ok(all),
    }
}

/// The graphs of these names, each of which has the mask and that layer's new rows.
fn layer_graphs(
    host: &Host,
    pointer: &str,
    names: &[String],
    layers: usize,
) -> Result<Vec<GraphId>> {
    let graph = |(index, name): (usize, &String)| {
        let graph = host.require_graph(pointer, name)?;
        for kind in ["k", "v"] {
            host.output(graph, &format!("new_{kind}_{}", index % layers))?;
        }
        host.input(graph, "cmask").map(|_| graph)
    };
    names.iter().enumerate().map(graph).collect()
}

fn listed(names: &[&String]) -> String {
    const SHOWN: usize = 4;
    let mut list: Vec<_> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    if names.len() > SHOWN {
        list.push(format!("… ({} in all)", names.len()));
    }
    list.join(", ")
}
