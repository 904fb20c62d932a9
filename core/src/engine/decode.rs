//! The loop of a generation: choose, check what ends it, step.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use super::model::Model;
use super::prompt::Encoded;
use super::speculate::StepTime;
use super::types::{Event, FinishReason};
use crate::op::HostOp as _;
use crate::sampling::{AllowedTokens, Sampler};
use crate::stop::StopFilter;
use crate::text::Detokenizer;
use crate::{ErrorKind, Result, trace};

/// Text that becomes complete token by token, when the bundle has a tokenizer.
pub(super) struct Text {
    pub stream: Option<Detokenizer>,
    pub stop: StopFilter,
    /// What the last token completed and may be shown.
    pub shown: String,
    /// All that was shown.
    pub whole: String,
}

impl Text {
    /// Takes in a token. True when a stop text came.
    fn push(&mut self, token: u32) -> Result<bool> {
        self.shown.clear();
        let Some(stream) = &mut self.stream else { return Ok(false) };
        let stopped = self.stop.push(stream.push(token)?, &mut self.shown);
        self.whole.push_str(&self.shown);
        Ok(stopped)
    }

    /// Shows what was held back because more could have come.
    ///
    /// # Errors
    /// When the detokenizer fails.
    pub fn finish(&mut self) -> Result<()> {
        self.shown.clear();
        let Some(stream) = &mut self.stream else { return Ok(()) };
        if !self.stop.push(stream.finish()?, &mut self.shown) {
            self.stop.finish(&mut self.shown);
        }
        self.whole.push_str(&self.shown);
        Ok(())
    }
}

/// The callback of a generation, which may break it off.
pub(super) struct Listener<'a> {
    pub on_event: &'a mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    pub broke: bool,
}

impl Listener<'_> {
    /// Calls back with an event. True when the generation is broken off.
    pub fn emit(&mut self, event: Event<'_>) -> bool {
        self.broke = self.broke || (self.on_event)(event).is_break();
        self.broke
    }
}

/// A generation whose prompt is consumed.
pub(super) struct Run<'a> {
    /// Tokens that end the answer, besides the model's own.
    pub stop_ids: Vec<u32>,
    pub prompt: &'a Encoded,
    /// Maximum number of tokens.
    pub budget: usize,
    pub sampler: Sampler,
    /// What the sampler chooses among.
    pub allowed: &'a AllowedTokens,
    pub text: Text,
    pub listener: Listener<'a>,
    /// What was chosen.
    pub tokens: Vec<u32>,
    pub sampling: Duration,
    /// Steps, also those that verified draft tokens.
    pub steps: usize,
}

impl Run<'_> {
    /// The token chosen last. There is one after the first choice.
    fn last(&self) -> u32 {
        self.tokens.last().copied().unwrap_or_default()
    }
}

impl Model {
    /// Chooses and consumes tokens until something ends it. The text's last part stays held back.
    pub(super) fn run(&mut self, run: &mut Run<'_>) -> Result<FinishReason> {
        if run.tokens.len() >= run.budget {
            return Ok(FinishReason::Length);
        }
        let mut ended = self.choose(run)?;
        loop {
            if let Some(reason) = ended {
                return Ok(reason);
            }
            ended = match self.advance(run) {
                Err(e) if e.kind() == ErrorKind::Cancelled => return Ok(FinishReason::Cancelled),
                ended => ended?,
            };
        }
    }

    /// Chooses the next token among the logits, and reports it. Returns the reason where the generation ends.
    fn choose(&mut self, run: &mut Run<'_>) -> Result<Option<FinishReason>> {
        if self.session.is_cancelled() {
            return Ok(Some(FinishReason::Cancelled));
        }
        let start = Instant::now();
        let sample = trace::span(self.trace.as_ref(), "sample");
        let token = match run.sampler.sample(self.op.logits()?) {
            Ok(token) => token,
            Err(e) => {
                let error = self.op.about_logits(e);
                // What made the logits unusable may lie in the state, and in what is saved of it.
                if let Err(e) = self.consumed.clear(&mut self.op) {
                    tracing::warn!("the state could not be reset: {e}");
                }
                return Err(error);
            }
        };
        run.sampler.accept(token);
        drop(sample);
        run.sampling += start.elapsed();
        run.tokens.push(token);
        self.speculation.push(token);
        let Run { text, listener, stop_ids, .. } = run;
        if text.stop.is_stop_token(token) {
            let stop = stop_ids.contains(&token);
            return Ok(Some(if stop { FinishReason::Stop } else { FinishReason::Eos }));
        }
        let detokenize = trace::span(self.trace.as_ref(), "detokenize");
        let stopped = text.push(token)?;
        drop(detokenize);
        let output = trace::span(self.trace.as_ref(), "output");
        let broken_off = listener.emit(Event::Token { id: token, text: &text.shown });
        drop(output);
        Ok(if broken_off {
            Some(FinishReason::Cancelled)
        } else if stopped {
            Some(FinishReason::Stop)
        } else if run.tokens.len() >= run.budget {
            Some(FinishReason::Length)
        } else {
            None
        })
    }

    /// Consumes the token chosen last, and chooses the next one; several, where draft tokens are accepted.
    fn advance(&mut self, run: &mut Run<'_>) -> Result<Option<FinishReason>> {
        if self.speculation.is_active() && self.draft(run)? > 0 {
            return self.verify(run);
        }
        let start = Instant::now();
        self.step(run.last(), run.prompt, &run.tokens)?;
        self.speculation.stepped(start.elapsed().as_secs_f64());
        run.steps += 1;
        self.choose(run)
    }

    /// Makes draft tokens. Returns the number of them to verify.
    fn draft(&mut self, run: &Run<'_>) -> Result<usize> {
        let room = self.op.info().max_ctx.saturating_sub(self.op.position());
        let max_drafts = room.min(run.budget - run.tokens.len()).saturating_sub(1);
        let _span = trace::span(self.trace.as_ref(), "guess");
        let placeholders = &self.op.info().placeholders;
        let may = |token: u32| run.allowed.contains(token) && !placeholders.contains(&token);
        let step = self.speculation.propose(run.last(), max_drafts, run.sampler.rng(), may)?;
        Ok(step.len() - 1)
    }

    /// Verifies draft tokens together with the token chosen last. Those that are chosen, too, are accepted.
    fn verify(&mut self, run: &mut Run<'_>) -> Result<Option<FinishReason>> {
        let before = run.tokens.len();
        let mut time = StepTime::default();
        let start = Instant::now();
        let verify = trace::span_with(self.trace.as_ref(), "verify", |s| {
            s.argument("tokens", self.speculation.step().len());
            s.argument("position", self.op.position());
        });
        let mut checked = self.op.verify(self.speculation.step());
        drop(verify);
        let (mut ended, mut row) = (None, 0);
        time.pass += start.elapsed().as_secs_f64();
        while checked.is_ok() {
            let start = Instant::now();
            checked = self.op.row_logits(row);
            time.pass += start.elapsed().as_secs_f64();
            if checked.is_err() {
                break;
            }
            ended = self.choose(run)?;
            row += 1;
            let draft = self.speculation.step().get(row);
            if ended.is_some() || draft != Some(&run.last()) {
                break;
            }
        }
        match checked {
            Err(e) if self.loss.happened() => {
                self.replay(e, run.prompt, &run.tokens)?;
                run.steps += 1;
                return self.choose(run);
            }
            // Nothing was chosen, or everything that was chosen is to be accepted.
            Err(e) if row == 0 => return Err(e),
            _ => {}
        }
        // The token chosen last is not consumed yet; where the run was cancelled before, the first one is.
        let count = (run.tokens.len() - before).max(1);
        let start = Instant::now();
        let span = trace::span_with(self.trace.as_ref(), "accept", |s| s.argument("tokens", count));
        let accepted = self.op.accept(count);
        drop(span);
        time.keep += start.elapsed().as_secs_f64();
        run.steps += 1;
        match accepted {
            Ok(()) => {
                for &token in &self.speculation.step()[..count] {
                    self.consumed.push(token);
                }
                self.speculation.verified(count, time);
            }
            Err(e) if self.loss.happened() => {
                let consumed = run.tokens.len().saturating_sub(1).max(before);
                self.replay(e, run.prompt, &run.tokens[..consumed])?;
            }
            Err(e) => return Err(e),
        }
        checked.map(|()| ended)
    }
}
