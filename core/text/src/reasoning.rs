//! Reasoning in front of an answer.

use super::Message;

/// Marks that models put around their reasoning.
pub const REASONING: (&str, &str) = ("<think>", "</think>");

/// Beginning of an answer, as far as its prompt decides it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Beginning {
    /// The prompt opens the reasoning.
    Reasoning,
    /// Reasoning or text: the model decides.
    Either,
    /// Text.
    #[default]
    Text,
}

impl Beginning {
    /// Beginning of the answer to a conversation that is rendered as `prompt`.
    pub fn of(messages: &[Message], prompt: &str) -> Self {
        let (open, close) = REASONING;
        let before = match messages.last() {
            Some(last) if Message::goes_on(messages) => last.content.texts().last().unwrap_or(""),
            _ => "",
        };
        let opened = before.rfind(open).is_some_and(|at| !before[at..].contains(close));
        if opened || prompt.trim_end().ends_with(open) {
            Self::Reasoning
        } else if before.trim().is_empty() {
            Self::Either
        } else {
            Self::Text
        }
    }
}
