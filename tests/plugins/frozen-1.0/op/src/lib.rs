//! The interface part of the op author's crate, as it was at 1.0. Never changed.

pub mod abi;
mod error;
pub mod export;
mod host;
mod op;
mod types;

pub use error::{Error, ErrorCode, Result};
pub use host::{BufferId, GraphId, Host, LogLevel, SpanId};
pub use op::{Op, SnapshotId, View};
pub use types::{
    DType, GraphInfo, Modality, OpDescription, OpInfo, Port, Segment, Task, TensorInfo,
};

#[doc(hidden)]
pub use abi_stable;
#[doc(hidden)]
pub use inventory;
