//! The tolerant gate of suites: enough of the answer is right and it does not repeat itself.

/// Levenshtein distance of the first `len(gold)` tokens at most a tenth of the gold's length, and
/// fewer than half of the tokens equal to the one before.
pub fn tolerated(output: &[u32], gold: &[u32]) -> bool {
    let output = &output[..output.len().min(gold.len())];
    let repeats = output.windows(2).filter(|pair| pair[0] == pair[1]).count();
    let ratio = repeats as f64 / output.len().max(2).saturating_sub(1) as f64;
    let distance = strsim::generic_levenshtein(&output.to_vec(), &gold.to_vec());
    distance as f64 / gold.len() as f64 <= 0.10 && ratio < 0.5
}
