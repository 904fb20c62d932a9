//! A GGUF file of llama.cpp as a checkpoint.

mod config;
mod file;
mod form;
mod hybrid;
mod joined;
mod names;
mod parts;
mod tokenizer;
mod tower;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};

use super::Imported;
use crate::artifact;
use file::{File, Info};
use form::Form;
use names::{Architecture, Named, Order, Values};
use parts::Part;
use qhx_base::artifacts::Mapped;
use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::quantize::{BLOCK, QuantizedForm, QuantizedMut};
use qhx_graph::weight::RowSource;
use qhx_types::DType;
pub(crate) use tokenizer::Embedded;
pub(crate) use tower::{Tower, beside};

/// Keys behind `general.sampling.`, and their names in a `generation_config.json`.
const SAMPLING: [(&str, &str); 5] = [
    ("temp", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("penalty_repeat", "repetition_penalty"),
];

/// Contents of a file, under the names of a Hugging Face checkpoint.
#[derive(Debug)]
pub(crate) struct Model {
    pub tensors: BTreeMap<String, Arc<dyn Imported>>,
    /// The file, or all parts of it.
    pub files: Vec<PathBuf>,
    pub inside: Inside,
}

/// Contents of a file beside its tensors.
#[derive(Debug)]
pub struct Inside {
    file: File,
    architecture: Architecture,
    map: Mapped,
    /// The folder that was named for what is not in the file.
    folder: Option<PathBuf>,
}

impl Model {
    /// Maps the file, and the other parts where it is one of several, and reads their tables. `folder` is the one that
    /// was named for what is not in the file.
    pub fn open(path: &Path, folder: Option<&Path>) -> Result<Self> {
        let parts = parts::open(path)?;
        let Some(Part { file, map, .. }) = parts.first() else {
            return Err(Error::new(ErrorKind::Internal, "a file is no part of itself"));
        };
        let found = file.text("general.architecture").unwrap_or_default();
        let Some(architecture) = Architecture::of(found) else {
            let what = format_args!(
                "models of llama.cpp's architecture {found:?} are not read, expected {}",
                Architecture::NAMES
            );
            let hint = match found {
                "clip" => {
                    "this is the tower of a model; name the file of its decoder, and this one with --mmproj"
                }
                _ => "make the bundle from the Hugging Face checkpoint",
            };
            return Err(artifact(path, what).hint(hint));
        };
        let mut file = file.clone();
        for part in parts.iter().skip(1) {
            file.tensors.extend(part.file.tensors.iter().cloned());
        }
        let folder = folder.map(Path::to_owned);
        let inside = Inside { file, architecture, map: map.clone(), folder };
        let mut tensors: BTreeMap<_, Arc<dyn Imported>> = BTreeMap::new();
        for Part { map, file, .. } in &parts {
            for info in &file.tensors {
                for (name, tensor) in inside.named(map, info)? {
                    if tensors.insert(name.clone(), Arc::new(tensor)).is_some() {
                        let what = format_args!("the tensor {name} is there twice");
                        return Err(artifact(map.path(), what));
                    }
                }
            }
        }
        let files = parts.iter().map(|part| part.map.path().to_owned()).collect();
        Ok(Self { tensors, files, inside })
    }
}

impl Inside {
    /// The tensors of the Hugging Face checkpoint that a tensor is. One that no table has keeps its name, so that it is
    /// not left out without a word.
    fn named(&self, map: &Mapped, info: &Info) -> Result<Vec<(String, Tensor)>> {
        let tensor = Tensor::plain(map, info);
        match self.architecture.tensor(&info.name, file::layers(&self.file, self.architecture)) {
            None => Ok(vec![(info.name.clone(), tensor)]),
            Some(Named::Derived) => Ok(Vec::new()),
            Some(Named::Experts(before, after)) => {
                let [count, rest @ ..] = &*info.shape else { return Ok(Vec::new()) };
                let len = tensor.bytes.len() / (*count).max(1);
                let one = |expert: usize| {
                    let start = tensor.bytes.start + expert * len;
                    let bytes = start..start + len;
                    let name = format!("{before}{expert}{after}");
                    (name, Tensor { bytes, shape: Arc::from(rest), ..tensor.clone() })
                };
                Ok((0..*count).map(one).collect())
            }
            Some(Named::Whole(name, change)) => {
                let first = info.shape.first().copied().unwrap_or(0);
                let last = info.shape.last().copied().unwrap_or(0);
                let rows = self.reordered(change.rows, first, &info.name)?;
                let columns = self.reordered(change.columns, last, &info.name)?;
                // The file has a list of one where the checkpoint's names of this kind have no dimension more.
                let shape = Arc::from(change.shape.undo(info.shape.clone()));
                Ok(vec![(name, Tensor { rows, columns, values: change.values, shape, ..tensor })])
            }
        }
    }

    /// Order of `count` rows or columns of the tensor `name`. Errors when they are not heads.
    fn reordered(&self, order: Order, count: usize, name: &str) -> Result<Reordered> {
        let size = |key: &str| self.file.size(&self.architecture.key(key)).unwrap_or(0);
        let fail = |what: String| {
            let what = format_args!("tensor {name} has {count} rows or columns, expected {what}");
            artifact(self.map.path(), what)
                .hint("the file is damaged, or made by a converter that is not llama.cpp's")
        };
        match order {
            Order::Same => Ok(Reordered::Same),
            Order::Rotated(key) => {
                // Without a number for keys and values of their own, they have as many as queries.
                let keys = [key, "attention.head_count"].map(|key| self.architecture.key(key));
                let heads = keys.iter().find_map(|key| config::largest(&self.file, &self.map, key));
                let heads = heads.unwrap_or(0);
                if heads == 0 || !count.is_multiple_of(heads.saturating_mul(2)) {
                    let key = self.architecture.key(key);
                    return Err(fail(format!("pairs for each of {heads} heads ({key})")));
                }
                Ok(Reordered::Rotated { dim: count / heads })
            }
            Order::ValueHeads { after_keys, single } => {
                let (groups, heads) = (size("ssm.group_count"), size("ssm.time_step_rank"));
                let keys = groups.saturating_mul(size("ssm.state_size")).saturating_mul(2);
                let first = if after_keys { keys } else { 0 };
                let dim = if single { 1 } else { size("ssm.inner_size") / heads.max(1) };
                let whole = heads.checked_mul(dim).and_then(|values| values.checked_add(first));
                if groups == 0 || dim == 0 || !heads.is_multiple_of(groups) || whole != Some(count)
                {
                    let before =
                        if after_keys { format!("{keys} of keys and ") } else { String::new() };
                    return Err(fail(format!(
                        "{before}{heads} heads of {dim} over {groups} groups ({})",
                        self.architecture.key("ssm.*")
                    )));
                }
                Ok(Reordered::Tiled { first, groups, each: heads / groups, dim })
            }
        }
    }
}

impl Inside {
    /// The file, for messages.
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// A `config.json` from the metadata. Errors when that does not say all that a recipe has to know.
    pub fn config(&self) -> Result<Json> {
        config::of(&self.file, &self.map, self.architecture)
            .map_err(|what| self.fail(&what, "config.json"))
    }

    /// Sampling of the file, as a `generation_config.json`; null where it has none.
    pub fn sampling(&self) -> Json {
        let number = |(theirs, ours): (&str, &str)| {
            let number = self.file.number(&format!("general.sampling.{theirs}"))?;
            let number =
                if ours == "top_k" { json!(number as i64) } else { json!(file::shortest(number)) };
            Some((ours.to_owned(), number))
        };
        let found: Map<_, _> = SAMPLING.into_iter().filter_map(number).collect();
        if found.is_empty() { Json::Null } else { Json::Object(found) }
    }

    /// True of a model that needs its tower, which is in a file of its own.
    pub fn needs_tower(&self) -> bool {
        matches!(self.architecture, Architecture::Qwen2Vl | Architecture::Qwen3Vl)
    }

    /// True of a model that may have one: by its architecture.
    pub fn may_have_tower(&self) -> bool {
        self.needs_tower() || self.architecture == Architecture::Qwen35
    }

    /// Puts a tower's configuration into that of [`Self::config`], with the tokens around images that the tokenizer
    /// has.
    pub fn add_tower(&self, config: &mut Json, tower: Json) {
        let tokens = self.file.texts(&self.map, "tokenizer.ggml.tokens").unwrap_or_default();
        for (key, token) in [
            ("image_token_id", "<|image_pad|>"),
            ("video_token_id", "<|video_pad|>"),
            ("vision_start_token_id", "<|vision_start|>"),
            ("vision_end_token_id", "<|vision_end|>"),
        ] {
            if let Some(id) = tokens.iter().position(|found| *found == token.as_bytes()) {
                config[key] = Json::from(id);
            }
        }
        config["vision_config"] = tower;
    }

    /// The tokenizer; none where there is none. Errors when it is of a kind that is not read.
    pub(crate) fn tokenizer(&self) -> Result<Option<Embedded>> {
        tokenizer::of(&self.file, &self.map).map_err(|what| self.fail(&what, "tokenizer.json"))
    }

    /// The model's name in the metadata: `general.name`, or what it is made of; none where there is none.
    pub fn model_name(&self) -> Option<String> {
        let text = |key: &str| self.file.text(&format!("general.{key}")).filter(|t| !t.is_empty());
        text("name").map(str::to_owned).or_else(|| {
            let parts = [text("basename"), text("size_label"), text("finetune")];
            text("basename")?;
            Some(parts.into_iter().flatten().collect::<Vec<_>>().join("-"))
        })
    }

    /// The way to pool vectors that the file declares, by its name in `config.json`; none where it declares none.
    pub fn pooling(&self) -> Result<Option<&'static str>> {
        config::pooling(&self.file, self.architecture).map_err(|what| {
            artifact(self.map.path(), what).hint(
                "make vectors with another model, or name the way: --recipe-option pooling=last",
            )
        })
    }

    /// True where there is a chat template.
    pub fn has_chat_template(&self) -> bool {
        matches!(tokenizer::template(&self.file, &self.map), Ok(Some(_)))
    }

    fn fail(&self, what: &str, instead: &str) -> Error {
        artifact(self.map.path(), what).hint(self.wanted(instead))
    }

    /// Hint that says where to put a file of the Hugging Face checkpoint.
    pub fn wanted(&self, name: &str) -> String {
        let place = match &self.folder {
            Some(folder) => format!("into {}", folder.display()),
            None => "beside the file, or name its folder (`--tokenizer`)".to_owned(),
        };
        format!("put the {name} of the model's Hugging Face checkpoint {place}")
    }
}

/// A tensor of the file.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    map: Mapped,
    bytes: Range<usize>,
    form: Form,
    shape: Arc<[usize]>,
    rows: Reordered,
    columns: Reordered,
    values: Values,
}

/// An order that is not the Hugging Face checkpoint's: see [`Order`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reordered {
    Same,
    /// Heads of `dim` elements.
    Rotated {
        dim: usize,
    },
    /// From `first` on, `each` heads of `dim` elements in each of the groups.
    Tiled {
        first: usize,
        groups: usize,
        each: usize,
        dim: usize,
    },
}

impl Reordered {
    /// Position in the file of the element `at` of the Hugging Face checkpoint.
    fn place(self, at: usize) -> usize {
        match self {
            Self::Same => at,
            // There a head's rows are its first half and its second half; here they alternate.
            Self::Rotated { dim } => {
                let (head, within) = (at / dim, at % dim);
                let half = (dim / 2).max(1);
                head * dim + within % half * 2 + within / half
            }
            Self::Tiled { first, groups, each, dim } => match at.checked_sub(first) {
                None => at,
                Some(at) => {
                    let (head, within) = (at / dim, at % dim);
                    let (group, nth) = (head / each, head % each);
                    first + (nth * groups + group) * dim + within
                }
            },
        }
    }

    /// Puts the elements of a row of the file, each `size` neighbours of which are one here, into the order of the
    /// checkpoint. False where they do not stay together.
    fn undo<T: Copy>(self, row: &mut [T], size: usize) -> bool {
        match self {
            Self::Same => true,
            Self::Tiled { first, dim, .. } if dim % size == 0 && first % size == 0 => {
                let stored = row.to_vec();
                for (at, value) in row.iter_mut().enumerate() {
                    let place = self.place(at * size) / size;
                    *value = stored.get(place).copied().unwrap_or(*value);
                }
                true
            }
            _ => false,
        }
    }
}

impl Tensor {
    /// Tensor as it is stored in the file.
    fn plain(map: &Mapped, info: &Info) -> Self {
        Self {
            map: map.clone(),
            bytes: info.bytes.clone(),
            form: info.form,
            shape: Arc::from(&*info.shape),
            rows: Reordered::Same,
            columns: Reordered::Same,
            values: Values::Same,
        }
    }

    /// Rows and columns in the file.
    fn rows(&self) -> [usize; 2] {
        match &*self.shape {
            // A vector is a matrix of one column, so that its elements can be reordered as rows are.
            [len] if self.form.unit().0 == 1 => [*len, 1],
            [len] => [1, *len],
            [rest @ .., cols] => [rest.iter().product(), *cols],
            [] => [0, 0],
        }
    }
}

impl Imported for Tensor {
    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn form(&self) -> &'static str {
        self.form.name()
    }

    fn has_quantized_weights(&self) -> bool {
        self.form.block_form().is_some()
    }

    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Arc<dyn RowSource>> {
        let [rows, cols] = self.rows();
        let Some(viewed) = shape[0].checked_mul(shape[1]).filter(|n| *n == rows * cols) else {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("tensor {name}: {:?} seen as {shape:?}", self.shape),
            ));
        };
        let whole = shape == [rows, cols] && self.values == Values::Same && viewed > 0;
        Ok(Arc::new(Matrix { name: name.to_owned(), tensor: self.clone(), shape, cols, whole }))
    }
}

/// A tensor seen as a matrix.
#[derive(Debug)]
struct Matrix {
    name: String,
    tensor: Tensor,
    shape: [usize; 2],
    /// Elements of a row in the file; the matrix may have other rows.
    cols: usize,
    /// True where it hands out its quantized weights.
    whole: bool,
}

impl Matrix {
    /// True where blocks are the same in the order of the checkpoint.
    fn keeps_blocks(&self) -> bool {
        match self.tensor.columns {
            Reordered::Same => true,
            Reordered::Tiled { dim, .. } => dim.is_multiple_of(BLOCK),
            Reordered::Rotated { .. } => false,
        }
    }

    /// The bytes of a row of the file, counted in the order of the Hugging Face checkpoint.
    fn row(&self, row: usize) -> Result<&[u8]> {
        let Tensor { map, bytes, form, rows, .. } = &self.tensor;
        let (elements, size) = form.unit();
        let len = self.cols / elements * size;
        let place = Some(rows.place(row));
        let range = place
            .and_then(|place| place.checked_mul(len)?.checked_add(bytes.start))
            .and_then(|start| Some(start..start.checked_add(len)?))
            .filter(|range| range.end <= bytes.end);
        range.and_then(|range| map.bytes().get(range)).ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                format!("tensor {}: row {row} is out of bounds", self.name),
            )
        })
    }
}

impl RowSource for Matrix {
    fn name(&self) -> &str {
        &self.name
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn stored_dtype(&self) -> DType {
        match self.tensor.form {
            Form::F16 => DType::F16,
            Form::Bf16 => DType::Bf16,
            Form::F32 => DType::F32,
            _ => DType::I8,
        }
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let cols = self.cols.max(1);
        let first = first * self.shape[1] / cols;
        for (row, out) in out.chunks_exact_mut(cols).enumerate() {
            self.tensor.form.floats(self.row(first + row)?, out);
            self.tensor.columns.undo(out, 1);
        }
        match self.tensor.values {
            Values::Same => {}
            Values::PlusOne => out.iter_mut().for_each(|value| *value -= 1.0),
            Values::MinusExp => out.iter_mut().for_each(|value| *value = (-*value).ln()),
        }
        Ok(())
    }

    fn block_form(&self) -> Option<QuantizedForm> {
        self.tensor.form.block_form().filter(|_| self.whole && self.keeps_blocks())
    }

    fn nearest_form(&self) -> Option<QuantizedForm> {
        self.tensor.form.nearest_form().filter(|_| self.whole)
    }

    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        let QuantizedMut { form, values, scales, offsets } = out;
        let blocks = form.blocks(self.cols).unwrap_or(1);
        let mut offsets = offsets.chunks_exact_mut(blocks);
        let rows = values.chunks_exact_mut(self.cols.max(1)).zip(scales.chunks_exact_mut(blocks));
        for (row, (values, scales)) in rows.enumerate() {
            let offsets = offsets.next().unwrap_or_default();
            let mut out = QuantizedMut { form, values, scales, offsets };
            self.tensor.form.unpack(self.row(first + row)?, out.reborrow());
            let QuantizedMut { values, scales, offsets, .. } = out;
            self.tensor.columns.undo(values, 1);
            self.tensor.columns.undo(scales, form.block);
            self.tensor.columns.undo(offsets, form.block);
        }
        Ok(())
    }
}
