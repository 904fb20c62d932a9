//! States of earlier conversations, kept by what they stand for.
//!
//! Sessions of a bundle share them. A conversation that was left goes on from its state, whichever session it comes
//! back to, and one that begins as an earlier one did goes on from what both begin with. They are bytes that the
//! op exported, so that their number is bounded by their size; what was used least recently goes first.

use std::cmp::Reverse;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use qhx_base::Error;

use super::sequence::Sequence;
use crate::op::{OpenInfo, Unsupported};

/// Positions below which a state is not worth its copies: they are consumed in less time than others are looked up.
pub(super) const WORTH: usize = 32;

/// Number and size of the states of earlier conversations that a model keeps, see
/// [`ModelOptions::keep_states`](super::ModelOptions::keep_states).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeptStates {
    /// Number of states.
    pub states: usize,
    /// Bytes of all of them.
    pub bytes: usize,
    /// Bytes that they may take at most.
    pub budget: usize,
}

/// A state that was kept.
#[derive(Debug, Clone)]
pub(super) struct State {
    pub sequence: Arc<Sequence>,
    pub bytes: Arc<Vec<u8>>,
}

impl State {
    /// Bytes of the budget that it takes.
    fn size(&self) -> usize {
        self.bytes.len() + self.sequence.tokens.len() * size_of::<u32>()
    }
}

/// The states, within a budget.
#[derive(Debug, Default)]
pub(super) struct PrefixCache {
    budget: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The least recently used first.
    states: Vec<State>,
    bytes: usize,
    /// The op cannot export its state.
    unable: bool,
    /// Positions and size of the shortest state that was larger than the budget.
    too_large: Option<(usize, usize)>,
}

impl PrefixCache {
    /// Keeps up to `budget` bytes.
    pub(super) fn new(budget: usize) -> Self {
        Self { budget, inner: Mutex::default() }
    }

    /// A panic elsewhere leaves no state half-kept.
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False where nothing is ever kept.
    pub(super) fn is_on(&self) -> bool {
        self.budget > 0 && !self.inner().unable
    }

    pub(super) fn counts(&self) -> KeptStates {
        let inner = self.inner();
        KeptStates { states: inner.states.len(), bytes: inner.bytes, budget: self.budget }
    }

    /// True when the state of `sequence` is kept, or one that can be truncated to it.
    pub(super) fn covers(&self, sequence: &Sequence, info: &OpenInfo) -> bool {
        let covers = |state: &State| {
            sequence.begins(&state.sequence)
                && (info.can_truncate || state.sequence.len() == sequence.len())
        };
        self.inner().states.iter().any(covers)
    }

    /// The state of which a prompt can use most positions, if that is more than `beyond`, and how many. One position of
    /// the prompt is left to consume.
    ///
    /// One that can be truncated does not count as used again: what of it was of use is in the state of that prompt,
    /// too, which is kept in its turn. Otherwise conversations would be kept twice, as they were and as they went on.
    pub(super) fn find(
        &self,
        prompt: &Sequence,
        info: &OpenInfo,
        beyond: usize,
    ) -> Option<(State, usize)> {
        let usable = |state: &State| {
            let common = state.sequence.common(prompt);
            let usable = prompt.floor(common.min(prompt.len().saturating_sub(1)));
            // As it is, or cut back.
            let whole = usable == state.sequence.len();
            if whole || info.can_truncate { usable } else { 0 }
        };
        let mut inner = self.inner();
        let counts =
            inner.states.iter().map(|state| (usable(state), Reverse(state.sequence.len())));
        let (index, (usable, _)) = counts.enumerate().max_by_key(|&(_, count)| count)?;
        if usable <= beyond {
            return None;
        }
        if info.can_truncate {
            return Some((inner.states[index].clone(), usable));
        }
        let state = inner.states.remove(index);
        inner.states.push(state.clone());
        Some((state, usable))
    }

    /// Positions that a prompt has in common with any of the states.
    pub(super) fn shared(&self, prompt: &Sequence) -> usize {
        let inner = self.inner();
        let common = inner.states.iter().map(|state| state.sequence.common(prompt));
        common.max().unwrap_or(0)
    }

    /// The states that `sequence` begins with, the shortest first.
    pub(super) fn before(&self, sequence: &Sequence) -> Vec<State> {
        let inner = self.inner();
        let before = |state: &&State| {
            state.sequence.len() < sequence.len() && state.sequence.begins(sequence)
        };
        let mut states: Vec<_> = inner.states.iter().filter(before).cloned().collect();
        states.sort_by_key(|state| state.sequence.len());
        states
    }

    /// False where a state of `positions` is known to exceed the budget, so that exporting it would be for nothing. No
    /// state grows faster than its positions: a cache has a row for each, a ring or a recurrent state no more than
    /// that.
    pub(super) fn has_room(&self, positions: usize) -> bool {
        self.inner().too_large.is_none_or(|(known, bytes)| {
            positions < known
                && bytes as u128 * positions as u128 / known as u128 <= self.budget as u128
        })
    }

    /// Keeps a state, and drops the least recently used ones that it leaves no room for.
    pub(super) fn insert(&self, sequence: &Sequence, bytes: Vec<u8>, info: &OpenInfo) {
        let state = State { sequence: Arc::new(sequence.clone()), bytes: Arc::new(bytes) };
        let size = state.size();
        if size > self.budget {
            let budget = self.budget;
            tracing::debug!("a state of {size} bytes is not kept: all may take {budget}");
            let mut inner = self.inner();
            let known = inner.too_large.map_or(usize::MAX, |(positions, _)| positions);
            if state.sequence.len() < known {
                inner.too_large = Some((state.sequence.len(), size));
            }
            return;
        }
        let mut inner = self.inner();
        // Of those that can be truncated the longer one serves for both.
        let same = |earlier: &State| {
            earlier.sequence.begins(sequence)
                && (info.can_truncate || earlier.sequence.len() == sequence.len())
        };
        inner.states.retain(|earlier| !same(earlier));
        inner.states.push(state);
        let mut bytes: usize = inner.states.iter().map(State::size).sum();
        let mut surplus = 0;
        while bytes > self.budget {
            bytes -= inner.states[surplus].size();
            surplus += 1;
        }
        inner.states.drain(..surplus);
        inner.bytes = bytes;
    }

    /// Drops the states that share positions with `sequence`.
    pub(super) fn drop_shared(&self, sequence: &Sequence) {
        let mut inner = self.inner();
        inner.states.retain(|state| state.sequence.common(sequence) == 0);
        inner.bytes = inner.states.iter().map(State::size).sum();
    }

    /// Drops all states.
    pub(super) fn clear(&self) {
        let mut inner = self.inner();
        inner.states.clear();
        inner.bytes = 0;
    }

    /// Notes why a state could not be exported. An op without the call is not asked again.
    pub(super) fn failed(&self, why: &Error) {
        if !why.is_caused_by::<Unsupported>() {
            tracing::warn!("the state of this conversation is not kept: {}", why.report());
            return;
        }
        let mut inner = self.inner();
        if !inner.unable {
            tracing::warn!("states of earlier conversations cannot be kept: {}", why.report());
        }
        inner.unable = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(can_truncate: bool) -> OpenInfo {
        OpenInfo { can_truncate, can_snapshot: true, ..OpenInfo::default() }
    }

    fn sequence(tokens: &[u32]) -> Sequence {
        Sequence { tokens: tokens.to_vec(), ..Sequence::default() }
    }

    /// Keeps states of 100 bytes each.
    fn kept(budget: usize, info: &OpenInfo, all: &[&[u32]]) -> PrefixCache {
        let kept = PrefixCache::new(budget);
        for tokens in all {
            kept.insert(&sequence(tokens), vec![0; 100 - 4 * tokens.len()], info);
        }
        kept
    }

    fn found(kept: &PrefixCache, info: &OpenInfo, prompt: &[u32]) -> Option<(usize, usize)> {
        let (state, usable) = kept.find(&sequence(prompt), info, 0)?;
        Some((state.sequence.len(), usable))
    }

    #[test]
    fn a_state_is_found_by_what_it_has_in_common_with_the_prompt() {
        let cut = info(true);
        let all = kept(1000, &cut, &[&[1, 2, 3, 4], &[1, 2, 9], &[5]]);
        assert_eq!(found(&all, &cut, &[1, 2, 3, 7]), Some((4, 3)), "cut back");
        assert_eq!(found(&all, &cut, &[1, 2, 9]), Some((3, 2)), "one position is left");
        assert_eq!(found(&all, &cut, &[8]), None);
        assert!(all.find(&sequence(&[1, 2, 3, 7]), &cut, 3).is_none(), "no more than is there");
        let whole = info(false);
        let all = kept(1000, &whole, &[&[1, 2, 3, 4], &[1, 2]]);
        assert_eq!(found(&all, &whole, &[1, 2, 3, 7]), Some((2, 2)), "only as it is");
        assert_eq!(all.shared(&sequence(&[1, 2, 3, 7])), 3);
    }

    #[test]
    fn what_was_used_least_recently_leaves_room() {
        let whole = info(false);
        let all = kept(300, &whole, &[&[1], &[2], &[3]]);
        assert!(found(&all, &whole, &[1, 0]).is_some());
        all.insert(&sequence(&[4]), vec![0; 96], &whole);
        let there = [1, 2, 3, 4].map(|token| all.covers(&sequence(&[token]), &whole));
        assert_eq!(there, [true, false, true, true]);
        assert_eq!(all.counts(), KeptStates { states: 3, bytes: 300, budget: 300 });
        all.insert(&sequence(&[5]), vec![0; 297], &whole);
        assert!(!all.covers(&sequence(&[5]), &whole), "larger than all may be");
        all.drop_shared(&sequence(&[3, 1]));
        assert_eq!(all.counts().states, 2);
    }

    #[test]
    fn a_state_above_the_budget_is_not_asked_for_again() {
        let kept = PrefixCache::new(1000);
        assert!(kept.has_room(1 << 40));
        kept.insert(&sequence(&[1; 100]), vec![0; 1600], &info(true));
        // 20 bytes a position, or fewer where some are there at any length.
        assert_eq!([100, 51, 50, 20].map(|n| kept.has_room(n)), [false, false, true, true]);
        kept.insert(&sequence(&[1; 200]), vec![0; 8000], &info(true));
        assert!(kept.has_room(50), "the shorter one says more");
        kept.insert(&sequence(&[1; 40]), vec![0; 900], &info(true));
        assert_eq!([40, 38, 37].map(|n| kept.has_room(n)), [false, false, true]);
    }

    #[test]
    fn a_conversation_that_went_on_leaves_its_earlier_state_first() {
        let cut = info(true);
        let all = kept(400, &cut, &[&[1, 2, 3], &[5, 6, 7], &[11, 12, 13]]);
        // Each goes on behind another answer than the one that its state has.
        for tokens in [&[1, 2, 9, 9], &[5, 6, 9, 9], &[11, 12, 9, 9]] {
            assert_eq!(found(&all, &cut, tokens).map(|(_, usable)| usable), Some(2));
            all.insert(&sequence(tokens), vec![0; 84], &cut);
        }
        assert!(!all.covers(&sequence(&[1, 2, 3]), &cut));
        assert!(all.covers(&sequence(&[1, 2, 9, 9]), &cut));
    }

    #[test]
    fn a_longer_state_replaces_those_it_can_be_truncated_to() {
        let states = |info: &OpenInfo| kept(1000, info, &[&[1], &[1, 2], &[1, 2]]).counts().states;
        assert_eq!((states(&info(true)), states(&info(false))), (1, 2));
    }
}
