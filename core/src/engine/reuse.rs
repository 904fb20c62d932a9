//! What the state holds, and how much of it a prompt can use.
//!
//! A conversation's next prompt usually begins with everything consumed so far. Then only the rest
//! is consumed. Where it departs from what was consumed, the op's state is cut back if it can be,
//! or the latest snapshot that the prompt begins with is restored, or everything is consumed anew.
//! A snapshot that cannot be taken costs the next turn that, and this one nothing.

use crate::Result;
use crate::op::{HostOp, OpInfo, SnapshotId};

/// Snapshots kept: the end of the last turn, and the one before for a repeated question.
const KEPT: usize = 2;

#[derive(Debug)]
struct Checkpoint {
    tokens: Vec<u32>,
    id: SnapshotId,
}

/// The tokens that the op's state stands for, with snapshots of earlier points.
#[derive(Debug, Default)]
pub(super) struct Consumed {
    tokens: Vec<u32>,
    checkpoints: Vec<Checkpoint>,
}

/// True when states of such an op are saved for the next turn. One that can be cut back needs none.
pub(super) fn saves(info: &OpInfo) -> bool {
    info.can_snapshot && !info.can_truncate
}

impl Consumed {
    /// Makes the op's state one that `prompt` begins with and leaves at least one token to
    /// consume. Answers with the number of tokens that the state stands for.
    pub(super) fn prepare(&mut self, op: &mut dyn HostOp, prompt: &[u32]) -> Result<usize> {
        self.settle(op.position());
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let usable = common.min(prompt.len().saturating_sub(1));
        if usable == self.tokens.len() && usable == op.position() {
            return Ok(usable);
        }
        if op.info().can_truncate && usable > 0 {
            op.truncate(usable)?;
            self.tokens.truncate(usable);
            return Ok(usable);
        }
        let best = self
            .checkpoints
            .iter()
            .filter(|c| c.tokens.len() < prompt.len() && prompt.starts_with(&c.tokens))
            .max_by_key(|c| c.tokens.len());
        if let Some(checkpoint) = best {
            op.restore(checkpoint.id)?;
            self.tokens.clone_from(&checkpoint.tokens);
            return Ok(self.tokens.len());
        }
        self.tokens.clear();
        op.reset()?;
        Ok(0)
    }

    /// Notes that the op consumed `tokens`.
    pub(super) fn extend(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }

    /// Makes room, so that noting tokens does not allocate.
    pub(super) fn reserve(&mut self, tokens: usize) {
        self.tokens.reserve(tokens);
    }

    /// After a call that failed part-way: keeps what the op says it has consumed.
    pub(super) fn settle(&mut self, position: usize) {
        self.tokens.truncate(position);
    }

    /// True when the state that `tokens` lead to is worth saving, and not saved yet.
    pub(super) fn wants(&self, info: &OpInfo, tokens: &[u32]) -> bool {
        saves(info) && self.checkpoints.iter().all(|c| c.tokens != tokens)
    }

    /// Saves the state as it is. Where that fails and leaves the state alone, nothing is saved.
    pub(super) fn checkpoint(&mut self, op: &mut dyn HostOp) -> Result<()> {
        if self.checkpoints.len() >= KEPT {
            op.drop_snapshot(self.checkpoints.remove(0).id);
        }
        match op.snapshot() {
            Ok(id) => self.checkpoints.push(Checkpoint { tokens: self.tokens.clone(), id }),
            Err(e) if op.position() == self.tokens.len() => tracing::warn!(
                "the state could not be saved, so the next turn consumes the conversation anew: {}",
                e.report()
            ),
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self, op: &mut dyn HostOp) -> Result<()> {
        for checkpoint in self.checkpoints.drain(..) {
            op.drop_snapshot(checkpoint.id);
        }
        self.tokens.clear();
        op.reset()
    }
}
