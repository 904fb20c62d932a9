//! The C ABI of qhx: what `include/qhexrt_c.h` declares.
//!
//! | module | holds |
//! |---|---|
//! | [`abi`] | structs and numbers, as the header has them |
//! | [`exports`] | the functions |
//! | `input`, `callbacks`, `output` | the only places that touch a caller's memory, or call a caller's code |
//! | `handles`, `fault` | tables of live handles, the last error of each thread |
//! | `runtime`, `model`, `session`, `generate` | what is behind the handles |
//! | `log` | the log for a callback |
//!
//! Rust programs take [`qhx`] itself.

pub mod abi;
mod builtin;
mod callbacks;
pub mod exports;
mod fault;
mod generate;
mod handles;
mod input;
mod log;
mod model;
mod output;
mod runtime;
mod session;
