//! A host-op, held to what every host-op promises.
//!
//! An op that forgets to count a token, or returns to another state than it was asked for, would give
//! a wrong text and no error. Here such an op is named.

use std::time::Duration;

use super::closed::Closed;
use crate::op::{HostOp, Logits, OpenInfo, Placement, Segment, SnapshotId, SpanStats};
use crate::workspace::GraphStats;
use crate::{Error, ErrorKind, Result};

/// Checks an op after every call that succeeds. A call that fails is its own error.
pub(super) struct Checked {
    op: Box<dyn HostOp>,
    name: String,
    /// Positions of saved states.
    saved: Vec<(SnapshotId, usize)>,
    is_closed: bool,
    /// What closed ops counted.
    graph_time: Duration,
    graph_stats: Vec<GraphStats>,
    span_stats: Vec<SpanStats>,
}

impl Checked {
    /// Checks `op`, which messages call `name`.
    pub(super) fn new(op: Box<dyn HostOp>, name: &str) -> Self {
        Self {
            op,
            name: name.to_owned(),
            saved: Vec::new(),
            is_closed: false,
            graph_time: Duration::ZERO,
            graph_stats: Vec::new(),
            span_stats: Vec::new(),
        }
    }

    /// Closes the op, with its buffers and saved states. What it counted counts on.
    pub(super) fn close(&mut self) {
        (self.graph_time, self.graph_stats, self.span_stats) =
            (self.graph_time(), self.graph_stats(), self.span_stats());
        self.saved.clear();
        self.is_closed = true;
        let closed = Closed::new(&*self.op);
        self.op = Box::new(closed);
    }

    /// Goes on with an op that was opened in the place of the closed one.
    pub(super) fn replace(&mut self, op: Box<dyn HostOp>) {
        (self.op, self.is_closed) = (op, false);
    }

    /// True until a closed op is replaced.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// What the op did wrong, and what its author may have forgotten.
    fn wrong(&self, what: impl std::fmt::Display, forgotten: &str) -> Error {
        let message = format!("host-op {:?}: {what}", self.name);
        Error::new(ErrorKind::Plugin, message)
            .hint(format!("{forgotten}; this is a fault of the op, report it to its author"))
    }

    fn expect_position(&self, expected: usize, call: &str) -> Result<()> {
        let found = self.op.position();
        if found == expected {
            return Ok(());
        }
        let what = format!("after {call} its position is {found}, expected {expected}");
        Err(self.wrong(what, "it forgot to set its position"))
    }

    /// After a call that consumed segments, of which there were `positions` if that is known.
    fn expect_consumed(&self, before: usize, positions: Option<usize>, call: &str) -> Result<()> {
        let found = self.op.position();
        let (right, expected) = match positions {
            Some(positions) => (found == before + positions, (before + positions).to_string()),
            None => (found > before, format!("more than {before}")),
        };
        if !right {
            let what = format!(
                "after {call} at position {before} its position is {found}, expected {expected}"
            );
            let more = positions.is_some_and(|positions| found > before + positions);
            return Err(self.wrong(
                what,
                if more {
                    "it consumed more positions than `place` said, or counted them twice"
                } else {
                    "it forgot to commit its state"
                },
            ));
        }
        let (found, declared) = (self.op.logits()?.len(), self.op.info().vocab);
        if found != declared {
            let what = format!("{call} gave {found} logits, but its info says {declared}");
            return Err(self.wrong(what, "its OpenInfo.vocab is not the number of logits"));
        }
        Ok(())
    }

    /// Consumes segments that take `positions`, as the op declared when it placed them.
    pub(super) fn consume(&mut self, segments: &[Segment<'_>], positions: usize) -> Result<()> {
        let before = self.op.position();
        self.op.prefill(segments)?;
        self.expect_consumed(before, Some(positions), "a prompt")
    }

    /// Errors unless the op declared how many logits it gives.
    pub(super) fn require_logits(&self) -> Result<()> {
        match self.op.info().vocab {
            0 => {
                Err(self
                    .wrong("it generates, but its info says 0 logits", "it forgot OpenInfo.vocab"))
            }
            _ => Ok(()),
        }
    }

    /// An error of choosing among the op's logits, with where they are from.
    pub(super) fn about_logits(&self, error: Error) -> Error {
        let place = self.op.logits_origin().unwrap_or_else(|| "logits".to_owned());
        let position = self.op.position();
        error.context(format_args!("host-op {:?}, {place}, position {position}", self.name))
    }
}

/// Errors for a vector that is near nothing: one with a value that is not finite, or only zeros.
fn check_embedding(name: &str, vector: &[f32]) -> Result<()> {
    let wrong = |what: String, why: &str| {
        Err(Error::new(ErrorKind::Execute, format!("host-op {name:?}: {what}")).hint(why))
    };
    if let Some(index) = vector.iter().position(|value| !value.is_finite()) {
        let (value, count) = (vector[index], vector.len());
        return wrong(
            format!(
                "value {index} of the embedding's {count} is {value}, expected a finite number"
            ),
            "a graph overflowed or a weight file is damaged; `qhx verify` checks the files",
        );
    }
    if vector.iter().all(|value| *value == 0.0) {
        return wrong(
            format!("all {} values of the embedding are 0", vector.len()),
            "the last graph did not write its output, or a weight file is damaged; `qhx verify` \
             checks the files",
        );
    }
    Ok(())
}

/// Positions that segments take, when they are all text: a token takes one. How many an image or
/// audio takes is the op's to know.
fn positions(segments: &[Segment<'_>]) -> Option<usize> {
    let tokens = |segment: &Segment<'_>| match segment {
        Segment::Tokens(tokens) => Some(tokens.len()),
        _ => None,
    };
    segments.iter().map(tokens).sum()
}

impl HostOp for Checked {
    fn info(&self) -> &OpenInfo {
        self.op.info()
    }

    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        self.op.place(segment)
    }

    fn reset(&mut self) -> Result<()> {
        self.op.reset()?;
        self.expect_position(0, "a reset")
    }

    fn prefill(&mut self, segments: &[Segment<'_>]) -> Result<()> {
        let before = self.op.position();
        self.op.prefill(segments)?;
        self.expect_consumed(before, positions(segments), "a prompt")
    }

    fn decode(&mut self, token: u32) -> Result<()> {
        let before = self.op.position();
        self.op.decode(token)?;
        self.expect_consumed(before, Some(1), "one token")
    }

    fn verify(&mut self, tokens: &[u32]) -> Result<()> {
        let before = self.op.position();
        self.op.verify(tokens)?;
        self.expect_position(before, "checking guesses")
    }

    fn row_logits(&mut self, row: usize) -> Result<()> {
        self.op.row_logits(row)?;
        let (found, declared) = (self.op.logits()?.len(), self.op.info().vocab);
        if found != declared {
            let what = format!("a guess gave {found} logits, but its info says {declared}");
            return Err(self.wrong(what, "its OpenInfo.vocab is not the number of logits"));
        }
        Ok(())
    }

    fn accept(&mut self, count: usize) -> Result<()> {
        let before = self.op.position();
        self.op.accept(count)?;
        self.expect_position(before + count, "keeping the right guesses")
    }

    fn logits(&self) -> Result<Logits<'_>> {
        self.op.logits()
    }

    fn logits_origin(&self) -> Option<String> {
        self.op.logits_origin()
    }

    fn position(&self) -> usize {
        self.op.position()
    }

    fn truncate(&mut self, position: usize) -> Result<()> {
        let expected = position.min(self.op.position());
        self.op.truncate(position)?;
        self.expect_position(expected, "forgetting what lies behind")
    }

    fn snapshot(&mut self) -> Result<SnapshotId> {
        let position = self.op.position();
        let id = self.op.snapshot()?;
        self.expect_position(position, "saving its state")?;
        self.saved.retain(|(saved, _)| *saved != id);
        self.saved.push((id, position));
        Ok(id)
    }

    fn restore(&mut self, snapshot: SnapshotId) -> Result<()> {
        self.op.restore(snapshot)?;
        match self.saved.iter().find(|(saved, _)| *saved == snapshot) {
            Some((_, position)) => self.expect_position(*position, "returning to a saved state"),
            None => Ok(()),
        }
    }

    fn drop_snapshot(&mut self, snapshot: SnapshotId) {
        self.saved.retain(|(saved, _)| *saved != snapshot);
        self.op.drop_snapshot(snapshot);
    }

    fn embed(&mut self, segments: &[Segment<'_>]) -> Result<&[f32]> {
        let vector = self.op.embed(segments)?;
        check_embedding(&self.name, vector)?;
        Ok(vector)
    }

    fn embed_many(&mut self, texts: &[&[u32]]) -> Result<&[f32]> {
        let dim = self.op.info().embedding_dim;
        let vectors = self.op.embed_many(texts)?;
        if dim == 0 || Some(vectors.len()) != dim.checked_mul(texts.len()) {
            let message = format!(
                "host-op {:?}: {} texts gave {} values, expected {dim} for each; this is a fault of the op, report it \
                 to its author",
                self.name,
                texts.len(),
                vectors.len()
            );
            return Err(Error::new(ErrorKind::Plugin, message));
        }
        vectors.chunks_exact(dim).try_for_each(|vector| check_embedding(&self.name, vector))?;
        Ok(vectors)
    }

    fn graph_time(&self) -> Duration {
        self.graph_time + self.op.graph_time()
    }

    fn graph_stats(&self) -> Vec<GraphStats> {
        let mut stats = self.op.graph_stats();
        for earlier in &self.graph_stats {
            let same =
                |s: &&mut GraphStats| (&s.context, &s.graph) == (&earlier.context, &earlier.graph);
            match stats.iter_mut().find(same) {
                Some(stats) => {
                    stats.executions += earlier.executions;
                    stats.busy += earlier.busy;
                }
                None => stats.push(earlier.clone()),
            }
        }
        stats
    }

    fn span_stats(&self) -> Vec<SpanStats> {
        let mut stats = self.op.span_stats();
        for earlier in &self.span_stats {
            match stats.iter_mut().find(|stats| stats.name == earlier.name) {
                Some(stats) => {
                    stats.count += earlier.count;
                    stats.busy += earlier.busy;
                }
                None => stats.push(earlier.clone()),
            }
        }
        stats
    }
}
