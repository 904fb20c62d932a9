//! The names in `plan.params.tensors`, against the tensors that the bundle's graphs have.

use std::collections::HashSet;

use qhx_base::{Error, ErrorKind, Result};
use qhx_core::manifest::Manifest;
use qhx_exec::{GraphId, Workspace};
use serde_json::Value;

use crate::nearest::{nearest, quoted};

/// Errors when a role is given a name that no tensor of any graph has, such as a misspelt one. The op
/// would not find the tensor, or never look for it.
pub(crate) fn check(op: &str, manifest: &Manifest, workspace: &Workspace) -> Result<()> {
    let Some(Value::Object(map)) = manifest.plan.params.get("tensors") else { return Ok(()) };
    let graphs =
        || (0..workspace.graph_count()).filter_map(|i| workspace.graph(GraphId(i as u32)).ok());
    let loaded: HashSet<_> = graphs().map(|(context, _)| context).collect();
    if manifest.artifacts.contexts.iter().any(|context| !loaded.contains(context.key.as_str())) {
        // An optional context is left out: the names may be those of its tensors.
        return Ok(());
    }
    let tensors = || graphs().flat_map(|(_, graph)| graph.inputs.iter().chain(&graph.outputs));
    for (role, name) in map {
        // Another type than a text is the op's to refuse.
        let Some(name) = name.as_str() else { continue };
        if tensors().any(|tensor| matches(role, name, &tensor.name)) {
            continue;
        }
        let error = Error::new(
            ErrorKind::Manifest,
            format!(
                "plan.params.tensors.{role}: host-op {op:?} is to find its tensor {role:?} under the \
                 name {name:?}, which no tensor of any graph has"
            ),
        );
        let mut names: Vec<_> = tensors().map(|tensor| tensor.name.as_str()).collect();
        let like = names.iter().filter_map(|other| Some((distance(name, other)?, *other)));
        let like = like.min_by_key(|(distance, _)| *distance).map(|(_, other)| other);
        let near = like.or_else(|| nearest(name, names.iter().copied()));
        let owner = near.and_then(|near| {
            let has = |t: &qhx_types::TensorInfo| t.name == near;
            graphs().find(|(_, graph)| graph.inputs.iter().chain(&graph.outputs).any(has))
        });
        return Err(match (near, owner) {
            (Some(near), Some((_, graph))) => {
                error.hint(format!("graph {:?} has {near:?}; is that one meant?", graph.name))
            }
            _ => {
                let mut seen = HashSet::new();
                names.retain(|name| seen.insert(*name));
                error.hint(format!("the graphs have {}", quoted(&names)))
            }
        });
    }
    Ok(())
}

/// True if a name of the map means a tensor: the name itself, or with one `*` in role and name.
fn matches(role: &str, name: &str, tensor: &str) -> bool {
    if name == tensor {
        return true;
    }
    let (Some((head, tail)), true) = (name.split_once('*'), role.contains('*')) else {
        return false;
    };
    tensor
        .strip_prefix(head)
        .and_then(|rest| rest.strip_suffix(tail))
        .is_some_and(|middle| !middle.is_empty())
}

/// Edit distance of a tensor from the names that a name with a `*` means, if one side of the `*` is right and the other
/// is nearly.
fn distance(name: &str, tensor: &str) -> Option<usize> {
    let (head, tail) = name.split_once('*')?;
    let number = |c: char| c.is_ascii_digit();
    let (first, last) = (tensor.find(number)?, tensor.rfind(number)?);
    let (own_head, own_tail) = (&tensor[..first], &tensor[last + 1..]);
    let (name, other) = match (head == own_head, tail == own_tail) {
        (true, _) => (tail, own_tail),
        (_, true) => (head, own_head),
        _ => return None,
    };
    nearest(name, std::iter::once(other)).map(|other| strsim::damerau_levenshtein(name, other))
}
