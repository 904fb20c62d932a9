//! A receipt, for people.

use qhx_base::Result;
use qhx_terminal::output::Output;

use crate::receipt::{Receipt, TextQuality};

/// Prints a line for each kind of text, and the bytes of the weights.
pub(super) fn show(receipt: &Receipt, output: &mut Output) -> Result<()> {
    let width = receipt.texts.iter().map(|text| text.kind.len()).max().unwrap_or(0);
    for TextQuality { kind, f16_perplexity, quality } in &receipt.texts {
        output.line(&format!(
            "{kind:width$}  KL {:.2e}  same token {:5.1} %  perplexity {:.4} (f16 {f16_perplexity:.4})",
            quality.divergence,
            quality.agreement * 100.0,
            quality.perplexity
        ))?;
    }
    let mean = receipt.divergence();
    output.line(&format!(
        "KL {mean:.2e} on {} tokens; weights {:.1} MiB",
        receipt.tokens,
        receipt.weight_bytes as f64 / f64::from(1 << 20)
    ))
}
