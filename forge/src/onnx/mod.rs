//! Lowering to ONNX: the reference graph that the CPU backend runs in f32.
//!
//! Messages are those of `rten_onnx`, with which the CPU backend reads them; names of operators and the shapes of
//! weights are in [`qhx_core::onnx`]. Weights go into one external-data file for the graphs of a context, because a
//! protobuf message ends at 2 GiB and these graphs share their weights.

mod data;
mod lower;
mod model;

pub use lower::{Written, write, write_all};
