//! How ggml stores elements (`ggml-common.h`, `ggml-quants.c`).

use half::f16;
use qhx_core::DType;
use qhx_core::quantized::{Bits, NIBBLE_ZERO, QuantizedForm, from_nibble};

use crate::floats;

/// Elements of a block of the older forms.
const BLOCK: usize = 32;
/// Elements that the K-quants store together.
const SUPER: usize = 256;
/// Bytes of a block of Q6_K: low bits, high bits, scales, and the scale of these.
const Q6_K: usize = SUPER / 2 + SUPER / 4 + SUPER / 16 + 2;

/// How the elements of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    F32,
    F16,
    Bf16,
    /// `value · scale`, 4 bits.
    Q4_0,
    /// `value · scale + min`, 4 bits.
    Q4_1,
    /// `value · scale`, 8 bits.
    Q8_0,
    /// 6 bits in blocks of 16. `llama-quantize` stores the head so, or the embedding table in its place, whatever
    /// else it is asked for. The graphs have no such form: the values are read as floats.
    Q6K,
}

impl Form {
    /// What can be read, for messages.
    pub const NAMES: &'static str = "F32, F16, BF16, Q4_0, Q4_1, Q8_0 or Q6_K";

    /// By ggml's number; else the name of what it is.
    pub fn of(kind: u32) -> Result<Self, String> {
        let name = match kind {
            0 => return Ok(Self::F32),
            1 => return Ok(Self::F16),
            2 => return Ok(Self::Q4_0),
            3 => return Ok(Self::Q4_1),
            8 => return Ok(Self::Q8_0),
            14 => return Ok(Self::Q6K),
            30 => return Ok(Self::Bf16),
            6 => "Q5_0",
            7 => "Q5_1",
            9 => "Q8_1",
            10 => "Q2_K",
            11 => "Q3_K",
            12 => "Q4_K",
            13 => "Q5_K",
            15 => "Q8_K",
            16 => "IQ2_XXS",
            17 => "IQ2_XS",
            18 => "IQ3_XXS",
            19 => "IQ1_S",
            20 => "IQ4_NL",
            21 => "IQ3_S",
            22 => "IQ2_S",
            23 => "IQ4_XS",
            24..=27 => "integers",
            28 => "F64",
            29 => "IQ1_M",
            34 => "TQ1_0",
            35 => "TQ2_0",
            39 => "MXFP4",
            40 => "NVFP4",
            _ => return Err(format!("ggml's type {kind}")),
        };
        Err(name.to_owned())
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q8_0 => "Q8_0",
            Self::Q6K => "Q6_K",
        }
    }

    /// Elements that are stored together, and their bytes.
    pub const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (BLOCK, 2 + BLOCK / 2),
            Self::Q4_1 => (BLOCK, 4 + BLOCK / 2),
            Self::Q8_0 => (BLOCK, 2 + BLOCK),
            Self::Q6K => (SUPER, Q6_K),
        }
    }

    /// The form of its quantized weights, where graphs can hold them.
    pub const fn block_form(self) -> Option<QuantizedForm> {
        match self {
            Self::Q4_0 => Some(QuantizedForm::symmetric(Bits::Four, BLOCK)),
            Self::Q4_1 => Some(QuantizedForm { bits: Bits::Four, block: BLOCK, offsets: true }),
            Self::Q8_0 => Some(QuantizedForm::symmetric(Bits::Eight, BLOCK)),
            _ => None,
        }
    }

    /// Reads whole blocks as floats.
    pub fn floats(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => floats::to_f32(DType::F32, bytes, out),
            Self::F16 => floats::to_f32(DType::F16, bytes, out),
            Self::Bf16 => floats::to_f32(DType::Bf16, bytes, out),
            Self::Q4_0 | Self::Q8_0 => {
                let mut values = [0i8; BLOCK];
                for (out, block) in self.blocks(bytes, out) {
                    let (scale, _) = self.unpack(block, &mut values);
                    out.iter_mut().zip(values).for_each(|(o, v)| *o = f32::from(v) * scale);
                }
            }
            Self::Q4_1 => {
                let mut values = [0i8; BLOCK];
                for (out, block) in self.blocks(bytes, out) {
                    self.unpack(block, &mut values);
                    // As ggml computes it, which is more precise than by way of the offset.
                    let (scale, min) = (half_at(block, 0), half_at(block, 2));
                    let real = |v: i8| (f32::from(v) + f32::from(NIBBLE_ZERO)) * scale + min;
                    out.iter_mut().zip(values).for_each(|(o, v)| *o = real(v));
                }
            }
            Self::Q6K => {
                for (out, block) in self.blocks(bytes, out) {
                    six_bits(block, out);
                }
            }
        }
    }

    /// Quantized of elements with their bytes.
    fn blocks<'a>(
        self,
        bytes: &'a [u8],
        out: &'a mut [f32],
    ) -> impl Iterator<Item = (&'a mut [f32], &'a [u8])> {
        let (elements, size) = self.block();
        out.chunks_exact_mut(elements).zip(bytes.chunks_exact(size))
    }

    /// The quantized values of a block, for [`Form::block_form`], with their scale and offset: `(value + offset) ·
    /// scale`.
    pub fn unpack(self, block: &[u8], values: &mut [i8]) -> (f32, f32) {
        let scale = half_at(block, 0);
        let head = self.block().1 - if self == Self::Q8_0 { BLOCK } else { BLOCK / 2 };
        let stored = block.get(head..).unwrap_or_default();
        if self == Self::Q8_0 {
            values.iter_mut().zip(stored).for_each(|(value, byte)| *value = byte.cast_signed());
            return (scale, 0.0);
        }
        // Elements 0 to 15 are the low halves of the bytes, 16 to 31 the high ones.
        let (low, high) = values.split_at_mut(BLOCK / 2);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(stored) {
            *low = from_nibble(*byte);
            *high = from_nibble(byte >> 4);
        }
        if self == Self::Q4_0 {
            return (scale, 0.0);
        }
        let min = half_at(block, 2);
        match (scale == 0.0, min == 0.0) {
            (false, _) => (scale, f32::from(NIBBLE_ZERO) + min / scale),
            (true, true) => (0.0, 0.0),
            // One value for all: ggml stores zeros, which are −8 here.
            (true, false) => {
                values.fill(-8);
                (min, 9.0)
            }
        }
    }
}

/// A block of Q6_K (`dequantize_row_q6_K`).
fn six_bits(block: &[u8], out: &mut [f32]) {
    let (low, rest) = block.split_at(SUPER / 2);
    let (high, rest) = rest.split_at(SUPER / 4);
    let (scales, _) = rest.split_at(SUPER / 16);
    let scale = half_at(block, Q6_K - 2);
    // Two halves of 128 elements: 64 bytes of low bits, 32 of high bits, 8 scales.
    let halves = out.chunks_exact_mut(128).zip(low.chunks_exact(64)).zip(high.chunks_exact(32));
    for (((out, low), high), scales) in halves.zip(scales.chunks_exact(8)) {
        let (first, second) = low.split_at(32);
        for (quarter, out) in out.chunks_exact_mut(32).enumerate() {
            let low = if quarter % 2 == 0 { first } else { second };
            for (i, ((out, low), high)) in out.iter_mut().zip(low).zip(high).enumerate() {
                let four = if quarter < 2 { low & 15 } else { low >> 4 };
                let two = high >> (2 * quarter) & 3;
                let value = f32::from((four | two << 4).cast_signed() - 32);
                let inner = scales.get(2 * quarter + i / 16).map_or(0, |s| s.cast_signed());
                *out = scale * f32::from(inner) * value;
            }
        }
    }
}

/// The f16 at a place of a block.
fn half_at(block: &[u8], at: usize) -> f32 {
    let pair = block.get(at..).and_then(|rest| rest.first_chunk::<2>());
    pair.map_or(f32::NAN, |pair| f16::from_le_bytes(*pair).to_f32())
}
