//! The CPU backend of qhx: a bundle's graphs in pure Rust.
//!
//! This is what runs where there is no QNN library, and the reference that results of an NPU are compared with.
//!
//! A graph, as the forge wrote it beside its ONNX form, becomes a program: a list of instructions over memory that is
//! laid out when it is opened (`program`). Each op of [`qhx_graph`] has its instruction. Threads stay together until a
//! graph has been executed (`team`). An ONNX file of another program has no such graph and is refused.
//!
//! Matmuls read f32, f16, int8 or four bits as they are stored (`kernels`): to read weights is what most of a decode
//! step's time goes to. Where the processor has instructions for it, int8 and four bits are multiplied in integers
//! (`integers`). Attention matmuls are short, and nothing in them is stored (`heads`).
//!
//! Inputs are read where they are bound. Outputs are copied once into what is bound to them.

mod backend;
mod graph;
mod heads;
mod integers;
mod kernels;
mod matmul;
#[cfg(test)]
mod matmul_tests;
mod model;
mod options;
mod program;
mod team;
mod weights;

pub use backend::CpuBackend;
pub use options::{Activations, Caches, CpuOptions};
