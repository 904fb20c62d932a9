//! The Canary-Qwen tiny model from checkpoint to text, against goldens that NeMo made (`tests/oracle/canary_qwen.py`).

use qhx::{Bundle, TranscribeOptions};
use qhx_base::compare::Distance;
use qhx_core::engine::{Model, Part, Prompt, Request};
use qhx_forge::{ForgeOptions, Precision};
use qhx_tests::backends;
use qhx_tests::forged::{Dumping, Forged, set};
use qhx_tests::replay::generate;
use qhx_tests::tiny::{self, golden_tensor};
use qhx_tiers::tier;
use serde::Deserialize;
use serde_json::json;

use super::parakeet::clip;

const TINY: &str = "canary-qwen-tiny";
/// Rows and logits on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-4;
/// Texts around a clip.
const PROMPT: [&str; 2] =
    ["<|im_start|>user\nTranscribe the following: ", "<|im_end|>\n<|im_start|>assistant\n"];

#[derive(Debug, Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
struct Case {
    clip: String,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    text: String,
}

fn goldens() -> Vec<Case> {
    tiny::golden_json::<Goldens>(TINY).cases
}

impl Case {
    fn request(&self) -> Request {
        let [before, behind] = PROMPT.map(|text| Part::Text(text.to_owned()));
        let parts = vec![before, Part::Media(clip(&self.clip)), behind];
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

/// Rows of the encoder, logits and tokens, with the adapter in the decoder's weights; a short clip also through a graph
/// for longer ones.
#[test]
fn cpu_equals_the_reference() {
    for (windows, prefill, shards) in [("1,2", None, 1), ("3", Some(vec![]), 2)] {
        let bundle = bundle(|o| {
            set(o, &[("windows", windows)]);
            (o.prefill, o.shards) = (prefill, shards);
        });
        for case in &goldens() {
            let mut model = Dumping::open(&bundle.manifest, backends::cpu());
            says_the_same(&mut model, std::slice::from_ref(case), windows);
            let name = case.clip.trim_end_matches(".wav");
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
fn files_are_transcribed_and_long_ones_cut() {
    let forged = bundle(|_| ());
    let bundle = Bundle::open(&forged.manifest).unwrap();
    let mut transcriber = bundle.transcriber().unwrap();
    let file = |clip: &str| tiny::fixture("whisper-tiny").join(clip);
    let cases = goldens();
    let options = TranscribeOptions::default().with_max_new(cases[0].output_ids.len());
    transcriber.set_options(&options).unwrap();
    for case in &cases {
        let transcript = transcriber.transcribe(file(&case.clip)).unwrap();
        assert_eq!(transcript.chunks[0].ids, case.output_ids, "{}", case.clip);
        // Lines of an answer are one text.
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words(&transcript.text), words(&case.text));
    }
    assert_eq!(transcriber.transcribe(file("long.wav")).unwrap().chunks.len(), 4);
    forged.refuses([
        ("/params/audio/halvings", json!(2), "values of keep"),
        ("/params/audio/preemphasis", json!(1.5), "preemphasis: 1.5"),
        ("/params/audio/token_id", json!(9999), "token_id: found 9999"),
    ]);
}

#[tier(qnn)]
fn the_npu_says_the_same() {
    let full = tiny::full_matrix();
    for target in tiny::targets() {
        let bundle = bundle(|o| {
            o.precision = Precision::Fp16;
            o.compiler = Some(backends::compiler(target));
        });
        let mut cases = goldens();
        cases.truncate(if full { 2 } else { 1 });
        says_the_same(&mut bundle.open(backends::qnn()), &cases, target);
    }
}

/// Another checkpoint, made by `canary_qwen.py --unseen DIR`: `QHX_TEST_CANARY_QWEN=DIR`.
#[tier(by_hand = "QHX_TEST_CANARY_QWEN")]
fn a_checkpoint_of_the_environment_says_the_same() {
    let dir = std::path::PathBuf::from(std::env::var_os("QHX_TEST_CANARY_QWEN").unwrap());
    let bundle = Forged::of(&dir, |options| set(options, &[("windows", "1,3")]));
    let text = std::fs::read_to_string(dir.join("goldens.json")).unwrap();
    let goldens: Goldens = serde_json::from_str(&text).unwrap();
    says_the_same(&mut bundle.on_cpu(), &goldens.cases, "unseen");
}
