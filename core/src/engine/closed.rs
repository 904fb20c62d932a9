//! What stands in the place of a host-op that was closed and could not be opened again yet.

use std::time::Duration;

use crate::op::{HostOp, Logits, OpenInfo, Placement, Segment, SnapshotId, SpanStats};
use crate::workspace::GraphStats;
use crate::{Error, ErrorKind, Result};

/// Declares what the closed op declared, and does nothing.
pub(super) struct Closed {
    info: OpenInfo,
}

impl Closed {
    /// In the place of `op`.
    pub(super) fn new(op: &dyn HostOp) -> Self {
        Self { info: op.info().clone() }
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Usage, "the host-op is closed, since it could not be opened again")
        .hint("open it again with Model::reopen, or open the model again")
}

impl HostOp for Closed {
    fn info(&self) -> &OpenInfo {
        &self.info
    }

    fn place(&self, _: &Segment<'_>) -> Result<Placement> {
        Err(closed())
    }

    fn reset(&mut self) -> Result<()> {
        Ok(())
    }

    fn prefill(&mut self, _: &[Segment<'_>]) -> Result<()> {
        Err(closed())
    }

    fn decode(&mut self, _: u32) -> Result<()> {
        Err(closed())
    }

    fn verify(&mut self, _: &[u32]) -> Result<()> {
        Err(closed())
    }

    fn row_logits(&mut self, _: usize) -> Result<()> {
        Err(closed())
    }

    fn accept(&mut self, _: usize) -> Result<()> {
        Err(closed())
    }

    fn logits(&self) -> Result<Logits<'_>> {
        Err(closed())
    }

    fn position(&self) -> usize {
        0
    }

    fn truncate(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn snapshot(&mut self) -> Result<SnapshotId> {
        Err(closed())
    }

    fn restore(&mut self, _: SnapshotId) -> Result<()> {
        Err(closed())
    }

    fn drop_snapshot(&mut self, _: SnapshotId) {}

    fn embed(&mut self, _: &[Segment<'_>]) -> Result<&[f32]> {
        Err(closed())
    }

    fn embed_many(&mut self, _: &[&[u32]]) -> Result<&[f32]> {
        Err(closed())
    }

    fn graph_time(&self) -> Duration {
        Duration::ZERO
    }

    fn graph_stats(&self) -> Vec<GraphStats> {
        Vec::new()
    }

    fn span_stats(&self) -> Vec<SpanStats> {
        Vec::new()
    }
}
