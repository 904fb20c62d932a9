//! Which tokens may be chosen at all.

use std::ops::Range;

/// Token ids that may be chosen: all of a vocabulary, or those that mean something in it.
///
/// A vocabulary is often padded to a round number. Its last logits then belong to no token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedTokens {
    /// Runs of consecutive ids, ascending; none is empty, and none touches the next.
    runs: Vec<Range<usize>>,
}

impl AllowedTokens {
    /// Every id below `count`.
    pub fn below(count: usize) -> Self {
        Self { runs: if count == 0 { Vec::new() } else { vec![Range { start: 0, end: count }] } }
    }

    /// The ids below `count` for which `allowed` holds.
    pub fn select(count: usize, mut allowed: impl FnMut(u32) -> bool) -> Self {
        let mut tokens = Self { runs: Vec::new() };
        // Token ids are u32: there are none beyond.
        for id in 0..u32::try_from(count).unwrap_or(u32::MAX) {
            if allowed(id) {
                tokens.append(id as usize);
            }
        }
        tokens
    }

    /// Becomes those of `among` whose bits are set: token 33 is bit 1 of the second number. Keeps its memory.
    pub fn set_masked(&mut self, among: &Self, mask: &[u32]) {
        self.runs.clear();
        for run in &among.runs {
            let mut at = run.start;
            while at < run.end {
                let Some(&word) = mask.get(at / 32) else { break };
                let bits = word >> (at % 32);
                let end = run.end.min((at / 32 + 1) * 32);
                if bits == 0 {
                    at = end;
                    continue;
                }
                let start = at + bits.trailing_zeros() as usize;
                let ones = (bits >> bits.trailing_zeros()).trailing_ones() as usize;
                if start >= end {
                    break;
                }
                at = end.min(start + ones);
                match self.runs.last_mut() {
                    Some(last) if last.end == start => last.end = at,
                    _ => self.runs.push(start..at),
                }
            }
        }
    }

    fn append(&mut self, id: usize) {
        match self.runs.last_mut() {
            Some(run) if run.end == id => run.end += 1,
            _ => self.runs.push(id..id + 1),
        }
    }

    /// True when `id` may be chosen.
    pub fn contains(&self, id: u32) -> bool {
        let id = id as usize;
        let run = self.runs.partition_point(|run| run.end <= id);
        self.runs.get(run).is_some_and(|run| run.start <= id)
    }

    /// The lowest number that all ids are below; 0 when there are none.
    pub fn end(&self) -> usize {
        self.runs.last().map_or(0, |run| run.end)
    }

    /// Number of ids.
    pub fn len(&self) -> usize {
        self.runs.iter().map(Range::len).sum()
    }

    /// True when no token may be chosen.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Runs of ids that may be chosen, ascending.
    pub(super) fn runs(&self) -> &[Range<usize>] {
        &self.runs
    }

    /// Runs of ids below [`AllowedTokens::end`] that may not be chosen.
    pub(super) fn gaps(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let starts = [0].into_iter().chain(self.runs.iter().map(|run| run.end));
        let gaps = starts.zip(&self.runs).map(|(start, run)| start..run.start);
        gaps.filter(|gap| !gap.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masked_tokens_are_those_with_bits() {
        let masks: [&[u32]; 6] =
            [&[], &[0, !0, 1], &[!0, !0, !0, !0], &[1 << 31, 1, 0, 1 << 31], &[0xf0f0; 4], &[0; 4]];
        for among in [AllowedTokens::below(100), AllowedTokens::select(100, |id| id % 7 != 3)] {
            for mask in masks {
                let mut masked = AllowedTokens::below(3);
                masked.set_masked(&among, mask);
                let bit = |id: u32| {
                    mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
                };
                let expected = AllowedTokens::select(100, |id| among.contains(id) && bit(id));
                assert_eq!(masked, expected, "{mask:x?}");
            }
        }
    }

    #[test]
    fn runs_and_gaps_are_complements() {
        let odd_or_high = |id: u32| id > 5 && id != 9 || id == 2;
        let tokens = AllowedTokens::select(12, odd_or_high);
        assert_eq!(tokens.runs(), [2..3, 6..9, 10..12]);
        assert_eq!(tokens.gaps().collect::<Vec<_>>(), [0..2, 3..6, 9..10]);
        assert!((0..20).all(|id| tokens.contains(id) == (id < 12 && odd_or_high(id))));
        assert_eq!((tokens.end(), tokens.len()), (12, 6));
        assert_eq!(AllowedTokens::select(4, |_| true), AllowedTokens::below(4));
        assert!(
            AllowedTokens::below(0).is_empty() && AllowedTokens::select(3, |_| false).is_empty()
        );
        assert_eq!(AllowedTokens::below(0).end(), 0);
    }
}
