//! The Moonshine tiny model from checkpoint to text, against goldens that `transformers` made
//! (`tests/oracle/moonshine.py`).

use qhx::golden::Golden;
use qhx::{Bundle, Source, TranscribeOptions};
use qhx_base::CancelToken;
use qhx_base::compare::Distance;
use qhx_core::engine::{Model, Part, Prompt, Request};
use qhx_core::op::Segment;
use qhx_forge::{ForgeOptions, Precision};
use qhx_tests::forged::{Dumping, Forged, set};
use qhx_tests::replay::generate;
use qhx_tests::tiny::{self, golden_tensor};
use qhx_tests::{backends, has};
use qhx_tiers::tier;
use serde::Deserialize;
use serde_json::json;

use super::parakeet::clip;

const TINY: &str = "moonshine-tiny";
/// Logits and the encoder on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-4;

#[derive(Debug, Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
struct Case {
    clip: String,
    output_ids: Vec<u32>,
    text: String,
    /// Rows that the encoder makes of the clip.
    rows: usize,
}

fn goldens() -> Vec<Case> {
    tiny::golden_json::<Goldens>(TINY).cases
}

impl Case {
    fn request(&self) -> Request {
        let parts = vec![Part::Media(clip(&self.clip))];
        Request::greedy(Prompt::Parts(parts), self.output_ids.len())
    }
}

/// A bundle for windows of one and two seconds.
fn bundle(change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    Forged::of(&tiny::fixture(TINY), |options| {
        set(options, &[("windows", "1,2")]);
        change(options);
    })
}

fn says_the_same(model: &mut Model, cases: &[Case], label: &str) {
    for case in cases {
        model.reset().unwrap();
        let generation = generate(model, &case.request());
        assert_eq!(generation.tokens, case.output_ids, "{label}: {}", case.clip);
        assert_eq!(generation.prompt_tokens, 1, "{label}: {}", case.clip);
    }
}

/// Frames, keys of the cross-attention, logits and tokens; a short clip also through the graph for longer ones, which
/// hides what lies behind it, and behind a longer one, which leaves its rows there.
#[test]
fn cpu_equals_the_reference() {
    for (windows, prefill, shards) in [("1,2", None, 1), ("2", None, 1), ("2,30", Some(vec![4]), 2)]
    {
        let bundle = bundle(|o| {
            set(o, &[("windows", windows)]);
            (o.prefill, o.shards) = (prefill, shards);
        });
        let mut cases = goldens();
        for case in &cases {
            let mut model = Dumping::open(&bundle.manifest, backends::cpu());
            says_the_same(&mut model, std::slice::from_ref(case), windows);
            let name = case.clip.trim_end_matches(".wav");
            if name == "one" {
                let expected = golden_tensor(TINY, "one.frames");
                let distance = Distance::of(&model.arrays("frames"), &expected).unwrap().largest;
                assert!(distance <= 1e-5, "{windows}: {distance:e}");
            }
            let expected = golden_tensor(TINY, &format!("{name}.cross_k"));
            let found = model.arrays("cross_k_1");
            // Columns are rows of the encoder, of which the clip has the first.
            let columns = found.len() / (expected.len() / case.rows);
            let found: Vec<f32> = found
                .chunks_exact(columns)
                .flat_map(|row| row[..case.rows].iter().copied())
                .collect();
            let logits = golden_tensor(TINY, &format!("{name}.logits"));
            // Those of the prompt; what follows is in the tokens.
            let first = model.arrays("logits");
            let logits = logits[..first.len()].to_vec();
            for (what, found, expected) in [("keys", found, expected), ("logits", first, logits)] {
                let distance = Distance::of(&found, &expected).unwrap().largest;
                eprintln!("{windows} {name} {what}: {distance:.1e}");
                assert!(distance <= CPU_DISTANCE, "{windows}: {name}: {what}: {distance:e}");
            }
        }
        cases.reverse();
        says_the_same(&mut bundle.on_cpu(), &cases, windows);
    }
}

#[test]
fn a_second_of_audio_gives_few_tokens() {
    let bundle = bundle(|_| ());
    let bundle = Bundle::open(&bundle.manifest).unwrap();
    let mut transcriber = bundle.transcriber().unwrap();
    for case in goldens() {
        let file = tiny::fixture("whisper-tiny").join(&case.clip);
        let transcript = transcriber.transcribe(file).unwrap();
        let [chunk] = &transcript.chunks[..] else { panic!("{:?}", transcript.chunks) };
        assert_eq!((&chunk.ids, transcript.text.trim()), (&case.output_ids, case.text.trim()));
        assert!(transcriber.cut_off(chunk).unwrap().contains("tokens_per_second"));
    }
    // More than a window: pieces that overlap, each of as many tokens as it may have.
    let long = Source::File(tiny::fixture("whisper-tiny").join("long.wav"));
    let transcript = transcriber.transcribe_with(&long, &CancelToken::new(), |_| {}).unwrap();
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
    let bundle = bundle(|_| ());
    let mut model = bundle.on_cpu();
    let rate = 16_000;
    let long = vec![0.0; 32_001];
    for (samples, what) in [
        (&long[..], "the encoder takes 2.00 s at once"),
        (&[], "0 samples"),
        (&[0.0, f32::NAN], "NaN"),
    ] {
        let error = model.op_mut().place(Segment::Audio { samples, rate }).unwrap_err();
        has(error.message(), &[what]);
    }
    // Silence, and less than one row sees.
    for samples in [&long[..32_000], &long[..894], &long[..1]] {
        model.reset().unwrap();
        model.op_mut().prefill(&[Segment::Audio { samples, rate }]).unwrap();
    }
    drop(model);
    bundle.refuses([
        ("/params/audio/hop", json!(0), "/params/audio: expected sizes"),
        ("/params/audio/token_id", json!(9999), "token_id: found 9999"),
        ("/params/audio/strides", json!([3, 3]), "at most"),
        ("/plan/params/encoder", json!("ear"), "ear"),
        ("/params/transcription/tokens_per_second", json!(0), "expected a positive number"),
    ]);
}

#[test]
fn golden_steps_execute_every_graph_of_moonshine() {
    let bundle = bundle(|_| ());
    let mut model = bundle.on_cpu();
    let golden = Golden::make(&mut model, false, &mut |_| ()).unwrap();
    assert!(!golden.steps.is_empty());
    let idle = crate::golden::idle(&model);
    assert!(idle.is_empty(), "{idle:?}");
    for step in &golden.steps {
        let report = golden.check(&mut model, step).unwrap();
        assert!(report.passed && report.cosine > 0.99999, "{report:?}");
    }
}

#[tier(qnn)]
fn the_npu_says_the_same() {
    let full = tiny::full_matrix();
    let (fp16, int8) = (Precision::Fp16, Precision::W8A16);
    for (target, precision) in
        [("v81", fp16), ("v81", int8), ("v73", fp16)].into_iter().take(if full { 3 } else { 1 })
    {
        let bundle = bundle(|o| {
            o.precision = precision;
            o.compiler = Some(backends::compiler(target));
        });
        let mut model = bundle.open(backends::qnn());
        says_the_same(&mut model, &goldens(), &format!("{target} {}", precision.name()));
    }
}

/// Another checkpoint, made by `moonshine.py --unseen DIR`: `QHX_TEST_MOONSHINE=DIR`.
#[tier(by_hand = "QHX_TEST_MOONSHINE")]
fn a_checkpoint_of_the_environment_says_the_same() {
    let dir = std::path::PathBuf::from(std::env::var_os("QHX_TEST_MOONSHINE").unwrap());
    let bundle = Forged::of(&dir, |options| set(options, &[("windows", "1,3")]));
    let text = std::fs::read_to_string(dir.join("goldens.json")).unwrap();
    let goldens: Goldens = serde_json::from_str(&text).unwrap();
    says_the_same(&mut bundle.on_cpu(), &goldens.cases, "unseen");
}
