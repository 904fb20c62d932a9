//! Names of graphs in `plan.params`.

use qhx_op::{Error, GraphId, Host, Result};
use serde::Deserialize;

/// `plan.params`.
#[derive(Debug, Deserialize)]
#[serde(default)]
pub(crate) struct Params {
    /// Graphs of attention and router for one token, one a layer.
    pub decode: Layers,
    /// As `decode`, for a prompt.
    pub prefill: Layers,
    /// Graph from hidden state to logits.
    pub lmhead: String,
    /// Shortest prompt that goes through `prefill`.
    pub prefill_min: usize,
}

impl Default for Params {
    /// The names of the published bundles.
    fn default() -> Self {
        let pattern = |text: &str| Layers::Pattern(text.to_owned());
        Self {
            decode: pattern("a*"),
            prefill: pattern("pf*"),
            lmhead: "lmhead_ar1".to_owned(),
            prefill_min: 24,
        }
    }
}

/// One graph a layer: a list, or a pattern with one `*` for the layer's number.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Layers {
    Pattern(String),
    List(Vec<String>),
}

impl Layers {
    /// Names of the graphs of `layers` layers; `None` counts those that are there.
    pub fn names(&self, host: &Host, pointer: &str, layers: Option<usize>) -> Result<Vec<String>> {
        let names = match self {
            Self::List(names) => names.clone(),
            Self::Pattern(pattern) => {
                let Some((head, tail)) = pattern.split_once('*') else {
                    return Err(Error::manifest(format!(
                        "manifest {pointer}: {pattern:?}, expected a list of graphs, or a name with \
                         one * for the layer's number"
                    )));
                };
                let name = |layer: usize| format!("{head}{layer}{tail}");
                let here = |layer: &usize| host.find_graph(&name(*layer)).is_some();
                // No more layers than the bundle has graphs can be there.
                let count = (0..host.graphs().len()).take_while(here).count();
                (0..layers.unwrap_or(count).min(host.graphs().len() + 1)).map(name).collect()
            }
        };
        if names.is_empty() {
            return Err(Error::manifest(format!("manifest {pointer}: no graph is named or there")));
        }
        match layers {
            Some(layers) if layers != names.len() => Err(Error::manifest(format!(
                "manifest {pointer}: {} graphs, expected {layers}, one for each layer \
                 (params.n_layers); the bundle has {} graphs in all",
                names.len(),
                host.graphs().len()
            ))),
            _ => Ok(names),
        }
    }
}

/// The graphs of these names, all of which must be there.
pub(crate) fn require(host: &Host, pointer: &str, names: &[String]) -> Result<Vec<GraphId>> {
    names.iter().map(|name| host.require_graph(pointer, name)).collect()
}
