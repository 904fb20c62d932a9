//! The generator of random numbers: xoshiro256++ 1.0, seeded through SplitMix64, both by Sebastiano Vigna and David
//! Blackman (<https://prng.di.unimi.it>).
//!
//! The sequence of a seed is part of the interface: the same seed gives the same answer.

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};

/// xoshiro256++.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rng(Xoshiro256PlusPlus);

impl Rng {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number in `0..bound`; 0 for a bound of 0. Its bias is below `bound`/2⁶⁴.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of the authors' C programs: four words of SplitMix64 as the state, then xoshiro256++.
    #[test]
    fn the_sequence_of_a_seed_stays() {
        let mut rng = Rng::new(1477776061723855037);
        let expected =
            [8908797893915236016, 6865687317417346668, 10619842690850731434, 13443763250025693198];
        assert_eq!(std::array::from_fn(|_| rng.next_u64()), expected);
    }

    #[test]
    fn numbers_stay_below_the_bound_and_reach_it() {
        let mut rng = Rng::new(1);
        let mut seen = [0; 5];
        for _ in 0..10_000 {
            seen[rng.below(5) as usize] += 1;
        }
        assert!(seen.iter().all(|n| (1800..2200).contains(n)), "{seen:?}");
        assert_eq!(rng.below(0), 0);
    }
}
