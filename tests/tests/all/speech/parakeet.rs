//! The Parakeet tiny models from checkpoint to tokens and times, against goldens that `transformers` made
//! (`tests/oracle/parakeet.py`): a CTC head, a transducer with durations, and one without, drawn in other shapes.

use qhx_base::compare::Distance;
use qhx_base::{CancelToken, ErrorKind};
use qhx_core::engine::{Model, Request};
use qhx_core::op::Segment;
use qhx_forge::{ForgeOptions, Precision};
use qhx_tests::forged::{Dumping, Forged, set};
use qhx_tests::tiny::{self, golden_tensor};
use qhx_tests::{backends, has};
use qhx_tiers::tier;
use qhx_types::Media;
use serde::Deserialize;
use serde_json::json;

use super::recogniser::clip;
use crate::golden::{self as steps, find_damage};

const CTC: &str = "parakeet-ctc-tiny";
const TDT: &str = "parakeet-tdt-tiny";
const UNSEEN: &str = "parakeet-unseen";
/// The encoder and logits on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-4;

#[derive(Debug, Deserialize)]
struct Goldens {
    row_seconds: f32,
    cases: Vec<Case>,
}

/// A clip with its tokens, each with the rows where it begins and ends.
#[derive(Debug, Deserialize)]
struct Case {
    clip: String,
    tokens: Vec<(u32, usize, usize)>,
}

fn goldens(fixture: &str) -> Goldens {
    tiny::golden_json(fixture)
}

/// A bundle for windows of one and two seconds.
fn bundle(fixture: &str, change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    Forged::of(&tiny::fixture(fixture), |options| {
        set(options, &[("windows", "1,2")]);
        change(options);
    })
}

/// The model says the tokens of a case, at its times.
fn says_the_same(model: &mut Model, goldens: &Goldens, case: &Case, label: &str) {
    let answer = model.answer(&clip(&case.clip), &CancelToken::new()).unwrap();
    let tokens: Vec<u32> = case.tokens.iter().map(|(token, ..)| *token).collect();
    assert_eq!(answer.tokens, tokens, "{label}: {}", case.clip);
    for (found, &(token, from, to)) in answer.times.iter().zip(&case.tokens) {
        let expected = [from, to].map(|row| row as f32 * goldens.row_seconds);
        let near = found.iter().zip(expected).all(|(found, time)| (found - time).abs() < 1e-4);
        assert!(near, "{label}: {}: {token} at {found:?}, expected {expected:?}", case.clip);
    }
    assert_eq!(answer.times.len(), tokens.len());
}

/// Rows of the encoder, logits, tokens and times; a short clip also through the graph for longer ones, which hides what
/// lies behind it.
#[test]
fn cpu_equals_the_reference() {
    for (fixture, windows) in [(CTC, "1,2"), (CTC, "2"), (TDT, "1,2"), (TDT, "2"), (UNSEEN, "2")] {
        let goldens = goldens(fixture);
        for case in &goldens.cases {
            let bundle = bundle(fixture, |o| set(o, &[("windows", windows)]));
            let mut model = Dumping::open(&bundle.manifest, backends::cpu());
            says_the_same(&mut model, &goldens, case, fixture);
            let name = case.clip.trim_end_matches(".wav");
            let parts = match fixture {
                CTC => &[("encoder_logits", "logits")][..],
                _ => &[("encoder", "encoder"), ("logits", "logits")],
            };
            for (dumped, tensor) in parts {
                let expected = golden_tensor(fixture, &format!("{name}.{tensor}"));
                let distance = Distance::of(&model.arrays(dumped), &expected).unwrap().largest;
                eprintln!("{fixture} {windows} {name} {tensor}: {distance:.1e}");
                assert!(distance <= CPU_DISTANCE, "{fixture}: {name}: {tensor}: {distance:e}");
            }
        }
    }
}

#[test]
fn frames_are_those_of_the_feature_extractor() {
    for fixture in [CTC, UNSEEN] {
        let bundle = bundle(fixture, |_| ());
        let mut model = Dumping::open(&bundle.manifest, backends::cpu());
        model.answer(&clip("one.wav"), &CancelToken::new()).unwrap();
        let (expected, found) = (golden_tensor(fixture, "one.mel"), model.arrays("mel"));
        let (clip, behind) = found.split_at(expected.len());
        let distance = Distance::of(clip, &expected).unwrap().largest;
        assert!(distance <= 5e-4, "{fixture}: {distance:e}");
        assert!(behind.iter().all(|value| *value == 0.0));
    }
}

#[test]
fn clips_that_are_none_are_refused() {
    let bundle = bundle(TDT, |_| ());
    let mut model = bundle.on_cpu();
    let long = vec![0.0; 32_160];
    let rate = 16_000;
    for (segments, what) in [
        (&[Segment::Audio { samples: &long, rate }][..], "the encoder takes 2.00 s at once"),
        (&[Segment::Audio { samples: &[0.0, f32::NAN], rate }], "NaN"),
        (&[Segment::Audio { samples: &[], rate }], "0 samples"),
        (&[Segment::Audio { samples: &long[..9], rate: 8_000 }], "8000 samples a second"),
        (&[Segment::Tokens(&[1])], "not audio"),
        (&[], "0 segments"),
    ] {
        has(model.op_mut().answer(segments).unwrap_err().message(), &[what]);
    }
    // Silence, and less than a frame, have no words and are no errors.
    for samples in [&long[..32_000], &long[..1]] {
        let answer = model.op_mut().answer(&[Segment::Audio { samples, rate }]).unwrap();
        assert_eq!(answer.tokens.len(), answer.times.len());
    }
}

#[test]
fn golden_steps_execute_every_graph_of_a_recogniser() {
    for fixture in [CTC, TDT] {
        let bundle = bundle(fixture, |_| ());
        let stems =
            if fixture == CTC { &["encoder"][..] } else { &["encoder", "joint", "predictor"] };
        find_damage(&bundle.manifest, stems);
    }
}

#[test]
fn a_cancelled_answer_leaves_the_model_as_it_was() {
    let bundle = bundle(CTC, |_| ());
    let mut model = bundle.on_cpu();
    let (goldens, ticket) = (goldens(CTC), CancelToken::new());
    ticket.cancel();
    let error = model.answer(&clip("one.wav"), &ticket).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
    let image = Media::image(vec![0; 12], 2, 2).unwrap();
    has(model.answer(&image, &CancelToken::new()).unwrap_err().message(), &["not audio"]);
    says_the_same(&mut model, &goldens, &goldens.cases[0], CTC);
    let error = model.start(&Request::completion("boat")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
}

#[test]
fn bundles_that_do_not_fit_are_refused() {
    bundle(CTC, |_| ()).refuses([
        ("/params/audio/blank", json!(9999), "blank: found 9999"),
        ("/params/audio/front_end/filters/mels", json!(40), "expected 40 mels"),
        ("/params/audio/subsampling", json!(4), "a row for each 4 frames"),
        ("/params/audio/preemphasis", json!(1.5), "preemphasis: 1.5"),
    ]);
    bundle(TDT, |_| ()).refuses([
        ("/plan/params/encoder", json!("ear"), "ear"),
        ("/params/transducer/durations", json!(3), "expected 104 values"),
        ("/params/transducer/start", json!(9999), "start 9999"),
    ]);
}

#[tier(qnn)]
fn the_npu_says_the_same() {
    let full = tiny::full_matrix();
    let (fp16, int8) = (Precision::Fp16, Precision::W8A16);
    for (fixture, target, precision) in [
        (TDT, "v81", fp16),
        (CTC, "v81", fp16),
        (CTC, "v81", int8),
        (TDT, "v81", int8),
        (TDT, "v73", fp16),
        (CTC, "v73", int8),
        (TDT, "v73", int8),
        (UNSEEN, "v81", fp16),
        (UNSEEN, "v73", fp16),
    ]
    .into_iter()
    .take(if full { 9 } else { 2 })
    {
        let goldens = goldens(fixture);
        let bundle = bundle(fixture, |o| {
            set(o, &[("windows", if full { "1,2" } else { "1" })]);
            o.precision = precision;
            o.compiler = Some(backends::compiler(target));
        });
        let mut model = bundle.open(backends::qnn());
        let label = format!("{fixture} {target} {}", precision.name());
        for case in goldens.cases.iter().filter(|case| full || case.clip == "one.wav") {
            says_the_same(&mut model, &goldens, case, &label);
        }
        steps::pass(&bundle.manifest, &mut model, &label);
    }
}
