//! Words of every recogniser on speech by espeak-ng, against goldens that `transformers` made
//! (`tests/oracle/espeak_words.py`): a file at 22.05 kHz, one at 44.1 kHz with two channels, and one of more than a
//! minute, through all windows. The tiny models know other words, so that what they say is nonsense, but the same.

use std::io::Cursor;

use qhx::{Live, Source, TranscribeLimits, TranscribeOptions, Transcriber, Transcript, wav_header};
use qhx_base::{CancelToken, ErrorKind};
use qhx_core::op::AudioRules;
use qhx_media::{Limits, decode_audio};
use qhx_tests::forged::{Forged, set};
use qhx_tests::{has, says, tiny};
use serde::Deserialize;

const FIXTURE: &str = "espeak";
const RATE: u32 = 16_000;

#[derive(Debug, Deserialize)]
struct Goldens {
    /// Times that the clip `en` is in the long one.
    repeats: usize,
    recognisers: Vec<Recogniser>,
}

#[derive(Debug, Deserialize)]
struct Recogniser {
    model: String,
    max_new: usize,
    language: Option<String>,
    recipe_options: std::collections::BTreeMap<String, String>,
    /// True if `text` is the joined text of chunks or segments, false if it is that of the transcript.
    by_chunk: bool,
    cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
struct Case {
    clip: String,
    text: String,
}

fn goldens() -> Goldens {
    tiny::golden_json(FIXTURE)
}

fn file(name: &str) -> Source {
    Source::File(tiny::fixture(FIXTURE).join(format!("{name}.flac")))
}

/// Samples at this rate, as whole numbers.
fn samples(source: &Source, rate: u32) -> Vec<i16> {
    let mut rules = AudioRules::default();
    rules.rate = rate;
    let audio = decode_audio(source, &rules, &Limits::default()).unwrap();
    audio.samples.iter().map(|sample| (sample * 32768.0).round() as i16).collect()
}

fn wav(name: &str, rate: u32, samples: &[i16]) -> Source {
    let head = wav_header(rate, Some(samples.len()));
    let bytes = samples.iter().flat_map(|sample| sample.to_le_bytes());
    Source::Bytes { name: name.to_owned(), bytes: head.into_iter().chain(bytes).collect() }
}

/// The clip `en` again and again, in other volumes and with other pauses.
fn long(repeats: usize) -> Source {
    const OWN: u32 = 22_050;
    let clip = samples(&file("en"), OWN);
    let mut all = Vec::new();
    for k in 0..repeats {
        all.extend(clip.iter().map(|sample| sample >> (k % 3)));
        all.resize(all.len() + (3 + 10 * (k % 3)) * OWN as usize / 10, 0);
    }
    wav("long.wav", OWN, &all)
}

impl Recogniser {
    fn open(&self) -> (Forged, Transcriber) {
        let bundle = Forged::of(&tiny::fixture(&self.model), |options| {
            for (key, value) in &self.recipe_options {
                set(options, &[(key.as_str(), value.as_str())]);
            }
        });
        let transcriber = Transcriber::with_options(bundle.on_cpu(), &self.options()).unwrap();
        (bundle, transcriber)
    }

    fn options(&self) -> TranscribeOptions {
        let greedy = TranscribeLimits::default().temperatures(vec![0.0]).unwrap();
        TranscribeOptions::default()
            .with_max_new(self.max_new)
            .with_language(self.language.clone())
            .with_limits(greedy)
    }

    fn words(&self, transcript: &Transcript) -> String {
        let chunks = transcript.chunks.iter().map(|chunk| chunk.text.trim());
        match self.by_chunk {
            true => chunks.collect::<Vec<_>>().join(" "),
            false => transcript.text.clone(),
        }
    }
}

fn written(transcriber: &mut Transcriber, source: &Source) -> Transcript {
    transcriber.transcribe_with(source, &CancelToken::new(), |_| {}).unwrap()
}

#[test]
fn words_of_espeak_are_those_of_the_reference() {
    let goldens = goldens();
    let mut wrong = Vec::new();
    for recogniser in &goldens.recognisers {
        let (_bundle, mut transcriber) = recogniser.open();
        for case in &recogniser.cases {
            let source = match case.clip.as_str() {
                "long" => long(goldens.repeats),
                name => file(name),
            };
            let found = recogniser.words(&written(&mut transcriber, &source));
            if found != case.text {
                let Case { clip, text } = case;
                wrong.push(format!("{}, {clip}:\n  {found}\n  {text}", recogniser.model));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The words of a recording are those of the same samples in a file, and come in the same order.
#[test]
fn words_of_a_recording_are_those_of_the_file() {
    let goldens = goldens();
    let long = samples(&long(goldens.repeats), RATE);
    for recogniser in &goldens.recognisers {
        let (_bundle, mut transcriber) = recogniser.open();
        let whole = written(&mut transcriber, &wav("long.wav", RATE, &long));
        let raw: Vec<u8> = long.iter().flat_map(|sample| sample.to_le_bytes()).collect();
        let live = Live::raw(Cursor::new(raw), RATE);
        let mut shown = String::new();
        let recorded =
            transcriber.transcribe_live("recording", live, &CancelToken::new(), |event| {
                if let qhx::TranscribeEvent::Text(text) = event {
                    shown.push_str(text);
                }
            });
        let recorded = recorded.unwrap();
        let model = &recogniser.model;
        assert_eq!(recorded.text, whole.text, "{model}");
        assert_eq!(recorded.chunks, whole.chunks, "{model}");
        assert_eq!(recorded.seconds, whole.seconds, "{model}");
        assert_eq!(shown.trim(), whole.text, "{model}");
    }
}

#[test]
fn audio_that_is_none_is_refused_by_every_recogniser() {
    // A WAV file of floats, the second sample of which is none.
    let mut floats = wav_header(RATE, Some(4)).to_vec();
    floats[20] = 3;
    floats[28..32].copy_from_slice(&(4 * RATE).to_le_bytes());
    (floats[32], floats[34]) = (4, 32);
    floats.extend([0.5f32, f32::NAN].iter().flat_map(|sample| sample.to_le_bytes()));
    let nan = Source::Bytes { name: "nan.wav".to_owned(), bytes: floats };
    for recogniser in goldens().recognisers {
        let (_bundle, mut transcriber) = recogniser.open();
        let model = &recogniser.model;
        let mut refused = |source: &Source| {
            transcriber.transcribe_with(source, &CancelToken::new(), |_| {}).unwrap_err()
        };
        let none = refused(&wav("none.wav", RATE, &[]));
        says(&none, ErrorKind::Prompt, &["none.wav", "0 samples"]);
        let error = refused(&nan);
        says(&error, ErrorKind::Prompt, &["nan.wav", "sample 1", "NaN", "expected −1 to 1"]);
        let live = Live::raw(std::io::empty(), RATE);
        let error = transcriber.transcribe_live("pipe", live, &CancelToken::new(), |_| {});
        says(&error.unwrap_err(), ErrorKind::Prompt, &["pipe", "0 samples"]);
        let unknown = recogniser.options().with_language("xx".to_owned());
        let error = transcriber.set_options(&unknown).unwrap_err();
        has(error.message(), &["language", "\"xx\""]);
        let hint = error.hint_text().unwrap_or_default().to_owned();
        assert!(
            hint.contains("It knows ") || hint.contains("leave --language out"),
            "{model}: {hint}"
        );
    }
}
