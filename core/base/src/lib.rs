//! Code that all crates of qhx share: errors, files of untrusted bundles, child processes, cancellation and traces.
//!
//! Nothing here knows a tensor, a manifest or a model.

pub mod artifacts;
mod cancel;
pub mod child;
pub mod compare;
mod error;
pub mod escape;
pub mod files;
pub mod hash;
pub mod memory;
pub mod rights;
pub mod snapshot;
pub mod stdout;
pub mod trace;

pub use cancel::{CancelToken, LinkedToken};
pub use error::{Error, ErrorKind, Report, Result, TooLong};
