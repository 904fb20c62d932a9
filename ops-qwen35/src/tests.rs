//! The op over scripted graphs of two layers: a hybrid one and one with a cache.

use qhx_op::harness::{OpHarness, OpenOp, Step, graph, tensors};
use qhx_op::{ErrorCode, GraphInfo, Result, Segment};
use serde_json::{Value, json};

use crate::Generate;

const ROOM: usize = 9;
const PIXELS: [u8; 12] = [0; 12];
/// Four tokens in two rows.
const IMAGE: Segment<'_> = Segment::Image { rgb: &PIXELS, width: 2, height: 2 };

/// A decoder's graph without the state `lacking`. Its layer 0 carries `conv` and `ssm`, layer 1 `k` and `v`.
fn layers(name: &str, rows: usize, pairs: usize, lacking: &str) -> GraphInfo {
    let masks = [("valid", 1), ("cmask", ROOM + rows)];
    let inputs = [
        tensors(rows, [("x", 2), ("cos", pairs), ("sin", pairs)]),
        tensors(rows, masks),
        tensors(1, [("past_conv_0", 1), ("past_ssm_0", 1)]),
        tensors(ROOM, [("past_k_1", 1), ("past_v_1", 1)]),
    ];
    let mut info =
        graph(name, inputs.concat(), tensors(1, [("present_conv_0", 1), ("present_ssm_0", 1)]));
    info.outputs.extend(tensors(rows, [("logits", 3), ("new_k_1", 1), ("new_v_1", 1)]));
    let there = |name: &str| lacking.is_empty() || !name.ends_with(lacking);
    info.inputs.retain(|tensor| there(&tensor.name));
    info.outputs.retain(|tensor| there(&tensor.name));
    info
}

/// `conv` becomes the last token and `ssm` the sum of all. Logits are that sum, `conv` before the step, and the
/// number of positions that a row sees.
fn run(step: &mut Step<'_>) -> Result<()> {
    if step.graph() == "see" {
        return step.set("embeds", &[5.0, 0.0, 6.0, 0.0, 7.0, 0.0, 8.0, 0.0]);
    }
    let (x, mask, valid) = (step.input("x")?, step.input("cmask")?, step.input("valid")?);
    let (conv, mut sum) = (step.input("past_conv_0")?[0], step.input("past_ssm_0")?[0]);
    let keys: Vec<f32> = x.iter().step_by(2).copied().collect();
    let (mut last, mut logits) = (conv, Vec::new());
    for ((key, valid), mask) in keys.iter().zip(&valid).zip(mask.chunks_exact(ROOM + keys.len())) {
        sum += key * valid;
        last = if *valid > 0.0 { *key } else { last };
        logits.extend([sum, conv, mask.iter().filter(|value| **value == 0.0).count() as f32]);
    }
    step.set("present_conv_0", &[last])?;
    step.set("present_ssm_0", &[sum])?;
    step.set("new_k_1", &keys)?;
    step.set("new_v_1", &keys)?;
    step.set("logits", &logits)
}

/// Opens the op over graphs for one token and for eight, whose rotary tables have `pairs` pairs, and `see`.
fn opened(params: Value, pairs: usize, lacking: &str, see: Option<GraphInfo>) -> Result<OpenOp> {
    let vision = see.as_ref().map(|see| &see.name);
    let harness = OpHarness::new()
        .manifest(json!({
            "artifacts": {
                "embed": {"path": "embed", "dtype": "f32"},
                "vision": {"patch_embed": "patch", "patch_embed_bias": "bias", "pos_embed": "places"}
            },
            "params": params,
            "plan": {"params": {"decode": "one", "prefill": "eight", "vision": vision}}
        }))
        .floats("embed", &[0.0, 0.0, 1.0, 0.0, 2.0, 0.0])
        .floats("patch", &[0.0; 6])
        .floats("bias", &[0.0; 2])
        .floats("places", &[0.0; 8])
        .graph(layers("one", 1, pairs, lacking))
        .graph(layers("eight", 8, pairs, lacking))
        .script(run);
    harness.graphs(see).open::<Generate>()
}

fn see<const N: usize>(outputs: [(&str, usize); N]) -> Option<GraphInfo> {
    Some(graph("see", tensors(4, [("x", 2)]), tensors(4, outputs)))
}

/// The parameters of a bundle with images: the angle of a pair is its position.
fn seeing(start: u32) -> Value {
    json!({
        "rotary_dim": 8, "rope_theta": 1.0, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        "image_token_id": 1, "video_token_id": 1, "vision_start_token_id": start, "vision_end_token_id": 2,
        "vision": {"patch_size": 1, "merge_size": 1, "temporal_patch_size": 1}
    })
}

#[test]
fn states_and_cache_go_on_and_come_back_together() {
    let mut op = opened(json!({"n_layers": 2, "rotary_dim": 4}), 2, "", None).unwrap();
    // Two tokens in the graph of eight: the rows behind them get into no state.
    assert_eq!(op.prefill(&[Segment::Tokens(&[1, 2])]).unwrap(), [3.0, 0.0, 2.0]);
    assert_eq!(op.executions("eight"), 1);
    assert_eq!(op.decode(1).unwrap(), [4.0, 2.0, 3.0]);
    let saved = op.snapshot().unwrap();
    op.cancel(true);
    assert_eq!(op.decode(2).unwrap_err().code(), ErrorCode::CANCELLED);
    op.cancel(false);
    assert_eq!(op.decode(2).unwrap(), [6.0, 1.0, 4.0]);
    op.restore(saved).unwrap();
    assert_eq!((op.position(), op.decode(2).unwrap()), (3, vec![6.0, 1.0, 4.0]));
    op.reset().unwrap();
    assert_eq!(op.decode(2).unwrap(), [2.0, 0.0, 1.0]);
}

#[test]
fn a_quarter_of_a_head_turns_unless_the_manifest_says() {
    for params in [
        json!({"head_dim": 16}),
        json!({"head_dim": 8, "partial_rotary_factor": 0.5}),
        json!({"head_dim": 16, "rotary_dim": 4}),
    ] {
        let mut op = opened(params, 2, "", None).unwrap();
        op.prefill(&[Segment::Tokens(&[1, 2, 0])]).unwrap();
        // Two pairs, and the base of the frequencies is ten million.
        let sines = &op.bound("eight", "sin").unwrap()[4..6];
        let expected = [2f32.sin(), (2.0 / 1e7f32.sqrt()).sin()];
        assert!(sines.iter().zip(expected).all(|(s, e)| (s - e).abs() < 1e-6), "{sines:?}");
    }
}

#[test]
fn an_image_stands_in_rows_and_columns_that_take_turns() {
    let mut op = opened(seeing(0), 4, "", see([("embeds", 2)])).unwrap();
    assert_eq!(op.info().placeholders, [1, 1]);
    let logits = op.prefill(&[Segment::Tokens(&[2]), IMAGE, Segment::Tokens(&[0])]).unwrap();
    assert_eq!(logits, [28.0, 0.0, 6.0], "rows of the vision graph stand in the prompt");
    // Time, row, column, time: text, the square, and text behind its longer side.
    let [first, row, column, both] = [[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [2.0, 2.0]]
        .map(|[row, column]| [1.0, row, column, 1.0]);
    let expected = [[0.0; 4], first, row, column, both, [3.0; 4]].concat();
    let expected: Vec<f32> = expected.into_iter().map(f32::sin).collect();
    assert_eq!(op.bound("eight", "sin").unwrap()[..24], expected);
}

#[test]
fn a_bundle_that_does_not_fit_is_refused_by_name() {
    let two = json!({"n_layers": 2, "rotary_dim": 4});
    let deepstack = see([("embeds", 2), ("deepstack_0", 2)]);
    for (found, expected) in [
        (opened(two, 2, "ssm_0", None), "layer 0: the decode graphs (one) lack past_ssm_0"),
        (opened(seeing(0), 4, "", deepstack), "layers of the decoder (deepstack), expected none"),
        (opened(seeing(3), 4, "", see([("embeds", 2)])), "the token 3 around images is outside"),
    ] {
        let error = found.unwrap_err();
        assert!(error.message().contains(expected), "{error}");
    }
    // Text alone needs no tokens for images, and takes none.
    let mut text = opened(json!({"rotary_dim": 4}), 2, "", None).unwrap();
    assert!(text.info().placeholders.is_empty());
    let error = text.prefill(&[IMAGE]).unwrap_err();
    assert!(error.message().starts_with("this bundle takes text only"), "{error}");
}
