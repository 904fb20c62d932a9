//! The decoder and the op for images and texts over scripted graphs. Encoders of text alone: `embed/tests.rs`.

use qhx_op::harness::{OpHarness, OpenOp, graph, tensors};
use qhx_op::{GraphInfo, MASK_VALUE, Result, Segment};
use serde_json::{Value, json};

use crate::{Generate, Siglip};

const ROOM: usize = 9;
const RING: usize = 5;

/// A decoder whose layer 0 sees all positions and whose layer 1 slides.
fn layers(name: &str, rows: usize) -> GraphInfo {
    let inputs = [
        tensors(rows, [("x", 2), ("cmask", ROOM + rows), ("cmask_local", RING + rows)]),
        tensors(rows, [("cos", 2), ("sin", 2), ("cos_local", 2), ("sin_local", 2)]),
        tensors(ROOM, [("past_k_0", 1), ("past_v_0", 1)]),
        tensors(RING, [("past_k_1", 1), ("past_v_1", 1)]),
    ];
    let new = [("new_k_0", 1), ("new_v_0", 1), ("new_k_1", 1), ("new_v_1", 1)];
    let outputs = [tensors(rows, [("logits", 3)]), tensors(rows, new)];
    graph(name, inputs.concat(), outputs.concat())
}

#[test]
fn a_decoder_is_what_its_manifest_declares() {
    let opened = |layers_declared: usize| {
        OpHarness::new()
            .manifest(json!({
                "artifacts": {"embed": {"path": "embed", "dtype": "f32"}},
                "params": {
                    "n_layers": layers_declared, "head_dim": 4, "rope_theta": 100.0, "embed_scale": 3.0,
                    "final_logit_softcapping": 30.0,
                    "local": {"layers": [1], "window": 2, "head_dim": 4, "rope_theta": 4.0}
                },
                "plan": {"params": {"decode": "one", "prefill": "four"}}
            }))
            .floats("embed", &[0.0, 1.0, 1.0, 1.0, 2.0, 1.0])
            .graph(layers("one", 1))
            .graph(layers("four", 4))
            .open::<Generate>()
    };
    let mut op = opened(2).unwrap();
    assert_eq!((op.info().softcap, op.info().max_ctx), (Some(30.0), ROOM));
    op.prefill(&[Segment::Tokens(&[1, 2, 1, 0, 1, 2, 0])]).unwrap();
    assert_eq!(op.executions("four"), 2);
    op.decode(2).unwrap();
    assert_eq!(op.bound("one", "x").unwrap(), [6.0, 3.0]);
    let seen = |name| op.bound("one", name).unwrap().iter().filter(|value| **value == 0.0).count();
    assert_eq!([seen("cmask"), seen("cmask_local")], [8, 2]);
    for (name, slower) in [("sin", 0.7f32), ("sin_local", 3.5)] {
        let sines = op.bound("one", name).unwrap();
        let near =
            sines.iter().zip([7f32, slower]).all(|(s, angle)| (s - angle.sin()).abs() < 1e-5);
        assert!(near, "{name}: {sines:?}");
    }
    let image = Segment::Image { rgb: &[0; 3], width: 1, height: 1 };
    let error = op.prefill(&[image]).unwrap_err();
    assert_eq!(error.message(), "llama_generate takes text only; the prompt has an image");
    let error = opened(3).unwrap_err();
    assert!(
        error.message().contains("layer 2: the decode graphs (one) have no past_k_2"),
        "{error}"
    );
}

/// Opens the op over a graph for texts of three tokens and graphs for images of three and of four patches. A text's
/// vector is its last row, and an image's the red and green of its first patch.
fn siglip(padding: Value, naflex: bool) -> Result<OpenOp> {
    let see = |name, count| {
        let inputs =
            [tensors(count, [("patches", 3), ("positions", 1)]), tensors(1, [("cmask", count)])];
        graph(name, inputs.concat(), tensors(1, [("y", 2)]))
    };
    OpHarness::new()
        .manifest(json!({
            "artifacts": {
                "embed": {"path": "embed", "dtype": "f32"},
                "positions": {"vision": {"path": "positions", "dtype": "f32"}}
            },
            "params": {"padding": padding, "image": {
                "patch": 1, "side": 2, "naflex": naflex, "filter": "bicubic", "mean": [0.0, 0.0, 0.0],
                "std": [1.0, 1.0, 1.0], "scale": 1.0 / 255.0
            }},
            "plan": {"params": {"text": "text", "vision": ["see4", "see3"]}}
        }))
        .floats("embed", &[0.0, 1.0, 3.0, 4.0, 1.0, 0.0])
        .floats("positions", &[0.0, 1.0, 2.0, 3.0])
        .graph(graph("text", tensors(3, [("x", 2)]), tensors(1, [("y", 2)])))
        .graph(see("see3", 3))
        .graph(see("see4", 4))
        .script(|step| match step.graph() {
            "text" => {
                let last = step.input("x")?[4..].to_vec();
                step.set("y", &last)
            }
            _ => {
                let first = step.input("patches")?[..2].to_vec();
                step.set("y", &first)
            }
        })
        .open::<Siglip>()
}

#[test]
fn texts_are_padded_and_images_keep_their_shape() {
    let mut op = siglip(json!({"token": 2}), true).unwrap();
    assert_eq!((op.info().max_ctx, op.info().embedding_dim), (3, 2));
    assert_eq!(op.embed(&[Segment::Tokens(&[0, 1])]).unwrap(), [1.0, 0.0], "padding is last");
    let mut left = siglip(json!({"token": 2, "left": true}), true).unwrap();
    assert_eq!(left.embed(&[Segment::Tokens(&[0, 1])]).unwrap(), [0.6, 0.8], "divided by its norm");
    assert_eq!(left.bound("text", "x").unwrap()[..4], [1.0, 0.0, 0.0, 1.0]);
    let error = op.embed(&[Segment::Tokens(&[1; 4])]).unwrap_err();
    assert!(error.message().contains("4 tokens, the encoder takes at most 3"), "{error}");

    let pixels = [0, 255, 0].repeat(4);
    let wide = Segment::Image { rgb: &pixels[..6], width: 2, height: 1 };
    assert_eq!(op.embed(&[wide]).unwrap(), [0.0, 1.0]);
    assert_eq!(op.bound("see3", "cmask").unwrap(), [0.0, 0.0, MASK_VALUE]);
    // Two columns of the square of positions, each the mean of its rows.
    assert_eq!(op.bound("see3", "positions").unwrap(), [1.0, 2.0, 0.0]);
    op.embed(&[Segment::Image { rgb: &pixels, width: 2, height: 2 }]).unwrap();
    assert_eq!(["see3", "see4"].map(|name| op.executions(name)), [1, 1]);
    let error = op.embed(&[wide, Segment::Tokens(&[1])]).unwrap_err();
    assert!(error.message().contains("an image beside other segments"), "{error}");
    let error = siglip(json!({"token": 3}), true).unwrap_err();
    assert!(error.message().contains("/params/padding/token: found 3"), "{error}");
    let error = siglip(json!({"token": 2}), false).unwrap_err();
    assert!(error.message().contains("graph \"see3\": 3 patches, expected 4"), "{error}");
}
