//! Guessing ahead: several tokens are guessed and checked in one step (speculative decoding, Leviathan et al. 2023,
//! arXiv 2211.17192).
//!
//! The token that follows is always drawn from the model's own logits, as without guesses, and then compared with the
//! guess. So an answer is that of plain decoding, greedy or drawn with a seed, whoever guesses and how many. For a
//! guess that is not drawn itself this is the rejection rule of the paper: it stays with the probability p that the
//! model gives it, and otherwise the token is from the rest of p. A draft that draws does so with the random
//! numbers that the model will draw with (common random numbers; Daliri et al. 2024, arXiv 2408.07978). The
//! paper's rule for two distributions would accept a little more, but then a seed's answer would depend on the number
//! of guesses, and so on the machine's speed.

mod draft;
mod lookup;
mod pace;

use std::sync::Arc;
use std::time::Instant;

use crate::op::HostOp;
use crate::sampling::{AllowedTokens, Rng, SamplingParams};
use crate::{CancelToken, ErrorKind, Result};

use super::types::{Guesses, MOST_GUESSES, Speculate};
pub use lookup::PromptLookup;
use pace::Pace;
pub(super) use pace::Took;

/// What a [`Guesser`] learns of a generation.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Start<'a> {
    /// Tokens of the prompt; where a picture, sound or video lies, the token that stands for it.
    pub prompt: &'a [u32],
    /// Tokens that may follow at most.
    pub most: usize,
    /// How they are chosen.
    pub sampling: &'a SamplingParams,
    /// What they are chosen among.
    pub allowed: &'a Arc<AllowedTokens>,
    /// The prompt has pictures, sounds or videos.
    pub media: bool,
    /// Stops the generation.
    pub cancel: &'a CancelToken,
}

/// Guesses what follows a text. Wrong guesses cost time and change nothing.
pub trait Guesser: Send {
    /// Such as `prompt lookup`, for messages.
    fn name(&self) -> &str;

    /// A generation begins. An error costs this generation its guesses, and is said once unless it is a cancellation.
    fn begin(&mut self, start: &Start<'_>) -> Result<()>;

    /// The text goes on with a token.
    fn push(&mut self, token: u32);

    /// Adds at most `most` tokens to `guesses` that may follow the text, in order; none where there is no guess. `rng`
    /// is as the model's draw of the first of them will find it; each draw takes one number. An error costs this
    /// generation its guesses, unless it is a cancellation.
    fn guess(&mut self, most: usize, rng: &Rng, guesses: &mut Vec<u32>) -> Result<()>;

    /// True when a guess takes no time worth counting: then guesses are compared with the text also while none
    /// is checked, to learn how often they are right.
    fn is_free(&self) -> bool {
        false
    }
}

/// Guesses of a model's generations.
pub(super) struct Speculation {
    guesser: Box<dyn Guesser>,
    pace: Pace,
    active: bool,
    /// Why nothing is guessed has been said.
    told: bool,
    found: Vec<u32>,
    /// The token that was chosen last, and guesses of what follows.
    step: Vec<u32>,
    /// A guess that no step checks.
    unchecked: Option<u32>,
    took: Took,
    counts: Guesses,
}

impl Default for Speculation {
    fn default() -> Self {
        Self::of(Box::new(PromptLookup::new()))
    }
}

impl Speculation {
    pub(super) fn of(guesser: Box<dyn Guesser>) -> Self {
        Self {
            guesser,
            pace: Pace::default(),
            active: false,
            told: false,
            found: Vec::new(),
            step: Vec::new(),
            unchecked: None,
            took: Took::default(),
            counts: Guesses::default(),
        }
    }

    /// Nothing is guessed until a generation begins, and nothing was.
    pub(super) fn idle(&mut self) {
        (self.active, self.unchecked, self.counts) = (false, None, Guesses::default());
    }

    /// A generation begins, whose prompt took `seconds` for `consumed` positions.
    pub(super) fn begin(
        &mut self,
        mode: Speculate,
        op: &dyn HostOp,
        start: &Start<'_>,
        (consumed, seconds): (usize, f64),
    ) {
        self.idle();
        if mode == Speculate::Off {
            return;
        }
        let verification = op.verification();
        let mut widths: Vec<_> =
            verification.widths.iter().copied().filter(|width| *width > 1).collect();
        widths.sort_unstable();
        widths.dedup();
        if widths.is_empty() {
            let why = verification.refusal.as_deref().unwrap_or("its host-op checks no guesses");
            self.refuse(why);
            return;
        }
        if let Err(e) = self.guesser.begin(start) {
            if e.kind() != ErrorKind::Cancelled {
                self.refuse(e.message());
            }
            return;
        }
        self.pace.begin(mode, &widths, self.guesser.is_free(), !op.info().can_truncate);
        self.pace.prompt(consumed, seconds);
        let most = self.pace.widest().min(MOST_GUESSES + 1);
        self.step.reserve(most);
        self.found.reserve(most);
        self.active = true;
    }

    /// True while tokens may be guessed.
    pub(super) fn is_active(&self) -> bool {
        self.active
    }

    /// Says once why nothing is guessed.
    fn refuse(&mut self, why: &str) {
        if !std::mem::replace(&mut self.told, true) {
            tracing::warn!("tokens are not guessed ahead ({}): {why}", self.guesser.name());
        }
    }

    /// What is to be checked in one step: `token`, which was chosen last, and guesses of what follows it, at most
    /// `most`, which `allowed` holds for. Only the token where a plain step is better.
    pub(super) fn propose(
        &mut self,
        token: u32,
        most: usize,
        rng: &Rng,
        allowed: impl Fn(u32) -> bool,
    ) -> Result<&[u32]> {
        self.step.clear();
        self.step.push(token);
        (self.took, self.unchecked) = (Took::default(), None);
        let most = most.min(self.pace.widest().saturating_sub(1)).min(MOST_GUESSES);
        let free = self.guesser.is_free();
        let wanted = if !self.active || free { most } else { self.pace.plan(most) };
        if !self.active || wanted == 0 {
            return Ok(&self.step);
        }
        let start = Instant::now();
        self.found.clear();
        if let Err(e) = self.guesser.guess(wanted, rng, &mut self.found) {
            if e.kind() == ErrorKind::Cancelled {
                return Err(e);
            }
            self.active = false;
            self.refuse(&e.report().to_string());
            return Ok(&self.step);
        }
        self.took.guess = start.elapsed().as_secs_f64();
        let usable = self.found.iter().take(wanted).take_while(|&&token| allowed(token)).count();
        let count = if free { self.pace.plan(usable) } else { usable };
        if count == 0 {
            self.unchecked = self.found.first().copied().filter(|_| free);
        }
        self.step.extend_from_slice(&self.found[..count]);
        Ok(&self.step)
    }

    /// The token chosen last, and the guesses that a step checks.
    pub(super) fn step(&self) -> &[u32] {
        &self.step
    }

    /// A token was chosen.
    pub(super) fn push(&mut self, token: u32) {
        if !self.active {
            return;
        }
        if let Some(guess) = self.unchecked.take() {
            self.pace.compared(guess == token);
        }
        self.guesser.push(token);
    }

    /// A plain step took so many seconds.
    pub(super) fn stepped(&mut self, seconds: f64) {
        if self.active {
            self.pace.stepped(seconds);
        }
    }

    /// The step kept the first `kept` of its tokens.
    pub(super) fn passed(&mut self, kept: usize, took: Took) {
        let (guessed, accepted) = (self.step.len() - 1, kept.saturating_sub(1));
        self.pace.passed(guessed, accepted, &Took { guess: self.took.guess, ..took });
        self.counts.passes += 1;
        self.counts.guessed += guessed;
        self.counts.accepted += accepted;
    }

    /// What was guessed since the generation began.
    pub(super) fn counts(&self) -> Guesses {
        self.counts
    }
}
