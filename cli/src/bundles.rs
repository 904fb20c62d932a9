//! Manifests that users name, and what they name instead.

use std::io::Read as _;
use std::path::Path;

use qhx_core::{Error, ErrorKind, Manifest, Result, files};

/// As [`Manifest::load_with_root`]; an error says what a checkpoint or a GGUF file is to become first.
pub(crate) fn load(path: &Path, root: Option<&Path>) -> Result<Manifest> {
    Manifest::load_with_root(path, root).map_err(|e| not_forged(path).unwrap_or(e))
}

/// The error of a checkpoint's folder or a GGUF file.
pub(crate) fn not_forged(path: &Path) -> Option<Error> {
    let what = if path.is_dir() { checkpoint(path)? } else { gguf(path)? };
    let message = format!("{}: {what}, expected a bundle", path.display());
    let hint = format!("make one of it: qhx forge {} --out FOLDER", path.display());
    Some(Error::new(ErrorKind::Manifest, message).hint(hint))
}

fn checkpoint(folder: &Path) -> Option<&'static str> {
    let names = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.file_name()));
    let weights = |name: &std::ffi::OsString| {
        let name = name.to_string_lossy();
        name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")
    };
    let found =
        folder.join("config.json").is_file() && names.into_iter().any(|name| weights(&name));
    found.then_some("the folder of a checkpoint")
}

fn gguf(file: &Path) -> Option<&'static str> {
    let mut head = [0; 4];
    files::open(ErrorKind::Manifest, file).ok()?.read_exact(&mut head).ok()?;
    (head == *b"GGUF").then_some("a GGUF file")
}
