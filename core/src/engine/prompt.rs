//! From a prompt to tokens.

use super::types::Prompt;
use crate::text::Tokenizer;
use crate::{CancelToken, Error, ErrorKind, Result};

/// A prompt as tokens.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Encoded {
    pub tokens: Vec<u32>,
    /// Number of tokens after which the state is worth saving: the conversation without the
    /// beginning of the answer, which the next turn may render otherwise.
    pub checkpoint: Option<usize>,
}

impl Encoded {
    /// Tokens that are taken as they are.
    pub(super) fn plain(tokens: Vec<u32>) -> Self {
        Self { tokens, checkpoint: None }
    }
}

/// Turns texts into tokens, unless they are too long by their length.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    pub tokenizer: &'a Tokenizer,
    pub max_ctx: usize,
    pub cancel: &'a CancelToken,
}

impl Reader<'_> {
    /// Tokens of a text to continue.
    pub(super) fn text(&self, text: &str) -> Result<Encoded> {
        self.tokenizer.encode_within(text, true, self.max_ctx, self.cancel).map(Encoded::plain)
    }

    /// Tokens of a conversation, which `render` renders with or without the beginning of an answer.
    /// `checkpoint` asks for the place to save the state at, which takes a second rendering.
    pub(super) fn chat(
        &self,
        render: impl Fn(bool) -> Result<String>,
        checkpoint: bool,
    ) -> Result<Encoded> {
        let text = render(true)?;
        let Self { tokenizer, max_ctx, cancel } = *self;
        if !checkpoint {
            return tokenizer.encode_within(&text, false, max_ctx, cancel).map(Encoded::plain);
        }
        // Some templates refuse a conversation that does not ask for an answer.
        let closed = render(false).unwrap_or_default();
        let common = text.bytes().zip(closed.bytes()).take_while(|(a, b)| a == b).count();
        let (tokens, within) =
            tokenizer.within(&text, max_ctx, cancel, move |tokenizer, text| {
                tokenizer.encode_with_prefix(text, false, common)
            })?;
        // Nothing is saved before the first token, nor after the last.
        let checkpoint = Some(within).filter(|&n| n > 0 && n < tokens.len());
        Ok(Encoded { tokens, checkpoint })
    }
}

/// The error of a prompt without text or tokens.
pub(super) fn empty() -> Error {
    Error::new(ErrorKind::Prompt, "the prompt is empty")
        .hint("give a text, or - to read it from standard input")
}

impl Prompt {
    /// True when the answer is a text of its own, and not what continues the prompt.
    pub(super) fn is_chat(&self) -> bool {
        matches!(self, Self::Chat { .. })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;

    use serde_json::json;

    use super::*;

    fn tokenizer() -> Tokenizer {
        let words = json!({"?": 0, "hi": 1, "you": 2, "<end>": 3, "<answer>": 4, "hiyou": 5});
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "added_tokens": [], "post_processor": null, "decoder": null,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "?"}
        });
        Tokenizer::from_bytes(Path::new("tokenizer.json"), json.to_string().as_bytes()).unwrap()
    }

    /// The encoded conversation, and how often it was rendered.
    fn encode(open: &str, closed: Option<&str>, checkpoint: bool) -> (Encoded, usize) {
        let rendered = Cell::new(0);
        let render = |answer: bool| {
            rendered.set(rendered.get() + 1);
            let text = if answer { Some(open) } else { closed };
            text.map(str::to_owned).ok_or_else(|| Error::new(ErrorKind::Prompt, "refused"))
        };
        let (tokenizer, cancel) = (tokenizer(), CancelToken::new());
        let reader = Reader { tokenizer: &tokenizer, max_ctx: 64, cancel: &cancel };
        (reader.chat(render, checkpoint).unwrap(), rendered.get())
    }

    #[test]
    fn a_conversation_is_rendered_once_where_nothing_is_saved() {
        let (open, closed) = ("hi <end> <answer>", Some("hi <end>"));
        let tokens = vec![1, 3, 4];
        let plain = Encoded { tokens: tokens.clone(), checkpoint: None };
        assert_eq!(encode(open, closed, false), (plain, 1));
        assert_eq!(encode(open, closed, true), (Encoded { tokens, checkpoint: Some(2) }, 2));
    }

    #[test]
    fn the_state_is_saved_where_the_answer_begins() {
        let checkpoint = |open, closed| encode(open, closed, true).0.checkpoint;
        assert_eq!(checkpoint("hi <answer>", Some("hi <end>")), Some(1), "the ends differ");
        assert_eq!(checkpoint("hi you <end>", Some("hi yo")), Some(1), "the place lies in a word");
        assert_eq!(checkpoint("hi you", None), None, "a template that wants to be asked");
        assert_eq!(checkpoint("hi you", Some("you")), None, "nothing in common");
        assert_eq!(checkpoint("hi you", Some("hi you")), None, "no beginning of an answer");
    }
}
