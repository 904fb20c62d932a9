//! Draft tokens of a drafting head, which is part of the model's own bundle.

use qhx_base::Result;

use super::{Start, draft_sampler};
use crate::op::{HostOp, OpenInfo};
use crate::sampling::{Rng, Sampler};

/// Draws from the logits that the op's drafting head gives, with the random numbers that the model will draw with.
pub(super) struct DraftingHead {
    sampler: Sampler,
}

impl DraftingHead {
    /// Its name, for messages.
    pub const NAME: &'static str = "drafting head";

    /// For one generation.
    ///
    /// # Errors
    /// When the sampling is invalid.
    pub fn new(start: &Start<'_>, info: &OpenInfo) -> Result<Self> {
        Ok(Self { sampler: draft_sampler(start, info)? })
    }

    /// Adds `max` tokens to `drafts` that may follow `token`, which the op has not consumed.
    ///
    /// # Errors
    /// Errors of the op, and of its logits.
    pub fn draft(
        &mut self,
        op: &mut dyn HostOp,
        mut token: u32,
        max: usize,
        rng: &Rng,
        drafts: &mut Vec<u32>,
    ) -> Result<()> {
        self.sampler.draw_as(rng);
        for _ in 0..max {
            op.draft(token)?;
            token = self.sampler.sample(op.logits()?)?;
            drafts.push(token);
        }
        Ok(())
    }
}
