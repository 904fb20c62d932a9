//! qhx-core: manifests, the trait of host-ops, sampling and the generation engine.
//!
//! It hands on what lies beneath it under one name: errors and files (`qhx-base`), tensors (`qhx-types`), backends and
//! the workspace (`qhx-exec`), the NPU (`qhx-qnn`) and text (`qhx-text`).
//!
//! The crate knows nothing of model families. What only one family needs is a host-op
//! ([`op::HostOp`]), selected by name in the bundle's manifest.

pub mod dump;
pub mod engine;
pub mod manifest;
pub mod media {
    //! Images, audio and videos as parts of a prompt.

    pub use qhx_types::{Media, MediaError};
}
pub mod npy;
pub mod op;
pub mod sampling;
pub mod stop;

pub use manifest::Manifest;
pub use qhx_base::{
    CancelToken, Error, ErrorKind, Report, Result, TooLong, artifacts, child, compare, escape,
    files, hash, rights, snapshot, trace,
};
pub use qhx_exec::{
    ALIGNMENT, Buffer, BufferId, GraphId, Memory, Workspace, alone, backend, bindings, null,
    resident, workspace,
};
pub use qhx_qnn as qnn;
pub use qhx_text as text;
pub use qhx_types::{
    DType, GraphInfo, Media, MediaError, MissingTensor, Port, Quantization, SizeError, TensorInfo,
    onnx, quantized,
};
