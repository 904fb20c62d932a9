//! The generator of random numbers: xoshiro256++ 1.0, seeded through SplitMix64.
//!
//! Both are by Sebastiano Vigna and David Blackman, in the public domain
//! (<https://prng.di.unimi.it/xoshiro256plusplus.c>, <https://prng.di.unimi.it/splitmix64.c>). The
//! sequence of a seed is part of the interface: the same seed gives the same answer.

/// xoshiro256++.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rng([u64; 4]);

impl Rng {
    /// The generator of a seed.
    pub fn new(mut seed: u64) -> Self {
        Self(std::array::from_fn(|_| {
            seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }))
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.0;
        let result = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let t = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= t;
        *d = d.rotate_left(45);
        result
    }

    /// A number in `0..bound`; 0 for a bound of 0. Its bias is below `bound`/2⁶⁴.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_sequence() {
        // Output of the authors' C program for the state 1, 2, 3, 4.
        let mut rng = Rng([1, 2, 3, 4]);
        let expected = [41943041, 58720359, 3588806011781223, 3591011842654386];
        assert_eq!(std::array::from_fn(|_| rng.next_u64()), expected);
        // SplitMix64 for the seed 1477776061723855037.
        let Rng(state) = Rng::new(1477776061723855037);
        assert_eq!(state[..2], [1985237415132408290, 2979275885539914483]);
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
