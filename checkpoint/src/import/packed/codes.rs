//! Layers of numbers that are not evenly spaced: floating point of 8 bits, and the 16 values of bitsandbytes.

use half::f16;
use qhx_base::Result;
use qhx_types::quantized::{BLOCK, Bits, QuantizedForm};

use super::fields::Fields;
use super::part::{Numbers, Part};
use super::{Layer, Matrix};

/// Floating point of 8 bits with a scale for each block of outputs and inputs.
#[derive(Debug)]
pub(super) struct Floats {
    /// Outputs, inputs.
    pub shape: [usize; 2],
    pub part: Part,
    /// Four bits of exponent and three of mantissa, without infinities; else five and two.
    pub e4m3: bool,
    pub scales: Numbers,
    /// Inputs that share a scale.
    pub block: usize,
}

impl Layer for Floats {
    fn name(&self) -> &'static str {
        if self.e4m3 { "FP8 e4m3" } else { "FP8 e5m2" }
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// None, because the scaled values round to any form, like other floating point.
    fn nearest_form(&self) -> Option<QuantizedForm> {
        None
    }

    fn read_f32(&self, matrix: &Matrix, first: usize, out: &mut [f32]) -> Result<()> {
        let _ = matrix;
        let [_, inputs] = self.shape;
        for (row, out) in out.chunks_exact_mut(inputs.max(1)).enumerate() {
            let row = first + row;
            for (block, out) in out.chunks_mut(self.block.max(1)).enumerate() {
                let scale = self.scales.get(row, block);
                for (input, to) in out.iter_mut().enumerate() {
                    let byte = self.part.byte(row * inputs + block * self.block + input);
                    *to = eight_bits(self.e4m3, byte) * scale;
                }
            }
        }
        Ok(())
    }
}

/// Floating point of 8 bits (arXiv 2209.05433): e4m3 has one NaN and no infinity, e5m2 is the upper half of an f16.
fn eight_bits(e4m3: bool, byte: u8) -> f32 {
    let half = if e4m3 { u16::from(byte & 0x7f) << 7 } else { u16::from(byte & 0x7f) << 8 };
    let sign = if byte > 0x7f { -1.0 } else { 1.0 };
    match e4m3 {
        true if byte & 0x7f == 0x7f => f32::NAN,
        // The exponents' biases are 15 and 7.
        true => f16::from_bits(half).to_f32() * 256.0 * sign,
        false => f16::from_bits(half).to_f32() * sign,
    }
}

/// The values of NF4 or FP4 of bitsandbytes, with an absolute maximum for each block of consecutive elements.
#[derive(Debug)]
pub(super) struct Sixteen {
    pub name: &'static str,
    /// Outputs, inputs.
    pub shape: [usize; 2],
    /// One line of all elements.
    pub fields: Fields,
    pub table: [f32; 16],
    pub block: usize,
    pub maxima: Maxima,
}

/// The absolute maxima of blocks.
#[derive(Debug)]
pub(super) enum Maxima {
    Plain(Part),
    /// Quantized themselves: numbers of the 256 values of `map`, which have absolute maxima of blocks of their own.
    Nested {
        bytes: Part,
        map: Part,
        maxima: Part,
        block: usize,
        offset: f32,
    },
}

impl Maxima {
    fn get(&self, at: usize) -> f32 {
        match self {
            Self::Plain(part) => part.number(at),
            Self::Nested { bytes, map, maxima, block, offset } => {
                let value = map.number(usize::from(bytes.byte(at)));
                value * maxima.number(at / (*block).max(1)) + offset
            }
        }
    }
}

impl Layer for Sixteen {
    fn name(&self) -> &'static str {
        self.name
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn nearest_form(&self) -> Option<QuantizedForm> {
        let own = self.block.is_multiple_of(BLOCK) && self.shape[1].is_multiple_of(self.block);
        Some(QuantizedForm::symmetric(Bits::Eight, if own { self.block } else { BLOCK }))
    }

    fn read_f32(&self, _: &Matrix, first: usize, out: &mut [f32]) -> Result<()> {
        let start = first * self.shape[1];
        let (mut block, mut peak) = (usize::MAX, f32::NAN);
        for (at, to) in (start..).zip(out) {
            if at / self.block != block {
                block = at / self.block;
                peak = self.maxima.get(block);
            }
            let value = self.table.get(usize::from(self.fields.get(0, at))).copied();
            *to = value.unwrap_or(f32::NAN) * peak;
        }
        Ok(())
    }
}
