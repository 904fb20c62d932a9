//! The command line of qhx: the programs `qhx`, `qhx_generate` and `qhx_embed`.
//!
//! `run` reads the arguments and starts a command. Each command is a module of `commands`; what they share lies beside
//! them and knows none of them. Standard output carries results only and is written through `output`; everything else
//! goes to standard error.

use qhx_terminal::{Status, output, signal, stderr};

#[macro_use(say)]
extern crate qhx_terminal;

mod app;
mod args;
mod catalog;
mod commands;
mod emulator;
mod fixture;
mod grammar;
mod media;
mod program;
mod progress;
mod prompt;
mod run;
mod session;
mod time;
mod trace;

use qhx::vars;

pub use run::{run, run_embed, run_generate};
