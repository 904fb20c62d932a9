//! A host-op, held to what every host-op promises.
//!
//! An op that forgets to count a token, or returns to another state than it was asked for, would give
//! a wrong text and no error. Here such an op is named.

use std::time::Duration;

use super::closed::Closed;
use crate::op::{
    Answer, Call, Effect, HandOvers, HostOp, Logits, OpenInfo, Placement, Reply, Segment,
    SnapshotId, SpanStats,
};
use qhx_base::{Error, Result, bail, error};
use qhx_exec::workspace::GraphStats;

/// Checks an op after every call that succeeds. A call that fails is its own error.
pub(super) struct Checked {
    op: Box<dyn HostOp>,
    name: String,
    /// Positions of saved states.
    saved: Vec<(SnapshotId, usize)>,
    is_closed: bool,
    /// Times and counts of closed ops.
    graph_time: Duration,
    graph_stats: Vec<GraphStats>,
    span_stats: Vec<SpanStats>,
    /// Counts of the op that were forgotten.
    forgotten: (Vec<GraphStats>, Vec<SpanStats>),
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
            forgotten: Default::default(),
        }
    }

    /// Closes the op, with its buffers and saved states. What it counted counts on.
    pub(super) fn close(&mut self) {
        (self.graph_time, self.graph_stats, self.span_stats) =
            (self.graph_time(), self.graph_stats(), self.span_stats());
        self.forgotten = Default::default();
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

    /// Counts executions and times from now on.
    pub(super) fn forget_counts(&mut self) {
        (self.graph_stats, self.span_stats) = Default::default();
        self.forgotten = (self.op.graph_stats(), self.op.span_stats());
    }

    /// Error about a fault of the op, with a hint at what its author may have forgotten.
    fn wrong(&self, what: impl std::fmt::Display, forgotten: &str) -> Error {
        error!(Plugin, "host-op {:?}: {what}", self.name)
            .hint(format!("{forgotten}; this is a fault of the op, report it to its author"))
    }

    /// The position before a call, where its effect is on that.
    fn before(&self, effect: Effect) -> usize {
        match effect {
            Effect::Nothing | Effect::Drops(_) | Effect::Embeds(_) => 0,
            _ => self.op.position(),
        }
    }

    /// After a call that began at the position `before`.
    fn expect(&self, effect: Effect, before: usize, call: &str) -> Result<()> {
        let saved = |id| self.saved.iter().find(|(saved, _)| *saved == id).map(|(_, at)| *at);
        let expected = match effect {
            Effect::Consumes(positions) => return self.expect_consumed(before, positions, call),
            Effect::At(position) | Effect::Imports(position) => Some(position),
            Effect::BackTo(position) => Some(position.min(before)),
            Effect::Stays | Effect::Drafts => Some(before),
            Effect::Accepts(count) => Some(before + count),
            Effect::Returns(snapshot) => saved(snapshot),
            Effect::Nothing | Effect::Drops(_) | Effect::Embeds(_) => None,
        };
        let Some(expected) = expected else { return Ok(()) };
        let found = self.op.position();
        if found == expected {
            return Ok(());
        }
        let what = format!("after {call} its position is {found}, expected {expected}");
        Err(self.wrong(what, "it forgot to set its position"))
    }

    /// After a call that gave logits.
    fn expect_logits(&self, call: &str) -> Result<()> {
        let (found, declared) = (self.op.logits()?.len(), self.op.info().vocab);
        if found != declared {
            let what = format!("{call} gave {found} logits, but its info says {declared}");
            return Err(self.wrong(what, "its OpenInfo.vocab is not the number of logits"));
        }
        Ok(())
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
        Ok(())
    }

    /// Consumes segments that take `positions`, as the op declared when it placed them.
    pub(super) fn consume(&mut self, segments: &[Segment<'_>], positions: usize) -> Result<()> {
        let before = self.op.position();
        self.op.call(Call::Prefill(segments))?;
        self.expect_consumed(before, Some(positions), "prefill")?;
        self.expect_logits("prefill")
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

/// Adds what `others` counted.
pub(super) fn add_spans(stats: &mut Vec<SpanStats>, others: &[SpanStats]) {
    for other in others {
        match stats.iter_mut().find(|stats| stats.name == other.name) {
            Some(stats) => {
                stats.count += other.count;
                stats.busy += other.busy;
            }
            None => stats.push(other.clone()),
        }
    }
}

/// Takes away what was counted `before`.
pub(super) fn subtract_spans(stats: &mut [SpanStats], before: &[SpanStats]) {
    for span in stats {
        if let Some(before) = before.iter().find(|before| before.name == span.name) {
            span.count = span.count.saturating_sub(before.count);
            span.busy = span.busy.saturating_sub(before.busy);
        }
    }
}

/// Errors for values of which one is not finite.
fn check_finite(name: &str, what: &str, values: &[f32]) -> Result<()> {
    let Some(index) = values.iter().position(|value| !value.is_finite()) else { return Ok(()) };
    let (value, count) = (values[index], values.len());
    Err(error!(
        Execute,
        "host-op {name:?}: value {index} of {what}'s {count} is {value}, expected a finite number"
    )
    .hint("a graph overflowed or a weight file is damaged; `qhx verify` checks the files"))
}

/// Errors for a vector that is near nothing: one with a value that is not finite, or only zeros.
fn check_embedding(name: &str, vector: &[f32]) -> Result<()> {
    check_finite(name, "the embedding", vector)?;
    if vector.iter().all(|value| *value == 0.0) {
        return Err(error!(
            Execute,
            "host-op {name:?}: all {} values of the embedding are 0",
            vector.len()
        )
        .hint(
            "the last graph did not write its output, or a weight file is damaged; `qhx verify` \
             checks the files",
        ));
    }
    Ok(())
}

/// Errors for scores of which one is not finite.
fn check_scores(name: &str, scores: &[f32]) -> Result<()> {
    check_finite(name, "the scores", scores)
}

/// Errors for an answer whose times are not those of its tokens.
fn check_answer(name: &str, answer: &Answer) -> Result<()> {
    let Answer { tokens, times, .. } = answer;
    let fault = |what: String| {
        Err(error!(
            Plugin,
            "host-op {name:?}: {what}; this is a fault of the op, report it to its author"
        ))
    };
    if !times.is_empty() && times.len() != tokens.len() {
        return fault(format!("answer gave {} times for {} tokens", times.len(), tokens.len()));
    }
    match times.iter().position(|[start, end]| !(0.0 <= *start && start <= end && end.is_finite()))
    {
        Some(at) => fault(format!(
            "answer gave token {at} the times {:?}, expected a beginning and an end",
            times[at]
        )),
        None => Ok(()),
    }
}

/// Errors for vectors of other than `dim` values each, and for those that `check` refuses.
fn check_vectors(
    name: &str,
    call: &str,
    texts: usize,
    dim: usize,
    vectors: &[f32],
    check: fn(&str, &[f32]) -> Result<()>,
) -> Result<()> {
    // One vector may be of any length where the op declares none.
    if texts == 1 && dim == 0 {
        return check(name, vectors);
    }
    if dim == 0 || Some(vectors.len()) != dim.checked_mul(texts) {
        bail!(
            Plugin,
            "host-op {name:?}: {call} of {texts} texts gave {} values, expected {dim} for each; this is a fault of the \
             op, report it to its author",
            vectors.len()
        );
    }
    vectors.chunks_exact(dim).try_for_each(|vector| check(name, vector))
}

impl HostOp for Checked {
    fn info(&self) -> &OpenInfo {
        self.op.info()
    }

    fn position(&self) -> usize {
        self.op.position()
    }

    fn place(&self, segment: Segment<'_>) -> Result<Placement> {
        self.op.place(segment)
    }

    fn call(&mut self, call: Call<'_>) -> Result<Reply<()>> {
        let (effect, name) = (call.effect(), call.name());
        if let Effect::Drops(snapshot) = effect {
            self.saved.retain(|(saved, _)| *saved != snapshot);
        }
        let before = self.before(effect);
        let reply = self.op.call(call)?;
        self.expect(effect, before, name)?;
        match &reply {
            Reply::Floats(()) if call.gives_logits() => self.expect_logits(name)?,
            Reply::Floats(()) if matches!(call, Call::EmbedTokens(_)) => {
                let Call::EmbedTokens(segments) = call else { return Ok(reply) };
                let (info, values) = (self.op.info(), self.op.values()?);
                let tokens = qhx_types::calls::positions(segments).unwrap_or(0);
                let expected = info.embedding_dim.saturating_add(info.of_tokens.values(tokens));
                let Some((vector, of_tokens)) = values
                    .split_at_checked(info.embedding_dim)
                    .filter(|_| values.len() == expected)
                else {
                    let what = format!("{name} of {tokens} tokens gave {} values", values.len());
                    let declared = format!("its OpenInfo.of_tokens declares {expected}");
                    return Err(self.wrong(what, &declared));
                };
                check_embedding(&self.name, vector)?;
                check_finite(&self.name, "the tokens", of_tokens)?;
            }
            Reply::Floats(()) if effect == Effect::Nothing => {
                check_finite(&self.name, "the audio", self.op.values()?)?;
            }
            Reply::Floats(()) => {
                let (texts, info) = (effect.texts(), self.op.info());
                // A score of 0 is one.
                let check = if info.scores > 0 { check_scores } else { check_embedding };
                let vectors = self.op.values()?;
                check_vectors(&self.name, name, texts, info.values(), vectors, check)?;
            }
            Reply::Saved(id) => {
                self.saved.retain(|(saved, _)| saved != id);
                self.saved.push((*id, before));
            }
            Reply::Answer(answer) => check_answer(&self.name, answer)?,
            Reply::Done | Reply::State(_) | Reply::Note(_) => {}
        }
        Ok(reply)
    }

    fn logits(&self) -> Result<Logits<'_>> {
        self.op.logits()
    }

    fn values(&self) -> Result<&[f32]> {
        self.op.values()
    }

    fn logits_origin(&self) -> Option<String> {
        self.op.logits_origin()
    }

    fn graph_time(&self) -> Duration {
        self.graph_time + self.op.graph_time()
    }

    fn graph_stats(&self) -> Vec<GraphStats> {
        let mut stats = self.op.graph_stats();
        for (stats, forgotten) in stats.iter_mut().zip(&self.forgotten.0) {
            stats.executions = stats.executions.saturating_sub(forgotten.executions);
            stats.busy = stats.busy.saturating_sub(forgotten.busy);
            stats.slow = stats.slow.saturating_sub(forgotten.slow);
            stats.shared = stats.shared.saturating_sub(forgotten.shared);
        }
        for earlier in &self.graph_stats {
            let same =
                |s: &&mut GraphStats| (&s.context, &s.graph) == (&earlier.context, &earlier.graph);
            match stats.iter_mut().find(same) {
                Some(stats) => {
                    stats.executions += earlier.executions;
                    stats.busy += earlier.busy;
                    stats.slow += earlier.slow;
                    stats.shared += earlier.shared;
                }
                None => stats.push(earlier.clone()),
            }
        }
        stats
    }

    fn span_stats(&self) -> Vec<SpanStats> {
        let mut stats = self.op.span_stats();
        subtract_spans(&mut stats, &self.forgotten.1);
        add_spans(&mut stats, &self.span_stats);
        stats
    }

    fn hand_overs(&self) -> HandOvers {
        self.op.hand_overs()
    }
}
