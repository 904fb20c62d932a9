//! Backends that execute graphs, and the memory that graphs use. No device is known here: a backend brings its own.
//!
//! | module | holds |
//! |---|---|
//! | [`backend`] | the traits of a backend, and the contract between it and whoever executes its graphs |
//! | [`workspace`] | the graphs and buffers of one session, addressed by index: the safe side of that contract |
//! | [`graph_runner`] | one graph, executed on values by name |
//! | [`bindings`] | what is bound to a graph's ports, for backends that execute on the host |
//! | [`null`] | a backend that executes nothing, or a script |
//! | [`lru_contexts`] | a backend that keeps only some contexts of another one loaded |
//!
//! A backend in a crate of its own needs this crate alone: it implements [`backend::Backend`], [`backend::Context`]
//! and [`backend::Graph`]. `examples/backend` is one.

pub mod backend;
pub mod bindings;
mod buffer;
pub mod graph_runner;
mod logits;
pub mod lru_contexts;
pub mod null;
pub mod workspace;

pub use buffer::{ALIGNMENT, Buffer, Memory};
pub use logits::{Logits, softcap};
pub use qhx_base::{CancelToken, Error, ErrorKind, Report, Result, artifacts, files, trace};
pub use qhx_types::{DType, GraphInfo, MissingTensor, Port, Quantization, SizeError, TensorInfo};
pub use workspace::{BufferId, GraphId, Workspace};
