//! Makes bundles: checkpoint to graphs, context binaries, ONNX and manifest

pub mod builder;
pub mod checkpoint;
pub mod compile;
pub mod graph;
mod helpers;
pub mod onnx;
pub mod progress;
pub mod quantise;
pub mod recipes;
pub mod weight;
