//! The families on v68, v69 and v73, in each precision, on the emulator. Their own tests have v75, v79 and v81.
//!
//! A program of its own, and one bundle at a time: while one thread runs graphs for v68, the emulator fails to execute
//! those of another thread for chips of more tightly coupled memory ("Could't match allocated VTCM pointer to a VXU
//! VTCM").

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use qhx_forge::Precision;
use qhx_tests::forged::Forged;
use qhx_tests::replay::greedy_exact;
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
    let checkpoint = tiny::fixture(tiny);
    let bundle = Forged::of(&checkpoint, |options| {
        (options.max_ctx, options.prefill) = (Some(200), Some(Vec::new()));
        options.precision = precision;
        options.compiler = Some(backends::compiler(target));
        options.onnx = false;
    });
    let label = format!("{tiny} {} {target}", precision.name());
    assert_eq!(bundle.json()["model"]["dsp_arch"], target);
    let device = target.trim_start_matches('v').parse().ok();
    let mut model = bundle.open(backends::qnn_device(device));
    let goldens = tiny::goldens(&checkpoint).brief();
    let exact = precision == Precision::Fp16;
    let count = if tiny::full_matrix() && exact { 3 } else { 1 };
    let cases = replay::shortest(&goldens, count);
    if exact {
        greedy_exact(&mut model, &cases, &label);
    } else {
        suite::passes(&mut model, &cases, QUANTIZED, &label);
    }
    eprintln!("{label}: {:.1} s", start.elapsed().as_secs_f64());
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
fn each_family_answers_on_an_older_architecture() {
    answers("mistral-tiny", "v68", Precision::W8A16);
    answers("qwen35-tied", "v69", Precision::Fp16);
    answers("llama3-blocks", "v73", Precision::W4A16);
    answers("phimoe-6", "v73", Precision::Fp16);
    answers("gemma4-tiny", "v69", Precision::Fp16);
}

#[tier(qnn, full)]
fn llama_answers_on_older_architectures() {
    matrix(&["llama3-tiny", "mistral-tiny", "qwen3-tiny", "qwen2-tiny", "llama3-blocks"]);
}

#[tier(qnn, full)]
fn qwen35_answers_on_older_architectures() {
    matrix(&["qwen35-tied", "qwen35-untied", "qwen35-blocks"]);
}

#[tier(qnn, full)]
fn gemma4_and_phimoe_answer_on_older_architectures() {
    matrix(&["gemma4-tiny", "phimoe-6", "phimoe-16", "phimoe-blocks"]);
}
