//! Placeholder for a host-op that was closed and could not be opened again yet.

use std::time::Duration;

use crate::op::{
    Answer, Bytes, HostOp, Logits, Number, OpenInfo, Placement, Segment, Segments, SnapshotId,
    SpanStats, Texts, Token, Tokens,
};
use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::workspace::GraphStats;

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

/// Going back succeeds, since a closed op is at position 0. Every other call fails.
macro_rules! closed {
    ($({
        $(#$doc:tt)* since $since:tt, $part:ident: $name:ident($($arg:ident: $ty:ty),*) $(-> $gives:ident)?,
        $effect:ident $($rest:tt)*
    })*) => {
        $(closed! { @ [$($gives)?] $effect $name($($arg: $ty),*) })*
    };
    (@ [] $effect:ident $name:ident($($arg:ident: $ty:ty),*)) => {
        fn $name(&mut self $(, _: $ty)*) {}
    };
    (@ [Position] $effect:ident $name:ident($($arg:ident: $ty:ty),*)) => {
        fn $name(&self $(, _: $ty)*) -> usize {
            0
        }
    };
    (@ [Done] At $name:ident($($arg:ident: $ty:ty),*)) => {
        fn $name(&mut self $(, _: $ty)*) -> Result<()> {
            Ok(())
        }
    };
    (@ [Done] BackTo $name:ident($($arg:ident: $ty:ty),*)) => {
        fn $name(&mut self $(, _: $ty)*) -> Result<()> {
            Ok(())
        }
    };
    (@ [Placed] $effect:ident $name:ident($($arg:ident: $ty:ty),*)) => {
        fn $name(&self $(, _: $ty)*) -> Result<Placement> {
            Err(closed())
        }
    };
    (@ [Exported] $effect:ident $name:ident()) => {
        fn $name(&mut self) -> Result<Vec<u8>> {
            Err(closed())
        }
    };
    (@ [Answered] $effect:ident $name:ident($($arg:ident: $ty:ty),*)) => {
        fn $name(&mut self $(, _: $ty)*) -> Result<Answer> {
            Err(closed())
        }
    };
    (@ [Noted] $effect:ident $name:ident()) => {
        fn $name(&mut self) -> Result<serde_json::Value> {
            Err(closed())
        }
    };
    (@ [Sound] $effect:ident $name:ident($($arg:ident: $ty:ty),*)) => {
        fn $name(&mut self $(, _: $ty)*) -> Result<&[f32]> {
            Err(closed())
        }
    };
    (@ [Saved] $effect:ident $name:ident($($arg:ident: $ty:ty),*)) => {
        fn $name(&mut self $(, _: $ty)*) -> Result<SnapshotId> {
            Err(closed())
        }
    };
    (@ [Vectors] $effect:ident $name:ident($($arg:ident: $ty:ty),*)) => {
        fn $name(&mut self $(, _: $ty)*) -> Result<&[f32]> {
            Err(closed())
        }
    };
    (@ [$done_or_logits:ident] $effect:ident $name:ident($($arg:ident: $ty:ty),*)) => {
        fn $name(&mut self $(, _: $ty)*) -> Result<()> {
            Err(closed())
        }
    };
}

impl HostOp for Closed {
    fn info(&self) -> &OpenInfo {
        &self.info
    }

    qhx_types::op_calls! { closed }

    fn logits(&self) -> Result<Logits<'_>> {
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
