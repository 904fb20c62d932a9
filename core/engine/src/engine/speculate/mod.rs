//! Speculative decoding: several draft tokens are verified in one step (Leviathan et al. 2023, arXiv 2211.17192).
//!
//! The token that follows is always drawn from the model's own logits, as without draft tokens, and then compared with
//! the draft token. So an answer is that of plain decoding, greedy or drawn with a seed, wherever draft tokens come
//! from and how many there are. For a draft token that is not drawn itself this is the rejection rule of the paper: it
//! is accepted with the probability p that the model gives it, and otherwise the token is from the rest of p. A draft
//! model that draws does so with the random numbers that the model will draw with (common random numbers; Daliri et al.
//! 2024, arXiv 2408.07978). The paper's rule for two distributions would accept a little more, but then a seed's answer
//! would depend on the number of draft tokens, and so on the machine's speed.

mod draft;
mod draft_length;
mod head;
mod lookup;

use std::sync::Arc;
use std::time::Instant;

use crate::op::{HostOp, OpenInfo};
use crate::sampling::{AllowedTokens, Rng, Sampler, SamplingParams};

use super::types::{DraftCounts, MAX_DRAFT_TOKENS, Speculate};
use draft_length::DraftLength;
pub(super) use draft_length::StepTime;
use head::DraftingHead;
pub use lookup::PromptLookup;
use qhx_base::{CancelToken, ErrorKind, Result};

/// The generation that a [`Drafter`] begins.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Start<'a> {
    /// Tokens of the prompt; where an image, audio clip or video lies, the token that stands for it.
    pub prompt: &'a [u32],
    /// Tokens of a text that much of the answer is expected to be.
    pub predicted: &'a [u32],
    /// Maximum number of tokens that may follow.
    pub max: usize,
    /// Sampling parameters of these tokens.
    pub sampling: &'a SamplingParams,
    /// Tokens that they are chosen among.
    pub allowed: &'a Arc<AllowedTokens>,
    /// The prompt has images, audio or videos.
    pub media: bool,
    /// Stops the generation.
    pub cancel: &'a CancelToken,
}

/// Makes draft tokens: a prediction of what follows a text. Wrong ones cost time and change nothing.
pub trait Drafter: Send {
    /// Such as `prompt lookup`, for messages.
    fn name(&self) -> &str;

    /// A generation begins.
    ///
    /// # Errors
    /// An error costs this generation its draft tokens, and is reported once unless it is a cancellation.
    fn begin(&mut self, start: &Start<'_>) -> Result<()>;

    /// The text goes on with a token.
    fn push(&mut self, token: u32);

    /// Adds at most `most` tokens to `drafts` that may follow the text, in order; none where nothing is predicted.
    /// `rng` is as the model's draw of the first of them will find it; each draw takes one number.
    ///
    /// # Errors
    /// An error costs this generation its draft tokens, unless it is a cancellation.
    fn draft(&mut self, max: usize, rng: &Rng, drafts: &mut Vec<u32>) -> Result<()>;

    /// True when a draft token takes no time worth counting: then draft tokens are compared with the text also while
    /// none is verified, to learn how often they are right.
    fn is_free(&self) -> bool {
        false
    }
}

/// Draws draft tokens as `start` has tokens chosen, but for penalties, which look at the text before.
fn draft_sampler(start: &Start<'_>, info: &OpenInfo) -> Result<Sampler> {
    let sampling = SamplingParams {
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        ..start.sampling.clone()
    };
    let sampler = Sampler::restricted(sampling, info.vocab, Arc::clone(start.allowed))?;
    Ok(sampler.softcapped(info.softcap))
}

/// Speculative decoding of a model's generations.
pub(super) struct Speculation {
    drafter: Box<dyn Drafter>,
    /// The drafter was chosen: a drafting head does not come before it.
    chosen: bool,
    /// Drafting head of the model, for a generation that it drafts for.
    head: Option<DraftingHead>,
    draft_length: DraftLength,
    active: bool,
    /// The reason why there are no draft tokens has been logged.
    warned: bool,
    found: Vec<u32>,
    /// The token that was chosen last, and the draft tokens after it.
    step: Vec<u32>,
    /// A draft token that no step verifies.
    unchecked: Option<u32>,
    time: StepTime,
    counts: DraftCounts,
}

impl Default for Speculation {
    fn default() -> Self {
        let mut lookup = Self::of(Box::new(PromptLookup::new()));
        lookup.chosen = false;
        lookup
    }
}

impl Speculation {
    pub(super) fn of(drafter: Box<dyn Drafter>) -> Self {
        Self {
            drafter,
            chosen: true,
            head: None,
            draft_length: DraftLength::default(),
            active: false,
            warned: false,
            found: Vec::new(),
            step: Vec::new(),
            unchecked: None,
            time: StepTime::default(),
            counts: DraftCounts::default(),
        }
    }

    /// No draft tokens until a generation begins; clears the counts.
    pub(super) fn idle(&mut self) {
        (self.active, self.unchecked, self.counts) = (false, None, DraftCounts::default());
        self.head = None;
    }

    /// True where the drafting head of the op makes the draft tokens.
    fn by_head(&self, op: &dyn HostOp) -> bool {
        !self.chosen && op.info().drafts && !op.info().verification.widths.is_empty()
    }

    /// The mode without [`Speculate::Model`].
    pub(super) fn resolved(&self, mode: Speculate, op: &dyn HostOp) -> Speculate {
        match mode {
            Speculate::Model if self.by_head(op) => Speculate::Auto,
            Speculate::Model => Speculate::Off,
            mode => mode,
        }
    }

    /// A prompt is about to be consumed, whose answer has draft tokens in this `mode`: a drafting head has to know.
    ///
    /// # Errors
    /// Errors of the op.
    pub(super) fn prepare(&self, mode: Speculate, op: &mut dyn HostOp) -> Result<()> {
        if !op.info().drafts {
            return Ok(());
        }
        let on = mode != Speculate::Off && self.by_head(op);
        op.drafting(on)
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
        let verification = &op.info().verification;
        let mut widths: Vec<_> =
            verification.widths.iter().copied().filter(|width| *width > 1).collect();
        widths.sort_unstable();
        widths.dedup();
        if widths.is_empty() {
            let why =
                verification.refusal.as_deref().unwrap_or("its host-op verifies no draft tokens");
            self.refuse(why);
            return;
        }
        let begun = match self.by_head(op) {
            true => DraftingHead::new(start, op.info()).map(|head| self.head = Some(head)),
            false => self.drafter.begin(start),
        };
        if let Err(e) = begun {
            if e.kind() != ErrorKind::Cancelled {
                self.refuse(e.message());
            }
            return;
        }
        self.draft_length.begin(mode, &widths, self.is_free(), !op.info().can_truncate);
        self.draft_length.prompt(consumed, seconds);
        let max_drafts = self.draft_length.widest().min(MAX_DRAFT_TOKENS + 1);
        self.step.reserve(max_drafts);
        self.found.reserve(max_drafts);
        self.active = true;
    }

    fn is_free(&self) -> bool {
        self.head.is_none() && self.drafter.is_free()
    }

    fn name(&self) -> &str {
        self.head.as_ref().map_or_else(|| self.drafter.name(), |_| DraftingHead::NAME)
    }

    /// True while there may be draft tokens.
    pub(super) fn is_active(&self) -> bool {
        self.active
    }

    /// Logs once why there are no draft tokens.
    fn refuse(&mut self, why: &str) {
        if !std::mem::replace(&mut self.warned, true) {
            tracing::warn!("no draft tokens are verified ({}): {why}", self.name());
        }
    }

    /// Tokens to verify in one step: `token`, which was chosen last, and at most `max_drafts` draft tokens: the
    /// first of them, as many as `allowed` says. Only the token where a plain step is better.
    pub(super) fn propose(
        &mut self,
        op: &mut dyn HostOp,
        token: u32,
        max_drafts: usize,
        rng: &Rng,
        allowed: impl FnOnce(&OpenInfo, &[u32]) -> usize,
    ) -> Result<&[u32]> {
        self.step.clear();
        self.step.push(token);
        (self.time, self.unchecked) = (StepTime::default(), None);
        let max_drafts =
            max_drafts.min(self.draft_length.widest().saturating_sub(1)).min(MAX_DRAFT_TOKENS);
        let free = self.is_free();
        let wanted =
            if !self.active || free { max_drafts } else { self.draft_length.plan(max_drafts) };
        if !self.active || wanted == 0 {
            return Ok(&self.step);
        }
        let start = Instant::now();
        self.found.clear();
        let drafted = match &mut self.head {
            Some(head) => head.draft(op, token, wanted, rng, &mut self.found),
            None => self.drafter.draft(wanted, rng, &mut self.found),
        };
        if let Err(e) = drafted {
            if e.kind() == ErrorKind::Cancelled {
                return Err(e);
            }
            self.active = false;
            self.refuse(&e.report().to_string());
            return Ok(&self.step);
        }
        self.time.draft = start.elapsed().as_secs_f64();
        let usable = allowed(op.info(), &self.found[..wanted.min(self.found.len())]);
        let count = if free { self.draft_length.plan(usable) } else { usable };
        if count == 0 {
            self.unchecked = self.found.first().copied().filter(|_| free);
        }
        self.step.extend_from_slice(&self.found[..count]);
        Ok(&self.step)
    }

    /// The token chosen last, and the draft tokens that a step verifies.
    pub(super) fn step(&self) -> &[u32] {
        &self.step
    }

    /// A token was chosen.
    pub(super) fn push(&mut self, token: u32) {
        if !self.active {
            return;
        }
        if let Some(draft) = self.unchecked.take() {
            self.draft_length.compared(draft == token);
        }
        if self.head.is_none() {
            self.drafter.push(token);
        }
    }

    /// A plain step took `seconds`.
    pub(super) fn stepped(&mut self, seconds: f64) {
        if self.active {
            self.draft_length.stepped(seconds);
        }
    }

    /// The verification step accepted the first `tokens` of its tokens.
    pub(super) fn verified(&mut self, tokens: usize, time: StepTime) {
        let (drafted, accepted) = (self.step.len() - 1, tokens.saturating_sub(1));
        self.draft_length.verified(drafted, accepted, &StepTime { draft: self.time.draft, ..time });
        self.counts.verifications += 1;
        self.counts.drafted += drafted;
        self.counts.accepted += accepted;
    }

    /// Counts of draft tokens since the generation began.
    pub(super) fn counts(&self) -> DraftCounts {
        self.counts
    }
}
