//! A voice whose weights are zeros: each symbol lasts a frame, as the logarithm of its duration is 0.

use qhx_op::harness::OpenOp;

use super::*;
use crate::Vits;

/// Values of the host's part: an embedding of three symbols and plain durations.
const VALUES: usize = 3 * 2 + (2 * 2 + 2 + 4) * 2 + 3;

fn opened(values: usize, windows: &[usize]) -> OpHarness {
    let host = vec![0.0; values];
    let mut graphs = vec![graph(
        "encoder",
        tensors(6, [("x", 2), ("keep", 1)]),
        tensors(6, [("y", 2), ("stats", 4)]),
    )];
    let name = |frames: &usize| format!("voice{frames}");
    for frames in windows {
        graphs.push(graph(
            &name(frames),
            tensors(*frames, [("x", 2), ("keep", 1)]),
            tensors(*frames, [("samples", 2)]),
        ));
    }
    let manifest = json!({
        "artifacts": {"speech": {"host": {"path": "host"}}},
        "params": {"hidden": 2, "vocab": 3, "speech": {
            "rate": 8, "voices": ["a"], "front": [0], "back": [2], "blank": null, "limit": 4, "hop": 2, "flow": 2,
            "around": 1, "speakers": 1, "speaker": 0, "length": 1.0, "durations": {"inner": 2, "kernel": 1}
        }},
        "plan": {"params": {
            "encoder": "encoder", "voice": windows.iter().map(name).collect::<Vec<_>>()
        }}
    });
    harness(manifest, graphs, &[("host", &host)])
}

fn say(op: &mut OpenOp, tokens: &[u32]) -> Result<usize> {
    op.speak(&[Segment::Tokens(tokens)]).map(|samples| samples.len())
}

#[test]
fn a_text_of_vits_goes_through_windows_in_parts() {
    let mut op = opened(VALUES, &[3, 4]).open::<Vits>().unwrap();
    // Three symbols with those around them are five frames of two samples: three of the first four, and the rest.
    assert_eq!(say(&mut op, &[0, 1000, 0, 0, 0, 1, 1, 1]).unwrap(), 6);
    assert_eq!(op.speak(&[]).unwrap().len(), 4);
    assert_eq!(op.speak(&[]).unwrap().len(), 0);
    // Half as fast: six frames.
    assert_eq!(say(&mut op, &[0, 500, 0, 0, 0, 1]).unwrap(), 6);
    assert_eq!(op.speak(&[]).unwrap().len(), 6);
    let error = say(&mut op, &[0, 1000, 0, 0, 0, 1, 1, 1, 1, 1]).unwrap_err();
    assert!(error.message().contains("5 symbols, expected 1 to 4"), "{error}");
}

#[test]
fn files_of_vits_that_do_not_fit_are_refused() {
    let error = opened(VALUES - 1, &[4]).open::<Vits>().unwrap_err();
    assert!(error.message().contains("as the sizes of manifest /params/speech"), "{error}");
    let error = opened(VALUES, &[2]).open::<Vits>().unwrap_err();
    assert!(error.message().contains("frames around a part"), "{error}");
}
