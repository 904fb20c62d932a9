//! Lowering to ONNX: the reference graph that the CPU backend runs in f32.
//!
//! Messages are written with `prost`, whose derive takes the few ONNX messages used here as plain
//! structs: no `.proto` file, no generated code, no protoc. Weights go into one external-data file for
//! the graphs of a context, because a protobuf message ends at 2 GiB and these graphs share their weights.

mod data;
mod lower;
mod proto;

pub use lower::{Written, write, write_all};
