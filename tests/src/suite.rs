//! The tolerant gate of suites: enough of the answer is right and it does not repeat itself.

use qhx_core::engine::{Model, Prompt, Request};

use crate::replay::generate;
use crate::tiny::Case;

/// Levenshtein distance of the first `len(gold)` tokens at most a tenth of the gold's length, and
/// fewer than half of the tokens equal to the one before.
pub fn tolerated(output: &[u32], gold: &[u32]) -> bool {
    let output = &output[..output.len().min(gold.len())];
    let repeats = output.windows(2).filter(|pair| pair[0] == pair[1]).count();
    let ratio = repeats as f64 / output.len().max(2).saturating_sub(1) as f64;
    let distance = strsim::generic_levenshtein(&output.to_vec(), &gold.to_vec());
    distance as f64 / gold.len() as f64 <= 0.10 && ratio < 0.5
}

/// Asserts that six of ten answers pass, of which at most `tokens` are generated.
pub fn passes(model: &mut Model, cases: &[&Case], tokens: usize, label: &str) {
    let passed = |case: &&&Case| {
        model.reset().unwrap_or_else(|e| panic!("{label}: {e}"));
        let expected = &case.output_ids[..case.output_ids.len().min(tokens)];
        let request = Request::greedy(Prompt::Tokens(case.prompt_ids.clone()), expected.len());
        tolerated(&generate(model, &request).tokens, expected)
    };
    let passed = cases.iter().filter(passed).count();
    eprintln!("{label}: {passed} of {} cases pass", cases.len());
    assert!(passed * 10 >= cases.len() * 6, "{label}: {passed} of {}", cases.len());
}
