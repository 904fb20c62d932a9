//! Makes bundles: checkpoint to graphs, context binaries, ONNX and manifest.
//!
//! [`forge`] is the whole way. On it: [`checkpoint`] maps the safetensors, a recipe of [`recipes`] builds
//! [`graph`]s with the [`kit`] and the [`builder`], each is lowered to ONNX ([`onnx`]) and, where there is a
//! [`compile::Compiler`] such as [`qnn::QnnCompiler`], to a context binary, and everything is put into a folder with its manifest.

pub mod builder;
mod bundle;
pub mod chat;
pub mod check;
pub mod checkpoint;
pub mod compile;
pub mod estimate;
mod forge;
pub mod graph;
mod helpers;
pub mod kit;
mod names;
pub mod onnx;
pub mod plan;
pub mod progress;
pub mod qnn;
pub mod quantise;
pub mod recipe;
pub mod recipes;
mod synthetic;
mod text;
pub mod weight;

pub use forge::{
    BackendFactory, CheckBackends, ContextReport, DEFAULT_MAX_CTX, DEFAULT_TEXT, ForgeOptions,
    Report, forge, forge_checkpoint, forge_with,
};
pub use progress::{Progress, Silent};
pub use recipe::{ExpertInputs, Precision, Task};
