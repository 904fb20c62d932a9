//! The tiny models of Canary from checkpoint to text, against goldens that `transformers` made
//! (`tests/oracle/canary.py`) and, of an archive of NeMo, those that NeMo made (`nemo_canary.py`).

use qhx::golden::Golden;
use qhx::{Bundle, TranscribeOptions};
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

const TINY: &str = "canary-tiny";
/// An archive of NeMo, whose encoder is narrower than its decoder.
const FLASH: &str = "canary-flash-tiny";
/// Logits and the encoder on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-4;

#[derive(Debug, Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
struct Case {
    id: String,
    clip: String,
    language: String,
    into: String,
    punctuation: bool,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    text: String,
    /// Rows that the encoder makes of the clip.
    rows: usize,
}

fn goldens(name: &str) -> Vec<Case> {
    tiny::golden_json::<Goldens>(name).cases
}

impl Case {
    fn request(&self) -> Request {
        // The clip stands at the position of the first token.
        let parts =
            vec![Part::Media(clip(&self.clip)), Part::Tokens(self.prompt_ids[1..].to_vec())];
        Request::greedy(Prompt::Parts(parts), self.output_ids.len())
    }

    fn options(&self) -> TranscribeOptions {
        TranscribeOptions::default()
            .with_language(self.language.clone())
            .with_into(self.into.clone())
            .with_punctuation(self.punctuation)
            .with_max_new(self.output_ids.len())
    }
}

/// A bundle for windows of one and two seconds.
fn bundle(name: &str, change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    Forged::of(&tiny::fixture(name), |options| {
        set(options, &[("windows", "1,2")]);
        change(options);
    })
}

fn says_the_same(model: &mut Model, cases: &[Case], label: &str) {
    for case in cases {
        model.reset().unwrap();
        let generation = generate(model, &case.request());
        assert_eq!(generation.tokens, case.output_ids, "{label}: {}", case.id);
        assert_eq!(generation.prompt_tokens, case.prompt_ids.len(), "{label}: {}", case.id);
    }
}

/// Keys of the cross-attention, logits and tokens; a short clip also through the graph for longer ones, which hides
/// what lies behind it, and behind a longer one, which leaves its rows there.
#[test]
fn cpu_equals_the_reference() {
    for (model, windows, prefill, shards) in [
        (TINY, "1,2", None, 1),
        (TINY, "2", Some(vec![]), 1),
        (TINY, "2,3", None, 2),
        (FLASH, "1,2", None, 1),
    ] {
        let bundle = bundle(model, |o| {
            set(o, &[("windows", windows)]);
            (o.prefill, o.shards) = (prefill, shards);
        });
        let mut cases = goldens(model);
        for case in &cases {
            let mut running = Dumping::open(&bundle.manifest, backends::cpu());
            says_the_same(&mut running, std::slice::from_ref(case), windows);
            let name = case.clip.trim_end_matches(".wav");
            let expected = golden_tensor(model, &format!("{name}.cross_k"));
            let found = running.arrays("cross_k_1");
            // Columns are rows of the encoder, of which the clip has the first.
            let columns = found.len() / (expected.len() / case.rows);
            let found: Vec<f32> = found
                .chunks_exact(columns)
                .flat_map(|row| row[..case.rows].iter().copied())
                .collect();
            let logits = golden_tensor(model, &format!("{}.logits", case.id));
            // Those of the prompt; what follows is in the tokens.
            let first = running.arrays("logits");
            let logits = logits[..first.len()].to_vec();
            for (what, found, expected) in [("keys", found, expected), ("logits", first, logits)] {
                let distance = Distance::of(&found, &expected).unwrap().largest;
                eprintln!("{model} {windows} {} {what}: {distance:.1e}", case.id);
                assert!(distance <= CPU_DISTANCE, "{model}: {}: {what}: {distance:e}", case.id);
            }
        }
        cases.reverse();
        says_the_same(&mut bundle.on_cpu(), &cases, windows);
    }
}

#[test]
fn languages_and_punctuation_are_asked_for() {
    let bundle = bundle(TINY, |_| ());
    let bundle = Bundle::open(&bundle.manifest).unwrap();
    let mut transcriber = bundle.transcriber().unwrap();
    let file = |clip: &str| tiny::fixture("whisper-tiny").join(clip);
    let mut said = |options: TranscribeOptions, clip: &str| {
        transcriber.set_options(&options).unwrap();
        transcriber.transcribe(file(clip)).unwrap()
    };
    for case in goldens(TINY) {
        let transcript = said(case.options(), &case.clip);
        let [chunk] = &transcript.chunks[..] else { panic!("{:?}", transcript.chunks) };
        assert_eq!((&chunk.ids, transcript.text.trim()), (&case.output_ids, case.text.trim()));
        assert_eq!(transcript.language, Some(case.language));
    }
    // English unless something else is asked for, and into English.
    let [english, german, _] = &goldens(TINY)[..] else { panic!("three cases") };
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
    let bundle = bundle(TINY, |_| ());
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
    // Silence, and less than a frame.
    for samples in [&long[..32_000], &long[..159], &long[..1]] {
        model.reset().unwrap();
        model.op_mut().prefill(&[Segment::Audio { samples, rate }]).unwrap();
    }
    let golden = Golden::make(&mut model, false, &mut |_| ()).unwrap();
    let idle = crate::golden::idle(&model);
    assert!(idle.is_empty(), "{idle:?}");
    for step in &golden.steps {
        let report = golden.check(&mut model, step).unwrap();
        assert!(report.passed && report.cosine > 0.99999, "{report:?}");
    }
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
    let full = tiny::full_matrix();
    let (fp16, int8) = (Precision::Fp16, Precision::W8A16);
    for (name, target, precision) in [
        (TINY, "v81", fp16),
        (TINY, "v81", int8),
        (TINY, "v73", fp16),
        (FLASH, "v81", fp16),
        (FLASH, "v73", fp16),
    ]
    .into_iter()
    .take(if full { 5 } else { 1 })
    {
        let bundle = bundle(name, |o| {
            o.precision = precision;
            o.compiler = Some(backends::compiler(target));
        });
        let mut model = bundle.open(backends::qnn());
        let mut cases = goldens(name);
        cases.truncate(if full { 3 } else { 1 });
        says_the_same(&mut model, &cases, &format!("{name} {target} {}", precision.name()));
    }
}

/// The archive says which languages it has, and its vocabulary is several behind each other.
#[test]
fn an_archive_of_nemo_is_a_checkpoint() {
    let bundle = bundle(FLASH, |_| ());
    let bundle = Bundle::open(&bundle.manifest).unwrap();
    let mut transcriber = bundle.transcriber().unwrap();
    for case in goldens(FLASH) {
        transcriber.set_options(&case.options()).unwrap();
        let file = tiny::fixture("whisper-tiny").join(&case.clip);
        let transcript = transcriber.transcribe(file).unwrap();
        let [chunk] = &transcript.chunks[..] else { panic!("{:?}", transcript.chunks) };
        assert_eq!((&chunk.ids, transcript.text.trim()), (&case.output_ids, case.text.trim()));
    }
    let japanese = TranscribeOptions::default().with_language("ja".to_owned());
    let error = transcriber.set_options(&japanese).unwrap_err();
    has(error.hint_text().unwrap_or_default(), &["It knows de, en, es, fr"]);
}

/// Another checkpoint, made by `canary.py` or `nemo_canary.py` with `--unseen DIR`: `QHX_TEST_CANARY=DIR`.
#[tier(by_hand = "QHX_TEST_CANARY")]
fn a_checkpoint_of_the_environment_says_the_same() {
    let dir = std::path::PathBuf::from(std::env::var_os("QHX_TEST_CANARY").unwrap());
    let bundle = Forged::of(&dir, |options| set(options, &[("windows", "1,3")]));
    let text = std::fs::read_to_string(dir.join("goldens.json")).unwrap();
    let goldens: Goldens = serde_json::from_str(&text).unwrap();
    says_the_same(&mut bundle.on_cpu(), &goldens.cases, "unseen");
}
