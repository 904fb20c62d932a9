//! Samples that are read as they are recorded, all of them or those of speech alone.

use std::fmt;
use std::io::Read;
use std::ops::Range;

use qhx_base::{Error, ErrorKind, Result};
use qhx_media::{
    Audio, AudioReader, AudioRules, Incoming, Limits, SpeechRules, VoiceActivity, VoiceChange,
};

/// Samples that are read at a time: a tenth of a second.
const BLOCK: usize = 1600;
/// Seconds of a file that are decoded before anything is transcribed, so that most files that are broken somewhere are
/// refused at once. What follows is decoded as it is transcribed: memory does not grow with the length.
const AHEAD: usize = 600;

/// Audio of one channel that is still being recorded or read, or that is there already.
pub struct Live<'a> {
    /// Samples that a model may be given, but for those that were forgotten.
    samples: Vec<f32>,
    forgotten: usize,
    pub(super) rate: u32,
    /// None once it has ended.
    source: Option<Recording<'a>>,
    /// Samples of the recording, speech or not.
    heard: u64,
    /// Number of samples that a file's header declares.
    declared: Option<u64>,
    /// None where all is for the model.
    speech: Option<Speech>,
}

/// Origin of samples that are still to come.
enum Recording<'a> {
    /// Signed 16 bits, the low byte first.
    Raw(Box<dyn Read + Send + 'a>),
    File(Box<AudioReader<'a>>),
}

impl Recording<'_> {
    /// Appends the next samples, a tenth of a second or more. False where it has ended.
    fn read(&mut self, samples: &mut Vec<f32>) -> Result<bool> {
        let source = match self {
            Self::Raw(source) => source,
            Self::File(reader) => {
                let enough = samples.len() + BLOCK;
                while samples.len() < enough {
                    if !reader.read(samples)? {
                        return Ok(false);
                    }
                }
                return Ok(true);
            }
        };
        let mut block = [0u8; 2 * BLOCK];
        let mut filled = 0;
        while filled < block.len() {
            match source.read(block.get_mut(filled..).unwrap_or_default()) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => {
                    return Err(Error::caused(ErrorKind::Io, "the recording cannot be read", e));
                }
            }
        }
        let whole = block.get(..filled).unwrap_or_default().chunks_exact(2);
        samples.extend(whole.map(|pair| match *pair {
            [low, high] => f32::from(i16::from_le_bytes([low, high])) / 32768.0,
            _ => 0.0,
        }));
        Ok(filled == block.len())
    }
}

impl fmt::Debug for Live<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Live")
            .field("samples", &self.samples.len())
            .field("rate", &self.rate)
            .field("speech", &self.speech)
            .finish_non_exhaustive()
    }
}

impl<'a> Live<'a> {
    /// Samples as `arecord -t raw -f S16_LE -r RATE` writes them.
    pub fn raw(source: impl Read + Send + 'a, rate: u32) -> Self {
        let source = Some(Recording::Raw(Box::new(source)));
        Self { source, ..Self::whole(Audio { samples: Vec::new(), rate }) }
    }

    /// Audio that another program writes, while it does: a WAV file of any length, rate and number of channels;
    /// another file, which is read to its end; or else samples as [`Live::raw`] takes them. Waits for the first bytes.
    /// `name` is that of messages.
    ///
    /// # Errors
    /// When the header is broken, or a file of another format cannot be decoded.
    pub fn incoming(name: &str, source: impl Read + Send + 'a, rules: &AudioRules) -> Result<Self> {
        let reader = match Incoming::open(name, source, rules, &Limits::default())? {
            Incoming::Wave(reader) => reader,
            Incoming::Whole(audio) => return Ok(Self::whole(audio)),
            Incoming::Samples(source) => return Ok(Self::raw(source, rules.rate)),
        };
        let declared = reader.declared();
        let source = Some(Recording::File(reader));
        Ok(Self {
            source,
            declared,
            ..Self::whole(Audio { samples: Vec::new(), rate: rules.rate })
        })
    }

    pub(super) fn whole(Audio { samples, rate }: Audio) -> Self {
        let heard = samples.len() as u64;
        Self { samples, forgotten: 0, rate, source: None, heard, declared: None, speech: None }
    }

    /// A file whose samples have this rate, of which the beginning is decoded already.
    pub(super) fn file(mut reader: AudioReader<'a>, rate: u32) -> Result<Self> {
        let mut samples = Vec::new();
        let mut more = true;
        while more && samples.len() < AHEAD * rate as usize {
            more = reader.read(&mut samples)?;
        }
        let declared = reader.declared().filter(|_| more);
        let source = more.then(|| Recording::File(Box::new(reader)));
        Ok(Self { source, declared, ..Self::whole(Audio { samples, rate }) })
    }

    /// Leaves out what is no speech.
    pub(super) fn speech_alone(mut self, rules: SpeechRules) -> Result<Self> {
        let mut speech = Speech::new(self.rate, rules)?;
        let samples = std::mem::take(&mut self.samples);
        speech.take(&samples, self.source.is_none(), &mut self.samples);
        self.speech = Some(speech);
        Ok(self)
    }

    /// Reads a tenth of a second or more. False where the recording has ended.
    pub(super) fn read(&mut self) -> Result<bool> {
        let Some(source) = &mut self.source else { return Ok(false) };
        let mut samples = Vec::new();
        let ended = !source.read(&mut samples)?;
        if ended {
            self.source = None;
        }
        let found = !samples.is_empty();
        self.heard += samples.len() as u64;
        match &mut self.speech {
            None => self.samples.append(&mut samples),
            Some(speech) => speech.take(&samples, ended, &mut self.samples),
        }
        Ok(found)
    }

    /// Samples for the model so far, those that were forgotten included.
    pub(super) fn len(&self) -> usize {
        self.forgotten + self.samples.len()
    }

    /// Some of the samples for the model, as far as they are there.
    pub(super) fn part(&self, range: Range<usize>) -> &[f32] {
        let [start, end] =
            [range.start, range.end.min(self.len())].map(|at| at.saturating_sub(self.forgotten));
        self.samples.get(start..end).unwrap_or_default()
    }

    /// Frees the samples in front of this one, which are not asked for again.
    pub(super) fn forget(&mut self, before: usize) {
        let count = before.saturating_sub(self.forgotten).min(self.samples.len());
        self.samples.drain(..count);
        self.forgotten += count;
    }

    /// Samples for the model in all, as far as that is known.
    pub(super) fn expected(&self) -> usize {
        let declared = self.declared.filter(|_| self.speech.is_none() && self.source.is_some());
        let declared = declared.and_then(|samples| usize::try_from(samples).ok());
        declared.map_or(self.len(), |samples| samples.max(self.len()))
    }

    /// True where there was audio, and nobody spoke.
    pub(super) fn is_silent(&self) -> bool {
        self.heard > 0 && self.len() == 0
    }

    /// Length of the recording so far in seconds.
    pub(super) fn seconds(&self) -> f64 {
        self.heard as f64 / f64::from(self.rate.max(1))
    }

    /// Time of the recording at which something begins, by the seconds of the samples for the model.
    pub(super) fn begins(&self, seconds: f64) -> f64 {
        self.speech
            .as_ref()
            .map_or(seconds, |speech| speech.time(seconds, |start| start <= seconds))
    }

    /// Time of the recording at which something ends.
    pub(super) fn ends(&self, seconds: f64) -> f64 {
        self.speech.as_ref().map_or(seconds, |speech| speech.time(seconds, |start| start < seconds))
    }
}

/// Passes the samples of speech on, and remembers where they stood.
#[derive(Debug)]
struct Speech {
    rate: f64,
    /// None once the recording has ended.
    activity: Option<VoiceActivity>,
    /// Samples around speech that belong to it.
    pad: u64,
    /// Samples that were neither passed on nor dropped, and the place of the first of them in the recording.
    waiting: Vec<f32>,
    first: u64,
    /// Samples of the recording in front of this one are passed on.
    until: u64,
    passed: u64,
    /// Starts of what was passed on in one go: its time among the passed samples, and that in the recording.
    stretches: Vec<[f64; 2]>,
}

impl Speech {
    fn new(rate: u32, rules: SpeechRules) -> Result<Self> {
        let activity = Some(VoiceActivity::new(rate, rules)?);
        let pad = u64::from(rules.pad_ms) * u64::from(rate) / 1000;
        let (waiting, stretches) = (Vec::new(), Vec::new());
        let rate = f64::from(rate);
        Ok(Self { rate, activity, pad, waiting, first: 0, until: 0, passed: 0, stretches })
    }

    /// Takes further samples of the recording, and adds those of speech to `passed`.
    fn take(&mut self, samples: &[f32], ended: bool, passed: &mut Vec<f32>) {
        let Some(mut activity) = self.activity.take() else { return };
        self.waiting.extend_from_slice(samples);
        let mut changes = activity.push(samples);
        let (until, undecided) = (activity.speech_until(), activity.undecided());
        if ended {
            changes.extend(activity.finish());
        } else {
            self.activity = Some(activity);
        }
        for change in changes {
            match change {
                VoiceChange::Started(at) => {
                    let start = at.saturating_sub(self.pad);
                    self.pass(passed);
                    self.drop(start);
                    // It goes on at least to where silence may begin.
                    self.until = self.until.max(at);
                }
                VoiceChange::Stopped(at) => self.until = self.until.max(at + self.pad),
            }
        }
        if !ended {
            self.until = self.until.max(until.unwrap_or(0));
        }
        self.pass(passed);
        if !ended {
            self.drop(undecided.saturating_sub(self.pad));
        }
    }

    /// Passes on what is to be, as far as it is there.
    fn pass(&mut self, passed: &mut Vec<f32>) {
        let count = self.until.saturating_sub(self.first).min(self.waiting.len() as u64);
        if count == 0 {
            return;
        }
        let times = [self.passed, self.first].map(|at| at as f64 / self.rate);
        let offset = |[passed, heard]: [f64; 2]| heard - passed;
        // Half a sample: what goes on where the last stretch ended is a part of it.
        let goes_on = |last: &[f64; 2]| (offset(times) - offset(*last)) * self.rate < 0.5;
        if !self.stretches.last().is_some_and(goes_on) {
            self.stretches.push(times);
        }
        passed.extend(self.waiting.drain(..count as usize));
        self.first += count;
        self.passed += count;
    }

    /// Drops what stands in front of a sample of the recording.
    fn drop(&mut self, before: u64) {
        let count = before.saturating_sub(self.first).min(self.waiting.len() as u64);
        // Some of it may still be to be passed on.
        if self.first >= self.until {
            self.waiting.drain(..count as usize);
            self.first += count;
        }
    }

    /// Time in the recording by that among the passed samples, of the last stretch that `begun` holds for.
    fn time(&self, seconds: f64, begun: impl Fn(f64) -> bool) -> f64 {
        let count = self.stretches.partition_point(|[start, _]| begun(*start)).max(1);
        let stretch = self.stretches.get(count - 1);
        stretch.map_or(seconds, |[start, heard]| heard + (seconds - start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_media::{AudioRules, Limits, Source, decode_audio, speech};

    const RATE: u32 = 16_000;

    fn clip() -> Vec<f32> {
        let source = Source::File(qhx_paths::fixture("silero/clip.flac"));
        let mut rules = AudioRules::default();
        rules.rate = RATE;
        decode_audio(&source, &rules, &Limits::default()).unwrap().samples
    }

    fn bytes(samples: &[f32]) -> Vec<u8> {
        samples.iter().flat_map(|one| ((one * 32768.0) as i16).to_le_bytes()).collect()
    }

    #[test]
    fn a_recording_passes_on_the_speech_of_a_clip_in_its_place() {
        let clip = clip();
        for pad in [0, 30, 200, 700] {
            let mut rules = SpeechRules::default();
            (rules.pad_ms, rules.min_silence_ms) = (pad, 300);
            let spans = speech(&clip, RATE, rules).unwrap();
            let expected: Vec<f32> =
                spans.iter().flat_map(|span| clip[span.clone()].to_vec()).collect();
            let live = Live::raw(std::io::Cursor::new(bytes(&clip)), RATE);
            let mut live = live.speech_alone(rules).unwrap();
            while live.read().unwrap() {}
            let whole = Live::whole(Audio { samples: clip.clone(), rate: RATE });
            let whole = whole.speech_alone(rules).unwrap();
            assert_eq!(whole.samples, expected, "{pad}");
            assert_eq!(live.samples, expected, "{pad}");
            // Each span begins and ends where it does in the recording.
            let (mut passed, seconds) = (0, |samples: usize| samples as f64 / f64::from(RATE));
            for span in spans {
                let [start, end] = [live.begins(seconds(passed)), {
                    passed += span.len();
                    live.ends(seconds(passed))
                }];
                assert!((start - seconds(span.start)).abs() < 1e-6, "{start} {span:?}");
                assert!((end - seconds(span.end)).abs() < 1e-6, "{end} {span:?}");
            }
        }
    }

    #[test]
    fn speech_is_passed_on_before_it_ends_and_silence_is_not_kept() {
        let clip = clip();
        let spoken = clip[91_680..141_000].to_vec();
        let mut speech = Speech::new(RATE, SpeechRules::default()).unwrap();
        let mut passed = Vec::new();
        speech.take(&vec![0.0; 160_000], false, &mut passed);
        assert!(passed.is_empty() && speech.waiting.len() < 8000, "{}", speech.waiting.len());
        speech.take(&spoken, false, &mut passed);
        assert!(passed.len() > spoken.len() - 1024, "{}", passed.len());
    }

    #[test]
    fn what_is_forgotten_keeps_its_place() {
        let samples: Vec<f32> = (0..100).map(|n| n as f32).collect();
        let mut live = Live::whole(Audio { samples, rate: 10 });
        live.forget(40);
        assert_eq!((live.len(), live.part(60..62)), (100, &[60.0, 61.0][..]));
        assert_eq!(live.part(98..200), [98.0, 99.0]);
        assert_eq!((live.seconds(), live.begins(4.0), live.ends(4.0)), (10.0, 4.0, 4.0));
    }
}
