//! A conversation, and how it is to be rendered.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// How a conversation is rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderOptions {
    /// End with what an answer begins with, so that the model answers.
    pub add_generation_prompt: bool,
    /// Whether the model should think first; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Further variables of a Jinja template, such as `reasoning_effort`. They come before all others of the same
    /// name; the manifest's markers know none.
    pub arguments: Map<String, Value>,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, enable_thinking: None, arguments: Map::new() }
    }
}
