//! Audio for a model that is given it piece by piece: words are there as soon as the model is sure of them.

use qhx_base::{CancelToken, ErrorKind, Result, bail};
use qhx_core::op::Answer;

use super::context::{Open, sentences};
use super::{Live, Times, TranscribeEvent, Transcriber, Transcript, media};

/// Seconds of silence behind which something else is said.
const PAUSE: f64 = 1.0;
/// Seconds after which a sentence is given out without its end.
const LONGEST: f64 = 30.0;
/// Tokens before a text that it is decoded with.
const TAIL: usize = 16;
/// Pieces that audio is given in, a second, of a file as of a recording: pauses, which end segments, are found behind a
/// piece. In between, it can be cancelled.
const PIECES: usize = 10;
/// Divisor of a second that gives the end of a turn so far that is not given to the model yet: where the turn ends may
/// still be found in it.
const UNDECIDED: usize = 10;

/// A turn that goes on: audio of which ever more is there.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Turn {
    /// Name of the turn, which no other has.
    pub id: String,
    /// The audio is all of it.
    pub ended: bool,
}

impl Turn {
    /// A turn by its name.
    pub fn new(id: impl Into<String>, ended: bool) -> Self {
        Self { id: id.into(), ended }
    }
}

/// Words of audio of which the model has had a part.
#[derive(Debug, Default)]
pub(super) struct Following {
    turn: Option<String>,
    /// Samples that the model has had.
    at: usize,
    /// All tokens, and the number of those whose text was given out.
    ids: Vec<u32>,
    shown: usize,
    /// Tokens that are in no chunk yet.
    open: Open,
    transcript: Transcript,
}

impl Transcriber {
    /// Gives the model one piece after another.
    pub(super) fn streamed(
        &mut self,
        mut live: Live<'_>,
        cancel: &CancelToken,
        mut on_event: impl FnMut(TranscribeEvent<'_>),
    ) -> Result<Transcript> {
        let turn = self.options.turn.clone();
        let before = self.following.take();
        let same = |before: &Following| {
            before.turn.is_some()
                && before.turn.as_ref() == turn.as_ref().map(|turn| &turn.id)
                && before.at <= live.len()
        };
        let mut following = match before.filter(same) {
            Some(following) => following,
            None => {
                self.model.reset()?;
                Following {
                    turn: turn.as_ref().map(|turn| turn.id.clone()),
                    ..Following::default()
                }
            }
        };
        let goes_on = turn.is_some_and(|turn| !turn.ended);
        let rate = live.rate.max(1) as usize;
        let kept = if goes_on { rate / UNDECIDED } else { 0 };
        let given = self.give_all(&mut live, &mut following, kept, cancel, &mut on_event);
        following.transcript.cancelled = match given {
            Ok(()) => cancel.is_cancelled(),
            Err(e) if e.kind() == ErrorKind::Cancelled => true,
            Err(e) => {
                // What it has heard is nothing to go on from.
                self.model.reset()?;
                return Err(e);
            }
        };
        following.transcript.seconds = live.seconds();
        if goes_on && !following.transcript.cancelled {
            let mut transcript = following.transcript.clone();
            transcript.text = self.decoded(&following.ids)?.trim().to_owned();
            transcript.settled = true;
            self.following = Some(following);
            return Ok(transcript);
        }
        if !following.transcript.cancelled && following.at > 0 {
            let answer = self.model.listen(None, cancel)?;
            self.said(&live, &mut following, answer)?;
        } else {
            self.model.reset()?;
        }
        self.show(&mut following, true, &mut on_event)?;
        self.close(&live, &mut following, true, &mut on_event)?;
        let Following { mut transcript, ids, .. } = following;
        transcript.text = self.decoded(&ids)?.trim().to_owned();
        if live.seconds() == 0.0 {
            bail!(Prompt, "holds no audio (0 samples)");
        }
        Ok(transcript)
    }

    /// Gives the model all there is but for the last `kept` samples, until the recording ends.
    fn give_all(
        &mut self,
        live: &mut Live<'_>,
        following: &mut Following,
        kept: usize,
        cancel: &CancelToken,
        on_event: &mut impl FnMut(TranscribeEvent<'_>),
    ) -> Result<()> {
        let piece = (live.rate as usize / PIECES).max(1);
        on_event(TranscribeEvent::Begin);
        loop {
            let more = !cancel.is_cancelled() && live.read()?;
            let all = live.len().saturating_sub(kept);
            while following.at < all {
                cancel.check()?;
                let to = all.min(following.at + piece);
                if more && to - following.at < piece {
                    break;
                }
                let clip = media(live.part(following.at..to), live.rate)?;
                let answer = self.model.listen(Some(&clip), cancel)?;
                following.at = to;
                self.said(live, following, answer)?;
                self.show(following, false, on_event)?;
                self.close(live, following, false, on_event)?;
            }
            if !more {
                return Ok(());
            }
            live.forget(following.at);
        }
    }

    /// Takes tokens.
    fn said(&self, live: &Live<'_>, following: &mut Following, answer: Answer) -> Result<()> {
        let Answer { tokens, times, language, note } = answer;
        if times.len() != tokens.len() {
            let (times, tokens) = (times.len(), tokens.len());
            bail!(Artifact, "the host-op gives times for {times} of {tokens} tokens, expected all");
        }
        let at = following.at as f64 / f64::from(live.rate.max(1));
        let transcript = &mut following.transcript;
        transcript.language = transcript.language.take().or(language);
        transcript.note([live.begins(at), live.ends(at)], note);
        following.ids.extend(&tokens);
        following.open.ids.extend(tokens);
        let times = times
            .into_iter()
            .map(|[from, to]| [live.begins(f64::from(from)), live.ends(f64::from(to))]);
        following.open.times.extend(times);
        Ok(())
    }

    /// Gives out the text of new tokens.
    fn show(
        &self,
        following: &mut Following,
        ended: bool,
        on_event: &mut impl FnMut(TranscribeEvent<'_>),
    ) -> Result<()> {
        let Following { ids, shown, .. } = following;
        if *shown == ids.len() {
            return Ok(());
        }
        // A token's text may depend on those before it.
        let tail = shown.saturating_sub(TAIL);
        let before = self.decoded(ids.get(tail..*shown).unwrap_or_default())?.len();
        let text = self.decoded(ids.get(tail..).unwrap_or_default())?;
        if !ended && text.ends_with('\u{fffd}') {
            // A part of a character.
            return Ok(());
        }
        let new = text.get(before..).unwrap_or_default();
        let new = if *shown == 0 { new.trim_start() } else { new };
        *shown = ids.len();
        if !new.is_empty() {
            on_event(TranscribeEvent::Text(new));
        }
        Ok(())
    }

    /// Makes chunks of what is complete: what has a sentence, a pause or the end of the audio behind it.
    fn close(
        &self,
        live: &Live<'_>,
        following: &mut Following,
        ended: bool,
        on_event: &mut impl FnMut(TranscribeEvent<'_>),
    ) -> Result<()> {
        let Following { open, transcript, at, .. } = following;
        if open.ids.is_empty() {
            return Ok(());
        }
        let words = self.words(&open.ids, &open.times)?;
        let last_word = words.last().map(|word| word.start);
        let all = sentences(words);
        let Some(last) = all.last() else { return Ok(()) };
        // The model may still be about to say what was said in the last two of its windows.
        let heard = live.ends(*at as f64 / f64::from(live.rate.max(1)));
        let sure = heard - 2.0 * self.instruction.window.unwrap_or(PAUSE);
        let held = match ended || sure - last.end >= PAUSE {
            true => None,
            false if last.end - last.start > LONGEST => last_word,
            false => Some(last.start),
        };
        let place = held.and_then(|held| open.times.iter().position(|time| time[0] >= held));
        let complete = open.split(place.unwrap_or(open.ids.len()));
        let words = self.words(&complete.ids, &complete.times)?;
        if self.options.times == Times::Word {
            transcript.words.extend(words.iter().cloned());
        }
        for chunk in sentences(words) {
            on_event(TranscribeEvent::Done(&chunk));
            transcript.chunks.push(chunk);
        }
        Ok(())
    }
}
