//! Makes bundles: checkpoint to graphs, context binaries, ONNX and manifest

pub mod builder;
pub mod compile;
pub mod graph;
mod helpers;
pub mod progress;
pub mod quantise;
pub mod weight;
