//! The op over scripted graphs: layer 0 slides over two positions, layer 1 sees all, and layer 2 reads what layer 0
//! has cached. Rows have two values; token t is [t, 1], and twice that after scaling.

use qhx_op::harness::{OpHarness, OpenOp, Step, graph, tensors};
use qhx_op::{Alpha, GraphInfo, Piece, Result, Segment};
use serde_json::{Value, json};

use crate::Generate;

const ROOM: usize = 9;
const RING: usize = 5;

/// Layers 0 and 1. Of a prompt nothing but their caches is needed.
fn own(name: &str, rows: usize) -> GraphInfo {
    let inputs = [
        tensors(rows, [("x", 2), ("ple", 4), ("cmask_f", ROOM + rows), ("cmask_s", RING + rows)]),
        tensors(rows, [("cos_f", 1), ("sin_f", 1), ("cos_s", 1), ("sin_s", 1)]),
        tensors(RING, [("past_k_0", 1), ("past_v_0", 1)]),
        tensors(ROOM, [("past_k_1", 1), ("past_v_1", 1)]),
    ];
    let new = tensors(rows, [("new_k_0", 1), ("new_v_0", 1), ("new_k_1", 1), ("new_v_1", 1)]);
    let y = if rows == 1 { tensors(1, [("y", 2)]) } else { Vec::new() };
    graph(name, inputs.concat(), [new, y].concat())
}

fn graphs() -> Vec<GraphInfo> {
    let last = tensors(1, [("x", 2), ("ple", 2), ("cmask_s", RING + 1), ("row_k_0", 1)]);
    let last = [last, tensors(RING, [("past_k_0", 1)])].concat();
    let mut all = vec![own("own", 1), own("own4", 4)];
    all.push(graph("last", last, tensors(1, [("logits", 3)])));
    for (number, see, hear) in [(4, "see4", "hear4"), (8, "see8", "hear8")] {
        let patches = tensors(number, [("x", 2), ("cos", 2), ("sin", 2)]);
        let patches = [patches, tensors(1, [("cmask", number)])].concat();
        all.push(graph(see, patches, tensors(number, [("y", 2)])));
        let frames = [tensors(number, [("mel", 1)]), tensors(number / 2, [("keep", 1)])].concat();
        all.push(graph(hear, frames, tensors(number / 4, [("y", 2)])));
    }
    all
}

/// Keys are the first values of rows. Logits are x, the key of the last row and the sum of those before in the window.
fn run(step: &mut Step<'_>) -> Result<()> {
    let x = step.input("x").unwrap_or_default();
    match step.graph() {
        "see4" | "see8" => step.set("y", &x),
        "hear4" => step.set("y", &[4.0, 0.0]),
        "hear8" => step.set("y", &[4.0, 0.0, 0.0, -1.0]),
        "last" => {
            let (mask, past) = (step.input("cmask_s")?, step.input("past_k_0")?);
            let seen = past.iter().zip(&mask).filter(|(_, mask)| **mask == 0.0);
            let sum = seen.map(|(key, _)| key).sum();
            let row = step.input("row_k_0")?[0];
            step.set("logits", &[x[0], row, sum])
        }
        "project" => step.set("context", &[1.0; 6]),
        "project4" => step.set("context", &[1.0; 16]),
        _ => {
            let keys: Vec<f32> = x.iter().step_by(2).copied().collect();
            ["k_0", "v_0", "k_1", "v_1"]
                .iter()
                .try_for_each(|one| step.set(&format!("new_{one}"), &keys))?;
            step.set("y", &x).or(Ok(()))
        }
    }
}

fn opened(edit: impl FnOnce(&mut Value, &mut Vec<GraphInfo>)) -> Result<OpenOp> {
    let file = |path: &str| json!({"path": path, "dtype": "f32"});
    let front_end = json!({
        "rate": 8, "frame": 4, "hop": 4, "fft": 4, "span": 4, "window": "periodic_hann", "spectrum": "power",
        "filters": {"mels": 1, "min_hz": 0.0, "max_hz": 4.0, "scale": "htk"}, "log": {"ln_add": 1.0}
    });
    let mut manifest = json!({
        "artifacts": {
            "embed": file("embed"),
            "ple": {"table": file("table"), "proj": file("weights"), "norm": file("norm")},
            "vision": {"patch_embed": file("patch"), "pos_table": file("places"), "proj": file("proj")},
            "audio": {"proj": file("proj")}
        },
        "params": {
            "n_layers": 3, "kv_shared_layers": 1, "embed_scale": 2.0, "final_logit_softcapping": 30.0,
            "full": {"head_dim": 2, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "sliding": {"head_dim": 2, "layers": [0, 2], "window": 2},
            "ple": {"width": 2, "pad_token_id": 0, "eps": 1e-6},
            "vision": {
                "hidden": 2, "patch_size": 1, "pooling_kernel_size": 2, "head_dim": 4, "rope_theta": 100.0,
                "position_embedding_size": 4, "max_soft_tokens": 2, "eps": 1e-6,
                "token_id": 2, "begin_token_id": 1, "end_token_id": 0
            },
            "audio": {
                "width": 2, "max_soft_tokens": 2, "eps": 1e-6, "front_end": front_end,
                "token_id": 1, "begin_token_id": 0, "end_token_id": 2
            }
        },
        "plan": {"params": {
            "decode": ["own", "last"], "prefill": "own4", "vision": ["see8", "see4"], "audio_enc": ["hear8", "hear4"]
        }}
    });
    let mut all = graphs();
    edit(&mut manifest, &mut all);
    let table: Vec<f32> = (0..3).flat_map(|token| (0..6).map(move |at| entry(token, at))).collect();
    let weights: Vec<f32> = (1..=6u8).flat_map(|row| [f32::from(row), 1.0]).collect();
    let op = OpHarness::new()
        .manifest(manifest)
        .floats("embed", &[0.0, 1.0, 1.0, 1.0, 2.0, 1.0])
        .floats("table", &table)
        .floats("weights", &weights)
        .floats("norm", &[1.0, 2.0])
        .floats("patch", &[1.0, 0.0, 0.0, 0.0, 1.0, 0.0])
        .floats("places", &[0.0; 16])
        .floats("proj", &[3.0, 0.0, 0.0, 5.0])
        .script(run);
    op.graphs(all).open::<Generate>()
}

fn entry(token: u32, at: usize) -> f32 {
    (10 * token) as f32 + at as f32
}

/// Per-layer inputs of a token whose row is x.
fn per_layer(x: [f32; 2], token: u32) -> Vec<f32> {
    let sum = |at: usize| ((at + 1) as f32 * x[0] + x[1]) / 2f32.sqrt();
    let value = |at: usize| {
        let layer = [at / 2 * 2, at / 2 * 2 + 1].map(|at| sum(at).powi(2));
        let normal = sum(at) / ((layer[0] + layer[1]) / 2.0 + 1e-6).sqrt() * [1.0, 2.0][at % 2];
        (normal + 2f32.sqrt() * entry(token, at)) / 2f32.sqrt()
    };
    (0..6).map(value).collect()
}

#[track_caller]
fn close(found: &[f32], expected: &[f32]) {
    let near = found.iter().zip(expected).all(|(f, e)| (f - e).abs() < 1e-4);
    assert!(near && found.len() == expected.len(), "{found:?}, expected {expected:?}");
}

#[test]
fn each_layer_gets_its_own_inputs_of_a_token() {
    let mut op = opened(|_, _| {}).unwrap();
    op.decode(2).unwrap();
    let all = per_layer([4.0, 2.0], 2);
    close(&op.bound("own", "ple").unwrap(), &all[..4]);
    close(&op.bound("last", "ple").unwrap(), &all[4..]);
    // Graphs that project give what the host adds the table to.
    let project =
        |name, rows, all| graph(name, tensors(rows, [("x", 2)]), tensors(rows, [("context", all)]));
    let mut op = opened(|manifest, graphs| {
        manifest["plan"]["params"]["ple"] = json!(["project4", "project"]);
        graphs.extend([project("project", 1, 6), project("project4", 4, 4)]);
    })
    .unwrap();
    op.prefill(&[Segment::Tokens(&[1, 2, 1])]).unwrap();
    let value = |token, at| (1.0 + 2f32.sqrt() * entry(token, at)) / 2f32.sqrt();
    close(&op.bound("own4", "ple").unwrap()[4..8], &[0, 1, 2, 3].map(|at| value(2, at)));
    close(&op.bound("last", "ple").unwrap(), &[4, 5].map(|at| value(1, at)));
    close(&op.bound("project4", "x").unwrap()[..4], &[2.0, 2.0, 4.0, 2.0]);
    assert_eq!(["project", "project4"].map(|name| op.executions(name)), [1, 1]);
}

#[test]
fn sliding_layers_have_a_window_and_share_their_cache() {
    let mut op = opened(|_, _| {}).unwrap();
    let info = op.info();
    assert_eq!((info.softcap, info.max_ctx, info.media.image.upright), (Some(30.0), ROOM, false));
    assert_eq!(info.media.image.alpha, Alpha::Drop);
    let refusal = info.verification.refusal.as_deref().unwrap();
    assert!(refusal.contains("`qhx forge --recipe-option verify=8` makes graphs"), "{refusal}");
    // Only the last token of a prompt passes the layer that writes no cache.
    let logits = op.prefill(&[Segment::Tokens(&[2, 1, 2, 1, 2, 0])]).unwrap();
    assert_eq!(logits, [0.0, 0.0, 4.0], "the key before, of a window of two");
    assert_eq!((op.executions("last"), op.decode(1).unwrap()), (1, vec![2.0, 2.0, 0.0]));
    let seen = |name| op.bound("own", name).unwrap().iter().filter(|value| **value == 0.0).count();
    assert_eq!([seen("cmask_f"), seen("cmask_s")], [7, 2]);
    let sines = ["sin_f", "sin_s"].map(|name| op.bound("own", name).unwrap()[0]);
    assert_eq!(sines, [3f32.sin(), 6f32.sin()]);
}

#[test]
fn an_image_becomes_rows_of_the_smallest_graph() {
    let mut op = opened(|_, _| {}).unwrap();
    let pixels = [[255, 0, 0], [255, 0, 0], [0, 255, 0], [0, 255, 0]].concat().repeat(2);
    let wide = Segment::Image { rgb: &pixels, width: 4, height: 2 };
    let part = Piece::Part { token: 2, positions: 2, frames: None, part: None };
    let place = op.place(wide).unwrap();
    assert_eq!(place.pieces, [Piece::Tokens(vec![1]), part, Piece::Tokens(vec![0])]);
    op.prefill(&[Segment::Tokens(&[1]), wide, Segment::Tokens(&[1])]).unwrap();
    // Red and green, which the projector multiplies by 3 and 5; the table's row is that of padding.
    close(&op.bound("own4", "x").unwrap(), &[2.0, 2.0, 3.0, -5.0, -3.0, 5.0, 0.0, 0.0]);
    close(&op.bound("own4", "ple").unwrap()[4..8], &per_layer([3.0, -5.0], 0)[..4]);
    let square = Segment::Image { rgb: &pixels[..12], width: 2, height: 2 };
    op.prefill(&[square]).unwrap();
    assert_eq!(["see4", "see8"].map(|name| op.executions(name)), [1, 1]);
    let mut small =
        opened(|manifest, _| manifest["plan"]["params"]["vision"] = "see4".into()).unwrap();
    let error = small.place(wide).unwrap_err();
    assert!(error.message().contains("take 4 at most; forge it with image-patches=8"), "{error}");
    assert!(small.prefill(&[wide]).is_err());
    assert_eq!(small.position(), 0);
}

#[test]
fn audio_becomes_rows_of_the_frames_that_are_there() {
    let mut op = opened(|_, _| {}).unwrap();
    let clip = |count: usize| Segment::Audio { samples: &[0.5; 40][..count], rate: 8 };
    op.prefill(&[Segment::Tokens(&[1]), clip(20), Segment::Tokens(&[1])]).unwrap();
    assert_eq!(op.bound("hear8", "keep").unwrap(), [1.0, 1.0, 1.0, 0.0], "five frames");
    let mel = op.bound("hear8", "mel").unwrap();
    assert!(mel[..5].iter().all(|value| *value > 0.0) && mel[5..] == [0.0; 3], "{mel:?}");
    let root = 2f32.sqrt();
    close(&op.bound("own4", "x").unwrap()[2..6], &[3.0 * root, 0.0, 0.0, -5.0 * root]);
    op.prefill(&[clip(12)]).unwrap();
    assert_eq!(["hear4", "hear8"].map(|name| op.executions(name)), [1, 1]);
    let error = op.place(clip(40)).unwrap_err();
    assert!(error.message().contains("3 soft tokens, the bundle takes 2 (4.0 s)"), "{error}");
    assert!(op.place(clip(3)).unwrap_err().message().contains("shorter than one frame"));
    let deaf = opened(|manifest, _| manifest["plan"]["params"]["audio_enc"] = Value::Null);
    assert!(deaf.unwrap().place(clip(20)).unwrap_err().message().contains("takes no audio"));
}

#[test]
fn layers_that_do_not_fit_are_refused_by_name() {
    type Edit = fn(&mut Value, &mut Vec<GraphInfo>);
    let without_values: Edit = |_, graphs| {
        for graph in &mut graphs[..2] {
            graph.inputs.retain(|tensor| tensor.name != "past_v_0");
            graph.outputs.retain(|tensor| tensor.name != "new_v_0");
        }
    };
    let cases: [(Edit, &str); 6] = [
        (|m, _| m["params"]["kv_shared_layers"] = 3.into(), "3 of 3 layers read the keys"),
        (|m, _| m["params"]["kv_shared_layers"] = 2.into(), "(own, last) have past_k_1"),
        (without_values, "layer 0, the donor of 2: the decode graphs (own, last) have no past_v_0"),
        (|m, _| m["params"]["ple"]["pad_token_id"] = 3.into(), "expected a token below 3"),
        (
            |_, graphs| graphs[0].inputs[1] = tensors(1, [("ple", 2)]).remove(0),
            "take per-layer inputs (ple) for 2 layers, expected 3",
        ),
        (
            |m, _| m["artifacts"]["audio"]["proj"]["dtype"] = "f16".into(),
            "/artifacts/audio/proj/dtype: expected f32, found f16",
        ),
    ];
    for (edit, expected) in cases {
        let error = opened(edit).unwrap_err();
        assert!(error.message().contains(expected), "{error}");
    }
}
