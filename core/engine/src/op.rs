//! The host-op as the engine sees it.
//!
//! A host-op owns the step logic of one model family: it fills inputs, executes graphs in order
//! and carries state. It does not own the generation loop. Implementations come from plugins,
//! through `qhx-plugins`; the engine sees this trait only.

use std::sync::Arc;
use std::time::Duration;

use qhx_base::artifacts::Artifacts;
use qhx_base::{Error, Result, error};
use qhx_exec::Workspace;
use qhx_exec::workspace::GraphStats;

pub use qhx_exec::Logits;
pub use qhx_types::{
    Alpha, Answer, AudioRules, Bucket, ImageRules, LogitRules, MediaRules, Modality, OfTokens,
    OpDescription, OpenInfo, Packing, Piece, Placement, PromptRules, Segment, SnapshotId, SoundOut,
    Task, TimeRule, Verification, VideoRules,
    calls::{Call, Effect, Reply},
};
use serde::Serialize;

use crate::dump::Dump;
use crate::manifest::Manifest;

/// Time that an op spent in one of its own named parts.
#[derive(Debug, Clone, PartialEq)]
pub struct SpanStats {
    /// Name given by the op.
    pub name: String,
    /// Number of times it was entered.
    pub count: u64,
    /// Time inside it.
    pub busy: Duration,
}

/// States that went from one backend to another: see [`Model::decode_on`](crate::engine::Model::decode_on).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HandOvers {
    /// Number of hand-overs.
    pub count: u64,
    /// Bytes of all of them: used rows of caches, and replaced states.
    pub bytes: u64,
    /// Time that it took.
    pub busy: Duration,
}

impl HandOvers {
    /// Hand-overs since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            count: self.count.saturating_sub(before.count),
            bytes: self.bytes.saturating_sub(before.bytes),
            busy: self.busy.saturating_sub(before.busy),
        }
    }
}

/// The step logic of one model family over one open bundle.
///
/// An op answers [calls](Call); each has a method here, which makes it. A call that gives logits leaves them at
/// [`HostOp::logits`], one that gives other floats at [`HostOp::values`]. A call that an op does not have is an error
/// with the cause [`Unsupported`]. A failed or cancelled call leaves the state as it was after the last
/// complete token; see [`HostOp::position`].
///
/// Generating and embedding are calls of one trait: the engine holds one box for each open bundle, and what the op does
/// is found in its [`OpenInfo`].
pub trait HostOp: Send {
    /// Properties that the op found when it was opened. They do not change while the op is open.
    fn info(&self) -> &OpenInfo;

    /// Positions consumed so far.
    fn position(&self) -> usize;

    /// Place of an image, audio clip or video among the tokens of a prompt, and the number of positions it takes.
    /// Called before the segment is consumed, possibly more than once.
    ///
    /// # Errors
    /// When the op does not take the segment.
    fn place(&self, segment: Segment<'_>) -> Result<Placement>;

    /// Makes a call.
    ///
    /// # Errors
    /// The error of the op, also when it does not have the call.
    fn call(&mut self, call: Call<'_>) -> Result<Reply<()>>;

    /// Makes [`Call::Reset`].
    fn reset(&mut self) -> Result<()> {
        self.call(Call::Reset).map(drop)
    }

    /// Makes [`Call::Prefill`].
    fn prefill(&mut self, segments: &[Segment<'_>]) -> Result<()> {
        self.call(Call::Prefill(segments)).map(drop)
    }

    /// Makes [`Call::Decode`].
    fn decode(&mut self, token: u32) -> Result<()> {
        self.call(Call::Decode(token)).map(drop)
    }

    /// Makes [`Call::Truncate`].
    fn truncate(&mut self, position: usize) -> Result<()> {
        self.call(Call::Truncate(position)).map(drop)
    }

    /// Makes [`Call::Restore`].
    fn restore(&mut self, snapshot: SnapshotId) -> Result<()> {
        self.call(Call::Restore(snapshot)).map(drop)
    }

    /// Makes [`Call::Verify`].
    fn verify(&mut self, tokens: &[u32]) -> Result<()> {
        self.call(Call::Verify(tokens)).map(drop)
    }

    /// Makes [`Call::RowLogits`].
    fn row_logits(&mut self, row: usize) -> Result<()> {
        self.call(Call::RowLogits(row)).map(drop)
    }

    /// Makes [`Call::Accept`].
    fn accept(&mut self, count: usize) -> Result<()> {
        self.call(Call::Accept(count)).map(drop)
    }

    /// Makes [`Call::Drafting`].
    fn drafting(&mut self, on: bool) -> Result<()> {
        self.call(Call::Drafting(on)).map(drop)
    }

    /// Makes [`Call::Draft`].
    fn draft(&mut self, token: u32) -> Result<()> {
        self.call(Call::Draft(token)).map(drop)
    }

    /// Makes [`Call::ImportState`].
    fn import_state(&mut self, position: usize, state: &[u8]) -> Result<()> {
        self.call(Call::ImportState { position, state }).map(drop)
    }

    /// Makes [`Call::DropSnapshot`]. Errors are ignored: for the host, the state is gone.
    fn drop_snapshot(&mut self, snapshot: SnapshotId) {
        drop(self.call(Call::DropSnapshot(snapshot)));
    }

    /// Makes [`Call::Embed`].
    fn embed(&mut self, segments: &[Segment<'_>]) -> Result<&[f32]> {
        self.call(Call::Embed(segments))?;
        self.values()
    }

    /// Makes [`Call::EmbedMany`].
    fn embed_many(&mut self, texts: &[&[u32]]) -> Result<&[f32]> {
        self.call(Call::EmbedMany(texts))?;
        self.values()
    }

    /// Makes [`Call::EmbedTokens`].
    fn embed_tokens(&mut self, segments: &[Segment<'_>]) -> Result<&[f32]> {
        self.call(Call::EmbedTokens(segments))?;
        self.values()
    }

    /// Makes [`Call::Speak`].
    fn speak(&mut self, segments: &[Segment<'_>]) -> Result<&[f32]> {
        self.call(Call::Speak(segments))?;
        self.values()
    }

    /// Makes [`Call::Snapshot`].
    fn snapshot(&mut self) -> Result<SnapshotId> {
        match self.call(Call::Snapshot)? {
            Reply::Saved(given) => Ok(given),
            other => Err(unexpected("snapshot", &other)),
        }
    }

    /// Makes [`Call::ExportState`].
    fn export_state(&mut self) -> Result<Vec<u8>> {
        match self.call(Call::ExportState)? {
            Reply::State(given) => Ok(given),
            other => Err(unexpected("export_state", &other)),
        }
    }

    /// Makes [`Call::Note`].
    fn note(&mut self) -> Result<serde_json::Value> {
        match self.call(Call::Note)? {
            Reply::Note(given) => Ok(given),
            other => Err(unexpected("note", &other)),
        }
    }

    /// Makes [`Call::Answer`].
    fn answer(&mut self, segments: &[Segment<'_>]) -> Result<Answer> {
        match self.call(Call::Answer(segments))? {
            Reply::Answer(given) => Ok(given),
            other => Err(unexpected("answer", &other)),
        }
    }

    /// Logits of the last position consumed.
    ///
    /// # Errors
    /// When there are none.
    fn logits(&self) -> Result<Logits<'_>>;

    /// Vectors, scores or samples that the last call gave.
    ///
    /// # Errors
    /// When there are none.
    fn values(&self) -> Result<&[f32]>;

    /// Which graph writes the logits, and as which tensor, where that is known: for messages.
    fn logits_origin(&self) -> Option<String> {
        None
    }

    /// Time spent in graphs since the op was opened; none for an op without graphs.
    fn graph_time(&self) -> Duration {
        Duration::ZERO
    }

    /// Time and executions of every graph.
    fn graph_stats(&self) -> Vec<GraphStats> {
        Vec::new()
    }

    /// Executions that took far longer than their graph's median: see [`GraphStats::slow`].
    fn slow_executions(&self) -> u64 {
        self.graph_stats().iter().map(|graph| graph.slow).sum()
    }

    /// Time in the op's own parts.
    fn span_stats(&self) -> Vec<SpanStats> {
        Vec::new()
    }

    /// States that went from one backend to another since the op was opened; none where it is over one.
    fn hand_overs(&self) -> HandOvers {
        HandOvers::default()
    }
}

/// The cause of an error about a call that a host-op does not have: asking again is of no use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the host-op does not have the call")]
pub struct Unsupported;

/// An error of a reply that is another call's.
fn unexpected(call: &str, reply: &Reply<()>) -> Error {
    error!(Plugin, "the host-op's {call} gave {reply:?}")
}

/// Called with the positions of a prompt that are consumed, and their number.
pub type ProgressFn = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Services that a host-op is given when it is opened.
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
    /// Dump of the arrays that the op makes.
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

/// Origin of an op.
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
    /// The op's description of itself.
    pub description: OpDescription,
    /// Origin of the op.
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
