//! Weights in floating point of 8 bits: blocks of outputs and inputs with a scale (`weight_scale_inv`, which is what
//! values are multiplied by), or a scale for each output or for all (`weight_scale`).

use safetensors::Dtype;
use serde_json::Value;

use super::codes::Floats;
use super::declared::Declared;
use super::part::{Numbers, Part};
use super::{Files, Found, Read, SCALES, Tensor};

/// Scales of inputs, which are for arithmetic in 8 bits.
const OF_INPUTS: [&str; 4] = ["input_scale", "activation_scale", "input_scale_ub", "output_scale"];

/// Settings that an FP8 checkpoint declares.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fp8 {
    /// Outputs and inputs of a block.
    block: Option<[usize; 2]>,
}

impl Fp8 {
    pub fn of(declared: Declared<'_>) -> Read<Self> {
        let Some(value) = declared.get("weight_block_size") else {
            return Ok(Self { block: None });
        };
        let block = block(value)
            .ok_or_else(|| declared.bad("weight_block_size", "two numbers, such as [128, 128]"))?;
        Ok(Self { block: Some(block) })
    }

    pub fn gather(self, files: &Files<'_>) -> Read<Vec<Found>> {
        let mut found = Vec::new();
        for end in [".weight_scale_inv", ".weight_scale"] {
            for layer in files.before(end) {
                let (weight, scale) = (format!("{layer}.weight"), format!("{layer}{end}"));
                let (part, shape) =
                    files.need_matrix(&weight, &scale, &[Dtype::F8_E4M3, Dtype::F8_E5M2])?;
                let scales =
                    files.need(&scale, &weight, &[&SCALES[..], &[Dtype::F8_E8M0]].concat())?;
                let floats = floats(&scale, part, shape, scales, self.block)?;
                let others = OF_INPUTS.map(|end| format!("{layer}.{end}"));
                let parts = files.there([weight.clone(), scale].into_iter().chain(others));
                found.push(Found { name: weight, tensor: Tensor::new(floats), parts });
            }
        }
        Ok(found)
    }
}

/// The two sizes of a block.
pub(super) fn block(value: &Value) -> Option<[usize; 2]> {
    let [rows, cols] = value.as_array()?.as_slice() else { return None };
    let size =
        |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
    Some([size(rows)?, size(cols)?])
}

/// A weight and the scales called `name`: one, one for each output, or one for each block.
pub(super) fn floats(
    name: &str,
    part: Part,
    shape: [usize; 2],
    scales: Part,
    block: Option<[usize; 2]>,
) -> Read<Floats> {
    let [outputs, inputs] = shape;
    let one = scales.elements() == 1 && scales.shape.len() < 3;
    let (strides, rows, cols) = match (&*scales.shape, block) {
        _ if one => ([0, 0], 1, inputs),
        ([found] | [found, 1], None) if *found == outputs => ([1, 0], 1, inputs),
        ([down, across], Some([rows, cols]))
            if *down == outputs.div_ceil(rows) && *across == inputs.div_ceil(cols) =>
        {
            ([*across, 1], rows, cols)
        }
        (found, block) => {
            let expected = match block {
                Some([rows, cols]) => format!(
                    "{:?}: blocks of {rows} by {cols}",
                    [outputs.div_ceil(rows), inputs.div_ceil(cols)]
                ),
                None => format!("[{outputs}, 1] or one number"),
            };
            return Err(format!(
                "tensor {name} has the shape {found:?}, expected {expected} of [{outputs}, {inputs}]"
            ));
        }
    };
    let e4m3 = part.dtype == Dtype::F8_E4M3;
    let scales = Numbers { rows, ..Numbers::new(scales, strides) };
    Ok(Floats { shape, part, e4m3, scales, block: cols })
}
