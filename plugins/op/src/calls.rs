//! Calls of an open op and the segments in them, as they cross: out of the host, and into the plugin.

#![expect(unsafe_code, reason = "calls an op's vtable")]

use qhx_types::calls::{Call, Reply, SnapshotId};
use qhx_types::{Placement, Segment};
use serde::de::DeserializeOwned;

use crate::abi::{
    OpObject, RResult, RSlice, RawCall, RawError, RawReply, RawResult, RawSegment, RawView,
    SEGMENT_AUDIO, SEGMENT_IMAGE, SEGMENT_TILE, SEGMENT_TOKENS, SEGMENT_VIDEO,
};

/// Why a call of an op gives nothing.
#[derive(Debug)]
pub enum CallError {
    /// The error of the op.
    Failed(RawError),
    /// The op returned JSON that is not what the call returns.
    Invalid(serde_json::Error),
}

impl OpObject {
    /// Makes a call.
    ///
    /// # Safety
    /// The op is open, and no other call of it is under way.
    ///
    /// # Errors
    /// When the op fails, or does not have the call.
    pub unsafe fn call(&self, call: Call<'_>) -> Result<Reply<RawView>, CallError> {
        let (segments, texts): (Vec<RawSegment<'_>>, Vec<RSlice<'_, u32>>);
        let empty = RawCall::named(call.name());
        let raw = match call {
            Call::Reset | Call::Snapshot | Call::ExportState | Call::Note => empty,
            Call::Decode(token) | Call::Draft(token) => {
                RawCall { number: u64::from(token), ..empty }
            }
            Call::Truncate(number) | Call::RowLogits(number) | Call::Accept(number) => {
                RawCall { number: number as u64, ..empty }
            }
            Call::Restore(snapshot) | Call::DropSnapshot(snapshot) => {
                RawCall { number: snapshot.0, ..empty }
            }
            Call::Drafting(on) => RawCall { number: u64::from(on), ..empty },
            Call::ImportState { position, state } => {
                RawCall { number: position as u64, bytes: state.into(), ..empty }
            }
            Call::Verify(tokens) => RawCall { tokens: tokens.into(), ..empty },
            Call::EmbedMany(all) => {
                texts = all.iter().map(|&text| text.into()).collect();
                RawCall { texts: texts.as_slice().into(), ..empty }
            }
            Call::Prefill(all)
            | Call::Embed(all)
            | Call::EmbedTokens(all)
            | Call::Answer(all)
            | Call::Speak(all) => {
                segments = all.iter().map(|&one| one.into()).collect();
                RawCall { segments: segments.as_slice().into(), ..empty }
            }
        };
        // SAFETY: the caller's contract.
        let RawReply { view, number, bytes } =
            returned(unsafe { self.vtable.call()(self.data, raw) })?;
        Ok(match call {
            Call::Snapshot => Reply::Saved(SnapshotId(number)),
            Call::ExportState => Reply::State(bytes.into_vec()),
            Call::Answer(_) => Reply::Answer(parsed(&bytes)?),
            Call::Note => Reply::Note(parsed(&bytes)?),
            _ if call.gives_floats() => Reply::Floats(view),
            _ => Reply::Done,
        })
    }

    /// Place of an image, audio clip or video among the tokens of a prompt, and the number of positions it takes.
    ///
    /// # Safety
    /// As for [`OpObject::call`].
    ///
    /// # Errors
    /// When the op does not take the segment.
    pub unsafe fn place(&self, segment: Segment<'_>) -> Result<Placement, CallError> {
        // SAFETY: the caller's contract.
        parsed(returned(unsafe { self.vtable.place()(self.data, segment.into()) })?.as_bytes())
    }
}

fn returned<T>(raw: RawResult<T>) -> Result<T, CallError> {
    match raw {
        RResult::ROk(value) => Ok(value),
        RResult::RErr(error) => Err(CallError::Failed(error)),
    }
}

fn parsed<T: DeserializeOwned>(json: &[u8]) -> Result<T, CallError> {
    serde_json::from_slice(json).map_err(CallError::Invalid)
}

impl<'a> RawCall<'a> {
    /// A call without arguments.
    fn named(name: &'a str) -> Self {
        Self {
            name: name.into(),
            number: 0,
            tokens: RSlice::EMPTY,
            bytes: RSlice::EMPTY,
            texts: RSlice::EMPTY,
            segments: RSlice::EMPTY,
        }
    }

    /// The call, with the segments and texts that it has; `None` for one of a later interface.
    pub(crate) fn lifted(
        &self,
        segments: &'a [Segment<'a>],
        texts: &'a [&'a [u32]],
    ) -> Option<Call<'a>> {
        let (number, snapshot) = (self.number as usize, SnapshotId(self.number));
        Some(match self.name.as_str() {
            "reset" => Call::Reset,
            "prefill" => Call::Prefill(segments),
            "decode" => Call::Decode(self.number as u32),
            "truncate" => Call::Truncate(number),
            "snapshot" => Call::Snapshot,
            "restore" => Call::Restore(snapshot),
            "drop_snapshot" => Call::DropSnapshot(snapshot),
            "verify" => Call::Verify(self.tokens.as_slice()),
            "row_logits" => Call::RowLogits(number),
            "accept" => Call::Accept(number),
            "drafting" => Call::Drafting(self.number != 0),
            "draft" => Call::Draft(self.number as u32),
            "export_state" => Call::ExportState,
            "import_state" => Call::ImportState { position: number, state: self.bytes.as_slice() },
            "note" => Call::Note,
            "embed" => Call::Embed(segments),
            "embed_many" => Call::EmbedMany(texts),
            "embed_tokens" => Call::EmbedTokens(segments),
            "answer" => Call::Answer(segments),
            "speak" => Call::Speak(segments),
            _ => return None,
        })
    }
}

impl<'a> From<Segment<'a>> for RawSegment<'a> {
    fn from(segment: Segment<'a>) -> Self {
        let empty = Self {
            kind: SEGMENT_TOKENS,
            width: 0,
            height: 0,
            rate: 0,
            tokens: RSlice::EMPTY,
            bytes: RSlice::EMPTY,
            samples: RSlice::EMPTY,
        };
        match segment {
            Segment::Tokens(tokens) => Self { tokens: tokens.into(), ..empty },
            Segment::Image { rgb, width, height } => {
                Self { kind: SEGMENT_IMAGE, width, height, bytes: rgb.into(), ..empty }
            }
            Segment::Audio { samples, rate } => {
                Self { kind: SEGMENT_AUDIO, rate, samples: samples.into(), ..empty }
            }
            Segment::Tile { rgb, width, height, index, of } => {
                let rate = (u32::from(of) << 16) | u32::from(index);
                Self { kind: SEGMENT_TILE, width, height, rate, bytes: rgb.into(), ..empty }
            }
            Segment::Video { rgb, width, height, times, frames } => {
                let (bytes, samples) = (rgb.into(), times.into());
                let rate = u32::try_from(frames).unwrap_or(u32::MAX);
                Self { kind: SEGMENT_VIDEO, width, height, rate, bytes, samples, ..empty }
            }
            Segment::Unknown(kind) => Self { kind, ..empty },
            // A kind that has no number here yet: the op refuses it as one that it does not know.
            _ => Self { kind: u32::MAX, ..empty },
        }
    }
}

impl<'a> From<&'a RawSegment<'a>> for Segment<'a> {
    fn from(raw: &'a RawSegment<'a>) -> Self {
        match raw.kind {
            SEGMENT_TOKENS => Self::Tokens(raw.tokens.as_slice()),
            SEGMENT_IMAGE => {
                Self::Image { rgb: raw.bytes.as_slice(), width: raw.width, height: raw.height }
            }
            SEGMENT_AUDIO => Self::Audio { samples: raw.samples.as_slice(), rate: raw.rate },
            SEGMENT_VIDEO => Self::Video {
                rgb: raw.bytes.as_slice(),
                width: raw.width,
                height: raw.height,
                times: raw.samples.as_slice(),
                frames: (raw.rate as usize).max(raw.samples.len()),
            },
            SEGMENT_TILE => Self::Tile {
                rgb: raw.bytes.as_slice(),
                width: raw.width,
                height: raw.height,
                index: raw.rate as u16,
                of: (raw.rate >> 16) as u16,
            },
            kind => Self::Unknown(kind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_crosses_with_its_index() {
        for (index, of) in [(0, 1), (3, 17), (65_534, 65_535)] {
            let tile = Segment::Tile { rgb: &[1, 2, 3], width: 1, height: 1, index, of };
            assert_eq!(Segment::from(&RawSegment::from(tile)), tile);
        }
    }
}
