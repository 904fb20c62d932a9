//! A conversation, and how it is to be rendered.

use qhx_base::CancelToken;
use qhx_types::Media;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The content.
    pub content: Content,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<Content>) -> Self {
        Self { role: role.into(), content: content.into() }
    }

    /// A message that says how the model is to answer.
    pub fn system(content: impl Into<Content>) -> Self {
        Self::new("system", content)
    }

    /// A message that the model is to answer.
    pub fn user(content: impl Into<Content>) -> Self {
        Self::new("user", content)
    }

    /// An answer of the model.
    pub fn assistant(content: impl Into<Content>) -> Self {
        Self::new("assistant", content)
    }

    /// True for a conversation that ends with a message of the assistant, which an answer goes on with.
    pub fn goes_on(messages: &[Self]) -> bool {
        messages.last().is_some_and(|last| last.role == "assistant")
    }
}

/// The content of a message.
///
/// A template sees it as `transformers` shows it: a text is a string, parts are a list of
/// `{"type": "text", "text": …}`, `{"type": "image"}` and so on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// A text.
    Text(String),
    /// Texts, images, audio and videos, in order.
    Parts(Vec<ContentPart>),
}

/// A part of a message's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContentPart {
    /// A text.
    Text(String),
    /// An image, audio clip or video.
    Media(Media),
}

impl Content {
    /// The texts of it, in order.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let (text, parts) = match self {
            Self::Text(text) => (Some(text.as_str()), &[][..]),
            Self::Parts(parts) => (None, parts.as_slice()),
        };
        text.into_iter().chain(parts.iter().filter_map(|part| match part {
            ContentPart::Text(text) => Some(text.as_str()),
            ContentPart::Media(_) => None,
        }))
    }

    /// The images, audio and videos of it, in order.
    pub fn media(&self) -> impl Iterator<Item = &Media> {
        let parts = match self {
            Self::Text(_) => &[][..],
            Self::Parts(parts) => parts.as_slice(),
        };
        parts.iter().filter_map(|part| match part {
            ContentPart::Text(_) => None,
            ContentPart::Media(media) => Some(media),
        })
    }

    /// The same with a text at its end.
    #[must_use]
    pub fn with_text(&self, more: &str) -> Self {
        match self {
            Self::Text(text) => Self::Text(format!("{text}{more}")),
            Self::Parts(parts) => {
                let mut parts = parts.clone();
                match parts.last_mut() {
                    Some(ContentPart::Text(text)) => text.push_str(more),
                    _ => parts.push(ContentPart::Text(more.to_owned())),
                }
                Self::Parts(parts)
            }
        }
    }

    /// The same with every text changed.
    pub fn map_texts(&self, change: &impl Fn(&str) -> String) -> Self {
        match self {
            Self::Text(text) => Self::Text(change(text)),
            Self::Parts(parts) => Self::Parts(
                parts
                    .iter()
                    .map(|part| match part {
                        ContentPart::Text(text) => ContentPart::Text(change(text)),
                        media @ ContentPart::Media(_) => media.clone(),
                    })
                    .collect(),
            ),
        }
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<&String> for Content {
    fn from(text: &String) -> Self {
        Self::Text(text.clone())
    }
}

impl From<Vec<ContentPart>> for Content {
    fn from(parts: Vec<ContentPart>) -> Self {
        Self::Parts(parts)
    }
}

impl Serialize for Content {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) => serializer.serialize_str(text),
            Self::Parts(parts) => serializer.collect_seq(parts.iter().map(|part| match part {
                ContentPart::Text(text) => json!({"type": "text", "text": text}),
                ContentPart::Media(media) => json!({"type": media.modality().name()}),
            })),
        }
    }
}

/// A text: what else a message can hold comes from files, and not from JSON.
impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self::Text)
    }
}

/// Options for rendering a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderOptions {
    /// End with what an answer begins with, so that the model answers; where the last message is the assistant's, end
    /// with its content, so that the model goes on with it.
    pub add_generation_prompt: bool,
    /// True if the model should think first; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Further variables of a Jinja template, such as `reasoning_effort`. They come before all others of the same
    /// name; the manifest's markers know none.
    pub arguments: Map<String, Value>,
    /// Placeholder of each image, audio clip and video of the conversation, in order. A Jinja template knows these
    /// itself; the manifest's markers do not.
    pub media: Vec<String>,
    /// Stops a template that is rendered in a process of its own.
    pub cancel: CancelToken,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            enable_thinking: None,
            arguments: Map::new(),
            media: Vec::new(),
            cancel: CancelToken::new(),
        }
    }
}
