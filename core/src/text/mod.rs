//! Between text and tokens: tokenizer, streaming detokenizer and chat templates.

mod chat;
pub mod forms;
mod jinja;
mod markers;
mod message;
#[cfg(test)]
pub(crate) mod samples;
mod stream;
#[cfg(test)]
mod tests;
mod tokenizer;

pub use chat::ChatTemplate;
pub use jinja::TASK as CHAT_TEMPLATE_TASK;
pub use message::{Content, ContentPart, Message, RenderOptions};
pub use stream::Detokenizer;
pub use tokenizer::Tokenizer;
