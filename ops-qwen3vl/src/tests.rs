//! The op over scripted graphs: a decoder of one layer, and a vision graph that takes four patches.

use std::cell::RefCell;
use std::rc::Rc;

use qhx_op::harness::{OpHarness, OpenOp, graph, tensor, tensors};
use qhx_op::{DType, Error, GraphInfo, Piece, Result, Segment, TensorInfo};
use serde_json::{Value, json};

use crate::Generate;

const PIXELS: [u8; 12] = [0; 12];
/// Four tokens in two rows.
const IMAGE: Segment<'_> = Segment::Image { rgb: &PIXELS, width: 2, height: 2 };

/// Inputs for the deepstack rows of a step.
type Inputs = fn(usize) -> Vec<TensorInfo>;
/// For each step the first values of its deepstack rows, layer by layer.
type Seen = Rc<RefCell<Vec<Vec<f32>>>>;

fn by_layer(rows: usize) -> Vec<TensorInfo> {
    tensors(rows, [("deepstack_0", 2), ("deepstack_1", 2)])
}

fn joined(rows: usize) -> Vec<TensorInfo> {
    vec![tensor("deepstack", DType::F32, [2, rows, 2])]
}

fn layer(name: &str, rows: usize, deepstack: Inputs) -> GraphInfo {
    let inputs = tensors(rows, [("x", 2), ("cos", 4), ("sin", 4), ("cmask", 20 + rows)]);
    let past = tensors(20, [("past_k_0", 1), ("past_v_0", 1)]);
    let outputs = tensors(rows, [("logits", 4), ("new_k_0", 1), ("new_v_0", 1)]);
    graph(name, [inputs, past, deepstack(rows)].concat(), outputs)
}

/// Opens the op over graphs for one token and for four. The angle of a pair is its position; tokens 1 and 2 stand for
/// images and videos, and a step with token 3 fails.
fn opened(scaling: Value, start: u32, deepstack: Inputs, images: bool) -> Result<(OpenOp, Seen)> {
    let seen = Seen::default();
    let steps = seen.clone();
    let rows = tensors(4, [("embeds", 2), ("deepstack_0", 2), ("deepstack_1", 2)]);
    let op = OpHarness::new()
        .manifest(json!({
            "artifacts": {
                "embed": {"path": "embed", "dtype": "f32"},
                "vision": {"patch_embed": "patch", "patch_embed_bias": "bias", "pos_embed": "places"}
            },
            "params": {
                "rotary_dim": 8, "rope_theta": 1.0, "rope_scaling": scaling,
                "image_token_id": 1, "video_token_id": 2, "vision_start_token_id": start, "vision_end_token_id": 0,
                "vision": {"patch_size": 1, "merge_size": 1, "temporal_patch_size": 1}
            },
            "plan": {"params": {"decode": "one", "prefill": "four", "vision": images.then_some("see")}}
        }))
        .floats("embed", &[0.0, 0.0, 1.0, 0.0, 2.0, 0.0, 3.0, 0.0])
        .floats("patch", &[0.0; 6])
        .floats("bias", &[0.0; 2])
        .floats("places", &[0.0; 8])
        .graph(layer("one", 1, deepstack))
        .graph(layer("four", 4, deepstack))
        .graph(graph("see", tensors(4, [("x", 2)]), rows))
        .script(move |step| {
            if step.graph() == "see" {
                let rows = |first: f32| [0.0, 1.0, 2.0, 3.0].map(|row| [first + row, -1.0]).concat();
                step.set("embeds", &rows(5.0))?;
                step.set("deepstack_0", &rows(10.0))?;
                return step.set("deepstack_1", &rows(20.0));
            }
            let layers = ["deepstack", "deepstack_0", "deepstack_1"].map(|name| step.input(name));
            let layers = layers.into_iter().flatten().flatten().collect::<Vec<f32>>();
            steps.borrow_mut().push(layers.into_iter().step_by(2).collect());
            match step.input("x")?.contains(&3.0) {
                true => Err(Error::graph("token 3")),
                false => Ok(()),
            }
        });
    op.open::<Generate>().map(|op| (op, seen))
}

fn sections() -> Value {
    json!({"rope_type": "default", "mrope_section": [2, 1, 1]})
}

#[test]
fn axes_take_turns_unless_the_manifest_puts_them_in_a_row() {
    for (interleaved, axes) in [(None, [0, 1, 2, 0]), (Some(false), [0, 0, 1, 2])] {
        let mut scaling = sections();
        scaling["mrope_interleaved"] = interleaved.into();
        let (mut op, _) = opened(scaling, 0, by_layer, true).unwrap();
        op.prefill(&[Segment::Tokens(&[0, 0, 0]), IMAGE, Segment::Tokens(&[0])]).unwrap();
        // Of the second step: time, row and column of the image's last three tokens, and the text behind it.
        let places: [[f32; 3]; 4] = [[3.0, 3.0, 4.0], [3.0, 4.0, 3.0], [3.0, 4.0, 4.0], [5.0; 3]];
        let angles = places.iter().flat_map(|place| axes.map(|axis| place[axis].sin()));
        assert_eq!(op.bound("four", "sin").unwrap(), angles.collect::<Vec<_>>(), "{axes:?}");
    }
}

#[test]
fn rows_for_the_first_layers_stand_where_the_image_does() {
    for inputs in [by_layer, joined] {
        let (mut op, seen) = opened(sections(), 0, inputs, true).unwrap();
        op.prefill(&[Segment::Tokens(&[0]), IMAGE, Segment::Tokens(&[0, 0, 0])]).unwrap();
        op.prefill(&[Segment::Tokens(&[0; 4])]).unwrap();
        let expected: [[f32; 8]; 3] = [
            [0.0, 10.0, 11.0, 12.0, 0.0, 20.0, 21.0, 22.0],
            [13.0, 0.0, 0.0, 0.0, 23.0, 0.0, 0.0, 0.0],
            [0.0; 8],
        ];
        assert_eq!(*seen.borrow(), expected);
    }
}

#[test]
fn a_prompt_that_failed_leaves_nothing_of_its_image() {
    let (mut op, seen) = opened(sections(), 0, by_layer, true).unwrap();
    let error = op.prefill(&[Segment::Tokens(&[3]), IMAGE]).unwrap_err();
    assert_eq!((error.message(), op.position()), ("token 3", 0));
    op.prefill(&[Segment::Tokens(&[0; 4])]).unwrap();
    assert_eq!(seen.borrow()[1], [0.0; 8]);
    assert_eq!(op.bound("four", "sin").unwrap()[12..], [3f32.sin(); 4], "text counts on");
}

#[test]
fn an_image_stands_between_its_tokens_and_text_has_none_of_them() {
    let (mut op, _) = opened(sections(), 3, by_layer, true).unwrap();
    let place = op.place(IMAGE).unwrap();
    let run = Piece::Part { token: 1, positions: 4, frames: None, part: None };
    assert_eq!((place.marker, place.opening, place.closing), (1, vec![3], vec![0]));
    assert_eq!(place.pieces, [run]);
    let error = op.prefill(&[Segment::Tokens(&[1])]).unwrap_err();
    assert!(error.message().contains("token 1, which stands for an image"), "{error}");
    let (mut text, _) = opened(sections(), 0, by_layer, false).unwrap();
    assert_eq!(text.info().placeholders, [1, 2]);
    assert!(text.prefill(&[IMAGE]).unwrap_err().message().contains("takes text only"));
}

#[test]
fn a_bundle_that_does_not_fit_is_refused_by_name() {
    let one: Inputs = |rows| by_layer(rows)[..1].to_vec();
    let narrow: Inputs = |rows| tensors(rows, [("deepstack_0", 1)]);
    let part: Inputs = |rows| tensors(3 * rows, [("deepstack", 1)]);
    for (scaling, start, inputs, expected) in [
        (
            sections(),
            0,
            one,
            "rows for 2 layers (deepstack), but the graphs that an image's tokens pass take those of 1",
        ),
        (sections(), 0, narrow, "tensor deepstack_0 f32[1, 1]: expected 1 x 2 values"),
        (sections(), 0, part, "tensor deepstack f32[3, 1]: expected whole layers of 1 x 2"),
        (
            sections(),
            4,
            by_layer as Inputs,
            "the token 4 around images is outside the vocabulary of 4",
        ),
        (Value::Null, 0, by_layer, "mrope_section is missing"),
    ] {
        let error = opened(scaling, start, inputs, true).unwrap_err();
        assert!(error.message().contains(expected), "{error}");
    }
}
