//! The graph of a model, between the recipes that build it and the executors that compile it.
//!
//! | module | holds |
//! |---|---|
//! | [`graph`] | ops, tensors and nodes, with the invariants of a built graph |
//! | [`builder`] | the builder that infers shapes and checks each node |
//! | [`weight`] | weights as rows of a source, and how they are stored |
//! | [`quantize`] | rounding of rows to 8 and 4 bits |
//! | [`super_blocks`] | scales and minima of 4 bits that are multiples, as GGUF's Q4_K has them |
//! | [`onnx`] | graphs as ONNX files with their weights beside them, written and read |
//! | [`progress`] | reports of work that takes a while |
//!
//! No device, model family or file of a checkpoint is known here.

pub mod builder;
pub mod graph;
pub mod onnx;
pub mod progress;
pub mod quantize;
pub mod super_blocks;
pub mod weight;

pub use progress::{Progress, Silent};
