//! Position of an answer in its grammar.

use std::fmt;

use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use qhx_base::{Error, Result, error};

/// Which tokens may come next in one answer, and which must.
pub struct Constraint {
    matcher: Matcher,
    mask: SimpleVob,
    /// The mask is that of the next token.
    fresh: bool,
    /// Tokens that end the answer, besides the model's own.
    stops: Vec<u32>,
    /// The model's own, where they are not to.
    goes_on: Vec<u32>,
    vocab: usize,
    over: bool,
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").field("over", &self.over).finish_non_exhaustive()
    }
}

impl Constraint {
    pub(crate) fn new(matcher: Matcher, stops: Vec<u32>, goes_on: Vec<u32>, vocab: usize) -> Self {
        let over = matcher.is_stopped() && !matcher.is_error();
        Self { matcher, mask: SimpleVob::new(), fresh: false, stops, goes_on, vocab, over }
    }

    /// The tokens that may come next, as bits: token 33 is bit 1 of the second number. Those that end the answer are
    /// among them where the grammar may end. None where it must.
    ///
    /// # Errors
    /// When no token may come, or what the grammar asks for is beyond the limits.
    pub fn mask(&mut self) -> Result<&[u32]> {
        if self.over {
            self.mask.set_all(false);
            return Ok(self.mask.as_slice());
        }
        if !self.fresh {
            self.mask = self.matcher.compute_mask().map_err(|e| failed(&e))?;
            if !self.stops.is_empty() && self.matcher.is_accepting().map_err(|e| failed(&e))? {
                for &stop in self.stops.iter().filter(|&&stop| (stop as usize) < self.vocab) {
                    self.mask.allow_token(stop);
                }
            }
            for &end in &self.goes_on {
                self.mask.disallow_token(end);
            }
            self.over = self.mask.is_zero();
            self.fresh = true;
        }
        Ok(self.mask.as_slice())
    }

    /// Goes on by a token that may come next.
    ///
    /// # Errors
    /// When it may not come, or what the grammar asks for is beyond the limits.
    pub fn accept(&mut self, token: u32) -> Result<()> {
        self.fresh = false;
        if self.stops.contains(&token) {
            self.over = true;
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(|e| failed(&e))?;
        self.over = self.matcher.is_stopped();
        Ok(())
    }

    /// The tokens that must come next, if any: they need not be chosen.
    pub fn forced(&mut self) -> Vec<u32> {
        if self.over { Vec::new() } else { self.matcher.compute_ff_tokens() }
    }

    /// Number of `tokens` that may come next, in a row.
    pub fn accepts(&mut self, tokens: &[u32]) -> usize {
        if self.over { 0 } else { self.matcher.validate_tokens(tokens).unwrap_or(0) }
    }

    /// True where nothing may follow.
    pub fn is_over(&self) -> bool {
        self.over
    }
}

fn failed(error: &dyn fmt::Display) -> Error {
    error!(Usage, "the answer cannot go on: {}", short(error))
}

/// An error of `llguidance` in one line.
pub(crate) fn short(error: &dyn fmt::Display) -> String {
    let text = error.to_string();
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let (first, last) = (lines.next().unwrap_or_default(), lines.next_back().unwrap_or_default());
    match first {
        "" | "NoExtensionBias" => "no token may come next".to_owned(),
        first => format!("{first} {last}").trim_end().chars().take(400).collect(),
    }
}
