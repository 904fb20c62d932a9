//! Weights that bitsandbytes quantized: NF4 or FP4, whose 16 values are in the file, with an absolute maximum for each
//! block of consecutive elements; and int8 with one for each output.
//!
//! | tensor beside `X.weight` | |
//! |---|---|
//! | `X.weight.absmax` | F32; with double quantization U8, numbers of values of `nested_quant_map` |
//! | `X.weight.quant_map` | the 16 values |
//! | `X.weight.nested_absmax`, `.nested_quant_map` | with double quantization |
//! | `X.weight.quant_state.bitsandbytes__nf4`, `__fp4` | sizes, as JSON |
//! | `X.SCB`, `X.weight_format` | of int8: the absolute maximum of each output, and 0 |

use safetensors::Dtype;
use serde_json::Value;

use super::codes::{Maxima, Sixteen};
use super::fields::{Fields, Order};
use super::integers::{Groups, Integers, Points, Values};
use super::part::{Numbers, Part};
use super::{Files, Found, Read, Tensor};

/// 1 / 127, as `int8_vectorwise_dequant` has it.
const PART_OF_PEAK: f32 = 7.874_016e-3;
/// Longer ones than those are no sizes.
const MAX_STATE: usize = 4096;

pub(super) fn gather(files: &Files<'_>) -> Read<Vec<Found>> {
    let mut found = Vec::new();
    for weight in files.before(".absmax") {
        found.push(four_bits(files, weight)?);
    }
    for layer in files.before(".SCB") {
        found.push(eight_bits(files, layer)?);
    }
    Ok(found)
}

fn eight_bits(files: &Files<'_>, layer: &str) -> Read<Found> {
    let (weight, peaks, format) =
        (format!("{layer}.weight"), format!("{layer}.SCB"), format!("{layer}.weight_format"));
    let (part, shape) = files.need_matrix(&weight, &peaks, &[Dtype::I8])?;
    let scales = files.need(&peaks, &weight, &[Dtype::F32])?;
    let [outputs, inputs] = shape;
    super::same_shape(&peaks, &scales, &[outputs], "one for each output")?;
    if let Some(order) = files.part(&format).filter(|order| order.byte(0) != 0) {
        return Err(format!("{format} is {}, expected 0: rows one after the other", order.byte(0)));
    }
    let integers = Integers {
        name: "LLM.int8()",
        shape,
        values: Values::Bytes(part),
        bits: 8,
        points: Points::Middle,
        scales: Numbers { factor: PART_OF_PEAK, ..Numbers::new(scales, [1, 0]) },
        group: inputs,
        groups: Groups::Plain,
        offsets: false,
    };
    let parts = files.there([weight.clone(), peaks, format]);
    Ok(Found { name: weight, tensor: Tensor::new(integers), parts })
}

/// Contents of `quant_state`.
struct State {
    name: &'static str,
    tensor: String,
    json: Value,
}

impl State {
    fn read(files: &Files<'_>, weight: &str) -> Read<Self> {
        for (end, name) in [("nf4", "NF4"), ("fp4", "FP4")] {
            let tensor = format!("{weight}.quant_state.bitsandbytes__{end}");
            let Some(part) = files.part(&tensor) else { continue };
            let json = Some(part.bytes()).filter(|bytes| bytes.len() <= MAX_STATE);
            let json = json.and_then(|bytes| serde_json::from_slice(bytes).ok());
            let json = json.ok_or_else(|| format!("tensor {tensor} holds no JSON object"))?;
            return Ok(Self { name, tensor, json });
        }
        Err(format!(
            "{weight}.absmax is there without {weight}.quant_state.bitsandbytes__nf4 or __fp4"
        ))
    }

    fn size(&self, key: &str) -> Read<usize> {
        let found = self.json.get(key).unwrap_or(&Value::Null);
        let size = found.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
        size.ok_or_else(|| format!("tensor {}: {key} is {found}, expected a size", self.tensor))
    }

    fn shape(&self) -> Read<[usize; 2]> {
        let found = self.json.get("shape").unwrap_or(&Value::Null);
        let shape = super::fp8::block(found);
        let fits = |[outputs, inputs]: &[usize; 2]| outputs.checked_mul(*inputs).is_some();
        shape.filter(fits).ok_or_else(|| {
            format!("tensor {}: shape is {found}, expected outputs and inputs", self.tensor)
        })
    }
}

fn four_bits(files: &Files<'_>, weight: &str) -> Read<Found> {
    let state = State::read(files, weight)?;
    let [outputs, inputs] = state.shape()?;
    let elements = outputs * inputs;
    let block = state.size("blocksize")?;
    let name = |end: &str| format!("{weight}.{end}");
    let part = files
        .part(weight)
        .ok_or_else(|| format!("{} is there without {weight}", name("absmax")))?;
    if part.bytes().len() != elements.div_ceil(2) {
        return Err(format!(
            "tensor {weight} has {} bytes, expected {}: two of [{outputs}, {inputs}] values a byte",
            part.bytes().len(),
            elements.div_ceil(2)
        ));
    }
    let map = numbers(files, &name("quant_map"), weight, 16)?;
    let mut table = [0f32; 16];
    table.iter_mut().enumerate().for_each(|(at, value)| *value = map.number(at));
    let blocks = elements.div_ceil(block);
    let maxima = match state.json.get("nested_blocksize") {
        None => Maxima::Plain(numbers(files, &name("absmax"), weight, blocks)?),
        Some(_) => nested(files, weight, &state, blocks)?,
    };
    let fields = Fields { order: Order::HighFirst, ..Fields::new(part, 4, [0, 1]) };
    let ends = ["absmax", "quant_map", "nested_absmax", "nested_quant_map"].map(name);
    let parts = files.there([weight.to_owned(), state.tensor.clone()].into_iter().chain(ends));
    let layer =
        Sixteen { name: state.name, shape: [outputs, inputs], fields, table, block, maxima };
    Ok(Found { name: weight.to_owned(), tensor: Tensor::new(layer), parts })
}

fn nested(files: &Files<'_>, weight: &str, state: &State, blocks: usize) -> Read<Maxima> {
    let name = |end: &str| format!("{weight}.{end}");
    let block = state.size("nested_blocksize")?;
    let bytes = files.need(&name("absmax"), weight, &[Dtype::U8])?;
    super::same_shape(&name("absmax"), &bytes, &[blocks], "one for each block")?;
    let map = numbers(files, &name("nested_quant_map"), weight, 256)?;
    let maxima = numbers(files, &name("nested_absmax"), weight, blocks.div_ceil(block))?;
    let found = state.json.get("nested_offset").unwrap_or(&Value::Null);
    let offset = found.as_f64().ok_or_else(|| {
        format!("tensor {}: nested_offset is {found}, expected a number", state.tensor)
    })?;
    Ok(Maxima::Nested { bytes, map, maxima, block, offset: offset as f32 })
}

/// F32 numbers, as many as these.
fn numbers(files: &Files<'_>, name: &str, because: &str, count: usize) -> Read<Part> {
    let part = files.need(name, because, &[Dtype::F32])?;
    super::same_shape(name, &part, &[count], "as many as there are values or blocks")?;
    Ok(part)
}
