//! Tests of the inputs that the host fills in, and the caches beside them, over scripted graphs.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

mod donors;
mod embedding;
mod int8;
mod mask;
mod probe;
mod rings;
mod rope;
