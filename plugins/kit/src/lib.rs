//! The kit of host-op authors: parts that model families share, over the plugin interface `qhx-op`.
//!
//! An op needs `qhx-op` to be one, and this crate for what it need not write itself; it may do without. The kit grows
//! and changes with the runtime. Nothing of it crosses the boundary between a plugin and its host: a plugin links the
//! kit that it was built with.
//!
//! [`decoder`] is the step of a decoder as a whole, [`experts`] what of it stays on the host where layers have
//! many experts, [`state`] carries KV caches and recurrent states,
//! [`fill`] writes rotary tables, masks and embedding rows in whatever dtype and width the graph has, [`kernels`]
//! converts half-precision slices, [`schema`] describes what `plan.params` may hold.
//! With the feature `vision`, the module `vision` shapes images for a vision tower; with `audio`, the
//! module `audio` makes log-mel features of audio.

#[cfg(feature = "audio")]
pub mod audio;
pub mod decoder;
pub mod experts;
pub mod fill;
mod graphs;
pub mod kernels;
pub mod schema;
pub mod state;
#[cfg(feature = "vision")]
pub mod vision;

pub use graphs::{GraphCosts, OneOrMany};
