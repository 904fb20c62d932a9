//! Rows of two frames, a second each; three tokens, the last of which is the blank.

use super::*;
use crate::Parakeet;

/// Graphs of the encoder for four and for eight frames, whose rows have the output `role` of this width.
fn encoders(role: &str, width: usize) -> Vec<GraphInfo> {
    let encoder = |(name, frames): (&str, usize)| {
        graph(
            name,
            tensors(frames, [("mel", 1), ("keep", 1)]),
            tensors(frames / 2, [(role, width)]),
        )
    };
    [("eight", 8), ("four", 4)].map(encoder).to_vec()
}

fn manifest(blank: u32, plan: Value, transducer: Value) -> Value {
    json!({
        "artifacts": {"embed": {"path": "embed", "dtype": "f32"}},
        "params": {
            "vocab": 3, "transducer": transducer,
            "audio": {"front_end": front_end(), "subsampling": 2, "blank": blank}
        },
        "plan": {"params": plan}
    })
}

fn ctc(blank: u32) -> OpHarness {
    let plan = json!({"encoder": ["eight", "four"]});
    harness(manifest(blank, plan, Value::Null), encoders("logits", 3), &[])
}

#[test]
fn repetitions_and_blanks_of_a_ctc_head_are_one_token_or_none() {
    let rows = [[0.0, 9.0, 1.0], [0.0, 9.0, 1.0], [0.0, 1.0, 9.0], [0.0, 9.0, 1.0]].concat();
    let op = ctc(2).script(move |step| match step.graph() {
        "eight" => step.set("logits", &rows),
        _ => step.set("logits", &[9.0, 0.0, 0.0, 9.0, f32::NAN, 0.0]),
    });
    let mut op = op.open::<Parakeet>().unwrap();
    let answer = op.answer(&[clip(8)]).unwrap();
    assert_eq!((answer.tokens, answer.times), (vec![1, 1], vec![[0.0, 2.0], [3.0, 4.0]]));
    // A clip takes the shortest graph that holds it, and rows behind it are not looked at.
    assert_eq!(op.answer(&[clip(2)]).unwrap().tokens, [0]);
    assert_eq!(op.bound("four", "keep").unwrap(), [1.0, 1.0, 0.0, 0.0]);
    assert_eq!(["four", "eight"].map(|name| op.executions(name)), [1, 1]);
    let error = op.answer(&[clip(3)]).unwrap_err();
    assert!(error.message().contains("graph \"four\": logit 1 is not a number"), "{error}");
    let error = op.answer(&[clip(9)]).unwrap_err();
    assert!(
        error.message().contains("audio of 4.50 s, the encoder takes 4.00 s at once"),
        "{error}"
    );
    refused::<Parakeet>(ctc(3), "/params/audio/blank: found 3, expected a token below 3");
}

/// A transducer with the given durations: row i of the encoder is [i, 0], and the predictor counts its tokens. `joint` says
/// by the row and that count which token comes and how long it lasts.
fn transducer(durations: usize, joint: fn([f32; 2]) -> (usize, usize)) -> OpHarness {
    let mut graphs = encoders("y", 2);
    let predicted = tensors(1, [("next", 1), ("y", 2)]);
    graphs.push(graph("predictor", tensors(1, [("x", 2), ("state", 1)]), predicted));
    let logits = tensors(1, [("logits", 3 + durations)]);
    graphs.push(graph("joint", tensors(1, [("x", 2), ("pred", 2)]), logits));
    let plan = json!({"encoder": ["eight", "four"], "predictor": "predictor", "joint": "joint"});
    let params = json!({"start": 2, "max_symbols": 2, "durations": durations});
    harness(manifest(2, plan, params), graphs, &[("embed", &[0.0; 6])]).script(move |step| {
        match step.graph() {
            "predictor" => {
                let count = step.input("state")?[0] + 1.0;
                step.set("next", &[count])?;
                step.set("y", &[count, 0.0])
            }
            "joint" => {
                let (token, lasts) = joint([step.input("x")?[0], step.input("pred")?[0]]);
                let of = |at: usize, here: usize| f32::from(u8::from(at == here));
                let mut logits: Vec<f32> = (0..3).map(|at| of(at, token)).collect();
                logits.extend((0..durations).map(|at| of(at, lasts)));
                step.set("logits", &logits)
            }
            _ => step.set("y", &[0.0, 0.0, 1.0, 0.0, 2.0, 0.0, 3.0, 0.0]),
        }
    })
}

#[test]
fn tokens_of_a_transducer_last_as_long_as_it_says() {
    // Two tokens at row 0, of which the second lasts two rows; a blank, which lasts one at least; a token.
    let joint = |at: [f32; 2]| match at {
        [0.0, 1.0] => (0, 0),
        [0.0, 2.0] => (1, 2),
        [3.0, 3.0] => (0, 1),
        _ => (2, 0),
    };
    let mut op = transducer(3, joint).open::<Parakeet>().unwrap();
    for time in 1..=2 {
        let answer = op.answer(&[clip(8)]).unwrap();
        assert_eq!(answer.tokens, [0, 1, 0], "the state begins at zero");
        assert_eq!(answer.times, [[0.0, 0.0], [0.0, 2.0], [3.0, 4.0]]);
        // The start and three tokens, and no blank.
        assert_eq!(op.executions("predictor"), 4 * time);
    }
    // Without durations, a row has at most `max_symbols` tokens.
    let mut op = transducer(0, |_| (1, 0)).open::<Parakeet>().unwrap();
    let answer = op.answer(&[clip(8)]).unwrap();
    assert_eq!(answer.tokens, [1; 8]);
    assert_eq!(answer.times[5..7], [[2.0, 3.0], [3.0, 4.0]]);
}
