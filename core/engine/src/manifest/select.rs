//! Which file is the manifest: a file, a folder, or a name in a folder.

use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result, error};

/// JSON files that lie beside a manifest and never are one.
pub const NOT_MANIFESTS: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
];

/// True for the name of a file that can be a manifest.
pub fn is_candidate(name: &str) -> bool {
    name.ends_with(".json") && !name.starts_with('.') && !NOT_MANIFESTS.contains(&name)
}

/// The files of a folder that can be its manifest, sorted by name.
///
/// These are the top-level `*.json` files, without [`NOT_MANIFESTS`] and without hidden files.
///
/// # Errors
/// When the folder cannot be read.
pub fn candidates(folder: &Path) -> Result<Vec<PathBuf>> {
    let fail = |e: std::io::Error| Error::io(ErrorKind::Manifest, folder, e);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        if is_candidate(name) && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The manifest that `path` means.
///
/// A file is itself. A folder means its alphabetically first [`candidates`]. Anything else is a
/// name in a folder, with or without `.json`: `v81/model-vlm` is `v81/model-vlm.json`.
///
/// # Errors
/// When nothing is found at `path`.
pub fn select(path: &Path) -> Result<PathBuf> {
    if path.is_dir() {
        return candidates(path)?.into_iter().next().ok_or_else(|| {
            error!(Manifest, "{}: no manifest in this folder", path.display())
                .hint(format!("expected a *.json file other than {}", NOT_MANIFESTS.join(", ")))
        });
    }
    if path.exists() {
        return Ok(path.to_owned());
    }
    if let Some(name) = path.file_name() {
        let mut name = name.to_owned();
        name.push(".json");
        let with_extension = path.with_file_name(name);
        if with_extension.is_file() {
            return Ok(with_extension);
        }
    }
    let error = error!(Manifest, "{}: no such file", path.display());
    let folder = match path.parent() {
        Some(p) if p.as_os_str().is_empty() => Path::new("."),
        Some(p) => p,
        None => return Err(error),
    };
    let mut found = candidates(folder).unwrap_or_default();
    found.retain(|path| has_a_plan(path));
    Err(match found.is_empty() {
        false => error.hint(format!("manifests in {}: {}", folder.display(), names(&found))),
        true => error.hint("give the bundle's folder or its manifest"),
    })
}

/// True if a file looks like a manifest, and not like any other JSON.
fn has_a_plan(path: &Path) -> bool {
    const MAX_BYTES: u64 = 4 << 20;
    let bytes = qhx_base::files::read(ErrorKind::Manifest, path, MAX_BYTES).unwrap_or_default();
    let value = serde_json::from_slice::<serde_json::Value>(&bytes);
    value.is_ok_and(|value| value.get("plan").is_some())
}

/// File names for a message.
pub(crate) fn names(paths: &[PathBuf]) -> String {
    let names: Vec<_> =
        paths.iter().filter_map(|p| p.file_name()).map(|n| n.to_string_lossy()).collect();
    names.join(", ")
}
