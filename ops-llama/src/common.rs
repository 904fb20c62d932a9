//! What both ops need: names in the manifest, chained graphs, rotary tables.

use qhx_op::fill::{Embedding, Rope, RopeScaling};
use qhx_op::{Error, GraphId, Host, Port, Result, Segment};
use serde::Deserialize;

/// Base of the rotary frequencies when the manifest does not say (RoFormer, arXiv 2104.09864).
const ROPE_THETA: f64 = 1e4;

/// One graph or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    /// The graphs named at `pointer`, at least one.
    pub fn graphs(&self, host: &Host, pointer: &str) -> Result<Vec<GraphId>> {
        let names = match self {
            Self::One(name) => std::slice::from_ref(name),
            Self::Many(names) => names,
        };
        if names.is_empty() {
            return Err(Error::manifest(format!("manifest {pointer}: no graph is named")));
        }
        names.iter().map(|name| host.require_graph(pointer, name)).collect()
    }
}

/// Rows of a graph's input `x` `[rows, hidden]`, and its width.
pub(crate) fn rows_of(host: &Host, graph: GraphId) -> Result<(usize, usize)> {
    let info = host.graph(graph);
    let tensor = &info.inputs[info.require_input("x")?];
    let hidden = tensor.width();
    if hidden == 0 || tensor.elements() == 0 {
        return Err(Error::graph(format!("graph {:?}: tensor {tensor} is empty", info.name)));
    }
    Ok((tensor.elements() / hidden, hidden))
}

/// Opens the embedding table for rows of `hidden` values and checks the manifest's own number.
pub(crate) fn open_embedding(host: &mut Host, graph: GraphId, hidden: usize) -> Result<Embedding> {
    if let Some(said) = host.value::<usize>("/params/hidden")?
        && said != hidden
    {
        let info = host.graph(graph);
        let tensor = &info.inputs[info.require_input("x")?];
        return Err(Error::graph(format!(
            "graph {:?}: tensor {tensor}: expected rows of {said} values, the manifest's \
             params.hidden",
            info.name
        )));
    }
    Embedding::open(host, hidden, host.value("/params/vocab")?)
}

/// Checks that one graph's output `y` can be the next one's input `x`.
pub(crate) fn check_chain(host: &Host, from: GraphId, to: GraphId) -> Result<(Port, Port)> {
    let output = Port::Output(host.graph(from).require_output("y")?);
    let input = Port::Input(host.graph(to).require_input("x")?);
    let (source, target) = (host.tensor(from, output), host.tensor(to, input));
    if source.dtype != target.dtype || source.elements() != target.elements() {
        return Err(Error::graph(format!(
            "graph {:?} hands on {source}, but graph {:?} takes {target}; both must have the same \
             dtype and number of values",
            host.graph(from).name,
            host.graph(to).name
        )));
    }
    Ok((output, input))
}

/// The rotary tables that the manifest describes, for graphs of which some take `cos` and `sin`.
pub(crate) fn rope(host: &Host, graphs: &[GraphId]) -> Result<Rope> {
    let dim = match host.value::<usize>("/params/rotary_dim")? {
        Some(dim) => Some(dim),
        None => host.value::<usize>("/params/head_dim")?,
    };
    let rotates = graphs.iter().any(|&g| host.graph(g).input("cos").is_some());
    let dim = match (dim, rotates) {
        (Some(dim), _) => dim,
        (None, false) => 2,
        (None, true) => {
            return Err(Error::manifest(
                "manifest /params: head_dim is missing, which the rotary tables are made for",
            ));
        }
    };
    let rope = Rope::new(dim, host.value("/params/rope_theta")?.unwrap_or(ROPE_THETA))?;
    match host.value::<RopeScaling>("/params/rope_scaling")? {
        Some(scaling) => rope.scaled(scaling),
        None => Ok(rope),
    }
}

/// The tokens of a prompt that has nothing else, and their number.
pub(crate) fn count_tokens(op: &str, segments: &[Segment<'_>]) -> Result<usize> {
    let mut total = 0;
    for segment in segments {
        let found = match segment {
            Segment::Tokens(tokens) => {
                total += tokens.len();
                continue;
            }
            Segment::Image { .. } => "an image",
            Segment::Audio { .. } => "audio",
            _ => "a segment of an unknown kind",
        };
        return Err(Error::prompt(format!("{op} takes text only; the prompt has {found}")));
    }
    if total == 0 {
        return Err(Error::prompt("the prompt has no tokens"));
    }
    Ok(total)
}

/// Tokens of text segments, in order. Other segments have none.
pub(crate) fn tokens<'a>(segments: &'a [Segment<'a>]) -> impl Iterator<Item = u32> + 'a {
    segments.iter().flat_map(|segment| {
        match segment {
            Segment::Tokens(tokens) => tokens,
            _ => &[][..],
        }
        .iter()
        .copied()
    })
}
