//! Recovery from a restart of the DSP: the state is computed again from what it stands for.
//!
//! A crashed DSP may have written anything to the memory that it shares with the host: inputs that an op fills once,
//! rows of caches that masks hide, saved states. Nothing of it is trusted. The op is closed with its buffers and
//! contexts, opened again as it was when the model was opened, and given the prompt again, whose images and
//! audio are still at hand, and then the tokens of the answer one by one, as they were decoded: the text
//! goes on as if nothing had been. A restart on the way there is an error: the same step would fail for ever.
//!
//! The same way goes a state that was forgotten since no backend took it over: see [`Refused`].

use std::time::Instant;

use qhx_base::{Error, ErrorKind, Result, trace};

use super::checked::Checked;
use super::model::Model;
use super::prompt::Encoded;
use super::split_op::Refused;
use crate::op::{HostOp as _, Segment};

impl Model {
    /// Brings the op's state to the end of the prompt.
    pub(super) fn consume(&mut self, prompt: &Encoded, reused: &mut usize) -> Result<()> {
        match self.consume_once(prompt, reused) {
            Err(e) if self.is_lost(&e) => {
                *reused = 0;
                self.replay(e, prompt, &[])
            }
            result => result,
        }
    }

    /// Decodes a token, the last one of `answer`.
    pub(super) fn step(&mut self, token: u32, prompt: &Encoded, answer: &[u32]) -> Result<()> {
        let span = trace::span_with(self.trace.as_ref(), "decode", |s| {
            s.argument("token", token);
            s.argument("position", self.op.position());
        });
        let decoded = self.op.decode(token);
        drop(span);
        match decoded {
            Ok(()) => {
                self.consumed.push(token);
                Ok(())
            }
            Err(e) if self.is_lost(&e) => self.replay(e, prompt, answer),
            Err(e) => Err(e),
        }
    }

    /// Consumes the last `count` tokens of `answer` together.
    pub(super) fn steps(&mut self, count: usize, prompt: &Encoded, answer: &[u32]) -> Result<()> {
        let tokens = &answer[answer.len() - count..];
        let span = trace::span_with(self.trace.as_ref(), "decode", |s| {
            s.argument("tokens", count);
            s.argument("position", self.op.position());
        });
        let consumed = self.op.consume(&[Segment::Tokens(tokens)], count);
        drop(span);
        for &token in tokens {
            self.consumed.push(token);
        }
        let Err(e) = consumed else { return Ok(()) };
        if self.is_lost(&e) {
            return self.replay(e, prompt, answer);
        }
        // A part of them may be consumed.
        self.consumed.settle(self.op.position());
        Err(e)
    }

    /// Embeds one text. A trace has its size under this name.
    pub(super) fn embed_segments(
        &mut self,
        segments: &[Segment<'_>],
        (unit, size): (&'static str, usize),
    ) -> Result<&[f32]> {
        let trace = self.trace.clone();
        let _span = trace::span_with(trace.as_ref(), "embed", |span| span.argument(unit, size));
        self.embed_by(|op| op.embed(segments))
    }

    /// Embeds texts in one execution. Their vectors lie one behind the other.
    pub(super) fn embed_pack(&mut self, texts: &[&[u32]]) -> Result<&[f32]> {
        let trace = self.trace.clone();
        let _span = trace::span_with(trace.as_ref(), "embed", |span| {
            span.argument("tokens", texts.iter().map(|text| text.len()).sum::<usize>());
            span.argument("texts", texts.len());
        });
        self.embed_by(|op| op.embed_many(texts))
    }

    fn embed_by(
        &mut self,
        mut embed: impl for<'a> FnMut(&'a mut Checked) -> Result<&'a [f32]>,
    ) -> Result<&[f32]> {
        self.revive()?;
        let mut embedded = keep(&mut self.vector, embed(&mut self.op));
        if let Err(e) = &embedded
            && self.loss.happened()
        {
            log_loss(e);
            self.revive()?;
            embedded = keep(&mut self.vector, embed(&mut self.op));
            embedded = embedded.map_err(|e| self.again(e));
        }
        embedded.map(|()| self.vector.as_slice())
    }

    /// Opens the op again where its device was lost, or where it could not be opened after that.
    pub(super) fn revive(&mut self) -> Result<()> {
        if self.loss.happened() || self.op.is_closed() {
            self.reopen().map_err(|e| e.context("after the DSP restarted"))?;
        }
        Ok(())
    }

    /// True where a call failed with `error` because the state is gone, which can be computed again.
    pub(super) fn is_lost(&self, error: &Error) -> bool {
        self.loss.happened() || Refused::is_cause_of(error)
    }

    /// Computes the state of the prompt and the answer so far again, after a call that failed with `error`.
    #[cold]
    pub(super) fn replay(&mut self, error: Error, prompt: &Encoded, answer: &[u32]) -> Result<()> {
        match self.loss.happened() {
            true => log_loss(&error),
            false => tracing::warn!("{}; it is computed again", error.message()),
        }
        let start = Instant::now();
        self.revive()?;
        let result = self.try_replay(prompt, answer);
        if result.is_ok() {
            let positions = self.op.position();
            let time = start.elapsed().as_millis();
            tracing::warn!("{positions} positions were consumed again in {time} ms");
        }
        result.map_err(|e| self.again(e))
    }

    fn try_replay(&mut self, prompt: &Encoded, answer: &[u32]) -> Result<()> {
        self.consume_once(prompt, &mut 0)?;
        for &token in answer {
            self.op.decode(token)?;
            self.consumed.push(token);
        }
        Ok(())
    }

    /// An error of what was tried again.
    fn again(&self, error: Error) -> Error {
        if error.kind() == ErrorKind::Cancelled || !self.loss.happened() {
            return error;
        }
        error.context("the DSP restarted again, right after its contexts were opened again").hint(
            "this model, or another program, crashes the DSP: close other programs that use the NPU, and reboot \
             the device if it persists",
        )
    }
}

fn log_loss(error: &Error) {
    tracing::warn!("the DSP restarted ({}); the model is opened again", error.message());
}

/// Keeps an embedding: what the op returns is only lent.
fn keep(vector: &mut Vec<f32>, embedded: Result<&[f32]>) -> Result<()> {
    let embedded = embedded?;
    vector.clear();
    vector.extend_from_slice(embedded);
    Ok(())
}
