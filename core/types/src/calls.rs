//! The calls of an open host-op, and what they give.
//!
//! | what | where |
//! |---|---|
//! | a call as it crosses between host and plugin | `plugins/op/src/abi.rs`, `plugins/op/src/calls.rs` |
//! | the op of an author behind it | `plugins/op/src/export.rs` |
//! | the same in a test | `plugins/op/src/harness.rs` |
//! | the engine's trait `HostOp` | `core/engine/src/op.rs` |
//! | an op of a plugin as a `HostOp` | `plugins/host/src/adapter.rs` |
//! | checks of what a call did, and a closed op | `core/engine/src/engine/{checked,closed}.rs` |
//!
//! A call is added as a variant of [`Call`] with its name and effect, in the two functions of `plugins/op/src/calls.rs`,
//! as a method with a default in the author's trait (`plugins/op/src/op.rs`), and where the engine uses it. A plugin
//! that does not know it says so by its name. What an op declares once, when it is opened, is no call but a field of
//! [`OpenInfo`](crate::OpenInfo).

use crate::{Answer, Segment};

/// A saved state of an op.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct SnapshotId(pub u64);

/// A call of an open op that may change it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Call<'a> {
    /// Forgets everything: position 0.
    Reset,
    /// Consumes segments; gives the logits of the last position. An image, audio clip or video takes the positions that
    /// its placement declared.
    Prefill(&'a [Segment<'a>]),
    /// Consumes one token; gives the logits of its position.
    Decode(u32),
    /// Forgets all positions from this one on.
    Truncate(usize),
    /// Saves the state.
    Snapshot,
    /// Returns to a saved state, which stays saved.
    Restore(SnapshotId),
    /// Frees a saved state. An unknown id is ignored.
    DropSnapshot(SnapshotId),
    /// Runs tokens, at most as many as the widest of `OpenInfo::verification`, through the graphs of one step. The
    /// position stays: nothing is accepted until [`Call::Accept`], and nothing is when another call comes first that
    /// changes the state. There are no logits until [`Call::RowLogits`].
    Verify(&'a [u32]),
    /// Gives the logits of the position of this token of the last [`Call::Verify`]. Rows may be left out.
    RowLogits(usize),
    /// Keeps the first tokens of the last [`Call::Verify`], as many as this, and forgets the others: the state is as if
    /// they alone had been consumed. Called at most once after each.
    Accept(usize),
    /// Declares whether [`Call::Draft`] will be called from here on: the op then remembers what its drafting head needs
    /// of the tokens that are consumed.
    Drafting(bool),
    /// Gives the drafting head's logits of the token that may follow this one, which itself follows the text and is not
    /// consumed. Called again before the text goes on, it gives those of one token further: the token then follows that
    /// of the call before.
    Draft(u32),
    /// Gives the state as bytes, which an op of the same name over the same bundle imports, also in another process.
    /// They hold the used rows of caches only. What the host knows of the state, such as its tokens, is the host's to
    /// keep.
    ExportState,
    /// Makes the state the one that was exported at `position`. The bytes may be damaged or hostile: what does not fit
    /// is refused, and the state stays as it is.
    ImportState {
        /// Positions that it holds.
        position: usize,
        /// Bytes that an op exported.
        state: &'a [u8],
    },
    /// Gives findings about the consumed input besides its logits, such as a language and its probability.
    Note,
    /// Embeds one text: pooling and normalisation are the op's. Of an op with `OpenInfo::scores`, scores a text, or a
    /// pair of texts that are two segments.
    Embed(&'a [Segment<'a>]),
    /// Embeds texts in one execution of the graphs, as if each were alone. Together they have at most as many tokens as
    /// the longest of `OpenInfo::packing`. Gives `OpenInfo::values` a text, one text behind the other.
    EmbedMany(&'a [&'a [u32]]),
    /// Embeds one text of tokens, and gives behind its vector what `OpenInfo::of_tokens` declares for each token.
    EmbedTokens(&'a [Segment<'a>]),
    /// Recognises what is said in audio, or reads what else the segments hold, in steps of its own; of an op that
    /// generates, finds when its answer is spoken (`OpenInfo::aligns`).
    Answer(&'a [Segment<'a>]),
    /// Says a text: gives the samples of its beginning, and those that follow when it is called with no segments, until
    /// there are none.
    Speak(&'a [Segment<'a>]),
}

impl Call<'_> {
    /// Name of the call, by which it crosses between host and plugin: it never changes.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Reset => "reset",
            Self::Prefill(_) => "prefill",
            Self::Decode(_) => "decode",
            Self::Truncate(_) => "truncate",
            Self::Snapshot => "snapshot",
            Self::Restore(_) => "restore",
            Self::DropSnapshot(_) => "drop_snapshot",
            Self::Verify(_) => "verify",
            Self::RowLogits(_) => "row_logits",
            Self::Accept(_) => "accept",
            Self::Drafting(_) => "drafting",
            Self::Draft(_) => "draft",
            Self::ExportState => "export_state",
            Self::ImportState { .. } => "import_state",
            Self::Note => "note",
            Self::Embed(_) => "embed",
            Self::EmbedMany(_) => "embed_many",
            Self::EmbedTokens(_) => "embed_tokens",
            Self::Answer(_) => "answer",
            Self::Speak(_) => "speak",
        }
    }

    /// True for a call whose reply is floats.
    pub const fn gives_floats(&self) -> bool {
        self.gives_logits()
            || matches!(
                self,
                Self::Embed(_) | Self::EmbedMany(_) | Self::EmbedTokens(_) | Self::Speak(_)
            )
    }

    /// True for a call whose reply is logits.
    pub const fn gives_logits(&self) -> bool {
        matches!(self, Self::Prefill(_) | Self::Decode(_) | Self::RowLogits(_) | Self::Draft(_))
    }

    /// Effect of the call on the state when it succeeds.
    pub fn effect(&self) -> Effect {
        match *self {
            Self::Reset => Effect::At(0),
            Self::Prefill(segments) => Effect::Consumes(positions(segments)),
            Self::Decode(_) => Effect::Consumes(Some(1)),
            Self::Truncate(position) => Effect::BackTo(position),
            Self::Snapshot | Self::ExportState | Self::Drafting(_) => Effect::Stays,
            Self::Restore(snapshot) => Effect::Returns(snapshot),
            Self::DropSnapshot(snapshot) => Effect::Drops(snapshot),
            Self::Verify(_) | Self::Draft(_) => Effect::Drafts,
            Self::Accept(count) => Effect::Accepts(count),
            Self::ImportState { position, .. } => Effect::Imports(position),
            Self::Embed(_) => Effect::Embeds(1),
            Self::EmbedMany(texts) => Effect::Embeds(texts.len()),
            Self::RowLogits(_)
            | Self::Note
            | Self::EmbedTokens(_)
            | Self::Answer(_)
            | Self::Speak(_) => Effect::Nothing,
        }
    }
}

/// Result of a [`Call`] that succeeded. `F` is where floats are: a view of a buffer, the values themselves, or nothing
/// where they are read elsewhere.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply<F> {
    /// Nothing.
    Done,
    /// Logits, vectors or scores of texts one behind the other, or samples of audio.
    Floats(F),
    /// A saved state.
    Saved(SnapshotId),
    /// The state as bytes.
    State(Vec<u8>),
    /// Answer of an op that steps by itself.
    Answer(Answer),
    /// A JSON object, or null.
    Note(serde_json::Value),
}

impl<F> Reply<F> {
    /// The same with its floats elsewhere.
    ///
    /// # Errors
    /// Errors of `floats`.
    pub fn try_map<G, E>(self, floats: impl FnOnce(F) -> Result<G, E>) -> Result<Reply<G>, E> {
        Ok(match self {
            Self::Done => Reply::Done,
            Self::Floats(found) => Reply::Floats(floats(found)?),
            Self::Saved(snapshot) => Reply::Saved(snapshot),
            Self::State(bytes) => Reply::State(bytes),
            Self::Answer(answer) => Reply::Answer(answer),
            Self::Note(note) => Reply::Note(note),
        })
    }
}

/// Effect of a successful call on the state of an op. A call that fails leaves the state as it was after the last
/// complete token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing that a host can check.
    Nothing,
    /// The position stays.
    Stays,
    /// The position is this one.
    At(usize),
    /// The position is at most this one.
    BackTo(usize),
    /// The position grows by this number, or by one at least where only the op knows it.
    Consumes(Option<usize>),
    /// The position stays, and there are no logits until a call gives some.
    Drafts,
    /// The position grows by this number. The logits stay those that were given last.
    Accepts(usize),
    /// The position is that of a saved state.
    Returns(SnapshotId),
    /// The position is that of a state that was exported.
    Imports(usize),
    /// A saved state is gone.
    Drops(SnapshotId),
    /// This many texts are embedded.
    Embeds(usize),
}

impl Effect {
    /// Number of texts that are embedded.
    pub const fn texts(self) -> usize {
        match self {
            Self::Embeds(texts) => texts,
            _ => 0,
        }
    }

    /// True when the logits that were given before are no longer those of the position.
    pub const fn ends_logits(self) -> bool {
        matches!(
            self,
            Self::At(_)
                | Self::BackTo(_)
                | Self::Consumes(_)
                | Self::Drafts
                | Self::Returns(_)
                | Self::Imports(_)
        )
    }
}

/// Positions that segments take when they are all text: a token takes one. How many an image or audio takes is the op's
/// to know.
pub fn positions(segments: &[Segment<'_>]) -> Option<usize> {
    let tokens = |segment: &Segment<'_>| match segment {
        Segment::Tokens(tokens) => Some(tokens.len()),
        _ => None,
    };
    segments.iter().map(tokens).sum()
}
