//! The Moonshine tiny model from checkpoint to text, against goldens that `transformers` made
//! (`tests/oracle/moonshine.py`).

use qhx::TranscribeOptions;
use qhx_core::op::Segment;
use qhx_tests::has;
use qhx_tiers::tier;
use serde_json::json;

use super::recogniser::{Case, RATE, Recogniser, file, transcriber};

const TINY: Recogniser = Recogniser { name: "moonshine-tiny", prompt: Case::in_front };

#[test]
fn cpu_equals_the_reference() {
    let bundles = [("1,2", None, 1), ("2", None, 1), ("2,30", Some(vec![4]), 2)];
    TINY.on_cpu(bundles, |model, case| {
        TINY.frames_are_near(model, case, "frames", 1e-5);
        TINY.keys_are_near(model, case);
    });
}

#[test]
fn a_second_of_audio_gives_few_tokens() {
    let bundle = TINY.bundle(|_| ());
    let mut transcriber = transcriber(&bundle);
    TINY.transcribes(&mut transcriber, |_| None);
    transcriber.set_options(&TranscribeOptions::default()).unwrap();
    for case in TINY.cases() {
        let transcript = transcriber.transcribe(file(&case.clip)).unwrap();
        assert_eq!(transcript.chunks[0].ids, case.output_ids);
        assert!(transcriber.cut_off(&transcript.chunks[0]).unwrap().contains("tokens_per_second"));
    }
    // More than a window: pieces that overlap, each of as many tokens as it may have.
    let transcript = transcriber.transcribe(file("long.wav")).unwrap();
    let starts: Vec<_> = transcript.chunks.iter().map(|chunk| chunk.start).collect();
    assert_eq!(starts.len(), 4, "{starts:?}");
    assert!(transcript.chunks.iter().all(|chunk| chunk.tokens <= 12));
    let options = TranscribeOptions::default();
    for (options, what) in [
        (options.clone().with_language("de".to_owned()), "has one only"),
        (options.clone().with_task("translate".to_owned()), "has one only"),
        (options.clone().with_into("de".to_owned()), "a language to translate into"),
        (options.clone().with_punctuation(false), "punctuation"),
        (options.with_prompt("boat".to_owned()), "no place for one"),
    ] {
        has(transcriber.set_options(&options).unwrap_err().message(), &[what]);
    }
}

#[test]
fn clips_of_any_length_are_heard_or_refused() {
    let bundle = TINY.bundle(|_| ());
    let mut model = bundle.on_cpu();
    TINY.refuses_clips(&mut model, 32_000, "the encoder takes 2.00 s at once");
    // Silence, and less than one row sees.
    let silence = [0.0; 32_000];
    for samples in [&silence[..], &silence[..894], &silence[..1]] {
        model.reset().unwrap();
        model.op_mut().prefill(&[Segment::Audio { samples, rate: RATE }]).unwrap();
    }
    TINY.steps_are_golden(&mut model);
    drop(model);
    bundle.refuses([
        ("/params/audio/hop", json!(0), "/params/audio: expected sizes"),
        ("/params/audio/token_id", json!(9999), "token_id: found 9999"),
        ("/params/audio/strides", json!([3, 3]), "at most"),
        ("/plan/params/encoder", json!("ear"), "ear"),
        ("/params/transcription/tokens_per_second", json!(0), "expected a positive number"),
    ]);
}

#[tier(qnn)]
fn the_npu_says_the_same() {
    TINY.on_npus();
}

/// Another checkpoint, made by `moonshine.py --unseen DIR`: `QHX_TEST_MOONSHINE=DIR`.
#[tier(by_hand = "QHX_TEST_MOONSHINE")]
fn a_checkpoint_of_the_environment_says_the_same() {
    TINY.unseen("QHX_TEST_MOONSHINE");
}
