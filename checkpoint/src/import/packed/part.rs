//! Tensors of a safetensors file that are parts of a quantized layer.

use std::ops::Range;

use half::{bf16, f16};
use qhx_base::artifacts::Mapped;
use safetensors::Dtype;

/// Bytes of a word.
pub(super) const WORD: usize = 4;

/// A tensor of the file that is a part of a quantized layer.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub map: Mapped,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Range<usize>,
}

impl Part {
    pub fn bytes(&self) -> &[u8] {
        self.map.bytes().get(self.bytes.clone()).unwrap_or_default()
    }

    pub fn byte(&self, at: usize) -> u8 {
        self.bytes().get(at).copied().unwrap_or(0)
    }

    /// The words from `at` on.
    pub fn words(&self, at: usize) -> impl Iterator<Item = u32> {
        let bytes = at.checked_mul(WORD).and_then(|at| self.bytes().get(at..));
        bytes.unwrap_or_default().as_chunks::<WORD>().0.iter().map(|word| u32::from_le_bytes(*word))
    }

    pub fn word(&self, at: usize) -> u32 {
        self.words(at).next().unwrap_or(0)
    }

    /// The element `at`, of a tensor that holds numbers as scales are stored; NaN where there is none.
    pub fn number(&self, at: usize) -> f32 {
        let two = || self.bytes().get(2 * at..).and_then(|rest| rest.first_chunk::<2>());
        let four = || self.bytes().get(4 * at..).and_then(|rest| rest.first_chunk::<4>());
        let one = || self.bytes().get(at).copied();
        let found = match self.dtype {
            Dtype::F16 => two().map(|pair| f16::from_le_bytes(*pair).to_f32()),
            Dtype::BF16 => two().map(|pair| bf16::from_le_bytes(*pair).to_f32()),
            Dtype::F32 => four().map(|quad| f32::from_le_bytes(*quad)),
            Dtype::F8_E8M0 | Dtype::U8 => one().map(power),
            Dtype::I8 => one().map(|byte| f32::from(byte.cast_signed())),
            _ => None,
        };
        found.unwrap_or(f32::NAN)
    }

    /// Its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The power of two that e8m0 stands for (OCP Microscaling Formats 1.0, 5.4.1).
const fn power(exponent: u8) -> f32 {
    match exponent {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        _ => f32::from_bits((exponent as u32) << 23),
    }
}

/// Scales or absolute maxima of a layer: one for each group of inputs of an output, or fewer.
#[derive(Debug, Clone)]
pub(super) struct Numbers {
    pub part: Part,
    /// From one output to the next, and from one group to the next. 0: they have it in common.
    pub strides: [usize; 2],
    /// Outputs that have it in common.
    pub rows: usize,
    pub factor: f32,
    /// Maps an output to the position of its number.
    pub place: fn(usize) -> usize,
}

impl Numbers {
    /// Numbers in this order; `[outputs, groups]` as the layer has them.
    pub fn new(part: Part, strides: [usize; 2]) -> Self {
        Self { part, strides, rows: 1, factor: 1.0, place: |output| output }
    }

    pub fn get(&self, output: usize, group: usize) -> f32 {
        let output = (self.place)(output / self.rows.max(1));
        self.part.number(output * self.strides[0] + group * self.strides[1]) * self.factor
    }
}
