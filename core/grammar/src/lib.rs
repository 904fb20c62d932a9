//! Grammars of answers: JSON of a schema, a regular expression, a Lark grammar, one of some texts, calls of tools.
//!
//! A [`Grammar`] says it in words. A [`Vocabulary`] has the tokens of a tokenizer as bytes, and makes a [`Constraint`]
//! of a grammar: which tokens may come next, and which must. The work is done by the crate `llguidance`; nothing of it
//! shows here.

mod constraint;
mod faults;
mod grammar;
mod pairs;
mod schema;
#[cfg(test)]
mod tests;
mod tools;
mod vocabulary;
mod words;

pub use constraint::Constraint;
pub use grammar::{AnswerForm, Grammar};
pub use vocabulary::Vocabulary;
