//! compressed-tensors, as llm-compressor stores it.
//!
//! | of `N` outputs, `L` inputs, groups of `G` inputs | |
//! |---|---|
//! | `weight_packed` | `[N, L · bits / 32]`: inputs next to each other in words (`pack-quantized`) |
//! | `weight` | `[N, L]` of I8 or of floating point of 8 bits (the other formats) |
//! | `weight_shape` | N and L, of packed ones |
//! | `weight_scale` | one number, `[N, 1]`, `[N, L / G]`, or one for each block of outputs and inputs |
//! | `weight_zero_point` | the same as integers; of packed ones `[N · bits / 32, L / G]`, outputs next to each other |
//! | `weight_g_idx` | `[L]`, the group of each input |

use safetensors::Dtype;
use serde_json::Value;

use super::declared::Declared;
use super::fields::Fields;
use super::integers::{Groups, Integers, Points, Values, groups};
use super::part::{Numbers, Part};
use super::targets::Target;
use super::{Files, Found, Read, SCALES, Tensor, fp8, mxfp4, same_shape};

/// Storage formats of weights; a checkpoint with several formats declares one for each group.
const FORMATS: [&str; 6] = [
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
];
/// The ends of the names of a layer's tensors.
const PARTS: [&str; 11] = [
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    // For arithmetic with quantized activations, which graphs do not do.
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
];

/// Settings that a checkpoint of compressed-tensors declares.
#[derive(Debug, Clone)]
pub(super) struct Compressed {
    schemes: Vec<Scheme>,
    ignore: Vec<Target>,
}

/// Quantization of some layers.
#[derive(Debug, Clone)]
struct Scheme {
    targets: Vec<Target>,
    bits: usize,
    float: bool,
    strategy: Strategy,
}

/// Set of weights that shares a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Strategy {
    Tensor,
    Channel,
    Group(usize),
    Block([usize; 2]),
}

/// Names of a layer's tensors, for reading it.
struct Layer<'a> {
    files: &'a Files<'a>,
    name: &'a str,
    scheme: &'a Scheme,
}

impl Compressed {
    pub fn of(declared: Declared<'_>) -> Read<Self> {
        if !FORMATS.contains(&declared.text("format")) {
            return Err(declared.bad("format", &format!("one of {FORMATS:?}")));
        }
        let inner = |key: &str, of: &str| declared.get(key).and_then(|value| value.get(of));
        if inner("sparsity_config", "format").is_some_and(|format| format != "dense") {
            return Err(declared.bad("sparsity_config", "none, or one whose format is \"dense\""));
        }
        let transforms = inner("transform_config", "config_groups").and_then(Value::as_object);
        if transforms.is_some_and(|groups| !groups.is_empty()) {
            return Err(declared.bad(
                "transform_config",
                "none: weights are rotated, and graphs do not rotate activations",
            ));
        }
        let all = declared.get("config_groups").and_then(Value::as_object);
        let all =
            all.ok_or_else(|| declared.bad("config_groups", "an object of groups of layers"))?;
        let of_weights =
            |group: &&Value| group.get("weights").is_some_and(|weights| !weights.is_null());
        let schemes = all.values().filter(of_weights).map(|group| Scheme::of(Declared(group)));
        Ok(Self {
            schemes: schemes.collect::<Read<_>>()?,
            ignore: Target::list(declared.get("ignore"))?,
        })
    }

    pub fn gather(&self, files: &Files<'_>) -> Read<Vec<Found>> {
        let mut found = Vec::new();
        for name in files.before(".weight_packed") {
            found.push(self.layer(files, name)?.packed()?);
        }
        for name in files.before(".weight_scale") {
            if files.part(&format!("{name}.weight_packed")).is_none() {
                found.push(self.layer(files, name)?.plain()?);
            }
        }
        Ok(found)
    }

    /// Quantization of the layer `name`: the most specific target counts, as it does in compressed-tensors.
    fn layer<'a>(&'a self, files: &'a Files<'a>, name: &'a str) -> Read<Layer<'a>> {
        let ranked = self
            .schemes
            .iter()
            .filter_map(|scheme| Some((scheme, Target::rank(&scheme.targets, name)?)));
        let scheme = ranked.min_by_key(|(_, rank)| *rank).map(|(scheme, _)| scheme);
        if let Some(named) = self.ignore.iter().find(|target| target.names(name)) {
            return Err(format!(
                "{name} is quantized, although quantization_config ignores it: {named}"
            ));
        }
        let scheme = scheme.ok_or_else(|| {
            format!("{name} is quantized, and it is no target of the config_groups of quantization_config")
        })?;
        Ok(Layer { files, name, scheme })
    }
}

impl Scheme {
    fn of(group: Declared<'_>) -> Read<Self> {
        let weights = group.get("weights").unwrap_or(&Value::Null);
        let weights = Declared(weights);
        let float = match weights.text("type") {
            "int" | "" => false,
            "float" => true,
            _ => return Err(weights.bad("type", "\"int\" or \"float\"")),
        };
        let bits = match weights.number("num_bits") {
            Some(bits @ 1..=8) => bits as usize,
            _ => return Err(weights.bad("num_bits", "1 to 8")),
        };
        let size = weights
            .number("group_size")
            .and_then(|size| usize::try_from(size).ok())
            .filter(|size| *size > 0);
        let strategy = match (weights.text("strategy"), size) {
            ("tensor", _) => Strategy::Tensor,
            ("channel", _) => Strategy::Channel,
            ("group", Some(size)) => Strategy::Group(size),
            ("block", _) => {
                let block = weights.get("block_structure").and_then(fp8::block);
                Strategy::Block(block.ok_or_else(|| {
                    weights.bad("block_structure", "two numbers, such as [128, 128]")
                })?)
            }
            ("", Some(size)) => Strategy::Group(size),
            ("", None) if weights.number("group_size") == Some(-1) => Strategy::Channel,
            ("", None) => Strategy::Tensor,
            ("group", None) => return Err(weights.bad("group_size", "a number of inputs")),
            _ => {
                return Err(
                    weights.bad("strategy", "\"tensor\", \"channel\", \"group\" or \"block\"")
                );
            }
        };
        Ok(Self { targets: Target::list(group.get("targets"))?, bits, float, strategy })
    }
}

impl Layer<'_> {
    fn name(&self, end: &str) -> String {
        format!("{}.{end}", self.name)
    }

    fn found(&self, tensor: Tensor) -> Found {
        let parts = self.files.there(PARTS.map(|end| self.name(end)));
        Found { name: self.name("weight"), tensor, parts }
    }

    fn packed(&self) -> Read<Found> {
        let Scheme { bits, float, .. } = *self.scheme;
        let packed = self.name("weight_packed");
        let global = self.name("weight_global_scale");
        if self.files.part(&global).is_some() {
            return Err(format!(
                "{global} is there: NVFP4 is not read, expected integers or MXFP4"
            ));
        }
        let (part, [outputs, words]) =
            self.files.need_matrix(&packed, &packed, &[Dtype::I32, Dtype::U8])?;
        if float {
            return self.mxfp4(part, [outputs, words]);
        }
        if part.dtype != Dtype::I32 {
            return Err(format!("tensor {packed} is {:?}, expected I32", part.dtype));
        }
        let [_, inputs] = self.shape(outputs)?;
        let padded = padded(bits, inputs, words).ok_or_else(|| {
            format!("tensor {packed} has {words} words a row, expected {}: {inputs} integers of {bits} bits", Fields::words(bits, inputs))
        })?;
        let values = Fields { padded, ..Fields::new(part, bits, [words, 1]) };
        self.integers(Values::ByOutput(values), [outputs, inputs])
    }

    fn mxfp4(&self, part: Part, [outputs, bytes]: [usize; 2]) -> Read<Found> {
        let scale = self.name("weight_scale");
        let inputs = bytes.saturating_mul(2);
        let scales =
            self.files.need(&scale, &self.name("weight_packed"), &[Dtype::U8, Dtype::F8_E8M0])?;
        if self.scheme.bits != 4
            || self.scheme.strategy != Strategy::Group(32)
            || !inputs.is_multiple_of(32)
        {
            return Err(format!(
                "{} is packed floating point, expected 4 bits in groups of 32 inputs",
                self.name
            ));
        }
        same_shape(&scale, &scales, &[outputs, inputs / 32], "one for each 32 inputs")?;
        Ok(self.found(Tensor::new(mxfp4::integers("MXFP4", part, scales, [outputs, inputs]))))
    }

    fn plain(&self) -> Read<Found> {
        let (weight, scale) = (self.name("weight"), self.name("weight_scale"));
        let dtypes: &[Dtype] =
            if self.scheme.float { &[Dtype::F8_E4M3, Dtype::F8_E5M2] } else { &[Dtype::I8] };
        let (part, shape) = self.files.need_matrix(&weight, &scale, dtypes)?;
        if !self.scheme.float {
            return self.integers(Values::Bytes(part), shape);
        }
        let block = match self.scheme.strategy {
            Strategy::Tensor | Strategy::Channel => None,
            Strategy::Group(size) => Some([1, size]),
            Strategy::Block(block) => Some(block),
        };
        let scales = self.files.need(&scale, &weight, &SCALES)?;
        Ok(self.found(Tensor::new(fp8::floats(&scale, part, shape, scales, block)?)))
    }

    fn integers(&self, values: Values, shape: [usize; 2]) -> Read<Found> {
        let [outputs, inputs] = shape;
        let (bits, scale) = (self.scheme.bits, self.name("weight_scale"));
        let group = match self.scheme.strategy {
            Strategy::Group(size) => size,
            Strategy::Block(_) => {
                return Err(format!(
                    "{} has integers in blocks, expected groups of inputs",
                    self.name
                ));
            }
            _ => inputs,
        };
        if inputs == 0 || !inputs.is_multiple_of(group) {
            return Err(format!(
                "{} has {inputs} inputs in groups of {group}, expected a multiple",
                self.name
            ));
        }
        let count = inputs / group;
        let scales = self.files.need(&scale, &self.name("weight"), &SCALES)?;
        let strides =
            strides(&scales, self.scheme.strategy, [outputs, count]).ok_or_else(|| {
                format!(
                    "tensor {scale} has the shape {:?}, expected [{outputs}, {count}]",
                    scales.shape
                )
            })?;
        let order = match self.files.part(&self.name("weight_g_idx")) {
            Some(part) => groups(&self.name("weight_g_idx"), &part, inputs, group)?,
            None => Groups::Plain,
        };
        let points = self.points([outputs, count])?;
        let integers = Integers {
            name: "compressed-tensors",
            shape,
            values,
            bits,
            points,
            scales: Numbers::new(scales, strides),
            group,
            groups: order,
            offsets: true,
        };
        Ok(self.found(Tensor::new(integers.looked_at())))
    }

    /// Value of `weight_shape`. Errors when it has another number of outputs.
    fn shape(&self, outputs: usize) -> Read<[usize; 2]> {
        let name = self.name("weight_shape");
        let part =
            self.files.need(&name, &self.name("weight_packed"), &[Dtype::I64, Dtype::I32])?;
        let bytes = part.bytes();
        let sizes: Vec<i64> = match part.dtype {
            Dtype::I64 => {
                bytes.as_chunks::<8>().0.iter().map(|eight| i64::from_le_bytes(*eight)).collect()
            }
            _ => part.words(0).map(|word| i64::from(word.cast_signed())).collect(),
        };
        let read: Vec<usize> =
            sizes.iter().filter_map(|size| usize::try_from(*size).ok()).collect();
        match *read {
            [rows, inputs] if rows == outputs && inputs > 0 => Ok([rows, inputs]),
            _ => Err(format!(
                "tensor {name} is {sizes:?}, expected {outputs} outputs and a number of inputs"
            )),
        }
    }

    fn points(&self, [outputs, count]: [usize; 2]) -> Read<Points> {
        let name = self.name("weight_zero_point");
        let Some(part) = self.files.part(&name) else { return Ok(Points::Middle) };
        let wrong = |expected: String| {
            format!(
                "tensor {name} is {:?} of the shape {:?}, expected {expected}",
                part.dtype, part.shape
            )
        };
        match (part.dtype, &*part.shape) {
            (Dtype::I32, [words, groups]) if *groups == count => {
                let padded = padded(self.scheme.bits, outputs, *words);
                let padded = padded.ok_or_else(|| {
                    wrong(format!(
                        "{} words for {outputs} outputs",
                        Fields::words(self.scheme.bits, outputs)
                    ))
                })?;
                Ok(Points::ByGroup(Fields {
                    padded,
                    ..Fields::new(part.clone(), self.scheme.bits, [1, count])
                }))
            }
            (Dtype::I8, _) => {
                let strides = strides(&part, self.scheme.strategy, [outputs, count]);
                let strides = strides.ok_or_else(|| wrong(format!("[{outputs}, {count}]")))?;
                Ok(Points::Signed(Numbers::new(part.clone(), strides)))
            }
            _ => Err(wrong(format!("I8 of [{outputs}, {count}], or I32 with as many columns"))),
        }
    }
}

/// True if integers of `bits` bits are padded to words, given that `len` of them take this number of words. `None` if
/// they take another number. Versions before 0.20 pad, which is the same for 1, 2, 4 and 8 bits.
fn padded(bits: usize, len: usize, words: usize) -> Option<bool> {
    if words == Fields::words(bits, len) {
        return Some(false);
    }
    (words == len.div_ceil(32 / bits)).then_some(true)
}

/// From one output and one group to the next, in scales or zero points of outputs and groups.
fn strides(part: &Part, strategy: Strategy, [outputs, count]: [usize; 2]) -> Option<[usize; 2]> {
    match (strategy, &*part.shape) {
        (Strategy::Tensor, [] | [1] | [1, 1]) => Some([0, 0]),
        (Strategy::Channel, [rows] | [rows, 1]) if *rows == outputs => Some([1, 0]),
        (Strategy::Group(_), [rows, groups]) if [*rows, *groups] == [outputs, count] => {
            Some([count, 1])
        }
        _ => None,
    }
}
