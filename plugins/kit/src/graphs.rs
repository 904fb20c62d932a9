//! Graphs by the names that a manifest gives them, and what executing them costs.

use serde::Deserialize;
use serde_json::{Map, Value};

use qhx_op::{Error, GraphId, Host, Result};

/// A parameter that names one graph, or several in order ([`crate::schema::graphs`]).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum OneOrMany {
    /// A name.
    One(String),
    /// Names.
    Many(Vec<String>),
}

impl OneOrMany {
    /// The names.
    pub fn names(&self) -> &[String] {
        match self {
            Self::One(name) => std::slice::from_ref(name),
            Self::Many(names) => names,
        }
    }

    /// The graphs named at `pointer` of the manifest, at least one.
    ///
    /// # Errors
    /// When one is not there.
    pub fn graphs(&self, host: &Host, pointer: &str) -> Result<Vec<GraphId>> {
        if self.names().is_empty() {
            return Err(Error::manifest(format!("manifest {pointer}: no graph is named")));
        }
        self.names().iter().map(|name| host.require_graph(pointer, name)).collect()
    }

    /// The graphs named at `pointer` of the manifest whose contexts are opened: optional ones may be left out.
    ///
    /// # Errors
    /// When a name is no graph's of any context, as far as the manifest lists the graphs of those that are left out.
    pub fn present(&self, host: &Host, pointer: &str) -> Result<Vec<GraphId>> {
        let closed = Closed::of(host)?;
        let there = |name: &&String| host.find_graph(name).is_some() || !closed.may_have(name);
        self.names().iter().filter(there).map(|name| host.require_graph(pointer, name)).collect()
    }
}

/// The contexts of the manifest that are left out of a bundle, by their keys.
struct Closed(Vec<(String, Value)>);

impl Closed {
    fn of(host: &Host) -> Result<Self> {
        let contexts: Option<Map<String, Value>> = host.value("/artifacts/contexts")?;
        let opened = |key: &str| host.graphs().iter().any(|graph| graph.context == key);
        let closed = contexts.unwrap_or_default().into_iter();
        let closed = closed.filter(|(key, entry)| entry.get("optional").is_some() && !opened(key));
        Ok(Self(closed.collect()))
    }

    /// True if one of these contexts lists the graph, or lists no graphs at all.
    fn may_have(&self, name: &str) -> bool {
        self.0.iter().any(|(key, entry)| {
            let own = name.strip_prefix(key.as_str()).and_then(|rest| rest.strip_prefix('/'));
            let name = own.unwrap_or(name);
            let mut lists = ["onnx", "us"].iter().filter_map(|list| entry.get(list)).peekable();
            let lists_none = lists.peek().is_none();
            lists_none
                || lists.any(|list| match list {
                    Value::Object(graphs) => graphs.contains_key(name),
                    // One file, whose graph has the name of the context.
                    _ => key == name,
                })
        })
    }
}

/// Rows that cost about as much as reading the weights once, where the bundle declares nothing of its graphs.
///
/// A pass of 128 rows then costs five steps. That lies between the NPU, where the compiler's estimate is 2.3, and
/// the CPU, where 9 were measured: either loses less than by the other's figure.
const ROWS_OF_ONE_READ: f64 = 32.0;

/// Costs of executing graphs, to choose among graphs that do the same for fewer or more rows: the bundle's own figures
/// (`artifacts.contexts.<key>.us`) if it has one for every graph, else a rule.
#[derive(Debug, Clone, Copy)]
pub struct GraphCosts {
    all_declared: bool,
}

impl GraphCosts {
    /// Costs of these graphs, which must be all that are compared.
    pub fn of(host: &Host, graphs: impl IntoIterator<Item = GraphId>) -> Self {
        Self { all_declared: graphs.into_iter().all(|graph| declared_us(host, graph).is_some()) }
    }

    /// True if the bundle has a figure for each graph.
    pub(crate) fn are_declared(self) -> bool {
        self.all_declared
    }

    /// Cost of executing graphs that take `rows` rows once, one after the other.
    pub fn sum(self, host: &Host, graphs: &[GraphId], rows: usize) -> f64 {
        let cost = |&graph: &GraphId| {
            let declared = declared_us(host, graph).filter(|_| self.all_declared);
            declared.unwrap_or_else(|| assumed(rows))
        };
        graphs.iter().map(cost).sum()
    }
}

/// The bundle's figure for a graph.
fn declared_us(host: &Host, graph: GraphId) -> Option<f64> {
    host.graph(graph).us.filter(|us| us.is_finite() && *us > 0.0)
}

/// Cost of a graph that takes `rows` tokens in one execution, where nothing is known of it; 1 for one token.
pub(crate) fn assumed(rows: usize) -> f64 {
    1.0 + rows.saturating_sub(1) as f64 / ROWS_OF_ONE_READ
}
