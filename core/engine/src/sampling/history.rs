//! Which tokens the penalties apply to, and the penalties.
//!
//! Arithmetic: `RepetitionPenaltyLogitsProcessor` of Hugging Face `transformers` over prompt and
//! answer, then frequency and presence penalty over the answer as in the OpenAI API reference,
//! `logit −= count · frequency + (count > 0) · presence`.

use std::collections::VecDeque;

use super::SamplingParams;

/// Counts of the tokens that penalties see.
#[derive(Debug)]
pub(super) struct History {
    /// Occurrences in the prompt and in the answer, by token.
    counts: Vec<[u32; 2]>,
    /// Tokens with a count, in no order.
    present: Vec<u32>,
    /// Index in `present` of a token with a count.
    place: Vec<u32>,
    /// The last tokens with the index of their count, when there is a window.
    recent: VecDeque<(u32, bool)>,
    window: usize,
}

impl History {
    /// Memory for `vocab` tokens; none at all when no penalty is on.
    pub(super) fn new(params: &SamplingParams, vocab: usize) -> Self {
        let vocab = if params.has_penalties() { vocab } else { 0 };
        let window = params.penalty_window;
        let recent = if vocab == 0 { 0 } else { window.min(1 << 20) };
        Self {
            counts: vec![[0; 2]; vocab],
            present: Vec::with_capacity(vocab),
            place: vec![0; vocab],
            recent: VecDeque::with_capacity(recent),
            window,
        }
    }

    /// Adds a token at the end. A token outside the vocabulary has no logit to change.
    pub(super) fn push(&mut self, token: u32, answer: bool) {
        if self.counts.is_empty() {
            return;
        }
        if self.window > 0 {
            if self.recent.len() == self.window
                && let Some((old, answer)) = self.recent.pop_front()
            {
                self.forget(old, answer);
            }
            self.recent.push_back((token, answer));
        }
        let Some(counts) = self.counts.get_mut(token as usize) else { return };
        if *counts == [0, 0] {
            self.place[token as usize] = self.present.len() as u32;
            self.present.push(token);
        }
        counts[usize::from(answer)] = counts[usize::from(answer)].saturating_add(1);
    }

    fn forget(&mut self, token: u32, answer: bool) {
        let Some(counts) = self.counts.get_mut(token as usize) else { return };
        counts[usize::from(answer)] -= 1;
        if *counts == [0, 0] {
            let place = self.place[token as usize] as usize;
            self.present.swap_remove(place);
            if let Some(&moved) = self.present.get(place) {
                self.place[moved as usize] = place as u32;
            }
        }
    }

    pub(super) fn clear(&mut self) {
        for &token in &self.present {
            self.counts[token as usize] = [0; 2];
        }
        self.present.clear();
        self.recent.clear();
    }

    /// Applies the penalties to the logits.
    pub(super) fn apply(&self, params: &SamplingParams, scores: &mut [f32]) {
        let repetition = params.repetition_penalty;
        for &token in &self.present {
            let [_, answer] = self.counts[token as usize];
            let Some(score) = scores.get_mut(token as usize) else { continue };
            *score = if *score < 0.0 { *score * repetition } else { *score / repetition };
            if answer > 0 {
                *score -= answer as f32 * params.frequency_penalty;
                *score -= params.presence_penalty;
            }
        }
    }
}
