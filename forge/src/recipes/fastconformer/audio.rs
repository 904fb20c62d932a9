//! Conversion of audio to frames and windows.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::{Value, json};

use super::Sizes;
use crate::kit::Processor;
use crate::recipe::RecipeOptions;
use crate::recipes::choices::windows;
use crate::registry::RecipeOption;

/// Lengths of windows.
pub(in crate::recipes) const WINDOWS: RecipeOption = RecipeOption {
    name: "windows",
    values: &[],
    help: "seconds of the audio that the encoder's graphs take at once; 10,30 by default. Each clip goes through the \
           shortest that holds it, a longer one is cut into windows of the longest",
};
const DEFAULT_WINDOWS: [usize; 2] = [10, 30];
/// The longest window in seconds: 5000 rows have positions, and attention grows with their square.
const MAX_WINDOW: usize = 120;
/// Ratio of the longest window to the seconds that only give context, on either side of a cut.
const CONTEXT: usize = 10;
/// Samples of a second.
const RATE: usize = 16_000;
/// Added to mels before the logarithm: `LOG_ZERO_GUARD_VALUE`, 2^-24.
const LOG_GUARD: f64 = 1.0 / (1u64 << 24) as f64;

/// Conversion of audio to frames and windows.
pub(in crate::recipes) struct Audio {
    pub(in crate::recipes) front_end: Value,
    pub(in crate::recipes) preemphasis: f64,
    /// Frames of the graphs, ascending.
    pub(in crate::recipes) frames: Vec<usize>,
    /// Seconds of the longest.
    pub(in crate::recipes) window: f64,
    /// Seconds in front of a window's own words and behind them.
    pub(in crate::recipes) context: [f64; 2],
}

impl Audio {
    /// `ParakeetFeatureExtractor`: centred frames, of which the last one is masked.
    pub(in crate::recipes) fn read(
        checkpoint: &Checkpoint,
        sizes: &Sizes,
        options: &RecipeOptions,
    ) -> Result<Self> {
        let processor = Processor::audio(checkpoint)?;
        processor.only_all([
            ("/sampling_rate", json!(RATE)),
            ("/feature_size", json!(sizes.mels)),
            ("/padding_value", json!(0.0)),
        ])?;
        let size = |key: &str, default: usize| match processor.get(key) {
            None => Ok(default),
            Some(found) => {
                let size = found.as_u64().filter(|n| (1..1 << 16).contains(n));
                size.map(|n| n as usize).ok_or_else(|| processor.bad(key, "a number of samples"))
            }
        };
        let (hop, fft, frame) =
            (size("/hop_length", 160)?, size("/n_fft", 512)?, size("/win_length", 400)?);
        if frame > fft {
            return Err(processor.bad("/win_length", &format!("at most n_fft, {fft}")));
        }
        let preemphasis = match processor.get("/preemphasis") {
            None if processor.is_empty() => 0.97,
            None => 0.0,
            Some(found) => found
                .as_f64()
                .filter(|factor| (0.0..1.0).contains(factor))
                .ok_or_else(|| processor.bad("/preemphasis", "a number from 0 to below 1"))?,
        };
        let factor = 1usize << sizes.halvings;
        let asked = windows(options, MAX_WINDOW, &DEFAULT_WINDOWS)?;
        let whole = |seconds: usize| (seconds * RATE).div_ceil(hop * factor).max(2) * factor;
        let mut frames: Vec<usize> = asked.into_iter().map(whole).collect();
        frames.dedup();
        let seconds = |rows: usize| (rows * factor * hop) as f64 / RATE as f64;
        let rows = frames.last().copied().unwrap_or(2 * factor) / factor;
        let front_end = json!({
            "rate": RATE,
            "frame": frame,
            "hop": hop,
            "fft": fft,
            "window": "symmetric_hann",
            "left": frame / 2,
            "span": frame / 2 + hop,
            "spectrum": "power",
            "filters": {
                "mels": sizes.mels, "min_hz": 0.0, "max_hz": RATE as f64 / 2.0, "scale": "slaney", "area_norm": true
            },
            "log": {"ln_add": LOG_GUARD},
        });
        let context = [seconds(rows / CONTEXT); 2];
        Ok(Self { front_end, preemphasis, frames, window: seconds(rows), context })
    }
}
