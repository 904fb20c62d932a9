//! Integers of a few bits in words of 32.

use super::part::Part;

/// Values that fill whole words, whatever their width.
const RUN: usize = 32;
/// Positions of the eight outputs of a word, for AWQ (`AWQ_REVERSE_ORDER` of AutoAWQ).
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

/// Order of the integers in a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Plain,
    /// Eight integers in a word, in the order [`AWQ_ORDER`].
    Awq,
    /// Two integers in a byte, the first in the high bits.
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

#[cfg(test)]
mod tests {
    use qhx_base::artifacts::Mapped;
    use safetensors::Dtype;

    use super::*;

    /// A tensor of words in a file.
    fn part(words: &[u32]) -> Part {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        std::fs::write(file.path(), &bytes).unwrap();
        let map = Mapped::open(file.path()).unwrap();
        Part { map, dtype: Dtype::I32, shape: vec![words.len()], bytes: 0..bytes.len() }
    }

    /// Integers of each width, packed bit by bit into words, with padding and without: one by one and line by line.
    #[test]
    fn integers_of_every_width_are_those_that_were_packed() {
        let len = 75usize;
        for bits in 1..=8usize {
            let value = |line: usize, place: usize| ((line * 31 + place * 7) % (1 << bits)) as u32;
            for padded in [false, true] {
                let each = 32 / bits;
                let width = if padded { len.div_ceil(each) } else { Fields::words(bits, len) };
                let mut words = vec![0u32; 2 * width];
                for (line, words) in words.chunks_exact_mut(width).enumerate() {
                    for place in 0..len {
                        let at = if padded {
                            place / each * 32 + place % each * bits
                        } else {
                            place * bits
                        };
                        for bit in (0..bits).filter(|bit| value(line, place) >> bit & 1 == 1) {
                            words[(at + bit) / 32] |= 1 << ((at + bit) % 32);
                        }
                    }
                }
                let fields = Fields { padded, ..Fields::new(part(&words), bits, [width, 1]) };
                let mut lines = vec![0u8; 2 * len];
                fields.lines(0, len, &mut lines);
                for (at, found) in lines.iter().enumerate() {
                    let (line, place) = (at / len, at % len);
                    assert_eq!(u32::from(*found), value(line, place), "{bits} bits, {padded}");
                    assert_eq!(fields.get(line, place), *found);
                }
            }
        }
    }

    #[test]
    fn integers_that_are_stored_less_one_get_it_back() {
        for (bits, word) in [(2, 0xaaaa_aaaa), (4, 0x7777_7777), (8, 0x7f7f_7f7f)] {
            let fields = Fields { less_one: true, ..Fields::new(part(&[word]), bits, [1, 1]) };
            let expected = (word & ((1 << bits) - 1)) as u8 + 1;
            assert!((0..32 / bits).all(|place| fields.get(0, place) == expected), "{bits} bits");
        }
    }
}
