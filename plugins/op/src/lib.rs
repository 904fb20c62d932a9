//! The host-op plugin interface of qhx.
//!
//! A *host-op* is the step logic of one model family: it fills inputs, executes graphs in order
//! and carries state. An author implements [`Op`], registers it with [`register_ops!`], and turns
//! the crate into a plugin with [`export_plugin!`] in a thin `cdylib` crate:
//!
//! ```text
//! // my-op/src/lib.rs
//! qhx_op::register_ops!(MyOp);
//! // my-op/plugin/src/lib.rs
//! qhx_op::export_plugin!(my_op);
//! ```
//!
//! The author writes safe Rust against [`Host`]; everything that crosses the boundary is in
//! [`abi`], whose types are frozen for a major version of this crate. Panics are caught inside the
//! plugin and become errors.
//!
//! [`harness`] runs an op in a test. What model families share, such as decoders, states and inputs of graphs, is the
//! crate `qhx-kit`: an author needs this crate to make an op, and that one for what the op need not write itself.

pub mod abi;
pub mod calls;
mod error;
pub mod export;
mod graphs;
#[doc(hidden)]
pub mod guard;
pub mod harness;
mod host;
mod op;
pub mod text;
mod view;

pub use error::{Error, ErrorCode, Result};
pub use half::f16;
pub use host::{BufferId, GraphId, Host, LogLevel, SpanId};
pub use op::{Encoder, Generator, Op, Recognizer, Synthesizer};
pub use qhx_types::{
    Alpha, Answer, AudioRules, Bucket, DType, GraphInfo, ImageRules, LogitRules, MASK_VALUE,
    MediaRules, MissingTensor, Modality, OfTokens, OpDescription, OpenInfo, Packing, Piece,
    Placement, Port, PromptRules, Quantization, Segment, SizeError, SnapshotId, SoundOut, Task,
    TensorInfo, TimeRule, Verification, VideoRules,
};
pub use view::View;

#[doc(hidden)]
pub use inventory;
