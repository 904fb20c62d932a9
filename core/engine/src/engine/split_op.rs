//! A host-op over two backends: one consumes prompts, the other the tokens of answers, from one state (prefill and
//! decode apart: Zhong et al. 2024, arXiv 2401.09670).
//!
//! The op is opened once over each. The state is that of one of the two, and goes to the other as the bytes that the op
//! exports: the used rows of caches, and replaced states.
//!
//! | what comes | where it is consumed |
//! |---|---|
//! | a token, draft tokens | on the backend for tokens |
//! | a prompt of 32 positions or more, or one with images, audio or videos | on the backend for prompts |
//! | a shorter one | where the state is |
//!
//! A snapshot stays where it was taken, and returning to it moves nothing.
//!
//! A state that the other backend refuses, such as one with values beyond its f16, is forgotten ([`Refused`]): the
//! engine has what it stands for consumed again where it is needed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::checked::add_spans;
use super::prefix_cache::WORTH;
use crate::op::{
    Call, Effect, HandOvers, HostOp, Logits, OpenInfo, Placement, Reply, Segment, SnapshotId,
    SpanStats,
};
use qhx_base::trace::{self, Trace};
use qhx_base::{ErrorKind, Result, error};
use qhx_exec::workspace::GraphStats;

/// One of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Prompt,
    Tokens,
}

/// An op with the name of its backend.
struct Opened {
    op: Box<dyn HostOp>,
    backend: String,
}

/// A snapshot of one of the ops, by the id that the engine knows.
#[derive(Debug, Clone, Copy)]
struct Saved {
    id: SnapshotId,
    side: Side,
    of_op: SnapshotId,
}

/// The cause of an error about a state that went over to no backend: both ops are empty.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the state was not handed over")]
pub(super) struct Refused;

/// The two ops as one.
pub(super) struct SplitOp {
    info: OpenInfo,
    prompt: Opened,
    tokens: Opened,
    /// Whose state it is.
    at: Side,
    /// The backend for tokens refused the state: it consumes everything until the op is reset.
    alone: bool,
    saved: Vec<Saved>,
    /// The id of the next snapshot.
    next: u64,
    counts: HandOvers,
    trace: Option<Arc<Trace>>,
}

impl SplitOp {
    /// Makes one op of `prompt` and `tokens`, each with the name of its backend.
    ///
    /// # Errors
    /// When the two differ in what their states and logits are.
    pub(super) fn new(
        prompt: (Box<dyn HostOp>, &str),
        tokens: (Box<dyn HostOp>, &str),
        trace: Option<Arc<Trace>>,
    ) -> Result<Self> {
        let opened =
            |(op, backend): (Box<dyn HostOp>, &str)| Opened { op, backend: backend.to_owned() };
        let (prompt, tokens) = (opened(prompt), opened(tokens));
        let of = |opened: &Opened| {
            let OpenInfo { vocab, input_vocab, max_ctx, can_truncate, can_snapshot, .. } =
                *opened.op.info();
            [
                ("logits", vocab),
                ("tokens of the embedding table", input_vocab),
                ("positions", max_ctx),
                ("states that can be truncated", can_truncate.into()),
                ("states that can be saved", can_snapshot.into()),
            ]
        };
        let mut both = of(&prompt).into_iter().zip(of(&tokens));
        if let Some(((what, on_prompt), (_, on_tokens))) = both.find(|(a, b)| a != b) {
            let (first, second) = (&prompt.backend, &tokens.backend);
            return Err(error!(
                Graph,
                "prompts on {first}, tokens on {second}: found {on_prompt} {what} on {first} and {on_tokens} on \
                 {second}, expected the same graphs for both"
            )
            .hint("the context binaries and the ONNX graphs are of different models"));
        }
        // Draft tokens are made and verified there.
        let OpenInfo { verification, drafts, .. } = tokens.op.info().clone();
        let drafts = drafts && prompt.op.info().drafts;
        let info = OpenInfo { verification, drafts, ..prompt.op.info().clone() };
        let (at, saved, counts) = (Side::Prompt, Vec::new(), HandOvers::default());
        Ok(Self { info, prompt, tokens, at, alone: false, saved, next: 0, counts, trace })
    }

    fn side(&self, side: Side) -> &Opened {
        match side {
            Side::Prompt => &self.prompt,
            Side::Tokens => &self.tokens,
        }
    }

    fn op_of(&mut self, side: Side) -> &mut dyn HostOp {
        match side {
            Side::Prompt => &mut *self.prompt.op,
            Side::Tokens => &mut *self.tokens.op,
        }
    }

    /// The op whose state it is, once the state is where a call with this effect belongs.
    fn ready(&mut self, effect: Effect) -> Result<&mut dyn HostOp> {
        let side = match effect {
            Effect::Consumes(_) | Effect::Drafts if self.alone => Side::Tokens,
            Effect::Consumes(Some(1)) | Effect::Drafts => Side::Tokens,
            Effect::Consumes(Some(count)) if count < WORTH => self.at,
            Effect::Consumes(_) => Side::Prompt,
            _ => self.at,
        };
        if side != self.at {
            self.hand_over(side)?;
        }
        Ok(self.op_of(side))
    }

    /// Moves the state. Where that fails, it is forgotten.
    fn hand_over(&mut self, to: Side) -> Result<()> {
        let trace = self.trace.clone();
        let _span = trace::span(trace.as_ref(), "hand over");
        let (start, position) = (Instant::now(), self.position());
        let moved = (|| {
            if position == 0 {
                return self.op_of(to).reset().map(|()| 0);
            }
            let state = self.op_of(self.at).export_state()?;
            self.op_of(to).import_state(position, &state)?;
            Ok(state.len())
        })();
        let bytes = match moved {
            Ok(bytes) => bytes,
            Err(e) => {
                let (from, name) = (&self.side(self.at).backend, &self.side(to).backend);
                let e = e.context(format_args!("handing the state over from {from} to {name}"));
                let ends = [ErrorKind::Cancelled, ErrorKind::DeviceLost, ErrorKind::Panicked];
                if ends.contains(&e.kind()) {
                    return Err(e);
                }
                self.op_of(self.at).reset()?;
                self.op_of(to).reset()?;
                (self.at, self.alone) = (to, to == Side::Tokens);
                return Err(e.with_kind(ErrorKind::Internal).with_source(Refused));
            }
        };
        self.at = to;
        self.counts.count += 1;
        self.counts.bytes += bytes as u64;
        self.counts.busy += start.elapsed();
        Ok(())
    }
}

impl HostOp for SplitOp {
    fn info(&self) -> &OpenInfo {
        &self.info
    }

    fn position(&self) -> usize {
        self.side(self.at).op.position()
    }

    fn place(&self, segment: Segment<'_>) -> Result<Placement> {
        self.prompt.op.place(segment)
    }

    /// Makes a call where the state belongs; one of no state goes to the op for prompts.
    fn call(&mut self, call: Call<'_>) -> Result<Reply<()>> {
        match call {
            Call::Reset => {
                self.prompt.op.reset()?;
                (self.at, self.alone) = (Side::Prompt, false);
            }
            Call::Drafting(on) => {
                self.prompt.op.drafting(on)?;
                self.tokens.op.drafting(on)?;
            }
            Call::Snapshot => {
                let side = self.at;
                let of_op = self.op_of(side).snapshot()?;
                let id = SnapshotId(self.next);
                self.next += 1;
                self.saved.push(Saved { id, side, of_op });
                return Ok(Reply::Saved(id));
            }
            Call::Restore(snapshot) => {
                let saved = self.saved.iter().find(|saved| saved.id == snapshot).copied();
                let Saved { side, of_op, .. } =
                    saved.ok_or_else(|| error!(Internal, "there is no snapshot {}", snapshot.0))?;
                self.op_of(side).restore(of_op)?;
                (self.at, self.alone) = (side, false);
            }
            Call::DropSnapshot(snapshot) => {
                if let Some(index) = self.saved.iter().position(|saved| saved.id == snapshot) {
                    let Saved { side, of_op, .. } = self.saved.remove(index);
                    self.op_of(side).drop_snapshot(of_op);
                }
            }
            Call::Embed(_)
            | Call::EmbedMany(_)
            | Call::EmbedTokens(_)
            | Call::Answer(_)
            | Call::Speak(_) => {
                return self.prompt.op.call(call);
            }
            _ => return self.ready(call.effect())?.call(call),
        }
        Ok(Reply::Done)
    }

    fn values(&self) -> Result<&[f32]> {
        self.prompt.op.values()
    }

    fn logits(&self) -> Result<Logits<'_>> {
        self.side(self.at).op.logits()
    }

    fn logits_origin(&self) -> Option<String> {
        self.side(self.at).op.logits_origin()
    }

    fn graph_time(&self) -> Duration {
        self.prompt.op.graph_time() + self.tokens.op.graph_time()
    }

    /// Contexts of the backend for tokens have its name before theirs, such as `cpu:decoder`.
    fn graph_stats(&self) -> Vec<GraphStats> {
        let mut stats = self.prompt.op.graph_stats();
        stats.extend(self.tokens.op.graph_stats().into_iter().map(|stats| GraphStats {
            context: format!("{}:{}", self.tokens.backend, stats.context),
            ..stats
        }));
        stats
    }

    fn span_stats(&self) -> Vec<SpanStats> {
        let mut stats = self.prompt.op.span_stats();
        add_spans(&mut stats, &self.tokens.op.span_stats());
        stats
    }

    fn hand_overs(&self) -> HandOvers {
        self.counts
    }
}
