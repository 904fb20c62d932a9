//! Code that all crates of qhx share: errors, files of untrusted bundles, child processes, cancellation and traces.
//!
//! Nothing here knows a tensor, a manifest or a model.

#[cfg(feature = "artifacts")]
pub mod artifacts;
mod cancel;
#[cfg(feature = "child")]
pub mod child;
pub mod compare;
mod error;
pub mod escape;
pub mod files;
#[cfg(feature = "hash")]
pub mod hash;
pub mod memory;
mod names;
#[cfg(feature = "child")]
pub mod rights;
mod setters;
pub mod snapshot;
#[cfg(feature = "child")]
pub mod stdout;
pub mod trace;

pub use cancel::{CancelToken, LinkedToken};
pub use error::{Error, ErrorKind, Report, Result, TooLong};
pub use names::expected;
