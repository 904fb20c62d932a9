//! Ops that step by themselves: what they answer to audio, and what they say.

use std::sync::Arc;

use super::model::Model;
use super::types::Prompt;
use crate::op::{Answer, HostOp as _, Segment, Task};
use qhx_base::{CancelToken, Result, bail, error, trace};
use qhx_types::Media;

impl Model {
    /// Has a recogniser answer to audio that it takes at once. Nothing is kept of it for the next answer.
    ///
    /// # Errors
    /// When the host-op transcribes nothing, does not take the audio, or fails, and with
    /// [`Cancelled`](qhx_base::ErrorKind::Cancelled) when `cancel` stops it.
    pub fn answer(&mut self, media: &Media, cancel: &CancelToken) -> Result<Answer> {
        self.require(Task::Transcribe, "transcribe")?;
        self.cancellable(cancel, |model| {
            let bundle = Arc::clone(&model.bundle);
            let _span = trace::span(bundle.trace(), "answer");
            model.twice(|model| {
                if !model.info().streams {
                    return model.op.answer(&[media.segment()]);
                }
                model.op.reset()?;
                let mut answer = model.op.answer(&[media.segment()])?;
                let Answer { tokens, times, language, note } = model.op.answer(&[])?;
                answer.tokens.extend(tokens);
                answer.times.extend(times);
                answer.language = answer.language.or(language);
                answer.note.extend(note);
                Ok(answer)
            })
        })
    }

    /// Gives a recogniser the next piece of audio, or none behind the last one, and returns what is sure by then: of
    /// ops that take it so ([`OpenInfo::streams`](crate::op::OpenInfo)). [`Model::reset`] begins other audio, which is
    /// to be called behind an error, too: then the audio so far may be lost.
    ///
    /// # Errors
    /// When the host-op takes no pieces, does not take this one, or fails, and with
    /// [`Cancelled`](qhx_base::ErrorKind::Cancelled) when `cancel` stops it.
    pub fn listen(&mut self, piece: Option<&Media>, cancel: &CancelToken) -> Result<Answer> {
        self.require(Task::Transcribe, "transcribe")?;
        if !self.info().streams {
            let (path, name) = (self.manifest().path.display(), &self.op().description.name);
            bail!(Usage, "{path}: host-op {name:?} takes no audio piece by piece");
        }
        self.cancellable(cancel, |model| {
            let bundle = Arc::clone(&model.bundle);
            let _span = trace::span(bundle.trace(), "listen");
            match piece {
                Some(piece) => model.op.answer(&[piece.segment()]),
                None => model.op.answer(&[]),
            }
        })
    }

    /// Seconds between which each of the tokens `said` is spoken in the audio of `prompt`, which they are the answer
    /// to: to be called behind the generation, by ops that find it ([`OpenInfo::aligns`](crate::op::OpenInfo)). The
    /// state is forgotten.
    ///
    /// # Errors
    /// When the host-op finds no times, does not take the tokens, or fails, and with
    /// [`Cancelled`](qhx_base::ErrorKind::Cancelled) when `cancel` stops it.
    pub fn align(
        &mut self,
        prompt: &Prompt,
        said: &[u32],
        cancel: &CancelToken,
    ) -> Result<Vec<[f32; 2]>> {
        if !self.info().aligns {
            let (path, name) = (self.manifest().path.display(), &self.op().description.name);
            bail!(Usage, "{path}: host-op {name:?} finds no times of tokens in the bundle");
        }
        let found = self.cancellable(cancel, |model| {
            let encoded = model.encode_whole(prompt)?;
            let bundle = Arc::clone(&model.bundle);
            let _span = trace::span(bundle.trace(), "align");
            let segments = [Segment::Tokens(&encoded.sequence.tokens), Segment::Tokens(said)];
            match model.op.answer(&segments) {
                Err(_) if model.space.loss.happened() => {
                    model.revive()?;
                    // What was heard is lost with the device.
                    model.consume(&encoded, &mut 0)?;
                    model.op.answer(&segments)
                }
                answer => answer,
            }
        });
        let reset = self.reset();
        let Answer { times, .. } = found?;
        reset?;
        match times.len() == said.len() {
            true => Ok(times),
            false => {
                let name = &self.op().description.name;
                let (times, said) = (times.len(), said.len());
                Err(error!(Plugin, "host-op {name:?}: answer gave {times} times for {said} tokens"))
            }
        }
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
            let bundle = Arc::clone(&model.bundle);
            let _span = trace::span(bundle.trace(), "speak");
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

    /// Findings of the host-op in the input it consumed, besides its logits. Empty if it found nothing.
    ///
    /// # Errors
    /// When the host-op does not generate, fails, or returns anything but an object.
    pub fn op_note(&mut self) -> Result<serde_json::Map<String, serde_json::Value>> {
        match self.op.note()? {
            serde_json::Value::Object(found) => Ok(found),
            serde_json::Value::Null => Ok(serde_json::Map::new()),
            other => {
                let name = &self.op().description.name;
                Err(error!(
                    Plugin,
                    "host-op {name:?}: note returned {other}, expected a JSON object"
                ))
            }
        }
    }
}
