//! Log-probabilities of a prompt's tokens.

use std::ops::Range;

use qhx_base::Result;

use super::decode::LogprobRecorder;
use super::model::Model;
use super::prompt::Encoded;
use crate::op::HostOp as _;
use crate::sampling::AllowedTokens;

impl Model {
    /// Consumes a prompt of tokens from its beginning, in steps that have logits at each of them: verification steps
    /// where the op has such, and one token a step otherwise.
    pub(super) fn score(
        &mut self,
        prompt: &Encoded,
        allowed: &AllowedTokens,
        scored: &mut LogprobRecorder,
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
        scored: &mut LogprobRecorder,
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
    fn note(
        &self,
        token: u32,
        allowed: &AllowedTokens,
        scored: &mut LogprobRecorder,
    ) -> Result<()> {
        scored.note(self.op.logits()?, self.op.info().softcap, token, allowed);
        Ok(())
    }
}
