//! Voice activity: when somebody speaks in audio that is still coming in.
//!
//! Each frame of 16 ms gets a score from the small network of the crate `earshot`, which knows speech from noise by its
//! spectrum. A turn begins with four frames in a row above the threshold, and ends with a silence of some length.

use earshot::Detector;

use crate::resample::Resampler;

/// Samples a second that the detector takes.
const RATE: u32 = 16_000;
/// Samples of a frame.
const FRAME: usize = 256;
/// Frames above the threshold with which speech begins: fewer may be a click.
const ONSET: u64 = 4;

/// A change that [`VoiceActivity`] found, at a sample of the audio that it was given, counted from the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VoiceChange {
    /// Speech begins.
    Started(u64),
    /// The silence behind speech has lasted as long as it has to.
    Stopped(u64),
}

/// Finds speech in a stream of samples.
///
/// ```
/// use qhx_media::VoiceActivity;
///
/// let mut voice = VoiceActivity::new(24_000, 0.5, 500);
/// assert!(voice.push(&[0; 24_000]).is_empty());
/// ```
pub struct VoiceActivity {
    detector: Box<Detector>,
    resampler: Resampler,
    rate: u32,
    /// Samples at the detector's rate that do not fill a frame yet.
    rest: Vec<i16>,
    threshold: f32,
    /// Frames of silence that end a turn.
    silence: u64,
    speaking: bool,
    /// Frames in a row that say otherwise than `speaking`.
    against: u64,
    /// Frames so far.
    frames: u64,
}

impl std::fmt::Debug for VoiceActivity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VoiceActivity").field("speaking", &self.speaking).finish_non_exhaustive()
    }
}

impl VoiceActivity {
    /// For samples at a rate above 0. Frames whose score is at least `threshold`, from 0 to 1, are speech; `silence_ms`
    /// without any end a turn.
    pub fn new(rate: u32, threshold: f32, silence_ms: u64) -> Self {
        let silence = silence_ms.saturating_mul(u64::from(RATE)) / (1000 * FRAME as u64);
        Self {
            detector: Detector::default_boxed(),
            resampler: Resampler::new(rate, RATE),
            rate,
            rest: Vec::new(),
            threshold,
            silence: silence.max(1),
            speaking: false,
            against: 0,
            frames: 0,
        }
    }

    /// Takes further samples of one channel, and returns what they change.
    pub fn push(&mut self, samples: &[i16]) -> Vec<VoiceChange> {
        let floats: Vec<f32> = samples.iter().map(|sample| f32::from(*sample)).collect();
        self.resampler.push(&floats);
        // A cast cuts off what is beyond.
        self.rest.extend(self.resampler.take().into_iter().map(|sample| sample.round() as i16));
        let mut changes = Vec::new();
        let whole = self.rest.len() / FRAME * FRAME;
        for frame in self.rest.get(..whole).unwrap_or_default().chunks_exact(FRAME) {
            let speech = self.detector.predict_i16(frame) >= self.threshold;
            self.frames += 1;
            self.against = if speech == self.speaking { 0 } else { self.against + 1 };
            let needed = if self.speaking { self.silence } else { ONSET };
            if self.against < needed {
                continue;
            }
            self.speaking = speech;
            self.against = 0;
            let at = |frames: u64| frames * FRAME as u64 * u64::from(self.rate) / u64::from(RATE);
            changes.push(match speech {
                true => VoiceChange::Started(at(self.frames - ONSET)),
                false => VoiceChange::Stopped(at(self.frames)),
            });
        }
        self.rest.drain(..whole);
        changes
    }

    /// Counts what comes as the beginning of another turn, at the same place of the audio.
    pub fn end_turn(&mut self) {
        self.speaking = false;
        self.against = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The samples of a WAV file of 16 bits.
    fn clip(name: &str) -> Vec<i16> {
        let mut file = hound::WavReader::open(qhx_paths::fixture(name)).unwrap();
        file.samples().map(Result::unwrap).collect()
    }

    /// Noise that no voice makes.
    fn noise(count: usize) -> Vec<i16> {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 16) as i16) / 16
        };
        (0..count).map(|_| next()).collect()
    }

    fn changes(samples: &[i16], rate: u32, chunk: usize) -> Vec<VoiceChange> {
        let mut voice = VoiceActivity::new(rate, 0.6, 300);
        samples.chunks(chunk).flat_map(|chunk| voice.push(chunk)).collect()
    }

    #[test]
    fn a_turn_lasts_from_the_first_sound_to_the_end_of_a_silence() {
        let second = vec![0; 16_000];
        let all = [&second[..], &clip("gemma4-tiny/noon.wav"), &second].concat();
        let found = changes(&all, 16_000, 1600);
        let [VoiceChange::Started(from), VoiceChange::Stopped(to)] = found[..] else {
            panic!("{found:?}");
        };
        // Between the beginning of the clip and the end of the silence.
        assert!((16_000..22_000).contains(&from), "{from}");
        assert!((from + 8000..all.len() as u64).contains(&to), "{to}");
        // However the audio is divided.
        assert_eq!(changes(&all, 16_000, 77), found);
        // At another rate the same turn, at other samples.
        let faster: Vec<i16> = all.iter().flat_map(|sample| [*sample; 3]).collect();
        let found = changes(&faster, 48_000, 4800);
        assert!(
            matches!(found[..], [VoiceChange::Started(at), VoiceChange::Stopped(_)] if at.abs_diff(3 * from) < 4800),
            "{found:?} {from}"
        );
    }

    #[test]
    fn silence_and_noise_are_no_turn() {
        assert_eq!(changes(&[0; 32_000], 16_000, 1600), []);
        assert_eq!(changes(&noise(48_000), 16_000, 1600), []);
        assert_eq!(changes(&vec![i16::MAX; 48_000], 24_000, 2400), []);
    }
}
