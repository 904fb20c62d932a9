//! Sparsemixer: which two experts a token goes to, and how much each counts.

/// A chosen expert.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Choice {
    /// Index of the expert.
    pub expert: usize,
    /// What its output is multiplied by, in 0..=1.
    pub multiplier: f32,
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
    fn scores_that_decide_nothing_are_refused() {
        assert_eq!(sparsemixer(&[1.0], 0.01), None);
        assert_eq!(sparsemixer(&[], 0.01), None);
        assert_eq!(sparsemixer(&[1.0, f32::NAN, 0.0], 0.01), None);
        assert_eq!(sparsemixer(&[1.0, f32::INFINITY], 0.01), None);
    }
}
