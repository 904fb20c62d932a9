//! Reasoning in front of an answer.

use super::Message;

/// Marks that a model puts around its reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReasoningMarks {
    /// Text that the reasoning begins with.
    pub open: &'static str,
    /// Text behind that mark which is no part of the reasoning; empty where there is none.
    pub label: &'static str,
    /// Text that the reasoning ends with.
    pub close: &'static str,
}

/// The marks of all models. Those of a model whose template names none are the first.
pub const REASONING: [ReasoningMarks; 2] = [
    ReasoningMarks { open: "<think>", label: "", close: "</think>" },
    ReasoningMarks { open: "<|channel>", label: "thought", close: "<channel|>" },
];

impl ReasoningMarks {
    /// The marks that a chat template knows; `None` where it knows no reasoning.
    pub fn of_template(source: &str) -> Option<Self> {
        REASONING.into_iter().find(|marks| source.contains(marks.close))
    }

    /// An answer without the reasoning that it begins with. `call`: the mark that a call begins with, behind which
    /// nothing is reasoning.
    pub(crate) fn behind<'a>(&self, answer: &'a str, call: &str) -> &'a str {
        let text = answer.trim_start();
        let Some((before, behind)) = text.split_once(self.close) else { return answer };
        let calls = if call.is_empty() { before.starts_with('{') } else { before.contains(call) };
        // The prompt may have opened it.
        if calls && !text.starts_with(self.open) { answer } else { behind }
    }
}

impl Default for ReasoningMarks {
    fn default() -> Self {
        REASONING[0]
    }
}

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
    pub fn of(messages: &[Message], prompt: &str, marks: ReasoningMarks) -> Self {
        let before = match messages.last() {
            Some(last) if Message::goes_on(messages) => last.content.texts().last().unwrap_or(""),
            _ => "",
        };
        let opened = before.rfind(marks.open);
        let opened = opened.is_some_and(|at| !before[at..].contains(marks.close));
        let prompt = prompt.trim_end();
        if opened || prompt.strip_suffix(marks.label).unwrap_or(prompt).ends_with(marks.open) {
            Self::Reasoning
        } else if before.trim().is_empty() {
            Self::Either
        } else {
            Self::Text
        }
    }
}
