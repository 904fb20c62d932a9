//! Which experts a token goes to, and how much each counts.

use serde::Deserialize;

/// A chosen expert.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Choice {
    /// Index of the expert.
    pub expert: usize,
    /// Factor of the expert's output, in 0..=1.
    pub multiplier: f32,
}

/// Rule that chooses a token's experts by their scores: `params.router` of the manifest.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(tag = "rule", rename_all = "lowercase")]
pub enum Rule {
    /// The largest scores, with their parts in the softmax over the scores of all experts; with `normalize` over
    /// those of the chosen ones (`Qwen3MoeTopKRouter` of `transformers`). The result times `scale`.
    Softmax {
        /// Multipliers sum to `scale`.
        normalize: bool,
        /// Factor of the multipliers.
        #[serde(default = "one")]
        scale: f32,
    },
    /// The largest sums of sigmoid and bias, with the sigmoids as multipliers; with `normalize` over their sum plus
    /// `epsilon`. The result times `scale` (`Lfm2MoeTopKRouter` and `NemotronHTopkRouter` of `transformers`).
    Sigmoid {
        /// Multipliers sum to `scale`.
        normalize: bool,
        /// Factor of the multipliers.
        #[serde(default = "one")]
        scale: f32,
        /// Number added to the sum of the sigmoids.
        #[serde(default = "epsilon_of_lfm2")]
        epsilon: f32,
    },
    /// See [`sparsemixer`]: always two experts.
    Sparsemixer {
        /// `router_jitter_noise` of the model class.
        jitter: f32,
    },
}

const fn one() -> f32 {
    1.0
}

const fn epsilon_of_lfm2() -> f32 {
    1e-6
}

impl Rule {
    /// Fills `choices` with as many different experts, the first choice first; false when there are fewer experts, a
    /// score is not a finite number, or the rule does not choose as many. `bias` has a value for each score, or none.
    pub(super) fn choose(
        self,
        scores: &[f32],
        bias: Option<&[f32]>,
        choices: &mut [Choice],
    ) -> bool {
        if let Self::Sparsemixer { jitter } = self {
            let found = sparsemixer(scores, jitter).filter(|_| choices.len() == 2);
            return found.inspect(|pair| choices.copy_from_slice(pair)).is_some();
        }
        if choices.len() > scores.len() || scores.iter().any(|score| !score.is_finite()) {
            return false;
        }
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let probability = |score: f32| match self {
            Self::Sigmoid { .. } => 1.0 / (1.0 + (-score).exp()),
            _ => (score - largest).exp(),
        };
        let key = |expert: usize| match bias {
            Some(bias) => probability(scores[expert]) + bias[expert],
            None => scores[expert],
        };
        for at in 0..choices.len() {
            let open = (0..scores.len()).filter(|e| choices[..at].iter().all(|c| c.expert != *e));
            let Some(expert) = open.reduce(|a, b| if key(b) > key(a) { b } else { a }) else {
                return false;
            };
            choices[at] = Choice { expert, multiplier: probability(scores[expert]) };
        }
        let chosen: f32 = choices.iter().map(|choice| choice.multiplier).sum();
        let factor = match self {
            Self::Sigmoid { normalize: true, scale, epsilon } => scale / (chosen + epsilon),
            Self::Sigmoid { normalize: false, scale, .. } => scale,
            Self::Softmax { normalize: true, scale } => scale / chosen,
            Self::Softmax { normalize: false, scale } => {
                scale / scores.iter().map(|score| probability(*score)).sum::<f32>()
            }
            Self::Sparsemixer { .. } => 1.0,
        };
        choices.iter_mut().for_each(|choice| choice.multiplier *= factor);
        true
    }
}

/// Chooses two experts by their scores, one score for each expert; `None` when there are fewer than two
/// or one is not a finite number.
///
/// The rule of `sparsemixer` in `transformers`, `models/phimoe`, in evaluation mode (Liu et al. 2024,
/// arXiv 2409.12136). The first expert is the one with the largest score m (of equal ones the first).
/// Scores s with (m − s) / max(|s|, m) > 2·jitter are masked; the multiplier is the expert's part in
/// the softmax over the others. The second is found the same way without the first. Multipliers of the
/// two do not sum to 1.
pub fn sparsemixer(scores: &[f32], jitter: f32) -> Option<[Choice; 2]> {
    if scores.len() < 2 || scores.iter().any(|s| !s.is_finite()) {
        return None;
    }
    let first = choose(scores, jitter, None)?;
    let second = choose(scores, jitter, Some(first.expert))?;
    Some([first, second])
}

fn choose(scores: &[f32], jitter: f32, without: Option<usize>) -> Option<Choice> {
    let open = || scores.iter().copied().enumerate().filter(|(i, _)| Some(*i) != without);
    let (expert, best) = open().reduce(|a, b| if b.1 > a.1 { b } else { a })?;
    let threshold = 2.0 * jitter;
    // 0 / 0 where all is 0: not above the threshold, as in the reference.
    let masked = |score: f32| (best - score) / score.abs().max(best) > threshold;
    let sum: f32 = open().filter(|(_, s)| !masked(*s)).map(|(_, s)| (s - best).exp()).sum();
    Some(Choice { expert, multiplier: 1.0 / sum })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores, jitter, and what `sparsemixer` of `transformers` 5.23 returns.
    type Case = (&'static [f32], f32, [(usize, f32); 2]);

    #[test]
    fn decisions_and_multipliers_are_those_of_the_reference() {
        let cases: [Case; 8] = [
            (&[1.0, 2.0, 3.0, 0.5], 0.01, [(2, 1.0), (1, 1.0)]),
            (&[2.0, 1.99, 1.97, -3.0, 1.5], 0.01, [(0, 0.337_781), (1, 0.505_000)]),
            (&[0.0, 0.0, 0.0], 0.01, [(0, 0.333_333), (1, 0.500_000)]),
            (&[-1.0, -1.05, -1.3, -4.0], 0.1, [(0, 0.512_497), (1, 0.562_177)]),
            (&[2.0, 2.0, 1.9, 2.0], 0.2, [(0, 0.256_093), (1, 0.344_253)]),
            (&[0.3, -0.2, 0.29, 0.31, 0.24, 0.1], 0.15, [(3, 0.256_237), (0, 0.341_086)]),
            (&[-0.5, 0.0, -0.01], 0.3, [(1, 1.0), (2, 1.0)]),
            (&[5.0, 4.9, 4.85, 4.7, 1.0, 5.05], 0.01, [(5, 0.512_497), (0, 0.524_979)]),
        ];
        for (scores, jitter, expected) in cases {
            let found = sparsemixer(scores, jitter).unwrap_or_default();
            for (choice, (expert, multiplier)) in found.iter().zip(expected) {
                assert_eq!(choice.expert, expert, "{scores:?}, {jitter}");
                let difference = (choice.multiplier - multiplier).abs();
                assert!(difference < 1e-6, "{scores:?}, {jitter}: {found:?}");
            }
        }
    }

    #[test]
    fn top_k_rules_are_those_of_the_reference() {
        // `Qwen3MoeTopKRouter`, `Lfm2MoeTopKRouter` and `NemotronHTopkRouter` of `transformers` 5.24 with an identity
        // as weight.
        let scores = [0.3, -1.2, 2.0, 0.9, -0.4, 1.1];
        let bias = [0.5, 0.4, -0.6, 0.0, 0.1, -0.3];
        let softmax = |normalize| Rule::Softmax { normalize, scale: 1.0 };
        let sigmoid = |normalize, scale| Rule::Sigmoid { normalize, scale, epsilon: 1e-6 };
        type Case<'a> = (Rule, Option<&'a [f32]>, [(usize, f32); 3]);
        let cases: [Case<'_>; 5] = [
            (softmax(false), None, [(2, 0.486_949), (5, 0.197_979), (3, 0.162_091)]),
            (softmax(true), None, [(2, 0.574_897), (5, 0.233_736), (3, 0.191_367)]),
            (sigmoid(true, 1.0), Some(&bias), [(0, 0.378_703), (3, 0.468_696), (1, 0.152_601)]),
            (sigmoid(false, 2.5), Some(&bias), [(0, 1.436_106), (3, 1.777_374), (1, 0.578_688)]),
            (sigmoid(true, 1.0), None, [(2, 0.376_086), (5, 0.320_349), (3, 0.303_564)]),
        ];
        for (rule, bias, expected) in cases {
            let mut found = [Choice::default(); 3];
            assert!(rule.choose(&scores, bias, &mut found));
            for (choice, (expert, multiplier)) in found.iter().zip(expected) {
                assert_eq!(choice.expert, expert, "{rule:?}: {found:?}");
                assert!((choice.multiplier - multiplier).abs() < 1e-5, "{rule:?}: {found:?}");
            }
        }
        // Sigmoids that sum to 1.7e-4.
        let nemotron = Rule::Sigmoid { normalize: true, scale: 2.5, epsilon: 1e-20 };
        let mut found = [Choice::default(); 3];
        let small = [-9.0, -12.5, -7.0, -8.25, -10.0, -11.0];
        assert!(nemotron.choose(&small, Some(&bias), &mut found));
        for (choice, expected) in
            found.iter().zip([(0, 1.788_129_3), (1, 0.054_003_3), (4, 0.657_867_3)])
        {
            let difference = (choice.multiplier - expected.1).abs();
            assert!(choice.expert == expected.0 && difference < 1e-6, "{found:?}");
        }
        let mut many = [Choice::default(); 7];
        assert!(!softmax(true).choose(&scores, None, &mut many), "more than there are");
        assert!(!softmax(true).choose(&[f32::NAN, 1.0], None, &mut many[..1]));
    }

    #[test]
    fn scores_that_decide_nothing_are_refused() {
        assert_eq!(sparsemixer(&[1.0], 0.01), None);
        assert_eq!(sparsemixer(&[], 0.01), None);
        assert_eq!(sparsemixer(&[1.0, f32::NAN, 0.0], 0.01), None);
        assert_eq!(sparsemixer(&[1.0, f32::INFINITY], 0.01), None);
    }
}
