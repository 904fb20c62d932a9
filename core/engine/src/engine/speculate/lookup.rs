//! Draft tokens without a model: what followed the last time.

use qhx_base::Result;

use super::{Drafter, Start};
use crate::sampling::Rng;

/// Tokens that must be equal before a position counts as the same.
const MIN_SUFFIX: usize = 2;
/// Equal tokens after which a position is the same for certain.
const MAX_SUFFIX: usize = 16;
/// Positions that are compared for a draft, the latest first.
const MAX_CANDIDATES: usize = 32;
const NONE: u32 = u32::MAX;

/// Prompt lookup (Saxena, 2023): where the longest suffix of prompt and answer occurred before, what followed there is
/// the draft.
///
/// Positions with the same last two tokens are linked, as those of LZ77 compressors are (RFC 1951, section 4), so that
/// a token costs one entry and a draft at most 32 comparisons of 16 tokens, however long the text is. Of positions with
/// equally long suffixes the latest counts. A draft may run into itself: text that repeats with a short period
/// goes on so.
#[derive(Debug, Default)]
pub struct PromptLookup {
    text: Vec<u32>,
    /// By a hash of two tokens: where they stood last, as the index of the second.
    latest: Vec<u32>,
    /// For each token: where the same two tokens may have stood before.
    earlier: Vec<u32>,
}

impl PromptLookup {
    /// An index of nothing.
    pub fn new() -> Self {
        Self::default()
    }

    fn slot(&self, first: u32, second: u32) -> usize {
        // Fibonacci hashing of the pair (Knuth, vol. 3, section 6.4).
        let pair = u64::from(first) << 32 | u64::from(second);
        let mixed = pair.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as usize & (self.latest.len() - 1)
    }

    /// Equal tokens before and at the two positions, as far as they count.
    fn common(&self, a: usize, b: usize) -> usize {
        let (a, b) = (self.text[..=a].iter().rev(), self.text[..=b].iter().rev());
        a.zip(b).take(MAX_SUFFIX).take_while(|(a, b)| a == b).count()
    }

    /// Position where the longest suffix ended before.
    fn find(&self) -> Option<usize> {
        let last = self.text.len().checked_sub(1)?;
        let (mut position, mut best) = (self.earlier[last], (MIN_SUFFIX - 1, None));
        for _ in 0..MAX_CANDIDATES {
            if position == NONE {
                break;
            }
            let end = position as usize;
            let common = self.common(end, last);
            if common > best.0 {
                best = (common, Some(end));
            }
            if common == MAX_SUFFIX {
                break;
            }
            position = self.earlier[end];
        }
        best.1
    }
}

impl Drafter for PromptLookup {
    fn name(&self) -> &str {
        "prompt lookup"
    }

    fn begin(&mut self, start: &Start<'_>) -> Result<()> {
        let known = start.predicted.len().saturating_add(start.prompt.len());
        let tokens = known.saturating_add(start.max.min(1 << 20));
        self.text.clear();
        self.earlier.clear();
        self.text.reserve(tokens);
        self.earlier.reserve(tokens);
        let slots = tokens.next_power_of_two().clamp(1 << 8, 1 << 20);
        self.latest.clear();
        self.latest.resize(slots, NONE);
        start.predicted.iter().chain(start.prompt).for_each(|&token| self.push(token));
        Ok(())
    }

    fn push(&mut self, token: u32) {
        let before = self.text.last().copied();
        // Positions are u32: no context is longer.
        let position = self.text.len() as u32;
        self.text.push(token);
        let earlier = before.filter(|_| !self.latest.is_empty()).map_or(NONE, |before| {
            let slot = self.slot(before, token);
            std::mem::replace(&mut self.latest[slot], position)
        });
        self.earlier.push(earlier);
    }

    fn draft(&mut self, max_drafts: usize, _rng: &Rng, drafts: &mut Vec<u32>) -> Result<()> {
        let Some(end) = self.find() else { return Ok(()) };
        let first = drafts.len();
        for next in end + 1..end + 1 + max_drafts {
            let token = self.text.get(next).copied();
            // Behind the text's end stand the draft tokens themselves.
            let token = token.or_else(|| drafts.get(first + next - self.text.len()).copied());
            drafts.extend(token);
        }
        Ok(())
    }

    fn is_free(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::{AllowedTokens, SamplingParams};

    fn begun(prompt: &[u32], max_drafts: usize) -> PromptLookup {
        predicted(&[], prompt, max_drafts)
    }

    fn predicted(predicted: &[u32], prompt: &[u32], max_drafts: usize) -> PromptLookup {
        let mut lookup = PromptLookup::new();
        let (sampling, allowed) = (SamplingParams::default(), AllowedTokens::below(1000).into());
        let (sampling, allowed, cancel) = (&sampling, &allowed, &qhx_base::CancelToken::new());
        let max = max_drafts;
        let start = Start { prompt, predicted, max, sampling, allowed, media: false, cancel };
        lookup.begin(&start).unwrap();
        lookup
    }

    fn draft(lookup: &mut PromptLookup, max_drafts: usize) -> Vec<u32> {
        let mut drafts = vec![99];
        lookup.draft(max_drafts, &Rng::new(0), &mut drafts).unwrap();
        drafts.split_off(1)
    }

    #[test]
    fn the_draft_is_what_followed_the_longest_suffix() {
        // "2 3" stood twice: the longer suffix "1 2 3" wins over the later position.
        let mut lookup = begun(&[1, 2, 3, 4, 5, 9, 2, 3, 6, 7, 1, 2, 3], 8);
        assert_eq!(draft(&mut lookup, 2), [4, 5]);
        // Of equally long ones the later.
        let mut lookup = begun(&[8, 2, 3, 4, 9, 2, 3, 6, 7, 2, 3], 8);
        assert_eq!(draft(&mut lookup, 3), [6, 7, 2]);
        lookup.push(4);
        assert_eq!(draft(&mut lookup, 1), [9]);
        lookup.push(100);
        assert_eq!(draft(&mut lookup, 4), [0u32; 0], "this never stood before");
    }

    #[test]
    fn a_predicted_text_is_drafted_from() {
        let mut lookup = predicted(&[1, 2, 3, 4, 5], &[7, 8], 3);
        lookup.push(1);
        lookup.push(2);
        assert_eq!(draft(&mut lookup, 3), [3, 4, 5]);
    }

    #[test]
    fn what_repeats_goes_on_beyond_its_end() {
        let mut lookup = begun(&[5, 1, 2, 3, 1, 2, 3, 1], 8);
        assert_eq!(draft(&mut lookup, 7), [2, 3, 1, 2, 3, 1, 2]);
        assert_eq!(draft(&mut begun(&[4, 4, 4], 8), 3), [4, 4, 4]);
        for short in [&[][..], &[4], &[4, 4]] {
            assert_eq!(draft(&mut begun(short, 8), 3), [0u32; 0]);
        }
    }

    #[test]
    fn a_long_text_of_one_token_costs_no_more_and_memory_stays() {
        let mut lookup = begun(&[7; 10], 50_000);
        let room = (lookup.text.capacity(), lookup.earlier.capacity(), lookup.latest.capacity());
        for _ in 0..50_000 {
            lookup.push(7);
            assert_eq!(draft(&mut lookup, 1), [7]);
        }
        let after = (lookup.text.capacity(), lookup.earlier.capacity(), lookup.latest.capacity());
        assert_eq!(room, after);
    }
}
