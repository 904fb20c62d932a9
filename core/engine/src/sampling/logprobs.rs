//! Log-probabilities of tokens.

use qhx_exec::{Logits, softcap};
use serde::Serialize;

use super::{AllowedTokens, Candidate};

/// The log-probabilities of a token that was chosen, and of the most likely ones in its place: natural logarithms of
/// the softmax over the model's logits, softcap included, before a grammar, penalties, temperature and filters. Where a
/// bundle has rules about its tokens, it is the softmax over those that they allow.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TokenLogprobs {
    /// Log-probability of the token that was chosen.
    pub logprob: f32,
    /// The most likely tokens that could be chosen without a grammar, the likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// Computes log-probabilities, in memory that it keeps.
#[derive(Debug, Default)]
pub struct Logprobs {
    scores: Vec<f32>,
    candidates: Vec<Candidate>,
    only_allowed: bool,
}

impl Logprobs {
    /// Tokens that are not allowed have no part in any probability: as of `transformers`, whose scores are those behind
    /// its logits processors.
    pub fn only_allowed(&mut self) {
        self.only_allowed = true;
    }

    /// The log-probability of `token`, and those of the `count` most likely tokens among `allowed`: those that the
    /// model gives them or, after [`Logprobs::only_allowed`], that are left where no other token is. Logits that are
    /// NaN have no part in it; a token without one is impossible (−∞).
    pub fn of(
        &mut self,
        logits: Logits<'_>,
        cap: Option<f32>,
        token: u32,
        count: usize,
        allowed: &AllowedTokens,
    ) -> TokenLogprobs {
        let Self { scores, candidates, only_allowed } = self;
        scores.resize(logits.len(), 0.0);
        logits.copy_to_f32(scores);
        softcap(scores, cap);
        if *only_allowed {
            let mut end = 0;
            for run in allowed.runs() {
                let before = scores.get_mut(end..run.start).unwrap_or_default();
                before.fill(f32::NEG_INFINITY);
                end = run.end;
            }
            scores.get_mut(end..).unwrap_or_default().fill(f32::NEG_INFINITY);
        }
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |score: &f32| f64::from(*score - max).exp();
        let total: f64 = scores.iter().map(weight).filter(|weight| !weight.is_nan()).sum();
        let logprob = |score: f32| (f64::from(score - max) - total.ln()) as f32;
        let of = |token: u32| scores.get(token as usize).map_or(f32::NAN, |score| logprob(*score));
        candidates.clear();
        let count = count.min(allowed.len());
        if count > 0 {
            let tokens = allowed.runs().iter().flat_map(Clone::clone);
            let possible = tokens.filter_map(|token| {
                let value = *scores.get(token)?;
                (!value.is_nan()).then_some(Candidate { value, token: token as u32 })
            });
            candidates.extend(possible);
            if count < candidates.len() {
                candidates.select_nth_unstable_by(count, Candidate::by_weight);
                candidates.truncate(count);
            }
            candidates.sort_unstable_by(Candidate::by_weight);
        }
        let own = of(token);
        TokenLogprobs {
            logprob: if own.is_nan() { f32::NEG_INFINITY } else { own },
            top: candidates.iter().map(|c| (c.token, logprob(c.value))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_likely_allowed_tokens_come_first() {
        let logits = [1.0, f32::NAN, 3.0, 2.0, f32::NEG_INFINITY, 9.0];
        let allowed = AllowedTokens::below(5);
        let found = Logprobs::default().of(Logits::F32(&logits), None, 3, 3, &allowed);
        // Of 1, 3, 2 and 9 together.
        let total: f64 = [1.0f64, 3.0, 2.0, 9.0].iter().map(|x| x.exp()).sum::<f64>().ln();
        let near = |found: f32, logit: f64| (f64::from(found) - (logit - total)).abs() < 1e-6;
        assert!(near(found.logprob, 2.0), "{found:?}");
        assert_eq!(found.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [2, 3, 0]);
        assert!(found.top.iter().zip([3.0, 2.0, 1.0]).all(|((_, p), x)| near(*p, x)), "{found:?}");
        let mut logprobs = Logprobs::default();
        let of = |token| logprobs.of(Logits::F32(&logits), None, token, 0, &allowed).logprob;
        assert_eq!([1, 4, 77].map(of), [f32::NEG_INFINITY; 3]);
        let all = logprobs.of(Logits::F32(&logits), Some(2.0), 0, 99, &allowed);
        assert_eq!(all.top.len(), 4, "all that has a logit");
        // Without 9, which is not allowed.
        logprobs.only_allowed();
        let left: f64 = [1.0f64, 3.0, 2.0].iter().map(|x| x.exp()).sum::<f64>().ln();
        let own = logprobs.of(Logits::F32(&logits), None, 3, 0, &allowed).logprob;
        assert!((f64::from(own) - (2.0 - left)).abs() < 1e-6, "{own}");
    }
}
