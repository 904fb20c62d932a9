//! What a bundle lacks to run.

use std::sync::Arc;

use qhx::Bundle;
use qhx_base::{Error, Result};
use qhx_core::engine::{Model, ModelOptions};
use qhx_core::op::OpProvider as _;
use qhx_exec::null::NullBackend;
use qhx_plugins::Plugins;
use qhx_qnn::BinaryGraph;
use qhx_types::GraphInfo;

use serde::Serialize;

use super::{ContextContents, SizedFile};

/// Part that a bundle lacks to run, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct MissingPart {
    /// The part, and what was found in its place.
    pub what: String,
    /// Likely fix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl From<&Error> for MissingPart {
    fn from(error: &Error) -> Self {
        Self { what: error.message().to_owned(), hint: error.hint_text().map(str::to_owned) }
    }
}

/// Parts that the bundle lacks: the host-op, files, parameters. Where all of these are there, the host-op is opened
/// over the graphs as they are declared, which executes none of them, and names the first tensor that it misses.
/// Contexts that could not be read are in `unread`.
///
/// `None` where nothing is known to be missing, but graphs of some context could not be read.
pub(super) fn missing(
    bundle: &Bundle,
    plugins: &Plugins,
    files: &[SizedFile],
    contexts: &[ContextContents],
    unread: Vec<MissingPart>,
) -> Option<Vec<MissingPart>> {
    let manifest = bundle.manifest();
    let op = manifest.host_op().and_then(|name| {
        let entry = plugins.find(name)?;
        plugins.check_params(&entry, manifest)
    });
    let mut found: Vec<_> = op.as_ref().err().map(MissingPart::from).into_iter().collect();
    let absent = files.iter().filter(|file| file.bytes.is_none());
    found.extend(absent.map(|file| MissingPart {
        what: format!("{}: {} is not there", file.role, file.path.display()),
        hint: None,
    }));
    found.extend(unread);
    if !found.is_empty() {
        return Some(found);
    }
    let graphs = contexts.iter().map(|context| Some((context.key.clone(), graphs(context)?)));
    let opened = open(bundle, plugins, graphs.collect::<Option<Vec<_>>>()?);
    Some(opened.as_ref().err().map(MissingPart::from).into_iter().collect())
}

/// Graphs of a context as they are declared, if they could be read.
fn graphs(context: &ContextContents) -> Option<Result<Vec<GraphInfo>>> {
    match &context.binary {
        Some(binary) => Some(binary.info.graphs.iter().map(BinaryGraph::info).collect()),
        None => Some(context.onnx.clone()).filter(|graphs| !graphs.is_empty()).map(Ok),
    }
}

type Declared = Vec<(String, Result<Vec<GraphInfo>>)>;

fn open(bundle: &Bundle, plugins: &Plugins, declared: Declared) -> Result<Model> {
    let declared = declared.into_iter().map(|(key, graphs)| Ok((key, graphs?)));
    let backend = Arc::new(NullBackend::new(declared.collect::<Result<_>>()?));
    Model::open(ModelOptions::new(bundle.manifest().clone(), backend, plugins).threads(1))
}
