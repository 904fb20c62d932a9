//! GPTQ, as AutoGPTQ and GPTQModel store it.
//!
//! | of `L` inputs, `N` outputs, groups of `G` inputs | |
//! |---|---|
//! | `qweight` | `[L · bits / 32, N]`: inputs next to each other in words |
//! | `qzeros` | `[L / G, N · bits / 32]`, one less than the zero points unless the format is `gptq_v2` |
//! | `scales` | `[L / G, N]` |
//! | `g_idx` | `[L]`, the group of each input: in any order with `desc_act` |

use safetensors::Dtype;
use serde_json::Value;

use super::declared::Declared;
use super::fields::Fields;
use super::integers::{Groups, Integers, Points, Values, groups};
use super::part::Numbers;
use super::{Files, Found, Read, SCALES, Tensor, same_shape};

/// The ends of the names of a layer's tensors, beside its bias.
const PARTS: [&str; 4] = ["qweight", "qzeros", "scales", "g_idx"];

/// Settings that a GPTQ checkpoint declares.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gptq {
    bits: usize,
    group: Option<usize>,
    /// Zero points are stored less one.
    less_one: bool,
}

impl Gptq {
    pub fn of(declared: Declared<'_>) -> Read<Self> {
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
        Ok(Self { bits, group: declared.group(["group_size", "group_size"])?, less_one })
    }

    pub fn gather(self, files: &Files<'_>) -> Read<Vec<Found>> {
        files.before(".qweight").map(|layer| self.layer(files, layer)).collect()
    }

    fn layer(self, files: &Files<'_>, layer: &str) -> Read<Found> {
        let name = |end: &str| format!("{layer}.{end}");
        let because = name("qweight");
        let (qweight, [rows, outputs]) = files.need_matrix(&because, &because, &[Dtype::I32])?;
        let (qzeros, _) = files.need_matrix(&name("qzeros"), &because, &[Dtype::I32])?;
        let (scales, _) = files.need_matrix(&name("scales"), &because, &SCALES)?;
        let bits = self.bits;
        let inputs =
            rows.checked_mul(32).filter(|all| all.is_multiple_of(bits)).map(|all| all / bits);
        let inputs = inputs.ok_or_else(|| {
            format!("tensor {because} has {rows} rows, expected words of {bits} bits")
        })?;
        let group = self.group.unwrap_or(inputs);
        let sizes = format!("{inputs} inputs in groups of {group}, {outputs} outputs");
        if inputs == 0 || !inputs.is_multiple_of(group) || !group.is_multiple_of(32) {
            return Err(format!(
                "{layer} has {sizes}, expected a multiple, and groups a multiple of 32"
            ));
        }
        let count = inputs / group;
        let words = Fields::words(bits, outputs);
        same_shape(&name("qzeros"), &qzeros, &[count, words], &sizes)?;
        same_shape(&name("scales"), &scales, &[count, outputs], &sizes)?;
        let order = match files.part(&name("g_idx")) {
            Some(part) => groups(&name("g_idx"), &part, inputs, group)?,
            None => Groups::Plain,
        };
        let points = Fields { less_one: self.less_one, ..Fields::new(qzeros, bits, [words, 1]) };
        let integers = Integers {
            name: "GPTQ",
            shape: [outputs, inputs],
            values: Values::ByOutput(Fields::new(qweight, bits, [1, outputs])),
            bits,
            points: Points::ByGroup(points),
            scales: Numbers::new(scales, [1, outputs]),
            group,
            groups: order,
            offsets: true,
        };
        Ok(Found {
            name: name("weight"),
            tensor: Tensor::new(integers.looked_at()),
            parts: files.there(PARTS.map(name)),
        })
    }
}
