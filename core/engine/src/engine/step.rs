//! Steps of a generation: its prompt, and each token of the answer.

use qhx_base::{Result, trace};

use super::model::Model;
use super::prompt::Encoded;
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

    /// The same, where a device that is lost is an error.
    pub(super) fn consume_once(&mut self, prompt: &Encoded, reused: &mut usize) -> Result<()> {
        let sequence = &prompt.sequence;
        let common = self.prefix.sequence().common(sequence);
        *reused = self.prefix.prepare(&mut self.op, sequence)?;
        let mut done = *reused;
        let parts = self.prefix.parts(self.op.info(), sequence, prompt.checkpoint, (done, common));
        for end in parts {
            let result = self.op.consume(&prompt.segments(done..end), end - done);
            self.prefix.extend(sequence, done..end);
            if let Err(e) = result {
                self.settle();
                return Err(e);
            }
            if end < sequence.len() {
                let _span = trace::span(self.bundle.trace(), "save state");
                self.prefix.checkpoint(&mut self.op)?;
            }
            done = end;
        }
        if let Some(dump) = self.bundle.dump() {
            let logits = self.op.logits()?.capped(self.op.info().softcap);
            dump.write("logits", &[logits.len()], &logits)?;
        }
        Ok(())
    }

    /// Decodes a token, the last one of `answer`.
    pub(super) fn step(&mut self, token: u32, prompt: &Encoded, answer: &[u32]) -> Result<()> {
        let span = trace::span_with(self.bundle.trace(), "decode", |s| {
            s.argument("token", token);
            s.argument("position", self.op.position());
        });
        let decoded = self.op.decode(token);
        drop(span);
        match decoded {
            Ok(()) => {
                self.prefix.push(token);
                Ok(())
            }
            Err(e) if self.is_lost(&e) => self.replay(e, prompt, answer),
            Err(e) => Err(e),
        }
    }

    /// Consumes the last `count` tokens of `answer` together.
    pub(super) fn steps(&mut self, count: usize, prompt: &Encoded, answer: &[u32]) -> Result<()> {
        let tokens = &answer[answer.len() - count..];
        let span = trace::span_with(self.bundle.trace(), "decode", |s| {
            s.argument("tokens", count);
            s.argument("position", self.op.position());
        });
        let consumed = self.op.consume(&[Segment::Tokens(tokens)], count);
        drop(span);
        for &token in tokens {
            self.prefix.push(token);
        }
        let Err(e) = consumed else { return Ok(()) };
        if self.is_lost(&e) {
            return self.replay(e, prompt, answer);
        }
        // A part of them may be consumed.
        self.settle();
        Err(e)
    }
}
