//! The Canary-Qwen tiny model from checkpoint to text, against goldens that NeMo made (`tests/oracle/canary_qwen.py`).

use qhx::TranscribeOptions;
use qhx_forge::Precision;
use qhx_tests::tiny;
use qhx_tiers::tier;
use serde_json::json;

use super::recogniser::{Recogniser, file, transcriber};

const TINY: Recogniser = Recogniser {
    name: "canary-qwen-tiny",
    prompt: |case| {
        let before = "<|im_start|>user\nTranscribe the following: ";
        case.between(before, "<|im_end|>\n<|im_start|>assistant\n")
    },
};

/// With the adapter in the decoder's weights.
#[test]
fn cpu_equals_the_reference() {
    let bundles = [("1,2", None, 1), ("3", Some(vec![]), 2)];
    TINY.on_cpu(bundles, |model, case| TINY.rows_are_near(model, case));
}

#[test]
fn files_are_transcribed_and_long_ones_cut() {
    let forged = TINY.bundle(|_| ());
    let mut transcriber = transcriber(&forged);
    TINY.transcribes(&mut transcriber, |_| None);
    transcriber.set_options(&TranscribeOptions::default().with_max_new(4)).unwrap();
    assert_eq!(transcriber.transcribe(file("long.wav")).unwrap().chunks.len(), 4);
    forged.refuses([
        ("/params/audio/halvings", json!(2), "values of keep"),
        ("/params/audio/preemphasis", json!(1.5), "preemphasis: 1.5"),
        ("/params/audio/token_id", json!(9999), "token_id: found 9999"),
    ]);
}

#[tier(qnn)]
fn the_npu_says_the_same() {
    for target in tiny::targets() {
        TINY.on_npu(target, Precision::Fp16);
    }
}

/// Another checkpoint, made by `canary_qwen.py --unseen DIR`: `QHX_TEST_CANARY_QWEN=DIR`.
#[tier(by_hand = "QHX_TEST_CANARY_QWEN")]
fn a_checkpoint_of_the_environment_says_the_same() {
    TINY.unseen("QHX_TEST_CANARY_QWEN");
}
