//! From an ONNX file that the forge wrote back to the graph: the same nodes, and the very numbers.
//!
//! Files are untrusted input. The messages are read where they lie in the mapped file, as the parser of `rten_onnx`
//! does not end on some malformed ones; every part is within its file, and the graph is checked as one that a recipe
//! builds.

use std::collections::{HashMap, hash_map::Entry};
use std::fmt;
use std::ops::Range;
use std::path::{Component, Path};
use std::sync::Arc;

use crate::onnx::format::{ExternalData, NBits, suffix};
use half::f16;
use half::slice::HalfFloatSliceExt;
use qhx_base::artifacts::Mapped;
use qhx_base::{Error, ErrorKind, Result};
use qhx_types::DType;
use qhx_types::quantized::{BLOCK, QuantizedForm, QuantizedMut, unpack_nibbles};
use rten_onnx::onnx::{DataLocation, DataType};

use super::ir::{self, KEY, StoredGraph, StoredOrigin, StoredTensor, VERSION, Versioned};
use super::wire::Message;
use crate::builder::{NodeParts, rebuild};
use crate::graph::{Constant, Elem, Graph, Origin, Tensor};
use crate::super_blocks::{SUPER, Shifted, places, shifted};
use crate::weight::{RowSource, Storage, Weight, dequantize_blocks};

/// Largest metadata of a model that is read. A graph of ten thousand nodes has 2 MiB.
const MAX_METADATA: usize = 64 << 20;

/// Reads the graph of an ONNX file that the forge wrote. Its weights are read from the file and from those of external
/// data when it is lowered. No file may lie outside of `within`, links resolved.
///
/// # Errors
/// When the file is no such model, when its graph is none that the forge makes, or when numbers are missing.
pub fn read(path: &Path, within: &Path) -> Result<Graph> {
    read_with(path, &mut |path| Mapped::open_within(path, within))
}

/// Same as [`read`], with the files that `open` opens: the model, and those beside it, once each.
///
/// # Errors
/// Errors of [`read`], and of `open`.
pub fn read_with(path: &Path, open: &mut dyn FnMut(&Path) -> Result<Mapped>) -> Result<Graph> {
    let model = open(path)?;
    if model.is_empty() {
        let what = format!("{}: expected an ONNX model, found an empty file", path.display());
        return Err(Error::new(ErrorKind::Artifact, what).hint(
            "the download may be incomplete; compare the folder with the manifest's artifacts",
        ));
    }
    let mut files = Files { path, open, model, data: HashMap::new(), failed: None };
    let fail = |what: String| {
        Error::new(ErrorKind::Artifact, format!("{}: {what}", path.display()))
            .hint("the file is damaged, or was not made by `qhx forge`; download the bundle again")
    };
    let model = Message::model(files.model.clone()).map_err(fail)?;
    let Some(json) = model.metadata else {
        return Err(Error::new(
            ErrorKind::Artifact,
            format!("{}: an ONNX file without a graph of qhx (metadata {KEY:?})", path.display()),
        )
        .hint(
            "another program wrote it, or the file is cut off; make the bundle from its checkpoint with `qhx forge`, or \
             download it again",
        ));
    };
    let bad = |e: serde_json::Error| fail(format!("metadata {KEY:?}: {e}"));
    let bytes = files.model.clone();
    let json = bytes.bytes().get(json).unwrap_or_default();
    let Versioned { version } = serde_json::from_slice(json).map_err(bad)?;
    if version != VERSION {
        return Err(Error::new(
            ErrorKind::Artifact,
            format!(
                "{}: metadata {KEY:?} has version {version}, expected {VERSION}",
                path.display()
            ),
        )
        .hint("use the qhx that made the bundle, or a newer one"));
    }
    let stored: StoredGraph = serde_json::from_slice(json).map_err(bad)?;
    let tensors = stored.tensors.into_iter().map(|tensor| {
        let name = tensor.name.clone();
        files.tensor(tensor, &model.initializers).map_err(|why| match files.failed.take() {
            Some(error) => error,
            None => fail(format!("tensor {name:?}: {why}")),
        })
    });
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    let indices = |list: Vec<u32>| list.into_iter().map(|index| index as usize).collect::<Vec<_>>();
    let nodes = stored.nodes.into_iter().map(|node| NodeParts {
        name: node.name,
        op: node.op,
        inputs: indices(node.inputs),
        output: node.output as usize,
    });
    let outputs = indices(stored.outputs);
    rebuild(&stored.name, tensors, nodes.collect(), &outputs).map_err(|e| e.context(path.display()))
}

/// Numbers of an initializer, where they lie.
#[derive(Clone)]
pub struct Numbers {
    file: Mapped,
    range: Range<usize>,
}

impl Numbers {
    /// The mapped file.
    pub fn file(&self) -> &Mapped {
        &self.file
    }

    /// Place of the numbers in the file, which has it.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The numbers, little-endian and not always aligned.
    pub fn bytes(&self) -> &[u8] {
        self.file.bytes().get(self.range.clone()).unwrap_or_default()
    }

    /// The bytes of `count` elements of `size` bytes from `first` on.
    fn part(&self, first: usize, count: usize, size: usize) -> Option<&[u8]> {
        let start = first.checked_mul(size)?;
        self.bytes().get(start..start.checked_add(count.checked_mul(size)?)?)
    }
}

impl fmt::Debug for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.file.path().display(), self.range)
    }
}

/// An initializer of the model.
#[derive(Debug, Default)]
struct Initializer {
    data_type: i32,
    raw: Option<Range<usize>>,
    external: Option<ExternalData>,
}

type Initializers = HashMap<String, Initializer>;

/// The model's file and those beside it.
struct Files<'a> {
    path: &'a Path,
    open: &'a mut dyn FnMut(&Path) -> Result<Mapped>,
    model: Mapped,
    data: HashMap<String, Mapped>,
    /// The error of a file that was not opened.
    failed: Option<Error>,
}

impl Files<'_> {
    fn tensor(&mut self, tensor: StoredTensor, known: &Initializers) -> Result<Tensor, String> {
        let StoredTensor { name, elem, shape, origin } = tensor;
        let count = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let count = count.ok_or_else(|| format!("shape {shape:?} is too large"))?;
        let origin = match origin {
            StoredOrigin::Input => Origin::Input,
            // The builder counts.
            StoredOrigin::Node => Origin::Node(0),
            StoredOrigin::Constant if elem == Elem::I32 => {
                let numbers = self.numbers(known, &name, DataType::INT32, count, 4)?;
                let values = numbers.bytes().as_chunks::<4>().0.iter();
                Origin::Constant(Constant::Int(values.map(|b| i32::from_le_bytes(*b)).collect()))
            }
            StoredOrigin::Constant => {
                let numbers = self.numbers(known, &name, DataType::FLOAT, count, 4)?;
                let mut values = vec![0f32; count];
                floats(numbers.bytes(), &mut values);
                Origin::Constant(Constant::Float(values.into()))
            }
            StoredOrigin::Weight(weight) => {
                let rows = shape.first().copied().filter(|rows| *rows > 0);
                let rows = rows.ok_or_else(|| format!("shape {shape:?}"))?;
                Origin::Weight(self.weight(&name, weight, [rows, count / rows], known)?)
            }
        };
        Ok(Tensor { name, elem, shape, origin })
    }

    fn weight(
        &mut self,
        name: &str,
        stored: ir::StoredWeight,
        shape: [usize; 2],
        known: &Initializers,
    ) -> Result<Weight, String> {
        let ir::StoredWeight { storage: stored } = stored;
        let Some(storage) = stored.storage() else {
            return Err("integers of 4 or 8 bits were expected".to_owned());
        };
        let count = shape[0].saturating_mul(shape[1]);
        let numbers = match storage.form(shape[1]) {
            None => StoredWeight::Floats(self.reals(known, name, count)?),
            Some(form) => {
                let blocks = form.blocks(shape[1]).and_then(|n| n.checked_mul(shape[0]));
                let blocks = blocks.ok_or("the blocks do not divide its rows")?;
                let packed = NBits::packed(form, shape).filter(|_| storage != Storage::Int8);
                let pieces = packed.map_or(1, |(_, pieces)| pieces);
                let integers = match packed {
                    Some(_) => (suffix::NBITS, DataType::UINT8, count / 2),
                    None => (suffix::INT8, DataType::INT8, count),
                };
                let (suffix, data_type, bytes) = integers;
                let integers =
                    self.numbers(known, &format!("{name}{suffix}"), data_type, bytes, 1)?;
                let count = blocks.saturating_mul(pieces);
                let units = format!("{name}{}", suffix::UNITS);
                let (scales, offsets) = if form.offsets && known.contains_key(&units) {
                    if packed.is_none() || pieces > 1 || !shape[1].is_multiple_of(SUPER * BLOCK) {
                        return Err("super-blocks are of 8 blocks of 32 4-bit integers".to_owned());
                    }
                    let multiples = format!("{name}{}", suffix::MULTIPLES);
                    let units =
                        self.numbers(known, &units, DataType::FLOAT16, count / SUPER * 2, 2)?;
                    let multiples = self.numbers(
                        known,
                        &multiples,
                        DataType::UINT8,
                        count.saturating_mul(2),
                        1,
                    )?;
                    let part = |minima| Reals::Multiples {
                        units: units.clone(),
                        multiples: multiples.clone(),
                        minima,
                    };
                    (part(false), Some(part(true)))
                } else {
                    let part = |suffix: &str| format!("{name}{suffix}");
                    let scales = self.reals(known, &part(suffix::SCALE), count)?;
                    let offset = form.offsets.then(|| part(suffix::OFFSET));
                    let offsets = offset.map(|name| self.reals(known, &name, count)).transpose()?;
                    (scales, offsets)
                };
                let packed = packed.is_some();
                StoredWeight::Quantized { form, packed, pieces, integers, scales, offsets }
            }
        };
        let source = InitializerSource { name: name.to_owned(), shape, numbers };
        Ok(Weight::new(Arc::new(source), storage))
    }

    /// The `count` elements of an initializer of f32, or of one of f16 that a node makes f32.
    fn reals(&mut self, known: &Initializers, name: &str, count: usize) -> Result<Reals, String> {
        let half = format!("{name}{}", suffix::FLOAT16);
        Ok(match known.contains_key(&half) {
            true => Reals::Half(self.numbers(known, &half, DataType::FLOAT16, count, 2)?),
            false => Reals::Float(self.numbers(known, name, DataType::FLOAT, count, 4)?),
        })
    }

    /// The `count` elements of an initializer, of `size` bytes each.
    fn numbers(
        &mut self,
        known: &Initializers,
        name: &str,
        data_type: DataType,
        count: usize,
        size: usize,
    ) -> Result<Numbers, String> {
        let Some(found) = known.get(name) else { return Err(format!("no initializer {name:?}")) };
        if found.data_type != data_type.0 {
            let expected = data_type.0;
            return Err(format!(
                "initializer {name:?} has data type {}, expected {expected}",
                found.data_type
            ));
        }
        match (&found.external, &found.raw) {
            (Some(ExternalData { location, offset, length }), _) => {
                let bytes = count.checked_mul(size).map_or(u64::MAX, |bytes| bytes as u64);
                let length = length.unwrap_or(bytes);
                self.part(location, [*offset, length], count, size)
            }
            (None, Some(range)) if Some(range.len()) == count.checked_mul(size) => {
                Ok(Numbers { file: self.model.clone(), range: range.clone() })
            }
            (None, found) => {
                let found = found.as_ref().map_or(0, Range::len);
                Err(format!(
                    "initializer {name:?} has {found} bytes, expected {count} times {size}"
                ))
            }
        }
    }

    /// A part of a file of external data that has `count` elements of `size` bytes.
    fn part(
        &mut self,
        location: &str,
        [offset, length]: [u64; 2],
        count: usize,
        size: usize,
    ) -> Result<Numbers, String> {
        let file = match self.data.entry(location.to_owned()) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(new) => {
                let mut names = Path::new(location).components();
                let (Some(Component::Normal(_)), None) = (names.next(), names.next()) else {
                    return Err(format!("{location:?} is not the name of a file beside it"));
                };
                let file = (self.open)(&self.path.with_file_name(location)).map_err(|error| {
                    self.failed = Some(error);
                    String::new()
                });
                new.insert(file?).clone()
            }
        };
        let expected = count.checked_mul(size).filter(|bytes| *bytes as u64 == length);
        let start = usize::try_from(offset).ok();
        let range = start.zip(expected).and_then(|(start, n)| Some(start..start.checked_add(n)?));
        match range.filter(|range| range.end <= file.len()) {
            Some(range) => Ok(Numbers { file, range }),
            None => Err(format!(
                "{length} bytes at {offset} of {location:?}, which has {}; expected {count} times {size}",
                file.len()
            )),
        }
    }
}

/// Floats in files.
#[derive(Debug, Clone)]
pub enum Reals {
    /// As f16.
    Half(Numbers),
    /// As f32.
    Float(Numbers),
    /// Scales or minima of [`SuperBlocks`](crate::super_blocks::SuperBlocks).
    Multiples {
        /// f16 of each super-block.
        units: Numbers,
        /// Bytes of each.
        multiples: Numbers,
        /// True for the minima.
        minima: bool,
    },
}

impl Reals {
    /// Reads numbers from `first` on, as many as `out` has.
    fn read(&self, first: usize, out: &mut [f32]) -> Option<()> {
        match self {
            Self::Half(numbers) => {
                let pairs = numbers.part(first, out.len(), 2)?.as_chunks::<2>().0.iter();
                let half: Vec<f16> = pairs.map(|pair| f16::from_le_bytes(*pair)).collect();
                half.convert_to_f32_slice(out);
            }
            Self::Float(numbers) => floats(numbers.part(first, out.len(), 4)?, out),
            Self::Multiples { units, multiples, minima } => {
                let place = |block: usize| places(block, *minima);
                let (units, multiples) = (units.bytes().as_chunks::<2>().0, multiples.bytes());
                for (block, to) in out.iter_mut().enumerate() {
                    let [unit, multiple] = place(first.checked_add(block)?);
                    let unit = f16::from_le_bytes(*units.get(unit)?).to_f32();
                    *to = unit * f32::from(*multiples.get(multiple)?);
                }
            }
        }
        Some(())
    }
}

/// A weight's numbers in files.
#[derive(Debug, Clone)]
pub enum StoredWeight {
    /// Row-major values.
    Floats(Reals),
    /// Integers, and what they are multiplied with and shifted by.
    Quantized {
        /// Bits, block and offsets, as the weight has them.
        form: QuantizedForm,
        /// True for two integers of 4 bits a byte, as [`pack_nibbles`](qhx_types::quantized::pack_nibbles) packs them:
        /// then a block of the file has 32 columns. Else an integer is a byte.
        packed: bool,
        /// Scales, and offsets, that the file has for one block of the form, all equal.
        pieces: usize,
        /// Row-major integers.
        integers: Numbers,
        /// A scale for each block of the file, row by row.
        scales: Reals,
        /// The same of the offsets, in steps of the scales; minima where scales are [`Reals::Multiples`].
        offsets: Option<Reals>,
    },
}

/// A weight in the initializers of a model.
#[derive(Debug)]
struct InitializerSource {
    name: String,
    shape: [usize; 2],
    numbers: StoredWeight,
}

impl InitializerSource {
    fn short(&self) -> Error {
        Error::new(ErrorKind::Internal, format!("tensor {}: rows beyond its end", self.name))
    }
}

impl RowSource for InitializerSource {
    fn name(&self) -> &str {
        &self.name
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn stored_dtype(&self) -> DType {
        match self.numbers {
            StoredWeight::Floats(Reals::Half(_)) => DType::F16,
            _ => DType::F32,
        }
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let start = first.checked_mul(self.shape[1]).ok_or_else(|| self.short())?;
        match &self.numbers {
            StoredWeight::Floats(reals) => reals.read(start, out).ok_or_else(|| self.short()),
            StoredWeight::Quantized { .. } => dequantize_blocks(self, first, out),
        }
    }

    fn stored(&self) -> Option<&StoredWeight> {
        Some(&self.numbers)
    }

    fn block_form(&self) -> Option<QuantizedForm> {
        match &self.numbers {
            StoredWeight::Quantized { form, .. } => Some(*form),
            _ => None,
        }
    }

    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        let StoredWeight::Quantized { form, packed, pieces, integers, scales, offsets, .. } =
            &self.numbers
        else {
            return Err(self.short());
        };
        let read = || {
            let start = first.checked_mul(self.shape[1])?;
            let block = start.checked_div(form.block)?;
            match packed {
                true => {
                    let bytes = integers.part(start / 2, out.values.len().div_ceil(2), 1)?;
                    unpack_nibbles(bytes, out.values);
                }
                false => {
                    let bytes = integers.part(start, out.values.len(), 1)?;
                    out.values.copy_from_slice(bytemuck::cast_slice(bytes));
                }
            }
            let mut all = vec![0f32; out.scales.len().checked_mul(*pieces)?];
            let QuantizedMut { scales: to_scales, offsets: to_offsets, .. } = out;
            let parts = [(Some(scales), &mut *to_scales), (offsets.as_ref(), &mut *to_offsets)];
            for (stored, to) in parts {
                let Some(stored) = stored else { continue };
                stored.read(block.checked_mul(*pieces)?, &mut all)?;
                let firsts = all.iter().step_by((*pieces).max(1));
                to.iter_mut().zip(firsts).for_each(|(to, number)| *to = *number);
            }
            if let Reals::Multiples { .. } = scales {
                for (scale, minimum) in to_scales.iter_mut().zip(to_offsets) {
                    let Shifted { scale: to, offset, .. } = shifted(*scale, *minimum);
                    (*scale, *minimum) = (to, offset);
                }
            }
            Some(())
        };
        read().ok_or_else(|| self.short())
    }
}

/// Little-endian numbers, which need not be aligned.
fn floats(bytes: &[u8], out: &mut [f32]) {
    let numbers = bytes.as_chunks::<4>().0;
    out.iter_mut().zip(numbers).for_each(|(out, bytes)| *out = f32::from_le_bytes(*bytes));
}

/// Content read from a model: initializers by name, and the position of the JSON.
struct Model {
    initializers: Initializers,
    metadata: Option<Range<usize>>,
}

// Field numbers of <https://github.com/onnx/onnx/blob/main/onnx/onnx.proto>.
impl Message {
    fn model(file: Mapped) -> Result<Model, String> {
        let mut message = Self::new(file);
        let mut model = Model { initializers: HashMap::new(), metadata: None };
        while let Some(field) = message.next_field()? {
            match field.number {
                7 => message.within(field.bytes).graph(&mut model.initializers)?,
                14 => {
                    let [key, value] = message.within(field.bytes).entry()?;
                    if message.text(key)? == KEY {
                        if value.len() > MAX_METADATA {
                            let mib = MAX_METADATA >> 20;
                            return Err(format!("metadata {KEY:?} is larger than {mib} MiB"));
                        }
                        model.metadata = Some(value);
                    }
                }
                _ => {}
            }
        }
        Ok(model)
    }

    fn graph(mut self, initializers: &mut Initializers) -> Result<(), String> {
        while let Some(field) = self.next_field()? {
            if field.number == 5 {
                let (name, initializer) = self.within(field.bytes).initializer()?;
                if initializers.insert(name.clone(), initializer).is_some() {
                    return Err(format!("two initializers are called {name:?}"));
                }
            }
        }
        Ok(())
    }

    fn initializer(mut self) -> Result<(String, Initializer), String> {
        let mut name = String::new();
        let mut found = Initializer::default();
        let mut external = false;
        let mut entries = Vec::new();
        while let Some(field) = self.next_field()? {
            match field.number {
                2 => found.data_type = i32::try_from(field.integer).unwrap_or(-1),
                8 => self.text(field.bytes)?.clone_into(&mut name),
                9 => found.raw = Some(field.bytes),
                13 => {
                    let [key, value] = self.within(field.bytes).entry()?;
                    entries.push((self.text(key)?.to_owned(), self.text(value)?.to_owned()));
                }
                14 => {
                    external = field.integer == u64::from(DataLocation::EXTERNAL.0.unsigned_abs())
                }
                _ => {}
            }
        }
        if external {
            let value = |key: &str| {
                entries.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
            };
            let place = ExternalData::of(value);
            found.external =
                Some(place.ok_or_else(|| format!("initializer {name:?} lies nowhere"))?);
        }
        Ok((name, found))
    }

    /// Key and value.
    fn entry(mut self) -> Result<[Range<usize>; 2], String> {
        let mut entry = [0..0, 0..0];
        while let Some(field) = self.next_field()? {
            match field.number {
                1 => entry[0] = field.bytes,
                2 => entry[1] = field.bytes,
                _ => {}
            }
        }
        Ok(entry)
    }
}
