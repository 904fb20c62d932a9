//! Verifying draft tokens: several in one step, of which only the right ones are accepted.
//!
//! A step of several rows reads the weights once for all of them. Nothing of it is accepted before the host has
//! reported how many tokens were right, so that there is nothing to take back: caches get the rows of the tokens that
//! stay, which holds for rings, too, and a state that is replaced as a whole still has its old buffer. The new one is
//! of all tokens; where only some stay, these go through the graphs once more.
//!
//! Logits are made row by row, and only of the rows that the host asks for. With a head that takes one row, it is
//! executed once for each token that the host gets, as often as without draft tokens.

use super::{Decoder, PromptSpan, STEP, Shards, last};
use qhx_op::text::check_room;
use qhx_op::{Error, Host, Result, Verification, View};

impl Decoder {
    /// In steps of how many tokens draft tokens are verified, or why not.
    pub fn verification(&self) -> Verification {
        let whole = &self.passes[..self.whole];
        let passes = whole.iter().enumerate();
        let widths: Vec<_> =
            passes.filter(|(pass, _)| self.verifies(*pass)).map(|(_, pass)| pass.rows).collect();
        if !widths.is_empty() {
            return Verification { widths, refusal: None };
        }
        let mut wide = whole.iter().filter(|pass| pass.rows > 1).peekable();
        Verification::refused(if wide.peek().is_none() {
            "the bundle has no graphs that take several tokens (plan.params.prefill)"
        } else if wide.clone().all(|pass| pass.begins) {
            "its prefill graphs read no caches, and take a text's first tokens alone"
        } else if wide.all(|pass| pass.only_full) {
            "its prefill graphs replace a state and have no input valid or keep that says which rows are tokens"
        } else {
            "its prefill graphs end before the last layers and give neither y nor logits"
        })
    }

    /// True when a pass gives logits of each of its rows, whatever the number of tokens.
    fn verifies(&self, pass: usize) -> bool {
        let Shards { rows, only_full, begins, .. } = self.passes[pass];
        rows > 1 && !only_full && !begins && self.passes[pass].gives_logits()
    }

    /// Runs tokens through the narrowest graphs that take them: [`Generator::verify`].
    pub(super) fn verify_step(&mut self, host: &mut Host, tokens: &[u32]) -> Result<()> {
        self.unkept = None;
        check_room(self.state.position(), tokens.len(), self.max_ctx)?;
        let fits = |&pass: &usize| self.verifies(pass) && tokens.len() <= self.passes[pass].rows;
        let pass = (STEP + 1..self.whole).find(fits);
        let Some(pass) = pass.filter(|_| !tokens.is_empty()) else {
            return Err(Error::prompt(format!(
                "{} tokens to check in one step, expected one or more, as many as graphs take: {:?}",
                tokens.len(),
                self.verification().widths
            )));
        };
        self.chunk.clear();
        self.chunk.extend_from_slice(tokens);
        let pass = self.smallest(pass);
        self.run(host, pass, PromptSpan::default(), true)?;
        self.unkept = Some((pass, self.state.changes()));
        Ok(())
    }

    /// The pass of the last verification, unless the state is another one since.
    fn current(&self) -> Option<usize> {
        self.unkept.filter(|(_, changes)| *changes == self.state.changes()).map(|(pass, _)| pass)
    }

    /// Logits of the position of token `row` of the last verification: [`Generator::row_logits`].
    pub(super) fn verified_logits(&mut self, host: &mut Host, row: usize) -> Result<View> {
        match self.current() {
            Some(pass) if row < self.chunk.len() => last(self.logits_of(host, pass, row)?),
            _ => Err(nothing("the logits of a row", row)),
        }
    }

    /// Keeps the first `count` tokens of the last verification: [`Generator::accept`]. Where a state is replaced as a
    /// whole and not all tokens stay, those that do go through the graphs once more.
    pub(super) fn accept_verified(&mut self, host: &mut Host, count: usize) -> Result<()> {
        let pass = self.current();
        self.unkept = None;
        let Some(pass) = pass.filter(|_| count <= self.chunk.len()) else {
            return Err(nothing("keeping tokens", count));
        };
        if count == 0 {
            return Ok(());
        }
        let Shards { graphs, .. } = &self.passes[pass];
        let replaces = graphs.iter().any(|&graph| self.state.replaces(pass, graph));
        if count == self.chunk.len() || !replaces {
            return self.commit(host, pass, count);
        }
        self.chunk.truncate(count);
        // A single token goes the way that it goes without draft tokens, to the same state.
        let fits = |&pass: &usize| {
            let Shards { rows, only_full, begins, .. } = self.passes[pass];
            rows > 1 && !only_full && !begins && count <= rows
        };
        let again =
            if count == 1 { STEP } else { (STEP + 1..self.whole).find(fits).unwrap_or(pass) };
        self.step(host, again, PromptSpan::default(), false).map(drop)
    }
}

/// A call out of its order.
fn nothing(what: &str, number: usize) -> Error {
    Error::unsupported(&format!("{what} ({number}) without as many tokens of a verify before it"))
}
