//! Log-probabilities of a prompt's tokens.

use std::ops::Range;

use qhx_base::Result;

use super::model::Model;
use super::prompt::Encoded;
use super::types::PromptToken;
use crate::op::HostOp as _;
use crate::sampling::{AllowedTokens, Logprobs, TokenLogprobs};

/// Log-probabilities of a prompt's tokens but for the first.
pub(super) struct Scored {
    /// Most likely tokens in the place of each.
    top: usize,
    compute: Logprobs,
    found: Vec<TokenLogprobs>,
}

impl Scored {
    /// With `top` most likely tokens in the place of each.
    pub fn new(top: usize) -> Self {
        Self { top, compute: Logprobs::default(), found: Vec::new() }
    }

    /// The tokens of the prompt with what was found.
    pub fn tokens(self, prompt: &Encoded) -> Vec<PromptToken> {
        let logprobs = std::iter::once(None).chain(self.found.into_iter().map(Some));
        let tokens = prompt.sequence.tokens.iter().zip(logprobs);
        tokens.map(|(&id, logprobs)| PromptToken { id, logprobs }).collect()
    }
}

impl Model {
    /// Consumes a prompt of tokens from its beginning, in steps that have logits at each of them: verification steps
    /// where the op has such, and one token a step otherwise.
    pub(super) fn score(
        &mut self,
        prompt: &Encoded,
        allowed: &AllowedTokens,
        scored: &mut Scored,
    ) -> Result<()> {
        self.keep_state()?;
        self.reset()?;
        scored.found.clear();
        let tokens = &prompt.sequence.tokens;
        self.op.consume(&prompt.segments(0..1), 1)?;
        self.prefix.extend(&prompt.sequence, 0..1);
        let width = self.op.info().verification.widths.last().copied().unwrap_or(1);
        let mut done = 1;
        while let Some(&next) = tokens.get(done) {
            if done == 1 {
                self.note(next, allowed, scored)?;
            }
            // What follows is chosen from the logits of a plain step.
            let end = tokens.len().saturating_sub(1).min(done + width);
            if end - done.min(end) > 1 {
                self.score_together(tokens, done..end, allowed, scored)?;
                done = end;
                continue;
            }
            self.op.decode(next)?;
            self.prefix.push(next);
            done += 1;
            if let Some(&behind) = tokens.get(done) {
                self.note(behind, allowed, scored)?;
            }
        }
        Ok(())
    }

    /// Consumes the tokens of a range in one step. There is a token behind it.
    fn score_together(
        &mut self,
        tokens: &[u32],
        range: Range<usize>,
        allowed: &AllowedTokens,
        scored: &mut Scored,
    ) -> Result<()> {
        let step = &tokens[range.clone()];
        self.op.verify(step)?;
        for (row, &behind) in tokens[range.start + 1..=range.end].iter().enumerate() {
            self.op.row_logits(row)?;
            self.note(behind, allowed, scored)?;
        }
        self.op.accept(step.len())?;
        step.iter().for_each(|&token| self.prefix.push(token));
        Ok(())
    }

    /// Notes the log-probability of a token that follows.
    fn note(&self, token: u32, allowed: &AllowedTokens, scored: &mut Scored) -> Result<()> {
        let cap = self.op.info().softcap;
        let Scored { top, compute, found } = scored;
        found.push(compute.of(self.op.logits()?, cap, token, *top, allowed));
        Ok(())
    }
}
