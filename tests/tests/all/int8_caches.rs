//! Caches of int8: what they cost, and that states of them go everywhere.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use std::path::{Path, PathBuf};

use qhx_core::ErrorKind;
use qhx_core::compare::Distance;
use qhx_core::engine::Model;
use qhx_core::op::{Segment, Task};
use qhx_forge::{Caches, ForgeOptions, Silent, forge};
use qhx_tests::backends;
use qhx_tests::replay::{hands_over, shortest, step_exact};
use qhx_tests::tiny::{self, Bundles, Goldens};
use qhx_tiers::tier;

/// Rows of the prefill graphs.
const ROWS: usize = 12;

fn bundle(tiny: &'static str, caches: Caches) -> PathBuf {
    static MADE: Bundles<(&str, Caches)> = Bundles::new();
    MADE.get((tiny, caches), |out| make(tiny, out, |options| options.caches = caches))
}

fn make(tiny: &str, out: &Path, change: impl FnOnce(&mut ForgeOptions)) -> PathBuf {
    let mut options = ForgeOptions::new(out);
    options.max_ctx = Some(200);
    options.prefill = Some(vec![ROWS]);
    change(&mut options);
    let report = forge(&tiny::fixture(tiny), &options, &mut Silent);
    report.unwrap_or_else(|e| panic!("forging {tiny}: {e}")).manifest
}

/// Logits of each step of all cases, whose tokens are those of the goldens.
fn logits(model: &mut Model, goldens: &Goldens) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    for case in &goldens.cases {
        let op = model.op_mut();
        op.reset().unwrap();
        op.prefill(&[Segment::Tokens(&case.prompt_ids)]).unwrap();
        for (step, _) in case.output_ids.iter().enumerate() {
            if step > 0 {
                op.decode(case.output_ids[step - 1]).unwrap();
            }
            all.push(op.logits().unwrap().to_f32());
        }
    }
    all
}

/// Kullback-Leibler divergence of `q` from `p`, in nats.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_softmax = |logits: &[f32]| {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
        logits.iter().map(|x| f64::from(x - most) - sum.ln()).collect::<Vec<_>>()
    };
    let (p, q) = (log_softmax(p), log_softmax(q));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}

#[test]
fn int8_caches_cost_hardly_any_divergence() {
    for tiny in ["llama3-tiny", "mistral-tiny", "qwen3-tiny", "qwen3-moe"] {
        let goldens = tiny::goldens(&tiny::fixture(tiny));
        let [plain, int8] = [Caches::F16, Caches::Int8].map(|caches| {
            let mut model = tiny::open(&bundle(tiny, caches), backends::cpu()).unwrap();
            logits(&mut model, &goldens)
        });
        let best =
            |logits: &[f32]| (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
        let (mut sum, mut most) = (0.0, 0.0f64);
        for (step, (plain, int8)) in plain.iter().zip(&int8).enumerate() {
            assert!(int8.iter().all(|logit| logit.is_finite()), "{tiny}, step {step}");
            assert_eq!(best(plain), best(int8), "{tiny}, step {step}");
            let divergence = divergence(plain, int8);
            (sum, most) = (sum + divergence, most.max(divergence));
        }
        let mean = sum / plain.len() as f64;
        eprintln!("{tiny}: {mean:.1e} nats, {most:.1e} at most, {} steps", plain.len());
        // Without quantization there is none.
        assert!((1e-10..5e-6).contains(&mean), "{tiny}: {mean}");
    }
}

/// What other families lack is refused by name.
#[test]
fn families_without_int8_caches_are_named() {
    for (tiny, task, class) in [
        ("gemma4-tiny", Task::Generate, "Gemma4ForConditionalGeneration"),
        ("whisper-tiny", Task::Transcribe, "WhisperForConditionalGeneration"),
        ("qwen3-tiny", Task::Embed, "Qwen3ForCausalLM"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut options = ForgeOptions::new(folder.path().join("bundle"));
        (options.caches, options.task) = (Caches::Int8, task);
        let error = forge(&tiny::fixture(tiny), &options, &mut Silent).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        let expected = format!("--caches int8: the caches of a {class} hold f16 alone");
        assert!(error.message().contains(&expected), "{error}");
    }
}

/// Tokens are those of the goldens on the emulator, and behind a hand-over of the state to the CPU.
#[tier(qnn)]
#[test]
fn the_npu_reads_int8_caches_and_hands_them_over() {
    let libraries = tiny::qnn_libraries();
    let (htp, system) = &libraries;
    let folder = tempfile::tempdir().unwrap();
    let tiny = "llama3-tiny";
    let manifest = make(tiny, &folder.path().join("bundle"), |options| {
        options.compiler = Some(backends::compiler(htp, system, "v73"));
        options.caches = Caches::Int8;
    });
    let goldens = tiny::goldens(&tiny::fixture(tiny)).brief();
    let mut model = tiny::open(&manifest, backends::qnn(&libraries)).unwrap();
    let cases = shortest(&goldens, 1);
    let Distance { cosine, .. } = step_exact(&mut model, &goldens, &cases, tiny);
    assert!(cosine >= 0.999, "cosine {cosine}");
    let Distance { cosine, .. } = hands_over(&mut model, &goldens, cases[0], tiny);
    assert!(cosine >= 0.999, "behind the hand-over: cosine {cosine}");
}
