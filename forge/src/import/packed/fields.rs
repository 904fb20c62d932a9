//! Integers of a few bits in words of 32.

use super::part::Part;

/// Values that fill whole words, whatever their width.
const RUN: usize = 32;
/// Where the eight outputs of a word are, for AWQ (`AWQ_REVERSE_ORDER` of AutoAWQ).
const AWQ_ORDER: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Lines of integers without a sign. A line is the inputs of one output, or the other way around.
#[derive(Debug, Clone)]
pub(super) struct Fields {
    pub part: Part,
    pub bits: usize,
    /// Words from a line to the next, and from a word of a line to the next.
    pub strides: [usize; 2],
    pub order: Order,
    /// No integer is in two words: a word that they do not fill has bits of nothing.
    pub padded: bool,
    /// Integers are stored less one.
    pub less_one: bool,
}

/// Where in a line an integer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Plain,
    /// Of eight in a word: [`AWQ_ORDER`].
    Awq,
    /// Of two in a byte the first is the high one.
    HighFirst,
}

impl Fields {
    pub fn new(part: Part, bits: usize, strides: [usize; 2]) -> Self {
        let (order, padded, less_one) = (Order::Plain, false, false);
        Self { part, bits, strides, order, padded, less_one }
    }

    /// Words of a line of `len` integers.
    pub const fn words(bits: usize, len: usize) -> usize {
        (len / RUN) * bits + (len % RUN * bits).div_ceil(32)
    }

    /// The integer `place` of a line.
    pub fn get(&self, line: usize, place: usize) -> u8 {
        let place = match self.order {
            Order::Plain => place,
            Order::Awq => place / 8 * 8 + AWQ_ORDER.get(place % 8).copied().unwrap_or(0),
            Order::HighFirst => place ^ 1,
        };
        let (word, shift) = match self.padded {
            true => (place / (32 / self.bits), place % (32 / self.bits) * self.bits),
            false => {
                (place / RUN * self.bits + place % RUN * self.bits / 32, place * self.bits % 32)
            }
        };
        let mut found = self.word(line, word) >> shift;
        if shift + self.bits > 32 {
            found |= self.word(line, word + 1) << (32 - shift);
        }
        // Those in two words were written one by one, without carries.
        let one = u32::from(self.less_one && self.bits == 3);
        (found.wrapping_add(one) & ((1 << self.bits) - 1)) as u8
    }

    /// A word of a line. To words that were written less one, GPTQModel adds one in each integer
    /// (`convert_gptq_v1_to_v2_format_module`): it undoes the subtraction with its carries.
    fn word(&self, line: usize, word: usize) -> u32 {
        let stored = self.part.word(line * self.strides[0] + word * self.strides[1]);
        match (self.less_one, self.bits) {
            (true, 2) => stored.wrapping_add(0x5555_5555),
            (true, 4) => stored.wrapping_add(0x1111_1111),
            (true, 8) => stored.wrapping_add(0x0101_0101),
            _ => stored,
        }
    }

    /// The first integers of lines from `first` on, as many as each chunk of `len` of `out` holds.
    pub fn lines(&self, first: usize, len: usize, out: &mut [u8]) {
        let dense = self.order == Order::Plain && !self.padded && !self.less_one;
        let runs = if dense { len / RUN } else { 0 };
        for run in 0..runs {
            for (line, out) in out.chunks_exact_mut(len.max(1)).enumerate() {
                let at = (first + line) * self.strides[0] + run * self.bits * self.strides[1];
                let words = (0..self.bits).map(|word| self.part.word(at + word * self.strides[1]));
                let to = out.get_mut(run * RUN..(run + 1) * RUN).unwrap_or_default();
                spread(self.bits, words, to);
            }
        }
        for (line, out) in out.chunks_exact_mut(len.max(1)).enumerate() {
            for (place, to) in out.iter_mut().enumerate().skip(runs * RUN) {
                *to = self.get(first + line, place);
            }
        }
    }
}

/// The integers of whole words.
fn spread(bits: usize, words: impl Iterator<Item = u32>, out: &mut [u8]) {
    let (mut held, mut count, mask) = (0u64, 0, (1u64 << bits) - 1);
    let mut words = words;
    for to in out {
        if count < bits {
            held |= u64::from(words.next().unwrap_or(0)) << count;
            count += 32;
        }
        *to = (held & mask) as u8;
        held >>= bits;
        count -= bits;
    }
}
