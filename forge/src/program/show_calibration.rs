//! Results of a calibration, for people and programs.

use qhx_base::Result;
use qhx_terminal::output::Output;
use qhx_terminal::say;
use serde_json::{Map, Value, json};

use crate::calibrate::{Calibration, Quality};

/// Prints a table, the most sensitive layers first.
pub(super) fn show(found: &Calibration, output: &mut Output) -> Result<()> {
    let Calibration { tokens, perplexity, precisions, layers, groups, kept, chosen, .. } = found;
    output.line(&format!("calibrated on {tokens} tokens; perplexity in f16 {perplexity:.4}"))?;
    let width = [layers, groups].into_iter().flatten().map(|(part, _)| part.len()).max();
    let width = width.unwrap_or(0).max("precision".len());
    let mut row = |what: &str, quality: &Quality| {
        let Quality { divergence, agreement, perplexity } = quality;
        output.line(&format!(
            "{what:width$}  KL {divergence:.2e}  same token {:5.1} %  perplexity {perplexity:.4}",
            agreement * 100.0
        ))
    };
    for (precision, quality) in precisions {
        row(precision.name(), quality)?;
    }
    for list in [layers, groups] {
        let mut list: Vec<_> = list.iter().collect();
        list.sort_by(|(_, a), (_, b)| b.divergence.total_cmp(&a.divergence));
        for (part, quality) in list {
            row(part, quality)?;
        }
    }
    if let Some(chosen) = chosen {
        row("chosen", chosen)?;
        let kept: Vec<_> = kept.iter().map(|one| format!("--weights {one}")).collect();
        if !kept.is_empty() {
            output.line(&kept.join(" "))?;
        }
        if !found.reached {
            say!("note: the target is missed even with all layers in the higher precision");
        }
    }
    Ok(())
}

/// The same as one JSON value.
pub(super) fn calibration_json(found: &Calibration) -> Value {
    let named = |list: &[(String, Quality)]| -> Map<String, Value> {
        list.iter().map(|(part, found)| (part.clone(), json!(found))).collect()
    };
    let precisions = found.precisions.iter();
    let precisions = precisions.map(|(p, found)| (p.name().to_owned(), json!(found)));
    let kept = found.kept.iter().map(|one| (one.part.clone(), json!(one.precision.name())));
    json!({
        "tokens": found.tokens,
        "perplexity": found.perplexity,
        "precisions": precisions.collect::<Map<_, _>>(),
        "layers": named(&found.layers),
        "groups": named(&found.groups),
        "kept": kept.collect::<Map<_, _>>(),
        "chosen": found.chosen,
        "reached": found.reached,
    })
}
