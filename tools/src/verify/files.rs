//! A bundle's files against the lengths and hashes that its manifest lists.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use qhx_base::hash::sha256;
use qhx_base::{CancelToken, Error, ErrorKind, Result, snapshot};
use qhx_core::Manifest;
use qhx_hub::{Cache, FileCheck};
use serde::Serialize;

/// Comparison of a file with its entry in the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FileReport {
    /// Its path in the bundle.
    pub path: String,
    /// It is as the manifest says, or left out.
    pub passed: bool,
    /// Fault of the file, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// It belongs to a set of optional contexts, of which nothing is there.
    #[serde(skip)]
    pub left_out: bool,
}

/// Comparison of a bundle's files with its manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FilesReport {
    /// The manifest's file.
    pub manifest: PathBuf,
    /// All files passed.
    pub passed: bool,
    /// Each file.
    pub files: Vec<FileReport>,
}

/// Compares length and SHA-256 of every file that the manifest lists, and of a bundle that was fetched from a hub the
/// other files with the hub's hashes. `on_file` is called with each as it is done.
///
/// ```no_run
/// let bundle = qhx::Bundle::open("qwen35/v81")?;
/// let cancel = qhx::CancelToken::new();
/// assert!(qhx_tools::verify::files(bundle.manifest(), &cancel, |_| Ok(()))?.passed);
/// # Ok::<(), qhx::Error>(())
/// ```
///
/// # Errors
/// When no file has a hash, a file cannot be read, or it is cancelled, and any error of `on_file`.
pub fn files(
    manifest: &Manifest,
    cancel: &CancelToken,
    mut on_file: impl FnMut(&FileReport) -> Result<()>,
) -> Result<FilesReport> {
    let mut files = Vec::new();
    fetched(manifest, cancel, |report| {
        on_file(&report)?;
        files.push(report);
        Ok(())
    })?;
    if manifest.artifacts.files.is_empty() && files.is_empty() {
        return Err(Error::new(
            ErrorKind::Manifest,
            format!(
                "{}: /artifacts/files: missing, so no file can be checked",
                manifest.path.display()
            ),
        )
        .hint("bundles made by `qhx forge` list their files; give a suite to check the answers"));
    }
    let optional = left_out(manifest);
    for path in manifest.artifacts.files.keys() {
        let left_out = optional.contains(path);
        let message = if left_out { None } else { check_file(manifest, path, cancel)? };
        let report =
            FileReport { path: path.clone(), passed: message.is_none(), message, left_out };
        on_file(&report)?;
        files.push(report);
    }
    let passed = files.iter().all(|file| file.passed);
    Ok(FilesReport { manifest: manifest.path.clone(), passed, files })
}

/// Files of a bundle that was fetched from a hub, without those that its manifest lists.
fn fetched(
    manifest: &Manifest,
    cancel: &CancelToken,
    mut on_file: impl FnMut(FileReport) -> Result<()>,
) -> Result<()> {
    let paths = manifest.artifacts.files.keys();
    let listed: BTreeSet<_> =
        paths.filter_map(|path| std::path::absolute(manifest.root.join(path)).ok()).collect();
    let folder = snapshot::locate(&manifest.path).map(|place| place.inner).unwrap_or_default();
    let folder = folder.rsplit_once('/').map_or("", |(folder, _)| folder);
    let skips = |file: &Path| listed.contains(file);
    Cache::verify(&manifest.path, cancel, skips, |FileCheck { path, message, .. }| {
        let inner = path.strip_prefix(folder).unwrap_or(path).trim_start_matches('/');
        on_file(FileReport {
            path: inner.to_owned(),
            passed: message.is_none(),
            message: message.clone(),
            left_out: false,
        })
    })
    .map(drop)
}

/// True when every file that the manifest lists is as it says.
///
/// # Errors
/// When a file cannot be read, and when it is cancelled.
pub fn is_intact(manifest: &Manifest, cancel: &CancelToken) -> Result<bool> {
    let left_out = left_out(manifest);
    for path in manifest.artifacts.files.keys().filter(|path| !left_out.contains(*path)) {
        if check_file(manifest, path, cancel)?.is_some() {
            return Ok(false);
        }
    }
    Ok(!manifest.artifacts.files.is_empty())
}

/// Files of optional sets of contexts of which nothing is there in that form, binaries or ONNX; and the ONNX files of
/// all contexts where none of them is there and the binaries are, as on a phone.
fn left_out(manifest: &Manifest) -> BTreeSet<String> {
    let mut sets: BTreeMap<(&str, bool), Vec<String>> = BTreeMap::new();
    for entry in &manifest.artifacts.contexts {
        let onnx = entry.onnx.iter().flat_map(|(_, path)| [path.clone(), format!("{path}_data")]);
        let onnx: Vec<_> = onnx.collect();
        if manifest.artifacts.contexts.iter().all(|entry| entry.bin.is_some()) {
            // No name of a set.
            sets.entry(("", false)).or_default().extend(onnx.clone());
        }
        let Some(set) = &entry.optional else { continue };
        sets.entry((set, true)).or_default().extend(entry.bin.clone());
        sets.entry((set, false)).or_default().extend(onnx);
    }
    let root = manifest.open_artifacts().root().to_owned();
    sets.retain(|_, files| files.iter().all(|file| !root.join(file).exists()));
    sets.into_values().flatten().collect()
}

/// Fault of a file that the manifest lists; `None` if it is right.
fn check_file(manifest: &Manifest, path: &str, cancel: &CancelToken) -> Result<Option<String>> {
    let Some(expected) = manifest.artifacts.files.get(path) else { return Ok(None) };
    let artifacts = manifest.open_artifacts();
    let pointer = format!("/artifacts/files/{path}");
    let resolved = match artifacts.resolve(&pointer, path) {
        Ok(resolved) => resolved,
        Err(e) if e.kind() == ErrorKind::Artifact => return Ok(Some("missing".to_owned())),
        Err(e) => return Err(e),
    };
    let fail = |e: std::io::Error| Error::io(ErrorKind::Artifact, &resolved, e);
    let file = artifacts.open_file(&pointer, path)?;
    let found = file.metadata().map_err(fail)?.len();
    if let Some(bytes) = expected.bytes.filter(|bytes| *bytes != found) {
        return Ok(Some(format!("{found} bytes, expected {bytes}")));
    }
    let Some(expected) = &expected.sha256 else { return Ok(None) };
    let found = sha256(ErrorKind::Artifact, &resolved, file, |_| cancel.check())?;
    Ok((found != *expected).then(|| format!("sha256 {found}, expected {expected}")))
}
