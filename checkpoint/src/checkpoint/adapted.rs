//! A checkpoint with adapters merged into its weights.

use std::path::Path;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::weight::read;

use super::{Checkpoint, Entry, read_json};
use crate::adapter::changes::Changes;
use crate::adapter::{self, Adapter, CONFIG, TENSORS, TEXT_FILES};
use crate::artifact;

impl Checkpoint {
    /// The same checkpoint with these adapters of PEFT merged into its weights, one after the other. Weights are read
    /// as before, some rows at a time, and changed in f32; those that are quantized are dequantized first.
    ///
    /// # Errors
    /// When an adapter's files are missing or damaged, it is for another model, or its configuration asks for what is
    /// not done; the message names it.
    pub fn with_adapters(mut self, adapters: &[Adapter]) -> Result<Self> {
        if let (Some(_), Some(adapter)) = (self.seed, adapters.first()) {
            let what =
                format!("adapter {adapter}: a synthetic model has no weights to merge it into");
            return Err(Error::new(ErrorKind::Usage, what).hint("name a checkpoint with weights"));
        }
        adapters.iter().try_for_each(|one| adapter::merge(&mut self, one))?;
        Ok(self)
    }

    /// The tensors and the configuration of an adapter.
    pub(crate) fn open_adapter(folder: &Path) -> Result<Self> {
        let there = |file: &&str| folder.join(file).is_file();
        if !there(&CONFIG) || !TENSORS.iter().any(there) {
            let what = format_args!("holds no {CONFIG} and {}", TENSORS[0]);
            let hint = "expected the folder of an adapter of PEFT";
            return Err(artifact(folder, what).hint(hint));
        }
        Self::open_beside(folder, CONFIG, &TENSORS)
    }

    /// The configuration and the tensors of a part of a model, in files of these names: of `tensors` the first that is
    /// there. Tensors have no other names than their own.
    pub fn open_beside(folder: &Path, config: &str, tensors: &[&str]) -> Result<Self> {
        let path = folder.join(config);
        let config = read_json(&path)?;
        let mut part = Self::new(folder, folder, path, config)?;
        part.names = |name| vec![name.to_owned()];
        let file = tensors.iter().find(|file| folder.join(file).exists()).or(tensors.first());
        part.add_file(file.copied().unwrap_or_default(), None)?;
        Ok(part)
    }

    /// The names of all tensors.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor `name`, which may have the prefix of another class of the same model: its name here, and its shape.
    pub fn stored(&self, name: &str) -> Option<(String, Vec<usize>)> {
        let short = ["model.language_model.", "language_model.model.", "language_model.", "model."];
        let short = short.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
        let exact = self.tensors.get_key_value(name).map(|(key, entry)| (key.clone(), entry));
        let (key, entry) = exact.or_else(|| self.entry(short))?;
        Some((key, entry.shape().to_vec()))
    }

    /// All values of a matrix as f32.
    pub(crate) fn floats(&self, key: &str, [rows, cols]: [usize; 2]) -> Result<Vec<f32>> {
        let found = self
            .tensors
            .get(key)
            .filter(|entry| entry.shape().iter().product::<usize>() == rows * cols);
        let Some(entry) = found else {
            let what = format!("tensor {key}: it has not {rows} by {cols} values");
            return Err(Error::new(ErrorKind::Artifact, what)
                .hint("the adapter is for a model of other sizes"));
        };
        let mut out = vec![0f32; rows * cols];
        read(&*self.view(key, entry, [rows, cols])?, 0, &mut out)?;
        Ok(out)
    }

    /// Changes that adapters make.
    pub(crate) fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Notes a change of the tensor `key`.
    pub(crate) fn change(&mut self, key: String, note: impl FnOnce(&mut Changes, String)) {
        note(Arc::make_mut(&mut self.changes), key);
    }

    /// Puts the tensor `key` of an adapter in the place of `target`.
    pub(crate) fn replace(&mut self, adapter: &Self, key: &str, target: &str) {
        let Some(Entry::Plain { shard, dtype, shape, bytes }) = adapter.tensors.get(key) else {
            return;
        };
        let Some(map) = adapter.shards.get(*shard) else { return };
        let entry = Entry::Plain {
            shard: self.shards.len(),
            dtype: *dtype,
            shape: shape.clone(),
            bytes: bytes.clone(),
        };
        self.shards.push(map.clone());
        Arc::make_mut(&mut self.tensors).insert(target.to_owned(), entry);
    }

    /// Takes the tokenizer's files of an adapter's folder, where it has such.
    pub(crate) fn take_texts(&mut self, folder: &Path) {
        self.texts = Some(folder.to_owned());
    }

    /// Makes an adapter a part of the checkpoint's identity.
    pub(crate) fn note_adapter(&mut self, opened: &Self, adapter: &Adapter) {
        self.files.extend(opened.files.iter().cloned());
        let texts = TEXT_FILES.iter().map(|file| opened.dir.join(file));
        self.files.extend(texts.filter(|path| path.exists()));
        self.adapters.push_str(&format!(" {} {}", opened.config, adapter.weight));
    }
}
