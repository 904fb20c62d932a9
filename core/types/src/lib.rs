//! The descriptions that both sides of the plugin interface speak in: tensors and graphs, tasks, what
//! an op declares about itself, segments of a prompt and where they stand.
//!
//! `qhx-core` and `qhx-op` use these types and hand them on under their own names; an op's author
//! need not name this crate. What crosses the boundary crosses as JSON, in the serde forms of these
//! types. Both sides may be of other versions: a field that is missing has its default, a field
//! that is unknown is ignored, and an unknown name of a dtype, task, modality or encoding is read as
//! the variant for that. No model family is known here.

pub mod calls;
#[cfg(feature = "media")]
mod content;
mod dtype;
mod graph;
mod media;
mod op;
pub mod quantized;

pub use calls::SnapshotId;
#[cfg(feature = "media")]
pub use content::{Media, MediaError};
pub use dtype::{DType, Quantization};
pub use graph::{GraphInfo, MissingTensor, Port, SizeError, TensorInfo};
pub use media::{Alpha, AudioRules, ImageRules, MediaRules, Piece, Placement, VideoRules};
pub use op::{
    Answer, Bucket, LogitRules, Modality, OfTokens, OpDescription, OpenInfo, Packing, PromptRules,
    Segment, SoundOut, Task, TimeRule, Verification,
};

/// Value that an additive mask adds to hidden scores.
///
/// So far below any score that the weight underflows to 0, and so far above the lowest f16 that the
/// sum with a score cannot overflow: one score of −∞ makes the NPU's softmax give 0 to the whole
/// row. Rows of a cache that are hidden hold finite numbers of an earlier text.
pub const MASK_VALUE: f32 = -30_000.0;
