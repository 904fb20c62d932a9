//! Headroom of each layer's values in f16, for people and programs.

use qhx_base::Result;
use qhx_terminal::output::Output;
use qhx_terminal::say;
use serde_json::{Value, json};

use crate::f16_range::measure::{F16_MAX, Measured, Peak};

/// Says in one line how near values come to the end of f16, and what is folded.
pub(super) fn say_nearest(found: &Measured) {
    let Some(Peak { layer, kind, largest }) = found.nearest() else { return };
    let at = if layer.is_empty() { String::new() } else { format!("{layer}: ") };
    let factor = F16_MAX / largest;
    say!("headroom in f16: {factor:.3}x ({at}{kind} reaches {largest:.4}){}", folded(found));
}

fn folded(found: &Measured) -> String {
    let folds = found.folds.iter().flatten();
    folds.map(|fold| format!(" --fold {fold}")).collect()
}

/// Prints a line for each layer, what comes nearest first.
pub(super) fn show(found: &Measured, output: &mut Output) -> Result<()> {
    output.line(&format!("largest values; f16 ends at {F16_MAX}"))?;
    let mut rest = &found.peaks[..];
    while let Some(first) = rest.first() {
        let count = rest.iter().take_while(|peak| peak.layer == first.layer).count();
        let (layer, after) = rest.split_at(count);
        rest = after;
        let mut layer: Vec<&Peak> = layer.iter().collect();
        layer.sort_by(|a, b| b.largest.total_cmp(&a.largest));
        let values: Vec<_> = layer.iter().map(|p| format!("{} {:.4}", p.kind, p.largest)).collect();
        let name = if first.layer.is_empty() { "outside of layers" } else { &first.layer };
        let headroom = layer.first().map_or(f32::INFINITY, |peak| peak.headroom());
        output.line(&format!("{name}: headroom {headroom:.1}x: {}", values.join(", ")))?;
    }
    match folded(found).trim_start() {
        "" => Ok(()),
        folds => output.line(folds),
    }
}

/// The same as one JSON value.
pub(super) fn headroom_json(found: &Measured) -> Value {
    let peaks = found.peaks.iter().map(|Peak { layer, kind, largest }| {
        json!({"layer": layer, "kind": kind, "largest": largest, "headroom": F16_MAX / largest})
    });
    let folds = found.folds.iter().flatten();
    let folds = folds.map(|fold| (fold.part.clone(), json!(fold.shift)));
    json!({
        "peaks": peaks.collect::<Vec<_>>(),
        "folds": Value::Object(folds.collect()),
    })
}
