//! Between text and tokens: tokenizer, streaming detokenizer and chat templates. No manifest and no model is known
//! here.

mod chat;
pub mod forms;
mod infill;
mod jinja;
mod markers;
mod message;
mod reasoning;
#[cfg(test)]
mod samples;
mod spec;
mod stream;
mod tokenizer;
mod tools;
#[cfg(test)]
mod transformers;

pub use chat::{ChatTemplate, TemplateFiles};
pub use infill::Infill;
pub use jinja::TASK as CHAT_TEMPLATE_TASK;
pub use message::{Content, ContentPart, Message, RenderOptions};
pub use reasoning::{Beginning, REASONING, ReasoningMarks};
pub use spec::{ChatSpec, ChatStyle, Marker, Piece, RoleMarkers};
pub use stream::Detokenizer;
pub use tokenizer::{TokenBytes, Tokenizer};
pub use tools::{CallFormat, CallSyntax, Syntax, Tags, Tool, ToolCall};
