//! Quantized weights: how a matrix `[outputs, inputs]` of low-bit integers is stored, and the reals they stand for.
//!
//! `real = (integer + offset) · scale`. Integers are signed: −8 to 7 or −128 to 127. A scale, and where a form has them
//! an offset, belongs to a block: consecutive inputs of one output. A block of all inputs is one scale per output
//! channel. Blocks divide a row; no row is padded. In memory an integer takes a byte. Files with four bits hold two in
//! a byte ([`pack_nibbles`]). Scales and offsets are f32; the NPU library rounds those of blocks to f16.
//!
//! The forge writes these forms, the QNN backend encodes them, and the CPU backend multiplies them as they are. Other
//! programs' checkpoints (GGUF, GPTQ, AWQ) are read into them. The encoding of a graph's tensor that holds activations
//! or int8 inputs is [`Quantization`](crate::Quantization).

/// Inputs of a block where the forge chooses, as in GGUF's Q4_0. The CPU backend multiplies blocks of this length;
/// longer ones are several with equal scales ([`QuantizedForm::pieces`]).
pub const BLOCK: usize = 32;

/// Largest multiple in [`Quantized::multiples`].
pub const MULTIPLES: u8 = 16;

/// Number added to a 4-bit integer that is stored without a sign, as a nibble.
pub const NIBBLE_ZERO: i8 = 8;

/// Width of the integers of a [`QuantizedForm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bits {
    /// −8 to 7.
    Four,
    /// −128 to 127.
    Eight,
}

impl Bits {
    /// The number.
    pub const fn count(self) -> u32 {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// Smallest and largest integer.
    pub const fn range(self) -> (i8, i8) {
        match self {
            Self::Four => (-NIBBLE_ZERO, NIBBLE_ZERO - 1),
            Self::Eight => (i8::MIN, i8::MAX),
        }
    }

    /// Bytes of this number of integers, two of 4 bits in one.
    pub const fn packed(self, integers: u64) -> u64 {
        match self {
            Self::Four => integers.div_ceil(2),
            Self::Eight => integers,
        }
    }

    /// Number that inputs and blocks must be a multiple of for the NPU library. Otherwise it computes wrong numbers and
    /// reports no error.
    pub const fn npu_multiple(self) -> usize {
        match self {
            Self::Four => 8,
            Self::Eight => 4,
        }
    }
}

/// The form of a matrix of quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QuantizedForm {
    /// Width of the integers.
    pub bits: Bits,
    /// Consecutive inputs of one output channel that share a scale. All inputs: one scale per output channel.
    pub block: usize,
    /// Each scale has an offset. Without, all offsets are 0.
    pub offsets: bool,
}

impl QuantizedForm {
    /// A form without offsets.
    pub const fn symmetric(bits: Bits, block: usize) -> Self {
        Self { bits, block, offsets: false }
    }

    /// Blocks of a row of `inputs`; none where the block does not divide it, or either is 0.
    pub const fn blocks(self, inputs: usize) -> Option<usize> {
        if self.block == 0 || inputs == 0 || !inputs.is_multiple_of(self.block) {
            return None;
        }
        Some(inputs / self.block)
    }

    /// Blocks of [`BLOCK`] inputs that one block is; none where it is no multiple.
    pub const fn pieces(self) -> Option<usize> {
        if self.block == 0 || !self.block.is_multiple_of(BLOCK) {
            return None;
        }
        Some(self.block / BLOCK)
    }

    /// True where a matrix of `inputs` inputs can have this form and the NPU library computes it rightly
    /// ([`Bits::npu_multiple`]).
    pub const fn fits(self, inputs: usize) -> bool {
        self.blocks(inputs).is_some() && self.block.is_multiple_of(self.bits.npu_multiple())
    }

    /// Bytes of a matrix with packed integers, whose scales and offsets take `scale` bytes each.
    pub const fn bytes(self, outputs: u64, inputs: u64, scale: u64) -> u64 {
        let integers = outputs.saturating_mul(inputs);
        let block = if self.block == 0 { 1 } else { self.block as u64 };
        let each = if self.offsets { 2 * scale } else { scale };
        self.bits.packed(integers).saturating_add((integers / block).saturating_mul(each))
    }
}

/// Whole rows of quantized weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized {
    /// Form in which they are stored.
    pub form: QuantizedForm,
    /// Row-major integers, one a byte.
    pub values: Vec<i8>,
    /// Row-major, one per block of a row. Any finite numbers: GGUF's Q4_0 has negative ones.
    pub scales: Vec<f32>,
    /// One offset per scale, or none if all are 0. GPTQ's and AWQ's are whole numbers, Q4_1's are not.
    pub offsets: Vec<f32>,
}

impl Quantized {
    /// So many integers, with their scales and offsets: all 0.
    pub fn zeroed(form: QuantizedForm, integers: usize) -> Self {
        let count = integers / form.block.max(1);
        Self {
            form,
            values: vec![0; integers],
            scales: vec![0.0; count],
            offsets: vec![0.0; if form.offsets { count } else { 0 }],
        }
    }

    /// The same, borrowed.
    pub fn as_ref(&self) -> QuantizedRef<'_> {
        let Self { form, values, scales, offsets } = self;
        QuantizedRef { form: *form, values, scales, offsets }
    }

    /// The same as parts that can be filled.
    pub fn as_mut(&mut self) -> QuantizedMut<'_> {
        let Self { form, values, scales, offsets } = self;
        QuantizedMut { form: *form, values, scales, offsets }
    }
}

/// Scales that are whole multiples of one number for each row: see [`Quantized::multiples`].
#[derive(Debug, Clone, PartialEq)]
pub struct Multiples {
    /// The number, for each row.
    pub rows: Vec<f32>,
    /// Multiple of it for each block, 1 to [`MULTIPLES`], row-major.
    pub blocks: Vec<u8>,
}

impl Quantized {
    /// Scales as whole multiples, for rows of `inputs`; none where those of a row are none. The NPU multiplies integers
    /// of 4 bits by such multiples to integers of 8, and 16-bit activations by these.
    pub fn multiples(&self, inputs: usize) -> Option<Multiples> {
        let count = self.form.blocks(inputs)?;
        let mut found =
            Multiples { rows: Vec::new(), blocks: Vec::with_capacity(self.scales.len()) };
        for scales in self.scales.chunks_exact(count) {
            let largest = scales.iter().fold(0f32, |largest, scale| largest.max(*scale));
            let exact = |unit: f32| {
                scales.iter().all(|scale| {
                    let multiple = (scale / unit).round();
                    multiple >= 1.0 && multiple <= MULTIPLES.into() && multiple * unit == *scale
                })
            };
            let mut units = (1..=MULTIPLES).rev().map(|multiple| largest / f32::from(multiple));
            let unit = units.find(|unit| exact(*unit))?;
            found.rows.push(unit);
            found.blocks.extend(scales.iter().map(|scale| (scale / unit).round() as u8));
        }
        Some(found)
    }
}

/// Whole rows of quantized weights, borrowed: see [`Quantized`].
#[derive(Debug, Clone, Copy)]
pub struct QuantizedRef<'a> {
    /// See [`Quantized::form`].
    pub form: QuantizedForm,
    /// See [`Quantized::values`].
    pub values: &'a [i8],
    /// See [`Quantized::scales`].
    pub scales: &'a [f32],
    /// See [`Quantized::offsets`].
    pub offsets: &'a [f32],
}

impl<'a> QuantizedRef<'a> {
    /// The integers of each block with its scale and its offset.
    fn blocks(self) -> impl Iterator<Item = (&'a [i8], f32, f32)> {
        let offsets = self.offsets.iter().copied().chain(std::iter::repeat(0.0));
        let scaled = self.values.chunks(self.form.block.max(1)).zip(self.scales);
        scaled.zip(offsets).map(|((values, scale), offset)| (values, *scale, offset))
    }

    /// The reals, into `out`, which is as long as [`QuantizedRef::values`]: the reference of all that computes with
    /// such weights.
    pub fn dequantize(self, out: &mut [f32]) {
        let outs = out.chunks_mut(self.form.block.max(1));
        for ((values, scale, offset), out) in self.blocks().zip(outs) {
            for (out, &integer) in out.iter_mut().zip(values) {
                *out = (f32::from(integer) + offset) * scale;
            }
        }
    }

    /// The largest magnitude of a real, of a scale and of an offset.
    pub fn peak(self) -> f32 {
        let mut peak = 0f32;
        for (values, scale, offset) in self.blocks() {
            peak = peak.max(scale.abs()).max(offset.abs());
            for &integer in values {
                peak = peak.max(((f32::from(integer) + offset) * scale).abs());
            }
        }
        peak
    }
}

/// Whole rows of quantized weights that are to be filled: see [`Quantized`].
#[derive(Debug)]
pub struct QuantizedMut<'a> {
    /// See [`Quantized::form`].
    pub form: QuantizedForm,
    /// See [`Quantized::values`].
    pub values: &'a mut [i8],
    /// See [`Quantized::scales`].
    pub scales: &'a mut [f32],
    /// See [`Quantized::offsets`]: empty where the form has none.
    pub offsets: &'a mut [f32],
}

impl QuantizedMut<'_> {
    /// The same parts for a while.
    pub fn reborrow(&mut self) -> QuantizedMut<'_> {
        let Self { form, values, scales, offsets } = self;
        QuantizedMut { form: *form, values, scales, offsets }
    }
}

/// An integer of 4 bits as a nibble, which has no sign.
pub const fn to_nibble(integer: i8) -> u8 {
    integer.wrapping_add(NIBBLE_ZERO).cast_unsigned() & 15
}

/// The integer of a nibble, of which the lower half counts.
pub const fn from_nibble(nibble: u8) -> i8 {
    (nibble & 15).cast_signed() - NIBBLE_ZERO
}

/// Two integers of 4 bits a byte, the first in the lower half. An odd one at the end has the byte for itself.
pub fn pack_nibbles(integers: &[i8]) -> Vec<u8> {
    let pairs = integers.chunks(2).map(|pair| match *pair {
        [low, high] => to_nibble(low) | (to_nibble(high) << 4),
        [low] => to_nibble(low),
        _ => 0,
    });
    pairs.collect()
}

/// The integers of [`pack_nibbles`], as many as `out` has.
pub fn unpack_nibbles(packed: &[u8], out: &mut [i8]) {
    for (pair, &byte) in out.chunks_mut(2).zip(packed) {
        let halves = [from_nibble(byte), from_nibble(byte >> 4)];
        pair.iter_mut().zip(halves).for_each(|(to, integer)| *to = integer);
    }
}

/// The scales or offsets of blocks that are `pieces` shorter ones each.
pub fn repeated<T: Copy>(numbers: &[T], pieces: usize) -> Vec<T> {
    numbers.iter().flat_map(|number| std::iter::repeat_n(*number, pieces)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_multiples_of_one_number_or_not() {
        let form = QuantizedForm::symmetric(Bits::Four, 32);
        let with = |scales: [f32; 4]| Quantized {
            scales: scales.to_vec(),
            ..Quantized::zeroed(form, 4 * 32)
        };
        let unit = 0.011_718_75;
        let found = with([3.0 * unit, 16.0 * unit, 0.5, 1.0]).multiples(64).unwrap();
        let all =
            found.blocks.iter().zip([found.rows[0], found.rows[0], found.rows[1], found.rows[1]]);
        let back: Vec<f32> = all.map(|(multiple, unit)| f32::from(*multiple) * unit).collect();
        assert_eq!(back, [3.0 * unit, 16.0 * unit, 0.5, 1.0]);
        for scales in [[0.1, 0.317, 1.0, 1.0], [-0.5, 1.0, 1.0, 1.0], [1.0, 17.0, 1.0, 1.0]] {
            assert_eq!(with(scales).multiples(64), None, "{scales:?}");
        }
        for scales in [[0.0; 4], [f32::NAN; 4], [f32::INFINITY; 4]] {
            assert_eq!(with(scales).multiples(64), None, "{scales:?}");
        }
        assert_eq!(with([1.0; 4]).multiples(48), None);
    }

    #[test]
    fn forms_that_the_npu_computes_wrongly_do_not_fit() {
        let four = |block| QuantizedForm::symmetric(Bits::Four, block);
        assert!(four(32).fits(64) && four(40).fits(40));
        assert!(!four(32).fits(40) && !four(20).fits(40) && !four(0).fits(40) && !four(8).fits(0));
        assert!(QuantizedForm::symmetric(Bits::Eight, 12).fits(24));
        assert_eq!(
            (four(32).blocks(96), four(32).blocks(40), four(0).blocks(8)),
            (Some(3), None, None)
        );
        assert_eq!((four(96).pieces(), four(40).pieces(), four(0).pieces()), (Some(3), None, None));
    }

    #[test]
    fn bytes_are_those_of_packed_integers_and_scales() {
        let four = QuantizedForm::symmetric(Bits::Four, 32);
        assert_eq!(four.bytes(10, 64, 2), 320 + 40);
        assert_eq!(QuantizedForm { offsets: true, ..four }.bytes(10, 64, 2), 320 + 80);
        assert_eq!(QuantizedForm::symmetric(Bits::Eight, 64).bytes(10, 64, 4), 640 + 40);
        assert!(four.bytes(u64::MAX, 64, 2) > u64::MAX / 2);
    }

    #[test]
    fn offsets_are_added_before_scaling() {
        let form = QuantizedForm { bits: Bits::Four, block: 2, offsets: true };
        let weights = Quantized {
            form,
            values: vec![-8, 7, 0, 1],
            scales: vec![0.5, -2.0],
            offsets: vec![8.0, 0.25],
        };
        let mut reals = [0f32; 4];
        weights.as_ref().dequantize(&mut reals);
        assert_eq!(reals, [0.0, 7.5, -0.5, -2.5]);
        assert_eq!(weights.as_ref().peak(), 8.0);
        let symmetric = QuantizedRef { offsets: &[], ..weights.as_ref() };
        symmetric.dequantize(&mut reals);
        assert_eq!(reals, [-4.0, 3.5, 0.0, -2.0]);
    }

    #[test]
    fn two_integers_share_a_byte_the_first_in_the_low_half() {
        assert_eq!(pack_nibbles(&[-8, 7, 0, -1]), [0xf0, 0x78]);
        for count in [15, 16] {
            let integers: Vec<i8> = (-8..8).take(count).collect();
            let mut back = vec![0; count];
            unpack_nibbles(&pack_nibbles(&integers), &mut back);
            assert_eq!(back, integers);
        }
    }

    #[test]
    fn numbers_of_blocks_are_repeated_and_turned() {
        assert_eq!(repeated(&[1.0, 2.0], 2), [1.0, 1.0, 2.0, 2.0]);
    }
}
