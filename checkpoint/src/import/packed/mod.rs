//! Linear layers that another program quantized, in safetensors: integers or codes, zero points and scales are tensors
//! of their own. `quantization_config` of `config.json` says of which program.
//!
//! | `quant_method` | read by | a weight becomes |
//! |---|---|---|
//! | `gptq`, `awq` | [`qweight`] | integers of 2, 3, 4 or 8 bits, groups of inputs |
//! | `compressed-tensors` | [`compressed`] | integers of up to 8 bits, or floating point of 8 bits |
//! | `fp8`, `fbgemm_fp8` | [`fp8`] | floating point of 8 bits |
//! | `bitsandbytes` | [`bitsandbytes`] | NF4, FP4, or int8 |
//! | `mxfp4` | [`mxfp4`] | integers of 8 bits that its values are, doubled |

mod bitsandbytes;
mod codes;
mod compressed;
mod declared;
mod fields;
mod fp8;
mod integers;
mod marlin;
mod mxfp4;
mod part;
mod qweight;
mod scheme;
mod targets;

use std::fmt;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::weight::{Reordered, RowSource};
use qhx_types::DType;
use qhx_types::quantized::{QuantizedForm, QuantizedMut};
use safetensors::Dtype;

use super::Imported;
pub(crate) use part::Part;
pub(crate) use scheme::Scheme;

/// Element types of scales.
const SCALES: [Dtype; 3] = [Dtype::F16, Dtype::BF16, Dtype::F32];

/// The ends of the names of scales of quantized caches, which are f16 here.
const OF_CACHES: [&str; 4] = [".k_scale", ".v_scale", ".q_scale", ".prob_output_scale"];

/// A message about what does not fit.
type Read<T> = std::result::Result<T, String>;

/// A layer's weight as its program stores it.
trait Layer: fmt::Debug + Send + Sync {
    /// The form, for messages.
    fn name(&self) -> &'static str;

    /// Outputs, inputs.
    fn shape(&self) -> [usize; 2];

    /// True where graphs can hold its integers, if need be with inputs in another order.
    fn has_integers(&self) -> bool {
        false
    }

    /// See [`RowSource::block_form`].
    fn block_form(&self) -> Option<QuantizedForm> {
        None
    }

    /// See [`RowSource::nearest_form`].
    fn nearest_form(&self) -> Option<QuantizedForm>;

    /// See [`RowSource::read_f32`]; `matrix` is the one over this layer.
    fn read_f32(&self, matrix: &Matrix, first: usize, out: &mut [f32]) -> Result<()>;

    /// See [`RowSource::read_blocks`]; of a layer whose inputs are in no order of groups, too.
    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        let _ = (first, out);
        let what = format!("{}: the checkpoint holds no integers of it", self.name());
        Err(Error::new(ErrorKind::Internal, what))
    }

    /// See [`RowSource::reordered`]; `matrix` is the one over this layer.
    fn reordered(&self, matrix: &Matrix) -> Option<Reordered> {
        let _ = matrix;
        None
    }
}

/// A quantized layer's weight.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    layer: Arc<dyn Layer>,
    /// Outputs and inputs, or a stack of such.
    shape: Arc<[usize]>,
}

/// A weight that was found, under the name that it has unquantized.
struct Found {
    name: String,
    tensor: Tensor,
    /// The tensors of the file that it is made of, and those that only concern activations.
    parts: Vec<String>,
}

impl Tensor {
    fn new(layer: impl Layer + 'static) -> Self {
        let shape = Arc::from(layer.shape());
        Self { layer: Arc::new(layer), shape }
    }
}

impl Imported for Tensor {
    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn form(&self) -> &'static str {
        self.layer.name()
    }

    fn has_quantized_weights(&self) -> bool {
        self.layer.has_integers()
    }

    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Arc<dyn RowSource>> {
        if shape != self.layer.shape() {
            return Err(Error::new(
                ErrorKind::Artifact,
                format!(
                    "tensor {name} is quantized ({}) as {:?}, and the recipe reads it as {shape:?}",
                    self.form(),
                    self.layer.shape()
                ),
            )
            .hint("take a checkpoint in which only linear layers are quantized"));
        }
        Ok(Arc::new(Matrix { name: Arc::from(name), layer: Arc::clone(&self.layer) }))
    }
}

/// The tensors of a checkpoint, by name.
struct Files<'a> {
    names: Vec<&'a str>,
    find: &'a dyn Fn(&str) -> Option<Part>,
}

impl Files<'_> {
    fn part(&self, name: &str) -> Option<Part> {
        (self.find)(name)
    }

    /// The names before the end `end` of all tensors that have it.
    fn before(&self, end: &str) -> impl Iterator<Item = &str> {
        self.names.iter().filter_map(move |name| name.strip_suffix(end))
    }

    /// A tensor that has to be there, with one of these element types.
    fn need(&self, name: &str, because: &str, dtypes: &[Dtype]) -> Read<Part> {
        let found = self.part(name).ok_or_else(|| format!("{because} is there without {name}"))?;
        match dtypes.contains(&found.dtype) {
            true => Ok(found),
            false => Err(format!("tensor {name} is {:?}, expected one of {dtypes:?}", found.dtype)),
        }
    }

    /// Same as [`Files::need`], for a matrix.
    fn need_matrix(&self, name: &str, because: &str, dtypes: &[Dtype]) -> Read<(Part, [usize; 2])> {
        let part = self.need(name, because, dtypes)?;
        match *part.shape {
            [rows, cols] => Ok((part, [rows, cols])),
            _ => Err(format!("tensor {name} has the shape {:?}, expected a matrix", part.shape)),
        }
    }

    /// Returns the given names that have a tensor.
    fn there(&self, names: impl IntoIterator<Item = String>) -> Vec<String> {
        names.into_iter().filter(|name| self.part(name).is_some()).collect()
    }
}

/// Errors when a tensor has another shape than these sizes say.
fn same_shape(name: &str, part: &Part, expected: &[usize], sizes: &str) -> Read<()> {
    if part.shape == expected {
        return Ok(());
    }
    Err(format!("tensor {name} has the shape {:?}, expected {expected:?}: {sizes}", part.shape))
}

/// Quantized layers of a checkpoint.
#[derive(Debug)]
pub(crate) struct Gathered {
    /// Under the names of their weights.
    pub weights: Vec<(String, Tensor)>,
    /// The tensors that they are made of, and scales of activations.
    pub parts: Vec<String>,
}

/// All quantized layers among tensors called `names`. Errors say what does not fit.
pub(crate) fn gather<'a>(
    scheme: &Scheme,
    names: impl Iterator<Item = &'a str>,
    part: impl Fn(&str) -> Option<Part>,
) -> Read<Gathered> {
    let files = Files { names: names.collect(), find: &part };
    let found = scheme.gather(&files)?;
    if found.is_empty() {
        return Err(format!(
            "no tensor is quantized ({}), although config.json has a quantization_config",
            scheme.sign()
        ));
    }
    let of_caches =
        files.names.iter().filter(|name| OF_CACHES.iter().any(|end| name.ends_with(end)));
    let mut gathered =
        Gathered { weights: Vec::new(), parts: of_caches.map(|name| (*name).to_owned()).collect() };
    for Found { name, parts, tensor } in found {
        if files.part(&name).is_some() && !parts.contains(&name) {
            let first = parts.first().map_or("its parts", String::as_str);
            return Err(format!("{name} is there beside {first}"));
        }
        gathered.parts.extend(parts);
        gathered.weights.push((name, tensor));
    }
    Ok(gathered)
}

/// A layer's weight under the name that it would have unquantized.
#[derive(Debug, Clone)]
struct Matrix {
    name: Arc<str>,
    layer: Arc<dyn Layer>,
}

impl Matrix {
    /// The integers, whatever the order of the inputs.
    fn read_stored(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        self.layer.read_blocks(first, out)
    }
}

impl RowSource for Matrix {
    fn name(&self) -> &str {
        &self.name
    }

    fn shape(&self) -> [usize; 2] {
        self.layer.shape()
    }

    fn stored_dtype(&self) -> DType {
        DType::I8
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        self.layer.read_f32(self, first, out)
    }

    fn block_form(&self) -> Option<QuantizedForm> {
        self.layer.block_form()
    }

    fn nearest_form(&self) -> Option<QuantizedForm> {
        self.layer.nearest_form()
    }

    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        self.read_stored(first, out)
    }

    fn reordered(&self) -> Option<Reordered> {
        self.layer.reordered(self)
    }
}
