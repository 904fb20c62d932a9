//! Graphs of a drafting head.

use qhx_op::{GraphId, Host};

/// Key of their names in the manifest.
pub(super) const DRAFT_HEAD: &str = "/plan/params/draft_head";

/// True if a graph reads caches and writes none, so that the caches are the decoder's.
pub(super) fn reads_alone(host: &Host, graph: GraphId) -> bool {
    let info = host.graph(graph);
    let writes = |role: &str| role.starts_with("new_") || role.starts_with("present_");
    info.inputs.iter().any(|tensor| tensor.role.starts_with("past_"))
        && !info.outputs.iter().any(|tensor| writes(&tensor.role))
}

/// The graphs of a drafting head, the narrowest first.
#[derive(Debug, Default)]
pub(super) struct DraftGraphs {
    /// With the number of pairs that each takes.
    pub graphs: Vec<(usize, GraphId)>,
    /// They read the decoder's caches.
    pub reads: bool,
}
