//! The commands of `qhx`, one module each.

pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod classic;
pub(crate) mod completions;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod embed;
pub(crate) mod forge;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod libraries;
pub(crate) mod man;
pub(crate) mod models;
pub(crate) mod plugins;
pub(crate) mod ps;
pub(crate) mod publish;
pub(crate) mod pull;
pub(crate) mod pulled;
pub(crate) mod push;
pub(crate) mod rerank;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod speak;
pub(crate) mod transcribe;
pub(crate) mod verify;
