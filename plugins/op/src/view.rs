//! What an op answers with: runs of floats, saved states.

use crate::{BufferId, DType};

/// A saved state of an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SnapshotId(pub u64);

/// A run of floats in a buffer: logits or an embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// The buffer.
    pub buffer: BufferId,
    /// [`DType::F16`] or [`DType::F32`].
    pub dtype: DType,
    /// First byte.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}
