//! The engine: the loop that every family shares.
//!
//! [`Model`] opens a bundle, turns a prompt into tokens, has the host-op consume them, samples,
//! turns tokens into text, and stops for the documented reasons. The host-op only steps.

mod answer;
mod checked;
mod closed;
mod contexts;
mod decode;
mod device_loss;
mod embed;
mod generate;
mod grammar;
mod model;
mod model_options;
mod open_bundle;
mod pack;
mod prefix_cache;
mod prefix_reuse;
mod prompt;
mod score;
mod sequence;
pub mod speculate;
mod split_op;
mod state;
mod step;
#[cfg(test)]
mod tests;
mod texts;
mod token_logits;
mod types;

pub use decode::Run;
pub use embed::TextAndTokens;
pub use model::{Model, Sessions};
pub use model_options::{DecodeBackend, ModelOptions};
pub use open_bundle::ContextLoad;
pub use prefix_cache::KeptStates;
pub use qhx_grammar::{AnswerForm, Grammar, Vocabulary};
pub use qhx_text::{Content, ContentPart, Message};
pub use texts::TextPipeline;
pub use types::{
    DraftCounts, Event, FinishReason, Generation, MAX_DRAFT_TOKENS, MAX_LOGPROBS, Part, Prompt,
    PromptToken, Request, Speculate, Timings,
};
