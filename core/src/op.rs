//! The host-op as the engine sees it.
//!
//! A host-op owns the step logic of one model family: it fills inputs, executes graphs in order
//! and carries state. It does not own the generation loop. Implementations come from plugins,
//! through `qhx-plugins`; the engine sees this trait only.

use std::sync::Arc;
use std::time::Duration;

use half::f16;
use half::slice::HalfFloatSliceExt as _;
pub use qhx_types::{
    Alpha, AudioRules, Bucket, ImageRules, MediaRules, Modality, OpDescription, OpenInfo, Packing,
    Piece, Placement, Segment, Task, Verification, VideoRules,
};
use serde::Serialize;

use crate::artifacts::Artifacts;
use crate::dump::Dump;
use crate::manifest::Manifest;
use crate::workspace::GraphStats;
use crate::{Error, ErrorKind, Result, Workspace};

/// A saved state of a host-op.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SnapshotId(pub u64);

/// Logits of the last position, in the graph's own precision.
#[derive(Debug, Clone, Copy)]
pub enum Logits<'a> {
    /// Half precision.
    F16(&'a [f16]),
    /// Single precision.
    F32(&'a [f32]),
}

impl Logits<'_> {
    /// Number of logits.
    pub fn len(&self) -> usize {
        match self {
            Self::F16(values) => values.len(),
            Self::F32(values) => values.len(),
        }
    }

    /// True when there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy in single precision.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F16(values) => values.to_f32_vec(),
            Self::F32(values) => values.to_vec(),
        }
    }

    /// The scores, in single precision: `c · tanh(logits / c)` for a [`OpenInfo::softcap`] of c
    /// (arXiv 2408.00118, section 2), else the logits.
    pub fn capped(&self, softcap: Option<f32>) -> Vec<f32> {
        let mut values = self.to_f32();
        cap(&mut values, softcap);
        values
    }
}

/// Makes scores of logits, see [`Logits::capped`].
pub(crate) fn cap(values: &mut [f32], softcap: Option<f32>) {
    if let Some(cap) = softcap {
        values.iter_mut().for_each(|value| *value = cap * (*value / cap).tanh());
    }
}

/// Time that an op spent in one of its own named parts.
#[derive(Debug, Clone, PartialEq)]
pub struct SpanStats {
    /// Name given by the op.
    pub name: String,
    /// How often it was entered.
    pub count: u64,
    /// Time inside it.
    pub busy: Duration,
}

/// The step logic of one model family over one open bundle.
///
/// A failed or cancelled call leaves the state as it was after the last complete token; see
/// [`HostOp::position`].
pub trait HostOp: Send {
    /// What the op found when it was opened. It does not change while the op is open.
    fn info(&self) -> &OpenInfo;

    /// Where an image, audio clip or video stands among the tokens of a prompt, and how many positions it
    /// takes.
    ///
    /// # Errors
    /// When the op does not take it.
    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        let _ = segment;
        Err(Error::new(ErrorKind::Prompt, "the host-op takes text only")
            .hint("leave the pictures, sounds and videos out, or use a bundle that takes them"))
    }

    /// Forgets everything: position 0.
    ///
    /// # Errors
    /// The error of the op.
    fn reset(&mut self) -> Result<()>;

    /// Consumes segments. Afterwards [`HostOp::logits`] are those of the last position.
    ///
    /// # Errors
    /// The error of the op.
    fn prefill(&mut self, segments: &[Segment<'_>]) -> Result<()>;

    /// Consumes one token. Afterwards [`HostOp::logits`] are those of its position.
    ///
    /// # Errors
    /// The error of the op.
    fn decode(&mut self, token: u32) -> Result<()>;

    /// Runs tokens, at most as many as the widest of [`OpenInfo::verification`], in one step. The position stays:
    /// nothing is accepted until [`HostOp::accept`]. There are no logits until [`HostOp::row_logits`].
    ///
    /// # Errors
    /// The error of the op, also when it verifies no draft tokens.
    fn verify(&mut self, tokens: &[u32]) -> Result<()> {
        Err(not_checked(tokens.len()))
    }

    /// Makes [`HostOp::logits`] those of the position of token `row` of the last [`HostOp::verify`].
    ///
    /// # Errors
    /// The error of the op, also when it verifies no draft tokens.
    fn row_logits(&mut self, row: usize) -> Result<()> {
        Err(not_checked(row))
    }

    /// Keeps the first `count` tokens of the last [`HostOp::verify`]: the state is as if they alone had been
    /// consumed. The logits stay those of the last row that was asked for.
    ///
    /// # Errors
    /// The error of the op, also when it verifies no draft tokens.
    fn accept(&mut self, count: usize) -> Result<()> {
        Err(not_checked(count))
    }

    /// Logits of the last position consumed.
    ///
    /// # Errors
    /// When there are none.
    fn logits(&self) -> Result<Logits<'_>>;

    /// Which graph writes the logits, and as which tensor, where that is known: for messages.
    fn logits_origin(&self) -> Option<String> {
        None
    }

    /// Positions consumed so far.
    fn position(&self) -> usize;

    /// Forgets all positions from `position` on.
    ///
    /// # Errors
    /// The error of the op.
    fn truncate(&mut self, position: usize) -> Result<()>;

    /// Saves the state.
    ///
    /// # Errors
    /// The error of the op.
    fn snapshot(&mut self) -> Result<SnapshotId>;

    /// Returns to a saved state, which stays saved.
    ///
    /// # Errors
    /// The error of the op.
    fn restore(&mut self, snapshot: SnapshotId) -> Result<()>;

    /// Frees a saved state. An unknown id is ignored.
    fn drop_snapshot(&mut self, snapshot: SnapshotId);

    /// Embeds one text: pooling and normalisation are the op's.
    ///
    /// # Errors
    /// The error of the op.
    fn embed(&mut self, segments: &[Segment<'_>]) -> Result<&[f32]>;

    /// Embeds texts in one execution, as if each were alone. Together they have at most as many tokens as the longest
    /// of [`OpenInfo::packing`]. The vectors lie one behind the other, [`OpenInfo::embedding_dim`] values each.
    ///
    /// # Errors
    /// The error of the op.
    fn embed_many(&mut self, texts: &[&[u32]]) -> Result<&[f32]> {
        let message = format!("the host-op embeds one text at a time ({})", texts.len());
        Err(Error::new(ErrorKind::Internal, message))
    }

    /// Time spent in graphs since the op was opened.
    fn graph_time(&self) -> Duration;

    /// Time and executions of every graph.
    fn graph_stats(&self) -> Vec<GraphStats>;

    /// Time in the op's own parts.
    fn span_stats(&self) -> Vec<SpanStats>;
}

/// A call of an op whose [`OpenInfo::verification`] declares that it has none.
fn not_checked(number: usize) -> Error {
    let message = format!("the host-op checks no guessed tokens ({number})");
    Error::new(ErrorKind::Internal, message)
}

/// Called with the positions of a prompt that are consumed, and their number.
pub type ProgressFn = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// What a host-op is given when it is opened.
pub struct OpServices {
    /// The manifest, with unknown keys.
    pub manifest: Arc<Manifest>,
    /// The bundle's files.
    pub artifacts: Artifacts,
    /// Graphs of all contexts, nothing bound yet.
    pub workspace: Workspace,
    /// Threads for `parallel_for`.
    pub threads: Arc<rayon::ThreadPool>,
    /// Called with (positions consumed, total) during prefill.
    pub progress: Option<ProgressFn>,
    /// Where arrays go that the op makes.
    pub dump: Option<Arc<Dump>>,
}

impl std::fmt::Debug for OpServices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpServices")
            .field("manifest", &self.manifest.path)
            .field("workspace", &self.workspace)
            .field("threads", &self.threads.current_num_threads())
            .finish_non_exhaustive()
    }
}

/// Where an op comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OpSource {
    /// Linked into this program.
    Builtin,
    /// Loaded from this file.
    Plugin(std::path::PathBuf),
}

/// An op that can be opened.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OpEntry {
    /// What the op declares about itself.
    pub description: OpDescription,
    /// Where it comes from.
    pub source: OpSource,
}

/// Opens one host-op, as often as it is needed: again after it panicked or its device was lost.
pub type OpOpener = Arc<dyn Fn(OpServices) -> Result<Box<dyn HostOp>> + Send + Sync>;

/// Finds host-ops by name.
pub trait OpProvider {
    /// Every op that can be opened, sorted by name.
    fn list(&self) -> Vec<OpEntry>;

    /// Finds an op. The error lists what is installed.
    fn find(&self, name: &str) -> Result<OpEntry>;

    /// Checks what a manifest gives the op in `plan.params` against the op's own description of it.
    /// The error names the key, what was found and what was expected. A provider that reads no
    /// descriptions checks nothing.
    fn check_params(&self, entry: &OpEntry, manifest: &Manifest) -> Result<()> {
        let _ = (entry, manifest);
        Ok(())
    }

    /// Returns what opens an op over a bundle. The error lists what is installed.
    fn opener(&self, name: &str) -> Result<OpOpener>;

    /// Opens an op over a bundle, once.
    fn open(&self, name: &str, services: OpServices) -> Result<Box<dyn HostOp>> {
        self.opener(name)?(services)
    }
}
