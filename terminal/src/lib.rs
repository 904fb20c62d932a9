//! What the programs share, `qhx` and those that outside recipes make with `qhx_forge::main()`: how results and
//! messages are written, how Ctrl-C and panics end, and what exit codes say.
//!
//! [`program::run`] is the way from options to an exit code. Standard output carries results only and is written
//! through [`output`]; everything else goes to standard error, with [`say!`].

#[macro_use]
pub mod stderr;

pub mod args;
mod console;
mod exit;
pub mod helper;
pub mod output;
mod panics;
pub mod program;
pub mod progress;
pub mod signal;
pub mod status;
pub mod vars;
