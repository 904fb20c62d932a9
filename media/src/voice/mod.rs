//! Voice activity: when somebody speaks, in a whole audio clip or in audio that is still coming in.
//!
//! Each chunk of 32 ms gets a probability from the network of Silero VAD (`network.rs`), whose rules make speech of
//! them (`rules.rs`). [`speech`] is the package's `get_speech_timestamps`, [`VoiceActivity`] the same for a stream.

mod network;
mod rules;

use std::ops::Range;

use qhx_base::{Error, ErrorKind, Result};

use self::network::{CHUNK, Detector, RATE};
pub use self::rules::SpeechRules;
use self::rules::{Heard, Turns, samples};
use crate::resample::Resampler;

/// A change that [`VoiceActivity`] found, at a sample of the audio that it was given, counted from the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VoiceChange {
    /// Speech began here.
    Started(u64),
    /// It ended here, and has not gone on for as long as silence has to last.
    Stopped(u64),
}

/// Finds speech in a stream of samples. The audio around speech ([`SpeechRules::pad_ms`]) is no part of it.
///
/// ```
/// use qhx_media::{SpeechRules, VoiceActivity};
///
/// let mut voice = VoiceActivity::new(24_000, SpeechRules::default())?;
/// assert!(voice.push(&[0.0; 24_000]).is_empty());
/// # Ok::<(), qhx_base::Error>(())
/// ```
pub struct VoiceActivity {
    detector: Detector,
    turns: Turns,
    resampler: Resampler,
    rate: u32,
    /// Samples at the network's rate that fill no chunk yet.
    rest: Vec<f32>,
    /// Samples so far.
    len: u64,
}

impl std::fmt::Debug for VoiceActivity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { turns, rate, len, .. } = self;
        f.debug_struct("VoiceActivity")
            .field("turns", turns)
            .field("rate", rate)
            .field("len", len)
            .finish_non_exhaustive()
    }
}

impl VoiceActivity {
    /// Detector for samples at this rate, with nothing heard yet.
    ///
    /// # Errors
    /// When the rate is 0 or the rules have values that make no sense.
    pub fn new(rate: u32, rules: SpeechRules) -> Result<Self> {
        rules.check()?;
        if rate == 0 {
            let what = "audio of 0 samples a second, expected at least 1";
            return Err(Error::new(ErrorKind::Usage, what));
        }
        Ok(Self {
            detector: Detector::new()?,
            turns: Turns::new(rules),
            resampler: Resampler::new(rate, RATE),
            rate,
            rest: Vec::new(),
            len: 0,
        })
    }

    /// Takes further samples of one channel, from −1 to 1, and returns what they change.
    pub fn push(&mut self, samples: &[f32]) -> Vec<VoiceChange> {
        self.len += samples.len() as u64;
        self.resampler.push(samples);
        self.rest.append(&mut self.resampler.take());
        let mut heard = Vec::new();
        let chunks = self.rest.chunks_exact(CHUNK);
        let left = chunks.remainder().len();
        heard.extend(chunks.filter_map(|chunk| self.turns.push(self.detector.probability(chunk))));
        self.rest.drain(..self.rest.len() - left);
        self.changes(heard)
    }

    /// Ends the audio, and returns what that changes.
    pub fn finish(mut self) -> Vec<VoiceChange> {
        let resampler = std::mem::replace(&mut self.resampler, Resampler::new(RATE, RATE));
        self.rest.append(&mut resampler.finish());
        let len = u128::from(self.len) * u128::from(RATE) / u128::from(self.rate);
        self.turns.ends_at(len as u64);
        let mut heard = Vec::new();
        for chunk in self.rest.chunks(CHUNK) {
            heard.extend(self.turns.push(self.detector.probability(chunk)));
        }
        heard.extend(self.turns.finish());
        self.changes(heard)
    }

    /// Counts what comes as the beginning of another turn, at the same place of the audio.
    pub fn end_turn(&mut self) {
        self.turns.end_turn();
    }

    /// Sample up to which the speech that goes on is sure to last; `None` in silence.
    pub fn speech_until(&self) -> Option<u64> {
        self.turns.speech_until().map(|at| self.at(at))
    }

    /// First sample that speech of which nothing is known yet may begin at.
    pub fn undecided(&self) -> u64 {
        self.at(self.turns.undecided())
    }

    /// A sample of the audio by that of the network's rate.
    fn at(&self, sample: u64) -> u64 {
        let at = u128::from(sample) * u128::from(self.rate) / u128::from(RATE);
        u64::try_from(at).unwrap_or(u64::MAX).min(self.len)
    }

    fn changes(&self, heard: Vec<Heard>) -> Vec<VoiceChange> {
        let change = |heard| match heard {
            Heard::Speech(at) => VoiceChange::Started(self.at(at)),
            Heard::Silence(at) => VoiceChange::Stopped(self.at(at)),
        };
        heard.into_iter().map(change).collect()
    }
}

/// Finds the speech in a whole clip, each with the audio around it that belongs to it: half of what lies between two,
/// where that is less.
///
/// # Errors
/// Errors of [`VoiceActivity::new`].
pub fn speech(clip: &[f32], rate: u32, rules: SpeechRules) -> Result<Vec<Range<usize>>> {
    let mut voice = VoiceActivity::new(rate, rules)?;
    let mut changes = voice.push(clip);
    changes.extend(voice.finish());
    let mut found: Vec<Range<usize>> = Vec::new();
    for change in changes {
        match change {
            VoiceChange::Started(at) => found.push(at as usize..clip.len()),
            VoiceChange::Stopped(at) => {
                found.last_mut().into_iter().for_each(|last| last.end = at as usize);
            }
        }
    }
    let pad = (samples(rules.pad_ms) * u64::from(rate) / u64::from(RATE)) as usize;
    if let Some(first) = found.first_mut() {
        first.start = first.start.saturating_sub(pad);
    }
    for index in 0..found.len() {
        let Some([this, next]) = found.get_mut(index..index + 2) else { break };
        let half = ((next.start - this.end) / 2).min(pad);
        this.end += half;
        next.start -= half;
    }
    if let Some(last) = found.last_mut() {
        last.end = last.end.saturating_add(pad).min(clip.len());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AudioRules, Limits, Source, decode_audio};
    use serde_json::Value;

    fn goldens() -> Value {
        let text = std::fs::read(qhx_paths::fixture("silero/goldens.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    fn clip() -> Vec<f32> {
        let source = Source::File(qhx_paths::fixture("silero/clip.flac"));
        let mut rules = AudioRules::default();
        rules.rate = RATE;
        decode_audio(&source, &rules, &Limits::default()).unwrap().samples
    }

    /// Noise that no voice makes.
    fn noise(count: usize) -> Vec<f32> {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from((state >> 16) as i16) / 524_288.0
        };
        (0..count).map(|_| next()).collect()
    }

    fn changes(samples: &[f32], rate: u32, chunk: usize) -> Vec<VoiceChange> {
        let mut voice = VoiceActivity::new(rate, SpeechRules::default()).unwrap();
        let mut found: Vec<_> = samples.chunks(chunk).flat_map(|part| voice.push(part)).collect();
        found.extend(voice.finish());
        found
    }

    #[test]
    fn probabilities_are_those_of_the_package() {
        let goldens = goldens();
        let mut detector = Detector::new().unwrap();
        let found: Vec<f32> =
            clip().chunks(CHUNK).map(|chunk| detector.probability(chunk)).collect();
        let expected = goldens["probabilities"].as_array().unwrap();
        assert_eq!(found.len(), expected.len());
        let off = |(a, b): (&f32, &Value)| (f64::from(*a) - b.as_f64().unwrap()).abs();
        let worst = found.iter().zip(expected).map(off).fold(0.0, f64::max);
        assert!(worst < 1e-4, "{worst}");
        assert!(found.iter().any(|p| *p > 0.95) && found.iter().any(|p| *p < 0.01));
    }

    #[test]
    fn speech_is_what_the_package_finds_by_its_rules() {
        for case in goldens()["cases"].as_array().unwrap() {
            let rules = &case["rules"];
            let number = |name: &str| rules[name].as_f64().map(|value| value as f32);
            let millis = |name: &str, usual| rules[name].as_u64().map_or(usual, |ms| ms as u32);
            let rules = SpeechRules {
                threshold: number("threshold").unwrap_or(0.5),
                neg_threshold: number("neg_threshold"),
                min_speech_ms: millis("min_speech_duration_ms", 250),
                min_silence_ms: millis("min_silence_duration_ms", 100),
                pad_ms: millis("speech_pad_ms", 30),
            };
            let found = speech(&clip(), RATE, rules).unwrap();
            let found: Vec<[usize; 2]> = found.iter().map(|span| [span.start, span.end]).collect();
            assert_eq!(serde_json::to_value(found).unwrap(), case["speech"], "{rules:?}");
        }
    }

    #[test]
    fn a_stream_has_the_same_turns_however_it_is_divided() {
        let clip = clip();
        let found = changes(&clip, RATE, 16_000);
        assert_eq!(found.len(), 8, "{found:?}");
        for chunk in [77, 512, clip.len()] {
            assert_eq!(changes(&clip, RATE, chunk), found);
        }
        // At another rate the same turns, at other samples.
        let faster: Vec<f32> = clip.iter().flat_map(|sample| [*sample; 3]).collect();
        let other = changes(&faster, 48_000, 4800);
        assert_eq!(other.len(), found.len(), "{other:?}");
        for (a, b) in found.iter().zip(&other) {
            let (VoiceChange::Started(a) | VoiceChange::Stopped(a)) = a;
            let (VoiceChange::Started(b) | VoiceChange::Stopped(b)) = b;
            assert!(b.abs_diff(3 * a) < 4800, "{a} {b}");
        }
    }

    #[test]
    fn silence_noise_and_no_numbers_are_no_turn() {
        assert_eq!(changes(&[], 16_000, 1), []);
        assert_eq!(changes(&[0.0; 32_000], 16_000, 1600), []);
        assert_eq!(changes(&noise(48_000), 16_000, 1600), []);
        assert_eq!(changes(&vec![1.0; 48_000], 24_000, 2400), []);
        // What is no number ends with itself.
        let broken = [&[f32::NAN, f32::INFINITY, f32::MAX][..], &clip()].concat();
        assert_eq!(changes(&broken, RATE, 1600).len(), 8);
    }

    #[test]
    fn rules_that_make_no_sense_are_refused() {
        let usual = SpeechRules::default();
        for (rules, name) in [
            (SpeechRules { threshold: f32::NAN, ..usual }, "threshold of speech: NaN"),
            (SpeechRules { neg_threshold: Some(0.6), ..usual }, "from 0 to 0.5"),
            (SpeechRules { min_silence_ms: 60_001, ..usual }, "silence that ends speech"),
        ] {
            let error = VoiceActivity::new(RATE, rules).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
        assert!(VoiceActivity::new(0, usual).is_err());
        let read = SpeechRules::from_json(r#"{"threshold": 0.25, "pad_ms": 7}"#).unwrap();
        assert_eq!(read, usual.with_threshold(0.25).with_pad_ms(7));
        for (text, name) in [(r#"{"pad": 7}"#, "unknown field `pad`"), (r#"{"threshold": 2}"#, "2")]
        {
            let error = SpeechRules::from_json(text).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
    }
}
