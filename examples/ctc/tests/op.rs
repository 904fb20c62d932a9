//! The op over a scripted graph.

use ctc_op::Ctc;
use qhx_op::harness::{OpHarness, graph, tensor};
use qhx_op::{DType, Segment};
use serde_json::{Value, json};

/// Four mels of 20 ms frames; eight frames become four groups of scores for a blank and two letters.
fn harness(change: impl FnOnce(&mut Value)) -> OpHarness {
    let mut manifest = json!({
        "plan": {"params": {"recognise": "recognise"}},
        "params": {"audio": {"blank": 0, "front_end": {
            "rate": 16000, "frame": 320, "hop": 320, "fft": 512, "window": "periodic_hann", "span": 320,
            "spectrum": "power", "filters": {"mels": 4, "min_hz": 0.0, "max_hz": 8000.0, "scale": "htk"},
            "log": {"ln_add": 0.001}
        }}}
    });
    change(&mut manifest);
    let mel = tensor("mel", DType::F32, [8, 4]);
    let scores = tensor("scores", DType::F32, [4, 3]);
    OpHarness::new().manifest(manifest).graph(graph("recognise", [mel], [scores]))
}

fn says(letters: [usize; 4]) -> OpHarness {
    harness(|_| ()).script(move |step| {
        let row = |letter| (0..3).map(move |at| if at == letter { 1.0 } else { 0.0 });
        step.set("scores", &letters.into_iter().flat_map(row).collect::<Vec<f32>>())
    })
}

fn audio(samples: &[f32]) -> Segment<'_> {
    Segment::Audio { samples, rate: 16_000 }
}

#[test]
fn repetitions_and_blanks_are_left_out() {
    let whole = [0.1; 8 * 320];
    for (letters, tokens, times) in [
        ([1, 1, 0, 1], vec![1, 1], vec![[0.0, 0.08], [0.12, 0.16]]),
        ([0, 2, 1, 0], vec![2, 1], vec![[0.04, 0.08], [0.08, 0.12]]),
        ([0, 0, 0, 0], vec![], vec![]),
    ] {
        let answer = says(letters).open::<Ctc>().unwrap().answer(&[audio(&whole)]).unwrap();
        assert_eq!((answer.tokens, answer.times), (tokens, times));
    }
    // Behind the end of a clip nothing is said.
    let answer = says([1, 2, 2, 2]).open::<Ctc>().unwrap().answer(&[audio(&whole[..640])]).unwrap();
    assert_eq!(answer.tokens, [1]);
}

#[test]
fn what_is_no_clip_or_no_model_is_refused() {
    let mut op = says([0; 4]).open::<Ctc>().unwrap();
    for (segments, what) in [
        (vec![], "0 segments"),
        (vec![Segment::Tokens(&[1])], "not audio"),
        (vec![audio(&[0.1; 9 * 320])], "9 frames"),
        (vec![audio(&[f32::NAN; 320])], "NaN"),
    ] {
        let error = op.answer(&segments).unwrap_err();
        assert!(error.message().contains(what), "{what}: {error}");
    }
    let blank = harness(|manifest| manifest["params"]["audio"]["blank"] = json!(3));
    assert!(blank.open::<Ctc>().unwrap_err().message().contains("the blank, 3"));
}
