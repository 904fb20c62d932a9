//! Lowering to ONNX: the reference graph that the CPU backend runs in f32.
//!
//! Messages are those of `rten_onnx`, with which the CPU backend reads them; names of operators and the shapes of
//! weights are in [`qhx_types::onnx`]. Weights go into one external-data file for the graphs of a context, because a
//! protobuf message ends at 2 GiB and these graphs share their weights.
//!
//! The graph itself goes along as metadata of the model, from which [`read`] makes it again: so a bundle can be
//! compiled where it runs.

mod data;
mod ir;
mod lower;
mod model;
mod read;

pub use ir::VERSION;
pub use lower::{Known, write_beside};
pub use lower::{Written, write, write_all};
pub use read::read;
