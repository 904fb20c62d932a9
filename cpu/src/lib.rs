//! The CPU backend of qhx: a bundle's graphs as ONNX, in pure Rust.
//!
//! Graphs execute on [rten](https://github.com/robertknight/rten). This is what runs where there
//! is no QNN library, and the reference that results of an NPU are compared with.
//!
//! Products whose weights lie in a file beside the model are cut out of it and computed here, over f32, f16, int8 or
//! four bits as they are stored. rten would widen them all to f32, which takes twice to eight times the memory, and to
//! read weights is what most of a decode step's time goes to.
//!
//! What rten makes of ONNX types shows in the tensors of a graph: `float16` and `double` become
//! `f32`, `int64` and `bool` become `i32`. Shapes must be fixed.
//!
//! Inputs are read where they are bound. rten owns the memory of its results, so that outputs are
//! copied once into what is bound to them, and it allocates while it runs.

mod backend;
mod cut;
mod graph;
mod integers;
mod kernels;
mod model;
mod product;
mod steps;
mod tape;
mod team;
mod weights;
mod wire;

pub use backend::{CpuBackend, CpuOptions};
