//! Table of numbers that are found by a hash.

/// A place that holds no number. No number has all of its bits set, so no other place looks like it.
const FREE: u32 = u32::MAX;

/// Open-addressed table of numbers, such as the ids of tokens, which are found by what they stand for. A place holds as
/// many bits of the hash as the number leaves free, so that hardly ever another number has to be compared.
pub(super) struct Index {
    /// At least twice as many places as numbers.
    places: Vec<u32>,
    /// The bits of a place that are the number.
    number: u32,
}

impl Index {
    /// Table for at most `count` numbers, each below `limit`; `None` if they are too large.
    pub fn new(count: usize, limit: usize) -> Option<Self> {
        let bits = usize::BITS - limit.leading_zeros();
        let number = 1_u32.checked_shl(bits).filter(|one| *one != 0)? - 1;
        Some(Self { places: vec![FREE; (2 * count).next_power_of_two()], number })
    }

    /// The place at which a search for a hash begins, and the bits of the hash that a place holds.
    fn start(&self, hash: u64) -> (usize, u32) {
        (hash as usize & (self.places.len() - 1), (hash >> 32) as u32 & !self.number)
    }

    /// The place of the number with a hash that is the `same`, or the free one where it would stand.
    fn place(&self, hash: u64, same: impl Fn(u32) -> bool) -> usize {
        let (mut at, bits) = self.start(hash);
        loop {
            let place = self.places[at];
            if place == FREE || place & !self.number == bits && same(place & self.number) {
                return at;
            }
            at = (at + 1) & (self.places.len() - 1);
        }
    }

    /// The number with a hash that is the `same`.
    pub fn find(&self, hash: u64, same: impl Fn(u32) -> bool) -> Option<u32> {
        let place = self.places[self.place(hash, same)];
        (place != FREE).then_some(place & self.number)
    }

    /// Enters a number, in place of the `same` one, which is returned.
    pub fn enter(&mut self, hash: u64, number: u32, same: impl Fn(u32) -> bool) -> Option<u32> {
        let (_, bits) = self.start(hash);
        let at = self.place(hash, same);
        let before = std::mem::replace(&mut self.places[at], bits | number);
        (before != FREE).then_some(before & self.number)
    }
}
