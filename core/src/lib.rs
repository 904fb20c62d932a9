//! qhx-core: backends, tensors, manifests, text and the generation engine.
//!
//! The crate knows nothing of model families. What only one family needs is a host-op
//! ([`op::HostOp`]), selected by name in the bundle's manifest.

pub mod artifacts;
pub mod backend;
pub mod bindings;
mod buffer;
mod cancel;
pub mod child;
pub mod compare;
pub mod dump;
pub mod engine;
mod error;
pub mod escape;
pub mod files;
pub mod manifest;
pub mod media;
pub mod npy;
pub mod null;
pub mod op;
pub mod qnn;
pub mod resident;
pub mod rights;
pub mod sampling;
pub mod stop;
pub mod text;
pub mod trace;
pub mod workspace;

pub use buffer::{ALIGNMENT, Buffer, Memory};
pub use cancel::CancelToken;
pub use error::{Error, ErrorKind, Report, Result};
pub use manifest::Manifest;
pub use media::Media;
pub use qhx_types::{DType, GraphInfo, MissingTensor, Port, Quantization, SizeError, TensorInfo};
pub use workspace::{BufferId, GraphId, Workspace};
