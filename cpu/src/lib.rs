//! The CPU backend of qhx: a bundle's graphs as ONNX, in pure Rust.
//!
//! This is what runs where there is no QNN library, and the reference that results of an NPU are compared with.
//!
//! A graph becomes a program: a list of instructions over memory that is laid out when it is opened (`program`). It
//! covers the operators that the forge writes, and names the operator and the node that it does not cover. Threads stay
//! together until a graph has been executed (`team`). Graphs with other operators execute whole on
//! [rten](https://github.com/robertknight/rten), and a warning says why and what that costs.
//!
//! Matmuls read f32, f16, int8 or four bits as they are stored (`kernels`). rten dequantizes all of them to f32, which
//! takes twice to eight times the memory, and to read weights is what most of a decode step's time goes to. Where the
//! processor has instructions for it, int8 and four bits are multiplied in integers (`integers`). Attention matmuls are
//! short, and nothing in them is stored (`heads`).
//!
//! The tensors of a graph show the types that rten makes of ONNX types: `float16` and `double` become
//! `f32`, `int64` and `bool` become `i32`. Shapes must be fixed.
//!
//! Inputs are read where they are bound. Outputs are copied once into what is bound to them.

mod backend;
mod graph;
mod heads;
mod integers;
mod kernels;
mod matmul;
mod model;
mod options;
mod program;
mod team;
mod weights;
mod wire;

pub use backend::CpuBackend;
pub use options::{Activations, Caches, CpuOptions};
