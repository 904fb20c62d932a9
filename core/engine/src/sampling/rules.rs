//! Tokens that an op forbids: always, at the beginning of an answer, or by the order of times.

use qhx_exec::Logits;
use qhx_types::{LogitRules, TimeRule};

use super::AllowedTokens;

/// The rules of an op, for one answer.
#[derive(Debug)]
pub struct Rules {
    times: Option<TimeRule>,
    /// Tokens that the rules allow wherever the answer is.
    always: AllowedTokens,
    /// The same at its beginning.
    first: AllowedTokens,
    /// Tokens that may be chosen next.
    next: AllowedTokens,
    mask: Vec<u32>,
}

impl Rules {
    /// The rules of an answer behind `prompt`, for choices among `among`. `None` where there are none.
    pub fn new(rules: &LogitRules, among: &AllowedTokens, prompt: &[u32]) -> Option<Self> {
        let LogitRules { suppressed, suppressed_first, times } = rules;
        if suppressed.is_empty() && suppressed_first.is_empty() && times.is_none() {
            return None;
        }
        let asked = times.filter(|times| !prompt.contains(&times.none));
        let is_none = |id: u32| asked.is_some_and(|times| id == times.none);
        let allowed = |id: u32| among.contains(id) && !suppressed.contains(&id) && !is_none(id);
        let always = AllowedTokens::select(among.end(), allowed);
        let first = AllowedTokens::select(among.end(), |id| {
            always.contains(id) && !suppressed_first.contains(&id)
        });
        Some(Self { times: asked, always, first, next: AllowedTokens::below(0), mask: Vec::new() })
    }

    /// Tokens that may be chosen from these logits after the tokens `answer`.
    pub fn allowed(&mut self, answer: &[u32], logits: Logits<'_>) -> &AllowedTokens {
        let among = if answer.is_empty() { &self.first } else { &self.always };
        let Some(rule) = self.times else { return among };
        let (text, times) = ranges(rule, answer, among.end() as u32);
        set(&mut self.mask, among.end(), [&text, &times]);
        self.next.set_masked(among, &self.mask);
        if times_win(rule, logits, &self.next) {
            set(&mut self.mask, among.end(), [&(0..0), &times]);
            self.next.set_masked(among, &self.mask);
        }
        &self.next
    }
}

type Ids = std::ops::Range<u32>;

/// Which tokens of text and which times may follow `answer`.
fn ranges(rule: TimeRule, answer: &[u32], count: u32) -> (Ids, Ids) {
    let is_time = |token: &&u32| **token >= rule.first;
    let Some(last) = answer.last() else {
        let max =
            rule.max_initial.map_or(count, |max| rule.first.saturating_add(max).saturating_add(1));
        return (0..0, rule.first..max.min(count));
    };
    let after_time = is_time(&last);
    // A first token counts as the second one of a pair.
    let pair = answer.len().checked_sub(2).is_none_or(|at| is_time(&&answer[at]));
    let latest = answer.iter().rev().find(is_time);
    // The end of one part may be the beginning of the next; otherwise time goes on.
    let from = latest.map_or(rule.first, |latest| latest + u32::from(!after_time || pair));
    match (after_time, pair) {
        (true, true) => (0..rule.first, 0..0),
        (true, false) => (rule.end..rule.first, from..count),
        (false, _) => (0..rule.first, from..count),
    }
}

/// True if all times together are likelier than the likeliest token of text.
fn times_win(rule: TimeRule, logits: Logits<'_>, allowed: &AllowedTokens) -> bool {
    let value = |id: usize| match logits {
        Logits::F16(values) => values[id].to_f32(),
        Logits::F32(values) => values[id],
    };
    let first = rule.first as usize;
    let (mut text, mut latest) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    let ids = || allowed.runs().iter().flat_map(Clone::clone).filter(|&id| id < logits.len());
    for id in ids() {
        let most = if id < first { &mut text } else { &mut latest };
        *most = most.max(value(id));
    }
    let sum: f32 = ids().filter(|&id| id >= first).map(|id| (value(id) - latest).exp()).sum();
    sum > 0.0 && latest + sum.ln() > text
}

/// Sets the bits of these ids, and no others.
fn set(mask: &mut Vec<u32>, count: usize, ranges: [&Ids; 2]) {
    mask.clear();
    mask.resize(count.div_ceil(32), 0);
    for id in ranges.into_iter().cloned().flatten().map(|id| id as usize).filter(|&id| id < count) {
        mask[id / 32] |= 1 << (id % 32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text 0…3, the end 4, a mark 5, no times 6, times 7…12.
    const TIMES: TimeRule = TimeRule { first: 7, none: 6, end: 4, max_initial: Some(2) };

    fn next(rules: &LogitRules, prompt: &[u32], answer: &[u32], logits: &[f32]) -> Vec<u32> {
        let mut rules = Rules::new(rules, &AllowedTokens::below(13), prompt).unwrap();
        let allowed = rules.allowed(answer, Logits::F32(logits));
        (0..13).filter(|&id| allowed.contains(id)).collect()
    }

    #[test]
    fn suppressed_tokens_are_never_chosen() {
        let rules = LogitRules { suppressed: vec![2], suppressed_first: vec![0, 4], times: None };
        let flat = [0.0; 13];
        assert!(!next(&rules, &[], &[], &flat).iter().any(|id| [0, 2, 4].contains(id)));
        assert_eq!(next(&rules, &[], &[1], &flat).len(), 12);
        let none = Rules::new(&LogitRules::default(), &AllowedTokens::below(3), &[]);
        assert!(none.is_none());
    }

    /// Decisions of `WhisperTimeStampLogitsProcessor` for these answers.
    #[test]
    fn times_stand_in_pairs_and_do_not_go_back() {
        let rules = LogitRules { times: Some(TIMES), ..LogitRules::default() };
        // Text is likelier than all times.
        let mut text = [0.0; 13];
        text[..7].fill(9.0);
        let after = |answer: &[u32]| next(&rules, &[5], answer, &text);
        assert_eq!(after(&[]), [7, 8, 9], "at most two steps behind the first");
        assert_eq!(after(&[8]), [0, 1, 2, 3, 4, 5], "text behind the first time");
        assert_eq!(after(&[8, 1]), [0, 1, 2, 3, 4, 5, 9, 10, 11, 12], "a later time");
        assert_eq!(after(&[8, 1, 10]), [4, 5, 10, 11, 12], "the end, or the next beginning");
        assert_eq!(after(&[8, 1, 10, 10]), [0, 1, 2, 3, 4, 5], "text behind a pair");
        assert_eq!(after(&[8, 1, 12, 12, 1]), [0, 1, 2, 3, 4, 5], "no time is left");
        // Six equal times have ln 6 more than one of them.
        let mut close = [0.0; 13];
        close[..7].fill(1.3);
        assert_eq!(next(&rules, &[5], &[7, 1], &close), [8, 9, 10, 11, 12]);
        close[1] = 1.7;
        assert_eq!(next(&rules, &[5], &[7, 1], &close).len(), 11);
        // The prompt asks for no times: as `transformers` has it, all may be chosen then.
        assert_eq!(next(&rules, &[5, 6], &[], &close).len(), 13);
    }
}
