//! Programs in a terminal, `qhx` and those that outside recipes make with `qhx_forge::main`: how results and
//! messages are written, how Ctrl-C and panics end, and what exit codes mean.
//!
//! [`run`] is the way from options to an exit code. Standard output carries results only and is written through
//! [`output`]; everything else goes to standard error, with [`say!`](crate::say!).

pub mod args;
mod console;
mod exit;
pub mod helper;
pub mod output;
mod panics;
pub mod progress;
mod run;
pub mod signal;
mod status;
pub mod stderr;

pub use run::{STYLES, Terminal, refuse, run};
pub use status::Status;
