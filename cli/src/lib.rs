//! The command line of qhx: the programs `qhx`, `qhx_generate` and `qhx_embed`.
//!
//! Each command is a module of `commands`; what they share lies beside it. Standard output carries
//! results only and is written through `output`; everything else goes to standard error.

#[macro_use]
mod stderr;

mod app;
mod args;
mod backends;
#[cfg(feature = "builtin-ops")]
mod builtin;
mod cache;
mod commands;
mod fixture;
#[doc(hidden)]
pub mod fuzzing;
mod helper;
mod output;
mod panics;
mod progress;
mod prompt;
mod session;
mod signal;
mod vars;

pub use app::{run, run_embed, run_generate};
