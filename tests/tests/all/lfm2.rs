//! LFM2, short convolutions beside attention: a recipe whose bundles declare all that the host does. Goldens are of
//! `transformers`.

use qhx_tests::forged::Forged;
use qhx_tests::replay::{
    alike, greedy_exact, hands_over, shortest, speculative_exact, step_exact, within,
};
use qhx_tests::tiny::{self, CPU, Variant};
use qhx_tests::{backends, poison};
use qhx_tiers::tier;

const TINY: &str = "lfm2-tiny";

/// A bundle for the CPU with prompt graphs of these numbers of tokens.
fn bundle(checkpoint: &str, max_ctx: usize, prefill: &[usize]) -> Forged {
    Forged::of(&tiny::fixture(checkpoint), |options| {
        options.max_ctx = Some(max_ctx);
        options.prefill = Some(prefill.to_vec());
    })
}

#[test]
fn convolutions_and_attention_equal_the_reference() {
    let goldens = tiny::goldens(&tiny::fixture(TINY));
    let every = shortest(&goldens, usize::MAX);
    let bundle = bundle(TINY, 200, &[8]);
    let mut model = bundle.on_cpu();
    greedy_exact(&mut model, &every, "cpu");
    within(step_exact(&mut model, &goldens, &every, "cpu"), 1e-3, "cpu");
    // Convolutions keep the rows of accepted draft tokens.
    let found = speculative_exact(&mut model, &every, "3".parse().unwrap(), "cpu");
    assert!(found.drafted > 0, "{found:?}");
    drop(model);

    // A broken row of the embedding table fails its token and spoils no other.
    let prompt = &goldens.cases[0].prompt_ids;
    let poisoned = (0..).find(|token| !prompt.contains(token)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let manifest = poison::bundle(&bundle.manifest, &folder.path().join("poisoned"), poisoned);
    let mut model = tiny::open(&manifest, backends::cpu()).unwrap();
    poison::survives(&mut model, prompt, poisoned);
}

/// `Lfm2MoeForCausalLM`.
#[test]
fn experts_equal_the_reference() {
    let goldens = tiny::goldens(&tiny::fixture("lfm2-moe"));
    for prefill in [&[][..], &[4]] {
        let mut model = bundle("lfm2-moe", 64, prefill).on_cpu();
        let every = shortest(&goldens, usize::MAX);
        let label = format!("lfm2-moe, prefill {prefill:?}");
        within(step_exact(&mut model, &goldens, &every, &label), 1e-4, &label);
    }
}

#[tier(qnn)]
fn convolutions_and_attention_equal_the_reference_on_the_npu() {
    let brief = tiny::goldens(&tiny::fixture(TINY)).brief();
    let bundle =
        tiny::bundle(&tiny::fixture(TINY), Variant { target: Some("v81"), prefill: &[8], ..CPU });
    let mut model = tiny::open(&bundle, backends::qnn()).unwrap();
    let cases = shortest(&brief, 2);
    greedy_exact(&mut model, &cases, "qnn");
    alike(step_exact(&mut model, &brief, &cases, "qnn"), 0.999, "qnn");
    alike(hands_over(&mut model, &brief, cases[1], "qnn"), 0.999, "tokens on the CPU");
}
