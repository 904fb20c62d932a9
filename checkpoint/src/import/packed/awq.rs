//! AWQ, as AutoAWQ stores it: 4 bits, eight in each word.
//!
//! | of `L` inputs, `N` outputs, groups of `G` inputs | `gemm` | `gemv` | `marlin` |
//! |---|---|---|---|
//! | `qweight` | `[L, N / 8]` | `[N, L / 8]` | `[L / 16, 2 N]`, in tiles |
//! | `qzeros` | `[L / G, N / 8]` | `[N, W]` | none |
//! | `scales` | `[L / G, N]` | `[N, 8 W]` | `[L / G, N]`, permuted |
//! | place of output or input n in a word | 0, 4, 1, 5, 2, 6, 3, 7 for n mod 8 | n mod 8 | of its own |
//!
//! `W` words hold the groups of an output, and what makes them a multiple that the kernels want.

use safetensors::Dtype;

use super::declared::Declared;
use super::fields::{Fields, Order};
use super::integers::{Groups, Integers, Points, Values};
use super::marlin::{self, OUTPUTS, TILE, Tiles};
use super::part::{Numbers, Part};
use super::{Files, Found, Read, SCALES, Tensor, same_shape};

/// Integers in a word.
const PACK: usize = 8;

/// Settings that an AWQ checkpoint declares.
#[derive(Debug, Clone, Copy)]
pub(super) struct Awq {
    version: Version,
    group: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    Gemm,
    Gemv,
    Marlin,
}

/// A layer's tensors.
struct Parts {
    qweight: Part,
    shape: [usize; 2],
    group: usize,
    /// The sizes, for messages.
    sizes: String,
}

impl Awq {
    pub fn of(declared: Declared<'_>) -> Read<Self> {
        let version = match declared.text("version").to_lowercase().as_str() {
            "" | "gemm" => Version::Gemm,
            "gemv" => Version::Gemv,
            "marlin" => Version::Marlin,
            _ => return Err(declared.bad("version", "\"gemm\", \"gemv\" or \"marlin\"")),
        };
        if declared.number("bits").or_else(|| declared.number("w_bit")) != Some(4) {
            return Err(declared.bad("bits", "4"));
        }
        Ok(Self { version, group: declared.group(["group_size", "q_group_size"])? })
    }

    pub fn gather(self, files: &Files<'_>) -> Read<Vec<Found>> {
        files.before(".qweight").map(|layer| self.layer(files, layer)).collect()
    }

    fn layer(self, files: &Files<'_>, layer: &str) -> Read<Found> {
        let name = |end: &str| format!("{layer}.{end}");
        let parts = self.parts(files, layer)?;
        let (values, points, scales) = match self.version {
            Version::Gemm => Self::gemm(files, layer, &parts)?,
            Version::Gemv => Self::gemv(files, layer, &parts)?,
            Version::Marlin => Self::marlin(files, layer, &parts)?,
        };
        let Parts { shape, group, .. } = parts;
        let (bits, groups) = (4, Groups::Plain);
        let integers = Integers {
            name: "AWQ",
            shape,
            values,
            bits,
            points,
            scales,
            group,
            groups,
            offsets: true,
        };
        Ok(Found {
            name: name("weight"),
            tensor: Tensor::new(integers.looked_at()),
            parts: files.there(["qweight", "qzeros", "scales"].map(name)),
        })
    }

    fn parts(self, files: &Files<'_>, layer: &str) -> Read<Parts> {
        let name = format!("{layer}.qweight");
        let (qweight, [rows, cols]) = files.need_matrix(&name, &name, &[Dtype::I32])?;
        let (inputs, outputs) = match self.version {
            Version::Gemm => (Some(rows), cols.checked_mul(PACK)),
            Version::Gemv => (cols.checked_mul(PACK), Some(rows)),
            Version::Marlin => (rows.checked_mul(TILE), cols.is_multiple_of(2).then_some(cols / 2)),
        };
        let shape = outputs.zip(inputs);
        let (outputs, inputs) = shape
            .ok_or_else(|| format!("tensor {name} cannot have the shape {:?}", qweight.shape))?;
        let group = self.group.unwrap_or(inputs);
        let sizes = format!("{inputs} inputs in groups of {group}, {outputs} outputs");
        if inputs == 0 || !inputs.is_multiple_of(group) || !group.is_multiple_of(32) {
            return Err(format!(
                "{layer} has {sizes}, expected a multiple, and groups a multiple of 32"
            ));
        }
        Ok(Parts { qweight, shape: [outputs, inputs], group, sizes })
    }

    fn gemm(files: &Files<'_>, layer: &str, parts: &Parts) -> Read<(Values, Points, Numbers)> {
        let Parts { qweight, shape: [outputs, inputs], group, sizes } = parts;
        let (because, zeros, scale) =
            (format!("{layer}.qweight"), format!("{layer}.qzeros"), format!("{layer}.scales"));
        let (qzeros, _) = files.need_matrix(&zeros, &because, &[Dtype::I32])?;
        let (scales, _) = files.need_matrix(&scale, &because, &SCALES)?;
        let (count, words) = (inputs / group, outputs / PACK);
        same_shape(&zeros, &qzeros, &[count, words], sizes)?;
        same_shape(&scale, &scales, &[count, *outputs], sizes)?;
        let fields = |part| Fields { order: Order::Awq, ..Fields::new(part, 4, [words, 1]) };
        let values = Values::ByInput(fields(qweight.clone()));
        Ok((values, Points::ByGroup(fields(qzeros)), Numbers::new(scales, [1, *outputs])))
    }

    fn gemv(files: &Files<'_>, layer: &str, parts: &Parts) -> Read<(Values, Points, Numbers)> {
        let Parts { qweight, shape: [outputs, inputs], group, sizes } = parts;
        let (because, zeros, scale) =
            (format!("{layer}.qweight"), format!("{layer}.qzeros"), format!("{layer}.scales"));
        let (qzeros, [_, words]) = files.need_matrix(&zeros, &because, &[Dtype::I32])?;
        let (scales, _) = files.need_matrix(&scale, &because, &SCALES)?;
        let least = (inputs / group).div_ceil(PACK);
        let words = words.max(least);
        let wide = words.saturating_mul(PACK);
        same_shape(&zeros, &qzeros, &[*outputs, words], sizes)?;
        same_shape(&scale, &scales, &[*outputs, wide], sizes)?;
        let values = Values::ByOutput(Fields::new(qweight.clone(), 4, [inputs / PACK, 1]));
        let points = Points::ByOutput(Fields::new(qzeros, 4, [words, 1]));
        Ok((values, points, Numbers::new(scales, [wide, 1])))
    }

    fn marlin(files: &Files<'_>, layer: &str, parts: &Parts) -> Read<(Values, Points, Numbers)> {
        let Parts { qweight, shape: [outputs, inputs], group, sizes } = parts;
        let (because, scale) = (format!("{layer}.qweight"), format!("{layer}.scales"));
        if files.part(&format!("{layer}.qzeros")).is_some() || !outputs.is_multiple_of(OUTPUTS) {
            return Err(format!(
                "{layer} has {sizes}, expected a multiple of {OUTPUTS}, and no {layer}.qzeros for \"marlin\""
            ));
        }
        let (scales, _) = files.need_matrix(&scale, &because, &SCALES)?;
        same_shape(&scale, &scales, &[inputs / group, *outputs], sizes)?;
        let place = if group == inputs { marlin::single } else { marlin::grouped };
        let scales = Numbers { place, ..Numbers::new(scales, [1, *outputs]) };
        let values = Values::Tiles(Tiles { part: qweight.clone(), outputs: *outputs });
        Ok((values, Points::Middle, scales))
    }
}
