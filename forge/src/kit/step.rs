//! Sizes of a decoder's graphs.

use crate::recipe::{Caches, RecipeOptions};

/// The size of a decoder's graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Tokens that it takes at once.
    pub rows: usize,
    /// Positions that its caches of full attention hold: the context, or one of [`RecipeOptions::contexts`].
    pub positions: usize,
    /// Element type of the caches.
    pub caches: Caches,
}

impl Step {
    /// Prefix of the names of graphs of this size: `decode`, `prefill16`; in a smaller context `decode512`,
    /// `prefill16_512`.
    pub(super) fn stem(self, options: &RecipeOptions) -> String {
        let Self { rows, positions, .. } = self;
        match (rows, positions == options.max_ctx) {
            (1, true) => "decode".to_owned(),
            (1, false) => format!("decode{positions}"),
            (_, true) => format!("prefill{rows}"),
            (_, false) => format!("prefill{rows}_{positions}"),
        }
    }
}
