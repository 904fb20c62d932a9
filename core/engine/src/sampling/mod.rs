//! Choosing the next token from logits.
//!
//! The order and meaning of the steps are those of the logits processors of Hugging Face
//! `transformers` (`generation/logits_process.py`, `GenerationMixin._get_logits_processor`):
//! repetition penalty, then temperature, top-k, top-p, min-p. A bias comes first; presence and frequency penalty,
//! which `transformers` does not have, follow the repetition penalty. Bias and penalties apply to the
//! greedy choice as well.
//!
//! A seed gives the same tokens on every machine: the generator, `exp` and the order of sums are
//! fixed here. After [`Sampler::new`] nothing allocates.

mod allowed;
mod argmax;
mod history;
mod logprobs;
mod params;
mod rng;
mod rules;
#[cfg(test)]
mod tests;
mod weights;

use std::cmp::Ordering;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use half::slice::HalfFloatSliceExt as _;

pub use allowed::AllowedTokens;
pub use argmax::argmax;
use argmax::{argmax_f32, argmax_within, max_f32, nan, nothing};
use history::History;
pub use logprobs::{Logprobs, TokenLogprobs};
pub use params::SamplingParams;
use qhx_base::{Result, bail, error};
use qhx_exec::{Logits, softcap};
pub use rng::Rng;
pub use rules::Rules;

/// Scores of which only the largest is known, when the k largest are looked for.
const BLOCK: usize = 64;

/// A token that may be chosen, with its logit or its relative probability.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    value: f32,
    token: u32,
}

impl Candidate {
    /// Most likely first, lower index first among equals.
    fn by_weight(a: &Self, b: &Self) -> Ordering {
        b.value.total_cmp(&a.value).then(a.token.cmp(&b.token))
    }
}

/// Chooses tokens.
#[derive(Debug)]
pub struct Sampler {
    params: SamplingParams,
    vocab: usize,
    allowed: Arc<AllowedTokens>,
    softcap: Option<f32>,
    seed: u64,
    rng: Rng,
    history: History,
    /// Scores of the ids below the end of those allowed.
    scores: Vec<f32>,
    blocks: Vec<f32>,
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// A sampler for logits of `vocab` tokens.
    ///
    /// # Errors
    /// When an option is out of range.
    pub fn new(params: SamplingParams, vocab: usize) -> Result<Self> {
        Self::restricted(params, vocab, Arc::new(AllowedTokens::below(vocab)))
    }

    /// A sampler for logits of `vocab` tokens that chooses among `allowed` only; what the other logits are makes no
    /// difference.
    ///
    /// # Errors
    /// When an option is out of range, and when an allowed token has no logit.
    pub fn restricted(
        params: SamplingParams,
        vocab: usize,
        allowed: Arc<AllowedTokens>,
    ) -> Result<Self> {
        params.validate()?;
        let end = allowed.end();
        if end > vocab {
            bail!(Internal, "token {} may be chosen, but there are {vocab} logits", end - 1);
        }
        let scratch = if params.is_plain() { 0 } else { end };
        let pool = if params.is_greedy() { 0 } else { end };
        let seed = params.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
        Ok(Self {
            history: History::new(&params, end),
            scores: vec![0.0; scratch],
            blocks: Vec::with_capacity(pool.div_ceil(BLOCK)),
            candidates: Vec::with_capacity(pool),
            rng: Rng::new(seed),
            params,
            vocab,
            allowed,
            softcap: None,
            seed,
        })
    }

    /// The same for an op with a [`crate::op::OpenInfo::softcap`]. It comes before penalties and all else.
    #[must_use]
    pub fn softcapped(self, softcap: Option<f32>) -> Self {
        Self { softcap, ..self }
    }

    /// The options.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// The seed in use: the one given, or the one drawn.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The generator, as the next draw will find it. Each draw takes one number.
    pub fn rng(&self) -> &Rng {
        &self.rng
    }

    /// Draws the next tokens with the numbers that another sampler will draw with.
    pub fn draw_as(&mut self, rng: &Rng) {
        self.rng.clone_from(rng);
    }

    /// Forgets the history and returns to the seed's first number.
    pub fn reset(&mut self) {
        self.history.clear();
        self.rng = Rng::new(self.seed);
    }

    /// Records tokens of the prompt, which only the repetition penalty sees.
    pub fn accept_prompt(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.history.push(token, false);
        }
    }

    /// Records a token of the answer. [`Sampler::sample`] does not do so itself.
    pub fn accept(&mut self, token: u32) {
        self.history.push(token, true);
    }

    /// Chooses a token.
    ///
    /// # Errors
    /// When an allowed one's logit is NaN, or all of them are −∞.
    pub fn sample(&mut self, logits: Logits<'_>) -> Result<u32> {
        let allowed = Arc::clone(&self.allowed);
        self.sample_among(logits, &allowed)
    }

    /// Chooses a token among `allowed`, none of which is beyond those of the sampler.
    ///
    /// # Errors
    /// Errors of [`Sampler::sample`].
    pub fn sample_among(&mut self, logits: Logits<'_>, allowed: &AllowedTokens) -> Result<u32> {
        if logits.len() != self.vocab {
            let (found, vocab) = (logits.len(), self.vocab);
            bail!(Graph, "expected logits of {vocab} tokens, found {found}");
        }
        if self.params.is_plain() {
            return argmax_within(logits, allowed.runs());
        }
        let end = self.allowed.end();
        if allowed.end() > end {
            bail!(Internal, "a token beyond those allowed");
        }
        match logits {
            Logits::F16(values) => values[..end].convert_to_f32_slice(&mut self.scores),
            Logits::F32(values) => self.scores.copy_from_slice(&values[..end]),
        }
        softcap(&mut self.scores, self.softcap);
        for gap in allowed.gaps() {
            self.scores[gap].fill(f32::NEG_INFINITY);
        }
        self.scores[allowed.end()..].fill(f32::NEG_INFINITY);
        for (&token, bias) in &self.params.logit_bias {
            // A draft model may have fewer tokens.
            if let Some(score) = self.scores.get_mut(token as usize) {
                *score += bias;
            }
        }
        self.history.apply(&self.params, &mut self.scores);
        if self.params.is_greedy() {
            return argmax_f32(&self.scores);
        }
        self.draw(allowed)
    }

    /// Temperature, filters and the draw, over `self.scores`.
    fn draw(&mut self, allowed: &AllowedTokens) -> Result<u32> {
        let temperature = self.params.temperature;
        let mut max = f32::NEG_INFINITY;
        self.blocks.clear();
        for block in self.scores.chunks_mut(BLOCK) {
            for score in block.iter_mut() {
                *score /= temperature;
            }
            let high = max_f32(block).unwrap_or(f32::NAN);
            if high.is_nan() {
                let index = self.scores.iter().position(|v| v.is_nan());
                return Err(nan(index.unwrap_or_default()));
            }
            max = max.max(high);
            self.blocks.push(high);
        }
        if max == f32::NEG_INFINITY {
            return Err(nothing(allowed.len()));
        }
        let top_k = self.params.top_k;
        let (total, complete) = if top_k > 0 && top_k < self.scores.len() {
            self.keep_top_k(top_k, max);
            (self.candidates.iter().map(|c| weights::fixed(c.value)).sum(), true)
        } else {
            weights::exponentials(&mut self.scores, max);
            (weights::total(&self.scores), false)
        };
        if self.params.top_p < 1.0 {
            if !complete {
                self.gather_share(total);
            }
            weights::nucleus(&mut self.candidates, total, self.params.top_p);
        } else if !complete {
            return Ok(draw_from(&mut self.rng, &self.scores, self.params.min_p));
        }
        if self.params.min_p > 0.0 {
            let min_p = self.params.min_p;
            self.candidates.retain(|c| c.value >= min_p);
        }
        // In the order of tokens, so that the draw does not depend on how the others were cut off.
        self.candidates.sort_unstable_by_key(|c| c.token);
        let total = self.candidates.iter().map(|c| weights::fixed(c.value)).sum();
        let mut left = self.rng.below(total);
        for candidate in &self.candidates {
            let weight = weights::fixed(candidate.value);
            if left < weight {
                return Ok(candidate.token);
            }
            left -= weight;
        }
        Err(error!(Internal, "no token is left after filtering"))
    }

    /// Candidates: the k largest scores and all equal to the k-th, with their weights.
    fn keep_top_k(&mut self, k: usize, max: f32) {
        // The k-th largest of the blocks' maxima is a lower bound for the k-th largest score.
        // `blocks` itself must keep its order, so a copy is partitioned in the candidates.
        self.candidates.clear();
        let bound = if k <= self.blocks.len() {
            let maxima = self.blocks.iter().map(|&value| Candidate { value, token: 0 });
            self.candidates.extend(maxima);
            let order = Candidate::by_weight;
            let bound = self.candidates.select_nth_unstable_by(k - 1, order).1.value;
            self.candidates.clear();
            bound
        } else {
            f32::NEG_INFINITY
        };
        for (index, (block, &high)) in self.scores.chunks(BLOCK).zip(&self.blocks).enumerate() {
            if high < bound {
                continue;
            }
            for (offset, &value) in block.iter().enumerate() {
                if value >= bound {
                    let token = (index * BLOCK + offset) as u32;
                    self.candidates.push(Candidate { value, token });
                }
            }
        }
        if k < self.candidates.len() {
            let order = Candidate::by_weight;
            let kth = self.candidates.select_nth_unstable_by(k - 1, order).1.value;
            self.candidates.retain(|c| c.value >= kth);
        }
        for candidate in &mut self.candidates {
            let score = candidate.value;
            candidate.value = if score == max { 1.0 } else { weights::exp(score - max) };
        }
    }

    /// Candidates: the largest weights that together hold the share `top_p`.
    fn gather_share(&mut self, total: u64) {
        let target = f64::from(self.params.top_p) * total as f64;
        for bound in [1.0 / 64.0, 1.0 / 4096.0, 1.0 / 1048576.0, 0.0] {
            self.candidates.clear();
            let mut mass = 0u64;
            for (index, &value) in self.scores.iter().enumerate() {
                if value >= bound {
                    mass += weights::fixed(value);
                    self.candidates.push(Candidate { value, token: index as u32 });
                }
            }
            if mass as f64 >= target {
                return;
            }
        }
    }
}

/// Draws from relative probabilities of at least `min_p`.
fn draw_from(rng: &mut Rng, weights: &[f32], min_p: f32) -> u32 {
    let weight = |&w: &f32| if w >= min_p { weights::fixed(w) } else { 0 };
    let total = weights.iter().map(weight).sum();
    let mut left = rng.below(total);
    let mut sums = weights.chunks(BLOCK).enumerate();
    let found = sums.find_map(|(index, block)| {
        let sum: u64 = block.iter().map(weight).sum();
        if left >= sum {
            left -= sum;
            return None;
        }
        let offset = block.iter().position(|w| {
            let weight = weight(w);
            let here = left < weight;
            left = left.saturating_sub(weight);
            here
        });
        offset.map(|offset| index * BLOCK + offset)
    });
    found.unwrap_or(0) as u32
}
