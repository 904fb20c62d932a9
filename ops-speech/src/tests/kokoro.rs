//! A voice whose weights are zeros, but for the bias that has each token last four frames of four samples.

use qhx_op::harness::OpenOp;

use super::*;
use crate::Kokoro;

/// Values of the host's part, of which those from `LASTING` on are the bias of four durations.
const VALUES: usize = 157;
const LASTING: usize = 103;

fn opened(values: usize, windows: &[usize]) -> OpHarness {
    opened_with(values, windows, &json!({}))
}

/// With keys of `params.speech` besides.
fn opened_with(values: usize, windows: &[usize], own: &Value) -> OpHarness {
    let mut host = vec![0.0; values];
    host[LASTING..LASTING + 4].fill(20.0);
    let name = |graph: &str, number: &usize| format!("{graph}{number}");
    let mut graphs = vec![
        graph("albert", tensors(5, [("x", 1), ("keep", 1)]), tensors(5, [("y", 1)])),
        graph("symbols", tensors(5, [("x", 2), ("keep", 1)]), tensors(5, [("y", 2)])),
    ];
    for frames in windows {
        let common = || {
            let mut inputs = tensors(*frames, [("x", 2), ("keep", 1)]);
            inputs.extend(tensors(1, [("style", 1), ("fill", 2)]));
            inputs
        };
        let mut voice = common();
        voice.extend(tensors(1, [("curves", 2 * frames), ("source", 6 * (2 * frames + 2))]));
        graphs.push(graph(
            &name("prosody", frames),
            common(),
            tensors(2, [("curves", 2 * frames)]),
        ));
        graphs.push(graph(
            &name("voice", frames),
            voice,
            tensors(6, [("spectrum", 2 * frames + 1)]),
        ));
    }
    let names = |graph| windows.iter().map(|frames| name(graph, frames)).collect::<Vec<_>>();
    let mut manifest = json!({
        "artifacts": {"speech": {"host": {"path": "host"}, "voices": {"path": "voices"}}},
        "params": {"hidden": 2, "vocab": 3, "speech": {
            "rate": 8, "voices": ["a", "b"], "rows": 2, "style": 1, "layers": 0, "durations": 4, "breaks": [1],
            "albert": {"layers": 2, "embedding": 1, "positions": 6},
            "source": {
                "sines": 1, "samples": 2, "fft": 4, "hop": 2, "lead": 1,
                "amplitude": 0.1, "noise": 0.003, "voiced": 10.0
            }
        }},
        "plan": {"params": {
            "albert": "albert", "symbols": "symbols", "prosody": names("prosody"), "voice": names("voice")
        }}
    });
    for (key, value) in own.as_object().into_iter().flatten() {
        manifest["params"]["speech"][key] = value.clone();
    }
    // A style of the decoder, and one of the prosody, of each number of phonemes.
    let voices = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    harness(manifest, graphs, &[("host", &host), ("voices", &voices)])
}

fn say(op: &mut OpenOp, tokens: &[u32]) -> Result<usize> {
    op.speak(&[Segment::Tokens(tokens)]).map(|samples| samples.len())
}

#[test]
fn a_text_lasts_what_its_durations_and_its_speed_say() {
    let mut op = opened(VALUES, &[16, 8]).open::<Kokoro>().unwrap();
    assert_eq!(op.info().max_ctx, 6);
    // Voice 1, and two phonemes between borders: four tokens of four frames; at twice the speed of two.
    assert_eq!(say(&mut op, &[1, 1000, 1, 2]).unwrap(), 64);
    assert_eq!(say(&mut op, &[1, 2000, 1, 2]).unwrap(), 32);
    assert_eq!(["voice16", "voice8", "albert"].map(|name| op.executions(name)), [1, 1, 4]);
    assert_eq!(op.bound("albert", "keep").unwrap(), [1.0, 1.0, 1.0, 1.0, 0.0]);
    let styles = ["voice8", "prosody8"].map(|graph| op.bound(graph, "style").unwrap()[0]);
    assert_eq!(styles, [7.0, 8.0], "the second voice, of two phonemes");
    say(&mut op, &[0, 4000, 1]).unwrap();
    assert_eq!(op.bound("voice8", "style").unwrap(), [1.0], "the first voice, of one phoneme");
    assert_eq!(op.bound("voice8", "keep").unwrap()[2..5], [1.0, 0.0, 0.0], "three frames");
}

#[test]
fn a_long_text_is_cut_behind_a_pause() {
    let mut op = opened(VALUES, &[12]).open::<Kokoro>().unwrap();
    // Three tokens would fit; token 1 is a pause.
    assert_eq!(say(&mut op, &[0, 1000, 1, 2]).unwrap(), 32);
    assert_eq!(op.speak(&[]).unwrap().len(), 32);
    assert_eq!(op.speak(&[]).unwrap().len(), 0);
    assert_eq!(say(&mut op, &[0, 1000, 2, 2]).unwrap(), 48);
    // A new text begins at its own start.
    assert_eq!(say(&mut op, &[0, 1000, 1, 2]).unwrap(), 32);
    for (tokens, expected) in [
        (&[2, 1000, 1][..], "voice 2, speed 1000: expected a voice below 2"),
        (&[0, 249, 1], "a speed of 250 to 4000 thousandths"),
        (&[0, 1000, 3], "phoneme 3, expected numbers below 3"),
        (&[0, 1000], "0 phonemes, expected 1 to 4"),
        (&[0, 1000, 1, 1, 1, 1], "4 phonemes, the graphs take 3"),
    ] {
        let error = say(&mut op, tokens).unwrap_err();
        assert!(error.message().contains(expected), "{error}");
    }
    let infinite = opened(VALUES, &[12]).script(|step| match step.graph() {
        "voice12" => step.set("spectrum", &[f32::NAN; 150]),
        _ => Ok(()),
    });
    let error = say(&mut infinite.open::<Kokoro>().unwrap(), &[0, 1000, 1]).unwrap_err();
    assert!(
        error.message().contains("graph \"voice12\": sample 0 of what it makes is NaN"),
        "{error}"
    );
    refused::<Kokoro>(opened(VALUES + 1, &[12]), "host: 632 bytes, expected 628");
}

#[test]
fn a_row_by_the_length_a_tail_and_an_end_that_is_not_said() {
    let own = json!({"counted": true, "tail": [2], "trim": 20});
    let mut op = opened_with(VALUES, &[20], &own).open::<Kokoro>().unwrap();
    assert_eq!(op.info().max_ctx, 6);
    // Two phonemes and the tail between borders: five tokens of four frames of four samples.
    assert_eq!(say(&mut op, &[1, 1000, 0, 1, 2]).unwrap(), 60);
    assert_eq!(op.bound("voice20", "style").unwrap(), [5.0], "the row of no characters");
    say(&mut op, &[1, 1000, 70, 1, 2]).unwrap();
    assert_eq!(op.bound("voice20", "style").unwrap(), [7.0], "the last row");
    let error = say(&mut op, &[0, 1000, 0, 1, 1, 1, 1]).unwrap_err();
    assert!(error.message().contains("4 phonemes, expected 1 to 3"), "{error}");
    // The end reaches into the window before the last.
    let mut parts = opened_with(VALUES, &[8], &own).open::<Kokoro>().unwrap();
    assert_eq!(say(&mut parts, &[0, 1000, 0, 2, 2]).unwrap(), 32);
    assert_eq!([0; 2].map(|_| parts.speak(&[]).unwrap().len()), [28, 0]);
    assert_eq!(say(&mut parts, &[0, 4000, 0, 2, 2]).unwrap(), 0, "shorter than its end");
    refused::<Kokoro>(
        opened_with(VALUES, &[8], &json!({"tail": [3]})),
        "token 3, expected numbers below",
    );
}
