//! The calls of an open host-op, described once.
//!
//! [`op_calls!`](crate::op_calls) hands the list to a macro of the caller. From it follow
//!
//! | what | where |
//! |---|---|
//! | the table of functions that crosses, and the words below as they cross | `plugins/op/src/abi.rs` |
//! | those functions, over an op of an author | `plugins/op/src/export.rs` |
//! | calling them | `plugins/op/src/calls.rs` |
//! | the same in a test | `plugins/op/src/harness.rs` |
//! | the engine's trait `HostOp` | `core/engine/src/op.rs` |
//! | an op of a plugin as a `HostOp` | `plugins/host/src/adapter.rs` |
//! | checks of what a call did, and a closed op | `core/engine/src/engine/{checked,closed}.rs` |
//!
//! A call is added as a row at the end of the list, as a method with a default in the author's trait
//! (`plugins/op/src/op.rs`), and where the engine uses it. What an op declares once, when it is opened, is no call but
//! a field of [`OpenInfo`](crate::OpenInfo).

use crate::Segment;

/// A saved state of an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SnapshotId(pub u64);

/// A token id.
pub type Token = u32;
/// A position, a row, a number of tokens.
pub type Number = usize;
/// Token ids.
pub type Tokens<'a> = &'a [u32];
/// A prompt.
pub type Segments<'a, 'b> = &'a [Segment<'b>];
/// A state, as an op exported it.
pub type Bytes<'a> = &'a [u8];
/// Texts, each as its tokens.
pub type Texts<'a, 'b> = &'a [&'b [u32]];

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

/// Hands the list of calls to the macro `$then`, a row in braces for each call, in the order of the table of functions.
///
/// A row is: what the call does; the version of the interface that it came with; the author's trait that it belongs to;
/// its name and arguments, in the words
/// of [`crate::calls`]; what it gives; its [`Effect`](crate::calls::Effect); for the table, an attribute of the field.
/// It gives
///
/// | word | the author's op returns | the engine gets |
/// |---|---|---|
/// | `Done` | nothing | nothing |
/// | `Logits` | a view of them | nothing: they are at hand until they end |
/// | `Vectors` | a view of them, f32 | the values, one vector behind the other |
/// | `Saved` | `SnapshotId` | the same |
/// | `Exported` | the bytes | the same |
/// | `Placed` | `Placement`, which crosses as JSON | the same |
/// | `Answered` | `Answer`, which crosses as JSON | the same |
/// | `Noted` | a JSON value | the same |
/// | `Sound` | a view of samples, f32; an empty one ends them | the samples |
/// | `Position` | the number, without an error | the same |
/// | no word | nothing, without an error | nothing |
#[macro_export]
macro_rules! op_calls {
    ($then:ident) => {
        $then! {
            {
                /// Forgets everything: position 0.
                since 1.0, Generator: reset() -> Done, At(0)
            }
            {
                /// Consumes segments; gives the logits of the last position. An image, audio clip or video takes the
                /// positions that `place` declared.
                since 1.0, Generator: prefill(segments: Segments<'_, '_>) -> Logits, Consumes(positions(segments))
            }
            {
                /// Consumes one token; gives the logits of its position.
                since 1.0, Generator: decode(token: Token) -> Logits, Consumes(Some(1))
            }
            {
                /// Positions consumed so far.
                since 1.0, Generator: position() -> Position, Nothing
            }
            {
                /// Forgets all positions from `position` on.
                since 1.0, Generator: truncate(position: Number) -> Done, BackTo(position)
            }
            {
                /// Saves the state.
                since 1.0, Generator: snapshot() -> Saved, Stays
            }
            {
                /// Returns to a saved state, which stays saved.
                since 1.0, Generator: restore(snapshot: SnapshotId) -> Done, Returns(snapshot)
            }
            {
                /// Frees a saved state. An unknown id is ignored.
                since 1.0, Generator: drop_snapshot(snapshot: SnapshotId), Drops(snapshot)
            }
            {
                /// Embeds one text: pooling and normalisation are the op's. Of an op with `OpenInfo::scores`, scores a
                /// text, or a pair of texts that are two segments.
                since 1.0, Encoder: embed(segments: Segments<'_, '_>) -> Vectors, Embeds(1), #[sabi(last_prefix_field)]
            }
            {
                /// Place of an image, audio clip or video among the tokens of a prompt, and the number of positions it
                /// takes. Called before the segment is consumed, possibly more than once.
                since 1.1, Generator: place(segment: Segment<'_>) -> Placed, Nothing
            }
            {
                /// Runs tokens, at most as many as the widest of `OpenInfo::verification`, through the graphs of one
                /// step. The position stays: nothing is accepted until `accept`, and nothing is when another call comes
                /// first that changes the state. There are no logits until `row_logits`.
                since 1.2, Generator: verify(tokens: Tokens<'_>) -> Done, Drafts
            }
            {
                /// Gives the logits of the position of token `row` of the last `verify`. Rows may be left out.
                since 1.2, Generator: row_logits(row: Number) -> Logits, Nothing
            }
            {
                /// Keeps the first `count` tokens of the last `verify` and forgets the others: the state is as if they
                /// alone had been consumed. Called at most once after each `verify`.
                since 1.2, Generator: accept(count: Number) -> Done, Accepts(count)
            }
            {
                /// Embeds texts in one execution of the graphs, as if each were alone. Together they have at most as
                /// many tokens as the longest of `OpenInfo::packing`. Gives `OpenInfo::values` a text, one
                /// text behind the other.
                since 1.2, Encoder: embed_many(texts: Texts<'_, '_>) -> Vectors, Embeds(texts.len())
            }
            {
                /// Gives the state as bytes, which an op of the same name over the same bundle imports, also in another
                /// process. They hold the used rows of caches only. What the host knows of the state, such as its
                /// tokens, is the host's to keep.
                since 1.3, Generator: export_state() -> Exported, Stays
            }
            {
                /// Makes the state the one that was exported at `position`. The bytes may be damaged or hostile: what
                /// does not fit is refused, and the state stays as it is.
                since 1.3, Generator: import_state(position: Number, state: Bytes<'_>) -> Done, Imports(position)
            }
            {
                /// Recognises what is said in audio, or reads what else the segments hold, in steps of its own; of an
                /// op that generates, finds when its answer is spoken (`OpenInfo::aligns`).
                since 1.3, Recognizer: answer(segments: Segments<'_, '_>) -> Answered, Nothing
            }
            {
                /// Says a text: gives the samples of its beginning, and those that follow when it is called with no
                /// segments, until there are none.
                since 1.3, Speaker: speak(segments: Segments<'_, '_>) -> Sound, Nothing
            }
            {
                /// Findings about the consumed input besides its logits, such as a language and its probability.
                since 1.3, Generator: note() -> Noted, Nothing
            }
            {
                /// Declares whether `draft` will be called from here on: 1 has the op remember what its drafting head
                /// needs of the tokens that are consumed, 0 ends that.
                since 1.3, Generator: drafting(on: Number) -> Done, Stays
            }
            {
                /// Gives the drafting head's logits of the token that may follow `token`, which itself follows the text
                /// and is not consumed. Called again before the text goes on, it gives those of one token further:
                /// `token` then follows that of the call before.
                since 1.3, Generator: draft(token: Token) -> Logits, Drafts
            }
        }
    };
}
