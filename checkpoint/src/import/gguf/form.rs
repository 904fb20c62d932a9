//! Storage formats of ggml's elements (`ggml-common.h`, `ggml-quants.c`).
//!
//! A unit is what a form stores together: 32 elements, or the 256 of the K-quants. Within it each 32 or 16 neighbours
//! share a step and a minimum: `real = integer · step + minimum`.

use half::f16;
use qhx_graph::super_blocks::Shifted;
use qhx_types::DType;
use qhx_types::quantized::{BLOCK, Bits, NIBBLE_ZERO, QuantizedForm, QuantizedMut};

use crate::floats;

/// Elements that the K-quants store together.
const SUPER: usize = 256;
/// Elements of a unit of Q1_0.
const ONES: usize = 128;
/// Bytes of the eight scales and minima of Q4_K and Q5_K, 6 bits each, and of the 16 scales of Q3_K.
const SIXES: usize = 12;
/// More parts than a unit has.
const PARTS: usize = 16;
/// The values of 4 bits of IQ4_NL and IQ4_XS (`kvalues_iq4nl`).
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// The values of MXFP4, e2m1, doubled (`kvalues_mxfp4`).
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// Bytes of TQ1_0 with five values each, and those with four.
const FIVES: usize = 48;
const FOURS: usize = 4;
/// Each form in the order of [`Form`]: ggml's number, the name, and elements and bytes of a unit.
const FORMS: [(u32, Form, &str, (usize, usize)); 19] = [
    (0, Form::F32, "F32", (1, 4)),
    (1, Form::F16, "F16", (1, 2)),
    (30, Form::Bf16, "BF16", (1, 2)),
    (2, Form::Q4_0, "Q4_0", (BLOCK, 2 + BLOCK / 2)),
    (3, Form::Q4_1, "Q4_1", (BLOCK, 4 + BLOCK / 2)),
    (6, Form::Q5_0, "Q5_0", (BLOCK, 2 + 4 + BLOCK / 2)),
    (7, Form::Q5_1, "Q5_1", (BLOCK, 4 + 4 + BLOCK / 2)),
    (8, Form::Q8_0, "Q8_0", (BLOCK, 2 + BLOCK)),
    (10, Form::Q2K, "Q2_K", (SUPER, SUPER / 16 + SUPER / 4 + 4)),
    (11, Form::Q3K, "Q3_K", (SUPER, SUPER / 8 + SUPER / 4 + SIXES + 2)),
    (12, Form::Q4K, "Q4_K", (SUPER, 4 + SIXES + SUPER / 2)),
    (13, Form::Q5K, "Q5_K", (SUPER, 4 + SIXES + SUPER / 8 + SUPER / 2)),
    (14, Form::Q6K, "Q6_K", (SUPER, SUPER / 2 + SUPER / 4 + SUPER / 16 + 2)),
    (20, Form::Iq4Nl, "IQ4_NL", (BLOCK, 2 + BLOCK / 2)),
    (23, Form::Iq4Xs, "IQ4_XS", (SUPER, 2 + 2 + SUPER / 64 + SUPER / 2)),
    (39, Form::Mxfp4, "MXFP4", (BLOCK, 1 + BLOCK / 2)),
    (34, Form::Tq1, "TQ1_0", (SUPER, FIVES + FOURS + 2)),
    (35, Form::Tq2, "TQ2_0", (SUPER, SUPER / 4 + 2)),
    (41, Form::Q1_0, "Q1_0", (ONES, 2 + ONES / 8)),
];
const _: () = {
    let mut at = 0;
    while at < FORMS.len() {
        assert!(FORMS[at].1 as usize == at);
        at += 1;
    }
};
/// Numbers of ggml's other formats.
const UNREAD: [(&[u32], &str); 13] = [
    (&[9], "Q8_1"),
    (&[15], "Q8_K"),
    (&[16], "IQ2_XXS"),
    (&[17], "IQ2_XS"),
    (&[18], "IQ3_XXS"),
    (&[19], "IQ1_S"),
    (&[21], "IQ3_S"),
    (&[22], "IQ2_S"),
    (&[24, 25, 26, 27], "integers"),
    (&[28], "F64"),
    (&[29], "IQ1_M"),
    (&[40], "NVFP4"),
    (&[42], "Q2_0"),
];

/// Storage format of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    F32,
    F16,
    Bf16,
    /// 4 bits, with a step.
    Q4_0,
    /// 4 bits, with a step and a minimum.
    Q4_1,
    /// 5 bits, with a step.
    Q5_0,
    /// 5 bits, with a step and a minimum.
    Q5_1,
    /// 8 bits, with a step.
    Q8_0,
    /// 2 bits, each 16 with a step and a minimum of 4 bits.
    Q2K,
    /// 3 bits, each 16 with a step of 6 bits.
    Q3K,
    /// 4 bits, each 32 with a step and a minimum of 6 bits.
    Q4K,
    /// 5 bits, else as [`Form::Q4K`].
    Q5K,
    /// 6 bits, each 16 with a step of 8 bits.
    Q6K,
    /// 16 values that are not evenly spaced, with a step.
    Iq4Nl,
    /// The same, each 32 with a step of 6 bits.
    Iq4Xs,
    /// Floating point of 4 bits, with a power of two.
    Mxfp4,
    /// -1, 0 and 1, five to a byte, with a step.
    Tq1,
    /// The same in 2 bits each.
    Tq2,
    /// -1 and 1, with a step.
    Q1_0,
}

/// Step and minimum that neighbouring elements share.
#[derive(Debug, Clone, Copy)]
struct Part {
    step: f32,
    /// Without one −0, which changes no value that it is added to.
    min: f32,
}

impl Form {
    /// Names of the supported formats, for messages.
    pub const NAMES: &'static str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4, TQ1_0, TQ2_0 or \
         Q1_0";

    /// By ggml's number; else the name of what it is.
    pub fn of(kind: u32) -> Result<Self, String> {
        if let Some((_, form, ..)) = FORMS.iter().find(|(number, ..)| *number == kind) {
            return Ok(*form);
        }
        let unread = UNREAD.iter().find(|(kinds, _)| kinds.contains(&kind));
        Err(unread.map_or_else(|| format!("ggml's type {kind}"), |(_, name)| (*name).to_owned()))
    }

    pub const fn name(self) -> &'static str {
        FORMS[self as usize].2
    }

    /// Elements of a unit, and its bytes.
    pub const fn unit(self) -> (usize, usize) {
        FORMS[self as usize].3
    }

    /// Elements that share a step.
    const fn part(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q2K | Self::Q3K | Self::Q6K => 16,
            _ => BLOCK,
        }
    }

    /// The form of its quantized weights, where graphs can hold the very integers. Those of 5 bits, and the values of
    /// IQ4 and MXFP4, are integers of 8 bits there.
    pub const fn block_form(self) -> Option<QuantizedForm> {
        let (bits, offsets) = match self {
            Self::Q4_0 | Self::Tq1 | Self::Tq2 | Self::Q1_0 => (Bits::Four, false),
            Self::Q4_1 | Self::Q4K => (Bits::Four, true),
            Self::Q5_0 | Self::Q8_0 | Self::Iq4Nl | Self::Iq4Xs | Self::Mxfp4 => {
                (Bits::Eight, false)
            }
            Self::Q5_1 | Self::Q5K => (Bits::Eight, true),
            _ => return None,
        };
        Some(QuantizedForm { bits, block: BLOCK, offsets })
    }

    /// The form of integers of a graph that is nearest to it; none for floating point. Steps of 16 elements each are
    /// the NPU's, and not the CPU's, so that the values are rounded to 8 bits, of which a block of 32 has 255.
    pub const fn nearest_form(self) -> Option<QuantizedForm> {
        match self {
            Self::Q2K | Self::Q3K | Self::Q6K => Some(QuantizedForm::symmetric(Bits::Eight, BLOCK)),
            _ => self.block_form(),
        }
    }

    /// Reads whole units as floats: bit for bit what ggml reads.
    pub fn floats(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => return floats::to_f32(DType::F32, bytes, out),
            Self::F16 => return floats::to_f32(DType::F16, bytes, out),
            Self::Bf16 => return floats::to_f32(DType::Bf16, bytes, out),
            _ => {}
        }
        let (elements, size) = self.unit();
        let mut values = [0i8; SUPER];
        // A unit says nothing of further values, which are of no unit.
        let (values, _) = values.split_at_mut(elements.min(SUPER));
        for (out, unit) in out.chunks_exact_mut(elements).zip(bytes.chunks_exact(size)) {
            let parts = self.read(unit, values);
            let read = out.chunks_mut(self.part()).zip(values.chunks(self.part()));
            for ((out, values), Part { step, min }) in read.zip(parts) {
                for (out, value) in out.iter_mut().zip(values) {
                    *out = f32::from(*value) * step + min;
                }
            }
        }
    }

    /// The quantized values of whole units, in [`Form::block_form`].
    pub fn unpack(self, bytes: &[u8], out: QuantizedMut<'_>) {
        let (elements, size) = self.unit();
        // Values of 4 bits with a minimum are 0 to 15 in the file.
        let lift = if out.form.bits == Bits::Four && out.form.offsets { NIBBLE_ZERO } else { 0 };
        let middle = if lift > 0 { 7.5 } else { 15.5 };
        let mut scales = out.scales.iter_mut();
        let mut offsets = out.offsets.iter_mut();
        for (values, unit) in out.values.chunks_exact_mut(elements).zip(bytes.chunks_exact(size)) {
            let parts = self.read(unit, values);
            for (values, Part { step, min }) in values.chunks_mut(BLOCK).zip(parts) {
                let Shifted { scale, offset, flat } = Shifted::new(step, min, lift, middle);
                match flat {
                    true => values.fill(-lift),
                    false => values.iter_mut().for_each(|value| *value = value.wrapping_sub(lift)),
                }
                scales.next().into_iter().for_each(|place| *place = scale);
                offsets.next().into_iter().for_each(|place| *place = offset);
            }
        }
    }

    /// The integers of a unit, and what its parts have in common.
    fn read(self, unit: &[u8], values: &mut [i8]) -> [Part; PARTS] {
        let mut parts = [Part { step: 0.0, min: -0.0 }; PARTS];
        let mut one = |step: f32, min: f32| {
            if let Some(part) = parts.first_mut() {
                *part = Part { step, min };
            }
        };
        let from = |at: usize| unit.get(at..).unwrap_or_default();
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => {}
            Self::Q4_0 => {
                one(half_at(unit, 0), -0.0);
                nibbles(from(2), BLOCK / 2, values);
                values.iter_mut().for_each(|value| *value -= 8);
            }
            Self::Q4_1 => {
                one(half_at(unit, 0), half_at(unit, 2));
                nibbles(from(4), BLOCK / 2, values);
            }
            Self::Q5_0 => {
                one(half_at(unit, 0), -0.0);
                nibbles(from(6), BLOCK / 2, values);
                fifth_bits(from(2), values);
                values.iter_mut().for_each(|value| *value -= 16);
            }
            Self::Q5_1 => {
                one(half_at(unit, 0), half_at(unit, 2));
                nibbles(from(8), BLOCK / 2, values);
                fifth_bits(from(4), values);
            }
            Self::Q8_0 => {
                one(half_at(unit, 0), -0.0);
                let stored = values.iter_mut().zip(from(2));
                stored.for_each(|(value, byte)| *value = byte.cast_signed());
            }
            Self::Iq4Nl => {
                one(half_at(unit, 0), -0.0);
                nibbles(from(2), BLOCK / 2, values);
                look_up(&IQ4, values);
            }
            Self::Mxfp4 => {
                one(half_power(unit.first().copied().unwrap_or(u8::MAX)), -0.0);
                nibbles(from(1), BLOCK / 2, values);
                look_up(&E2M1, values);
            }
            Self::Q2K => {
                let (step, min) = (half_at(unit, 80), half_at(unit, 82));
                for (part, both) in parts.iter_mut().zip(unit) {
                    part.step = step * f32::from(both & 15);
                    part.min = -(min * f32::from(both >> 4));
                }
                pairs(from(16), values);
            }
            Self::Q3K => {
                let step = half_at(unit, 108);
                let (low, high) = (from(96), from(104));
                for (index, part) in parts.iter_mut().enumerate() {
                    let low = byte(low, index % 8) >> (index / 8 * 4) & 15;
                    let high = byte(high, index % 4) >> (index / 4 * 2) & 3;
                    part.step = step * f32::from((low | high << 4).cast_signed() - 32);
                }
                pairs(from(32), values);
                // The third bit of each 32 elements is at another place of the same bytes; without it they are
                // negative.
                for (place, values) in values.chunks_mut(32).enumerate() {
                    for (value, byte) in values.iter_mut().zip(unit) {
                        *value -= if byte >> (place % 8) & 1 == 0 { 4 } else { 0 };
                    }
                }
            }
            Self::Q4K => {
                sixes(unit, &mut parts);
                nibbles(from(4 + SIXES), 32, values);
            }
            Self::Q5K => {
                sixes(unit, &mut parts);
                nibbles(from(4 + SIXES + SUPER / 8), 32, values);
                let high = from(4 + SIXES);
                for (place, values) in values.chunks_mut(32).enumerate() {
                    for (value, byte) in values.iter_mut().zip(high) {
                        *value |= (byte >> (place % 8) & 1).cast_signed() << 4;
                    }
                }
            }
            Self::Q6K => {
                let step = half_at(unit, 208);
                for (part, scale) in parts.iter_mut().zip(from(192)) {
                    part.step = step * f32::from(scale.cast_signed());
                }
                nibbles(unit, 64, values);
                // Each 32 bytes hold two bits of each of 128 elements.
                let halves = values.chunks_mut(SUPER / 2).zip(from(128).chunks(32));
                for (values, high) in halves {
                    for (place, values) in values.chunks_mut(32).enumerate() {
                        for (value, byte) in values.iter_mut().zip(high) {
                            let two = byte >> (place % 4 * 2) & 3;
                            *value = (*value | (two << 4).cast_signed()) - 32;
                        }
                    }
                }
            }
            Self::Iq4Xs => {
                let step = half_at(unit, 0);
                let high = u16::from_le_bytes([byte(unit, 2), byte(unit, 3)]);
                for (index, part) in parts.iter_mut().take(SUPER / BLOCK).enumerate() {
                    let low = byte(unit, 4 + index / 2) >> (index % 2 * 4) & 15;
                    let high = (high >> (2 * index) & 3) as u8;
                    part.step = step * f32::from((low | high << 4).cast_signed() - 32);
                }
                nibbles(from(8), BLOCK / 2, values);
                look_up(&IQ4, values);
            }
            Self::Tq1 => {
                all(&mut parts, half_at(unit, FIVES + FOURS));
                thirds(unit, values);
            }
            Self::Tq2 => {
                all(&mut parts, half_at(unit, SUPER / 4));
                pairs(unit, values);
                values.iter_mut().for_each(|value| *value -= 1);
            }
            Self::Q1_0 => {
                all(&mut parts, half_at(unit, 0));
                for (index, value) in values.iter_mut().enumerate() {
                    let bit = byte(unit, 2 + index / 8) >> (index % 8) & 1;
                    *value = 2 * bit.cast_signed() - 1;
                }
            }
        }
        parts
    }
}

/// The halves of bytes as integers from 0 to 15: of each `group` bytes all low ones, then all high ones.
fn nibbles(bytes: &[u8], group: usize, values: &mut [i8]) {
    for (values, bytes) in values.chunks_mut(2 * group).zip(bytes.chunks(group)) {
        let (low, high) = values.split_at_mut(group.min(values.len()));
        for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
            *low = (byte & 15).cast_signed();
            *high = (byte >> 4).cast_signed();
        }
    }
}

/// The quarters of bytes as integers from 0 to 3: of each 32 bytes all lowest ones first.
fn pairs(bytes: &[u8], values: &mut [i8]) {
    for (values, bytes) in values.chunks_mut(4 * 32).zip(bytes.chunks(32)) {
        for (place, values) in values.chunks_mut(32).enumerate() {
            for (value, byte) in values.iter_mut().zip(bytes) {
                *value = (byte >> (place % 4 * 2) & 3).cast_signed();
            }
        }
    }
}

/// The values of TQ1_0: 32 bytes and 16 hold five each, four bytes four. All of their first values come first, which
/// are the largest powers of three of a fraction of 256.
fn thirds(bytes: &[u8], values: &mut [i8]) {
    let mut values = values.iter_mut();
    for (at, count, length) in [(0, 5, 32), (32, 5, 16), (FIVES, 4, FOURS)] {
        for place in 0..count {
            for index in at..at + length {
                let fraction = byte(bytes, index).wrapping_mul(3u8.pow(place));
                let third = ((u16::from(fraction) * 3) >> 8) as i8;
                values.next().into_iter().for_each(|value| *value = third - 1);
            }
        }
    }
}

/// One step for a whole unit.
fn all(parts: &mut [Part; PARTS], step: f32) {
    parts.fill(Part { step, min: -0.0 });
}

/// Adds the fifth bits of 32 elements.
fn fifth_bits(bytes: &[u8], values: &mut [i8]) {
    for (index, value) in values.iter_mut().enumerate() {
        *value |= (byte(bytes, index / 8) >> (index % 8) & 1).cast_signed() << 4;
    }
}

/// Numbers of values as these values.
fn look_up(table: &[i8; 16], values: &mut [i8]) {
    for value in values {
        *value = table.get(usize::from(value.cast_unsigned() & 15)).copied().unwrap_or(0);
    }
}

/// The steps and minima of Q4_K and Q5_K. Four of each are the low six bits of bytes, whose high two bits are those of
/// the other four.
fn sixes(unit: &[u8], parts: &mut [Part]) {
    let (step, min) = (half_at(unit, 0), half_at(unit, 2));
    let packed = unit.get(4..).unwrap_or_default();
    for (index, part) in parts.iter_mut().take(8).enumerate() {
        let [steps, mins, rest] = [0, 4, 8].map(|at| byte(packed, at + index % 4));
        let (of_step, of_min) = match index < 4 {
            true => (steps & 63, mins & 63),
            false => (rest & 15 | steps >> 6 << 4, rest >> 4 | mins >> 6 << 4),
        };
        *part = Part { step: step * f32::from(of_step), min: -(min * f32::from(of_min)) };
    }
}

/// Half of the power of two that e8m0 stands for (`ggml_e8m0_to_fp32_half`).
const fn half_power(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        0 | 1 => 0x0020_0000 << exponent,
        _ => (exponent as u32 - 1) << 23,
    })
}

fn byte(bytes: &[u8], at: usize) -> u8 {
    bytes.get(at).copied().unwrap_or(0)
}

/// The f16 at a place of a unit.
fn half_at(unit: &[u8], at: usize) -> f32 {
    let pair = unit.get(at..).and_then(|rest| rest.first_chunk::<2>());
    pair.map_or(f32::NAN, |pair| f16::from_le_bytes(*pair).to_f32())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_units_of_a_long_row_are_read_as_each_alone() {
        for form in [Form::Q4_0, Form::Q4_1, Form::Q5_0, Form::Q5_1, Form::Q8_0] {
            let (elements, size) = form.unit();
            // A step of 1, and whatever else.
            let unit = |n: usize| {
                let byte =
                    |at: usize| if at < 2 { [0, 0x3c][at] } else { (at * 37 + n * 11) as u8 };
                (0..size).map(byte).collect::<Vec<_>>()
            };
            let units: Vec<_> = (0..40).map(unit).collect();
            let mut row = vec![0.0; 40 * elements];
            form.floats(&units.concat(), &mut row);
            for (unit, read) in units.iter().zip(row.chunks(elements)) {
                let mut alone = vec![0.0; elements];
                form.floats(unit, &mut alone);
                let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(read), bits(&alone), "{form:?}");
            }
        }
    }
}
