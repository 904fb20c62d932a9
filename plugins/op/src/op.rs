//! What an author implements.

use crate::{BufferId, DType, Error, Host, OpDescription, OpInfo, Result, Segment};

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

/// The step logic of one model family over one open bundle.
///
/// The engine owns the loop, sampling, text and chat; the op consumes tokens and answers with
/// logits. A call that fails, also because [`Host::execute`] says that the work is cancelled,
/// must leave the state as it was after the last complete token: change state (swap, append,
/// count) only once the last graph of a step has executed.
pub trait Op: Sized + Send + 'static {
    /// What the op is, before any bundle is opened.
    fn describe() -> OpDescription;

    /// Binds graphs and tables. Validates every tensor name, shape and dtype it needs and says
    /// which is wrong.
    fn open(host: &mut Host) -> Result<Self>;

    /// What was found on opening.
    fn info(&self) -> OpInfo;

    /// Token ids that the op can consume are below this: rows of its embedding table. Fewer than
    /// [`OpInfo::vocab`] where the logits are padded; the logits beyond are never chosen. 0 takes
    /// the manifest's `params.vocab`, or else [`OpInfo::vocab`].
    fn input_vocab(&self) -> usize {
        0
    }

    /// Forgets everything: position 0.
    fn reset(&mut self, host: &mut Host) -> Result<()>;

    /// Positions consumed so far.
    fn position(&self) -> usize;

    /// Consumes segments; answers with the logits of the last position.
    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let _ = (host, segments);
        Err(Error::unsupported("generation"))
    }

    /// Consumes one token; answers with the logits of its position. Must not allocate.
    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        let _ = (host, token);
        Err(Error::unsupported("generation"))
    }

    /// Forgets all positions from `position` on.
    fn truncate(&mut self, host: &mut Host, position: usize) -> Result<()> {
        let _ = (host, position);
        Err(Error::unsupported("truncation"))
    }

    /// Saves the state.
    fn snapshot(&mut self, host: &mut Host) -> Result<SnapshotId> {
        let _ = host;
        Err(Error::unsupported("snapshots"))
    }

    /// Returns to a saved state, which stays saved.
    fn restore(&mut self, host: &mut Host, snapshot: SnapshotId) -> Result<()> {
        let _ = (host, snapshot);
        Err(Error::unsupported("snapshots"))
    }

    /// Frees a saved state. An unknown id is ignored.
    fn drop_snapshot(&mut self, host: &mut Host, snapshot: SnapshotId) {
        let _ = (host, snapshot);
    }

    /// Embeds one text: pooling and normalisation are the op's. Answers with f32.
    fn embed(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let _ = (host, segments);
        Err(Error::unsupported("embedding"))
    }
}
