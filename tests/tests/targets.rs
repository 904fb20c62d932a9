//! The families on v68, v69 and v73, in each precision, on the emulator. Their own tests have v75, v79 and v81.
//!
//! A program of its own, and one bundle at a time: while one thread runs graphs for v68, the emulator fails to execute
//! those of another thread for chips of more tightly coupled memory ("Could't match allocated VTCM pointer to a VXU
//! VTCM").

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use qhx_core::engine::{Prompt, Request};
use qhx_forge::{ForgeOptions, Precision, Silent, forge};
use qhx_tests::replay::{generate, greedy_exact};
use qhx_tests::{backends, replay, suite, tiny};
use qhx_tiers::tier;

const TARGETS: [&str; 3] = ["v68", "v69", "v73"];
const PRECISIONS: [Precision; 3] = [Precision::Fp16, Precision::W8A16, Precision::W4A16];

/// Tokens of an answer with quantized weights, each of which takes the emulator seconds.
const QUANTIZED: usize = 6;

/// Forges a tiny model and compares its answers with the goldens: in f16 each token, with quantized weights by the
/// tolerant gate.
#[expect(clippy::print_stderr, reason = "a test says what it measured")]
fn answers(tiny: &str, target: &str, precision: Precision) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let start = Instant::now();
    let (htp, system) = tiny::qnn_libraries();
    let checkpoint = tiny::fixture(tiny);
    let folder = tempfile::tempdir().unwrap();
    let options = ForgeOptions {
        max_ctx: Some(200),
        prefill: Some(Vec::new()),
        precision,
        compiler: Some(backends::compiler(&htp, &system, target)),
        onnx: false,
        ..ForgeOptions::new(folder.path().join("bundle"))
    };
    let label = format!("{tiny} {} {target}", precision.name());
    let report =
        forge(&checkpoint, &options, &mut Silent).unwrap_or_else(|e| panic!("{label}: {e}"));
    assert_eq!(report.dsp_arch.as_deref(), Some(target));
    let device = target.trim_start_matches('v').parse().ok();
    let backend = backends::qnn_device(&(htp, system), device);
    let mut model =
        tiny::open(&report.manifest, backend).unwrap_or_else(|e| panic!("{label}: {e}"));
    let goldens = tiny::goldens(&checkpoint).brief();
    let exact = precision == Precision::Fp16;
    let count = if tiny::full_matrix() && exact { 3 } else { 1 };
    let cases = replay::shortest(&goldens, count);
    let passed = if exact {
        greedy_exact(&mut model, &cases, &label);
        cases.len()
    } else {
        let tolerated = |case: &&&tiny::Case| {
            model.reset().unwrap();
            let prompt = Prompt::Tokens(case.prompt_ids.clone());
            let expected = &case.output_ids[..case.output_ids.len().min(QUANTIZED)];
            let request = Request::greedy(prompt, expected.len());
            suite::tolerated(&generate(&mut model, &request).tokens, expected)
        };
        cases.iter().filter(tolerated).count()
    };
    eprintln!("{label}: {passed} of {} in {:.1} s", cases.len(), start.elapsed().as_secs_f64());
    assert!(passed * 10 >= cases.len() * 6, "{label}: {passed} of {}", cases.len());
}

/// Every model in every precision for every one of the architectures.
fn matrix(models: &[&str]) {
    for tiny in models {
        for target in TARGETS {
            for precision in PRECISIONS {
                answers(tiny, target, precision);
            }
        }
    }
}

#[tier(qnn)]
#[test]
fn each_family_answers_on_an_older_architecture() {
    answers("mistral-tiny", "v68", Precision::W8A16);
    answers("qwen35-tied", "v69", Precision::Fp16);
    answers("llama3-blocks", "v73", Precision::W4A16);
    answers("phimoe-6", "v73", Precision::Fp16);
    answers("gemma4-tiny", "v69", Precision::Fp16);
}

#[tier(qnn, full)]
#[test]
fn llama_answers_on_older_architectures() {
    matrix(&["llama3-tiny", "mistral-tiny", "qwen3-tiny", "qwen2-tiny", "llama3-blocks"]);
}

#[tier(qnn, full)]
#[test]
fn qwen35_answers_on_older_architectures() {
    matrix(&["qwen35-tied", "qwen35-untied", "qwen35-blocks"]);
}

#[tier(qnn, full)]
#[test]
fn gemma4_and_phimoe_answer_on_older_architectures() {
    matrix(&["gemma4-tiny", "phimoe-6", "phimoe-16", "phimoe-blocks"]);
}
