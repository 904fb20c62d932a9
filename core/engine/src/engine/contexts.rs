//! Which contexts of a bundle are opened.

use std::path::Path;

use crate::manifest::{ContextEntry, Manifest};
use qhx_base::artifacts::Artifacts;
use qhx_base::{Result, error};
use qhx_exec::backend::{Backend, ContextSource};

/// The contexts to open, in the manifest's order: all, except optional sets of which no file is there.
/// A set that is there in part is an error that names a missing file.
pub(super) fn sources(
    manifest: &Manifest,
    artifacts: &Artifacts,
    backend: &dyn Backend,
) -> Result<Vec<ContextSource>> {
    let mut sources = Vec::new();
    for entry in &manifest.artifacts.contexts {
        let there = match &entry.optional {
            None => true,
            Some(set) => is_there(manifest, artifacts, backend, set)?,
        };
        if there {
            sources.push(manifest.context_source(artifacts, &entry.key)?);
        }
    }
    Ok(sources)
}

/// The files of a context in the form that the backend opens.
fn files<'a>(entry: &'a ContextEntry, backend: &dyn Backend) -> Vec<&'a str> {
    let key = entry.key.clone();
    let path = |file: &str| Path::new(file).to_owned();
    let binary = entry.bin.as_deref().map(path);
    let source = ContextSource { key: key.clone(), binary, ..ContextSource::default() };
    if let Some(bin) = &entry.bin
        && backend.accepts(&source)
    {
        return vec![bin];
    }
    let onnx = entry.onnx.iter().map(|(graph, file)| (graph.clone(), path(file))).collect();
    let source = ContextSource { key, onnx, ..ContextSource::default() };
    if backend.accepts(&source) {
        return entry.onnx.iter().map(|(_, file)| file.as_str()).collect();
    }
    Vec::new()
}

/// True if all files of an optional set are there; an error if only a part is.
fn is_there(
    manifest: &Manifest,
    artifacts: &Artifacts,
    backend: &dyn Backend,
    set: &str,
) -> Result<bool> {
    let contexts = &manifest.artifacts.contexts;
    let of_set = contexts.iter().filter(|entry| entry.optional.as_deref() == Some(set));
    let (mut here, mut missing) = (None, None);
    for entry in of_set {
        let files = files(entry, backend);
        if files.is_empty() {
            missing.get_or_insert_with(|| format!("a form of context {:?} for it", entry.key));
        }
        for file in files {
            let place = if artifacts.root().join(file).exists() { &mut here } else { &mut missing };
            place.get_or_insert_with(|| file.to_owned());
        }
    }
    match (here, missing) {
        (None, _) => Ok(false),
        (Some(_), None) => Ok(true),
        (Some(here), Some(missing)) => Err(error!(
            Artifact,
            "{}: {missing} is missing, but {here} of the same optional set {set:?} is there",
            artifacts.root().display()
        )
        .hint(
            "complete the download, or remove all files of the set: the bundle works without it",
        )),
    }
}
