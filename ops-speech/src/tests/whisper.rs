//! A decoder of one layer over clips of up to eight frames; row p of the table of positions is [p, 0].

use super::*;
use crate::Whisper;

const ROOM: usize = 6;

fn opened(cross: usize, token: u32, median: usize) -> OpHarness {
    let mut inputs = tensors(1, [("x", 2), ("pos", 2), ("cmask", ROOM + 1)]);
    inputs.extend(tensors(ROOM, [("past_k_0", 1), ("past_v_0", 1)]));
    inputs.extend(tensors(cross, [("cross_k_0", 1)]));
    let outputs = [("logits", 4), ("new_k_0", 1), ("new_v_0", 1), ("align_0", 4)];
    let graphs = vec![
        graph("one", inputs, tensors(1, outputs)),
        graph("encoder", tensors(8, [("mel", 1)]), tensors(4, [("cross_k_0", 1)])),
    ];
    let manifest = json!({
        "artifacts": {
            "embed": {"path": "embed", "dtype": "f32"},
            "positions": {"table": {"path": "positions", "dtype": "f32"}}
        },
        "params": {
            "n_layers": 1, "audio": {"front_end": front_end(), "token_id": token},
            "transcription": {"suppressed": [2], "median": median}
        },
        "plan": {"params": {"decode": "one", "encoder": "encoder"}}
    });
    let positions = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0].map(|position| [position, 0.0]).concat();
    let embed = [0.0, 0.0, 1.0, 0.0, 2.0, 0.0, 3.0, 0.0];
    // The encoder's rows are what the mels come to; the token at position p attends to column p − 1.
    harness(manifest, graphs, &[("embed", &embed), ("positions", &positions)]).script(|step| {
        if step.graph() == "encoder" {
            let mel = step.input("mel")?;
            return step.set("cross_k_0", &mel[..4]);
        }
        let (x, position) = (step.input("x")?[0], step.input("pos")?[0]);
        step.set("align_0", &[1.0, 2.0, 3.0, 4.0].map(|at| f32::from(u8::from(at == position))))?;
        step.set("logits", &[x, position, step.input("cross_k_0")?[0], 0.0])
    })
}

#[test]
fn a_clip_stands_at_one_position_and_is_heard_once() {
    let mut op = opened(4, 3, 1).open::<Whisper>().unwrap();
    let info = op.info();
    assert_eq!((&info.placeholders[..], &info.logit_rules.suppressed[..]), (&[3][..], &[2][..]));
    assert!(info.aligns && !info.can_snapshot && !info.prompt_rules.special_tokens);
    assert_eq!(op.place(clip(2)).unwrap().pieces.len(), 1);
    op.prefill(&[Segment::Tokens(&[1]), clip(2), Segment::Tokens(&[2])]).unwrap();
    let mel = op.bound("encoder", "mel").unwrap();
    // Silence behind the clip is eight powers of ten below its loudest frame, and never lower.
    assert!((mel[0] - mel[7] - 2.0).abs() < 1e-5 && mel[0] == mel[1], "{mel:?}");
    let logits = op.decode(1).unwrap();
    assert_eq!(logits, [1.0, 3.0, mel[0], 0.0], "position 3, over what the encoder gave");
    let error = op.prefill(&[clip(2)]).unwrap_err();
    assert!(error.message().contains("the state holds another one; reset it first"), "{error}");
    assert_eq!((op.position(), op.executions("encoder")), (4, 1));
    assert!(op.export_state().is_err());
    op.reset().unwrap();
    let error = op.prefill(&[Segment::Tokens(&[1])]).unwrap_err();
    assert!(error.message().contains("the prompt has no audio"), "{error}");
    let error = op.prefill(&[clip(1), clip(1)]).unwrap_err();
    assert!(error.message().contains("two audio clips"), "{error}");
    let error = op.place(clip(9)).unwrap_err();
    assert!(
        error.message().contains("audio of 4.50 s, the encoder takes 4.00 s at once"),
        "{error}"
    );
}

#[test]
fn words_have_the_times_of_the_rows_that_they_attend_to() {
    let mut op = opened(4, 3, 1).open::<Whisper>().unwrap();
    let texts: [Segment<'_>; 2] = [Segment::Tokens(&[3]), Segment::Tokens(&[1, 2, 0])];
    assert!(op.answer(&texts).unwrap_err().message().contains("no audio was heard"));
    op.prefill(&[clip(6)]).unwrap();
    let answer = op.answer(&texts).unwrap();
    assert_eq!(answer.tokens, [1, 2, 0]);
    assert_eq!(answer.times, [[0.0, 0.0], [0.0, 0.02], [0.02, 0.04]]);
}

#[test]
fn a_bundle_of_speech_that_does_not_fit_is_refused_by_name() {
    refused::<Whisper>(
        opened(5, 3, 1),
        "the encoder has no output \"cross_k_0\" of that length and type",
    );
    refused::<Whisper>(
        opened(4, 4, 1),
        "/params/audio/token_id: found 4, expected a token below 4",
    );
    refused::<Whisper>(
        opened(4, 3, 2),
        "/params/transcription/median: found 2, expected an odd number",
    );
}
