//! GPTQ, as AutoGPTQ and GPTQModel store it, and AWQ, as AutoAWQ does: integers in words, in tensors called `qweight`.
//!
//! | of `L` inputs, `N` outputs, groups of `G` inputs | GPTQ | AWQ, `gemm` | AWQ, `gemv` | AWQ, `marlin` |
//! |---|---|---|---|---|
//! | bits | 2, 3, 4, 8 | 4 | 4 | 4 |
//! | `qweight` | `[L · bits / 32, N]` | `[L, N / 8]` | `[N, L / 8]` | `[L / 16, 2 N]`, in tiles |
//! | `qzeros` | `[L / G, N · bits / 32]` | `[L / G, N / 8]` | `[N, W]` | none |
//! | `scales` | `[L / G, N]` | `[L / G, N]` | `[N, 8 W]` | `[L / G, N]`, permuted |
//! | place of number n in a word | n | 0, 4, 1, 5, 2, 6, 3, 7 for n mod 8 | n mod 8 | of its own |
//!
//! `W` words hold the groups of an output, and what makes them a multiple that the kernels want. The zero points of GPTQ
//! are stored less one unless the format is `gptq_v2`, and `g_idx`, `[L]`, is the group of each input: in any order with
//! `desc_act`.

use safetensors::Dtype;
use serde_json::Value;

use super::declared::Declared;
use super::fields::{Fields, Order};
use super::integers::{Groups, Integers, Points, Values, groups};
use super::marlin::{self, OUTPUTS, TILE, Tiles};
use super::part::Numbers;
use super::{Files, Found, Read, SCALES, Tensor, same_shape};

/// Settings that a GPTQ or AWQ checkpoint declares.
#[derive(Debug, Clone, Copy)]
pub(super) struct Qweight {
    layout: Layout,
    bits: usize,
    group: Option<usize>,
    /// Zero points are stored less one.
    less_one: bool,
}

/// The columns of the table above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    Gptq,
    Gemm,
    Gemv,
    Marlin,
}

impl Qweight {
    pub fn gptq(declared: Declared<'_>) -> Read<Self> {
        let key = if declared.get("checkpoint_format").is_some() {
            "checkpoint_format"
        } else {
            "format"
        };
        let less_one = match declared.text(key) {
            "" | "gptq" => true,
            "gptq_v2" => false,
            _ => return Err(declared.bad(key, "\"gptq\" or \"gptq_v2\"")),
        };
        let bits = match declared.number("bits") {
            Some(bits @ (2 | 3 | 4 | 8)) => bits as usize,
            _ => return Err(declared.bad("bits", "2, 3, 4 or 8")),
        };
        let dynamic = declared.get("dynamic").and_then(Value::as_object);
        // Patterns after -: name layers that are not quantized, which the tensors show.
        if let Some(own) = dynamic.and_then(|all| all.keys().find(|key| !key.starts_with("-:"))) {
            return Err(format!(
                "quantization_config: dynamic gives layers ({own}) a form of their own, expected one for all"
            ));
        }
        let group = declared.group(["group_size", "group_size"])?;
        Ok(Self { layout: Layout::Gptq, bits, group, less_one })
    }

    pub fn awq(declared: Declared<'_>) -> Read<Self> {
        let layout = match declared.text("version").to_lowercase().as_str() {
            "" | "gemm" => Layout::Gemm,
            "gemv" => Layout::Gemv,
            "marlin" => Layout::Marlin,
            _ => return Err(declared.bad("version", "\"gemm\", \"gemv\" or \"marlin\"")),
        };
        if declared.number("bits").or_else(|| declared.number("w_bit")) != Some(4) {
            return Err(declared.bad("bits", "4"));
        }
        let group = declared.group(["group_size", "q_group_size"])?;
        Ok(Self { layout, bits: 4, group, less_one: false })
    }

    pub fn gather(self, files: &Files<'_>) -> Read<Vec<Found>> {
        files.before(".qweight").map(|layer| self.layer(files, layer)).collect()
    }

    fn layer(self, files: &Files<'_>, layer: &str) -> Read<Found> {
        let Self { layout, bits, less_one, .. } = self;
        let [name, zeros, scale, index] =
            ["qweight", "qzeros", "scales", "g_idx"].map(|end| format!("{layer}.{end}"));
        let (words, [rows, cols]) = files.need_matrix(&name, &name, &[Dtype::I32])?;
        let integers = |words: usize| {
            words.checked_mul(32).filter(|all| all.is_multiple_of(bits)).map(|all| all / bits)
        };
        let (outputs, inputs) = match layout {
            Layout::Gptq => (Some(cols), integers(rows)),
            Layout::Gemm => (integers(cols), Some(rows)),
            Layout::Gemv => (Some(rows), integers(cols)),
            Layout::Marlin => (cols.is_multiple_of(2).then_some(cols / 2), rows.checked_mul(TILE)),
        };
        let (outputs, inputs) = outputs.zip(inputs).ok_or_else(|| {
            format!("tensor {name} has the shape {:?}, expected words of {bits} bits", words.shape)
        })?;
        let group = self.group.unwrap_or(inputs);
        let sizes = format!("{inputs} inputs in groups of {group}, {outputs} outputs");
        if inputs == 0 || !inputs.is_multiple_of(group) || !group.is_multiple_of(32) {
            return Err(format!(
                "{layer} has {sizes}, expected a multiple, and groups a multiple of 32"
            ));
        }
        let count = inputs / group;
        let order = if layout == Layout::Gemm { Order::Awq } else { Order::Plain };
        let fields = |part, strides| Fields { order, ..Fields::new(part, bits, strides) };
        let (points, shape) = match layout {
            Layout::Gptq | Layout::Gemm => {
                let (part, _) = files.need_matrix(&zeros, &name, &[Dtype::I32])?;
                let words = Fields::words(bits, outputs);
                same_shape(&zeros, &part, &[count, words], &sizes)?;
                let points = Fields { less_one, ..fields(part, [words, 1]) };
                (Points::ByGroup(points), [count, outputs])
            }
            Layout::Gemv => {
                let (part, [_, words]) = files.need_matrix(&zeros, &name, &[Dtype::I32])?;
                let words = words.max(Fields::words(bits, count));
                same_shape(&zeros, &part, &[outputs, words], &sizes)?;
                let wide = words.saturating_mul(32 / bits);
                (Points::ByOutput(fields(part, [words, 1])), [outputs, wide])
            }
            Layout::Marlin => {
                if files.part(&zeros).is_some() || !outputs.is_multiple_of(OUTPUTS) {
                    return Err(format!(
                        "{layer} has {sizes}, expected a multiple of {OUTPUTS}, and no {zeros} for \"marlin\""
                    ));
                }
                (Points::Middle, [count, outputs])
            }
        };
        let (part, _) = files.need_matrix(&scale, &name, &SCALES)?;
        same_shape(&scale, &part, &shape, &sizes)?;
        let plain = Numbers::new(part, [1, outputs]);
        let (values, scales) = match layout {
            Layout::Gptq => (Values::ByOutput(fields(words, [1, outputs])), plain),
            Layout::Gemm => (Values::ByInput(fields(words, [cols, 1])), plain),
            Layout::Gemv => {
                let scales = Numbers { strides: [shape[1], 1], ..plain };
                (Values::ByOutput(fields(words, [cols, 1])), scales)
            }
            Layout::Marlin => {
                let place = if group == inputs { marlin::single } else { marlin::grouped };
                let values = Values::Tiles(Tiles { part: words, outputs });
                (values, Numbers { place, ..plain })
            }
        };
        let is_gptq = layout == Layout::Gptq;
        let groups = match files.part(&index).filter(|_| is_gptq) {
            Some(part) => groups(&index, &part, inputs, group)?,
            None => Groups::Plain,
        };
        let integers = Integers {
            name: if is_gptq { "GPTQ" } else { "AWQ" },
            shape: [outputs, inputs],
            values,
            bits,
            points,
            scales,
            group,
            groups,
            offsets: true,
        };
        let parts = [name, zeros, scale].into_iter().chain(is_gptq.then_some(index));
        Ok(Found {
            name: format!("{layer}.weight"),
            tensor: Tensor::new(integers.looked_at()),
            parts: files.there(parts),
        })
    }
}
