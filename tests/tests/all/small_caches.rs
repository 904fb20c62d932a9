//! Caches of int8, and of f16 on the CPU: what they cost, and that states of them go everywhere.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_base::ErrorKind;
use qhx_core::engine::Model;
use qhx_core::op::{Segment, Task};
use qhx_cpu::{CpuBackend, CpuOptions};
use qhx_exec::backend::Backend;
use qhx_forge::{Caches, ForgeOptions, Silent, forge};
use qhx_tests::backends;
use qhx_tests::forged::Forged;
use qhx_tests::replay::{alike, hands_over, shortest, step_exact};
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

/// Mean and largest divergence of steps, which have the same likeliest token.
fn compared(tiny: &str, plain: &[Vec<f32>], other: &[Vec<f32>]) -> (f64, f64) {
    let best = |logits: &[f32]| (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
    let (mut sum, mut most) = (0.0, 0.0f64);
    for (step, (plain, other)) in plain.iter().zip(other).enumerate() {
        assert!(other.iter().all(|logit| logit.is_finite()), "{tiny}, step {step}");
        assert_eq!(best(plain), best(other), "{tiny}, step {step}");
        let divergence = divergence(plain, other);
        (sum, most) = (sum + divergence, most.max(divergence));
    }
    (sum / plain.len() as f64, most)
}

/// A conversation goes on from one to the other, and the bytes of it show what is stored.
#[test]
fn the_cpu_stores_caches_as_f16_where_asked() {
    let half: Arc<dyn Backend> = Arc::new(
        CpuBackend::new(CpuOptions { caches: qhx_cpu::Caches::F16, ..CpuOptions::default() })
            .unwrap(),
    );
    for tiny in ["llama3-tiny", "qwen35-tied", "gemma4-tiny", "phimoe-6"] {
        let goldens = tiny::goldens(&tiny::fixture(tiny)).brief();
        let manifest = bundle(tiny, Caches::F16);
        let mut models =
            [backends::cpu(), half.clone()].map(|on| tiny::open(&manifest, on).unwrap());
        let [plain, other] = models.each_mut().map(|model| logits(model, &goldens));
        let (mean, most) = compared(tiny, &plain, &other);
        eprintln!("{tiny}: {mean:.1e} nats, {most:.1e} at most, {} steps", plain.len());
        assert!((1e-13..1e-6).contains(&mean), "{tiny}: {mean}");
        let [plain, other] = models.each_mut().map(Model::op_mut);
        let position = plain.position();
        let (state, small) = (plain.export_state().unwrap(), other.export_state().unwrap());
        let most = if tiny.starts_with("qwen35") { 0.95 } else { 0.6 };
        assert!(
            (small.len() as f64) < most * state.len() as f64,
            "{} of {}",
            small.len(),
            state.len()
        );
        plain.import_state(position, &small).unwrap();
        other.import_state(position, &state).unwrap();
        let token = goldens.cases[0].output_ids[0];
        let [plain, other] = [plain, other].map(|op| {
            op.decode(token).unwrap();
            vec![op.logits().unwrap().to_f32()]
        });
        assert!(compared(tiny, &plain, &other).0 < 1e-5, "{tiny}");
    }
}

#[test]
fn int8_caches_cost_hardly_any_divergence() {
    for tiny in
        ["llama3-tiny", "mistral-tiny", "qwen3-tiny", "qwen3-moe", "qwen35-tied", "phimoe-6"]
    {
        let goldens = tiny::goldens(&tiny::fixture(tiny));
        let [plain, int8] = [Caches::F16, Caches::Int8].map(|caches| {
            let mut model = tiny::open(&bundle(tiny, caches), backends::cpu()).unwrap();
            logits(&mut model, &goldens)
        });
        let (mean, most) = compared(tiny, &plain, &int8);
        eprintln!("{tiny}: {mean:.1e} nats, {most:.1e} at most, {} steps", plain.len());
        // Without quantization there is none. Another expert for a token costs more than the rounding that chose it.
        let most = if tiny == "phimoe-6" { 5e-5 } else { 5e-6 };
        assert!((1e-10..most).contains(&mean), "{tiny}: {mean}");
    }
}

/// Families without int8 caches are refused by name.
#[test]
fn families_without_int8_caches_are_named() {
    for (tiny, task, class) in [
        ("gemma4-tiny", Task::Generate, "Gemma4ForConditionalGeneration"),
        ("whisper-tiny", Task::Transcribe, "WhisperForConditionalGeneration"),
        ("qwen3-tiny", Task::Embed, "Qwen3ForCausalLM"),
    ] {
        let change = |o: &mut ForgeOptions| (o.caches, o.task) = (Caches::Int8, Some(task));
        let error = Forged::try_of(&tiny::fixture(tiny), change).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        let expected = format!("--caches int8: the caches of a {class} hold f16 alone");
        assert!(error.message().contains(&expected), "{error}");
    }
}

/// Tokens are those of the goldens on the emulator, and behind a hand-over of the state to the CPU.
#[tier(qnn)]
fn the_npu_reads_int8_caches_and_hands_them_over() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = "llama3-tiny";
    let manifest = make(tiny, &folder.path().join("bundle"), |options| {
        (options.compiler, options.onnx) = (Some(backends::compiler("v73")), true);
        options.caches = Caches::Int8;
    });
    let goldens = tiny::goldens(&tiny::fixture(tiny)).brief();
    let mut model = tiny::open(&manifest, backends::qnn()).unwrap();
    let cases = shortest(&goldens, 1);
    alike(step_exact(&mut model, &goldens, &cases, tiny), 0.999, tiny);
    alike(hands_over(&mut model, &goldens, cases[0], tiny), 0.999, "behind the hand-over");
}
