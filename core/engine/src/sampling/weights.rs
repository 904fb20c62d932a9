//! Probabilities as integers, so that sums do not depend on their order.

use super::Candidate;

/// The weight of the most likely token. Tokens less likely by more than this have weight 0.
const ONE: f64 = (1u64 << 40) as f64;

/// `exp(x)` for `x ≤ 0`, the same bits on every machine.
///
/// Cody–Waite reduction to `2ⁿ · exp(r)`, |r| ≤ ln 2/2, and the polynomial of degree 5 of Cephes'
/// `expf` (Stephen L. Moshier, netlib.org/cephes): error below 2⁻²³ relative. A library's `expf`
/// differs between platforms in the last bit, which would make a seed mean different answers.
pub(super) fn exp(x: f32) -> f32 {
    // Written as a choice, which unlike `f32::max` is one vector instruction.
    let x = if x > -87.0 { x } else { -87.0 };
    // Adding 1.5·2²³ rounds to the nearest integer and leaves it in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let exp_r = p * (r * r) + r + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(MAGIC.to_bits()).wrapping_add(127);
    exp_r * f32::from_bits(exponent << 23)
}

/// A relative probability in 0…1 as an integer.
pub(super) fn fixed(weight: f32) -> u64 {
    // Adding 2⁵² rounds to the nearest integer and leaves it in the low bits: unlike a conversion,
    // a vector instruction everywhere.
    const MAGIC: f64 = (1u64 << 52) as f64;
    (f64::from(weight) * ONE + MAGIC).to_bits() - MAGIC.to_bits()
}

/// Replaces scores by `exp(score − max)`, so that the most likely token has 1.
pub(super) fn exponentials(scores: &mut [f32], max: f32) {
    for score in scores {
        // Equal to the maximum also where that is infinite, whose difference would be NaN.
        let weight = exp(*score - max);
        *score = if *score == max { 1.0 } else { weight };
    }
}

/// Sum of the weights.
pub(super) fn total(weights: &[f32]) -> u64 {
    weights.iter().map(|&w| fixed(w)).sum()
}

/// Cuts `candidates` to the most likely ones that together have the share `top_p` of `total`.
///
/// A token stays when those more likely than it have less than that share; of equally likely ones
/// the lower index counts as more likely. Halves the candidates instead of sorting them all.
pub(super) fn nucleus(candidates: &mut Vec<Candidate>, total: u64, top_p: f32) {
    let target = f64::from(top_p) * total as f64;
    let (mut low, mut high) = (0, candidates.len());
    let mut above = 0u64;
    while high - low > 16 {
        let middle = low + (high - low) / 2;
        candidates[low..high].select_nth_unstable_by(middle - low, Candidate::by_weight);
        let half: u64 = candidates[low..middle].iter().map(|c| fixed(c.value)).sum();
        if ((above + half) as f64) < target {
            above += half;
            low = middle;
        } else {
            high = middle;
        }
    }
    candidates[low..high].sort_unstable_by(Candidate::by_weight);
    let mut keep = low;
    while keep < high && (keep == 0 || (above as f64) < target) {
        above += fixed(candidates[keep].value);
        keep += 1;
    }
    candidates.truncate(keep.max(1));
}

#[cfg(test)]
mod tests {
    use super::super::rng::Rng;
    use super::*;
    use qhx_base::compare::Distance;

    #[test]
    fn exp_is_accurate_and_fixed() {
        let ratio = |step: u32| {
            let x = -(step as f32) * 28.0 / 200_000.0;
            f64::from(exp(x)) / f64::from(x).exp()
        };
        let ratios: Vec<f64> = (0..200_000).map(ratio).collect();
        let worst = Distance::of(&ratios, &vec![1.0; ratios.len()]).unwrap().largest;
        assert!(worst < 1.2e-7, "{worst:e}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(fixed(exp(f32::NEG_INFINITY)), 0);
        assert_eq!(fixed(1.0), 1 << 40);
        let bits = [-0.5f32, -3.25, -17.0].map(|x| exp(x).to_bits());
        assert_eq!(bits, EXP_BITS, "a seed's answers depend on these");
    }

    const EXP_BITS: [u32; 3] = [1058751896, 1025429940, 858902296];

    #[test]
    fn the_nucleus_is_that_of_a_full_sort() {
        let mut rng = Rng::new(11);
        for round in 0..200 {
            let count = 1 + rng.below(400);
            let all: Vec<_> = (0..count as u32)
                .map(|token| Candidate { value: rng.below(50) as f32 / 50.0, token })
                .collect();
            let total: u64 = all.iter().map(|c| fixed(c.value)).sum();
            let top_p = (1 + rng.below(100)) as f32 / 100.0;
            let mut cut = all.clone();
            nucleus(&mut cut, total, top_p);

            let mut sorted = all;
            sorted.sort_by(|a, b| b.value.total_cmp(&a.value).then(a.token.cmp(&b.token)));
            let mut above = 0.0;
            let mut expected = Vec::new();
            for c in sorted {
                if above < f64::from(top_p) * total as f64 || expected.is_empty() {
                    expected.push(c.token);
                }
                above += fixed(c.value) as f64;
            }
            let mut tokens: Vec<_> = cut.iter().map(|c| c.token).collect();
            tokens.sort_unstable();
            expected.sort_unstable();
            assert_eq!(tokens, expected, "round {round}");
        }
    }
}
