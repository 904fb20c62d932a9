//! Makes bundles: checkpoint to graphs, context binaries, ONNX and manifest.
//!
//! [`forge`] is the whole way. A [checkpoint](qhx_checkpoint) maps the safetensors, a recipe ([`registry`]) builds
//! graphs with the [`kit`] and the [builder](qhx_graph::builder), each is lowered to [ONNX](qhx_graph::onnx) and,
//! where there is a [`compile::Compiler`] such as [`qnn::QnnCompiler`], to a context binary, and everything is put
//! into a folder with its manifest.

mod batches;
mod bundle;
pub mod calibrate;
mod chain;
mod chat;
pub mod check;
pub mod compile;
pub mod estimate;
pub mod f16_range;
mod forge;
mod keys;
pub mod kit;
mod measured;
mod model_name;
mod names;
mod options;
mod overrides;
pub mod plan;
pub mod prepare;
#[cfg(feature = "program")]
pub mod program;
pub mod qnn;
pub mod receipt;
pub mod recipe;
mod recipes;
pub mod registry;
pub mod rerank;
mod text;

pub use f16_range::Fold;
pub use forge::{ContextReport, Report, forge, forge_checkpoint, forge_with};
#[doc(hidden)]
pub use inventory;
pub use options::{
    AUTO_SHARDS, BackendFactory, CONTEXT_BUDGET, CheckBackends, DEFAULT_MAX_CTX, DEFAULT_TEXT,
    ForgeOptions,
};
pub use overrides::Override;
#[cfg(feature = "program")]
pub use program::main;
pub use qhx_graph::{Progress, Silent};
pub use recipe::{Activations, Caches, Precision, Task};
pub use registry::{RecipeEntry, RecipeOption, architectures};
