//! Contents of the state, and how much of it a prompt can use.
//!
//! A conversation's next prompt usually begins with everything consumed so far. Then only the rest
//! is consumed. Where it departs from what was consumed, the op's state is truncated if it can be,
//! or the latest snapshot that the prompt begins with is restored, or everything is consumed again.
//! An image, audio clip or video is the same when its content is, whatever stands at its positions.
//! A snapshot that cannot be taken costs the next turn that, and this one nothing.
//!
//! If states of earlier conversations are kept ([`PrefixCache`]), they take the place of snapshots. The state is then
//! also kept before another conversation takes its place, and where a prompt departs from another one.

use std::ops::Range;
use std::sync::Arc;

use qhx_base::Result;

use super::prefix_cache::{PrefixCache, State, WORTH};
use super::sequence::Sequence;
use crate::op::{HostOp, OpenInfo, SnapshotId};

/// Maximum number of snapshots: the end of the last turn, and the one before for a repeated question.
pub(super) const MAX_SNAPSHOTS: usize = 2;

#[derive(Debug)]
struct Checkpoint {
    sequence: Sequence,
    id: SnapshotId,
}

/// Way from a state to one that a prompt begins with.
#[derive(Debug)]
enum Way {
    /// It is one, of this number of positions.
    Stays(usize),
    /// By dropping all but the first positions.
    Truncates(usize),
    /// By a snapshot, which stands for these positions.
    Restores(SnapshotId, Sequence),
    /// There is none but the empty one.
    Empty,
}

impl Way {
    /// Positions that need not be consumed.
    fn usable(&self) -> usize {
        match self {
            Self::Stays(usable) | Self::Truncates(usable) => *usable,
            Self::Restores(_, sequence) => sequence.len(),
            Self::Empty => 0,
        }
    }
}

/// The positions that the op's state stands for, with snapshots of earlier points, and the states of other
/// conversations.
#[derive(Debug)]
pub(super) struct Prefix {
    pub sequence: Sequence,
    checkpoints: Vec<Checkpoint>,
    pub kept: Arc<PrefixCache>,
}

/// True when states of such an op are saved for the next turn. One that can be truncated needs none.
pub(super) fn saves(info: &OpenInfo) -> bool {
    info.can_snapshot && !info.can_truncate
}

impl Prefix {
    pub(super) fn new(kept: Arc<PrefixCache>) -> Self {
        Self { sequence: Sequence::default(), checkpoints: Vec::new(), kept }
    }

    /// Makes the op's state one that `prompt` begins with and leaves at least one position to
    /// consume. Returns the number of positions that the state stands for.
    pub(super) fn prepare(&mut self, op: &mut dyn HostOp, prompt: &Sequence) -> Result<usize> {
        self.settle(op.position());
        let way = self.way(op, prompt);
        if self.kept.is_on() {
            // A copy of all its rows has to save more than a few positions.
            let found = self.kept.find(prompt, op.info(), way.usable() + WORTH - 1);
            if self.sequence.len() - self.sequence.common(prompt) >= WORTH {
                self.keep(op)?;
            }
            if let Some((state, usable)) = found
                && self.take(op, &state, usable)?
            {
                return Ok(usable);
            }
        }
        match way {
            Way::Stays(_) => {}
            Way::Truncates(usable) => {
                op.truncate(usable)?;
                self.sequence.truncate(usable);
            }
            Way::Restores(id, sequence) => {
                op.restore(id)?;
                self.sequence = sequence;
            }
            Way::Empty => {
                self.sequence.clear();
                op.reset()?;
            }
        }
        Ok(self.sequence.len())
    }

    /// Way from the state to one that `prompt` begins with.
    fn way(&self, op: &dyn HostOp, prompt: &Sequence) -> Way {
        let common = self.sequence.common(prompt);
        let usable = prompt.floor(common.min(prompt.len().saturating_sub(1)));
        if usable == self.sequence.len() && usable == op.position() {
            return Way::Stays(usable);
        }
        if op.info().can_truncate && usable > 0 {
            return Way::Truncates(usable);
        }
        let fits = |c: &&Checkpoint| c.sequence.len() < prompt.len() && c.sequence.begins(prompt);
        let best = self.checkpoints.iter().filter(fits).max_by_key(|c| c.sequence.len());
        best.map_or(Way::Empty, |checkpoint| {
            Way::Restores(checkpoint.id, checkpoint.sequence.clone())
        })
    }

    /// Keeps the state for other conversations. Where it cannot be exported and stays as it is, nothing is kept; nor
    /// where it was imported: nobody knows whether such bytes are of the tokens that they name.
    pub(super) fn keep(&self, op: &mut dyn HostOp) -> Result<()> {
        let (kept, positions) = (&self.kept, self.sequence.len());
        if positions < WORTH
            || self.sequence.imported
            || !kept.has_room(positions)
            || kept.covers(&self.sequence, op.info())
        {
            return Ok(());
        }
        match op.export_state() {
            Ok(bytes) => kept.insert(&self.sequence, bytes, op.info()),
            Err(e) if op.position() == positions => kept.failed(&e),
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Makes the state a kept one of which `usable` positions are used. False where the op refuses it, and its state is
    /// as before.
    fn take(&mut self, op: &mut dyn HostOp, state: &State, usable: usize) -> Result<bool> {
        if let Err(e) = op.import_state(state.sequence.len(), &state.bytes) {
            tracing::warn!("a kept state is of no use: {}", e.report());
            self.kept.drop_shared(&state.sequence);
            if op.position() == self.sequence.len() {
                return Ok(false);
            }
            return Err(e);
        }
        self.sequence.clone_from(&state.sequence);
        if usable < self.sequence.len() {
            op.truncate(usable)?;
            self.sequence.truncate(usable);
        }
        Ok(true)
    }

    /// Position where a prompt departs from what another conversation consumed, if a state there is worth keeping: the
    /// next one that begins so goes on from there. `common` is what it shares with the state that was left for it.
    fn departure(&self, info: &OpenInfo, prompt: &Sequence, common: usize) -> Option<usize> {
        let departs = saves(info) && self.kept.is_on();
        let departure = || prompt.floor(common.max(self.kept.shared(prompt)));
        departs.then(departure).filter(|&at| at >= WORTH)
    }

    /// Ends of the parts in which a prompt is consumed, of which the first `done` positions are consumed, and `common`
    /// were before: the state is saved at each but the last. `checkpoint` is where that is of use to the next turn.
    ///
    /// Cut only where the state is then saved: every part costs an execution of the head.
    pub(super) fn parts(
        &self,
        info: &OpenInfo,
        prompt: &Sequence,
        checkpoint: Option<usize>,
        (done, common): (usize, usize),
    ) -> Vec<usize> {
        let last = prompt.len();
        let checkpoint = checkpoint.filter(|&end| end > done && self.wants(info, prompt, end));
        let departure = self
            .departure(info, prompt, common)
            .filter(|&at| at >= done + WORTH && at < last && checkpoint.is_none_or(|end| at < end));
        departure.into_iter().chain(checkpoint).chain([last]).collect()
    }

    /// Notes that the op consumed the positions `range` of a prompt.
    pub(super) fn extend(&mut self, prompt: &Sequence, range: Range<usize>) {
        self.sequence.extend(prompt, range);
    }

    /// Notes that the op consumed a token.
    pub(super) fn push(&mut self, token: u32) {
        self.sequence.tokens.push(token);
    }

    /// Makes room, so that noting tokens does not allocate.
    pub(super) fn reserve(&mut self, tokens: usize) {
        self.sequence.tokens.reserve(tokens);
    }

    /// After a call that failed part-way: keeps what the op reports it has consumed.
    pub(super) fn settle(&mut self, position: usize) {
        self.sequence.truncate(position);
    }

    /// True when the state that the first `end` positions of a prompt lead to is worth saving, and
    /// not saved yet.
    fn wants(&self, info: &OpenInfo, prompt: &Sequence, end: usize) -> bool {
        let saved = |c: &Checkpoint| c.sequence.len() == end && c.sequence.begins(prompt);
        saves(info) && !self.checkpoints.iter().any(saved)
    }

    /// Saves the state as it is. Where that fails and leaves the state alone, nothing is saved.
    pub(super) fn checkpoint(&mut self, op: &mut dyn HostOp) -> Result<()> {
        if self.kept.is_on() {
            self.keep(op)?;
            if self.kept.covers(&self.sequence, op.info()) {
                return Ok(());
            }
        }
        if self.checkpoints.len() >= MAX_SNAPSHOTS {
            op.drop_snapshot(self.checkpoints.remove(0).id);
        }
        match op.snapshot() {
            Ok(id) => self.checkpoints.push(Checkpoint { sequence: self.sequence.clone(), id }),
            Err(e) if op.position() == self.sequence.len() => tracing::warn!(
                "the state could not be saved, so the next turn consumes the conversation again: {}",
                e.report()
            ),
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// The positions, and what stands there.
    pub(super) fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Snapshots that all positions of the state begin with, and how many they stand for, the shortest first.
    pub(super) fn snapshots(&self) -> Vec<(usize, SnapshotId)> {
        let mut of_state: Vec<_> = self
            .checkpoints
            .iter()
            .filter(|saved| saved.sequence.begins(&self.sequence))
            .map(|saved| (saved.sequence.len(), saved.id))
            .collect();
        of_state.sort_by_key(|(position, _)| *position);
        of_state
    }

    /// The latest kept states that the state begins with, the shortest first, where they stand in for snapshots.
    pub(super) fn kept_before(&self, info: &OpenInfo) -> Vec<State> {
        let mut before = if saves(info) { self.kept.before(&self.sequence) } else { Vec::new() };
        before.drain(..before.len().saturating_sub(MAX_SNAPSHOTS));
        before
    }

    /// Notes that the op's state was imported, and stands for `sequence`.
    pub(super) fn imported(&mut self, sequence: Sequence) {
        self.sequence = Sequence { imported: true, ..sequence };
    }

    /// Forgets everything, with an op that is closed.
    pub(super) fn forget(&mut self) {
        self.checkpoints.clear();
        self.sequence.clear();
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self, op: &mut dyn HostOp) -> Result<()> {
        for checkpoint in self.checkpoints.drain(..) {
            op.drop_snapshot(checkpoint.id);
        }
        self.sequence.clear();
        op.reset()
    }
}
