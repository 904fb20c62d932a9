//! Damages files.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};

/// Largest file that is made.
const MAX_BYTES: usize = 64 << 10;

/// Random choices.
#[derive(Debug, Clone)]
pub struct Random(SplitMix64);

impl Random {
    /// A sequence of numbers that depends on nothing but the seed.
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `end`, and 0 where `end` is.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.number() % (end as u64).max(1)).unwrap_or(0)
    }

    /// One of several.
    fn pick<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> Option<&'a T> {
        of.get(self.below(of.len())).copied()
    }

    /// Start and end of a stretch of up to `most` of `len` bytes.
    fn stretch(&mut self, len: usize, max: usize) -> std::ops::Range<usize> {
        let start = self.below(len + 1);
        start..start + self.below((len - start).min(max) + 1)
    }
}

/// Numbers as text at which readers go wrong.
const NUMBERS: [&[u8]; 12] = [
    b"0",
    b"-1",
    b"1e999",
    b"0.5",
    b"65536",
    b"2147483648",
    b"4294967295",
    b"9223372036854775807",
    b"18446744073709551615",
    b"18446744073709551616",
    b"1e-400",
    b"000000000000000000000000",
];

/// Numbers as bytes at which readers go wrong.
const INTEGERS: [u64; 9] = [
    0,
    1,
    0x7f,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX,
];

/// Text at which readers go wrong.
const TEXTS: [&[u8]; 16] = [
    b"null",
    b"true",
    b"\"\"",
    b"{}",
    b"[]",
    b"\\u0000",
    b"\\ud800",
    b"\xff",
    b"\x1b[2J",
    b"\r\n",
    b"..",
    b"/",
    b"{{",
    b"}}",
    b"{% for a in [1,2] %}",
    b"{% endfor %}",
];

/// A damaged copy of one of the `files`, of a few changes; parts of the others may get into it.
pub fn mutate(files: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut data = files.get(random.below(files.len())).cloned().unwrap_or_default();
    for _ in 0..=random.below(6) {
        let other = files.get(random.below(files.len())).map_or(&[][..], Vec::as_slice);
        change(&mut data, other, random);
        data.truncate(MAX_BYTES);
    }
    data
}

fn change(data: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    match random.below(12) {
        0 => {
            let at = random.below(data.len());
            if let Some(byte) = data.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
        1 => {
            let at = random.below(data.len());
            let value = random.number().to_le_bytes()[0];
            if let Some(byte) = data.get_mut(at) {
                *byte = value;
            }
        }
        2 => {
            let stretch = random.stretch(data.len(), 64);
            data.drain(stretch);
        }
        3 => data.truncate(random.below(data.len() + 1)),
        4 => {
            // What nests or doubles is what readers recurse or grow on.
            let part = data[random.stretch(data.len(), 24)].to_vec();
            let times = [2, 3, 16, 200, 4000][random.below(5)];
            let at = random.below(data.len() + 1);
            let room = MAX_BYTES.saturating_sub(data.len());
            let many: Vec<u8> =
                part.iter().copied().cycle().take((part.len() * times).min(room)).collect();
            data.splice(at..at, many);
        }
        5 => {
            let part = &other[random.stretch(other.len(), 400)];
            let hole = random.stretch(data.len(), 400);
            data.splice(hole, part.iter().copied());
        }
        6 => {
            let value = INTEGERS[random.below(INTEGERS.len())].to_le_bytes();
            let width = [1, 2, 4, 8][random.below(4)];
            let at = random.below(data.len());
            for (to, from) in data.iter_mut().skip(at).zip(&value[..width]) {
                *to = *from;
            }
        }
        7 => {
            let at = random.below(data.len() + 1);
            let text = random.pick(&TEXTS).unwrap_or_default();
            data.splice(at..at, text.iter().copied());
        }
        8 => replace(data, |byte| byte.is_ascii_digit(), random.pick(&NUMBERS), random),
        9 => {
            let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
            let words: Vec<&[u8]> =
                other.split(|&byte| !word(byte)).filter(|w| !w.is_empty()).collect();
            replace(data, word, random.pick(&words), random);
        }
        10 => {
            let at = random.below(data.len() + 1);
            let part = data[random.stretch(data.len(), 64)].to_vec();
            data.splice(at..at, part);
        }
        _ => {
            let hole = random.stretch(data.len(), 16);
            let count = hole.len();
            data.splice(hole, (0..count).map(|_| random.number().to_le_bytes()[0]));
        }
    }
}

/// Puts `by` in the place of a run of bytes of a kind.
fn replace(data: &mut Vec<u8>, is: impl Fn(u8) -> bool, by: Option<&[u8]>, random: &mut Random) {
    let Some(by) = by else { return };
    let from = random.below(data.len());
    let Some(start) = (from..data.len()).find(|&i| is(data[i])) else { return };
    let end = (start..data.len()).find(|&i| !is(data[i])).unwrap_or(data.len());
    data.splice(start..end, by.iter().copied());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_damages_in_the_same_way() {
        let files = [vec![b'7'; 60_000], b"{\"a\": [12, \"b\"]}".to_vec(), Vec::new()];
        let made = |seed| {
            let mut random = Random::new(seed);
            (0..500).map(|_| mutate(&files, &mut random)).collect::<Vec<_>>()
        };
        let first = made(1);
        assert_eq!(first, made(1));
        assert_ne!(first, made(2));
        assert!(first.iter().all(|file| file.len() <= MAX_BYTES));
        let changed = first.iter().filter(|file| !files.contains(file)).count();
        assert!(changed > 300, "{changed} of 500 files are damaged");
    }
}
