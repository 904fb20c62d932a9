//! Helpers that the files of tests share: checkpoints to damage, a compiler without a library, what the forge notes.
#![allow(dead_code, reason = "each file of tests needs some of them")]
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use std::path::Path;
use std::sync::Mutex;

use qhx_base::{Error, Result};
use qhx_checkpoint::Checkpoint;
use qhx_forge::Progress;
use qhx_forge::compile::Compiler;
use qhx_forge::recipe::RecipeOptions;
use qhx_graph::graph::Graph;
use qhx_paths::fixture;
use serde_json::Value;
use tempfile::TempDir;

pub mod graphs;

/// The error of a result, whose report has the words.
#[track_caller]
pub fn says<T>(result: Result<T>, words: &str) -> Error {
    let Err(error) = result else { panic!("nothing says {words:?}") };
    let report = error.report().to_string();
    assert!(report.contains(words), "{report}\n  does not say {words:?}");
    error
}

/// A copy of a fixture to damage, without its folders.
pub fn copy(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    copy_files(&fixture(name), dir.path());
    dir
}

/// A copy of a fixture with its folders.
pub fn copy_all(name: &str) -> TempDir {
    let dir = copy(name);
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            let to = dir.path().join(path.file_name().unwrap());
            std::fs::create_dir(&to).unwrap();
            copy_files(&path, &to);
        }
    }
    dir
}

/// Copies the files of a folder into another one.
pub fn copy_files(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
}

pub fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value = read_json(path);
    edit(&mut value);
    std::fs::write(path, serde_json::to_vec(&value).unwrap()).unwrap();
}

/// Sets the value at keys, with dots between them, of a JSON file.
pub fn set_json(path: &Path, keys: &str, new: Value) {
    edit_json(path, |value| {
        let place = keys.split('.').fold(value, |value, key| match key.parse::<usize>() {
            Ok(index) if value.is_array() => &mut value[index],
            _ => &mut value[key],
        });
        *place = new;
    });
}

/// The header of a safetensors file, and where its data begins.
fn header(bytes: &[u8]) -> (Value, usize) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + length]).unwrap(), 8 + length)
}

/// Rewrites the header of a safetensors file, leaving its data.
pub fn edit_header(path: &Path, edit: impl FnOnce(&mut Value)) {
    let bytes = std::fs::read(path).unwrap();
    let (mut found, data) = header(&bytes);
    edit(&mut found);
    let found = serde_json::to_vec(&found).unwrap();
    let length = (found.len() as u64).to_le_bytes();
    std::fs::write(path, [&length[..], &found, &bytes[data..]].concat()).unwrap();
}

/// Changes the bytes of the tensor whose name ends so, in the safetensors file of a checkpoint that holds it; `edit`
/// gets its type, too.
pub fn edit_tensor(dir: &Path, end: &str, edit: impl FnOnce(&str, &mut [u8])) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "safetensors") {
            continue;
        }
        let mut bytes = std::fs::read(&path).unwrap();
        let (header, data) = header(&bytes);
        let found = header.as_object().unwrap().iter().find(|(name, _)| name.ends_with(end));
        let Some((_, tensor)) = found else { continue };
        let at = |n: usize| data + tensor["data_offsets"][n].as_u64().unwrap() as usize;
        edit(tensor["dtype"].as_str().unwrap(), &mut bytes[at(0)..at(1)]);
        return std::fs::write(path, bytes).unwrap();
    }
    unreachable!("{} has no tensor {end}", dir.display());
}

/// A model without weights, of a configuration in `tests/configs`.
pub fn configured(name: &str) -> Checkpoint {
    let path = qhx_paths::workspace().join("tests/configs").join(name);
    Checkpoint::synthetic(&path, 1).unwrap()
}

/// Options of a recipe of one shard with a context of `max_ctx` tokens.
pub fn recipe_options(max_ctx: usize, choices: &[(&str, &str)]) -> RecipeOptions {
    let choices = choices.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    RecipeOptions { shards: 1, max_ctx, choices, ..RecipeOptions::default() }
}

/// Stages and notes of the forge while a bundle is made.
#[derive(Debug, Default)]
pub struct Log {
    pub stages: Vec<String>,
    pub notes: Vec<String>,
}

impl Progress for Log {
    fn stage(&mut self, what: &str, _total: u64) {
        self.stages.push(what.to_owned());
    }

    fn advance(&mut self, _done: u64) {}

    fn note(&mut self, message: &str) {
        self.notes.push(message.to_owned());
    }
}

/// Writes the names of a context's graphs instead of a binary, and keeps the graphs.
#[derive(Default)]
pub struct StandIn {
    /// Keys of the contexts that were compiled.
    pub compiled: Mutex<Vec<String>>,
    /// Their graphs.
    pub graphs: Mutex<Vec<Graph>>,
    /// The context in the middle of which something happens.
    at: Option<usize>,
    then: Option<Box<dyn Fn() -> Result<()> + Send + Sync>>,
}

impl StandIn {
    pub fn stops_at(at: usize, then: impl Fn() -> Result<()> + Send + Sync + 'static) -> Self {
        Self { at: Some(at), then: Some(Box::new(then)), ..Self::default() }
    }
}

impl Compiler for StandIn {
    fn dsp_arch(&self) -> &str {
        "v81"
    }

    fn version(&self) -> String {
        "stand-in".to_owned()
    }

    fn compile(
        &self,
        key: &str,
        graphs: &[Graph],
        _: bool,
        out: &Path,
        _: &mut dyn Progress,
    ) -> Result<u64> {
        let mut compiled = self.compiled.lock().unwrap();
        let names: Vec<_> = graphs.iter().map(Graph::name).collect();
        let text = format!("{key}: {}", names.join(", "));
        std::fs::write(out, &text[..text.len() / 2]).unwrap();
        if let (true, Some(then)) = (self.at == Some(compiled.len()), &self.then) {
            then()?;
        }
        std::fs::write(out, &text).unwrap();
        compiled.push(key.to_owned());
        self.graphs.lock().unwrap().extend_from_slice(graphs);
        Ok(text.len() as u64)
    }
}
