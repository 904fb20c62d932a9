//! The Whisper tiny model from checkpoint to text, against goldens that `transformers` made
//! (`tests/oracle/whisper.py`).

use qhx::golden::Golden;
use qhx_base::{CancelToken, ErrorKind};
use qhx_core::engine::{Model, Part, Prompt, Request};
use qhx_core::manifest::Spelling;
use qhx_core::op::Segment;
use qhx_forge::{ForgeOptions, Precision};
use qhx_tests::forged::{Dumping, Forged};
use qhx_tests::replay::generate;
use qhx_tests::tiny::{self, golden_tensor};
use qhx_tests::{backends, has, says};
use qhx_tiers::tier;
use serde::Deserialize;
use serde_json::json;

use super::recogniser::clip;

const TINY: &str = "whisper-tiny";
/// For English alone, with drawn weights; its clips are those of [`TINY`].
const UNSEEN: &str = "whisper-unseen";
/// Logits and the encoder on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-4;

#[derive(Debug, Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

/// A clip with what is asked of it.
#[derive(Debug, Deserialize)]
struct Case {
    id: String,
    clip: String,
    language: String,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    no_speech: f32,
    /// Tokens that were asked for.
    #[serde(default = "plenty")]
    max_new: usize,
}

fn plenty() -> usize {
    28
}

fn goldens(fixture: &str) -> Vec<Case> {
    tiny::golden_json::<Goldens>(fixture).cases
}

impl Case {
    fn request(&self) -> Request {
        // The clip stands at the position of the first token.
        let parts =
            vec![Part::Media(clip(&self.clip)), Part::Tokens(self.prompt_ids[1..].to_vec())];
        Request::greedy(Prompt::Parts(parts), self.max_new)
    }
}

fn bundle() -> Forged {
    Forged::of(&tiny::fixture(TINY), |_| ())
}

/// Hundredths of a second between which the words of the first clip are spoken, by the tokens that `transformers`
/// chose.
fn word_times(model: &mut Model) -> Vec<[i64; 2]> {
    let goldens = goldens(TINY);
    let case = goldens.iter().find(|case| case.id == "one-transcribe-times").unwrap();
    let request = case.request();
    generate(model, &request);
    let said = &case.output_ids[..case.output_ids.len() - 1];
    let times = model.align(&request.prompt, said, &CancelToken::new()).unwrap();
    // The first and the last are times, and the second word has two tokens.
    let [_, first, begin, end, _] = times[..] else { panic!("{times:?}") };
    let hundredths = |seconds: f32| (seconds * 100.0).round() as i64;
    [first, [begin[0], end[1]]].iter().map(|word| word.map(hundredths)).collect()
}

fn says_the_same(model: &mut Model, cases: &[Case], label: &str) {
    for case in cases {
        model.reset().unwrap();
        let generation = generate(model, &case.request());
        assert_eq!(generation.tokens, case.output_ids, "{label}: {}", case.id);
        assert_eq!(generation.prompt_tokens, case.prompt_ids.len(), "{label}: {}", case.id);
        eprintln!("{label}: {} {:?}", case.id, generation.text);
    }
}

#[test]
fn golden_steps_execute_every_graph_of_whisper() {
    let bundle = bundle();
    let mut model = bundle.on_cpu();
    let golden = Golden::make(&mut model, false, &mut |_| ()).unwrap();
    let idle = crate::golden::idle(&model);
    assert!(idle.is_empty(), "{idle:?}");
    for step in &golden.steps {
        let report = golden.check(&mut model, step).unwrap();
        assert!(report.passed && report.cosine > 0.99999, "{report:?}");
    }
}

#[test]
fn cpu_equals_the_reference() {
    for (fixture, last, prefill, shards) in
        [(TINY, 1, None, 1), (TINY, 1, Some(vec![]), 2), (UNSEEN, 0, None, 1)]
    {
        let cases = goldens(fixture);
        let change = |o: &mut ForgeOptions| (o.prefill, o.shards) = (prefill, shards);
        let bundle = Forged::of(&tiny::fixture(fixture), change);
        let mut model = Dumping::open(&bundle.manifest, backends::cpu());
        let two = cases.iter().position(|case| case.clip == "two.wav").unwrap();
        says_the_same(&mut model, &cases[two..=two], "two");
        let vocab = model.info().vocab;
        let logits = golden_tensor(fixture, &format!("{}.logits", cases[two].id));
        let state = ["k", "v"].map(|kind| format!("cross_{kind}_{last}"));
        let state = state.map(|name| (golden_tensor(fixture, &format!("two.{name}")), name));
        let arrays = state.into_iter().chain([(logits[..vocab].to_vec(), "logits".to_owned())]);
        for (expected, name) in arrays {
            let distance = model.distance(&name, &expected).largest;
            eprintln!("{fixture} {name}: {distance:.1e}");
            assert!(distance <= CPU_DISTANCE, "{fixture} {name}: {distance:e}");
        }
        says_the_same(&mut model, &cases, fixture);
        if fixture == TINY {
            // As `words.json` has them, through graphs of four tokens, of one, and of two shards.
            assert_eq!(word_times(&mut model), [[0, 30], [30, 62]]);
            says_the_same(&mut model, &cases[..1], "behind an alignment");
        } else {
            let prompt = cases[0].request().prompt;
            let error = model.align(&prompt, &[5], &CancelToken::new()).unwrap_err();
            assert!(error.message().contains("finds no times of tokens"), "{error}");
        }
    }
}

#[test]
fn frames_are_those_of_the_feature_extractor() {
    let bundle = bundle();
    let mut model = Dumping::open(&bundle.manifest, backends::cpu());
    let cases = goldens(TINY);
    let one = cases.iter().find(|case| case.clip == "one.wav").unwrap();
    generate(&mut model, &one.request());
    let distance = model.distance("mel", &golden_tensor(TINY, "one.mel")).largest;
    assert!(distance <= 2e-4, "{distance:e}");
}

#[test]
fn language_and_silence_are_read_off_the_first_logits() {
    let bundle = bundle();
    let mut model = bundle.on_cpu();
    let transcription = model.manifest().params.transcription.clone().unwrap();
    let all: Vec<u32> = (0..model.info().vocab as u32).collect();
    for case in &goldens(TINY) {
        model.reset().unwrap();
        let prompt = Prompt::Parts(vec![Part::Media(clip(&case.clip))]);
        let logits = model.next_logits(&prompt, &all, &CancelToken::new()).unwrap();
        let of = |id: u32| logits[id as usize];
        let spoken = |code: &Spelling| code.token().map_or(f32::NEG_INFINITY, of);
        let languages = transcription.languages.iter();
        let heard = languages.max_by(|a, b| spoken(a.1).total_cmp(&spoken(b.1)));
        assert_eq!(heard.unwrap().0, &case.language, "{}", case.id);
        let total: f32 = logits.iter().map(|logit| logit.exp()).sum();
        let silence = of(transcription.no_speech.unwrap()).exp() / total;
        assert!((silence - case.no_speech).abs() < 1e-4, "{}: {silence}", case.id);
        // The clip stays encoded: the words follow without another run of the encoder.
        let generation = generate(&mut model, &case.request());
        assert_eq!((generation.tokens, generation.reused_tokens), (case.output_ids.clone(), 1));
    }
    let graphs = model.graph_stats();
    let encoder = graphs.iter().find(|graph| graph.graph == "encoder").unwrap();
    assert_eq!(encoder.executions, goldens(TINY).len() as u64);
}

#[test]
fn what_is_no_transcription_is_refused() {
    let bundle = bundle();
    let mut model = bundle.on_cpu();
    let error = model.start(&Request::completion("boat")).unwrap_err();
    says(&error, ErrorKind::Usage, &["does not generate; it does transcribe"]);
    assert!(error.hint_text().is_some_and(|hint| hint.contains("qhx transcribe")), "{error}");
    has(model.op_mut().prefill(&[Segment::Tokens(&[5])]).unwrap_err().message(), &["no audio"]);
    let long = vec![0.0; 32_001];
    let error = model.op_mut().place(Segment::Audio { samples: &long, rate: 16_000 }).unwrap_err();
    assert!(error.message().contains("the encoder takes 2.00 s at once"), "{error}");
    let (samples, rate) = (&long[..100], 16_000);
    let audio = Segment::Audio { samples, rate };
    model.op_mut().prefill(&[audio]).unwrap();
    has(model.op_mut().prefill(&[audio]).unwrap_err().message(), &["reset it first"]);
    has(model.op_mut().export_state().unwrap_err().message(), &["attends to a clip"]);
    model.reset().unwrap();
    let nan = [0.0, f32::NAN];
    let error = model.op_mut().prefill(&[Segment::Audio { samples: &nan, rate }]).unwrap_err();
    assert!(error.message().contains("NaN"), "{error}");
    drop(model);
    bundle.refuses([
        ("/params/audio/front_end/filters/mels", json!(40), "rows of 40 mels"),
        ("/params/audio/token_id", json!(9999), "token_id: found 9999"),
        ("/plan/params/encoder", json!("ear"), "ear"),
    ]);
}

/// Covers one clip, with times and without. The whole matrix covers all clips, and another shape.
#[tier(qnn)]
fn the_npu_says_the_same() {
    let full = tiny::full_matrix();
    let (fp16, int8) = (Precision::Fp16, Precision::W8A16);
    for (fixture, target, precision) in [
        (TINY, "v81", fp16),
        (TINY, "v81", int8),
        (TINY, "v73", fp16),
        (TINY, "v73", int8),
        (UNSEEN, "v81", fp16),
        (UNSEEN, "v73", fp16),
    ]
    .into_iter()
    .take(if full { 6 } else { 2 })
    {
        let mut cases = goldens(fixture);
        if !full {
            cases.retain(|case| case.clip == "one.wav" && case.id.contains("transcribe"));
        }
        let bundle = Forged::of(&tiny::fixture(fixture), |o| {
            o.precision = precision;
            o.compiler = Some(backends::compiler(target));
        });
        let mut model = bundle.open(backends::qnn());
        says_the_same(&mut model, &cases, &format!("{fixture} {target} {}", precision.name()));
        if precision == fp16 && fixture == TINY {
            let found = word_times(&mut model);
            let near = |(a, b): (&i64, &i64)| (a - b).abs() <= 4;
            let same = found.as_flattened().iter().zip(&[0, 30, 30, 62]).all(near);
            assert!(same, "{found:?}");
        }
    }
}
