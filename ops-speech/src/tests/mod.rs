//! The ops over scripted graphs, for audio of eight samples a second.

mod kokoro;
mod parakeet;
mod vits;
mod whisper;

use qhx_op::harness::{OpHarness, graph, tensors};
use qhx_op::{GraphInfo, Op, Result, Segment};
use serde_json::{Value, json};

/// A frame is four samples and becomes one mel.
fn front_end() -> Value {
    json!({
        "rate": 8, "frame": 4, "hop": 4, "fft": 4, "span": 4, "window": "periodic_hann", "spectrum": "power",
        "filters": {"mels": 1, "min_hz": 0.0, "max_hz": 4.0, "scale": "htk"}, "log": {"log10_max": 1e-10}
    })
}

fn clip(frames: usize) -> Segment<'static> {
    const SAMPLES: [f32; 64] = [0.5; 64];
    Segment::Audio { samples: &SAMPLES[..4 * frames], rate: 8 }
}

fn harness(manifest: Value, graphs: Vec<GraphInfo>, files: &[(&str, &[f32])]) -> OpHarness {
    let op = OpHarness::new().manifest(manifest).graphs(graphs);
    files.iter().fold(op, |op, (path, values)| op.floats(path, values))
}

/// Asserts that opening fails with a message that has this in it.
#[track_caller]
fn refused<O: Op>(op: OpHarness, expected: &str) {
    let error = op.open::<O>().map(drop).unwrap_err();
    assert!(error.message().contains(expected), "{error}");
}
