//! Graphs as ONNX files, written and read.
//!
//! Messages are those of `rten_onnx`; names of operators and the shapes of weights are in `format.rs`. Weights
//! go into one external-data file for the graphs of a context, because a protobuf message ends at 2 GiB and these graphs
//! share their weights.
//!
//! The graph itself goes along as metadata of the model, from which [`read`] makes it again: the CPU backend compiles it,
//! and so does `qhx prepare` for the NPU. The ONNX operators are an export for other programs.

mod data;
mod format;
mod ir;
mod lower;
mod model;
mod read;
mod wire;

pub use ir::VERSION;
pub use lower::{Known, write_beside};
pub use lower::{Written, write, write_all};
pub use read::{Numbers, Reals, StoredWeight, read, read_with};
pub use wire::{Field, Message};
