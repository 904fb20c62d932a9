//! The Nemotron streaming tiny models from checkpoint to tokens and times, against goldens that `transformers` made
//! (`tests/oracle/nemotron.py`) of a clip that is there as a whole; here it comes piece by piece.

use std::io::Cursor;

use qhx::{Live, Times, TranscribeEvent, TranscribeOptions, Transcriber};
use qhx_base::CancelToken;
use qhx_base::compare::Distance;
use qhx_core::engine::Model;
use qhx_core::op::{Answer, AudioRules, Segment};
use qhx_media::{Limits, Source};
use qhx_tests::forged::{Dumping, Forged, set};
use qhx_tests::tiny::{self, golden_tensor};
use qhx_tests::{backends, files, has};
use qhx_tiers::tier;
use qhx_types::Media;
use serde::Deserialize;
use serde_json::json;

use crate::golden::{self as steps, find_damage};

const TINY: &str = "nemotron-tiny";
/// Asked for a language.
const ASKED: &str = "nemotron35-tiny";
const UNSEEN: &str = "nemotron-unseen";
const RATE: u32 = 16_000;
/// Rows of the encoder and logits on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-4;

#[derive(Debug, Deserialize)]
struct Goldens {
    row_seconds: f64,
    samples: usize,
    rows: usize,
    /// Each with the row where it begins.
    tokens: Vec<(u32, usize)>,
    text: String,
}

fn goldens(fixture: &str) -> Goldens {
    tiny::golden_json(fixture)
}

/// The clip of the goldens.
fn clip(fixture: &str) -> Vec<f32> {
    let source = Source::File(tiny::fixture("silero").join("clip.flac"));
    let audio = qhx_media::decode_audio(&source, &AudioRules::default(), &Limits::default());
    audio.unwrap().samples[..goldens(fixture).samples].to_vec()
}

fn bundle(fixture: &str) -> Forged {
    Forged::of(&tiny::fixture(fixture), |options| {
        if fixture == ASKED {
            set(options, &[("language", "de-DE")]);
        }
    })
}

/// The answers to pieces of `step` samples, joined.
fn heard(model: &mut Model, samples: &[f32], step: usize) -> Answer {
    let ticket = CancelToken::new();
    let mut all = Answer::default();
    let pieces = samples.chunks(step).map(|piece| Media::audio(piece.to_vec(), RATE).unwrap());
    for piece in pieces.map(Some).chain([None]) {
        let Answer { tokens, times, .. } = model.listen(piece.as_ref(), &ticket).unwrap();
        all.tokens.extend(tokens);
        all.times.extend(times);
    }
    all
}

fn says_the_same(answer: &Answer, goldens: &Goldens, label: &str) {
    let tokens: Vec<u32> = goldens.tokens.iter().map(|(token, _)| *token).collect();
    assert_eq!(answer.tokens, tokens, "{label}");
    assert_eq!(answer.times.len(), tokens.len());
    for (found, (token, row)) in answer.times.iter().zip(&goldens.tokens) {
        let expected = [*row, row + 1].map(|row| row as f64 * goldens.row_seconds);
        let near =
            found.iter().zip(expected).all(|(found, time)| (f64::from(*found) - time).abs() < 1e-4);
        assert!(near, "{label}: {token} at {found:?}, expected {expected:?}");
    }
}

#[test]
fn cpu_equals_the_reference_however_the_audio_comes() {
    for fixture in [TINY, ASKED, UNSEEN] {
        let (goldens, clip, bundle) = (goldens(fixture), clip(fixture), bundle(fixture));
        for step in [160, 1600, 7777, clip.len()] {
            let mut model = Dumping::open(&bundle.manifest, backends::cpu());
            let answer = heard(&mut model, &clip, step);
            says_the_same(&answer, &goldens, &format!("{fixture} by {step}"));
            let found = model.arrays("encoder");
            let expected = golden_tensor(fixture, "encoder");
            assert_eq!(found.len() % goldens.rows, 0);
            let distance = Distance::of(&found, &expected).unwrap().largest;
            assert!(distance <= CPU_DISTANCE, "{fixture} by {step}: {distance:e}");
        }
    }
}

#[test]
fn audio_after_other_audio_begins_from_nothing() {
    let (goldens, clip) = (goldens(TINY), clip(TINY));
    let bundle = bundle(TINY);
    let mut model = bundle.on_cpu();
    // All at once, then after audio that nobody ended, and after a call that was cancelled.
    let whole = Media::audio(clip.clone(), RATE).unwrap();
    says_the_same(&model.answer(&whole, &CancelToken::new()).unwrap(), &goldens, "at once");
    model.listen(Some(&whole), &CancelToken::new()).unwrap();
    model.reset().unwrap();
    says_the_same(&heard(&mut model, &clip, 1600), &goldens, "after a reset");
    let ticket = CancelToken::new();
    ticket.cancel();
    model.listen(Some(&whole), &ticket).unwrap_err();
    model.reset().unwrap();
    says_the_same(&heard(&mut model, &clip, 1600), &goldens, "after a cancelled call");
}

#[test]
fn words_come_while_the_audio_comes() {
    let (goldens, clip) = (goldens(TINY), clip(TINY));
    let bundle = bundle(TINY);
    let mut model = bundle.on_cpu();
    // A chunk of three rows, and the samples that its last frame reaches ahead.
    let latest = 3.0 * goldens.row_seconds + 0.02;
    let (mut fed, mut count) = (0, 0);
    for piece in clip.chunks(160) {
        fed += piece.len();
        let piece = Media::audio(piece.to_vec(), RATE).unwrap();
        let answer = model.listen(Some(&piece), &CancelToken::new()).unwrap();
        for time in answer.times {
            let now = fed as f64 / f64::from(RATE);
            assert!(now - f64::from(time[0]) <= latest, "{time:?} at {now}");
            count += 1;
        }
    }
    assert!(count > goldens.tokens.len() / 2, "{count}");
}

fn transcriber(fixture: &str, options: &TranscribeOptions) -> (Forged, Transcriber) {
    let bundle = bundle(fixture);
    let transcriber = Transcriber::with_options(bundle.on_cpu(), options).unwrap();
    (bundle, transcriber)
}

fn raw(samples: &[f32]) -> Vec<u8> {
    samples.iter().flat_map(|one| ((one * 32768.0) as i16).to_le_bytes()).collect()
}

#[test]
fn a_recording_and_a_file_have_the_same_words() {
    let (goldens, clip) = (goldens(TINY), clip(TINY));
    let options = TranscribeOptions::default().with_times(Times::Word);
    let (_bundle, mut transcriber) = transcriber(TINY, &options);
    let live = Live::raw(Cursor::new(raw(&clip)), RATE);
    let mut shown = String::new();
    let recorded = transcriber.transcribe_live("clip", live, &CancelToken::new(), |event| {
        if let TranscribeEvent::Text(text) = event {
            shown.push_str(text);
        }
    });
    let recorded = recorded.unwrap();
    assert_eq!(recorded.text, goldens.text.trim());
    assert_eq!(shown.trim_end(), recorded.text);
    assert!((recorded.seconds - clip.len() as f64 / f64::from(RATE)).abs() < 1e-6);
    let joined: Vec<&str> = recorded.chunks.iter().map(|chunk| chunk.text.as_str()).collect();
    assert_eq!(joined.join(" "), recorded.text);
    let start = goldens.tokens[0].1 as f64 * goldens.row_seconds;
    assert!((recorded.words.first().unwrap().start - start).abs() < 1e-6);
    let file = qhx::Source::Bytes { name: "clip.wav".to_owned(), bytes: wav(&clip) };
    let whole = transcriber.transcribe_with(&file, &CancelToken::new(), |_| {}).unwrap();
    assert_eq!(whole.text, recorded.text);
    for (one, other) in whole.words.iter().zip(&recorded.words) {
        assert_eq!(one, other);
    }
    assert_eq!(whole.words.len(), recorded.words.len());
}

fn wav(samples: &[f32]) -> Vec<u8> {
    [&qhx::wav_header(RATE, Some(samples.len()))[..], &raw(samples)].concat()
}

#[test]
fn a_turn_goes_on_where_it_was_left() {
    let (goldens, clip) = (goldens(TINY), clip(TINY));
    let (_bundle, mut transcriber) = transcriber(TINY, &TranscribeOptions::default());
    let mut so_far = |samples: &[f32], turn: (&str, bool)| {
        let turn = qhx::Turn::new(turn.0, turn.1);
        transcriber.set_options(&TranscribeOptions::default().with_turn(turn)).unwrap();
        let source = qhx::Source::Bytes { name: "turn".to_owned(), bytes: wav(samples) };
        transcriber.transcribe_with(&source, &CancelToken::new(), |_| {}).unwrap()
    };
    let mut texts = Vec::new();
    for end in [20_000, 40_000, 50_000] {
        let found = so_far(&clip[..end], ("one", false));
        assert!(found.settled);
        assert!(goldens.text.trim().starts_with(found.text.trim()), "{}", found.text);
        texts.push(found.text.len());
    }
    assert!(texts.windows(2).all(|pair| pair[0] <= pair[1]) && texts[2] > 0, "{texts:?}");
    // Another one in between takes its place, and the turn is heard again.
    let other = so_far(&clip[..30_000], ("two", false));
    assert!(goldens.text.trim().starts_with(other.text.trim()));
    let ended = so_far(&clip, ("one", true));
    assert_eq!((ended.text.as_str(), ended.settled), (goldens.text.trim(), false));
}

#[test]
fn hours_of_audio_take_no_more_memory_than_seconds() {
    let (_bundle, mut transcriber) = transcriber(UNSEEN, &TranscribeOptions::default());
    // 40 s of silence through the whole path, and the op's memory behind each piece.
    let live = Live::raw(Cursor::new(vec![0; 2 * 40 * RATE as usize]), RATE);
    let found = transcriber.transcribe_live("silence", live, &CancelToken::new(), |_| {}).unwrap();
    assert_eq!(found.seconds, 40.0);
}

#[test]
fn clips_that_are_none_are_refused() {
    let bundle = bundle(TINY);
    let mut model = bundle.on_cpu();
    let long = vec![0.0; 32_160];
    let rate = RATE;
    for (segments, what) in [
        (&[Segment::Audio { samples: &[0.0, f32::NAN], rate }][..], "NaN"),
        (&[Segment::Audio { samples: &[], rate }], "0 samples"),
        (&[Segment::Audio { samples: &long[..9], rate: 8_000 }], "8000 samples a second"),
        (&[Segment::Tokens(&[1])], "not audio"),
        (&[Segment::Tokens(&[1]), Segment::Tokens(&[1])], "2 segments"),
    ] {
        has(model.op_mut().answer(segments).unwrap_err().message(), &[what]);
        model.reset().unwrap();
    }
    // An end without a beginning, silence, and less than a frame have no words and are no errors.
    assert!(model.listen(None, &CancelToken::new()).unwrap().tokens.is_empty());
    for samples in [&long[..1], &long[..159], &long] {
        let answer = heard(&mut model, samples, 4000);
        assert_eq!(answer.tokens.len(), answer.times.len());
    }
    let error = Transcriber::new(model)
        .unwrap()
        .transcribe_live("pipe", Live::raw(std::io::empty(), RATE), &CancelToken::new(), |_| {})
        .unwrap_err();
    has(error.message(), &["pipe", "0 samples"]);
}

#[test]
fn golden_steps_execute_every_graph_of_a_stream() {
    find_damage(&bundle(TINY).manifest, &["encoder", "joint", "predictor"]);
}

#[test]
fn configurations_that_are_not_computed_are_refused() {
    for (key, value, what) in [
        ("sliding_window", json!(3), "sliding_window 3"),
        ("hidden_act", json!("gelu"), "hidden_act"),
        ("default_num_lookahead_tokens", json!(-1), "default_num_lookahead_tokens"),
        ("subsampling_factor", json!(2), "subsampling_factor 2"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(tiny::fixture(TINY)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        files::edit(&folder.path().join("config.json"), |config| {
            config["encoder_config"][key] = value;
        });
        let error = Forged::try_of(folder.path(), |_| ()).unwrap_err();
        has(error.message(), &[what]);
    }
}

#[test]
fn a_language_is_one_that_the_checkpoint_knows() {
    let error = |fixture| {
        let fixture = tiny::fixture(fixture);
        Forged::try_of(&fixture, |options| set(options, &[("language", "fr-FR")])).unwrap_err()
    };
    let unknown = error(ASKED);
    has(unknown.message(), &["fr-FR", "prompt_dictionary"]);
    has(unknown.hint_text().unwrap_or_default(), &["auto, de-DE, en-US"]);
    has(error(TINY).message(), &["asked for none"]);
}

/// The NPU library says the tokens of the reference.
#[tier(qnn)]
fn npu_says_the_words_of_a_stream() {
    let goldens = goldens(TINY);
    for target in tiny::targets() {
        let bundle = Forged::of(&tiny::fixture(TINY), |options| {
            options.compiler = Some(backends::compiler(target));
        });
        let mut model = bundle.open(backends::qnn());
        says_the_same(&heard(&mut model, &clip(TINY), 1600), &goldens, target);
        steps::pass(&bundle.manifest, &mut model, target);
    }
}
