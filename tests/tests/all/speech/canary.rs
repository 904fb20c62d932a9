//! The tiny models of Canary from checkpoint to text, against goldens that `transformers` made
//! (`tests/oracle/canary.py`) and, of an archive of NeMo, those that NeMo made (`nemo_canary.py`).

use qhx::TranscribeOptions;
use qhx_core::op::Segment;
use qhx_forge::Precision;
use qhx_tests::{has, tiny};
use qhx_tiers::tier;
use serde_json::json;

use super::recogniser::{Case, RATE, Recogniser, file, transcriber};

const TINY: Recogniser = Recogniser { name: "canary-tiny", prompt: Case::in_front };
/// An archive of NeMo, whose encoder is narrower than its decoder.
const FLASH: Recogniser = Recogniser { name: "canary-flash-tiny", ..TINY };

#[test]
fn cpu_equals_the_reference() {
    let bundles = [("1,2", None, 1), ("2", Some(vec![]), 1), ("2,3", None, 2)];
    TINY.on_cpu(bundles, |model, case| TINY.keys_are_near(model, case));
    FLASH.on_cpu([("1,2", None, 1)], |model, case| FLASH.keys_are_near(model, case));
}

#[test]
fn languages_and_punctuation_are_asked_for() {
    let bundle = TINY.bundle(|_| ());
    let mut transcriber = transcriber(&bundle);
    TINY.transcribes(&mut transcriber, |case| case.language.clone());
    let mut said = |options: TranscribeOptions, clip: &str| {
        transcriber.set_options(&options).unwrap();
        transcriber.transcribe(file(clip)).unwrap()
    };
    // English unless something else is asked for, and into English.
    let [english, german, _] = &TINY.cases()[..] else { panic!("three cases") };
    let options = TranscribeOptions::default().with_max_new(8);
    assert_eq!(said(options.clone(), "one.wav").chunks[0].ids, english.output_ids);
    let translated = options.clone().with_language("de".to_owned());
    let translated = translated.with_task("translate".to_owned());
    assert_eq!(said(translated, "one.wav").chunks[0].ids, german.output_ids);
    // Windows that overlap.
    assert_eq!(said(options.clone(), "long.wav").chunks.len(), 4);
    for (options, what) in [
        // The vocabulary has its token, and the model does not speak it.
        (options.clone().with_language("ja".to_owned()), "the language \"ja\""),
        (options.clone().with_into("pt".to_owned()), "the into \"pt\""),
        (options.clone().with_task("sing".to_owned()), "the task \"sing\""),
        (options.with_prompt("boat".to_owned()), "no place for one"),
    ] {
        let error = transcriber.set_options(&options).unwrap_err();
        has(error.message(), &[what]);
        let hint = error.hint_text().unwrap_or_default();
        assert!(!what.contains("language") || hint.contains("It knows de, en, fr"), "{hint}");
    }
}

#[test]
fn clips_of_any_length_are_heard_or_refused() {
    let bundle = TINY.bundle(|_| ());
    let mut model = bundle.on_cpu();
    TINY.refuses_clips(&mut model, 32_000, "the encoder takes 2.00 s at once");
    let silence = [0.0; 32_000];
    // Silence, and less than a frame.
    for samples in [&silence[..], &silence[..159], &silence[..1]] {
        model.reset().unwrap();
        model.op_mut().prefill(&[Segment::Audio { samples, rate: RATE }]).unwrap();
    }
    TINY.steps_are_golden(&mut model);
    drop(model);
    bundle.refuses([
        ("/params/audio/front_end/filters/mels", json!(40), "expected 40 mels"),
        ("/params/audio/token_id", json!(9999), "token_id: found 9999"),
        ("/params/audio/preemphasis", json!(1.5), "preemphasis: 1.5"),
        ("/plan/params/encoder", json!("ear"), "ear"),
        ("/params/transcription/language", json!("ja"), "expected one of languages"),
    ]);
}

#[tier(qnn)]
fn the_npu_says_the_same() {
    TINY.on_npus();
    if tiny::full_matrix() {
        FLASH.on_npu("v81", Precision::Fp16);
        FLASH.on_npu("v73", Precision::Fp16);
    }
}

/// The archive says which languages it has, and its vocabulary is several behind each other.
#[test]
fn an_archive_of_nemo_is_a_checkpoint() {
    let bundle = FLASH.bundle(|_| ());
    let mut transcriber = transcriber(&bundle);
    FLASH.transcribes(&mut transcriber, |case| case.language.clone());
    let japanese = TranscribeOptions::default().with_language("ja".to_owned());
    let error = transcriber.set_options(&japanese).unwrap_err();
    has(error.hint_text().unwrap_or_default(), &["It knows de, en, es, fr"]);
}

/// Another checkpoint, made by `canary.py` or `nemo_canary.py` with `--unseen DIR`: `QHX_TEST_CANARY=DIR`.
#[tier(by_hand = "QHX_TEST_CANARY")]
fn a_checkpoint_of_the_environment_says_the_same() {
    TINY.unseen("QHX_TEST_CANARY");
}
