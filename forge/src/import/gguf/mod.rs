//! A GGUF file of llama.cpp as a checkpoint.

mod config;
mod file;
mod form;
mod names;
mod tokenizer;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use qhx_core::artifacts::Mapped;
use qhx_core::{DType, Error, ErrorKind, Result};
use serde_json::Value as Json;

use super::Imported;
use crate::quantize::{QuantizedForm, QuantizedMut};
use crate::weight::RowSource;
use file::File;
use form::Form;
use names::{Architecture, Change};
pub(crate) use tokenizer::Embedded;

/// What a file holds, under the names of a Hugging Face checkpoint.
#[derive(Debug)]
pub(crate) struct Model {
    pub tensors: BTreeMap<String, Imported>,
    pub inside: Inside,
}

/// What a file holds beside its tensors.
#[derive(Debug)]
pub(crate) struct Inside {
    file: File,
    architecture: Architecture,
    map: Mapped,
}

impl Model {
    /// Maps the file and reads its tables.
    pub fn open(path: &Path) -> Result<Self> {
        let map = Mapped::open(path)?;
        let file = File::read(&map)?;
        let fail = |what: String, hint: &str| {
            Error::new(ErrorKind::Artifact, format!("{}: {what}", path.display()))
                .hint(hint.to_owned())
        };
        if file.number("split.count").is_some_and(|parts| parts > 1.0) {
            return Err(fail(
                "one of several parts of a model".to_owned(),
                "put them together: `llama-gguf-split --merge FIRST-PART model.gguf`",
            ));
        }
        let found = file.text("general.architecture").unwrap_or_default();
        let Some(architecture) = Architecture::of(found) else {
            return Err(fail(
                format!(
                    "models of llama.cpp's architecture {found:?} are not read, expected {}",
                    Architecture::NAMES
                ),
                "make the bundle from the Hugging Face checkpoint",
            ));
        };
        let mut tensors = BTreeMap::new();
        for info in &file.tensors {
            let Some((name, change)) = architecture.tensor(&info.name) else { continue };
            let heads = match change {
                Change::Rotated(key) => {
                    // Without a number for keys and values of their own, they have as many as queries.
                    let keys = [key, "attention.head_count"].map(|key| architecture.key(key));
                    let heads = keys.iter().find_map(|key| file.size(key)).unwrap_or(0);
                    let rows = info.shape.first().copied().unwrap_or(0);
                    if heads == 0 || !rows.is_multiple_of(heads.saturating_mul(2)) {
                        return Err(fail(
                            format!(
                                "tensor {} has {rows} rows, expected pairs for each of {heads} heads ({})",
                                info.name,
                                architecture.key(key)
                            ),
                            "the file is damaged, or made by a converter that is not llama.cpp's",
                        ));
                    }
                    Some(heads)
                }
                _ => None,
            };
            let tensor = Tensor {
                map: map.clone(),
                bytes: info.bytes.clone(),
                form: info.form,
                shape: Arc::from(&*info.shape),
                heads,
                less: if change == Change::PlusOne { 1.0 } else { 0.0 },
            };
            tensors.insert(name, Imported::Gguf(tensor));
        }
        Ok(Self { tensors, inside: Inside { file, architecture, map } })
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

    /// The tokenizer; none where there is none. Errors when it is of a kind that is not read.
    pub fn tokenizer(&self) -> Result<Option<Embedded>> {
        tokenizer::of(&self.file, &self.map).map_err(|what| self.fail(&what, "tokenizer.json"))
    }

    /// True where there is a chat template.
    pub fn has_chat_template(&self) -> bool {
        matches!(tokenizer::template(&self.file, &self.map), Ok(Some(_)))
    }

    fn fail(&self, what: &str, instead: &str) -> Error {
        let what = format!("{}: {what}", self.map.path().display());
        Error::new(ErrorKind::Artifact, what).hint(format!(
            "put the {instead} of the model's Hugging Face checkpoint beside the file, or name its folder (`--tokenizer`)"
        ))
    }
}

/// A tensor of the file.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    map: Mapped,
    bytes: Range<usize>,
    form: Form,
    shape: Arc<[usize]>,
    /// The rows are those of this number of heads, reordered by llama.cpp: see [`Change::Rotated`].
    heads: Option<usize>,
    /// Taken off each value.
    less: f32,
}

impl Tensor {
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub fn form(&self) -> &'static str {
        self.form.name()
    }

    pub fn has_quantized_weights(&self) -> bool {
        self.form.block_form().is_some()
    }

    pub fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Arc<dyn RowSource>> {
        // A vector is a matrix of one column, so that its elements can be reordered as rows are.
        let (rows, cols) = match &*self.shape {
            [len] if self.form.unit().0 == 1 => (*len, 1),
            [len] => (1, *len),
            [rest @ .., cols] => (rest.iter().product(), *cols),
            [] => (0, 0),
        };
        let Some(viewed) = shape[0].checked_mul(shape[1]).filter(|n| *n == rows * cols) else {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("tensor {name}: {:?} seen as {shape:?}", self.shape),
            ));
        };
        let whole = shape == [rows, cols] && self.less == 0.0 && viewed > 0;
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
    /// The bytes of a row of the file, counted in the order of the Hugging Face checkpoint.
    fn row(&self, row: usize) -> Result<&[u8]> {
        let Tensor { map, bytes, form, heads, .. } = &self.tensor;
        let (elements, size) = form.unit();
        let len = self.cols / elements * size;
        let place = match heads {
            None => Some(row),
            // There a head's rows are its first half and its second half; here they alternate.
            Some(heads) => {
                let rows = bytes.len() / len.max(1);
                let dim = (rows / heads).max(1);
                let (head, within) = (row / dim, row % dim);
                let half = (dim / 2).max(1);
                Some(head * dim + within % half * 2 + within / half)
            }
        };
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
            _ => DType::F32,
        }
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let cols = self.cols.max(1);
        let first = first * self.shape[1] / cols;
        for (row, out) in out.chunks_exact_mut(cols).enumerate() {
            self.tensor.form.floats(self.row(first + row)?, out);
        }
        let less = self.tensor.less;
        if less != 0.0 {
            out.iter_mut().for_each(|value| *value -= less);
        }
        Ok(())
    }

    fn block_form(&self) -> Option<QuantizedForm> {
        self.tensor.form.block_form().filter(|_| self.whole)
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
            let out = QuantizedMut { form, values, scales, offsets };
            self.tensor.form.unpack(self.row(first + row)?, out);
        }
        Ok(())
    }
}
