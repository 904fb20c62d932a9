//! A checkpoint: `config.json` with safetensors or files of `torch.save` as of Hugging Face, or a GGUF file, mapped and
//! read on demand.

mod adapted;
mod plain;
pub mod tokenizer;
mod unread;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorInfo};
use serde_json::{Value, json};

use crate::adapter::{changes::Changes, config::refuse};
use crate::artifact;
use crate::import::packed::{self, Part, Scheme};
use crate::import::torch::{self, Found};
use crate::import::{Imported, gguf, nemo, npz, onnx};
use crate::json::read_json;
use crate::synthetic::Drawn;
use plain::Matrix;
use qhx_base::artifacts::Mapped;
use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::weight::{RowSource, read};
use qhx_types::DType;
use unread::Uses;
pub use unread::{covers, summary};

/// The configuration.
const CONFIG: &str = "config.json";
/// The extension of llama.cpp's files.
const GGUF: &str = "gguf";
/// That of ONNX files.
const ONNX: &str = "onnx";
/// That of NeMo's archives.
const NEMO: &str = "nemo";
/// The one-file form.
const SINGLE: &str = "model.safetensors";
/// The index of the sharded form.
const INDEX: &str = "model.safetensors.index.json";
/// The same of files of `torch.save`.
const TORCH_SINGLE: &str = "pytorch_model.bin";
const TORCH_INDEX: &str = "pytorch_model.bin.index.json";
/// Both forms, the preferred first.
const WEIGHTS: [(&str, &str); 2] = [(SINGLE, INDEX), (TORCH_SINGLE, TORCH_INDEX)];
/// Prefixes of decoder tensors, the longer first: the multimodal nesting, the plain one, and none for the head and
/// for a model that was saved without one.
const PREFIXES: [&str; 3] = ["model.language_model.", "model.", ""];
/// Keys by which configurations without `architectures` are known, and the class that they are of.
const CLASSLESS: [(&[&str], &str); 4] = [
    (&["plbert", "istftnet"], "KModel"),
    (&["phoneme_id_map", "num_symbols", "audio"], "PiperVoice"),
    (&["pretrained_llm", "perception"], nemo::SPEECH_LM),
    (&["model_file", "voices"], "KittenTTS"),
];
/// Keys under which the configuration of an ONNX file has the strides and dilations of its convolutions, and the uses
/// of its linear layers.
const CONVOLUTIONS: &str = "convolutions";
const LINEARS: &str = "linears";
/// Tensors that a message names as examples of what there is.
const NAMED: usize = 3;
/// More values than any norm, bias or convolution has; the largest are biases of a head.
const MAX_VALUES: usize = 1 << 22;
/// Hint where the two contradict each other.
const MIXED: &str = "config.json and the weights belong to different models";
/// Length of the header's length.
const LENGTH: usize = 8;

/// A checkpoint whose files are mapped. Clones of what it hands out keep the mapping.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// Path that was given: a folder, a GGUF file, or the configuration of a synthetic model.
    path: PathBuf,
    dir: PathBuf,
    config_path: PathBuf,
    /// Contents of a GGUF file beside its tensors.
    inside: Option<Arc<gguf::Inside>>,
    /// `tokenizer.json` of an archive.
    archived: Option<Arc<[u8]>>,
    /// Settings of images or audio that are not in a file of their own, as a `processor_config.json`; else null.
    processor: Value,
    /// The seed of weights that are drawn instead of read.
    seed: Option<u64>,
    config: Value,
    generation: Value,
    shards: Vec<Mapped>,
    /// Paths of the shards.
    files: Vec<PathBuf>,
    tensors: Arc<BTreeMap<String, Entry>>,
    /// The names under which a tensor is looked for.
    names: fn(&str) -> Vec<String>,
    uses: Arc<Mutex<Uses>>,
    /// Changes that adapters make to the tensors.
    changes: Arc<Changes>,
    /// The adapters, for the identity.
    adapters: String,
    /// The folder of the adapter that comes with a tokenizer or a chat template, the last of several.
    texts: Option<PathBuf>,
}

/// A tensor of the checkpoint.
#[derive(Debug, Clone)]
enum Entry {
    /// Floating point in a safetensors file.
    Plain { shard: usize, dtype: Dtype, shape: Vec<usize>, bytes: Range<usize> },
    /// In a form of another program.
    Imported(Arc<dyn Imported>),
}

impl Entry {
    /// A tensor of the first file, and its name.
    fn of(Found { name, dtype, shape, bytes }: Found) -> (String, Self) {
        (name, Self::Plain { shard: 0, dtype, shape, bytes })
    }

    fn shape(&self) -> &[usize] {
        match self {
            Self::Plain { shape, .. } => shape,
            Self::Imported(tensor) => tensor.shape(),
        }
    }
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `path`: reads the headers, maps the files. Or the GGUF file `path`, see
    /// [`Checkpoint::open_gguf`] and [`Checkpoint::with_tower_beside`].
    ///
    /// # Errors
    /// When a file is missing, damaged or malformed; the message names it.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() && path.extension().is_some_and(|e| e.eq_ignore_ascii_case(GGUF)) {
            return Self::open_gguf(path, None)?.with_tower_beside();
        }
        if let Some(file) = file_of(path, ONNX) {
            return Self::open_onnx(path, &file);
        }
        if let Some(file) = file_of(path, NEMO) {
            return Self::open_nemo(path, &file);
        }
        if !path.is_dir() {
            let hint = "give the folder that holds config.json and model.safetensors, or a .gguf, .onnx or .nemo file";
            return Err(artifact(path, "not a folder").hint(hint));
        }
        let config_path = path.join(CONFIG);
        if !config_path.exists() || !Self::has_weights(path) {
            refuse(path)?;
        }
        let config = read_json(&config_path)?;
        let mut checkpoint = Self::new(path, path, config_path, config)?;
        let found =
            WEIGHTS.into_iter().find(|pair| [pair.0, pair.1].iter().any(|f| path.join(f).exists()));
        match (found, single(path, "pth")) {
            (Some((single, _)), _) if path.join(single).exists() => {
                checkpoint.add_file(single, None)?;
            }
            (Some((_, index)), _) => checkpoint.add_indexed(index)?,
            (None, Some(file)) => checkpoint.add_file(&file, None)?,
            (None, None) => {
                let what = format_args!("holds neither {SINGLE} nor {INDEX}");
                return Err(artifact(path, what).hint(format!(
                    "complete the download, or save the model as safetensors; {TORCH_SINGLE}, {TORCH_INDEX}, a single .pth, \
                     .onnx or .nemo file and .gguf files are read as well; `qhx forge plan` does without weights"
                )));
            }
        }
        checkpoint.add_quantized()?;
        if checkpoint.architecture() == Some(nemo::SPEECH_LM) {
            return checkpoint.named_as_parts();
        }
        Ok(checkpoint)
    }

    /// The same, whose tensors have the names of an encoder and a decoder of `transformers`, and the adapter in it merged.
    fn named_as_parts(mut self) -> Result<Self> {
        let named = |(name, entry): (&String, &Entry)| {
            Some((nemo::name_of_speech_lm(name)?, entry.clone()))
        };
        self.tensors = Arc::new(self.tensors.iter().filter_map(named).collect());
        let scale = self.config.get(nemo::LORA_SCALE).and_then(Value::as_f64);
        let factor = self.keys().find(|key| key.contains(".lora_"));
        match (scale, factor) {
            (Some(scale), _) => {
                let mut merged = self.with_factors_inside(scale as f32)?;
                Arc::make_mut(&mut merged.tensors).retain(|key, _| !key.contains(".lora_"));
                Ok(merged)
            }
            (None, None) => Ok(self),
            (None, Some(key)) => {
                let what = format!("tensor {key} is of an adapter, and {CONFIG} has no lora");
                Err(artifact(&self.path, what).hint(MIXED))
            }
        }
    }

    /// True for a folder with tensors that are read.
    pub fn has_weights(folder: &Path) -> bool {
        WEIGHTS.iter().any(|pair| [pair.0, pair.1].iter().any(|file| folder.join(file).exists()))
            || ["pth", ONNX, NEMO].iter().any(|extension| single(folder, extension).is_some())
    }

    /// Opens an ONNX file of another program for its weights. Its configuration is the file of the same name with
    /// `.json` behind it, as voices of Piper have it, or `config.json` beside it, and has the strides and dilations of
    /// its convolutions besides.
    fn open_onnx(path: &Path, file: &Path) -> Result<Self> {
        let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut own = file.as_os_str().to_owned();
        own.push(".json");
        let own = PathBuf::from(own);
        let config_path = if own.exists() { own } else { dir.join(CONFIG) };
        if !config_path.exists() {
            let name = file.file_name().unwrap_or_default().display();
            return Err(artifact(file, "an ONNX file without its configuration")
                .hint(format!("download {name}.json (or {CONFIG}) into the same folder")));
        }
        let mut config = read_json(&config_path)?;
        let map = Mapped::open(file)?;
        let model = onnx::read(&map).map_err(|what| {
            artifact(file, what).hint(
                "the download may be incomplete, or a Git LFS pointer; download the file again",
            )
        })?;
        if let Some(config) = config.as_object_mut() {
            config.insert(CONVOLUTIONS.to_owned(), Value::Object(model.convolutions));
            config.insert(LINEARS.to_owned(), Value::Object(model.linears));
        }
        let mut checkpoint = Self::new(path, dir, config_path, config)?;
        let laid =
            model.laid.into_iter().map(|(name, laid)| (name, Entry::Imported(Arc::new(laid) as _)));
        let tensors = model.tensors.into_iter().map(Entry::of);
        checkpoint.tensors = Arc::new(tensors.chain(laid).collect());
        checkpoint.shards.push(map);
        checkpoint.files.push(file.to_owned());
        Ok(checkpoint)
    }

    /// Opens an archive of NeMo, which has everything.
    fn open_nemo(path: &Path, file: &Path) -> Result<Self> {
        let map = Mapped::open(file)?;
        let model = nemo::Model::read(&map).map_err(|what| {
            artifact(file, what).hint(
                "archives of Canary are read; of another model take the checkpoint in the layout of transformers, and \
                 where the file is damaged, or a Git LFS pointer, download it again",
            )
        })?;
        let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut checkpoint = Self::new(path, dir, file.to_owned(), model.config)?;
        let tensors = model.tensors.into_iter().map(Entry::of);
        checkpoint.tensors = Arc::new(tensors.collect());
        checkpoint.processor = model.processor;
        checkpoint.archived = Some(Arc::from(model.tokenizer));
        checkpoint.shards.push(map);
        checkpoint.files.push(file.to_owned());
        Ok(checkpoint)
    }

    /// The tensors of one file of `torch.save`, without a configuration.
    pub fn open_torch(file: &Path) -> Result<Self> {
        let mut checkpoint = Self::bare(file)?;
        checkpoint.add_file(&file.file_name().unwrap_or_default().to_string_lossy(), None)?;
        Ok(checkpoint)
    }

    /// The arrays of one file of `numpy.savez`, without a configuration.
    ///
    /// # Errors
    /// When the file is missing or damaged, or an array is of another type than f32 and f16.
    pub fn open_npz(file: &Path) -> Result<Self> {
        let mut checkpoint = Self::bare(file)?;
        let map = Mapped::open(file)?;
        let found = npz::tensors(map.bytes()).map_err(|what| {
            artifact(file, what).hint(
                "the download may be incomplete, or a Git LFS pointer; download the file again",
            )
        })?;
        checkpoint.tensors = Arc::new(found.into_iter().map(Entry::of).collect());
        checkpoint.shards.push(map);
        Ok(checkpoint)
    }

    /// A checkpoint of one file without a configuration, whose tensors have their own names.
    fn bare(file: &Path) -> Result<Self> {
        let dir = file.parent().unwrap_or(file);
        let mut checkpoint = Self::new(file, dir, file.to_owned(), Value::Null)?;
        checkpoint.names = |name| vec![name.to_owned()];
        Ok(checkpoint)
    }

    /// Opens a GGUF file of llama.cpp. Configuration and tokenizer come from the folder `beside`, that of the model's
    /// Hugging Face checkpoint, or lie beside the file. Without a `config.json` or a `tokenizer.json` there they are
    /// made of the file's metadata, where that says enough.
    ///
    /// # Errors
    /// When the file is damaged or of a form that is not read.
    pub fn open_gguf(file: &Path, beside: Option<&Path>) -> Result<Self> {
        let model = gguf::Model::open(file, beside)?;
        let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
        let dir = beside.or(parent).unwrap_or(Path::new("."));
        let path = dir.join(CONFIG);
        let (config_path, config) = match path.exists() {
            true => (path.clone(), read_json(&path)?),
            false => (file.to_owned(), model.inside.config()?),
        };
        let mut checkpoint = Self::new(file, dir, config_path, config)?;
        if checkpoint.generation.is_null() {
            checkpoint.generation = model.inside.sampling();
        }
        let tensors = model.tensors.into_iter();
        checkpoint.tensors =
            Arc::new(tensors.map(|(name, tensor)| (name, Entry::Imported(tensor))).collect());
        checkpoint.files = model.files;
        checkpoint.inside = Some(Arc::new(model.inside));
        Ok(checkpoint)
    }

    /// The same checkpoint of a GGUF file with the vision tower of another one, `mmproj`. What there is no
    /// `config.json` and no file of the image processor for is made of its metadata and of what published checkpoints
    /// have in common.
    ///
    /// # Errors
    /// When the file is damaged or of a kind that is not read, or the checkpoint is no GGUF file.
    pub fn with_tower(mut self, mmproj: &Path) -> Result<Self> {
        let Some(inside) = self.inside.clone() else {
            let what = format!(
                "{}: its vision tower is that of {}, expected one in the checkpoint",
                self.path.display(),
                mmproj.display()
            );
            return Err(Error::new(ErrorKind::Usage, what)
                .hint("a tower in a file of its own belongs to a decoder in a .gguf file"));
        };
        let tower = gguf::Tower::open(mmproj)?;
        let tensors = Arc::make_mut(&mut self.tensors);
        for (name, tensor) in tower.tensors {
            if tensors.insert(name.clone(), Entry::Imported(tensor)).is_some() {
                let path = self.path.display();
                return Err(artifact(mmproj, format_args!("the tensor {name} is in {path}, too")));
            }
        }
        if self.config.get("vision_config").is_none() {
            inside.add_tower(&mut self.config, tower.config);
            if let Some(class) = tower.class {
                self.config["architectures"] = json!([class]);
            }
        }
        self.processor = tower.processor;
        self.files.push(mmproj.to_owned());
        Ok(self)
    }

    /// The same with the tower of the one file beside a GGUF file whose name has `mmproj` in it, where the model sees.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::with_tower`], when there are several such files, and when there is none and the model
    /// needs one.
    pub fn with_tower_beside(self) -> Result<Self> {
        let Some(inside) = &self.inside else { return Ok(self) };
        let described = self.config.get("vision_config").is_some() && inside.may_have_tower();
        let needed = inside.needs_tower();
        if !(described || needed) {
            return Ok(self);
        }
        match gguf::beside(&self.path)? {
            Some(file) => self.with_tower(&file),
            None if needed => {
                let what =
                    "a model that sees, and no file of its vision tower (mmproj) is beside it";
                let hint = "fetch it, and name it if it is elsewhere: `--mmproj FILE`";
                Err(artifact(&self.path, what).hint(hint))
            }
            None => Ok(self),
        }
    }

    /// A checkpoint without tensors yet.
    fn new(path: &Path, dir: &Path, config_path: PathBuf, mut config: Value) -> Result<Self> {
        name_class(&mut config);
        check_parts(&config_path, &config)?;
        let mut processor = Value::Null;
        if config.pointer("/architectures/0").and_then(Value::as_str) == Some(nemo::SPEECH_LM) {
            let llm = backbone(dir, &config_path, &config)?;
            let parts =
                nemo::speech_lm(&config, llm).map_err(|what| artifact(&config_path, what))?;
            [config, processor] = parts;
        }
        let generation = dir.join("generation_config.json");
        let generation = if generation.exists() { read_json(&generation)? } else { Value::Null };
        Ok(Self {
            path: path.to_owned(),
            dir: dir.to_owned(),
            config_path,
            inside: None,
            archived: None,
            processor,
            seed: None,
            config,
            generation,
            shards: Vec::new(),
            files: Vec::new(),
            tensors: Arc::default(),
            names: usual_names,
            uses: Arc::default(),
            changes: Arc::default(),
            adapters: String::new(),
            texts: None,
        })
    }

    /// A model of the shapes that the file `config`, a `config.json`, describes, with weights drawn
    /// from `seed`. Every tensor that a recipe asks for is there in the shape that it asks for; files
    /// beside the configuration are not looked at.
    ///
    /// # Errors
    /// When the configuration cannot be read.
    pub fn synthetic(config: &Path, seed: u64) -> Result<Self> {
        let drawn = Self::new(config, config, config.to_owned(), read_json(config)?)?;
        Ok(Self { seed: Some(seed), ..drawn })
    }

    /// The seed, when weights are drawn and not read.
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// Path that was opened: a folder, a GGUF file, or the configuration of a synthetic model.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of configuration and tokenizer; for a synthetic model the configuration file, beside which nothing is
    /// looked for.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The folder of the adapter whose tokenizer and chat template come before those of [`Checkpoint::dir`].
    pub fn texts(&self) -> Option<&Path> {
        self.texts.as_deref()
    }

    /// The folders in which the tokenizer's files are looked for, in order.
    pub fn text_dirs(&self) -> impl Iterator<Item = &Path> {
        self.texts().into_iter().chain([self.dir()])
    }

    /// A file of the tokenizer; none where it is in no folder.
    pub fn text_file(&self, name: &str) -> Option<PathBuf> {
        self.text_dirs().map(|dir| dir.join(name)).find(|path| path.exists())
    }

    /// Contents of a GGUF file beside its tensors; none for other checkpoints.
    pub fn inside(&self) -> Option<&gguf::Inside> {
        self.inside.as_deref()
    }

    /// Settings of images of a tower in a file of its own, or of audio of an archive, as a `processor_config.json`; else
    /// null.
    pub fn processor(&self) -> &Value {
        &self.processor
    }

    /// The file that [`Checkpoint::config`] was read from.
    pub fn config_path(&self) -> &Path {
        &self.config_path
    }

    /// `config.json`.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The text decoder's configuration: `text_config`, or `llm_config`, where there is one.
    pub fn text_config(&self) -> &Value {
        let mut parts = ["text_config", "llm_config"].iter().filter_map(|key| self.config.get(key));
        parts.find(|part| part.is_object()).unwrap_or(&self.config)
    }

    /// `generation_config.json`; without one what the metadata of a GGUF file says of sampling, or null.
    pub fn generation_config(&self) -> &Value {
        &self.generation
    }

    /// `architectures[0]`, the model class.
    pub fn architecture(&self) -> Option<&str> {
        self.config.pointer("/architectures/0").and_then(Value::as_str)
    }

    /// Says which checkpoint this is, without reading all of it: configurations, the table of tensors,
    /// lengths and times of modification of the files.
    pub fn identity(&self) -> String {
        let mut text =
            format!("{:?} {} {}{}", self.seed, self.config, self.generation, self.adapters);
        for file in &self.files {
            let metadata = std::fs::metadata(file).ok();
            let length = metadata.as_ref().map(std::fs::Metadata::len);
            let time = metadata.and_then(|m| m.modified().ok());
            text.push_str(&format!(" {} {length:?} {time:?}", file.display()));
        }
        for (name, entry) in &*self.tensors {
            match entry {
                Entry::Plain { dtype, shape, bytes, .. } => {
                    text.push_str(&format!(" {name} {dtype:?} {shape:?} {bytes:?}"));
                }
                Entry::Imported(tensor) => {
                    text.push_str(&format!(" {name} {} {:?}", tensor.form(), tensor.shape()));
                }
            }
        }
        text
    }

    /// True when another program quantized weights of it, see [`RowSource::block_form`].
    pub fn has_quantized_weights(&self) -> bool {
        let imported =
            |entry: &Entry| matches!(entry, Entry::Imported(t) if t.has_quantized_weights());
        self.tensors.values().any(imported)
    }

    /// The form of the tensor `key`, given with its prefix, where another program quantized it.
    pub fn form(&self, key: &str) -> Option<&'static str> {
        match self.tensors.get(key)? {
            Entry::Imported(tensor) => Some(tensor.form()),
            Entry::Plain { .. } => None,
        }
    }

    /// True when the decoder has the tensor `name`, given without prefix. False for a synthetic model,
    /// which has what its configuration foresees and nothing beyond that.
    pub fn has(&self, name: &str) -> bool {
        self.entry(name).is_some()
    }

    /// A matrix of the decoder that yields its rows on demand.
    ///
    /// # Errors
    /// When there is no such tensor, or it has another shape; the message lists the names that were looked for.
    pub fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Arc<dyn RowSource>> {
        self.source(name, &shape, shape)
    }

    /// A stack of matrices `[n, rows, cols]` of the decoder, as one matrix `[n · rows, cols]`.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::matrix`].
    pub fn stack(&self, name: &str, shape: [usize; 3]) -> Result<Arc<dyn RowSource>> {
        let rows = shape[0].saturating_mul(shape[1]);
        self.source(name, &shape, [rows, shape[2]])
    }

    /// A tensor of several dimensions, such as the filters of a convolution, as a matrix with one row for each
    /// element of its first dimension.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::matrix`].
    pub fn rows(&self, name: &str, shape: &[usize]) -> Result<Arc<dyn RowSource>> {
        let Some((&rows, rest)) = shape.split_first() else {
            return Err(Error::new(ErrorKind::Internal, format!("tensor {name}: no dimensions")));
        };
        let cols = rest.iter().fold(1usize, |n, &d| n.saturating_mul(d));
        self.source(name, shape, [rows, cols])
    }

    /// The values of a small tensor of the decoder as f32.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::matrix`], and when a value is not finite.
    pub fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let len = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let Some(len) = len.filter(|len| *len <= MAX_VALUES) else {
            let what = format_args!(
                "tensor {name} would have the shape {shape:?}, expected at most {MAX_VALUES} values"
            );
            let hint = "a size in the configuration is wrong";
            return Err(artifact(&self.config_path, what).hint(hint));
        };
        let matrix = self.source(name, shape, [1, len])?;
        let mut out = vec![0f32; len];
        read(&*matrix, 0, &mut out)?;
        Ok(out)
    }

    /// The values of a tensor of one dimension that holds indices, as I64 or I32; of a synthetic model 0, 1, 2, ….
    ///
    /// # Errors
    /// Errors of [`Checkpoint::matrix`], and when a value is negative or `len` or more.
    pub fn indices(&self, name: &str, len: usize) -> Result<Vec<u32>> {
        if self.seed.is_some() {
            return Ok((0..len).filter_map(|index| u32::try_from(index).ok()).collect());
        }
        let Some((key, entry)) = self.entry(name) else { return Err(self.missing(name)) };
        let fail =
            |what: String| artifact(&self.path, format_args!("tensor {key} {what}")).hint(MIXED);
        let Entry::Plain { shard, dtype: dtype @ (Dtype::I64 | Dtype::I32), shape, bytes } = entry
        else {
            return Err(fail("is not stored as integers, expected I64 or I32".to_owned()));
        };
        if *shape != [len] {
            return Err(fail(format!("has shape {shape:?}, config.json asks for [{len}]")));
        }
        self.reads(&key);
        let stored = self.shards[*shard].bytes().get(bytes.clone()).unwrap_or_default();
        let values: Vec<i64> = match dtype {
            Dtype::I64 => stored.as_chunks().0.iter().copied().map(i64::from_le_bytes).collect(),
            _ => {
                let values = stored.as_chunks().0.iter().copied().map(i32::from_le_bytes);
                values.map(i64::from).collect()
            }
        };
        let index =
            |value: &i64| u32::try_from(*value).ok().filter(|index| (*index as usize) < len);
        let wrong = values.iter().find(|value| index(value).is_none());
        if let Some(wrong) = wrong.or(values.get(len)) {
            return Err(fail(format!(
                "has the value {wrong}, expected 0 to {}",
                len.wrapping_sub(1)
            )));
        }
        Ok(values.iter().filter_map(index).collect())
    }

    /// A tensor of one dimension, as a matrix of one row.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::matrix`].
    pub fn vector(&self, name: &str, width: usize) -> Result<Arc<dyn RowSource>> {
        self.source(name, &[width], [1, width])
    }

    /// The value of a tensor without dimensions, such as a bound; it may be infinite.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::matrix`], and when the value is NaN.
    pub fn scalar(&self, name: &str) -> Result<f32> {
        let mut value = [0f32];
        self.source(name, &[], [1, 1])?.read_f32(0, &mut value)?;
        match value {
            [value] if value.is_nan() => {
                let key = self.entry(name).map_or_else(|| name.to_owned(), |(key, _)| key);
                let what = format_args!("tensor {key} is NaN, expected a number");
                Err(artifact(&self.path, what))
            }
            [value] => Ok(value),
        }
    }

    /// The tensor `name` of the shape `stored`, seen as the matrix `shape`.
    fn source(
        &self,
        name: &str,
        stored: &[usize],
        shape: [usize; 2],
    ) -> Result<Arc<dyn RowSource>> {
        match self.seed {
            Some(seed) => Ok(Arc::new(Drawn::new(seed, name, stored, shape))),
            None => self.open_matrix(name, stored, shape),
        }
    }

    /// The same checkpoint, whose tensors have other names: `names` gives those that are tried for a name that a
    /// recipe asks for, in order. Without this they are the name with the prefixes `model.language_model.` and
    /// `model.`, and the name alone.
    ///
    /// For checkpoints of other layouts: `|name| vec![format!("language_model.model.{name}")]`.
    #[must_use]
    pub fn renamed(&self, names: fn(&str) -> Vec<String>) -> Self {
        Self { names, ..self.clone() }
    }

    fn entry(&self, name: &str) -> Option<(String, &Entry)> {
        let names = (self.names)(name).into_iter();
        names
            .filter_map(|name| self.tensors.get_key_value(&name))
            .next()
            .map(|(k, e)| (k.clone(), e))
    }

    fn missing(&self, name: &str) -> Error {
        let tried = (self.names)(name);
        let some: Vec<_> = self.tensors.keys().take(NAMED).map(String::as_str).collect();
        let (tried, count, some) = (tried.join(" or "), self.tensors.len(), some.join(", "));
        let what = format_args!("no tensor {tried} among {count} (such as {some})");
        artifact(&self.path, what).hint(
            "config.json describes another model than the weights are of, or the folder holds an adapter or an \
             incomplete download",
        )
    }

    fn open_matrix(
        &self,
        name: &str,
        shape: &[usize],
        rows: [usize; 2],
    ) -> Result<Arc<dyn RowSource>> {
        let Some((key, entry)) = self.entry(name) else { return Err(self.missing(name)) };
        if entry.shape() != shape {
            let found = entry.shape();
            let what =
                format_args!("tensor {key} has shape {found:?}, config.json asks for {shape:?}");
            return Err(artifact(&self.path, what).hint(MIXED));
        }
        self.reads(&key);
        self.view(&key, entry, rows)
    }

    /// The tensor `key`, seen as the matrix `rows`.
    fn view(&self, key: &str, entry: &Entry, rows: [usize; 2]) -> Result<Arc<dyn RowSource>> {
        let (shard, dtype, bytes) = match entry {
            Entry::Plain { shard, dtype, bytes, .. } => (*shard, *dtype, bytes.clone()),
            Entry::Imported(tensor) => return self.changes.merged(key, tensor.matrix(key, rows)?),
        };
        let dtype = match dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::Bf16,
            other => {
                return Err(Error::new(
                    ErrorKind::Artifact,
                    format!("tensor {key} is stored as {other:?}, expected F32, F16 or BF16"),
                )
                .hint("take the unquantized checkpoint; how it is quantized, config.json has to say in quantization_config"));
            }
        };
        let map = self.shards[shard].clone();
        // Checked when the header was read; a row is sliced with a check again.
        let matrix = Matrix { name: key.to_owned(), map, bytes, dtype, shape: rows };
        self.changes.merged(key, Arc::new(matrix))
    }

    /// Puts the parts of quantized layers together, where the configuration declares such.
    fn add_quantized(&mut self) -> Result<()> {
        let fail = |path: &Path, what: String| {
            artifact(path, what).hint("take the unquantized checkpoint; the forge quantizes itself")
        };
        let scheme = Scheme::of(&self.config).map_err(|what| fail(&self.config_path, what))?;
        let Some(scheme) = scheme else { return Ok(()) };
        let quantized = {
            let part = |name: &str| match self.tensors.get(name)? {
                Entry::Plain { shard, dtype, shape, bytes } => Some(Part {
                    map: self.shards.get(*shard)?.clone(),
                    dtype: *dtype,
                    shape: shape.clone(),
                    bytes: bytes.clone(),
                }),
                Entry::Imported(_) => None,
            };
            let names = self.tensors.keys().map(String::as_str);
            packed::gather(&scheme, names, part).map_err(|what| fail(&self.dir, what))?
        };
        let tensors = Arc::make_mut(&mut self.tensors);
        quantized.parts.iter().for_each(|part| drop(tensors.remove(part)));
        let weights = quantized.weights.into_iter();
        tensors.extend(weights.map(|(name, tensor)| (name, Entry::Imported(Arc::new(tensor)))));
        Ok(())
    }

    fn add_indexed(&mut self, index_file: &str) -> Result<()> {
        let path = self.dir.join(index_file);
        let index = read_json(&path)?;
        let Some(map) = index.get("weight_map").and_then(Value::as_object) else {
            return Err(artifact(&path, "no object \"weight_map\""));
        };
        let mut files: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, file) in map {
            let Some(file) = file.as_str().filter(|f| is_plain(f)) else {
                let what = format_args!(
                    "weight_map[{tensor:?}] is {file}, expected the name of a file beside it"
                );
                return Err(artifact(&path, what));
            };
            files.entry(file).or_default().push(tensor);
        }
        for (file, tensors) in files {
            self.add_file(file, Some((index_file, &tensors)))?;
        }
        Ok(())
    }

    /// Maps a file of [`Checkpoint::dir`] and notes its tensors; with `listed`, those that the index of this name puts
    /// there.
    fn add_file(&mut self, file: &str, listed: Option<(&str, &[&str])>) -> Result<()> {
        let path = self.dir.join(file);
        if !path.exists() {
            let hint = match listed {
                Some((index, _)) => format!("{index} lists it; complete the download"),
                None => "complete the download".to_owned(),
            };
            return Err(artifact(&path, "missing").hint(hint));
        }
        let map = Mapped::open(&path)?;
        let found = match file.ends_with(".safetensors") {
            true => safetensors(&path, &map)?,
            false => torch::tensors(map.bytes()).map_err(|what| {
                artifact(&path, what).hint(
                    "the download may be incomplete, or a Git LFS pointer; or load the model with transformers and save \
                     it as safetensors",
                )
            })?,
        };
        let wanted = listed.map(|(_, listed)| listed.iter().copied().collect::<BTreeSet<_>>());
        let shard = self.shards.len();
        let tensors = Arc::make_mut(&mut self.tensors);
        let is_wanted = |name: &str| wanted.as_ref().is_none_or(|wanted| wanted.contains(name));
        for Found { name, dtype, shape, bytes } in found {
            if is_wanted(&name) {
                tensors.insert(name, Entry::Plain { shard, dtype, shape, bytes });
            }
        }
        let missing = |name: &&&str| !tensors.contains_key(**name);
        if let Some((index, listed)) = listed
            && let Some(name) = listed.iter().find(missing)
        {
            let what = format_args!("tensor {name}, which {index} puts there, is missing");
            let hint = "the index and the shards belong to different downloads";
            return Err(artifact(&path, what).hint(hint));
        }
        self.shards.push(map);
        self.files.push(path);
        Ok(())
    }
}

/// The tensors of a safetensors file.
fn safetensors(path: &Path, map: &Mapped) -> Result<Vec<Found>> {
    let (header, metadata) = SafeTensors::read_metadata(map.bytes()).map_err(|e| {
        let bytes = map.len();
        let what = format!("{}: not a whole safetensors file ({bytes} bytes)", path.display());
        Error::caused(ErrorKind::Artifact, what, e)
            .hint("the download may be incomplete, or a Git LFS pointer; download the file again")
    })?;
    let base = LENGTH.saturating_add(header);
    let one = |(name, info): (String, &TensorInfo)| {
        let (start, end) = info.data_offsets;
        let bytes = base.checked_add(start).zip(base.checked_add(end)).map(|(a, b)| a..b);
        let Some(bytes) = bytes.filter(|r| map.bytes().get(r.clone()).is_some()) else {
            let what = format_args!("tensor {name} lies beyond the end of the file");
            return Err(artifact(path, what));
        };
        Ok(Found { name, dtype: info.dtype, shape: info.shape.clone(), bytes })
    };
    metadata.tensors().into_iter().map(one).collect()
}

/// The name of the one file with this extension in a folder; none where there are none or several.
fn single(folder: &Path, extension: &str) -> Option<String> {
    let files = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files = files.filter(|file| file.extension().is_some_and(|end| end == extension));
    let file = files.next().filter(|_| files.next().is_none())?;
    Some(file.file_name()?.to_str()?.to_owned())
}

/// The file with this extension that a path is, or the one of a folder without other weights.
fn file_of(path: &Path, extension: &str) -> Option<PathBuf> {
    if !path.is_dir() {
        let named = path.extension().is_some_and(|end| end.eq_ignore_ascii_case(extension));
        return named.then(|| path.to_owned()).filter(|path| path.exists());
    }
    let others =
        WEIGHTS.iter().any(|pair| [pair.0, pair.1].iter().any(|file| path.join(file).exists()));
    if others || single(path, "pth").is_some() {
        return None;
    }
    single(path, extension).map(|file| path.join(file))
}

/// Configuration of the decoder of a [`nemo::SPEECH_LM`], which such a checkpoint names and may not hold.
fn backbone(dir: &Path, path: &Path, config: &Value) -> Result<Value> {
    if let Some(inside) = config.get("text_config").filter(|inside| inside.is_object()) {
        return Ok(inside.clone());
    }
    let file = dir.join("llm_backbone").join(CONFIG);
    if file.exists() {
        return read_json(&file);
    }
    let llm = config.get("pretrained_llm").and_then(Value::as_str).unwrap_or("its decoder");
    let what =
        format_args!("its decoder is {llm}, whose configuration is not in llm_backbone/{CONFIG}");
    Err(artifact(path, what).hint(format!(
        "put {CONFIG} of {llm} into the folder llm_backbone of the checkpoint, and its tokenizer.json and \
         tokenizer_config.json beside the weights"
    )))
}

/// Keys of a configuration that hold objects.
const PARTS: [&str; 9] = [
    "text_config",
    "llm_config",
    "vision_config",
    "audio_config",
    "encoder_config",
    "rope_parameters",
    "rope_scaling",
    "full_attention",
    "sliding_attention",
];

/// Checks that parts of a configuration are objects, or null: a recipe would take others for keys that are absent.
fn check_parts(path: &Path, config: &Value) -> Result<()> {
    for (key, value) in config.as_object().into_iter().flatten() {
        if value.is_object() {
            check_parts(path, value)?;
        } else if PARTS.contains(&&**key) && !value.is_null() {
            return Err(artifact(path, format_args!("{key} is {value}, expected an object")));
        }
    }
    Ok(())
}

/// Names the class in a configuration that has none, where its keys say which it is.
fn name_class(config: &mut Value) {
    let class = CLASSLESS.iter().find(|(keys, _)| keys.iter().all(|key| config.get(key).is_some()));
    if let (Some((_, class)), None, Some(config)) =
        (class, config.get("architectures").cloned(), config.as_object_mut())
    {
        config.insert("architectures".to_owned(), json!([class]));
    }
}

/// The name of a decoder's tensor under each of [`PREFIXES`].
fn usual_names(name: &str) -> Vec<String> {
    PREFIXES.map(|prefix| format!("{prefix}{name}")).to_vec()
}

/// True for the name of a file, without folders.
pub fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
}
