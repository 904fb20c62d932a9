//! The input audio buffer: what was appended and not committed yet, divided into turns.

use qhx_media::{SpeechRules, VoiceActivity, VoiceChange};

use super::session::Turns;
use crate::error::Result;
use crate::ids;

/// Seconds after which a turn ends also without a silence: what a model hears at once.
const MAX_TURN: u64 = 30;
/// Milliseconds of speech with which a turn begins: less may be a click.
const ONSET: u32 = 64;

/// A change of the buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Speech of an item begins, at this time of the session.
    Started { item: String, ms: u64 },
    /// It ended, and this is its audio.
    Stopped { item: String, ms: u64, audio: Vec<i16> },
}

/// Audio that was appended and not committed yet.
#[derive(Debug)]
pub(super) struct Input {
    rate: u64,
    turns: Option<Turns>,
    voice: Option<VoiceActivity>,
    samples: Vec<i16>,
    /// Samples of the session in front of those.
    start: u64,
    /// Samples of the session that `voice` was not given.
    unheard: u64,
    /// Item of the speech that goes on.
    speaking: Option<String>,
}

impl Input {
    pub(super) fn new(rate: u32, turns: Option<Turns>) -> Result<Self> {
        let (samples, start, unheard, speaking) = (Vec::new(), 0, 0, None);
        let mut input =
            Self { rate: rate.into(), turns: None, voice: None, samples, start, unheard, speaking };
        input.detect(turns)?;
        Ok(input)
    }

    /// Ends turns in another way from now on.
    pub(super) fn detect(&mut self, turns: Option<Turns>) -> Result<()> {
        if self.turns == turns {
            return Ok(());
        }
        let rate = u32::try_from(self.rate).unwrap_or(u32::MAX);
        let rules = |turns: Turns| {
            SpeechRules::default()
                .with_threshold(turns.threshold)
                .with_min_speech_ms(ONSET)
                .with_min_silence_ms(u32::try_from(turns.silence).unwrap_or(u32::MAX))
        };
        self.voice = turns.map(|turns| VoiceActivity::new(rate, rules(turns))).transpose()?;
        self.turns = turns;
        self.unheard = self.start + self.samples.len() as u64;
        self.speaking = None;
        Ok(())
    }

    /// The item whose speech goes on.
    pub(super) fn speaking(&self) -> Option<&str> {
        self.speaking.as_deref()
    }

    pub(super) fn samples(&self) -> &[i16] {
        &self.samples
    }

    /// Takes further samples.
    pub(super) fn push(&mut self, samples: &[i16]) -> Vec<Change> {
        self.samples.extend_from_slice(samples);
        let (Some(turns), Some(voice)) = (self.turns, &mut self.voice) else { return Vec::new() };
        let mut changes = Vec::new();
        let floats: Vec<f32> = samples.iter().map(|one| f32::from(*one) / 32768.0).collect();
        for change in voice.push(&floats) {
            match change {
                VoiceChange::Started(at) => {
                    let at = self.unheard + at;
                    changes.push(self.begin(at.saturating_sub(turns.prefix * self.rate / 1000)));
                }
                // The silence that ended it belongs to it.
                VoiceChange::Stopped(at) => {
                    let silence = turns.silence * self.rate / 1000;
                    changes.extend(self.end(self.unheard + at + silence));
                }
            }
        }
        if self.speaking.is_some() {
            while self.samples.len() as u64 > MAX_TURN * self.rate {
                let at = self.start + MAX_TURN * self.rate;
                changes.extend(self.end(at));
                changes.push(self.begin(at));
            }
        } else {
            // As much as may belong to what comes: the prefix, and the speech that is not counted as such yet.
            let kept = (turns.prefix * self.rate / 1000 + self.rate / 2) as usize;
            let excess = self.samples.len().saturating_sub(kept);
            self.drop(excess);
        }
        changes
    }

    /// Begins a turn at a sample of the session.
    fn begin(&mut self, at: u64) -> Change {
        self.drop(usize::try_from(at.saturating_sub(self.start)).unwrap_or(usize::MAX));
        let item = ids::new("item_");
        self.speaking = Some(item.clone());
        Change::Started { item, ms: self.start * 1000 / self.rate }
    }

    /// Ends the turn at a sample of the session.
    fn end(&mut self, at: u64) -> Option<Change> {
        let item = self.speaking.take()?;
        let audio = self.drop(usize::try_from(at.saturating_sub(self.start)).unwrap_or(usize::MAX));
        Some(Change::Stopped { item, ms: self.start * 1000 / self.rate, audio })
    }

    /// Takes out the first samples.
    fn drop(&mut self, count: usize) -> Vec<i16> {
        let rest = self.samples.split_off(count.min(self.samples.len()));
        let dropped = std::mem::replace(&mut self.samples, rest);
        self.start += dropped.len() as u64;
        dropped
    }

    /// Takes all of it out as an item.
    pub(super) fn take(&mut self) -> (String, Vec<i16>) {
        if let Some(voice) = &mut self.voice {
            voice.end_turn();
        }
        let item = self.speaking.take().unwrap_or_else(|| ids::new("item_"));
        (item, self.drop(usize::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: usize = 16_000;

    fn noon() -> Vec<i16> {
        let file = std::fs::read(qhx_paths::fixture("gemma4-tiny/noon.wav")).unwrap();
        let pairs = file[44..].chunks_exact(2);
        pairs.map(|pair| i16::from_le_bytes([pair[0], pair[1]])).collect()
    }

    fn turns() -> Option<Turns> {
        Some(Turns { threshold: 0.6, prefix: 200, silence: 300 })
    }

    #[test]
    fn a_turn_has_the_audio_between_its_times() {
        let silence = vec![0; 2 * RATE];
        let all = [&silence[..], &noon(), &silence].concat();
        let mut input = Input::new(RATE as u32, turns()).unwrap();
        let changes: Vec<_> = all.chunks(1600).flat_map(|chunk| input.push(chunk)).collect();
        let [Change::Started { item, ms: from }, Change::Stopped { item: same, ms: to, audio }] =
            &changes[..]
        else {
            panic!("{changes:?}");
        };
        assert_eq!(item, same);
        let [first, last] = [from, to].map(|ms| *ms as usize * RATE / 1000);
        assert!(first >= 2 * RATE - RATE / 2 && *from < 2500, "{from}");
        assert_eq!(audio[..], all[first..last]);
        assert!(input.samples().len() < RATE, "silence is not kept: {}", input.samples().len());
    }

    #[test]
    fn speech_without_an_end_is_cut() {
        let loud = noon();
        let turns = Some(Turns { threshold: 0.0, ..Turns::default() });
        let mut input = Input::new(RATE as u32, turns).unwrap();
        let mut stopped = Vec::new();
        for _ in 0..40 {
            for change in input.push(&loud) {
                if let Change::Stopped { audio, .. } = change {
                    stopped.push(audio.len() / RATE);
                }
            }
        }
        assert_eq!(stopped, [30, 30]);
        assert!(input.speaking().is_some());
    }

    #[test]
    fn the_client_may_end_turns() {
        let mut input = Input::new(RATE as u32, None).unwrap();
        assert_eq!(input.push(&noon()), []);
        let (item, audio) = input.take();
        assert!(item.starts_with("item_"), "{item}");
        assert_eq!(audio, noon());
        assert!(input.samples().is_empty());
    }
}
