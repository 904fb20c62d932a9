//! Scales and minima of 4-bit blocks that are whole multiples of two numbers for each eight blocks, as in GGUF's Q4_K.
//!
//! `real = (integer + 8) · scale + minimum`. As multiples they take 20 bytes for 256 weights, as scales and offsets of
//! f32 64.

use half::f16;
use qhx_types::quantized::{BLOCK, Bits, NIBBLE_ZERO, Quantized, QuantizedForm};

/// Blocks that share a number.
pub const SUPER: usize = 8;
/// Form of the blocks.
const FORM: QuantizedForm = QuantizedForm { bits: Bits::Four, block: BLOCK, offsets: true };
/// Largest multiple.
const LARGEST: u8 = 63;
/// Minima that are more scales than this are all that is left of their elements in f16: the scales are less than half
/// of its own step.
const FLAT: f32 = 32768.0;

/// Scale and offset ([`Quantized`]) of a block with a minimum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shifted {
    /// The scale.
    pub scale: f32,
    /// The offset, in steps of it.
    pub offset: f32,
    /// True if all elements are as good as the same real, so that all integers are to be the lowest one.
    pub flat: bool,
}

impl Shifted {
    /// The block whose reals are `(integer + zero) · scale + minimum`, where `middle` is the mean of these sums.
    pub fn new(scale: f32, minimum: f32, zero: i8, middle: f32) -> Self {
        let zero = f32::from(zero);
        if minimum != 0.0 && minimum.abs() >= FLAT * scale.abs() {
            return Self { scale: minimum + scale * middle, offset: zero + 1.0, flat: true };
        }
        // Elements of 0 without a minimum stay 0.
        let shift = if minimum == 0.0 { 0.0 } else { minimum / scale };
        Self { scale, offset: zero + shift, flat: false }
    }
}

/// The block of 4 bits whose reals are `(integer + 8) · scale + minimum`.
pub fn shifted(scale: f32, minimum: f32) -> Shifted {
    Shifted::new(scale, minimum, NIBBLE_ZERO, 7.5)
}

/// Multiples of each four blocks: of the scales, then of the minima.
pub type Half = [[u8; SUPER / 2]; 2];

/// See the [module](self). Of each super-block what a few instructions read lies beside each other.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SuperBlocks {
    /// Numbers of each super-block, row-major: that of its scales, and that of its minima.
    pub units: Vec<[f16; 2]>,
    /// Multiples of these, at most 63.
    pub multiples: Vec<[Half; 2]>,
}

/// Places of a block's scale, or of its minimum, among the units and among the multiples.
pub const fn places(block: usize, minimum: bool) -> [usize; 2] {
    let (first, kind) = (block / SUPER, minimum as usize);
    let (half, within) = (block % SUPER / (SUPER / 2), block % (SUPER / 2));
    [2 * first + kind, 2 * SUPER * first + SUPER * half + SUPER / 2 * kind + within]
}

impl SuperBlocks {
    /// Super-blocks of weights with rows of `inputs`; none where scales and minima are no such multiples, bit for bit.
    pub fn of(weights: &Quantized, inputs: usize) -> Option<Self> {
        if weights.form != FORM || inputs == 0 || !inputs.is_multiple_of(SUPER * BLOCK) {
            return None;
        }
        let mut found = Self::default();
        let values = weights.values.as_chunks::<{ SUPER * BLOCK }>().0;
        let numbers = weights.scales.as_chunks::<SUPER>().0.iter();
        let numbers = numbers.zip(weights.offsets.as_chunks::<SUPER>().0);
        for ((scales, offsets), values) in numbers.zip(values) {
            let mut steps = *scales;
            let mut minima = [0.0; SUPER];
            let blocks = values.as_chunks::<BLOCK>().0.iter().zip(offsets);
            for ((step, minimum), (values, offset)) in steps.iter_mut().zip(&mut minima).zip(blocks)
            {
                *minimum = (offset - f32::from(NIBBLE_ZERO)) * *step;
                if *minimum == *step && values.iter().all(|value| *value == -NIBBLE_ZERO) {
                    *step = 0.0;
                }
            }
            let (of_scales, [a, b]) =
                multiples(steps, |block, scale| steps.get(block) == Some(&scale))?;
            let (of_minima, [c, d]) = multiples(minima, |block, minimum| {
                let numbers = (steps.get(block), scales.get(block), offsets.get(block));
                let (Some(step), Some(scale), Some(offset)) = numbers else { return false };
                let block = shifted(*step, minimum);
                block.scale == *scale && block.offset == *offset
            })?;
            found.units.push([of_scales, of_minima]);
            found.multiples.push([[a, c], [b, d]]);
        }
        Some(found)
    }
}

/// A number of which these are multiples, and these, or nothing where there is none: products are asked for by their
/// block whether they are right.
fn multiples(
    numbers: [f32; SUPER],
    is_right: impl Fn(usize, f32) -> bool,
) -> Option<(f16, [[u8; SUPER / 2]; 2])> {
    let largest = numbers
        .into_iter()
        .fold(0f32, |largest, number| if number.abs() > largest.abs() { number } else { largest });
    let multiples = |unit: f32| -> Option<[[u8; SUPER / 2]; 2]> {
        let mut found = [[0; SUPER / 2]; 2];
        let places = found.as_flattened_mut().iter_mut();
        for (block, (to, number)) in places.zip(numbers).enumerate() {
            let multiple = if unit == 0.0 { 0.0 } else { (number / unit).round() };
            let fits = (0.0..=f32::from(LARGEST)).contains(&multiple);
            if !fits || !is_right(block, multiple * unit) {
                return None;
            }
            *to = multiple as u8;
        }
        Some(found)
    };
    let mut units = (1..=LARGEST).rev().map(|most| f16::from_f32(largest / f32::from(most)));
    units.find_map(|unit| Some((unit, multiples(unit.to_f32())?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows of 512 weights whose scales and minima are multiples as in Q4_K.
    fn weights() -> Quantized {
        let mut all = Quantized::zeroed(FORM, 2 * 512);
        let units = [0.001, 0.037, -2.5e-5, 6.1e-5].map(|unit| f16::from_f32(unit).to_f32());
        for (block, (scale, offset)) in all.scales.iter_mut().zip(&mut all.offsets).enumerate() {
            let of_scale = if block % 8 == 3 { 63 } else { (block * 7 + 60) % 64 };
            let of_min = if block % 8 == 5 { 63 } else { block * 11 % 64 };
            let unit = units[block / 8];
            let made = shifted(unit * of_scale as f32, -unit.abs() * 2.0 * of_min as f32);
            (*scale, *offset) = (made.scale, made.offset);
            let values = &mut all.values[block * BLOCK..][..BLOCK];
            let lowest = made.flat.then_some(-8);
            values
                .iter_mut()
                .enumerate()
                .for_each(|(at, q)| *q = lowest.unwrap_or(at as i8 % 16 - 8));
        }
        all
    }

    #[test]
    fn multiples_stand_for_the_very_scales_and_offsets() {
        let all = weights();
        // A block of which nothing is left but the minimum.
        assert!(all.offsets.contains(&9.0), "{:?}", all.offsets);
        let found = SuperBlocks::of(&all, 512).unwrap();
        let product = |block: usize, minimum: bool| {
            let [unit, multiple] = places(block, minimum);
            let multiples = found.multiples.as_flattened().as_flattened().as_flattened();
            found.units.as_flattened()[unit].to_f32() * f32::from(multiples[multiple])
        };
        for block in 0..all.scales.len() {
            let made = shifted(product(block, false), product(block, true));
            assert_eq!(
                (made.scale, made.offset),
                (all.scales[block], all.offsets[block]),
                "{block}"
            );
        }
    }

    #[test]
    fn other_scales_are_no_multiples() {
        let with = |change: fn(&mut Quantized)| {
            let mut all = weights();
            change(&mut all);
            SuperBlocks::of(&all, 512)
        };
        assert!(with(|_| {}).is_some());
        assert_eq!(with(|all| all.scales[4] *= 1.001), None);
        assert_eq!(with(|all| all.offsets[4] += 0.001), None);
        assert_eq!(with(|all| all.scales[9] = f32::NAN), None);
        assert_eq!(with(|all| all.offsets[9] = f32::INFINITY), None);
        assert_eq!(with(|all| all.scales[9] *= -1.0), None);
        assert_eq!(SuperBlocks::of(&weights(), 128), None);
        let symmetric = Quantized::zeroed(QuantizedForm::symmetric(Bits::Four, BLOCK), 512);
        assert_eq!(SuperBlocks::of(&symmetric, 512), None);
    }
}
