//! The Qwen3-ASR tiny model from checkpoint to text, against goldens that `transformers` made
//! (`tests/oracle/qwen3asr.py`).

use qhx::TranscribeOptions;
use qhx_core::op::Segment;
use qhx_tests::has;
use qhx_tiers::tier;
use serde_json::json;

use super::recogniser::{Case, RATE, Recogniser, file, transcriber};

const TINY: Recogniser = Recogniser {
    name: "qwen3asr-tiny",
    prompt: |case| {
        let language = case.language.as_ref();
        let head = language.map_or_else(String::new, |name| format!("language {name}<asr_text>"));
        let before = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|audio_start|>";
        let behind = "<|audio_end|><|im_end|>\n<|im_start|>assistant\n";
        case.between(before, &format!("{behind}{head}"))
    },
};

/// Code of a case's language.
fn code(case: &Case) -> Option<String> {
    case.language.as_ref().map(|_| "en".to_owned())
}

/// Also prompts token by token.
#[test]
fn cpu_equals_the_reference() {
    let bundles = [("1,2", None, 1), ("3", Some(vec![]), 1), ("2,9", None, 2)];
    TINY.on_cpu(bundles, |model, case| {
        TINY.frames_are_near(model, case, "mel", 2e-4);
        TINY.rows_are_near(model, case);
    });
}

#[test]
fn languages_are_asked_for_and_read_off_answers() {
    let forged = TINY.bundle(|_| ());
    let mut transcriber = transcriber(&forged);
    TINY.transcribes(&mut transcriber, code);
    let cases = TINY.cases();
    let options = TranscribeOptions::default().with_max_new(cases[0].output_ids.len());
    // Longer than the tower takes, and names that may come up.
    let prompted = options.clone().with_prompt("boat".to_owned());
    transcriber.set_options(&prompted).unwrap();
    assert_eq!(transcriber.transcribe(file("long.wav")).unwrap().chunks.len(), 4);
    let error = transcriber.set_options(&options.clone().with_language("la".to_owned()));
    let error = error.unwrap_err();
    has(error.message(), &["the language \"la\""]);
    assert!(error.hint_text().is_some_and(|hint| hint.contains("ar, cs, da, de")), "{error}");
    // What stands in front of the third token names a language here.
    let ids = &cases[0].output_ids;
    let tokenizer = transcriber.model().tokenizer().unwrap();
    let [head, words] = [&ids[..2], &ids[3..]].map(|ids| tokenizer.decode(ids).unwrap());
    drop(transcriber);
    let answer = json!({"before": "", "behind": "", "token": ids[2]});
    forged.edit(|manifest| {
        manifest["params"]["transcription"]["answer"] = answer;
        manifest["params"]["transcription"]["languages"]["xx"] = json!(head.trim());
    });
    let mut transcriber = super::recogniser::transcriber(&forged);
    transcriber.set_options(&options).unwrap();
    let transcript = transcriber.transcribe(file(&cases[0].clip)).unwrap();
    assert_eq!(
        (transcript.text.trim(), transcript.language.as_deref()),
        (words.trim(), Some("xx"))
    );
}

#[test]
fn clips_of_any_length_are_heard_or_refused() {
    let bundle = TINY.bundle(|_| ());
    let mut model = bundle.on_cpu();
    TINY.refuses_clips(&mut model, 32_160, "the bundle takes 2.00 s at once");
    // Silence, and less than half a second, which has silence behind it.
    let silence = [0.0; 32_000];
    for (samples, rows) in [(&silence[..], 26), (&silence[..7_000], 7), (&silence[..1], 7)] {
        model.reset().unwrap();
        let audio = Segment::Audio { samples, rate: RATE };
        let placement = model.op_mut().place(audio).unwrap();
        assert_eq!(placement.pieces.len(), 1);
        model.op_mut().prefill(&[audio]).unwrap();
        assert_eq!(model.op_mut().position(), rows);
    }
    TINY.steps_are_golden(&mut model);
    drop(model);
    bundle.refuses([
        ("/params/audio/front_end/filters/mels", json!(40), "expected 40 mels"),
        ("/params/audio/token_id", json!(9999), "token_id: found 9999"),
        ("/params/audio/chunk", json!(0), "chunk 0"),
        ("/plan/params/audio", json!("ear"), "ear"),
    ]);
}

#[tier(qnn)]
fn the_npu_says_the_same() {
    TINY.on_npus();
}

/// Another checkpoint, made by `qwen3asr.py --unseen DIR`: `QHX_TEST_QWEN3ASR=DIR`.
#[tier(by_hand = "QHX_TEST_QWEN3ASR")]
fn a_checkpoint_of_the_environment_says_the_same() {
    TINY.unseen("QHX_TEST_QWEN3ASR");
}
