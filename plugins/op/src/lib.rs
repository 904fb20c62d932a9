//! The host-op plugin interface of qhx and the op author's kit.
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
//! The kit: [`decoder`] is the step of a decoder as a whole, [`experts`] what of it stays on the host where layers have
//! many experts, [`state`] carries KV caches and recurrent states,
//! [`fill`] writes rotary tables, masks and embedding rows in whatever dtype and width the graph has, [`kernels`]
//! converts half-precision slices, [`schema`] describes what `plan.params` may hold. [`harness`] runs an op in a test.
//! With the feature `vision`, the module `vision` shapes images for a vision tower; with `audio`, the
//! module `audio` makes log-mel features of audio.

pub mod abi;
#[cfg(feature = "audio")]
pub mod audio;
pub mod calls;
pub mod decoder;
mod error;
pub mod experts;
pub mod export;
pub mod fill;
mod graphs;
#[doc(hidden)]
pub mod guard;
pub mod harness;
mod host;
pub mod kernels;
mod op;
pub mod schema;
mod segment;
pub mod state;
pub mod text;
mod view;
#[cfg(feature = "vision")]
pub mod vision;

pub use error::{Error, ErrorCode, Result};
pub use graphs::{GraphCosts, OneOrMany};
pub use half::f16;
pub use host::{BufferId, GraphId, Host, LogLevel, SpanId};
pub use op::{Encoder, Generator, Op, Recognizer, Speaker};
pub use qhx_types::{
    Alpha, Answer, AudioRules, Bucket, DType, GraphInfo, ImageRules, LogitRules, MediaRules,
    MissingTensor, Modality, OpDescription, OpenInfo, Packing, Piece, Placement, Port, PromptRules,
    Quantization, Segment, SizeError, SnapshotId, SoundOut, Task, TensorInfo, TimeRule,
    Verification, VideoRules,
};
pub use view::View;

#[doc(hidden)]
pub use inventory;
