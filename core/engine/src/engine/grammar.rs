//! An answer that follows a grammar.

use std::collections::VecDeque;

use qhx_base::Result;
use qhx_grammar::Constraint;

use crate::sampling::AllowedTokens;

/// A grammar, and where the answer is in it.
pub(super) struct GrammarCursor {
    constraint: Constraint,
    /// Tokens that must come next.
    forced: VecDeque<u32>,
    /// Tokens that may come next.
    allowed: AllowedTokens,
}

impl GrammarCursor {
    /// At the beginning of an answer.
    pub fn new(mut constraint: Constraint) -> Self {
        let forced = constraint.forced().into();
        Self { constraint, forced, allowed: AllowedTokens::below(0) }
    }

    /// The token that must come next, if one must.
    pub fn forced(&self) -> Option<u32> {
        self.forced.front().copied()
    }

    /// Tokens that may come next, among `all`.
    ///
    /// # Errors
    /// When nothing may, or the grammar is beyond the limits.
    pub fn allowed(&mut self, all: &AllowedTokens) -> Result<&AllowedTokens> {
        self.allowed.set_masked(all, self.constraint.mask()?);
        Ok(&self.allowed)
    }

    /// Goes on by a token of those.
    ///
    /// # Errors
    /// When the grammar is beyond the limits.
    pub fn accept(&mut self, token: u32) -> Result<()> {
        self.constraint.accept(token)?;
        self.forced.pop_front();
        if self.forced.is_empty() {
            self.forced.extend(self.constraint.forced());
        }
        Ok(())
    }

    /// Number of `tokens` that may come next, in a row.
    pub fn accepts(&mut self, tokens: &[u32]) -> usize {
        self.constraint.accepts(tokens)
    }

    /// True where nothing may follow.
    pub fn is_over(&self) -> bool {
        self.constraint.is_over()
    }
}
