//! Linear layers that GPTQ or AWQ quantized to 4 bits, in safetensors: integers, zero points and scales are tensors of
//! their own, with eight integers in each `I32`.
//!
//! | of `L` inputs, `N` outputs, groups of `G` inputs | GPTQ (AutoGPTQ, GPTQModel) | AWQ (AutoAWQ, `gemm`) |
//! |---|---|---|
//! | `qweight` | `[L / 8, N]`, eight inputs in a word | `[L, N / 8]`, eight outputs in a word |
//! | `qzeros` | `[L / G, N / 8]`, one less than the zero point unless the format is `gptq_v2` | `[L / G, N / 8]` |
//! | `scales` | `[L / G, N]` | `[L / G, N]` |
//! | `g_idx` | `[L]`, the group of each input | |
//! | place of output n in a word | n mod 8 | 0, 4, 1, 5, 2, 6, 3, 7 for n mod 8 |
//!
//! A weight is `(integer − zero point) · scale` with integers from 0 to 15. The graphs have them from −8 to 7, so that
//! the offset is 8 less the zero point, and 0 for symmetric quantization.

use std::ops::Range;
use std::sync::Arc;

use qhx_core::artifacts::Mapped;
use qhx_core::quantized::{BLOCK, Bits, QuantizedForm, QuantizedMut, from_nibble};
use qhx_core::{DType, Error, ErrorKind, Result};
use serde_json::Value;

use crate::floats;
use crate::weight::{RowSource, dequantize_blocks};

/// Quantized values in a word.
const PACK: usize = 8;
/// Bytes of a word.
const WORD: usize = 4;
/// Where the eight outputs of a word are, for AWQ (`AWQ_REVERSE_ORDER` of AutoAWQ).
const AWQ_ORDER: [u32; PACK] = [0, 4, 1, 5, 2, 6, 3, 7];
/// The ends of the names of a layer's tensors, beside its bias.
pub(crate) const PARTS: [&str; 4] = ["qweight", "qzeros", "scales", "g_idx"];

/// What `quantization_config` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scheme {
    method: Method,
    /// Inputs of a group; all inputs if none.
    group: Option<usize>,
}

/// The program that quantized a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Gptq {
        /// Added to each word of `qzeros`.
        add: u32,
    },
    Awq,
}

impl Scheme {
    /// Reads the `quantization_config` of a `config.json`. None where there is none; else an error says what cannot be
    /// read.
    pub fn of(config: &Value) -> std::result::Result<Option<Self>, String> {
        let Some(declared) = config.get("quantization_config").filter(|value| !value.is_null())
        else {
            return Ok(None);
        };
        let text = |key: &str| declared.get(key).and_then(Value::as_str).unwrap_or_default();
        let number = |key: &str| declared.get(key).and_then(Value::as_i64);
        let bad = |key: &str, expected: &str| {
            let found = declared.get(key).unwrap_or(&Value::Null);
            format!("quantization_config: {key} is {found}, expected {expected}")
        };
        let method = match text("quant_method") {
            "gptq" => match text("checkpoint_format") {
                "" | "gptq" => Method::Gptq { add: 0x1111_1111 },
                "gptq_v2" => Method::Gptq { add: 0 },
                _ => return Err(bad("checkpoint_format", "\"gptq\" or \"gptq_v2\"")),
            },
            "awq" => match text("version").to_lowercase().as_str() {
                "" | "gemm" => Method::Awq,
                _ => return Err(bad("version", "\"gemm\"")),
            },
            _ => return Err(bad("quant_method", "\"gptq\" or \"awq\"")),
        };
        if number("bits").or_else(|| number("w_bit")) != Some(4) {
            return Err(bad("bits", "4"));
        }
        let group = match number("group_size").or_else(|| number("q_group_size")) {
            Some(-1) => None,
            Some(size) => match usize::try_from(size) {
                Ok(size) if size > 0 && size.is_multiple_of(BLOCK) => Some(size),
                _ => return Err(bad("group_size", "a multiple of 32, or -1")),
            },
            None => return Err(bad("group_size", "a multiple of 32, or -1")),
        };
        Ok(Some(Self { method, group }))
    }
}

/// A tensor of the file that is a part of a quantized layer.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub map: Mapped,
    pub dtype: safetensors::Dtype,
    pub shape: Vec<usize>,
    pub bytes: Range<usize>,
}

impl Part {
    fn bytes(&self) -> &[u8] {
        self.map.bytes().get(self.bytes.clone()).unwrap_or_default()
    }

    /// The words from `at` on.
    fn words(&self, at: usize) -> impl Iterator<Item = u32> {
        let bytes = at.checked_mul(WORD).and_then(|at| self.bytes().get(at..));
        bytes.unwrap_or_default().as_chunks::<WORD>().0.iter().map(|word| u32::from_le_bytes(*word))
    }

    fn word(&self, at: usize) -> u32 {
        self.words(at).next().unwrap_or(0)
    }
}

/// A quantized layer's weight `[outputs, inputs]`.
#[derive(Debug, Clone)]
pub(crate) struct Tensor(Arc<Layer>);

#[derive(Debug)]
struct Layer {
    method: Method,
    qweight: Part,
    /// Zero points, `[groups, outputs]`: a byte each.
    zeros: Vec<u8>,
    /// `[groups, outputs]`.
    scales: Vec<f32>,
    /// Outputs, inputs.
    shape: [usize; 2],
    form: QuantizedForm,
}

impl Tensor {
    /// Puts the parts of the layer `name` together; `part` gives the tensor with such an end of its name. Errors say
    /// what does not fit.
    fn read(
        scheme: Scheme,
        name: &str,
        part: impl Fn(&str) -> Option<Part>,
    ) -> std::result::Result<Self, String> {
        let need = |end: &str, dtypes: &[safetensors::Dtype]| {
            let found =
                part(end).ok_or_else(|| format!("{name}.qweight is there without {name}.{end}"))?;
            match dtypes.contains(&found.dtype) && found.shape.len() == 2 {
                true => Ok(found),
                false => Err(format!(
                    "tensor {name}.{end} is {:?} of the shape {:?}, expected a matrix of {:?}",
                    found.dtype, found.shape, dtypes
                )),
            }
        };
        use safetensors::Dtype::{BF16, F16, F32, I32};
        let qweight = need("qweight", &[I32])?;
        let qzeros = need("qzeros", &[I32])?;
        let scales = need("scales", &[F16, BF16, F32])?;
        let too_large = || format!("tensor {name}.qweight is too large: {:?}", qweight.shape);
        let [rows, cols] = matrix(&qweight);
        let (inputs, outputs) = match scheme.method {
            Method::Gptq { .. } => (rows.checked_mul(PACK), Some(cols)),
            Method::Awq => (Some(rows), cols.checked_mul(PACK)),
        };
        let (inputs, outputs) = inputs.zip(outputs).ok_or_else(too_large)?;
        let group = scheme.group.unwrap_or(inputs);
        if inputs == 0 || !inputs.is_multiple_of(group) || !group.is_multiple_of(BLOCK) {
            return Err(format!(
                "{name} has {inputs} inputs in groups of {group}, expected a multiple, and groups a multiple of {BLOCK}"
            ));
        }
        let groups = inputs / group;
        for (end, part, expected) in [
            ("qzeros", &qzeros, [groups, outputs.div_ceil(PACK)]),
            ("scales", &scales, [groups, outputs]),
        ] {
            if matrix(part) != expected || !outputs.is_multiple_of(PACK) {
                return Err(format!(
                    "tensor {name}.{end} has the shape {:?}, expected {expected:?}: {inputs} inputs in groups of \
                     {group}, {outputs} outputs, a multiple of {PACK}",
                    part.shape
                ));
            }
        }
        if let Some(order) = part("g_idx") {
            let given = order.words(0).map(|group| group as usize);
            let plain = (0..inputs).map(|input| input / group);
            if order.dtype != I32 || !given.eq(plain) {
                return Err(format!(
                    "{name}.g_idx orders the inputs by activation (desc_act), so that groups are no neighbours"
                ));
            }
        }
        let zeros = zero_points(scheme.method, &qzeros, outputs);
        let offsets = zeros.iter().any(|zero| from_nibble(*zero) != 0);
        let form = QuantizedForm { bits: Bits::Four, block: group, offsets };
        let scales = scales_of(&scales);
        let shape = [outputs, inputs];
        Ok(Self(Arc::new(Layer { method: scheme.method, qweight, zeros, scales, shape, form })))
    }

    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    pub fn form(&self) -> &'static str {
        match self.0.method {
            Method::Gptq { .. } => "GPTQ",
            Method::Awq => "AWQ",
        }
    }

    pub fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Arc<dyn RowSource>> {
        if shape != self.0.shape {
            return Err(Error::new(
                ErrorKind::Artifact,
                format!(
                    "tensor {name} is quantized ({}) as {:?}, and the recipe reads it as {shape:?}",
                    self.form(),
                    self.0.shape
                ),
            )
            .hint("take a checkpoint in which only linear layers are quantized"));
        }
        Ok(Arc::new(Matrix { name: name.to_owned(), layer: Arc::clone(&self.0) }))
    }
}

/// All quantized layers among tensors called `names`, under the names of their weights. Errors say what does not fit.
pub(crate) fn gather<'a>(
    scheme: Scheme,
    names: impl Iterator<Item = &'a str>,
    part: impl Fn(&str) -> Option<Part>,
) -> std::result::Result<Vec<(String, Tensor)>, String> {
    let mut found = Vec::new();
    for layer in names.filter_map(|name| name.strip_suffix(".qweight")) {
        let weight = format!("{layer}.weight");
        if part(&weight).is_some() {
            return Err(format!("{weight} is there beside {layer}.qweight"));
        }
        let tensor = Tensor::read(scheme, layer, |end| part(&format!("{layer}.{end}")))?;
        found.push((weight, tensor));
    }
    if found.is_empty() {
        return Err(
            "no tensor is quantized (.qweight), although config.json has a quantization_config"
                .to_owned(),
        );
    }
    Ok(found)
}

/// The two sizes of a matrix.
fn matrix(part: &Part) -> [usize; 2] {
    match *part.shape {
        [rows, cols] => [rows, cols],
        _ => [0, 0],
    }
}

/// All zero points, a byte each. Adding to whole words, with its carries, is what GPTQModel does
/// (`convert_gptq_v1_to_v2_format_module`): it undoes the subtraction by which they were written.
fn zero_points(method: Method, qzeros: &Part, outputs: usize) -> Vec<u8> {
    let words = qzeros.words(0);
    let mut zeros = Vec::with_capacity(qzeros.bytes().len() / WORD * PACK);
    for word in words {
        let word = match method {
            Method::Gptq { add } => word.wrapping_add(add),
            Method::Awq => word,
        };
        zeros.extend((0..PACK).map(|output| nibble(word, method.place(output))));
    }
    debug_assert!(outputs == 0 || zeros.len().is_multiple_of(outputs));
    zeros
}

impl Method {
    /// Where in a word that holds outputs the output is.
    fn place(self, output: usize) -> u32 {
        match self {
            Self::Gptq { .. } => (output % PACK) as u32,
            Self::Awq => AWQ_ORDER.get(output % PACK).copied().unwrap_or(0),
        }
    }
}

fn nibble(word: u32, place: u32) -> u8 {
    (word >> (4 * place) & 15) as u8
}

fn scales_of(part: &Part) -> Vec<f32> {
    let bytes = part.bytes();
    let dtype = match part.dtype {
        safetensors::Dtype::F16 => DType::F16,
        safetensors::Dtype::BF16 => DType::Bf16,
        _ => DType::F32,
    };
    let mut out = vec![0f32; bytes.len() / dtype.size()];
    floats::to_f32(dtype, bytes, &mut out);
    out
}

/// A layer's weight under the name that it would have unquantized.
#[derive(Debug)]
struct Matrix {
    name: String,
    layer: Arc<Layer>,
}

impl RowSource for Matrix {
    fn name(&self) -> &str {
        &self.name
    }

    fn shape(&self) -> [usize; 2] {
        self.layer.shape
    }

    fn stored_dtype(&self) -> DType {
        DType::F32
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        dequantize_blocks(self, first, out)
    }

    fn block_form(&self) -> Option<QuantizedForm> {
        Some(self.layer.form)
    }

    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        let Layer { method, qweight, zeros, scales, shape: [outputs, inputs], form } = &*self.layer;
        let (outputs, inputs) = (*outputs, *inputs);
        let rows = out.values.len() / inputs.max(1);
        match method {
            Method::Gptq { .. } => {
                for (eight, start) in (0..inputs).step_by(PACK).enumerate() {
                    for (row, word) in qweight.words(eight * outputs + first).take(rows).enumerate()
                    {
                        let at = row * inputs + start;
                        let values = out.values.get_mut(at..at + PACK).unwrap_or_default();
                        for (place, value) in values.iter_mut().enumerate() {
                            *value = from_nibble(nibble(word, place as u32));
                        }
                    }
                }
            }
            Method::Awq => {
                for (row, values) in out.values.chunks_exact_mut(inputs.max(1)).enumerate() {
                    let output = first + row;
                    let place = method.place(output);
                    for (input, value) in values.iter_mut().enumerate() {
                        let word = qweight.word(input * (outputs / PACK) + output / PACK);
                        *value = from_nibble(nibble(word, place));
                    }
                }
            }
        }
        let groups = inputs / form.block.max(1);
        let offsets = (0..rows).flat_map(|row| (0..groups).map(move |g| g * outputs + first + row));
        for (to, at) in out.scales.iter_mut().zip(offsets.clone()) {
            *to = scales.get(at).copied().unwrap_or(f32::NAN);
        }
        for (to, at) in out.offsets.iter_mut().zip(offsets) {
            *to = zeros.get(at).map_or(f32::NAN, |zero| f32::from(-from_nibble(*zero)));
        }
        Ok(())
    }
}
