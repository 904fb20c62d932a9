//! Between text and tokens: tokenizer, streaming detokeniser and chat templates.

mod chat;
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
