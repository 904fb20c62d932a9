//! Decoders with experts, weights drawn and not trained, against goldens that `transformers` made. Those of LFM2 are
//! in `lfm2.rs`.

use std::path::PathBuf;

use qhx_tests::replay::{accepted_exact, alike, greedy_exact, step_exact, within};
use qhx_tests::tiny::{self, CPU, Variant};
use qhx_tests::{backends, replay};
use qhx_tiers::tier;

/// Experts one by one in three of five layers, dense ones between them and behind them; and experts in stacks, one more
/// that every token goes to, in a decoder with recurrent states. Then gpt-oss, in MXFP4 and unquantized: biases,
/// cut-off gates, sinks, layers that slide.
const TINY_MODELS: [&str; 4] = ["qwen3-moe", "qwen35-moe", "gpt-oss", "gpt-oss-plain"];

fn bundle(tiny: &str, variant: Variant) -> PathBuf {
    tiny::bundle(&tiny::fixture(tiny), variant)
}

#[test]
fn decoders_with_experts_equal_the_reference_on_the_cpu() {
    for name in TINY_MODELS {
        let goldens = tiny::goldens(&tiny::fixture(name));
        for (shards, prefill) in [(1, &[][..]), (2, &[4, 8])] {
            let manifest = bundle(name, Variant { shards, prefill, ..CPU });
            let mut model = tiny::open(&manifest, backends::cpu()).unwrap();
            let label = format!("{name}, {shards} shards");
            within(step_exact(&mut model, &goldens, &goldens.all(), &label), 1e-4, &label);
            if !prefill.is_empty() {
                // Draft tokens go through the graphs of several rows, and the rejected ones leave nothing.
                let case = replay::shortest(&goldens, 1)[0];
                let distance = accepted_exact(&mut model, case, 4, 2);
                assert!(distance.largest <= 1e-4, "{label}: {distance:?}");
            }
        }
    }
}

/// MXFP4 in llama.cpp's layout, sizes and tokenizer inside; all else in f32.
#[test]
fn a_gguf_file_of_gpt_oss_equals_the_reference() {
    let goldens = tiny::goldens(&tiny::fixture("gpt-oss"));
    let manifest = bundle("gguf/gpt-oss.gguf", Variant { prefill: &[4], ..CPU });
    let mut model = tiny::open(&manifest, backends::cpu()).unwrap();
    let found = step_exact(&mut model, &goldens, &goldens.all(), "gpt-oss.gguf");
    within(found, 1e-4, "gpt-oss.gguf");
}

/// The same model in Q8_0, sizes and tokenizer inside.
#[test]
fn a_gguf_file_with_experts_gives_the_golden_tokens() {
    let goldens = tiny::goldens(&tiny::fixture("qwen3-moe"));
    let cases: Vec<_> = goldens.cases.iter().collect();
    let variant = Variant { int8: true, prefill: &[4], ..CPU };
    let manifest = bundle("gguf/qwen3-moe.gguf", variant);
    let mut model = tiny::open(&manifest, backends::cpu()).unwrap();
    greedy_exact(&mut model, &cases, "Q8_0");
    alike(step_exact(&mut model, &goldens, &cases, "Q8_0"), 0.998, "Q8_0");
}

#[tier(qnn)]
fn decoders_with_experts_say_the_same_on_the_npu() {
    for &name in &TINY_MODELS[..3] {
        let goldens = tiny::goldens(&tiny::fixture(name));
        let case = replay::shortest(&goldens, 1);
        for &target in tiny::targets() {
            let manifest = bundle(name, Variant { target: Some(target), prefill: &[4], ..CPU });
            let mut model = tiny::open(&manifest, backends::qnn()).unwrap();
            let label = format!("{name}, {target}");
            alike(step_exact(&mut model, &goldens, &case, &label), 0.999, &label);
        }
    }
}
