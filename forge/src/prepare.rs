//! Compiles a portable bundle: from its ONNX graphs to a bundle with context binaries for one chip.
//!
//! A portable bundle ([`ForgeOptions::portable`](crate::ForgeOptions)) has all that a bundle needs but context
//! binaries. They are compiled from the graphs in the metadata of its ONNX files ([`qhx_graph::onnx::read`]), and are
//! those that a forge for the same chip makes, byte for byte. The prepared bundle has links to the other files.

use std::path::{Path, PathBuf};

use qhx_base::artifacts::Artifacts;
use qhx_base::hash::sha256;
use qhx_base::{Error, ErrorKind, Result};
use qhx_core::manifest::{ContextEntry, Manifest};
use qhx_graph::graph::Graph;
use qhx_graph::onnx;
use qhx_graph::progress::Progress;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::bundle::Staging;
use crate::compile::Compiler;
use crate::forge::{PORTABLE, binary, bind_receipt, check_manifest, stopped};
use crate::names;
use crate::options::CONTEXT_BUDGET;

/// The key of a prepared bundle's manifest that says what it was made of and for.
pub const PREPARED: &str = "prepared";

/// Folder of a prepared bundle, and its record in the manifest.
#[derive(Debug, Clone)]
pub struct PrepareOptions {
    /// Its folder.
    pub out: PathBuf,
    /// Key of this bundle among others: a hash in hexadecimal. An attempt with an equal key reuses the context binaries
    /// of one that was stopped.
    pub key: String,
    /// The value of [`PREPARED`] in the manifest.
    pub record: Value,
    /// Context binaries hold a weight of several graphs once.
    pub share_weights: bool,
}

/// A context of a prepared bundle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PreparedContext {
    /// Key in the manifest.
    pub key: String,
    /// Bytes of the context binary.
    pub binary_bytes: u64,
    /// An earlier attempt had made it.
    pub kept: bool,
}

/// Result of preparing a bundle.
#[derive(Debug, Clone)]
pub struct PrepareReport {
    /// The prepared bundle's manifest.
    pub manifest: PathBuf,
    /// Its contexts.
    pub contexts: Vec<PreparedContext>,
}

/// Errors unless the bundle is portable and its graphs are in a version that is read here.
///
/// # Errors
/// When it is not.
pub fn check_portable(manifest: &Manifest) -> Result<()> {
    let fail = |what: &str| {
        Error::new(ErrorKind::Manifest, format!("{}: {what}", manifest.path.display()))
    };
    let Some(portable) = manifest.raw.get(PORTABLE) else {
        let binaries = manifest.artifacts.contexts.iter().any(|context| context.bin.is_some());
        let what = if binaries {
            "not a portable bundle: it has context binaries, which are used as they are"
        } else {
            "not a portable bundle: its graphs are for the CPU"
        };
        return Err(fail(what)
            .hint("make one of the checkpoint: qhx forge CHECKPOINT --portable --out FOLDER"));
    };
    if portable.get("version").and_then(Value::as_u64) != Some(u64::from(onnx::VERSION)) {
        let what = format!("/{PORTABLE}/version: expected {}", onnx::VERSION);
        return Err(fail(&what).hint("use the qhx that made the bundle, or a newer one"));
    }
    if manifest.artifacts.files.is_empty() {
        return Err(fail("/artifacts/files: missing, so the graphs cannot be checked")
            .hint("bundles made by `qhx forge` list their files"));
    }
    Ok(())
}

/// The graphs of a context, as the forge had them.
///
/// # Errors
/// When the context is unknown, or one of its ONNX files cannot be read.
pub fn graphs(manifest: &Manifest, key: &str) -> Result<Vec<Graph>> {
    let artifacts = manifest.open_artifacts();
    let entry = manifest.context(key)?;
    let graphs = entry.onnx.iter().map(|(name, path)| {
        let file = artifacts.resolve(&format!("/artifacts/contexts/{key}/onnx/{name}"), path)?;
        let graph = onnx::read(&file, artifacts.bounds())?;
        if graph.name() == name {
            return Ok(graph);
        }
        let what = format!("{}: graph {:?}, expected {name:?}", file.display(), graph.name());
        Err(Error::new(ErrorKind::Artifact, what).hint("the manifest belongs to other files"))
    });
    graphs.collect()
}

/// Compiles every context of a portable bundle and puts a bundle with them into `options.out`, which appears when all
/// is made. A context that an attempt which was stopped had finished is not compiled again.
///
/// # Errors
/// When the bundle is not portable or was changed, when a graph cannot be compiled or a file not be written, when
/// another process prepares the same, and `Cancelled` when `progress` stops it.
pub fn prepare(
    manifest: &Manifest,
    compiler: &dyn Compiler,
    options: &PrepareOptions,
    progress: &mut dyn Progress,
) -> Result<PrepareReport> {
    check_portable(manifest)?;
    check_files(manifest, progress)?;
    let mut staging = Staging::open(&options.out, true, &options.key, progress)?;
    let contexts = match fill(manifest, compiler, options, &mut staging, progress) {
        Ok(contexts) => contexts,
        Err(error) => return Err(stopped(error, &mut staging)),
    };
    staging.publish()?;
    Ok(PrepareReport { manifest: options.out.join(file_name(manifest)), contexts })
}

fn file_name(manifest: &Manifest) -> String {
    manifest.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Compares all files with what the manifest lists.
fn check_files(manifest: &Manifest, progress: &mut dyn Progress) -> Result<()> {
    let artifacts = manifest.open_artifacts();
    let files = &manifest.artifacts.files;
    let total = files.values().filter_map(|file| file.bytes).fold(0u64, u64::saturating_add);
    progress.stage("verify the bundle's files", total);
    let mut done = 0;
    for (path, expected) in files {
        let pointer = format!("/artifacts/files/{path}");
        let file = match artifacts.open_file(&pointer, path) {
            Err(_) if is_left_out(manifest, &artifacts, path) => continue,
            file => file?,
        };
        let full = artifacts.root().join(path);
        let mut bytes = 0u64;
        let found = sha256(ErrorKind::Artifact, &full, file, |read| {
            progress.stop_if_cancelled()?;
            (bytes, done) = (bytes + read as u64, done + read as u64);
            progress.advance(done);
            Ok(())
        })?;
        if expected.bytes.is_some_and(|expected| expected != bytes)
            || expected.sha256.as_ref().is_none_or(|expected| *expected != found)
        {
            let what = format!(
                "{}: not the file that the manifest lists: {bytes} bytes, SHA-256 {found}",
                full.display()
            );
            return Err(Error::new(ErrorKind::Artifact, what)
                .hint("the file was changed or damaged; download the bundle again"));
        }
    }
    Ok(())
}

/// A file of an optional context that is not there.
fn is_left_out(manifest: &Manifest, artifacts: &Artifacts, path: &str) -> bool {
    let names = |entry: &ContextEntry| {
        entry.onnx.iter().any(|(_, onnx)| onnx == path || names::onnx_data_file(onnx) == path)
    };
    let mut optional = manifest.artifacts.contexts.iter().filter(|c| c.optional.is_some());
    optional.any(names) && !artifacts.root().join(path).exists()
}

fn fill(
    manifest: &Manifest,
    compiler: &dyn Compiler,
    options: &PrepareOptions,
    staging: &mut Staging,
    progress: &mut dyn Progress,
) -> Result<Vec<PreparedContext>> {
    let artifacts = manifest.open_artifacts();
    let mut made = Vec::new();
    let mut entries = Map::new();
    for context in &manifest.artifacts.contexts {
        let key = &context.key;
        progress.stop_if_cancelled()?;
        let there = |(_, path): &(String, String)| artifacts.root().join(path).exists();
        if context.optional.is_some() && !context.onnx.iter().all(there) {
            continue;
        }
        names::check_context(key)?;
        let graphs = graphs(manifest, key)?;
        if !options.share_weights {
            check_copies(key, &graphs)?;
        }
        let file = format!("{key}.bin");
        let graphs = (&graphs[..], options.share_weights);
        let kept = binary(compiler, key, graphs, &file, staging, progress)?;
        let binary_bytes = staging.bytes(&file).unwrap_or_default();
        made.push(PreparedContext { key: key.clone(), binary_bytes, kept });
        entries.insert(key.clone(), json!(file));
    }
    let mut files = staging.hashes();
    let onnx = link(manifest, &artifacts, staging, &mut files)?;
    let file = file_name(manifest);
    staging.write_json(
        &file,
        &prepared_manifest(manifest, compiler, options, &entries, files, onnx),
    )?;
    check_manifest(&staging.root().join(&file))
        .map_err(|e| e.context("the prepared bundle cannot be opened"))?;
    progress.stop_if_cancelled()?;
    Ok(made)
}

/// Errors when the graphs of a context, each with its own copy of the weights, are more than a device maps.
fn check_copies(key: &str, graphs: &[Graph]) -> Result<()> {
    let bytes = graphs.iter().map(Graph::weight_bytes).fold(0, u64::saturating_add);
    if bytes <= CONTEXT_BUDGET {
        return Ok(());
    }
    let what = format!(
        "context {key:?}: its {} graphs hold {bytes} bytes of weights, of which this target shares none, expected at \
         most {CONTEXT_BUDGET}",
        graphs.len()
    );
    Err(Error::new(ErrorKind::Graph, what)
        .hint("forge it with --portable --for-emulator, which makes smaller contexts"))
}

/// Puts the bundle's other files into the prepared one: links, or copies where the file system has none across folders.
/// ONNX files are not copied. Returns whether they are there.
fn link(
    manifest: &Manifest,
    artifacts: &Artifacts,
    staging: &Staging,
    files: &mut Map<String, Value>,
) -> Result<bool> {
    let contexts = manifest.artifacts.contexts.iter();
    let onnx: Vec<&str> =
        contexts.flat_map(|context| &context.onnx).map(|(_, path)| path.as_str()).collect();
    let is_onnx =
        |path: &str| onnx.iter().any(|onnx| path == *onnx || names::onnx_data_file(onnx) == path);
    let mut all = true;
    for (path, entry) in &manifest.artifacts.files {
        if is_left_out(manifest, artifacts, path) {
            continue;
        }
        let from = artifacts.resolve(&format!("/artifacts/files/{path}"), path)?;
        // A link would be one to a link.
        let from = from.canonicalize().map_err(|e| Error::io(ErrorKind::Io, &from, e))?;
        if let Some(folder) = Path::new(path).parent().and_then(Path::to_str) {
            staging.folder(folder)?;
        }
        let to = staging.path(path)?;
        if std::fs::hard_link(&from, &to).is_err() {
            if is_onnx(path) {
                all = false;
                continue;
            }
            std::fs::copy(&from, &to).map_err(|e| Error::io(ErrorKind::Io, &to, e))?;
        }
        files.insert(path.clone(), json!({"sha256": entry.sha256, "bytes": entry.bytes}));
    }
    if !all {
        files.retain(|path, _| !is_onnx(path));
    }
    Ok(all)
}

/// The bundle's manifest with context binaries.
fn prepared_manifest(
    manifest: &Manifest,
    compiler: &dyn Compiler,
    options: &PrepareOptions,
    binaries: &Map<String, Value>,
    files: Map<String, Value>,
    onnx: bool,
) -> Value {
    let mut document = manifest.raw.clone();
    if let Some(top) = document.as_object_mut() {
        top.remove(PORTABLE);
        top.remove("artifacts_root");
        top.insert(PREPARED.to_owned(), options.record.clone());
        let model = top.entry("model").or_insert_with(|| json!({}));
        model["dsp_arch"] = json!(compiler.dsp_arch());
        model["soc_model"] = json!(compiler.soc_model());
        model["compiled_by"] = json!(compiler.version());
    }
    let artifacts = &mut document["artifacts"];
    artifacts["files"] = Value::Object(files);
    if let Some(contexts) = artifacts["contexts"].as_object_mut() {
        contexts.retain(|key, _| onnx || binaries.contains_key(key));
        for (key, file) in binaries {
            let Some(entry) = contexts.get_mut(key).and_then(Value::as_object_mut) else {
                continue;
            };
            entry.insert("bin".to_owned(), file.clone());
            if !onnx {
                entry.remove("onnx");
            }
        }
    }
    bind_receipt(&mut document);
    document
}
