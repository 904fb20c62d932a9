//! qhx-core: backends, tensors, manifests, text and the generation engine.
//!
//! The crate knows nothing of model families. What only one family needs is a host-op
//! ([`op::HostOp`]), selected by name in the bundle's manifest.

pub mod backend;
pub mod bindings;
mod buffer;
pub mod compare;
pub mod dump;
pub mod engine;
pub mod manifest;
pub mod media {
    //! Images, audio and videos as parts of a prompt.

    pub use qhx_types::{Media, MediaError};
}
pub mod npy;
pub mod null;
pub mod op;
pub mod qnn;
pub mod resident;
pub mod sampling;
pub mod stop;
pub mod text;
pub mod workspace;

pub use buffer::{ALIGNMENT, Buffer, Memory};
pub use manifest::Manifest;
pub use qhx_base::{
    CancelToken, Error, ErrorKind, Report, Result, artifacts, child, escape, files, hash, rights,
    trace,
};
pub use qhx_types::{
    DType, GraphInfo, Media, MediaError, MissingTensor, Port, Quantization, SizeError, TensorInfo,
};
pub use workspace::{BufferId, GraphId, Workspace};
