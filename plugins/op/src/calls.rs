//! Calls of an open op, as they cross: out of the host, and into the plugin.

#![expect(unsafe_code, reason = "calls an op's vtable")]

use qhx_types::calls::{Call, Reply, SnapshotId};
use qhx_types::{Placement, Segment};
use serde::de::DeserializeOwned;

use crate::abi::{
    OpObject, RResult, RSlice, RawCall, RawError, RawReply, RawResult, RawSegment, RawView,
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
            Call::Prefill(all) | Call::Embed(all) | Call::Answer(all) | Call::Speak(all) => {
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
            "answer" => Call::Answer(segments),
            "speak" => Call::Speak(segments),
            _ => return None,
        })
    }
}
