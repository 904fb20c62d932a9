//! Placeholder for a host-op that was closed and could not be opened again yet.

use crate::op::{Call, Effect, HostOp, Logits, OpenInfo, Placement, Reply, Segment};
use qhx_base::{Error, Result, error};

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
    error!(Usage, "the host-op is closed, since it could not be opened again")
        .hint("open it again with Model::reopen, or open the model again")
}

impl HostOp for Closed {
    fn info(&self) -> &OpenInfo {
        &self.info
    }

    fn position(&self) -> usize {
        0
    }

    fn place(&self, _: Segment<'_>) -> Result<Placement> {
        Err(closed())
    }

    /// Going back succeeds, since a closed op is at position 0. Every other call fails.
    fn call(&mut self, call: Call<'_>) -> Result<Reply<()>> {
        match call.effect() {
            Effect::At(_) | Effect::BackTo(_) | Effect::Drops(_) => Ok(Reply::Done),
            _ => Err(closed()),
        }
    }

    fn logits(&self) -> Result<Logits<'_>> {
        Err(closed())
    }

    fn values(&self) -> Result<&[f32]> {
        Err(closed())
    }
}
