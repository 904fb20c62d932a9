//! Audio of any length for a model that answers by itself and says when each token is spoken: windows that overlap, as
//! those of the pipeline `automatic-speech-recognition` of `transformers` do with `stride_length_s`. Each gives the
//! tokens that begin in its own part; what lies on either side of that only gives context.

use qhx_base::{CancelToken, Result, bail};
use qhx_core::engine::FinishReason;

use super::{Chunk, Live, Said, Times, TranscribeEvent, Transcriber, Transcript, media};

/// Seconds of silence behind which something else is said.
const PAUSE: f64 = 1.0;
/// Tokens before a text that it is decoded with.
const TAIL: usize = 16;
/// Characters that end a sentence.
const ENDS: [char; 4] = ['.', '?', '!', '…'];

impl Transcriber {
    /// Has the model transcribe one window after another, with seconds of context in front and behind.
    pub(super) fn in_context(
        &mut self,
        mut live: Live<'_>,
        context: [f64; 2],
        cancel: &CancelToken,
        mut on_event: impl FnMut(TranscribeEvent<'_>),
    ) -> Result<Transcript> {
        let rate = f64::from(live.rate.max(1));
        let window = self.answer_window(live.rate)?;
        let [left, right] = context.map(|seconds| (seconds * rate).round() as usize);
        let Some(step) = window.checked_sub(left.saturating_add(right)).filter(|step| *step > 0)
        else {
            let path = self.model.manifest().path.display();
            bail!(
                Artifact,
                "{path}: params.transcription.context is {context:?}, expected less than the window, {} s",
                window as f64 / rate
            );
        };
        let (mut transcript, mut ids) = (Transcript::default(), Vec::<u32>::new());
        let mut open = Open::default();
        let mut start = 0;
        loop {
            // One sample more says whether this window is the last.
            let end = start + window;
            while live.len() <= end && !cancel.is_cancelled() && live.read()? {}
            let all = live.len();
            let last = all <= end;
            transcript.seconds = live.seconds();
            if live.is_silent() {
                transcript.cancelled = cancel.is_cancelled();
                return Ok(transcript);
            }
            if all == 0 {
                bail!(Prompt, "holds no audio (0 samples)");
            }
            if start == 0 && !last {
                on_event(TranscribeEvent::Chunks {
                    count: (live.expected() - window).div_ceil(step) + 1,
                    seconds: live.expected() as f64 / rate,
                    longest: window as f64 / rate,
                    overlap: (left + right) as f64 / rate,
                });
            }
            let clip = media(live.part(start..end), live.rate)?;
            on_event(TranscribeEvent::Begin);
            let said = self.answered(&clip, cancel)?;
            transcript.cancelled = said.finish_reason == FinishReason::Cancelled;
            let own = Own {
                offset: start as f64 / rate,
                from: if start == 0 { f64::NEG_INFINITY } else { (start + left) as f64 / rate },
                to: if last { f64::INFINITY } else { (end - right) as f64 / rate },
            };
            open.take(&said, &own, &live)?;
            transcript.language = transcript.language.take().or(said.language);
            let [from, to] = [start, all.min(end)].map(|at| at as f64 / rate);
            transcript.note([live.begins(from), live.ends(to)], said.found);
            let ended = last || transcript.cancelled;
            let words = self.spoken(&mut open, ended)?;
            if self.options.times == Times::Word {
                transcript.words.extend(words.iter().cloned());
            }
            for chunk in sentences(words) {
                on_event(TranscribeEvent::Done(&chunk));
                // A token's text may depend on those before it.
                let tail = ids.len().saturating_sub(TAIL);
                let before = self.decoded(ids.get(tail..).unwrap_or_default())?.len();
                ids.extend(&chunk.ids);
                let text = self.decoded(ids.get(tail..).unwrap_or_default())?;
                let new = text.get(before..).unwrap_or_default();
                let new = if tail == 0 && before == 0 { new.trim_start() } else { new };
                if !new.is_empty() {
                    on_event(TranscribeEvent::Text(new));
                }
                transcript.chunks.push(chunk);
            }
            if ended {
                break;
            }
            start += step;
            live.forget(start);
        }
        transcript.text = self.decoded(&ids)?.trim().to_owned();
        Ok(transcript)
    }

    /// Takes the words of what is complete out of `open`: behind the last sentence there may be more of it, unless the
    /// audio has `ended`.
    fn spoken(&self, open: &mut Open, ended: bool) -> Result<Vec<Chunk>> {
        let words = self.words(&open.ids, &open.times)?;
        if ended || words.is_empty() {
            return Ok(words);
        }
        let last_word = words.last().map(|word| word.start).filter(|_| words.len() > 1);
        let all = sentences(words);
        // A sentence that goes on and on is cut behind a word.
        let held = all.last().map(|part| part.start).filter(|_| all.len() > 1).or(last_word);
        let place = held.and_then(|held| open.times.iter().position(|time| time[0] >= held));
        let complete = open.split(place.unwrap_or(open.ids.len()));
        self.words(&complete.ids, &complete.times)
    }
}

/// The part of a window whose words are its own, in seconds of the whole audio.
struct Own {
    /// Start of the window.
    offset: f64,
    from: f64,
    to: f64,
}

/// Tokens that are not given out yet, with their times in the whole audio.
#[derive(Debug, Default)]
pub(super) struct Open {
    pub(super) ids: Vec<u32>,
    pub(super) times: Vec<[f64; 2]>,
}

impl Open {
    /// Adds what a window has in its own part.
    fn take(&mut self, said: &Said, own: &Own, live: &Live<'_>) -> Result<()> {
        if said.times.len() != said.ids.len() {
            bail!(
                Artifact,
                "the host-op gives times for {} of {} tokens, expected all, as params.transcription.context is set",
                said.times.len(),
                said.ids.len()
            );
        }
        // Times are multiples of a step that f32 may round.
        const HALF: f64 = 0.5e-3;
        for (&id, time) in said.ids.iter().zip(&said.times) {
            let [from, to] = time.map(|time| own.offset + f64::from(time));
            if (own.from..own.to).contains(&(from + HALF)) {
                self.ids.push(id);
                self.times.push([live.begins(from), live.ends(to)]);
            }
        }
        Ok(())
    }

    /// Takes out the first `count` tokens.
    pub(super) fn split(&mut self, count: usize) -> Self {
        let (ids, times) = (self.ids.split_off(count), self.times.split_off(count));
        std::mem::replace(self, Self { ids, times })
    }
}

/// Joins words into segments, each up to the end of a sentence or a pause.
pub(super) fn sentences(words: Vec<Chunk>) -> Vec<Chunk> {
    let mut found: Vec<Chunk> = Vec::new();
    for word in words {
        let goes_on =
            |last: &&mut Chunk| !last.text.ends_with(ENDS) && word.start - last.end < PAUSE;
        match found.last_mut().filter(goes_on) {
            Some(last) => {
                last.text.push(' ');
                last.text.push_str(&word.text);
                (last.end, last.tokens) = (word.end, last.tokens + word.tokens);
                last.ids.extend(word.ids);
            }
            None => found.push(word),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::Found;
    use super::*;

    fn word(text: &str, start: f64) -> Chunk {
        let (end, text) = (start + 0.4, text.to_owned());
        let ids = vec![7];
        Chunk { start, end, text, finish_reason: FinishReason::Eos, tokens: 1, ids, scores: None }
    }

    #[test]
    fn sentences_and_pauses_divide_what_is_said() {
        let words = [("It", 0.0), ("rains.", 0.5), ("We", 1.0), ("stay", 1.5), ("in", 2.9)];
        let found = sentences(words.map(|(text, start)| word(text, start)).to_vec());
        let found: Vec<_> =
            found.iter().map(|one| (one.text.as_str(), one.start, one.ids.len())).collect();
        assert_eq!(found, [("It rains.", 0.0, 2), ("We stay", 1.0, 2), ("in", 2.9, 1)]);
    }

    #[test]
    fn a_window_gives_what_begins_in_its_own_part() {
        let said = Said {
            text: String::new(),
            ids: vec![1, 2, 3, 4],
            finish_reason: FinishReason::Eos,
            times: vec![[0.16, 0.24], [0.24, 0.4], [0.72, 0.8], [0.8, 0.88]],
            language: None,
            found: Found::new(),
        };
        let mut open = Open::default();
        let live = Live::raw(std::io::empty(), 16_000);
        open.take(&said, &Own { offset: 1.0, from: 1.24, to: 1.8 }, &live).unwrap();
        assert_eq!(open.ids, [2, 3]);
        assert_eq!(open.split(1).ids, [2]);
        assert_eq!(open.ids, [3]);
        let untimed = Said { times: Vec::new(), ..said };
        let own = Own { offset: 0.0, from: 0.0, to: 1.0 };
        let error = open.take(&untimed, &own, &live).unwrap_err();
        assert!(error.message().contains("times for 0 of 4"), "{error}");
    }
}
