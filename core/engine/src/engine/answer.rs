//! Ops that step by themselves: what they answer to audio, and what they say.

use super::model::Model;
use super::types::Prompt;
use crate::op::{Answer, HostOp as _, Segment, Task};
use crate::{CancelToken, Error, ErrorKind, Media, Result, trace};

impl Model {
    /// Has a recogniser answer to audio that it takes at once. Nothing is kept of it for the next answer.
    ///
    /// # Errors
    /// When the host-op transcribes nothing, does not take the audio, or fails, and with
    /// [`Cancelled`](crate::ErrorKind::Cancelled) when `cancel` stops it.
    pub fn answer(&mut self, media: &Media, cancel: &CancelToken) -> Result<Answer> {
        self.require(Task::Transcribe, "transcribe")?;
        self.cancellable(cancel, |model| {
            model.revive()?;
            let trace = model.trace.clone();
            let _span = trace::span(trace.as_ref(), "answer");
            match model.op.answer(&[media.segment()]) {
                Err(_) if model.loss.happened() => {
                    model.revive()?;
                    model.op.answer(&[media.segment()])
                }
                answer => answer,
            }
        })
    }

    /// True when the host-op answers by itself ([`Model::answer`]), and has no tokens to be asked for one by one.
    pub fn answers(&self) -> bool {
        let info = self.info();
        self.op().description.tasks.contains(&Task::Transcribe) && info.vocab == 0
    }

    /// Has a voice say a text. `sound` is given its samples, mono at [`OpenInfo::sound_out`](crate::op::OpenInfo), as
    /// they are made.
    ///
    /// # Errors
    /// When the host-op does not speak, does not take the text, or fails, and any error of `sound`.
    pub fn speak(
        &mut self,
        prompt: &Prompt,
        cancel: &CancelToken,
        mut sound: impl FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        self.require(Task::Speak, "speak")?;
        self.cancellable(cancel, |model| {
            model.revive()?;
            let encoded = model.encode_whole(prompt)?;
            let trace = model.trace.clone();
            let _span = trace::span(trace.as_ref(), "speak");
            let segments: Vec<Segment<'_>> = encoded.segments(0..encoded.sequence.len());
            let mut asked: &[Segment<'_>] = &segments;
            loop {
                let samples = model.op.speak(asked)?;
                if samples.is_empty() {
                    return Ok(());
                }
                sound(samples)?;
                asked = &[];
            }
        })
    }

    /// What the host-op found in what it consumed, besides its logits: empty where it found nothing, or is of a plugin
    /// that cannot report it.
    ///
    /// # Errors
    /// When the host-op does not generate, fails, or returns anything but an object.
    pub fn op_note(&mut self) -> Result<serde_json::Map<String, serde_json::Value>> {
        match self.op.note()? {
            serde_json::Value::Object(found) => Ok(found),
            serde_json::Value::Null => Ok(serde_json::Map::new()),
            other => {
                let name = &self.op().description.name;
                let message =
                    format!("host-op {name:?}: note returned {other}, expected a JSON object");
                Err(Error::new(ErrorKind::Plugin, message))
            }
        }
    }
}
