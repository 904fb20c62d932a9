//! Rules that make speech of probabilities: those of `get_speech_timestamps` of the package `silero-vad`.

use qhx_base::{Error, ErrorKind, Result, setters};
use serde::Deserialize;

use super::network::{CHUNK, RATE};

/// Greatest of the times that [`SpeechRules`] have, in milliseconds.
const MAX_TIME: u32 = 60_000;

/// When somebody is heard to speak. The default has the thresholds of Silero VAD, and times that suit a recogniser:
/// pauses within a sentence stay.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct SpeechRules {
    /// Speech begins where its probability is at least this, from 0 to 1.
    pub threshold: f32,
    /// It ends where its probability is below this; 0.15 below `threshold`, and at least 0.01, if it is `None`.
    pub neg_threshold: Option<f32>,
    /// Speech that lasts no longer than this is none, in milliseconds.
    pub min_speech_ms: u32,
    /// Silence that ends speech, in milliseconds.
    pub min_silence_ms: u32,
    /// Audio in front of speech and behind it that belongs to it, in milliseconds.
    pub pad_ms: u32,
}

impl Default for SpeechRules {
    fn default() -> Self {
        let (threshold, neg_threshold) = (0.5, None);
        Self { threshold, neg_threshold, min_speech_ms: 250, min_silence_ms: 500, pad_ms: 200 }
    }
}

impl SpeechRules {
    setters! {
        /// Probability from which on there is speech.
        with_threshold(threshold: f32) => threshold = threshold,
        /// Probability below which speech ends.
        with_neg_threshold(lower: impl Into<Option<f32>>) => neg_threshold = lower.into(),
        /// Milliseconds that speech lasts at least.
        with_min_speech_ms(ms: u32) => min_speech_ms = ms,
        /// Milliseconds of silence that end speech.
        with_min_silence_ms(ms: u32) => min_silence_ms = ms,
        /// Milliseconds of audio around speech that belong to it.
        with_pad_ms(ms: u32) => pad_ms = ms,
    }

    /// Reads a JSON object with some of the fields; the others are as usual.
    ///
    /// # Errors
    /// When it is no such object, or has values that make no sense.
    pub fn from_json(text: &str) -> Result<Self> {
        let wrong = |e| Error::caused(ErrorKind::Usage, "rules of speech", e);
        let rules: Self = serde_json::from_str(text).map_err(wrong)?;
        rules.check()?;
        Ok(rules)
    }

    /// Checks the values.
    ///
    /// # Errors
    /// When a threshold is no number from 0 to 1, the second one is above the first, or a time is above a minute.
    pub fn check(&self) -> Result<()> {
        let Self { threshold, neg_threshold, min_speech_ms, min_silence_ms, pad_ms } = *self;
        let wrong = |what: String| Err(Error::new(ErrorKind::Usage, what));
        if !(0.0..=1.0).contains(&threshold) {
            return wrong(format!(
                "threshold of speech: {threshold}, expected a number from 0 to 1"
            ));
        }
        if let Some(lower) = neg_threshold.filter(|lower| !(0.0..=threshold).contains(lower)) {
            return wrong(format!(
                "threshold of silence: {lower}, expected a number from 0 to {threshold}, that of speech"
            ));
        }
        for (name, time) in [
            ("least length of speech", min_speech_ms),
            ("silence that ends speech", min_silence_ms),
            ("audio around speech", pad_ms),
        ] {
            if time > MAX_TIME {
                return wrong(format!("{name}: {time} ms, expected at most {MAX_TIME}"));
            }
        }
        Ok(())
    }
}

/// Samples of a time at the network's rate.
pub(super) fn samples(ms: u32) -> u64 {
    u64::from(ms) * u64::from(RATE) / 1000
}

/// A change of what is heard, at a sample of the network's rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heard {
    Speech(u64),
    Silence(u64),
}

/// Finds speech in one probability after another.
#[derive(Debug)]
pub(super) struct Turns {
    rules: SpeechRules,
    /// Samples so far.
    at: u64,
    /// Start of the speech that goes on, or of what may be some.
    start: Option<u64>,
    /// It is long enough.
    sure: bool,
    /// Start of a silence in it.
    end: Option<u64>,
    /// Samples of the audio, once it has ended.
    len: u64,
}

impl Turns {
    pub(super) fn new(rules: SpeechRules) -> Self {
        Self { rules, at: 0, start: None, sure: false, end: None, len: u64::MAX }
    }

    /// Takes the probability of the next chunk.
    pub(super) fn push(&mut self, probability: f32) -> Option<Heard> {
        let SpeechRules { threshold, neg_threshold, .. } = self.rules;
        let lower = neg_threshold.unwrap_or((threshold - 0.15).max(0.01));
        let here = self.at;
        self.at += CHUNK as u64;
        if probability >= threshold {
            self.end = None;
            self.start.get_or_insert(here);
        } else if probability < lower
            && let Some(start) = self.start
        {
            let end = *self.end.get_or_insert(here);
            if here - end >= samples(self.rules.min_silence_ms) {
                // Where neither was reported, the speech is as long as it has to be only now, or never.
                let sure = std::mem::take(&mut self.sure);
                (self.start, self.end) = (None, None);
                debug_assert!(sure || !self.lasts(start, end));
                return sure.then_some(Heard::Silence(end));
            }
        }
        let (start, end) = (self.start?, self.end.unwrap_or(self.at));
        if self.sure || !self.lasts(start, end) {
            return None;
        }
        self.sure = true;
        Some(Heard::Speech(start))
    }

    fn lasts(&self, start: u64, end: u64) -> bool {
        end.min(self.len).saturating_sub(start) > samples(self.rules.min_speech_ms)
    }

    /// Says that the audio has `len` samples; what the last chunk has beyond is silence behind it.
    pub(super) fn ends_at(&mut self, len: u64) {
        self.len = len;
    }

    /// Ends the audio.
    pub(super) fn finish(&mut self) -> Vec<Heard> {
        let len = self.len;
        let Some(start) = self.start.take() else { return Vec::new() };
        let before = std::mem::take(&mut self.sure);
        match (before, self.lasts(start, len)) {
            (true, _) => vec![Heard::Silence(len)],
            (false, true) => vec![Heard::Speech(start), Heard::Silence(len)],
            (false, false) => Vec::new(),
        }
    }

    /// Counts what comes as the beginning of another turn.
    pub(super) fn end_turn(&mut self) {
        (self.start, self.end, self.sure) = (None, None, false);
    }

    /// Sample up to which all belongs to the speech that goes on; `None` in silence.
    pub(super) fn speech_until(&self) -> Option<u64> {
        self.sure.then(|| self.end.unwrap_or(self.at))
    }

    /// First sample that later speech may begin at.
    pub(super) fn undecided(&self) -> u64 {
        self.start.unwrap_or(self.at)
    }
}
