//! Prompts in which images or audio stand as rows.

use super::{Decoder, SoftRows};
use qhx_op::{Host, Result, Segment, View};

/// Encoded image or clip: the rows that stand for it in the prompt.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SoftPart {
    /// The token that stands at each of its positions.
    pub token: u32,
    /// Its positions.
    pub count: usize,
    /// A row for each, as wide as the decoder's.
    pub rows: Vec<f32>,
    /// Its positions see each other, those behind them too.
    pub together: bool,
}

/// A prompt of tokens, and rows that stand instead of some of them.
#[derive(Debug, Default)]
pub struct SoftPrompt {
    tokens: Vec<u32>,
    /// Index of its first token, and the part.
    parts: Vec<(usize, SoftPart)>,
    /// All tokens see each other.
    whole: bool,
}

impl SoftPrompt {
    /// The prompt of these segments; `encode` is asked for all that are not tokens.
    ///
    /// # Errors
    /// Errors of `encode`.
    pub fn of<'a>(
        segments: &[Segment<'a>],
        mut encode: impl FnMut(&Segment<'a>) -> Result<SoftPart>,
    ) -> Result<Self> {
        let mut prompt = Self::default();
        for segment in segments {
            if let Segment::Tokens(tokens) = segment {
                prompt.tokens.extend_from_slice(tokens);
                continue;
            }
            let part = encode(segment)?;
            let first = prompt.tokens.len();
            prompt.tokens.resize(first + part.count, part.token);
            prompt.parts.push((first, part));
        }
        Ok(prompt)
    }

    /// The same where all of its tokens see each other if `whole`, as those of a prefix do.
    #[must_use]
    pub fn seen_whole(self, whole: bool) -> Self {
        Self { whole, ..self }
    }

    /// Has `decoder` consume the prompt; returns the logits of the last token.
    ///
    /// # Errors
    /// Errors of [`Decoder::prefill_soft`].
    pub fn prefill(&self, host: &mut Host, decoder: &mut Decoder) -> Result<View> {
        let all = SoftRows { first: 0, values: &[], together: self.tokens.len(), prefix: true };
        let parts = self.parts.iter().map(|(first, part)| SoftRows {
            first: *first,
            values: &part.rows,
            together: if part.together && !self.whole { part.count } else { 0 },
            prefix: false,
        });
        let soft: Vec<_> = self.whole.then_some(all).into_iter().chain(parts).collect();
        decoder.prefill_soft(host, &self.tokens, &soft)
    }
}
