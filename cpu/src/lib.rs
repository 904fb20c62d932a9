//! The CPU backend of qhx: a bundle's graphs as ONNX, in pure Rust
