//! The Qwen3-ASR tiny model from checkpoint to text, against goldens that `transformers` made
//! (`tests/oracle/qwen3asr.py`).

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

const TINY: &str = "qwen3asr-tiny";
/// Rows and logits on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-4;
/// Texts around a clip.
const PROMPT: [&str; 2] = [
    "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|audio_start|>",
    "<|audio_end|><|im_end|>\n<|im_start|>assistant\n",
];

#[derive(Debug, Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
struct Case {
    clip: String,
    /// Name of the language that is asked for.
    language: Option<String>,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    text: String,
}

fn goldens() -> Vec<Case> {
    tiny::golden_json::<Goldens>(TINY).cases
}

impl Case {
    fn request(&self) -> Request {
        let name = self.language.as_ref();
        let head = name.map_or_else(String::new, |name| format!("language {name}<asr_text>"));
        let behind = format!("{}{head}", PROMPT[1]);
        let text = |text: &str| Part::Text(text.to_owned());
        let parts = vec![text(PROMPT[0]), Part::Media(clip(&self.clip)), text(&behind)];
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
        assert_eq!(generation.prompt_tokens, case.prompt_ids.len(), "{label}: {}", case.clip);
    }
}

/// Frames, rows of the tower, logits and tokens; clips also through a graph for longer ones, which hides what lies
/// behind them, and prompts token by token.
#[test]
fn cpu_equals_the_reference() {
    for (windows, prefill, shards) in [("1,2", None, 1), ("3", Some(vec![]), 1), ("2,9", None, 2)] {
        let bundle = bundle(|o| {
            set(o, &[("windows", windows)]);
            (o.prefill, o.shards) = (prefill, shards);
        });
        for case in &goldens() {
            let mut model = Dumping::open(&bundle.manifest, backends::cpu());
            says_the_same(&mut model, std::slice::from_ref(case), windows);
            let name = case.clip.trim_end_matches(".wav");
            if name == "one" {
                let expected = golden_tensor(TINY, "one.mel");
                let distance = Distance::of(&model.arrays("mel"), &expected).unwrap().largest;
                assert!(distance <= 2e-4, "{windows}: {distance:e}");
            }
            for what in ["rows", "logits"] {
                // Of the logits, those of the prompt; what follows is in the tokens.
                let found = model.arrays(what);
                let expected = golden_tensor(TINY, &format!("{name}.{what}"));
                let distance = Distance::of(&found, &expected[..found.len()]).unwrap().largest;
                eprintln!("{windows} {name} {what}: {distance:.1e}");
                assert!(distance <= CPU_DISTANCE, "{windows}: {name}: {what}: {distance:e}");
            }
        }
    }
}

#[test]
fn languages_are_asked_for_and_read_off_answers() {
    let forged = bundle(|_| ());
    let bundle = Bundle::open(&forged.manifest).unwrap();
    let mut transcriber = bundle.transcriber().unwrap();
    let file = |clip: &str| tiny::fixture("whisper-tiny").join(clip);
    let cases = goldens();
    let options = TranscribeOptions::default().with_max_new(cases[0].output_ids.len());
    for case in &cases {
        let code = case.language.as_ref().map(|_| "en".to_owned());
        transcriber.set_options(&options.clone().with_language(code.clone())).unwrap();
        let transcript = transcriber.transcribe(file(&case.clip)).unwrap();
        assert_eq!(transcript.chunks[0].ids, case.output_ids, "{}", case.clip);
        assert_eq!((transcript.text.trim(), transcript.language), (case.text.trim(), code));
    }
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
    drop((transcriber, bundle));
    let answer = json!({"before": "", "behind": "", "token": ids[2]});
    forged.edit(|manifest| {
        manifest["params"]["transcription"]["answer"] = answer;
        manifest["params"]["transcription"]["languages"]["xx"] = json!(head.trim());
    });
    let mut transcriber = Bundle::open(&forged.manifest).unwrap().transcriber().unwrap();
    transcriber.set_options(&options).unwrap();
    let transcript = transcriber.transcribe(file(&cases[0].clip)).unwrap();
    assert_eq!(
        (transcript.text.trim(), transcript.language.as_deref()),
        (words.trim(), Some("xx"))
    );
}

#[test]
fn clips_of_any_length_are_heard_or_refused() {
    let bundle = bundle(|_| ());
    let mut model = bundle.on_cpu();
    let rate = 16_000;
    let long = vec![0.0; 32_161];
    for (samples, what) in [
        (&long[..], "the bundle takes 2.00 s at once"),
        (&[], "0 samples"),
        (&[0.0, f32::NAN], "NaN"),
    ] {
        let error = model.op_mut().place(Segment::Audio { samples, rate }).unwrap_err();
        has(error.message(), &[what]);
    }
    // Silence, and less than half a second, which has silence behind it.
    for (samples, rows) in [(&long[..32_000], 26), (&long[..7_000], 7), (&long[..1], 7)] {
        model.reset().unwrap();
        let audio = Segment::Audio { samples, rate };
        let placement = model.op_mut().place(audio).unwrap();
        assert_eq!(placement.pieces.len(), 1);
        model.op_mut().prefill(&[audio]).unwrap();
        assert_eq!(model.op_mut().position(), rows);
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
        ("/params/audio/chunk", json!(0), "chunk 0"),
        ("/plan/params/audio", json!("ear"), "ear"),
    ]);
}

#[tier(qnn)]
fn the_npu_says_the_same() {
    let full = tiny::full_matrix();
    let (fp16, int8) = (Precision::Fp16, Precision::W8A16);
    for (target, precision) in
        [("v81", fp16), ("v81", int8), ("v73", fp16)].into_iter().take(if full { 3 } else { 1 })
    {
        let bundle = bundle(|o| {
            set(o, &[("windows", "2")]);
            o.precision = precision;
            o.compiler = Some(backends::compiler(target));
        });
        let mut model = bundle.open(backends::qnn());
        let mut cases = goldens();
        cases.truncate(if full { 2 } else { 1 });
        says_the_same(&mut model, &cases, &format!("{target} {}", precision.name()));
    }
}

/// Another checkpoint, made by `qwen3asr.py --unseen DIR`: `QHX_TEST_QWEN3ASR=DIR`.
#[tier(by_hand = "QHX_TEST_QWEN3ASR")]
fn a_checkpoint_of_the_environment_says_the_same() {
    let dir = std::path::PathBuf::from(std::env::var_os("QHX_TEST_QWEN3ASR").unwrap());
    let bundle = Forged::of(&dir, |options| set(options, &[("windows", "1,3")]));
    let text = std::fs::read_to_string(dir.join("goldens.json")).unwrap();
    let goldens: Goldens = serde_json::from_str(&text).unwrap();
    says_the_same(&mut bundle.on_cpu(), &goldens.cases, "unseen");
}
